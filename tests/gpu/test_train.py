"""The trainer on a GPU: every kind of moments and masters, the same bits twice, resumed, and memory that is given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.config import AlgorithmConfig, OptimizerConfig
from jetrl.rl.types import Completion, Grade, Problem, Prompt, Rollout
from jetrl.train.optim import Optimizer
from jetrl.train.trainer import Objective, Trainer
from tests.gpu.test_model import SMALL, model_of
from tests.tiny_models import random_weights

pytestmark = pytest.mark.gpu

KINDS = [("fp32", "fp32"), ("fp8", "fp32"), ("int8", "fp32"), ("fp8", "bf16"), ("int8", "bf16")]


def optimizer_of(moments: Any, masters: Any, device: str = "cuda") -> Optimizer:
    """Masters whose moments are quantised, too small for it, and of a size that is no multiple of 256."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (96, 128), "b": (17, 300), "c": (64,)}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[masters]
    start = {n: torch.randn(shape, generator=generator).bfloat16() for n, shape in shapes.items()}
    values = {n: w.to(device, dtype, copy=True).requires_grad_() for n, w in start.items()}
    return Optimizer(values, OptimizerConfig(moments=moments, masters=masters, weight_decay=0.1), seed=7)


def gradients(step: int, like: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {n: torch.randn(p.shape, generator=generator).mul_(1e-3).to(p.device) for n, p in like.items()}


def values(optimizer: Optimizer) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in optimizer.masters.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


@pytest.mark.parametrize(("moments", "masters"), KINDS)
def test_two_optimizers_and_a_resumed_one_make_the_same_bits(moments: str, masters: str) -> None:
    one, two, resumed = (optimizer_of(moments, masters) for _ in range(3))
    for step in range(3):
        torch.randn(3, device="cuda")  # what others draw does not matter
        one.step(gradients(step, one.masters), 1e-3)
    for step in range(3):
        two.step(gradients(step, two.masters), 1e-3)
    assert same(values(one), values(two)) and same(one.moments(), two.moments())
    saved = {n: m.clone().cpu() for n, m in one.moments().items()}
    for name, value in values(one).items():
        resumed.masters[name].data.copy_(value)
    resumed.restore(saved, one.steps, one.skipped)
    for optimizer in (one, resumed):
        optimizer.step(gradients(3, optimizer.masters), 1e-3)
    assert same(values(one), values(resumed)) and same(one.moments(), resumed.moments())


@pytest.mark.parametrize(("moments", "masters"), KINDS)
def test_a_step_is_the_cpus_within_the_rounding_of_what_is_kept(moments: str, masters: str) -> None:
    there, here = optimizer_of(moments, masters), optimizer_of(moments, "fp32", "cpu")
    for step in range(3):
        for optimizer in (there, here):
            optimizer.step(gradients(step, optimizer.masters), 1e-3)
    for name, value in values(there).items():
        limit = 1e-6 if masters == "fp32" else 3 * 2**-7  # each step rounds to one of the two neighbours
        torch.testing.assert_close(
            value.float().cpu(), values(here)[name], rtol=limit, atol=1e-4 if moments != "fp32" else 1e-6
        )


def test_stochastic_rounding_moves_as_far_as_fp32_on_average() -> None:
    generator = torch.Generator().manual_seed(5)
    start, push = (torch.randn(512, 256, generator=generator) for _ in range(2))
    start = start.mul_(0.1).bfloat16()  # a BF16 step is some 40 times the rate below
    moved = []
    for dtype, masters in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        values = {"matrix": start.to("cuda", dtype, copy=True).requires_grad_()}
        optimizer = Optimizer(values, OptimizerConfig(moments="fp8", masters=masters), seed=7)
        for _ in range(20):
            optimizer.step({"matrix": push.to("cuda", copy=True)}, 1e-5)
        moved.append(-((values["matrix"].float().cpu() - start.float()) * push.sign()).mean().item())
    assert moved[1] == pytest.approx(moved[0], rel=0.03)


def trainer_of(moments: Any, flow: str, recompute: int = 0) -> Trainer:
    model = model_of("qwen3", flow, "cuda", **SMALL)
    optimizer = OptimizerConfig(lr=1e-3, moments=moments, microbatch_tokens=300)
    return Trainer(model, random_weights(model.config, 0), Objective(AlgorithmConfig(), optimizer, 1.0, 200, 10, recompute))


def rollouts(trainer: Trainer) -> list[Rollout]:
    """Random completions with the trainer's own log-probabilities."""
    generator = torch.Generator().manual_seed(11)
    lengths = [(5, 200), (40, 77), (1, 130), (130, 3)]
    ids = [[torch.randint(1009, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    problem = Problem("0", "")
    made = [
        Rollout(Prompt(problem, "", p), Completion(c, [0.0] * len(c), "length", 0), "", Grade(0.0, False), 0, 1.0 - i)
        for i, (p, c) in enumerate(ids)
    ]
    old = trainer.old_logprobs(made)
    for rollout, logprobs in zip(made, old, strict=True):
        rollout.completion.logprobs[:] = logprobs.tolist()
    return made


@pytest.mark.parametrize("flow", ["fp8", "bf16"])
def test_two_trainings_make_the_same_weights_recomputed_or_not(flow: str) -> None:
    sums = []
    for recompute in (0, 0, 1):
        trainer = trainer_of("fp8", flow, recompute)
        for _ in range(2):
            batch = rollouts(trainer)
            seen = trainer.accumulate(batch)
            assert seen.flops > 0 and (trainer.policy_version > 0 or seen.mismatch.exact)
            trainer.apply()
        sums.append(trainer.model.checksum())
    assert sums[0] == sums[1] == sums[2]


def test_training_waits_for_nothing_but_log_probabilities() -> None:
    trainer = trainer_of("fp8", "fp8")
    batch = rollouts(trainer)
    trainer.accumulate(batch)  # compiles
    trainer.discard()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.accumulate(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gradients_take_memory_in_training_alone() -> None:
    trainer = trainer_of("fp8", "fp8")
    batch = rollouts(trainer)
    trainer.accumulate(batch)
    trainer.apply()
    before = torch.cuda.memory_allocated()
    trainer.accumulate(batch)
    held = torch.cuda.memory_allocated() - before
    assert held >= 4 * sum(p.numel() for p in trainer.masters.values())
    trainer.apply()
    assert torch.cuda.memory_allocated() - before < 0.02 * held
