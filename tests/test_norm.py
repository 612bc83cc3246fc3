"""RMSNorm, rotary embedding and SiLU-mul: one BF16 rounding away from float64, and the same bits at every place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from jetrl.kernels import norm
from jetrl.kernels.memory import row_chunks

EPS = 1e-6


def noise(*shape: int, seed: int = 0) -> Tensor:
    """BF16 noise; row 1 zero, row 2 tiny, row 3 huge, an outlier in row 4 (of those that exist)."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    for row, factor in ((1, 0.0), (2, 1e-5), (3, 1e4)):
        x[row : row + 1] *= factor
    x[4:5, ..., :1] *= 3000.0
    return x.bfloat16()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as BF16 bits; unlike torch.equal, 0.0 is not -0.0."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def within_one_rounding(seen: Tensor, wanted: Tensor, slack: float) -> bool:
    """BF16 `seen` is float64 `wanted` rounded to the nearest, `wanted` being known to a relative `slack`."""
    assert seen.dtype == torch.bfloat16 and wanted.dtype == torch.float64
    half_ulp = torch.exp2(torch.floor(torch.log2(wanted.abs().clamp_min(1e-37))) - 8)
    return bool(((seen.double() - wanted).abs() <= half_ulp * (1 + 2.0**-15) + slack * wanted.abs() + 1e-37).all())


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def plain_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def tables(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens).double().unsqueeze(1) * 1e4 ** -(torch.arange(0, dim, 2).double() / dim)
    return angles.cos().float(), angles.sin().float()


@pytest.mark.parametrize("shape", [(7, 576), (9, 6, 40), (1, 1), (33, 4097), (5, 129)])
def test_rms_norm_values(shape: tuple[int, ...]) -> None:
    x, weight = noise(*shape), noise(9, shape[-1], seed=1)[-1]
    assert within_one_rounding(norm.rms_norm(x, weight, EPS), plain_rms_norm(x.double(), weight.double()), 2.0**-18)


def test_rms_norm_needs_its_eps_and_keeps_nan_visible() -> None:
    x = torch.full((3, 8), 1e-4).bfloat16()
    wide = x.double()
    ones = torch.ones(8).bfloat16()
    assert within_one_rounding(norm.rms_norm(x, ones, 1e-2), wide / (wide.pow(2) + 1e-2).sqrt(), 1e-9)
    x[1, 2] = torch.nan
    seen = norm.rms_norm(x, ones, EPS)
    assert seen[1].isnan().all() and seen[[0, 2]].isfinite().all()


@pytest.mark.parametrize("width", [1, 200, 129])
def test_silu_mul_values(width: int) -> None:
    gate_up = noise(9, 2 * width) * 8
    gate_up[0, 0], gate_up[0, width] = -100.0, 1e6  # exp overflows FP32
    gate_up[5, :width] = 90.0
    seen, wanted = norm.silu_mul(gate_up), plain_silu_mul(gate_up.double())
    assert seen[0, 0] == 0 and abs(wanted[0, 0]) < 1e-35  # what FP32 cannot hold is zero, not NaN
    wanted[0, 0] = 0.0
    assert within_one_rounding(seen, wanted, 2.0**-21)


def test_silu_mul_tells_gate_from_up() -> None:
    assert norm.silu_mul(torch.tensor([[-20.0, 3.0]]).bfloat16()).abs().item() < 1e-6
    assert norm.silu_mul(torch.tensor([[3.0, -20.0]]).bfloat16()).item() == pytest.approx(-57.2, rel=0.01)


@pytest.mark.parametrize(("heads", "dim"), [(6, 24), (1, 40), (3, 128), (2, 2)])
def test_rotary_values(heads: int, dim: int) -> None:
    x, (cos, sin) = noise(50, heads, dim), tables(50, dim)
    wide = x.double().transpose(0, 1).unsqueeze(0)
    cos2, sin2 = (torch.cat((t, t), -1).unsqueeze(0) for t in (cos, sin))
    wanted = apply_rotary_pos_emb(wide, wide, cos2.double(), sin2.double())[0][0].transpose(0, 1)
    seen = norm.rotary(x, cos, sin)
    # a cos - b sin may cancel: FP32 products err by 2^-24 of their size.
    sizes = torch.hypot(*x.double().chunk(2, -1)).repeat(1, 1, 2)
    half_ulp = torch.exp2(torch.floor(torch.log2(wanted.abs().clamp_min(1e-37))) - 8)
    assert ((seen.double() - wanted).abs() <= half_ulp * 1.001 + 2.0**-22 * sizes).all()
    assert same_bits(seen[0], x[0])  # position 0 does not turn
    assert not torch.equal(seen[5], x[5])
    theirs = apply_rotary_pos_emb(wide.float(), wide.float(), cos2, sin2)[0]
    assert torch.equal(seen, theirs[0].transpose(0, 1).bfloat16())  # one by one the same FP32 steps


def test_add_is_one_rounding() -> None:
    x, y = noise(9, 77), noise(9, 77, seed=1)
    assert torch.equal(norm.add(x, y), (x.double() + y.double()).float().bfloat16())


