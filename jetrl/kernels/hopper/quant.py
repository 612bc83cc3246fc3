"""The one quantiser on Hopper: the device functions that every fused kernel imports, and the kernels that only quantise.

Problem: the bytes must be those of `jetrl.kernels.quant`, on any data, while each kernel is bound by memory: 2 bytes read and
1 byte (rows) or 2 bytes (rows and tokens) written per element.

Method. A program takes a tile whose groups lie wholly inside it, so a group's amax needs no second pass and no other program:

    rows      32 rows x 128 columns      one scale a row
    tokens    one token group x 128      one scale a column; the tile is transposed on its way out
    both      one token group x 128      the two above from one read
    weight    128 x 128                  one scale; codes leave as they are and transposed

Codes are bytes, and a transpose would move them one by one through shared memory. So a tile is read as four interleaved
quarters (rows 4i, 4i + 1, 4i + 2, 4i + 3): the four codes that are neighbours in the transpose lie in one thread, travel as one
32-bit word, and leave in 16-byte stores.

An IEEE division takes some twenty instructions, more than the memory leaves time for. `group_scale` and `encode_bf16` give the
bytes of the division in two multiplications; the domain of each is small enough that tests try all of it.

Layouts, as DeepGEMM's TMA reads them:

    rows      codes [M, K] contiguous; scales [M, ceil(K / 128)] stored by columns: strides (1, round_up(M, 4))
    tokens    codes [cols, 128 * G]: column 128 g + i is token i of group g, zero where the group has fewer tokens;
              scales [cols, G] stored by columns: strides (1, round_up(cols, 4))
    weight    codes [Np, K], scales [ceil(Np / 128), ceil(K / 128)]; codes_t [K, Np], scales_t [ceil(K / 128), ceil(Np / 128)]

Np counts padding: blocks start anew with each fused part, so unless every part but the last is a multiple of 128, each is
padded with zeros to one (SmolLM2's q, k, v: 576, 192, 192 become 640 + 256 + 256).

Given up: a padded tensor takes one launch for each part; a weight whose Np is no multiple of 4 is transposed byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.quant import E4M3, GROUP, Quantized, TokenGroups

_ROWS = 32  # rows of a program of `quantize_rows`; a row's bytes do not depend on it
# 1 / 448 as the sum of two floats, the first a little below it.
_HIGH = tl.constexpr(float.fromhex("0x1.249248p-9"))
_LOW = tl.constexpr(float.fromhex("0x1.24924ap-33"))


# ---- device functions -------------------------------------------------------------------------------------------------------


@triton.jit
def _nan_maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax(x, axis: tl.constexpr):
    """max |x| of FP32 x along `axis`; NaN if there is one (tl.max would drop it)."""
    return tl.reduce(tl.abs(x), axis, _nan_maximum)


@triton.jit
def group_scale(amax):
    """The dequantising multiplier of a group: max(amax, 1e-12) / 448 in FP32, rounded as IEEE division does. NaN and Inf stay.

    Two multiplications by 1 / 448 in two floats: exact for every float from 1e-12 to Inf (a test tries them all).
    """
    floored = tl.maximum(amax, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    return tl.fma(floored, tl.zeros_like(floored) + _HIGH, floored * _LOW)


@triton.jit
def encode(x, scale):
    """E4M3 codes of FP32 x under `scale`, which must broadcast to x: clamp(x / scale, -448, 448), IEEE division."""
    return tl.clamp(tl.div_rn(x, scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def encode_bf16(x, scale):
    """The bytes of `encode` in two multiplications, where x is FP32 but holds BF16 values and scale is that of their group.

    That is: scale = group_scale(amax) of a BF16 amax >= |x|. The reciprocal of the scale as the sum of two floats, high + low,
    gives a quotient that is off by about 2^-40 of itself before its one rounding. A BF16 value over such a scale never comes
    that near to where a code changes; a test tries every pair. `high` lies a little below 1 / scale, whatever the rounding of
    the reciprocal: so low > 0, and -0 keeps its sign. No clamp: the quotient is at most 448 plus a rounding error.
    """
    finite = scale != float("inf")  # finite / Inf is 0 and Inf / Inf is NaN: x * 0 gives both
    high = ((1.0 / scale).to(tl.int32, bitcast=True) - 4).to(tl.float32, bitcast=True)  # approximate, so 4 ulp less
    low = tl.fma(-scale, high, 1.0) * high
    high = tl.where(finite, high, 0.0)
    low = tl.where(finite, low, 0.0)
    return tl.fma(x, high, x * low).to(tl.float8e4nv)


@triton.jit
def _encode(x, scale):
    """Codes of x as it was loaded."""
    if x.dtype == tl.bfloat16:
        return encode_bf16(x.to(tl.float32), scale)
    else:
        return encode(x, scale)


@triton.jit
def _load_quarter(x, row_stride, rows, cols, quarter: tl.constexpr):
    """Rows quarter, quarter + 4, ... of the 128x128 tile at x: [32, 128], zero outside `rows` rows and `cols` columns."""
    row = 4 * tl.arange(0, 32) + quarter
    col = tl.arange(0, 128)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * row_stride + col[None, :], mask=inside, other=0.0)


@triton.jit
def _largest(a, b, c, d):
    """Elementwise max of absolute values in FP32."""
    ab = _nan_maximum(tl.abs(a.to(tl.float32)), tl.abs(b.to(tl.float32)))
    return _nan_maximum(ab, _nan_maximum(tl.abs(c.to(tl.float32)), tl.abs(d.to(tl.float32))))


@triton.jit
def _encode_words(a, b, c, d, scale):
    """Codes of a tile's four quarters, as the 32-bit words that hold four rows of a column: [128 cols, 32].

    scale: a scalar, or [1, 128, 1].
    """
    # Joined first, so that one instruction converts two neighbours of a word.
    first, second = tl.split(_encode(tl.join(a, b), scale).to(tl.uint8, bitcast=True))
    low = first.to(tl.uint16) | (second.to(tl.uint16) << 8)
    first, second = tl.split(_encode(tl.join(c, d), scale).to(tl.uint8, bitcast=True))
    high = first.to(tl.uint16) | (second.to(tl.uint16) << 8)
    return tl.trans(low.to(tl.uint32) | (high.to(tl.uint32) << 16)).to(tl.int32, bitcast=True)


# ---- kernels ----------------------------------------------------------------------------------------------------------------


# Not specialised: what follows the number of tokens, so that no batch size compiles anew.
@triton.jit(do_not_specialize=["rows", "scales_stride"])
def _rows_kernel(
    x,  # BF16 or FP32 [rows, cols], row stride x_stride, unit column stride
    codes,  # E4M3 [rows, stored_cols], row stride codes_stride: stored_cols - cols columns of zeros at the end
    scales,  # FP32 [rows, ceil(cols / 128)], stored by columns: strides (1, scales_stride)
    rows,
    cols,
    stored_cols,
    x_stride,
    codes_stride,
    scales_stride,
    ROWS: tl.constexpr,
):
    """1x128 groups of ROWS rows and one block of 128 columns."""
    blocks = tl.cdiv(cols, 128)
    first = tl.program_id(0) // blocks * ROWS
    block = tl.program_id(0) % blocks
    row = first + tl.arange(0, ROWS)
    col = block * 128 + tl.arange(0, 128)
    row_inside = row < rows
    row64 = row.to(tl.int64)[:, None]
    inside = row_inside[:, None] & (col < cols)[None, :]
    tile = tl.load(x + row64 * x_stride + col[None, :], mask=inside, other=0.0)
    scale = group_scale(amax(tile.to(tl.float32), 1))
    tl.store(scales + block.to(tl.int64) * scales_stride + row, scale, mask=row_inside)
    stored = row_inside[:, None] & (col < stored_cols)[None, :]
    tl.store(codes + row64 * codes_stride + col[None, :], _encode(tile, scale[:, None]), mask=stored)


@triton.jit
def _store_quarter_rows(tile, codes, scales, codes_stride, rows, cols, quarter: tl.constexpr):
    """Quantise a quarter (`_load_quarter`) in 1x128 groups. codes: E4M3, the tile's first; scales: FP32, its first row's."""
    row = 4 * tl.arange(0, 32) + quarter
    col = tl.arange(0, 128)
    scale = group_scale(amax(tile.to(tl.float32), 1))
    tl.store(scales + row, scale, mask=row < rows)
    stored = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(codes + row.to(tl.int64)[:, None] * codes_stride + col[None, :], _encode(tile, scale[:, None]), mask=stored)


@triton.jit(do_not_specialize=["groups", "scales_stride", "row_scales_stride"])
def _tokens_kernel(
    x,  # BF16 or FP32 [T, cols], row stride x_stride, unit column stride
    starts,  # INT32 [groups]: first token of each group
    sizes,  # INT32 [groups]: its tokens, 1 to 128
    words,  # INT32 [cols, 32 * groups] contiguous: E4M3 codes [cols, 128 * groups], four to a word
    scales,  # FP32 [cols, groups], stored by columns: strides (1, scales_stride)
    row_codes,  # E4M3 [T, stored_cols], row stride codes_stride; unused without ROWS
    row_scales,  # FP32 [T, ceil(cols / 128)], stored by columns: strides (1, row_scales_stride); unused without ROWS
    groups,
    cols,
    stored_cols,
    x_stride,
    scales_stride,
    codes_stride,
    row_scales_stride,
    ROWS: tl.constexpr,  # also quantise in 1x128 groups
):
    """128x1 groups of one token group and one block of 128 columns."""
    blocks = tl.cdiv(cols, 128)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    start = tl.load(starts + group).to(tl.int64)
    size = tl.load(sizes + group)
    tile = x + start * x_stride + block * 128
    a = _load_quarter(tile, x_stride, size, cols - block * 128, 0)
    b = _load_quarter(tile, x_stride, size, cols - block * 128, 1)
    c = _load_quarter(tile, x_stride, size, cols - block * 128, 2)
    d = _load_quarter(tile, x_stride, size, cols - block * 128, 3)
    if ROWS:
        to = row_codes + start * codes_stride + block * 128
        scales_to = row_scales + block.to(tl.int64) * row_scales_stride + start
        _store_quarter_rows(a, to, scales_to, codes_stride, size, stored_cols - block * 128, 0)
        _store_quarter_rows(b, to, scales_to, codes_stride, size, stored_cols - block * 128, 1)
        _store_quarter_rows(c, to, scales_to, codes_stride, size, stored_cols - block * 128, 2)
        _store_quarter_rows(d, to, scales_to, codes_stride, size, stored_cols - block * 128, 3)
    col = block * 128 + tl.arange(0, 128)
    scale = group_scale(amax(_largest(a, b, c, d), 0))
    tl.store(scales + group * scales_stride + col, scale, mask=col < cols)
    packed = _encode_words(a, b, c, d, scale[None, :, None])
    to = col.to(tl.int64)[:, None] * (groups * 32) + group * 32 + tl.arange(0, 32)[None, :]
    tl.store(words + to, packed, mask=(col < cols)[:, None])


@triton.jit
def _store_quarter_weight(code, codes, codes_stride, rows, cols, quarter: tl.constexpr):
    """codes: E4M3, the tile's first."""
    row = 4 * tl.arange(0, 32) + quarter
    col = tl.arange(0, 128)
    stored = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(codes + row.to(tl.int64)[:, None] * codes_stride + col[None, :], code, mask=stored)


