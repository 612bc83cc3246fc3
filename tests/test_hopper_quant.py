"""Indexing, masks, padding and layouts of the Hopper quantiser in Triton's interpreter, on a CPU.

The interpreter is chosen when triton is imported, so the checks run in a pytest of their own. It loses the carry when it rounds
to E4M3, and FP32 operations that a GPU fuses round twice there: so the data are powers of two within 2^12 of each other, whose
codes are 7 / 4 of a power of two, far from any rounding. `tests/gpu/test_quant.py` proves the bytes on any data.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from jetrl.kernels import quant
from jetrl.kernels.quant import GROUP, Quantized, TokenGroups, token_groups
from tests.interpreter import run_checks

SHAPES = [(1, 1), (33, 127), (32, 128), (3, 129), (2, 576)]
LENGTHS = [1, 127, 129]
PARTS = [(192, 64, 64), (128, 72), (101,)]


def padded(parts: tuple[int, ...]) -> list[int]:
    """Written apart from the package's own: what each part is stored as."""
    whole = all(part % GROUP == 0 for part in parts[:-1])
    return [part if whole else (part + 127) // 128 * 128 for part in parts]


def wanted_rows(x: Tensor, parts: tuple[int, ...] | None = None) -> Quantized:
    """`quantize_rows_padded` from the reference: each part alone, zero columns after it, which share a NaN of their group."""
    parts = parts or (x.shape[1],)
    sizes = zip(x.split(parts, 1), parts, padded(parts), strict=True)
    alone = [quant.quantize_rows(pad(part, (0, to - n))) for part, n, to in sizes]
    return Quantized(torch.cat([q.codes.view(torch.uint8) for q in alone], 1), torch.cat([q.scales for q in alone], 1))


def wanted_tokens(x: Tensor, groups: TokenGroups) -> Quantized:
    """`quantize_tokens` from the reference: its codes [T, cols], transposed, each group with room for 128 tokens."""
    spans = zip(groups.starts.tolist(), groups.sizes.tolist(), strict=True)
    full = torch.cat([pad(x[first : first + size], (0, 0, 0, GROUP - size)) for first, size in spans])
    q = quant.quantize_tokens(full, token_groups([GROUP] * groups.count))
    return Quantized(q.codes.view(torch.uint8).t(), q.scales.t())


def wanted_weight(w: Tensor, parts: tuple[int, ...]) -> Quantized:
    """`quantize_weight` from the reference: each part of the BF16 weight alone, zero rows after it."""
    sizes = zip(w.bfloat16().split(parts), parts, padded(parts), strict=True)
    alone = [quant.quantize_weight(pad(part, (0, 0, 0, to - n))) for part, n, to in sizes]
    return Quantized(torch.cat([q.codes.view(torch.uint8) for q in alone]), torch.cat([q.scales for q in alone]))


def assert_same(codes: Tensor, scales: Tensor, wanted: Quantized) -> None:
    """Equal bytes of codes and of scales; any NaN equals any other."""
    assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    seen, right = codes.cpu().view(torch.uint8), wanted.codes
    assert seen.shape == right.shape and scales.shape == wanted.scales.shape
    wrong = (seen != right) & ~((seen & 127 == 127) & (right & 127 == 127))
    assert not wrong.any(), (wrong.nonzero()[:4], seen[wrong][:4], right[wrong][:4])
    bits, right_bits = scales.cpu().contiguous().view(torch.int32), wanted.scales.contiguous().view(torch.int32)
    wrong = (bits != right_bits) & ~(scales.cpu().isnan() & wanted.scales.isnan())
    assert not wrong.any(), (wrong.nonzero()[:4], scales.cpu()[wrong][:4], wanted.scales[wrong][:4])


def assert_rows_layout(q: Quantized) -> None:
    assert q.codes.is_contiguous() and q.scales.stride() == (1, -(-q.codes.shape[0] // 4) * 4)


def assert_tokens_layout(q: Quantized) -> None:
    assert q.codes.is_contiguous() and q.scales.stride() == (1, -(-q.codes.shape[0] // 4) * 4)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_in_the_interpreter() -> None:
    run_checks(__file__)


def mend_the_quantiser(hopper: ModuleType) -> None:
    """Put functions of the language alone in the place of inline assembly, which the interpreter does not know."""
    global tl  # a kernel finds its names here
    import triton
    import triton.language as tl

    @triton.jit
    def reciprocal(x):
        return 1.0 / x

    @triton.jit
    def to_e4m3(x):
        return x.to(tl.float8e4nv)

    @triton.jit
    def to_words(low, high):
        low_bits = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low_bits | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)

    @triton.jit
    def amax_words(words, axis: tl.constexpr):
        return tl.max(words & 0x7FFF, axis) | (tl.max((words >> 16) & 0x7FFF, axis) << 16)

    hopper._reciprocal, hopper._to_e4m3, hopper.to_words, hopper.amax_words = reciprocal, to_e4m3, to_words, amax_words


def kernels() -> ModuleType:
    from jetrl.kernels.hopper import quant as hopper  # imports triton: only in the pytest with the interpreter

    mend_the_quantiser(hopper)
    return hopper


def powers_of_two(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """With a zero now and then, and a stretch of zeros."""
    generator = torch.Generator().manual_seed(rows * 1009 + cols)
    sign = torch.randint(0, 2, (rows, cols), generator=generator) * 2 - 1
    x = sign * torch.exp2(torch.randint(-6, 7, (rows, cols), generator=generator).float())
    x[torch.rand(rows, cols, generator=generator) < 0.1] = 0.0
    x[rows // 2, : cols // 2] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def check_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = powers_of_two(*shape, dtype)
    q = kernels().quantize_rows(x)
    assert_same(q.codes, q.scales, wanted_rows(x))
    assert_rows_layout(q)


def check_rows_of_a_wider_matrix() -> None:
    wide = powers_of_two(9, 400)
    q = kernels().quantize_rows(wide[:, 100:300])
    assert_same(q.codes, q.scales, wanted_rows(wide[:, 100:300]))


@pytest.mark.parametrize("parts", PARTS)
def check_rows_padded(parts: tuple[int, ...]) -> None:
    x = powers_of_two(6, sum(parts))
    q = kernels().quantize_rows_padded(x, parts)
    assert_same(q.codes, q.scales, wanted_rows(x, parts))
    assert_rows_layout(q)


@pytest.mark.parametrize(("cols", "dtype"), [(1, torch.float32), (200, torch.bfloat16)])
def check_tokens(cols: int, dtype: torch.dtype) -> None:
    groups = token_groups(LENGTHS)
    x = powers_of_two(sum(LENGTHS), cols, dtype)
    q = kernels().quantize_tokens(x, groups)
    assert_same(q.codes, q.scales, wanted_tokens(x, groups))
    assert_tokens_layout(q)


@pytest.mark.parametrize(("lengths", "parts"), [([130], None), ([5], (130, 70))])
def check_both(lengths: list[int], parts: tuple[int, ...] | None) -> None:
    groups = token_groups(lengths)
    x = powers_of_two(sum(lengths), sum(parts or (100,)))
    rows, tokens = kernels().quantize_both(x, groups, parts)
    assert_same(rows.codes, rows.scales, wanted_rows(x, parts))
    assert_same(tokens.codes, tokens.scales, wanted_tokens(x, groups))
    assert_rows_layout(rows)
    assert_tokens_layout(tokens)


@pytest.mark.parametrize("parts", PARTS)
def check_weight(parts: tuple[int, ...]) -> None:
    w = powers_of_two(sum(parts), 140)
    out = kernels().quantize_weight(w, parts)
    wanted = wanted_weight(w, parts)
    assert_same(out.codes, out.scales, wanted)
    assert_same(out.codes_t, out.scales_t, Quantized(wanted.codes.t(), wanted.scales.t()))
    assert all(t.is_contiguous() for t in (out.codes, out.scales, out.codes_t, out.scales_t))


def check_weight_in_place() -> None:
    first, second = powers_of_two(200, 100), powers_of_two(201, 100)[:200].bfloat16()
    out = kernels().quantize_weight(first)
    places = [t.data_ptr() for t in (out.codes, out.scales, out.codes_t, out.scales_t)]
    again = kernels().quantize_weight(second, out=out)
    assert places == [t.data_ptr() for t in (again.codes, again.scales, again.codes_t, again.scales_t)]
    assert_same(out.codes, out.scales, wanted_weight(second, (200,)))
    with pytest.raises(ValueError, match="out has codes"):
        kernels().quantize_weight(first[:128], out=out)


def check_what_is_refused() -> None:
    x = powers_of_two(8, 256)
    for wrong in (x.half(), x.t(), x[0], x[:0]):
        with pytest.raises(ValueError, match="takes a BF16 or FP32 matrix"):
            kernels().quantize_rows(wrong)
    with pytest.raises(ValueError, match="do not make up"):
        kernels().quantize_rows_padded(x, (128, 127))
