"""The Hopper quantiser makes the bytes of the CPU reference, on any data and in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.kernels.quant import Quantized, TokenGroups, token_groups
from tests.test_hopper_quant import (
    assert_rows_layout,
    assert_same,
    assert_tokens_layout,
    wanted_rows,
    wanted_tokens,
    wanted_weight,
)

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from jetrl.kernels.hopper import quant as hopper  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float32]
LENGTHS = [1, 127, 128, 129, 300]
PARTS = [(576, 192, 192), (128, 128), (128, 72), (100,), (101,), (200, 56)]
FLOOR = 1e-12


def noise(rows: int, cols: int, dtype: torch.dtype, std: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1009 + cols)
    return (torch.randn(rows, cols, generator=generator) * std).to(dtype)


def hard(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Noise with zero stretches, numbers of every size, subnormals, -0, infinities and NaN, each in some groups only."""
    x = noise(rows, cols, torch.float32)
    x[:: max(1, rows // 3), :: max(1, cols // 5)] *= 1000.0
    x[rows // 2, : cols // 2] = 0.0
    x[:128, 128:256] = 0.0
    x[:, cols // 3] = -0.0
    for i, value in enumerate([1e30, 1e-30, 1e-40, -1e-45, 3e38, -5e36, 2e-12, float("inf"), float("-inf"), float("nan")]):
        x[(7 * i + 1) % rows, (131 * i + 3) % cols] = value
    x[rows // 4] *= 1e-15  # all of it under the floor
    x[rows // 5] *= 1e-38
    x[2 * rows // 3] *= 1e36
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [noise, hard])
def test_rows(make, dtype: torch.dtype) -> None:
    for cols in (576, 192, 1, 127, 129, 1000, 4096):
        for rows in (1, 3, 33, 130):
            x = make(rows, cols, dtype)
            q = hopper.quantize_rows(x.cuda())
            assert_same(q.codes, q.scales, wanted_rows(x))
            assert_rows_layout(q)


def test_rows_of_a_wider_matrix() -> None:
    wide = hard(70, 1300, torch.bfloat16)
    for first, last in ((0, 640), (128, 1024), (3, 1299)):  # the last one is not aligned to 16 bytes
        q = hopper.quantize_rows(wide.cuda()[:, first:last])
        assert_same(q.codes, q.scales, wanted_rows(wide[:, first:last]))


@pytest.mark.parametrize("parts", PARTS)
def test_rows_padded(parts: tuple[int, ...]) -> None:
    x = hard(67, sum(parts), torch.bfloat16)
    q = hopper.quantize_rows_padded(x.cuda(), parts)
    assert_same(q.codes, q.scales, wanted_rows(x, parts))
    assert_rows_layout(q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [noise, hard])
def test_tokens(make, dtype: torch.dtype) -> None:
    groups, there = token_groups(LENGTHS), token_groups(LENGTHS, "cuda")
    for cols in (576, 1, 127, 129, 1000):
        x = make(sum(LENGTHS), cols, dtype)
        q = hopper.quantize_tokens(x.cuda(), there)
        assert_same(q.codes, q.scales, wanted_tokens(x, groups))
        assert_tokens_layout(q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [None, *PARTS])
def test_both(parts: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    groups, there = token_groups(LENGTHS), token_groups(LENGTHS, "cuda")
    x = hard(sum(LENGTHS), sum(parts or (1000,)), dtype)
    rows, tokens = hopper.quantize_both(x.cuda(), there, parts)
    assert_same(rows.codes, rows.scales, wanted_rows(x, parts))
    assert_same(tokens.codes, tokens.scales, wanted_tokens(x, groups))
    assert_rows_layout(rows)
    assert_tokens_layout(tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [noise, hard])
def test_weight(make, dtype: torch.dtype) -> None:
    for parts in PARTS:
        for cols in (576, 129):
            w = make(sum(parts), cols, dtype)
            out = hopper.quantize_weight(w.cuda(), parts)
            wanted = wanted_weight(w, parts)
            assert_same(out.codes, out.scales, wanted)
            assert_same(out.codes_t, out.scales_t, Quantized(wanted.codes.t(), wanted.scales.t()))


def test_a_row_does_not_depend_on_the_others() -> None:
    x = hard(300, 1000, torch.bfloat16).cuda()
    whole = hopper.quantize_rows(x)
    for first, last in ((0, 1), (299, 300), (17, 50)):
        q = hopper.quantize_rows(x[first:last])
        assert torch.equal(q.codes.view(torch.uint8), whole.codes[first:last].view(torch.uint8))
        assert torch.equal(q.scales.nan_to_num(-1.0), whole.scales[first:last].nan_to_num(-1.0))


def test_graph_replays_new_values() -> None:
    """Nothing synchronises: all of it is captured, and `out` publishes a weight in place."""
    groups, there = token_groups([130]), token_groups([130], "cuda")
    x, w = noise(130, 256, torch.bfloat16).cuda(), noise(200, 256, torch.float32).cuda()
    hopper.quantize_both(x, there)
    out = hopper.quantize_weight(w)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, tokens = hopper.quantize_both(x, there)
        hopper.quantize_weight(w, out=out)
    new_x, new_w = hard(130, 256, torch.bfloat16), hard(200, 256, torch.float32)
    x.copy_(new_x)
    w.copy_(new_w)
    graph.replay()
    assert_same(rows.codes, rows.scales, wanted_rows(new_x))
    assert_same(tokens.codes, tokens.scales, wanted_tokens(new_x, groups))
    assert_same(out.codes, out.scales, wanted_weight(new_w, (200,)))


def test_more_than_2_to_the_31_elements() -> None:
    """The last rows, and the last column's groups, of a matrix that INT32 indices cannot reach the end of."""
    rows, cols = 2**19 + 1, 4097
    x = torch.full((1, 1), 1.0, dtype=torch.bfloat16, device="cuda").expand(rows, cols).contiguous()
    last = hard(129, cols, torch.bfloat16).cuda()
    x[-129:] = last
    q = hopper.quantize_rows(x)
    alone = wanted_rows(last.cpu())
    assert_same(q.codes[-129:], q.scales[-129:], alone)
    del q
    starts = torch.arange(0, rows, 128, dtype=torch.int32, device="cuda")
    sizes = torch.full_like(starts, 128)
    sizes[-1] = 1
    count = starts.shape[0]
    by_row, by_token = hopper.quantize_both(x, TokenGroups(starts, sizes, count))
    assert_same(by_row.codes[-129:], by_row.scales[-129:], alone)
    wanted = wanted_tokens(last.cpu(), token_groups([129]))
    assert_same(by_token.codes[:, -256:], by_token.scales[:, -2:], wanted)


@triton.jit
def _scale_kernel(
    amax,  # FP32 [n]
    scales,  # FP32 [n]
    n,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(scales + i, hopper.group_scale(tl.load(amax + i, mask=i < n, other=0.0)), mask=i < n)


def test_scale_of_every_float() -> None:
    """amax from 0 to infinity, and NaN: `group_scale` is the IEEE division."""
    top = torch.tensor(float("inf")).view(torch.int32).item()
    step = 2**28
    for first in range(0, top + 1, step):
        bits = torch.arange(first, min(first + step, top + 1), dtype=torch.int32, device="cuda")
        amax = bits.view(torch.float32)
        scales = torch.empty_like(amax)
        _scale_kernel[(triton.cdiv(len(bits), 1024),)](amax, scales, len(bits), BLOCK=1024)
        assert torch.equal(scales, amax.clamp(min=FLOOR) / torch.full_like(amax, 448.0))
    nan = torch.full((3,), float("nan"), device="cuda")
    _scale_kernel[(1,)](nan, scales, 3, BLOCK=1024)
    assert scales[:3].isnan().all()


@triton.jit
def _pairs_kernel(
    wrong,  # INT64 [bf16 values from 0 to infinity]: for each amax, how many x have another code
    BLOCK: tl.constexpr,
):
    """encode_bf16 against encode: amax is BF16 number program_id, x every BF16 number from -amax to amax."""
    amax_bits = tl.program_id(0)
    scale = hopper.group_scale((tl.zeros((1,), tl.int32) + (amax_bits << 16)).to(tl.float32, bitcast=True))
    different = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, amax_bits + 1, BLOCK):
        bits = tl.minimum(first + tl.arange(0, BLOCK), amax_bits)
        x = (bits << 16).to(tl.float32, bitcast=True)
        fast, exact = hopper.encode_bf16(x, scale), hopper.encode(x, scale)
        different += (fast.to(tl.uint8, bitcast=True) != exact.to(tl.uint8, bitcast=True)).to(tl.int32)
        fast, exact = hopper.encode_bf16(-x, scale), hopper.encode(-x, scale)
        different += (fast.to(tl.uint8, bitcast=True) != exact.to(tl.uint8, bitcast=True)).to(tl.int32)
    tl.store(wrong + amax_bits, tl.sum(different, 0).to(tl.int64))


def test_two_multiplications_are_the_division() -> None:
    """Every finite or infinite BF16 amax, and every BF16 value in its group."""
    count = (torch.tensor(float("inf")).view(torch.int32).item() >> 16) + 1
    wrong = torch.full((count,), -1, dtype=torch.int64, device="cuda")
    _pairs_kernel[(count,)](wrong, BLOCK=1024)
    assert not wrong.any(), wrong.nonzero()[:4]