def place_cases() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Operators as functions of rows: (operator, arguments that are cut by rows together)."""
    weight = noise(9, 200, seed=1)[-1]
    cos, sin = tables(130, 40)
    return {
        "rms_norm": (lambda x: norm.rms_norm(x, weight, EPS), (noise(130, 200),)),
        "rms_norm of heads": (lambda x: norm.rms_norm(x, weight[:40], EPS), (noise(130, 3, 40),)),
        "silu_mul": (norm.silu_mul, (noise(130, 2 * 77),)),
        "rms_norm in chunks": (lambda x: norm.rms_norm(x, weight.repeat(10), EPS), (noise(130, 2000),)),
        "silu_mul in chunks": (norm.silu_mul, (noise(130, 2 * 1400),)),
        "silu_mul of 1": (norm.silu_mul, (noise(130, 2),)),
        "rotary": (norm.rotary, (noise(130, 3, 40), cos, sin)),
        "add": (norm.add, (noise(130, 77), noise(130, 77, seed=1))),
        "silu_mul_grad": (norm.silu_mul_grad, (noise(130, 77), noise(130, 154, seed=1))),
    }


@pytest.mark.parametrize("name", list(place_cases()))
def test_a_row_has_the_same_bits_at_every_place(name: str) -> None:
    """Cuts of every length and offset move a row between the vectorised middle and the tail of torch's loops."""
    operator, arguments = place_cases()[name]
    wanted = operator(*arguments)
    for first, last in [(0, n) for n in range(1, 40)] + [(n, n + 1) for n in range(0, 130, 3)] + [(5, 130), (77, 109), (1, 66)]:
        assert same_bits(operator(*(a[first:last] for a in arguments)), wanted[first:last]), (first, last)
        copies = operator(*(a[first:last].clone() for a in arguments))
        assert same_bits(copies, wanted[first:last]), (first, last)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(0))
    assert same_bits(operator(*(a[order] for a in arguments)), wanted[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [torch.exp, torch.log, torch.sqrt, torch.reciprocal], ids=lambda f: f.__name__)
def test_the_functions_that_kernels_use_have_the_same_bits_at_every_place(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """BF16 outputs would hide a difference in the last bit, which torch.sigmoid has; so the premise is tested by itself."""
    x = torch.randn(6000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(12).to(dtype)
    x = x if function is torch.exp else x.abs()
    wanted = function(x)
    for step in (1, 3, 7, 9, 31):
        assert torch.equal(torch.cat([function(part) for part in x.split(step)]), wanted), step
    assert torch.equal(function(x.clone().view(2, -1).t()).t().flatten(), wanted)


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 5), (64, 1 << 16), (65, 1 << 16), (1000, 300), (700, 0)])
def test_row_chunks_cover_each_row_once(rows: int, width: int) -> None:
    pieces = [list(range(rows))[part] for part in row_chunks(rows, width)]
    assert [row for piece in pieces for row in piece] == list(range(rows)) and all(pieces)
    assert all(len(piece) * width <= max(1 << 16, 64 * width) for piece in pieces)


def test_rms_norm_ignores_the_order_within_a_row() -> None:
    x, ones = noise(40, 576), torch.ones(576).bfloat16()
    wanted = norm.rms_norm(x, ones, EPS)
    spread = x.double() * torch.exp(4 * torch.randn(40, 576, generator=torch.Generator().manual_seed(1)).double())
    inverse = norm._inverse_rms(spread, EPS)
    for seed in range(10):
        order = torch.randperm(576, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(norm._inverse_rms(spread[:, order], EPS), inverse)
        assert same_bits(norm.rms_norm(x[:, order], ones, EPS), wanted[:, order])


def assert_close_to_bf16(seen: Tensor, wanted: Tensor) -> None:
    """Within a BF16 rounding of each element, and of 2^-16 of the largest of its row where terms cancel."""
    assert seen.dtype == torch.bfloat16
    row = wanted.abs().amax(-1, keepdim=True)
    assert ((seen.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-16 * row + 1e-30).all()


@pytest.mark.parametrize("shape", [(7, 576), (9, 6, 40), (5, 129)])
def test_rms_norm_gradients(shape: tuple[int, ...]) -> None:
    x, weight, dy = noise(*shape), noise(9, shape[-1], seed=1)[-1], noise(*shape, seed=2)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    plain_rms_norm(x64, weight64).backward(dy.double())
    dx, dweight = norm.rms_norm_grad(dy, x, weight, EPS)
    assert x64.grad is not None and weight64.grad is not None
    assert_close_to_bf16(dx, x64.grad)
    assert dweight.dtype == torch.float64
    assert torch.allclose(dweight, weight64.grad, rtol=1e-4, atol=1e-5 * float(weight64.grad.abs().max()))


@pytest.mark.parametrize("width", [1, 200])
def test_silu_mul_gradient(width: int) -> None:
    gate_up, dy = noise(9, 2 * width), noise(9, width, seed=2)
    gate_up[0, 0] = -100.0
    wide = gate_up.double().requires_grad_()
    plain_silu_mul(wide).backward(dy.double())
    assert wide.grad is not None
    assert_close_to_bf16(norm.silu_mul_grad(dy, gate_up), wide.grad)


def test_rotary_gradient_is_the_turn_back() -> None:
    x, dy, (cos, sin) = noise(50, 3, 40), noise(50, 3, 40, seed=2), tables(50, 40)
    wide = x.double().requires_grad_()
    a, b = wide.chunk(2, -1)
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    torch.cat((a * c - b * s, b * c + a * s), -1).backward(dy.double())
    assert wide.grad is not None
    assert_close_to_bf16(norm.rotary(dy, cos, -sin), wide.grad)
