"""How much better a completion is than its group: the only learning signal of GRPO.

All completions of one prompt form a group, and the group's mean is the baseline, so no value network is needed:

    grpo     A = (r - mean) / std      std over the group, divided by the group size (population)
    dr_grpo  A = r - mean              no division: easy and hard prompts keep their own scale

Rewards often are floats that should be equal and are not quite (0.1 + 0.2 against 0.3). Divided by their own tiny
deviation they would become full-size advantages, so a group whose spread is at most `EQUAL` counts as equal and gets
exact zeros. Mean and deviation are taken in float64 in two passes (centre, then square): the one-pass form
mean(r^2) - mean(r)^2 cancels for rewards such as 0.35 and 0.4. Given up: rewards whose whole scale is below 1e-6.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EQUAL = 1e-6  # largest max - min of an "equal" group, relative to max(1, largest |reward|)
LARGEST = 1e30  # larger rewards would overflow float32 advantages


def group_advantages(rewards: Tensor, kind: Literal["grpo", "dr_grpo"]) -> Tensor:
    """Rewards [groups, group_size], any real dtype -> advantages [groups, group_size] float32, on the same device.

    Equal rewards, and a group of one, give exactly 0. Raises ValueError for another shape or kind, and for a reward
    that is not finite or exceeds 1e30 in magnitude.
    """
    if kind not in ("grpo", "dr_grpo"):
        raise ValueError(f"advantage kind is {kind!r}; use 'grpo' or 'dr_grpo'")
    if rewards.dim() != 2 or rewards.shape[1] == 0:
        raise ValueError(f"rewards have shape {list(rewards.shape)}; [groups, group_size of 1 or more] is wanted")
    r = rewards.detach().double()
    bad = torch.nonzero(~(r.abs() <= LARGEST))  # the negation also catches NaN
    if len(bad):
        group, member = bad[0].tolist()
        raise ValueError(
            f"reward {float(r[group, member])} of completion {member} in group {group} ({len(bad)} such): rewards "
            f"must be finite and at most {LARGEST:g} in magnitude. Let the grader count it as an error with reward 0."
        )
    centred = r - r.mean(dim=1, keepdim=True)
    if kind == "grpo":
        deviation = centred.square().mean(dim=1, keepdim=True).sqrt()
        centred = centred / torch.where(deviation > 0, deviation, 1.0)
    spread = r.amax(dim=1, keepdim=True) - r.amin(dim=1, keepdim=True)
    equal = spread <= EQUAL * r.abs().amax(dim=1, keepdim=True).clamp(min=1.0)
    return torch.where(equal, 0.0, centred).float()


def zero_advantage_groups(advantages: Tensor) -> int:
    """Number of groups in advantages [groups, group_size] that teach nothing: every advantage is 0."""
    return int((advantages == 0).all(dim=1).sum())
