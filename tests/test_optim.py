"""AdamW in each kind of moments and masters: torch's arithmetic, nothing lost, nothing poisoned, restored to the bit."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.config import OptimizerConfig
from jetrl.train.optim import Optimizer, check_moments, learning_rate

SHAPES = {"matrix": (7, 5), "bias": (5,), "norm": (7,)}


def _masters(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).requires_grad_() for n, s in SHAPES.items()}


def _gradients(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return {n: scale * torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}


def _values(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in masters.items()}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_steps_are_those_of_torch_adamw() -> None:
    config = OptimizerConfig(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1, grad_clip=1e9)
    masters, theirs = _masters(), _masters()
    optimizer = Optimizer(masters, config)
    groups = [
        {"params": [theirs["matrix"]], "weight_decay": 0.1},
        {"params": [theirs["bias"], theirs["norm"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-6)
    for step in range(5):
        optimizer.step(_gradients(step), 0.01)
        for name, gradient in _gradients(step).items():
            theirs[name].grad = gradient.float()
        reference.step()
        assert _same(_values(masters), _values(theirs)), step
    assert all(p.grad is None for p in masters.values())


def test_only_matrices_decay() -> None:
    masters = _masters()
    before = _values(masters)
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    Optimizer(masters, OptimizerConfig(weight_decay=0.5)).step(zeros, 0.1)
    assert torch.equal(masters["bias"], before["bias"]) and torch.equal(masters["norm"], before["norm"])
    assert torch.allclose(masters["matrix"], before["matrix"] * 0.95, rtol=1e-6)


def test_updates_that_bfloat16_would_lose_add_up() -> None:
    masters = {"w": torch.ones(4, 4).requires_grad_()}
    optimizer = Optimizer(masters, OptimizerConfig(lr=1e-6))
    for _ in range(100):  # Adam's step is lr for a constant gradient
        optimizer.step({"w": torch.ones(4, 4, dtype=torch.float64)}, 1e-6)
    assert (1.0 - masters["w"]).detach().allclose(torch.tensor(1e-4), rtol=0.06)  # 1e-6 is 16.8 units of 2^-24
    assert torch.equal((torch.ones(1).bfloat16() - 1e-6), torch.ones(1).bfloat16())


def test_the_norm_is_that_of_all_gradients_and_clipping_is_exact() -> None:
    gradients = {"a": torch.full((3, 3), 2.0, dtype=torch.float64), "b": torch.tensor([0.0, 8.0], dtype=torch.float64)}
    seen: list[dict[str, Tensor]] = []

    def run(clip: float) -> float:
        masters = {n: torch.zeros_like(g, dtype=torch.float32).requires_grad_() for n, g in gradients.items()}
        optimizer = Optimizer(masters, OptimizerConfig(grad_clip=clip, beta1=0.0))
        norm = optimizer.step({n: g.clone() for n, g in gradients.items()}, 0.1)
        seen.append({n: optimizer.moments()[f"exp_avg/{n}"] for n in gradients})  # beta1 0: the gradient that was applied
        return norm

    assert run(5.0) == 10.0
    assert run(10.0) == run(1e6) == 10.0
    assert _same(seen[0], {n: (g * 0.5).float() for n, g in gradients.items()})
    assert _same(seen[1], {n: g.float() for n, g in gradients.items()})
    assert _same(seen[2], seen[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, first: bool) -> None:
    masters = _masters()
    optimizer = Optimizer(masters, OptimizerConfig(weight_decay=0.1))
    if not first:
        optimizer.step(_gradients(0), 0.01)
    weights, moments = _values(masters), {n: m.clone() for n, m in optimizer.moments().items()}
    broken = _gradients(1)
    broken["bias"][2] = bad
    assert not math.isfinite(optimizer.step(broken, 0.01))
    assert _same(_values(masters), weights) and _same(optimizer.moments(), moments)
    assert (optimizer.steps, optimizer.skipped) == (0 if first else 1, 1)
    # And the next step is the one that would have come without it.
    other = _masters()
    without = Optimizer(other, OptimizerConfig(weight_decay=0.1))
    if not first:
        without.step(_gradients(0), 0.01)
    optimizer.step(_gradients(2), 0.01)
    without.step(_gradients(2), 0.01)
    assert _same(_values(masters), _values(other))


def test_a_huge_but_finite_gradient_is_clipped_and_not_skipped() -> None:
    masters = _masters()
    optimizer = Optimizer(masters, OptimizerConfig())
    norm = optimizer.step(_gradients(0, scale=1e100), 0.01)  # beyond float32
    assert math.isfinite(norm) and optimizer.steps == 1
    assert all(p.isfinite().all() for p in masters.values())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [8, 8, 8, 8, 8, 8]),
        ({"warmup_steps": 3}, [2, 4, 6, 8, 8, 8]),
        ({"schedule": "linear"}, [8, 8 * 5 / 6, 8 * 4 / 6, 4, 8 * 2 / 6, 8 / 6]),
        ({"schedule": "linear", "warmup_steps": 2}, [8 / 3, 16 / 3, 8, 6, 4, 2]),
        ({"schedule": "cosine"}, [4 + 4 * math.cos(math.pi * i / 6) for i in range(6)]),
        ({"schedule": "cosine", "warmup_steps": 3}, [2, 4, 6, 8, 6, 2]),
        ({"schedule": "cosine", "warmup_steps": 9}, [0.8, 1.6, 2.4, 3.2, 4, 4.8]),
    ],
)
def test_learning_rates(settings: dict[str, Any], expected: list[float]) -> None:
    config = OptimizerConfig(lr=8.0, **settings)
    rates = [learning_rate(config, step, 6) for step in range(1, 7)]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert min(rates) > 0  # no step of a run is without effect


def test_restored_it_goes_on_to_the_bit() -> None:
    config = OptimizerConfig(lr=0.01, weight_decay=0.1)
    masters = _masters()
    optimizer = Optimizer(masters, config)
    for step in range(3):
        optimizer.step(_gradients(step), 0.01)
    saved = {n: m.clone() for n, m in optimizer.moments().items()}
    copies = {n: p.detach().clone().requires_grad_() for n, p in masters.items()}
    other = Optimizer(copies, config)
    other.restore(saved, optimizer.steps, 7)
    assert (other.steps, other.skipped) == (3, 7)
    assert _same(other.moments(), saved)
    for step in range(3, 6):
        optimizer.step(_gradients(step), 0.01)
        other.step(_gradients(step), 0.01)
    assert _same(_values(masters), _values(copies)) and _same(optimizer.moments(), other.moments())


def test_before_the_first_step_there_is_nothing_to_save() -> None:
    optimizer = Optimizer(_masters(), OptimizerConfig())
    assert optimizer.moments() == {}
    optimizer.restore({}, 0, 2)
    assert (optimizer.steps, optimizer.skipped) == (0, 2)


KINDS = [("fp8", "fp32"), ("int8", "fp32"), ("fp8", "bf16"), ("int8", "bf16")]
QUANTISED = {"matrix": (64, 80), "odd": (65, 79), "norm": (64,)}  # of 256 values to a scale, of another size, too small


def _kind(moments: Any, masters: Any, seed: int = 0) -> Optimizer:
    generator = torch.Generator().manual_seed(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[masters]
    values = {n: torch.randn(s, generator=generator).to(dtype).requires_grad_() for n, s in QUANTISED.items()}
    return Optimizer(values, OptimizerConfig(moments=moments, masters=masters), seed)


def _pushes(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(200 + step)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in QUANTISED.items()}


@pytest.mark.parametrize(("moments", "masters"), KINDS)
def test_quantised_moments_go_on_to_the_bit_whatever_else_draws(moments: str, masters: str) -> None:
    first, second = _kind(moments, masters), _kind(moments, masters)
    for step in range(2):
        first.step(_pushes(step), 0.01)
    saved = {n: m.clone() for n, m in first.moments().items()}
    assert {n for n in saved if n.startswith("exp_avg/matrix.")} >= {"exp_avg/matrix.codes", "exp_avg/matrix.scale"}
    assert {"exp_avg/odd", "exp_avg_sq/norm"} <= saved.keys()
    for name, master in second.masters.items():
        master.data.copy_(first.masters[name])
    second.restore(saved, 2, 0)
    expected = torch.random.get_rng_state()
    first.step(_pushes(2), 0.01)
    assert torch.equal(torch.random.get_rng_state(), expected)
    torch.rand(5)
    second.step(_pushes(2), 0.01)
    assert _same(_values(first.masters), _values(second.masters))
    assert all(torch.equal(m.view(torch.uint8), second.moments()[n].view(torch.uint8)) for n, m in first.moments().items())


@pytest.mark.parametrize("moments", ["fp8", "int8"])
def test_quantised_moments_follow_fp32_ones(moments: str) -> None:
    exact, close = _kind("fp32", "fp32"), _kind(moments, "fp32")
    for step in range(10):
        exact.step(_pushes(step), 0.01)
        close.step(_pushes(step), 0.01)
    start = _kind("fp32", "fp32").masters
    for name in ("odd", "norm"):  # not quantised
        assert torch.allclose(exact.masters[name], close.masters[name], atol=1e-5)
    before, one, other = (m["matrix"].detach() for m in (start, exact.masters, close.masters))
    moved, apart = one - before, other - one
    assert 0 < float(apart.norm()) < 0.1 * float(moved.norm())


def test_bf16_masters_keep_small_updates_on_average_and_depend_on_the_seed() -> None:
    def run(seed: int) -> Tensor:
        masters = {"w": torch.ones(64, 64, dtype=torch.bfloat16).requires_grad_()}
        optimizer = Optimizer(masters, OptimizerConfig(moments="fp8", masters="bf16"), seed)
        for _ in range(50):
            optimizer.step({"w": torch.ones(64, 64)}, 1e-5)
        return masters["w"].detach()

    assert run(0).double().mean().item() == pytest.approx(1 - 50 * 1e-5, abs=1e-4)  # rounded to nearest: 1, for ever
    assert not torch.equal(run(0), run(1)) and torch.equal(run(0), run(0))
    run(20240101120000)  # a date as a seed is more than 2**63 holds with a step


def test_moments_of_another_kind_are_refused() -> None:
    optimizer = _kind("fp8", "fp32")
    optimizer.step(_pushes(0), 0.01)
    for other in ("fp32", "int8"):
        with pytest.raises(ValueError, match=rf"exp_avg of matrix is not of the kind of optimizer.moments={other}"):
            _kind(other, "fp32").restore(optimizer.moments(), 1, 0)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.optim", raising=False)
    check_moments(OptimizerConfig())
    with pytest.raises(ValueError, match=r"pip install torchao, or use\s+optimizer.moments=fp32"):
        check_moments(OptimizerConfig(moments="fp8"))
