"""The Hopper norms and SiLU-mul: one BF16 rounding away from float64, fused bytes as unfused, rows that stand alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.kernels.quant import Quantized, TokenGroups, token_groups

pytest.importorskip("triton")
from jetrl.kernels.hopper import norm, quant
from tests.gpu.tensors import noise, same, vector

pytestmark = pytest.mark.gpu

EPS = 1e-6
WIDTHS = [576, 4096, 129]
ROWS = (1, 2, 3, 7, 64, 129, 4097)
LENGTHS = [130, 3, 128, 260, 1]


def one_rounding(seen: Tensor, wanted: Tensor, slack: float, floor: float | Tensor = 1e-37) -> bool:
    """BF16 `seen` is float64 `wanted` rounded to the nearest, `wanted` being known to a relative `slack` or to `floor`."""
    assert seen.dtype == torch.bfloat16 and wanted.dtype == torch.float64
    half_ulp = torch.exp2(torch.floor(torch.log2(wanted.abs().clamp_min(1e-37))) - 8)
    return bool(((seen.double() - wanted).abs() <= half_ulp * (1 + 2.0**-10) + slack * wanted.abs() + floor).all())


def near_of_row(seen: Tensor, wanted: Tensor) -> bool:
    """Within a BF16 rounding of each element, and 2^-16 of the largest of its row, where terms cancel."""
    row = wanted.abs().amax(-1, keepdim=True)
    return bool(((seen.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-16 * row + 1e-30).all())


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def plain_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def groups() -> TokenGroups:
    return token_groups(LENGTHS, "cuda")


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(width: int) -> None:
    x, delta, weight = noise(69, width), noise(69, width, seed=1), vector(width)
    total, y, inverse = norm.add_rms_norm(x, delta, weight, EPS, False)
    assert same(total, x + delta)
    assert one_rounding(y, plain_norm(total.double(), weight.double()), 2.0**-20)
    wide = total.double()
    assert torch.allclose(inverse.double(), (wide.pow(2).mean(1) + EPS).rsqrt(), rtol=2.0**-21, atol=0)
    fused = norm.add_rms_norm(x, delta, weight, EPS, True)
    assert same(fused[0], total) and same(fused[1], quant.quantize_rows(y)) and same(fused[2], inverse)
    for quantize, wanted in ((False, y), (True, fused[1])):
        alone = norm.add_rms_norm(total, None, weight, EPS, quantize)
        assert alone[0] is total and same(alone[1], wanted) and same(alone[2], inverse)


def test_rms_norm_keeps_nan_in_its_row() -> None:
    x = noise(9, 576)
    x[5, 7] = torch.nan
    y = norm.add_rms_norm(x, None, vector(576), EPS, False)[1]
    assert y[5].isnan().all() and y[[0, 1, 2, 3, 4, 6, 7, 8]].isfinite().all()


def test_widest_row() -> None:
    x, weight, dy = noise(5, 16384), vector(16384), noise(5, 16384, seed=1)
    _, y, inverse = norm.add_rms_norm(x, None, weight, EPS, False)
    assert one_rounding(y, plain_norm(x.double(), weight.double()), 2.0**-20)
    assert norm.rms_norm_grad(dy, x, inverse, weight, None)[0].isfinite().all()
    with pytest.raises(AssertionError, match="at most 16384"):
        norm.add_rms_norm(noise(1, 16385), None, vector(16385), EPS, False)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_depend_on_themselves(width: int) -> None:
    """Whatever the number of rows, the place in the batch, and the view that holds them."""
    x, delta, weight = noise(4200, width), noise(4200, width, seed=1), vector(width)
    wanted = {quantize: norm.add_rms_norm(x, delta, weight, EPS, quantize) for quantize in (False, True)}
    for rows in ROWS:
        for first in {0, 4200 - rows}:
            part = slice(first, first + rows)
            for quantize, (total, y, inverse) in wanted.items():
                seen = norm.add_rms_norm(x[part], delta[part], weight, EPS, quantize)
                assert same(seen[0], total[part]) and same(seen[2], inverse[part])
                assert same(seen[1], Quantized(y.codes[part], y.scales[part]) if quantize else y[part])
    off = torch.empty(7 * width + 1, dtype=torch.bfloat16, device="cuda")[1:].view(7, width)
    off.copy_(x[:7])
    assert same(norm.add_rms_norm(off, delta[:7], weight, EPS, False)[1], wanted[False][1][:7])


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_tokens(width: int) -> None:
    x, weight = noise(sum(LENGTHS), width), vector(width)
    _, y, inverse = norm.add_rms_norm(x, None, weight, EPS, False)
    assert same(norm.rms_norm_tokens(x, inverse, weight, groups()), quant.quantize_tokens(y, groups()))


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_grad(width: int) -> None:
    for rows in (1, 69, 1300):
        x, dy, weight, residual = noise(rows, width), noise(rows, width, seed=1), vector(width), noise(rows, width, seed=2)
        inverse = norm.add_rms_norm(x, None, weight, EPS, False)[2]
        x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
        plain_norm(x64, weight64).backward(dy.double())
        dx, dweight = norm.rms_norm_grad(dy, x, inverse, weight, None)
        assert near_of_row(dx, x64.grad)
        assert torch.allclose(dweight.double(), weight64.grad, rtol=1e-4, atol=1e-5 * float(weight64.grad.abs().max()))
        again = norm.rms_norm_grad(dy, x, inverse, weight, residual)
        assert same(again[0], dx + residual) and same(again[1], dweight)
        part = slice(rows // 2, rows)
        assert same(norm.rms_norm_grad(dy[part], x[part], inverse[part], weight, None)[0], dx[part])


def silu_input(rows: int, width: int) -> Tensor:
    gate_up = noise(rows, 2 * width)
    gate_up[0, :4] = torch.tensor([-100.0, 100.0, -90.0, -50.0], dtype=torch.bfloat16)
    gate_up[0, width : width + 4] = 1e6
    return gate_up


@pytest.mark.parametrize("width", [1536, 200])
def test_silu_mul(width: int) -> None:
    gate_up = silu_input(sum(LENGTHS), width)
    y, none = norm.silu_mul(gate_up, False)
    assert none is None and one_rounding(y, plain_silu_mul(gate_up.double()), 2.0**-16, 1e-30)
    rows, tokens = quant.quantize_both(y, groups())
    assert same(norm.silu_mul(gate_up, True)[0], rows)
    fused = norm.silu_mul(gate_up, True, groups())
    assert same(fused[0], rows) and same(fused[1], tokens)


@pytest.mark.parametrize("width", [1536, 200])
def test_silu_mul_grad(width: int) -> None:
    gate_up, dy = silu_input(sum(LENGTHS), width), noise(sum(LENGTHS), width, seed=1)
    wide = gate_up.double().requires_grad_()
    plain_silu_mul(wide).backward(dy.double())
    seen = norm.silu_mul_grad(dy, gate_up)
    row = wide.grad.abs().amax(-1, keepdim=True)
    assert one_rounding(seen, wide.grad, 2.0**-15, 2.0**-18 * row + 1e-30)
    rows, tokens = quant.quantize_both(seen, groups(), (width, width))
    fused = norm.silu_mul_grad(dy, gate_up, groups())
    assert same(fused[0], rows) and same(fused[1], tokens)


@pytest.mark.parametrize("width", [1536, 200])
def test_silu_mul_rows_depend_on_themselves(width: int) -> None:
    gate_up, dy = noise(4200, 2 * width), noise(4200, width, seed=1)
    y, q, grad = norm.silu_mul(gate_up, False)[0], norm.silu_mul(gate_up, True)[0], norm.silu_mul_grad(dy, gate_up)
    for rows in ROWS:
        part = slice(4200 - rows, 4200)
        assert same(norm.silu_mul(gate_up[part], False)[0], y[part])
        assert same(norm.silu_mul(gate_up[part], True)[0], Quantized(q.codes[part], q.scales[part]))
        assert same(norm.silu_mul_grad(dy[part], gate_up[part]), grad[part])


def test_nan_poisons_its_groups_alone() -> None:
    gate_up = noise(256, 2 * 256)
    gate_up[200, 7] = torch.nan
    both = token_groups([256], "cuda")
    rows, tokens = norm.silu_mul(gate_up, True, both)
    assert rows.codes[200, :128].float().isnan().all() and rows.codes[200, 128:].float().isfinite().all()
    assert tokens.codes[7, 128:].float().isnan().all() and tokens.codes[7, :128].float().isfinite().all()
    assert int(rows.scales.isnan().sum()) == int(tokens.scales.isnan().sum()) == 1


def test_two_runs_have_the_same_bits_and_a_graph_captures() -> None:
    x, delta, weight, dy = noise(1300, 576), noise(1300, 576, seed=1), vector(576), noise(1300, 576, seed=2)

    def everything() -> list[Tensor]:
        total, q, inverse = norm.add_rms_norm(x, delta, weight, EPS, True)
        dx, dweight = norm.rms_norm_grad(dy, total, inverse, weight, x)
        y, _ = norm.silu_mul(dx, True)
        return [total, q.codes, q.scales, inverse, dx, dweight, y.codes, y.scales]

    first = everything()
    assert all(same(a, b) for a, b in zip(first, everything(), strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    graph.replay()
    assert all(same(a, b) for a, b in zip(first, captured, strict=True))
