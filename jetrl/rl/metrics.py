"""What a step is judged by: agreement of rollout and trainer, accuracy, and the shape of the batch.

The mismatch compares the two log-probabilities of each sampled token as bits and as numbers. Microbatches are measured
one by one and added. A NaN on either side counts as infinitely different, so it can never pass for agreement.
Metrics are plain floats under the names that `metrics.jsonl` and the report use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.rl.types import Rollout

DIFF_BOUND = 20.0  # |trainer - rollout| is clamped to this before exp in the k3 estimate: exp(20) = 4.9e8


@dataclass(slots=True)
class Mismatch:
    """Sums over tokens, d = trainer - rollout logprob. Add those of all microbatches, in order, then call `finish`."""

    max_diff: float = 0.0  # max |d|; inf if a logprob is NaN
    sum_diff: float = 0.0  # sum of |d|
    sum_k3: float = 0.0  # sum of exp(d) - 1 - d: estimates KL(rollout || trainer)
    differing: int = 0  # tokens whose 32 bits differ, or that are NaN
    tokens: int = 0
    first: int | None = None  # index of the first differing token, counted over all added microbatches

    @property
    def exact(self) -> bool:
        """No token differs in any bit."""
        return self.differing == 0

    def __add__(self, other: Mismatch) -> Mismatch:
        later = None if other.first is None else self.tokens + other.first
        return Mismatch(
            max(self.max_diff, other.max_diff), self.sum_diff + other.sum_diff, self.sum_k3 + other.sum_k3,
            self.differing + other.differing, self.tokens + other.tokens, later if self.first is None else self.first,
        )  # fmt: skip

    def finish(self) -> dict[str, float]:
        """Metrics of the batch. Without tokens all are 0, and `token_diff/tokens` says that nothing was measured."""
        n = max(self.tokens, 1)
        return {
            "logprob_diff/max": self.max_diff,
            "logprob_diff/mean": self.sum_diff / n,
            "token_diff/share": self.differing / n,
            "token_diff/tokens": float(self.tokens),
            "mismatch_kl": self.sum_k3 / n,
        }


def mismatch(rollout_logprobs: Tensor, trainer_logprobs: Tensor) -> Mismatch:
    """Compare [T] float32 with [T] float32. Raises ValueError for other dtypes and for unequal shapes."""
    a, b = rollout_logprobs.detach(), trainer_logprobs.detach()
    if a.dtype != torch.float32 or b.dtype != torch.float32 or a.shape != b.shape or a.dim() != 1:
        raise ValueError(
            f"rollout logprobs are {a.dtype} {list(a.shape)} and trainer logprobs {b.dtype} {list(b.shape)}; "
            "both must be float32 of one shape [T]: bits can be compared only before any conversion"
        )
    if not len(a):
        return Mismatch()
    differs = (a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)) | a.isnan() | b.isnan()
    d = torch.where(differs, b.double() - a.double(), 0.0)  # so that -inf on both sides is agreement
    d = torch.where(d.isnan(), math.inf, d)
    bounded = d.clamp(-DIFF_BOUND, DIFF_BOUND)
    k3 = torch.expm1(bounded) - bounded
    values = [d.abs().amax(), d.abs().sum(), k3.sum(), differs.sum(), differs.int().argmax()]
    largest, total, total_k3, differing, first = torch.stack([v.double() for v in values]).tolist()
    return Mismatch(largest, total, total_k3, int(differing), len(a), int(first) if differing else None)


def avg_at_k(correct: Sequence[Sequence[bool]]) -> float:
    """avg@k: mean over prompts of the share of right samples; correct[prompt][sample]. ValueError if there are none."""
    _check_samples(correct, 1)
    return sum(sum(samples) / len(samples) for samples in correct) / len(correct)


def pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float:
    """pass@k: mean over prompts of the chance that k of the n samples, drawn without replacement, hold a right one.

    Unbiased: 1 - C(n - c, k) / C(n, k) for c right of n samples. ValueError if a prompt has fewer than k samples.
    """
    _check_samples(correct, k)
    misses = (math.comb(len(samples) - sum(samples), k) / math.comb(len(samples), k) for samples in correct)
    return sum(1.0 - miss for miss in misses) / len(correct)


def _check_samples(correct: Sequence[Sequence[bool]], k: int) -> None:
    fewest = min((len(samples) for samples in correct), default=0)
    if k < 1 or fewest < k:
        raise ValueError(f"k is {k}, the fewest samples of {len(correct)} prompts are {fewest}; want 1 <= k <= samples")


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Statistics of the rollouts of one step. Lengths are completion tokens; std is the population's.

    accuracy/* and length/truncated are shares of the rollouts, grade/errors and advantage/zero_groups are counts.
    Raises ValueError if there are no rollouts.
    """
    n = len(rollouts)
    if not n:
        raise ValueError("no rollouts to describe; a step needs at least one")
    rewards = [r.grade.reward for r in rollouts]
    lengths = [len(r.completion.token_ids) for r in rollouts]
    mean = math.fsum(rewards) / n
    groups = {r.group for r in rollouts}
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((x - mean) ** 2 for x in rewards) / n),
        "accuracy/train": sum(r.grade.correct for r in rollouts) / n,
        "accuracy/unparsed": sum(not r.grade.parsed for r in rollouts) / n,
        "grade/errors": float(sum(r.grade.error is not None for r in rollouts)),
        "length/mean": sum(lengths) / n,
        "length/max": float(max(lengths)),
        "length/truncated": sum(r.completion.finish_reason == "length" for r in rollouts) / n,
        "advantage/zero_groups": float(len(groups - {r.group for r in rollouts if r.advantage != 0.0})),
    }