@triton.jit
def _store_quarter_transposed(code, codes_t, codes_t_stride, rows, cols, quarter: tl.constexpr):
    """Byte by byte, for a codes_t [cols, rows] whose rows do not start at a word."""
    row = 4 * tl.arange(0, 32) + quarter
    col = tl.arange(0, 128)
    stored = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(codes_t + col.to(tl.int64)[None, :] * codes_t_stride + row[:, None], code, mask=stored)


@triton.jit(do_not_specialize=["rows"])
def _weight_kernel(
    w,  # BF16 or FP32 [rows, cols], row stride w_stride, unit column stride
    codes,  # E4M3 [stored_rows, cols], row stride cols: stored_rows - rows rows of zeros at the end
    scales,  # FP32 [ceil(stored_rows / 128), ceil(cols / 128)] contiguous
    codes_t,  # WORDS: INT32 [cols, codes_t_stride], four codes to a word, else E4M3: the transpose of codes
    scales_t,  # FP32 [ceil(cols / 128), ...], row stride scales_t_stride: the transpose of scales
    rows,
    cols,
    stored_rows,
    w_stride,
    codes_t_stride,
    scales_t_stride,
    WORDS: tl.constexpr,
):
    """One 128x128 block."""
    blocks = tl.cdiv(cols, 128)
    row_block = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    left = rows - row_block * 128
    stored_left = stored_rows - row_block * 128
    row_block = row_block.to(tl.int64)
    tile = w + row_block * 128 * w_stride + block * 128
    cols_left = cols - block * 128
    a = _load_quarter(tile, w_stride, left, cols_left, 0).to(tl.bfloat16)
    b = _load_quarter(tile, w_stride, left, cols_left, 1).to(tl.bfloat16)
    c = _load_quarter(tile, w_stride, left, cols_left, 2).to(tl.bfloat16)
    d = _load_quarter(tile, w_stride, left, cols_left, 3).to(tl.bfloat16)
    scale = group_scale(amax(amax(_largest(a, b, c, d), 1), 0))
    tl.store(scales + row_block * blocks + block, scale)
    tl.store(scales_t + block.to(tl.int64) * scales_t_stride + row_block, scale)

    to = codes + row_block * 128 * cols + block * 128
    _store_quarter_weight(_encode(a, scale), to, cols, stored_left, cols_left, 0)
    _store_quarter_weight(_encode(b, scale), to, cols, stored_left, cols_left, 1)
    _store_quarter_weight(_encode(c, scale), to, cols, stored_left, cols_left, 2)
    _store_quarter_weight(_encode(d, scale), to, cols, stored_left, cols_left, 3)
    if WORDS:
        col = tl.arange(0, 128)
        word = tl.arange(0, 32)
        to = codes_t + (block * 128 + col).to(tl.int64)[:, None] * codes_t_stride + row_block * 32 + word[None, :]
        stored = (col < cols_left)[:, None] & (word < stored_left // 4)[None, :]
        tl.store(to, _encode_words(a, b, c, d, scale), mask=stored)
    else:
        to = codes_t + (block * 128).to(tl.int64) * codes_t_stride + row_block * 128
        _store_quarter_transposed(_encode(a, scale), to, codes_t_stride, stored_left, cols_left, 0)
        _store_quarter_transposed(_encode(b, scale), to, codes_t_stride, stored_left, cols_left, 1)
        _store_quarter_transposed(_encode(c, scale), to, codes_t_stride, stored_left, cols_left, 2)
        _store_quarter_transposed(_encode(d, scale), to, codes_t_stride, stored_left, cols_left, 3)


# ---- host functions ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class WeightCodes:
    """A weight in 128x128 blocks, and its transpose for grad_input; layouts in the file's docstring."""

    codes: Tensor  # float8_e4m3fn [Np, K]
    scales: Tensor  # float32 [ceil(Np / 128), ceil(K / 128)]
    codes_t: Tensor  # float8_e4m3fn [K, Np]
    scales_t: Tensor  # float32 [ceil(K / 128), ceil(Np / 128)]


def padded_parts(parts: tuple[int, ...]) -> tuple[int, ...]:
    """Size of each fused part with its padding: none if every part but the last is a multiple of 128."""
    if all(part % GROUP == 0 for part in parts[:-1]):
        return parts
    return tuple(_round_up(part, GROUP) for part in parts)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _blocks(n: int) -> int:
    return -(-n // GROUP)


def _by_columns(rows: int, cols: int, device: torch.device | str) -> Tensor:
    """FP32 scales [rows, cols] with strides (1, round_up(rows, 4))."""
    return torch.empty(cols, _round_up(rows, 4), dtype=torch.float32, device=device).t()[:rows]


def empty_rows(rows: int, cols: int, device: torch.device | str) -> Quantized:
    """Room for [rows, cols] in 1x128 groups, uninitialised."""
    codes = torch.empty(rows, cols, dtype=E4M3, device=device)
    return Quantized(codes, _by_columns(rows, _blocks(cols), device))


def empty_tokens(cols: int, groups_count: int, device: torch.device | str) -> Quantized:
    """Room for [T, cols] in 128x1 groups, transposed, uninitialised."""
    codes = torch.empty(cols, GROUP * groups_count, dtype=E4M3, device=device)
    return Quantized(codes, _by_columns(cols, groups_count, device))


def empty_weight(parts: tuple[int, ...], cols: int, device: torch.device | str) -> WeightCodes:
    """Room for a weight [sum(parts), cols] and its transpose, uninitialised."""
    rows = sum(padded_parts(parts))
    return WeightCodes(
        torch.empty(rows, cols, dtype=E4M3, device=device),
        torch.empty(_blocks(rows), _blocks(cols), dtype=torch.float32, device=device),
        torch.empty(cols, rows, dtype=E4M3, device=device),
        torch.empty(_blocks(cols), _blocks(rows), dtype=torch.float32, device=device),
    )


def _spans(parts: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """(first, size, first with padding, size with padding) of what one launch takes: a part, or all where nothing is padded."""
    padded = padded_parts(parts)
    if padded == parts:
        return [(0, sum(parts), 0, sum(parts))]
    spans, first, to = [], 0, 0
    for size, padded_size in zip(parts, padded, strict=True):
        spans.append((first, size, to, padded_size))
        first, to = first + size, to + padded_size
    return spans


def _check(x: Tensor, parts: tuple[int, ...] | None = None, dim: int = 1) -> None:
    if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float32) or 0 in x.shape or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"to quantise takes a BF16 or FP32 matrix with unit column stride, not {x.dtype} {tuple(x.shape)}")
    if parts is not None and (sum(parts) != x.shape[dim] or min(parts) < 1):
        raise ValueError(f"parts {parts} do not make up dimension {dim} of {tuple(x.shape)}")


def quantize_rows(x: Tensor) -> Quantized:
    """Quantise x [M, K] (BF16 or FP32, any row stride, unit column stride) in 1x128 groups. A row's bytes depend on it alone.

    Raises ValueError for another dtype, another column stride or an empty x, like every function below.
    """
    return quantize_rows_padded(x, x.shape[1:])


def quantize_rows_padded(x: Tensor, parts: tuple[int, ...]) -> Quantized:
    """`quantize_rows` of fused columns: blocks start anew with each part; codes [M, Np] with zeros in the padding."""
    _check(x, parts)
    out = empty_rows(x.shape[0], sum(padded_parts(parts)), x.device)
    for first, size, to, padded in _spans(parts):
        _launch_rows(x[:, first : first + size], out.codes[:, to : to + padded], out.scales[:, to // GROUP :])
    return out


def _launch_rows(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    rows, cols = x.shape
    grid = (triton.cdiv(rows, _ROWS) * _blocks(cols),)
    strides = x.stride(0), codes.stride(0), scales.stride(1)
    _rows_kernel[grid](x, codes, scales, rows, cols, codes.shape[1], *strides, ROWS=_ROWS, num_warps=4)


def quantize_tokens(x: Tensor, groups: TokenGroups) -> Quantized:
    """Quantise x [T, cols] (BF16 or FP32) in 128x1 groups along tokens: codes [cols, 128 * G], scales [cols, G]."""
    _check(x)
    tokens = empty_tokens(x.shape[1], groups.count, x.device)
    _launch_tokens(x, groups, tokens.codes, tokens.scales)
    return tokens


def quantize_both(x: Tensor, groups: TokenGroups, parts: tuple[int, ...] | None = None) -> tuple[Quantized, Quantized]:
    """`quantize_rows` (padded if `parts` says so) and `quantize_tokens` of x [T, cols], which is read once.

    The groups must cover all of x. Padding is the rows' alone: the tokens' codes are [cols, 128 * G].
    """
    _check(x, parts)
    parts = parts or tuple(x.shape[1:])
    rows = empty_rows(x.shape[0], sum(padded_parts(parts)), x.device)
    tokens = empty_tokens(x.shape[1], groups.count, x.device)
    for first, size, to, padded in _spans(parts):
        _launch_tokens(
            x[:, first : first + size],
            groups,
            tokens.codes[first : first + size],
            tokens.scales[first : first + size],
            Quantized(rows.codes[:, to : to + padded], rows.scales[:, to // GROUP :]),
        )
    return rows, tokens


def _launch_tokens(x: Tensor, groups: TokenGroups, codes: Tensor, scales: Tensor, rows: Quantized | None = None) -> None:
    cols = x.shape[1]
    grid = (groups.count * _blocks(cols),)
    # Without rows the kernel never touches these arguments.
    row_codes, row_scales = (rows.codes, rows.scales) if rows else (codes, scales)
    _tokens_kernel[grid](
        x,
        groups.starts,
        groups.sizes,
        codes.view(torch.int32),
        scales,
        row_codes,
        row_scales,
        groups.count,
        cols,
        row_codes.shape[1] if rows else cols,
        x.stride(0),
        scales.stride(1),
        row_codes.stride(0),
        row_scales.stride(1),
        ROWS=rows is not None,
        num_warps=8,
    )


def quantize_weight(w: Tensor, parts: tuple[int, ...] | None = None, out: WeightCodes | None = None) -> WeightCodes:
    """Quantise a weight w [N, K] (BF16, or FP32 masters, which are rounded to BF16 first) in 128x128 blocks, both ways round.

    `parts`: rows of each fused projection, by default one part. `out`: write into these buffers instead of new ones, so that
    what was captured in a CUDA graph reads the new weight. Raises ValueError also where `out` has other shapes.
    """
    parts = parts or (w.shape[0],)
    _check(w, parts, dim=0)
    out = out or empty_weight(parts, w.shape[1], w.device)
    rows = sum(padded_parts(parts))
    if out.codes.shape != (rows, w.shape[1]) or out.codes_t.shape != (w.shape[1], rows):
        raise ValueError(f"out has codes {tuple(out.codes.shape)}, the weight takes {(rows, w.shape[1])}")
    in_words = rows % 4 == 0
    codes_t = out.codes_t.view(torch.int32) if in_words else out.codes_t
    for first, size, to, padded in _spans(parts):
        _weight_kernel[(_blocks(padded) * _blocks(w.shape[1]),)](
            w[first : first + size],
            out.codes[to : to + padded],
            out.scales[to // GROUP :],
            codes_t[:, (to // 4 if in_words else to) :],
            out.scales_t[:, to // GROUP :],
            size,
            w.shape[1],
            padded,
            w.stride(0),
            codes_t.stride(0),
            out.scales_t.stride(0),
            WORDS=in_words,
            num_warps=8,
        )
    return out
