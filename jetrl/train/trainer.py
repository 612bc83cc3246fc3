"""The trainer: from rollouts to gradients, and from gradients to a new policy version.

    accumulate   forward and backward over microbatches packed by token budget. The weights of the loss come from the whole
                 batch and weight gradients add up in float64, so the split into microbatches does not change the result.
                 The forward's log-probabilities are compared with the rollout's on the way: the mismatch costs nothing. The
                 loss is asked for its slope as soon as some log-probabilities are there, so that logits are made once.
    apply        clip, AdamW; give the gradients' memory back, for the rollout's KV cache; publish.

In an exact flow the rollout's log-probabilities are the trainer's own: no second forward for "old" ones, no importance
correction. In `fp8_rollout` they are not, so `old_logprobs` recomputes them before the first update of a batch.

Deviation from the paper: gradients accumulate in float64 on a CPU (FP32 on an accelerator).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.config import AlgorithmConfig, OptimizerConfig
from jetrl.model.config import training_flops
from jetrl.model.context import send
from jetrl.model.transformer import Transformer
from jetrl.rl.loss import LossStats, TokenInputs, policy_loss, policy_slope, token_weights, truncated_importance
from jetrl.rl.metrics import Mismatch, mismatch
from jetrl.rl.packing import Packed, build, input_length, pack
from jetrl.rl.types import Rollout
from jetrl.train.optim import MASTER_DTYPES, Optimizer, learning_rate
from jetrl.train.publish import publish


@dataclass(slots=True)
class Accumulated:
    """What one `accumulate` saw."""

    loss: LossStats
    mismatch: Mismatch
    first_difference: tuple[int, int] | None  # rollout index, completion token
    entropy: float  # mean over completion tokens, nats
    tokens: int  # prompt and completion tokens of the forward
    flops: float  # see `training_flops`


@dataclass(slots=True, frozen=True)
class Objective:
    """What is optimised, fixed for the run."""

    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    temperature: float
    max_tokens: int  # completion limit, the divisor of the dr_grpo loss
    updates: int  # optimizer steps of the whole run, for the schedule
    recompute_layers: int = 0  # see `Transformer.forward`
    seed: int = 0  # of stochastic rounding


class Trainer:
    """Owns the masters. `model` is the training forward; `others` are models that are published too (fp8_rollout)."""

    def __init__(
        self,
        model: Transformer,
        weights: dict[str, Tensor],
        objective: Objective,
        others: Sequence[Transformer] = (),
        reference: Transformer | None = None,
    ) -> None:
        """`weights`: the initial BF16 tensors, loaded into the models here. `reference`: the KL's, already loaded."""
        self.model, self.objective, self.reference = model, objective, reference
        dtype = MASTER_DTYPES[objective.optimizer.masters]
        self.masters = {name: tensor.to(model.device, dtype, copy=True).requires_grad_() for name, tensor in weights.items()}
        self.optimizer = Optimizer(self.masters, objective.optimizer, objective.seed)
        self.policy_version = 0
        self.published_models = [model, *others]
        publish(self.masters, self.published_models)

    def old_logprobs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """The present policy's log-probabilities of each rollout's completion, float32 [n], by a forward without gradients."""
        result = [torch.empty(0)] * len(rollouts)
        for packed in self._microbatches(rollouts, [0.0] * len(rollouts)):
            logprobs = self._logprobs(self.model, packed)
            for index, part in zip(packed.rollouts, _by_sequence(packed, logprobs), strict=True):
                result[index] = part
        return result

    def accumulate(self, rollouts: Sequence[Rollout], old_logprobs: Sequence[Tensor] | None = None) -> Accumulated:
        """Add the gradients of one batch. `old_logprobs`, if given, replace the rollout's as the behaviour policy's."""
        algorithm = self.objective.algorithm
        include = [not (algorithm.mask_truncated and r.completion.finish_reason == "length") for r in rollouts]
        lengths = [len(r.completion.token_ids) for r in rollouts]
        weights = token_weights(algorithm.loss, lengths, include, self.objective.max_tokens)
        total = Accumulated(LossStats(), Mismatch(), None, 0.0, 0, 0.0)
        for leaf in self.model.leaves.values():
            if leaf.grad is None:
                leaf.grad = torch.zeros(leaf.shape, dtype=self.model.ops.gradient_dtype, device=self.model.device)
        for packed in self._microbatches(rollouts, weights):
            self._accumulate_packed(packed, old_logprobs, total)
        total.entropy /= max(1, sum(lengths))
        return total

    def apply(self) -> dict[str, float]:
        """One optimizer step from the accumulated gradients, then publish. Returns `grad_norm`, `lr`, `optimizer/skipped`."""
        lr = learning_rate(self.objective.optimizer, self.optimizer.steps + 1, self.objective.updates)
        skipped = self.optimizer.skipped
        norm = self.optimizer.step(self._gradients(), lr)
        self.discard()
        self.policy_version += 1
        publish(self.masters, self.published_models)
        return {"grad_norm": norm, "lr": lr, "optimizer/skipped": float(self.optimizer.skipped - skipped)}

    def discard(self) -> None:
        """Forget the accumulated gradients, and free their memory."""
        for leaf in self.model.leaves.values():
            leaf.grad = None

    def _gradients(self) -> dict[str, Tensor]:
        return {name: leaf.grad for name, leaf in self.model.leaves.items() if leaf.grad is not None}

    def _microbatches(self, rollouts: Sequence[Rollout], weights: Sequence[float]) -> list[Packed]:
        split = pack([input_length(r) for r in rollouts], self.objective.optimizer.microbatch_tokens)
        batches = (build(rollouts, indices, weights) for indices in split)
        return [packed for packed in batches if packed.rollouts]

    def _hidden(self, model: Transformer, packed: Packed) -> Tensor:
        """Final hidden states of the rows that predict completion tokens."""
        context = model.packed(packed.cu_seqlens.diff().tolist())
        hidden = model.forward(packed.token_ids, context, recompute=self.objective.recompute_layers)
        return hidden[send(packed.rows, model.device)]

    def _logprobs(self, model: Transformer, packed: Packed) -> Tensor:
        """Log-probabilities of completion tokens, on the CPU, by a forward without gradients."""
        with torch.no_grad():
            hidden = self._hidden(model, packed)
            return model.chosen_logprobs(hidden, packed.targets, self.objective.temperature)[0].cpu()

    def _accumulate_packed(self, packed: Packed, old: Sequence[Tensor] | None, total: Accumulated) -> None:
        algorithm = self.objective.algorithm
        clips = algorithm.clip_low, algorithm.clip_high
        tokens = self._token_inputs(packed, old)
        there = tokens.each(lambda x: send(x, self.model.device))
        hidden = self._hidden(self.model, packed)
        logprobs, entropy, gradient = self.model.chosen_logprobs_with_grad(
            lambda logprobs, part: policy_slope(logprobs, there.part(part), *clips, algorithm.kl_coef),
            hidden,
            packed.targets,
            self.objective.temperature,
        )
        fetched = _Fetched.start(logprobs, entropy)
        hidden.backward(gradient)
        logprobs, entropy = fetched.wait()  # what follows runs while the device is busy with the backward
        arguments = tokens.behavior, tokens.advantages, tokens.weights, *clips, tokens.importance, tokens.reference
        total.loss = total.loss + policy_loss(logprobs, *arguments, algorithm.kl_coef)[1]
        self._measure(packed, logprobs, total)
        total.entropy += float(entropy.sum())
        total.tokens += len(packed.token_ids)
        total.flops += training_flops(self.model.config, packed.cu_seqlens.diff().tolist(), len(packed.targets))

    def _token_inputs(self, packed: Packed, old: Sequence[Tensor] | None) -> TokenInputs:
        """`old`, if given, is the behaviour policy, and the rollout's log-probabilities correct for what sampled."""
        behavior, importance, cap = packed.behavior_logprobs, None, self.objective.algorithm.importance_cap
        if old is not None:
            behavior = torch.cat([old[index] for index in packed.rollouts])
            if cap is not None:
                importance = truncated_importance(behavior, packed.behavior_logprobs, cap)
        reference = self._logprobs(self.reference, packed) if self.reference else None
        return TokenInputs(behavior, packed.advantages, packed.weights, importance, reference)

    def _measure(self, packed: Packed, logprobs: Tensor, total: Accumulated) -> None:
        """Compare with the rollout's log-probabilities, on all tokens that this policy version sampled."""
        mine = packed.policy_versions[packed.sequence] == self.policy_version
        found = mismatch(packed.behavior_logprobs[mine], logprobs[mine])
        if found.first is not None and total.first_difference is None:
            token = int(mine.nonzero()[found.first])
            sequence = int(packed.sequence[token])
            first_of_sequence = int((packed.sequence == sequence).nonzero()[0])
            total.first_difference = (packed.rollouts[sequence], token - first_of_sequence)
        total.mismatch = total.mismatch + found


def _by_sequence(packed: Packed, values: Tensor) -> list[Tensor]:
    counts = torch.bincount(packed.sequence, minlength=len(packed.rollouts))
    return list(values.split(counts.tolist()))


@dataclass(slots=True, frozen=True)
class _Fetched:
    """Tensors on their way to the CPU, behind nothing but what was asked of the device before."""

    tensors: tuple[Tensor, ...]
    there: torch.cuda.Event | None

    @staticmethod
    def start(*tensors: Tensor) -> _Fetched:
        moved = tuple(x.to("cpu", non_blocking=True) for x in tensors)
        if tensors[0].device.type == "cpu":
            return _Fetched(moved, None)
        there = torch.cuda.Event()
        there.record()
        return _Fetched(moved, there)

    def wait(self) -> tuple[Tensor, ...]:
        if self.there is not None:
            self.there.synchronize()
        return self.tensors
