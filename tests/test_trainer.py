"""The trainer: gradients that no split can change, exact agreement with the engine, and weights that are what was published."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.config import AlgorithmConfig, OptimizerConfig
from jetrl.flow import build_flow
from jetrl.kernels.gemm import Bf16Weight, Fp8Weight
from jetrl.model.checkpoint import load_weights
from jetrl.model.config import ModelConfig, read_config
from jetrl.model.transformer import Transformer
from jetrl.rl.types import Completion, Grade, Problem, Prompt, Request, Rollout
from jetrl.rollout.engine import Engine, EngineLimits
from jetrl.train.trainer import Objective, Trainer
from tests.tiny_runs import tiny_model

PROMPTS = [[10, 20, 30], [7], list(range(65, 200)), [200, 100, 50, 25, 12, 6, 3]]  # one longer than a block of 128 tokens
MAX_TOKENS = 24


@dataclass
class Side:
    """A trainer and the engine that reads its weights."""

    config: ModelConfig
    trainer: Trainer
    engine: Engine

    def sample(self, seed: int = 0, temperature: float = 0.8) -> list[Rollout]:
        requests = [Request(p, [1000 * seed + 10 * i + j for j in range(2)], MAX_TOKENS) for i, p in enumerate(PROMPTS)]
        self.engine.published(self.trainer.policy_version)
        groups = self.engine.generate(requests, temperature)
        flat = [(i, c) for i, group in enumerate(groups) for c in group]
        return [rollout(PROMPTS[i], c, i, 1.0 if n % 2 else -0.5 - n / 10) for n, (i, c) in enumerate(flat)]

    def gradients(self) -> dict[str, Tensor]:
        return {n: leaf.grad.clone() for n, leaf in self.trainer.model.leaves.items() if leaf.grad is not None}

    def masters(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.trainer.masters.items()}


def rollout(prompt: list[int], completion: Completion, group: int, advantage: float) -> Rollout:
    return Rollout(Prompt(Problem(str(group), ""), "", prompt), completion, "", Grade(0.0, False), group, advantage)


def side(folder: Path, flow: str = "fp8", *, microbatch: int = 10**6, lr: float = 1e-3, **algorithm: Any) -> Side:
    config = read_config(folder)
    graph = build_flow(flow, config)  # type: ignore[arg-type]
    weights = load_weights(folder, config)
    training = Transformer(config, graph.trainer_layers(config))
    shared = set(graph.trainer_layers(config)) == set(graph.rollout_layers(config))
    sampling = training if shared else Transformer(config, graph.rollout_layers(config))
    settings = AlgorithmConfig(**algorithm)
    reference = None
    if settings.kl_coef:
        reference = Transformer(config, graph.trainer_layers(config))
        reference.load(weights)
    optimizer = OptimizerConfig(lr=lr, microbatch_tokens=microbatch, grad_clip=1e9)
    objective = Objective(settings, optimizer, 0.8, MAX_TOKENS, 100)
    trainer = Trainer(training, weights, objective, [] if shared else [sampling], reference)
    return Side(config, trainer, Engine(sampling, EngineLimits(8, 2048, 4096, 16), (257, 258)))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tied"), "llama")


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("biased"), "qwen2", tied=False)


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, relative to the tensor's largest value."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1e-300)) for n in a)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def total(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients.values()])


@pytest.mark.parametrize("flow", ["fp8", "bf16"])
def test_no_split_and_no_order_changes_the_gradient(biased: Path, flow: str) -> None:
    whole = side(biased, flow)
    rollouts = whole.sample()
    seen = whole.trainer.accumulate(rollouts)
    gradients = whole.gradients()
    assert all(g.dtype == torch.float64 and g.any() for g in gradients.values())
    whole.trainer.apply()
    after = whole.masters()
    for budget, order in ((1, range(8)), (100, range(8)), (300, range(8)), (10**6, (5, 2, 7, 0, 1, 6, 3, 4))):
        other = side(biased, flow, microbatch=budget)
        again = other.trainer.accumulate([rollouts[i] for i in order])
        assert far(other.gradients(), gradients) < 1e-10, (budget, order)
        assert again.loss.loss == pytest.approx(seen.loss.loss, rel=1e-12)
        assert again.entropy == pytest.approx(seen.entropy, rel=1e-6)
        assert (again.tokens, again.loss.tokens, again.mismatch.exact) == (seen.tokens, seen.loss.tokens, True)
        other.trainer.apply()
        assert same(other.masters(), after), (budget, order)


def test_gradients_of_several_calls_add_up_until_they_are_applied_or_discarded(tied: Path) -> None:
    s = side(tied)
    rollouts = s.sample()
    s.trainer.accumulate(rollouts)
    once = s.gradients()
    s.trainer.accumulate(rollouts)
    assert far(s.gradients(), {n: 2 * g for n, g in once.items()}) < 1e-12
    s.trainer.discard()
    assert not any(g.any() for g in s.gradients().values())
    s.trainer.accumulate(rollouts)
    assert same(s.gradients(), once)
    s.trainer.apply()
    assert not any(g.any() for g in s.gradients().values())


def test_loss_normalisations(tied: Path) -> None:
    s = side(tied, "bf16")
    rollouts = s.sample()
    for i, (n, sampled) in enumerate(zip((2, 24, 5, 11), rollouts, strict=False)):  # lengths far apart
        c = sampled.completion
        rollouts[i] = replace(sampled, completion=Completion(c.token_ids[:n], c.logprobs[:n], c.finish_reason, 0))
    rollouts = rollouts[:4]
    lengths = [len(r.completion.token_ids) for r in rollouts]
    assert len(set(lengths)) > 1
    means = []  # gradient of each sequence's mean token loss
    for one in rollouts:
        s.trainer.accumulate([one])
        means.append(total(s.gradients()))
        s.trainer.discard()
    sums = [n * g for n, g in zip(lengths, means, strict=True)]
    expected = {
        "token_mean": torch.stack(sums).sum(0) / sum(lengths),
        "sequence_mean": torch.stack(means).mean(0),
        "dr_grpo": torch.stack(sums).sum(0) / (len(lengths) * MAX_TOKENS),
    }
    for kind, wanted in expected.items():
        other = side(tied, "bf16", loss=kind)
        other.trainer.accumulate(rollouts)
        # BF16 gradients between operators round; another scale rounds otherwise.
        assert float((total(other.gradients()) - wanted).norm() / wanted.norm()) < 0.02, kind


def truncated(rollouts: Sequence[Rollout], reason: Any) -> list[Rollout]:
    return [replace(r, completion=replace(r.completion, finish_reason=reason)) for r in rollouts]


@pytest.mark.parametrize("loss", ["token_mean", "sequence_mean", "dr_grpo"])
def test_all_truncated_and_masked_is_a_zero_gradient_and_counted(tied: Path, loss: str) -> None:
    s = side(tied, mask_truncated=True, loss=loss)
    before = s.masters()
    rollouts = truncated(s.sample(), "length")
    seen = s.trainer.accumulate(rollouts)
    assert not any(g.any() or g.isnan().any() for g in s.gradients().values())
    tokens = sum(len(r.completion.token_ids) for r in rollouts)
    metrics = seen.loss.finish()
    assert (metrics["loss/total"], metrics["loss/masked_tokens"], metrics["loss/all_masked"]) == (0.0, tokens, 1.0)
    assert seen.mismatch.exact and seen.mismatch.tokens == tokens  # out of the loss, not out of the proof
    values = s.trainer.apply()
    assert (values["grad_norm"], values["optimizer/skipped"]) == (0.0, 0.0)
    assert same(s.masters(), before)


def test_truncated_rollouts_have_no_part_in_the_gradient(tied: Path) -> None:
    s = side(tied, mask_truncated=True)
    rollouts = s.sample()
    mixed = truncated(rollouts[:4], "length") + truncated(rollouts[4:], "stop")
    seen = s.trainer.accumulate(mixed)
    gradients = s.gradients()
    s.trainer.discard()
    s.trainer.accumulate(truncated(rollouts[4:], "stop"))
    assert far(gradients, s.gradients()) < 1e-10
    assert seen.loss.masked == sum(len(r.completion.token_ids) for r in rollouts[:4])


@pytest.mark.parametrize("flow", ["fp8", "bf16"])
def test_on_policy_there_is_no_mismatch_and_every_ratio_is_one(biased: Path, flow: str) -> None:
    s = side(biased, flow, microbatch=200)
    for step in range(3):
        rollouts = s.sample(step)
        tokens = sum(len(r.completion.token_ids) for r in rollouts)
        seen = s.trainer.accumulate(rollouts)
        assert seen.mismatch.exact and seen.mismatch.max_diff == 0.0
        assert seen.mismatch.tokens == tokens
        assert seen.first_difference is None
        assert seen.loss.ratio == tokens and not seen.loss.clipped_low and not seen.loss.clipped_high
        s.trainer.apply()
        assert s.trainer.policy_version == step + 1


def test_only_tokens_of_the_present_version_are_compared(tied: Path) -> None:
    s = side(tied, lr=1e-2)
    old = s.sample(0)
    s.trainer.accumulate(old)
    s.trainer.apply()
    seen = s.trainer.accumulate(old)
    assert (seen.mismatch.tokens, seen.mismatch.exact) == (0, True)
    assert seen.loss.ratio != seen.loss.tokens  # the policy did move
    fresh = s.sample(1)
    s.trainer.discard()
    seen = s.trainer.accumulate([r for pair in zip(old, fresh, strict=True) for r in pair])
    assert (seen.mismatch.tokens, seen.mismatch.exact) == (sum(len(r.completion.token_ids) for r in fresh), True)


def test_a_differing_bit_is_found_and_placed(tied: Path) -> None:
    s = side(tied, microbatch=60)
    rollouts = s.sample()
    c = rollouts[6].completion
    wrong = float(torch.nextafter(torch.tensor(c.logprobs[3]), torch.tensor(0.0)))
    rollouts[6] = replace(rollouts[6], completion=replace(c, logprobs=[*c.logprobs[:3], wrong, *c.logprobs[4:]]))
    seen = s.trainer.accumulate(rollouts)
    assert (seen.mismatch.exact, seen.mismatch.differing, seen.first_difference) == (False, 1, (6, 3))
    assert 0 < seen.mismatch.max_diff < 1e-5


def test_kl_to_the_reference(tied: Path) -> None:
    plain, s = side(tied, lr=1e-2), side(tied, lr=1e-2, kl_coef=0.5)
    rollouts = s.sample()
    for one in (plain, s):
        seen = one.trainer.accumulate(rollouts)
        assert seen.loss.kl == 0.0  # the policy is the reference, to the bit
    assert far(s.gradients(), plain.gradients()) < 1e-12
    for one in (plain, s):
        one.trainer.apply()
        seen = one.trainer.accumulate(rollouts)
        assert (seen.loss.kl > 0.0) == (one is s)
        assert (seen.loss.loss != seen.loss.policy) == (one is s)
    assert far(s.gradients(), plain.gradients()) > 1e-3


def test_fp8_rollout_measures_its_mismatch_and_corrects_for_it(tied: Path) -> None:
    s = side(tied, "fp8_rollout")
    rollouts = s.sample()
    old = s.trainer.old_logprobs(rollouts)
    assert [len(o) for o in old] == [len(r.completion.token_ids) for r in rollouts]
    assert all(o.dtype == torch.float32 and not o.requires_grad for o in old)
    seen = s.trainer.accumulate(rollouts, old)
    assert seen.mismatch.differing > 0.5 * seen.mismatch.tokens and 1e-4 < seen.mismatch.max_diff < 5
    assert seen.first_difference is not None
    assert seen.loss.ratio == seen.loss.tokens  # against its own log-probabilities
    gradients = s.gradients()
    s.trainer.discard()
    ignored = s.trainer.accumulate(rollouts)
    assert ignored.loss.ratio != ignored.loss.tokens
    # A cap below every ratio is a constant factor; a power of two scales without rounding.
    capped = side(tied, "fp8_rollout", importance_cap=0.25)
    capped.trainer.accumulate(rollouts, old)
    assert same(capped.gradients(), {n: g / 4 for n, g in gradients.items()})
    corrected = side(tied, "fp8_rollout", importance_cap=100.0)
    corrected.trainer.accumulate(rollouts, old)
    assert 1e-4 < far(corrected.gradients(), gradients) < 1


def test_old_logprobs_do_not_depend_on_the_split_and_leave_no_gradient(tied: Path) -> None:
    whole, parts = side(tied, "fp8_rollout"), side(tied, "fp8_rollout", microbatch=1)
    rollouts = whole.sample()
    for a, b in zip(whole.trainer.old_logprobs(rollouts), parts.trainer.old_logprobs(rollouts), strict=True):
        assert torch.equal(a, b)
    assert not any(g.any() for g in whole.gradients().values())


def published(model: Transformer) -> dict[str, Tensor]:
    """What the kernels read, each leaf as BF16 values or as codes followed by the bytes of the scales."""
    values = {}
    for name, leaf in model.leaves.items():
        if isinstance(leaf.value, Fp8Weight):
            codes, scales = leaf.value.quantized.codes, leaf.value.quantized.scales
            values[name] = torch.cat([codes.view(torch.uint8).flatten(), scales.contiguous().view(torch.uint8).flatten()])
        else:
            values[name] = leaf.value.value if isinstance(leaf.value, Bf16Weight) else leaf.value
    return values


@pytest.mark.parametrize("flow", ["fp8", "bf16", "fp8_rollout"])
def test_published_weights_are_the_masters_rounded_once(tied: Path, flow: str) -> None:
    s = side(tied, flow, lr=3e-3)
    for step in range(2):
        s.trainer.accumulate(s.sample(step))
        s.trainer.apply()
    rounded = {n: p.bfloat16() for n, p in s.masters().items()}
    assert len(s.trainer.published_models) == (2 if flow == "fp8_rollout" else 1)
    for model in s.trainer.published_models:
        fresh = Transformer(s.config, model.fp8_layers)
        fresh.load(rounded)
        assert same(published(model), published(fresh))
    assert s.engine.model is s.trainer.published_models[-1]


def test_tied_embeddings_stay_one_tensor(tied: Path) -> None:
    s = side(tied, lr=1e-2)
    assert s.trainer.model.head is s.trainer.model.leaves["embed"] and "head" not in s.trainer.masters
    unused = 250  # in no prompt and in no completion: only the head gives it a gradient
    rollouts = s.sample()
    assert all(unused not in r.prompt.token_ids + r.completion.token_ids for r in rollouts)
    s.trainer.accumulate(rollouts)
    assert s.gradients()["embed"][unused].any()
    s.trainer.apply()
    assert s.trainer.model.head is s.trainer.model.leaves["embed"]
    assert s.trainer.accumulate(s.sample(1)).mismatch.exact


def test_steps_too_small_for_bfloat16_add_up_in_the_masters(tied: Path) -> None:
    s = side(tied, lr=1e-6)
    start, shown = s.masters(), published(s.trainer.model)
    rollouts = s.sample()
    for _ in range(3):
        s.trainer.accumulate(rollouts)
        s.trainer.apply()
    moved = {n: p - start[n] for n, p in s.masters().items()}
    assert all(d.abs().max() > 2e-6 for d in moved.values())
    changed = sum(int((a != b).sum()) for a, b in zip(published(s.trainer.model).values(), shown.values(), strict=True))
    assert changed < 0.02 * sum(v.numel() for v in shown.values())


def test_a_gradient_that_is_not_finite_skips_the_step(tied: Path) -> None:
    s = side(tied)
    s.trainer.accumulate(s.sample())
    before = s.masters()
    grad = s.trainer.model.leaves["final_norm"].grad
    assert grad is not None
    grad[3] = math.nan
    values = s.trainer.apply()
    assert math.isnan(values["grad_norm"]) and values["optimizer/skipped"] == 1.0
    assert same(s.masters(), before)
    assert not any(g.any() for g in s.gradients().values())  # the NaN is gone too
    s.trainer.accumulate(s.sample(1))
    assert s.trainer.apply()["optimizer/skipped"] == 0.0
    assert (s.trainer.optimizer.steps, s.trainer.optimizer.skipped) == (1, 1)
