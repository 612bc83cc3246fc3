"""The policy loss, as one weighted sum over tokens.

    batch loss = sum over tokens t of  weight_t * (-importance_t * min(ratio_t A_t, clip(ratio_t) A_t) + kl_coef k3_t)

    ratio_t = exp(trainer_logprob - behavior_logprob)      clip to [1 - clip_low, 1 + clip_high]
    k3_t    = exp(d) - 1 - d,  d = reference_logprob - trainer_logprob

All averaging sits in the weights, which `token_weights` derives from the whole batch of one optimizer step before it is
split. Microbatches and ranks therefore only ADD their losses and gradients (sum over ranks, never the mean), and the
gradient cannot depend on the split. If every sequence is masked the weights are 0, not 0/0.

Numbers: logprobs come as float32 and every term is computed and summed in float64. That costs nothing beside a forward
pass; the gradient of a token is then its exact value rounded once to float32, the same bits in every split, and the sum
of a million terms agrees between splits to about 1e-13. In an exact flow the first update has a log-ratio of exactly
0.0, a ratio of exactly 1.0, and the gradient of REINFORCE.

The log-ratio is clamped to +-LOG_RATIO_BOUND before exp, so that neither value nor gradient can be inf or NaN. Given
up: a token beyond the bound (a ratio of 4.9e8 or its inverse) has no policy gradient; it is counted as `bounded`. In k3
only the upper side is clamped, since the lower side is linear and its pull towards the reference should stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8


def token_weights(
    kind: Literal["token_mean", "sequence_mean", "dr_grpo"],
    lengths: Sequence[int],
    include: Sequence[bool],
    max_tokens: int,
) -> list[float]:
    """The weight of each token of sequence i, for all sequences of one optimizer step.

    token_mean     1 / (tokens of all included sequences)
    sequence_mean  1 / (included sequences that have tokens * length_i)
    dr_grpo        1 / (all sequences * max_tokens): a constant, whatever was sampled, masked or not

    lengths: completion tokens; include: False takes a sequence out (weight 0), as truncated ones under mask_truncated;
    max_tokens: the completion limit, used by dr_grpo alone. Example: lengths [2, 6] give 1/8, 1/8 by token_mean and
    1/4, 1/12 by sequence_mean. Raises ValueError for unequal counts, a negative length or max_tokens below 1.
    """
    if len(lengths) != len(include):
        raise ValueError(f"{len(lengths)} lengths but {len(include)} include flags; give one of each per sequence")
    if max_tokens < 1 or min(lengths, default=0) < 0:
        raise ValueError(f"max_tokens is {max_tokens}, want 1 or more; lengths {list(lengths)}, want none negative")
    counted = [n if keep else 0 for n, keep in zip(lengths, include, strict=True)]
    if kind == "token_mean":
        total = sum(counted)
        return [1 / total if n else 0.0 for n in counted]
    if kind == "sequence_mean":
        sequences = sum(n > 0 for n in counted)
        return [1 / (sequences * n) if n else 0.0 for n in counted]
    if kind == "dr_grpo":
        return [1 / (len(lengths) * max_tokens) if n else 0.0 for n in counted]
    raise ValueError(f"loss kind is {kind!r}; use 'token_mean', 'sequence_mean' or 'dr_grpo'")


@dataclass(slots=True)
class LossStats:
    """Sums over tokens; add those of all microbatches and ranks, then `finish`. Masked tokens are counted apart."""

    loss: float = 0.0  # weighted: the batch loss
    policy: float = 0.0  # weighted: its part without KL
    kl: float = 0.0  # sum of k3 to the reference
    ratio: float = 0.0  # sum of importance ratios
    clipped_low: int = 0  # tokens where 1 - clip_low takes the gradient away (advantage < 0)
    clipped_high: int = 0  # tokens where 1 + clip_high does (advantage > 0)
    bounded: int = 0  # tokens whose log-ratio lies beyond LOG_RATIO_BOUND
    tokens: int = 0  # tokens with a weight
    masked: int = 0  # tokens of weight 0

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def finish(self) -> dict[str, float]:
        """Metrics of the batch: losses as they are, everything else per counted token (0 if there is none)."""
        n = max(self.tokens, 1)
        return {
            "loss/total": self.loss,
            "loss/policy": self.policy,
            "loss/kl": self.kl / n,
            "ratio/mean": self.ratio / n,
            "ratio/clipped_low": self.clipped_low / n,
            "ratio/clipped_high": self.clipped_high / n,
            "ratio/bounded_tokens": float(self.bounded),
            "loss/masked_tokens": float(self.masked),
            "loss/all_masked": float(self.tokens == 0),
        }


def policy_loss(
    trainer_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    importance: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, LossStats]:
    """The loss of one microbatch (a float64 scalar to call backward on; losses of microbatches add up) and its stats.

    All tensors are [T], one value per completion token, on one device; only `trainer_logprobs` gets a gradient.
    importance: factors of the policy term, from `truncated_importance`. A NaN logprob gives a NaN loss: the
    trainer must skip the step. Raises ValueError for unequal shapes (none broadcasts) and a kl_coef without reference.
    """
    tokens = TokenInputs(behavior_logprobs, advantages, weights, importance, reference_logprobs)
    t = _terms(trainer_logprobs, tokens, clip_low, clip_high, kl_coef)
    totals = [torch.where(t.counted, x, 0.0).sum() for x in (t.k3, t.ratio)]
    counts = [x.sum() for x in (t.low & t.counted, t.high & t.counted, t.bounded, t.counted)]
    sums = [t.loss, t.policy, *totals, *counts]
    values = torch.stack([s.detach().double() for s in sums]).tolist()  # one transfer, so one wait for the device
    return t.loss, LossStats(*values[:4], *(int(v) for v in values[4:]), masked=len(weights) - int(values[-1]))


def policy_slope(
    trainer_logprobs: Tensor, tokens: TokenInputs, clip_low: float, clip_high: float, kl_coef: float = 0.0
) -> Tensor:
    """The derivative of `policy_loss` by each log-probability, float32 [T], without waiting for the device.

    Each token's depends on that token alone, so a part of the batch can be asked about before the rest is known.
    """
    with torch.enable_grad():
        logprobs = trainer_logprobs.detach().requires_grad_()
        return torch.autograd.grad(_terms(logprobs, tokens, clip_low, clip_high, kl_coef).loss, logprobs)[0]


@dataclass(slots=True, frozen=True)
class TokenInputs:
    """What the loss knows of each completion token besides its log-probability, [T] each; see `policy_loss`."""

    behavior: Tensor
    advantages: Tensor
    weights: Tensor
    importance: Tensor | None = None
    reference: Tensor | None = None

    def part(self, part: slice) -> TokenInputs:
        """Those of some of the tokens."""
        return self.each(lambda x: x[part])

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenInputs:
        """Every tensor changed, moved to a device for instance."""
        optional = (None if x is None else change(x) for x in (self.importance, self.reference))
        return TokenInputs(change(self.behavior), change(self.advantages), change(self.weights), *optional)


@dataclass(slots=True, frozen=True)
class _Terms:
    """The loss, and what its statistics are made of: [T] each but the first two."""

    loss: Tensor
    policy: Tensor
    k3: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor
    bounded: Tensor
    counted: Tensor


def _terms(trainer_logprobs: Tensor, tokens: TokenInputs, clip_low: float, clip_high: float, kl_coef: float) -> _Terms:
    _check_shapes(trainer_logprobs, behavior=tokens.behavior, advantages=tokens.advantages, weights=tokens.weights)
    _check_shapes(trainer_logprobs, importance=tokens.importance, reference=tokens.reference)
    if kl_coef and tokens.reference is None:
        raise ValueError(f"kl_coef is {kl_coef} but there are no reference_logprobs; pass them, or set kl_coef to 0")
    logprobs, advantage, weight = (
        trainer_logprobs.double(),
        tokens.advantages.detach().double(),
        tokens.weights.detach().double(),
    )
    log_ratio = logprobs - tokens.behavior.detach().double()
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    low, high = (advantage < 0) & (ratio < 1 - clip_low), (advantage > 0) & (ratio > 1 + clip_high)
    # The minimum of the two products, with one branch per token: torch.minimum splits the gradient of a tie.
    surrogate = torch.where(low, 1 - clip_low, torch.where(high, 1 + clip_high, ratio)) * advantage
    if tokens.importance is not None:
        surrogate = surrogate * tokens.importance.detach().double()
    policy = loss = -(weight * surrogate).sum()
    k3 = torch.zeros_like(ratio)
    if tokens.reference is not None:
        d = (tokens.reference.detach().double() - logprobs).clamp(max=LOG_RATIO_BOUND)
        k3 = torch.expm1(d) - d
        if kl_coef:
            loss = loss + kl_coef * (weight * k3).sum()
    counted = weight != 0
    bounded = counted & (log_ratio.abs() > LOG_RATIO_BOUND)
    return _Terms(loss, policy, k3, ratio, low, high, bounded, counted)


def truncated_importance(trainer_logprobs_at_rollout: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """min(exp(trainer - rollout), cap) per token: [T], [T] -> [T] float32 without gradient.

    Corrects for a rollout that sampled from other probabilities than the trainer's at equal weights (flow fp8_rollout).
    Raises ValueError for unequal shapes and a cap that is not positive.
    """
    _check_shapes(trainer_logprobs_at_rollout, rollout=rollout_logprobs)
    if not cap > 0:
        raise ValueError(f"importance cap is {cap}; a positive number is wanted, for instance 2.0")
    diff = trainer_logprobs_at_rollout.detach().double() - rollout_logprobs.detach().double()
    return diff.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=cap).float()


def _check_shapes(trainer: Tensor, **others: Tensor | None) -> None:
    if trainer.dim() != 1:
        raise ValueError(f"trainer logprobs have shape {list(trainer.shape)}; want [T]")
    for name, other in others.items():
        if other is not None and other.shape != trainer.shape:
            raise ValueError(f"{name} has shape {list(other.shape)}, the trainer logprobs {list(trainer.shape)}; want equal")
