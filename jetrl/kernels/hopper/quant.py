"""The one quantiser on Hopper: the device functions that every fused kernel imports, and the kernels that only quantise.

Problem: the bytes must be those of `jetrl.kernels.quant`, on any data, while each kernel is bound by memory: 2 bytes read and
1 byte (rows) or 2 bytes (rows and tokens) written per element.

Method. A program takes a tile whose groups lie wholly inside it, so a group's amax needs no second pass and no other program:

    rows      32 rows x 128 columns      one scale a row
    tokens    one token group x 128      one scale a column; the tile is transposed on its way out
    both      one token group x 128      the two above from one read
    weight    128 x 128                  one scale; codes leave as they are and transposed

Codes are bytes, and a transpose would move them one by one through shared memory. So a tile is read as eight interleaved
parts (rows 8i, 8i + 1, ..., 8i + 7): the eight codes that are neighbours in the transpose lie in one thread and travel as
one 64-bit word, and the eight that are neighbours in a row leave as they are. Everything else of a tile is counted in
instructions, for memory leaves time for about 20 an element:

    BF16 values stay packed in INT32 words, of an even and an odd column, and are compared as such: two magnitudes at a time
    a value is unpacked once for both layouts, and four codes are made in one register
    an IEEE division takes some twenty instructions; `group_scale` and `encode_bf16` give its bytes in two multiplications,
    and the domain of each is small enough that tests try all of it

Layouts, as DeepGEMM's TMA reads them:

    rows      codes [M, K] contiguous; scales [M, ceil(K / 128)] stored by columns: strides (1, round_up(M, 4))
    tokens    codes [cols, 128 * G]: column 128 g + i is token i of group g, zero where the group has fewer tokens;
              scales [cols, G] stored by columns: strides (1, round_up(cols, 4))
    weight    codes [Np, K], scales [ceil(Np / 128), ceil(K / 128)]; codes_t [K, Np], scales_t [ceil(K / 128), ceil(Np / 128)]

Np counts padding: blocks start anew with each fused part, so unless every part but the last is a multiple of 128, each is
padded with zeros to one (SmolLM2's q, k, v: 576, 192, 192 become 640 + 256 + 256).

Given up: a padded tensor takes one launch for each part; a weight whose Np is no multiple of 16 is stored byte by byte when
transposed; at most 65,535 token groups a launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.hopper.overlap import OPTIONS, take_turn
from jetrl.kernels.quant import E4M3, GROUP, Quantized, TokenGroups

_WARPS = 8  # of a program on a tile of 128x128: 64 elements a thread
_REGISTERS = 128  # a thread: two programs an SM, so that one loads while the other computes
_ROWS = 32  # rows of a program of `quantize_rows`; a row's bytes do not depend on it
# 1 / 448 as the sum of two floats, the first a little below it.
_HIGH = tl.constexpr(float.fromhex("0x1.249248p-9"))
_LOW = tl.constexpr(float.fromhex("0x1.24924ap-33"))
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


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
def _reciprocal(x):
    """1 / x within an ulp, for FP32 x from 2^-126 to 2^126; 0 of infinity."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _to_e4m3(x):
    """FP32 to E4M3, four neighbours a register: Triton's own cast takes as many instructions again to put pairs together."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f",
        [x],
        tl.float8e4nv,
        is_pure=True,
        pack=4,
    )


@triton.jit
def encode_bf16(x, scale):
    """The bytes of `encode` in two multiplications, where x is FP32 but holds BF16 values and scale is that of their group.

    That is: scale = group_scale(amax) of a BF16 amax >= |x|. The reciprocal of the scale as the sum of two floats, high + low,
    gives a quotient that is off by about 2^-40 of itself before its one rounding. A BF16 value over such a scale never comes
    that near to where a code changes; a test tries every pair. One multiplication cannot do: for seven of the 128 mantissas
    of amax no float in the place of 1 / scale gives all codes. `high` lies a little below 1 / scale, whatever the rounding
    of the reciprocal: so low > 0, and -0 keeps its sign. No clamp: the quotient is at most 448 plus a rounding error.
    """
    high = _reciprocal(scale) * (1.0 - 2.0**-21)
    # Of an infinite scale high is 0, and with the largest float in its place so is low: finite / Inf is 0 and Inf / Inf NaN.
    low = tl.fma(tl.minimum(scale, _LARGEST) * -1.0, high, 1.0) * high
    return _to_e4m3(tl.fma(x, high, x * low))


@triton.jit
def _encode(x, scale, EXACT: tl.constexpr):
    """Codes of FP32 x, by IEEE division if EXACT; else x must hold BF16 values."""
    return encode(x, scale) if EXACT else encode_bf16(x, scale)


# ---- tiles of 128x128 -------------------------------------------------------------------------------------------------------
# Element [i, j, e] of a tile is row 8 i + e. Its rows lie in one thread, so that along the last dimension nothing has to move.


@triton.jit
def low_half(words):
    """The BF16 values in the low halves of INT32 words, FP32."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(words):
    """The BF16 values in the high halves of INT32 words, FP32."""
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def to_words(low, high):
    """Two FP32 tensors rounded to BF16, both in one of INT32: a register holds two elements, as it would not otherwise."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.int32, True, 1)


@triton.jit
def _load_part(part: tl.constexpr, x, row_stride, rows, cols):
    """Rows part, part + 8, ... of the tile at x: [16, 128], zero outside `rows` rows and `cols` columns."""
    row = 8 * tl.arange(0, 16)
    col = tl.arange(0, 128)
    inside = (row + part < rows)[:, None] & (col < cols)[None, :]
    x += tl.cast(part, tl.int64) * row_stride
    return tl.load(x + (row[:, None] * row_stride + col[None, :]), mask=inside, other=0.0)


@triton.jit
def load_words(part: tl.constexpr, x, row_stride, rows, cols):
    """`_load_part` of BF16 x as words, INT32 [16, 64]."""
    pairs = tl.reshape(_load_part(part, x, row_stride, rows, cols).to(tl.int16, bitcast=True), (16, 64, 2))
    even, odd = tl.split(pairs)
    return (even.to(tl.int32) & 65535) | (odd.to(tl.int32) << 16)


@triton.jit
def whole(make: tl.constexpr, arguments):
    """[16, n, 8] of the eight parts make(part, *arguments), each [16, n]: the rows of a column that lie in one thread."""
    a = tl.join(tl.join(make(0, *arguments), make(4, *arguments)), tl.join(make(2, *arguments), make(6, *arguments)))
    b = tl.join(tl.join(make(1, *arguments), make(5, *arguments)), tl.join(make(3, *arguments), make(7, *arguments)))
    joined = tl.join(a, b)
    return tl.reshape(joined, (16, joined.shape[1], 8))


@triton.jit
def _parts(tile):
    """The eight parts of a tile [16, n, 8] or [16, 8], in order: [16, n] or [16] each."""
    a, b = tl.split(tl.reshape(tile, tile.shape[:-1] + [4, 2]))  # noqa: RUF005 (Triton takes no star in a list)
    a, c = tl.split(tl.reshape(a, tile.shape[:-1] + [2, 2]))  # noqa: RUF005
    b, d = tl.split(tl.reshape(b, tile.shape[:-1] + [2, 2]))  # noqa: RUF005
    a, e = tl.split(a)
    b, f = tl.split(b)
    c, g = tl.split(c)
    d, h = tl.split(d)
    return a, b, c, d, e, f, g, h


@triton.jit
def halves(tile):
    """Even and odd columns, [16, n, 8] each, of a tile [16, 2 n, 8]."""
    pairs = tl.reshape(tile, (16, tile.shape[1] // 2, 2, 8))
    return tl.split(tl.permute(pairs, (0, 1, 3, 2)))


@triton.jit
def _larger(a, b):
    """The larger of the low and of the high halves of two words, as unsigned numbers."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def amax_words(words, axis: tl.constexpr):
    """max |x| of low and of high halves along `axis`, as words. Magnitudes are ordered as their bits are, NaN last."""
    return tl.reduce(words & 0x7FFF7FFF, axis, _larger)


@triton.jit
def _store_row_codes(even, odd, scale, codes, codes_stride, rows, cols, EXACT: tl.constexpr):
    """even, odd: FP32 [16, 64, 8]; scale: FP32 [16, 8]; codes: E4M3, the tile's first."""
    evens, odds, scales = _parts(even), _parts(odd), _parts(scale)
    row = 8 * tl.arange(0, 16)
    col = tl.arange(0, 128)
    # Eight bytes a thread, as the thread has them: to gather sixteen would take a way through shared memory.
    place = tl.max_contiguous(row[:, None] * codes_stride + col[None, :], (1, 8))
    for part in tl.static_range(8):
        code = _encode(tl.reshape(tl.join(evens[part], odds[part]), (16, 128)), scales[part][:, None], EXACT)
        stored = (row + part < rows)[:, None] & (col < cols)[None, :]
        tl.store(codes + tl.cast(part, tl.int64) * codes_stride + place, code, mask=stored)


@triton.jit
def _store_column_codes(even, odd, even_scale, odd_scale, codes, codes_stride, rows, cols, EXACT: tl.constexpr):
    """even, odd: FP32 [16, 64, 8]; scales: FP32 [64]; codes: E4M3 [cols, rows], the transposed tile's first."""
    code = tl.join(_encode(even, even_scale[None, :, None], EXACT), _encode(odd, odd_scale[None, :, None], EXACT))
    code = tl.reshape(tl.permute(code, (1, 3, 0, 2)), (128, 128))
    row = tl.arange(0, 128)
    col = tl.arange(0, 128)
    stored = (col < cols)[:, None] & (row < rows)[None, :]
    tl.store(codes + (col[:, None] * codes_stride + row[None, :]), code, mask=stored)


@triton.jit
def store_rows(even, odd, row_amax, codes, scales, codes_stride, rows, cols, EXACT: tl.constexpr = False):
    """Quantise a tile in 1x128 groups: FP32 even and odd columns [16, 64, 8], amax of its rows [16, 8].

    codes: E4M3, the tile's first; scales: FP32, of its first row. EXACT: of values that are not BF16.
    """
    scale = group_scale(row_amax)
    row = tl.arange(0, 128)
    tl.store(scales + row, tl.reshape(scale, (128,)), mask=row < rows)
    _store_row_codes(even, odd, scale, codes, codes_stride, rows, cols, EXACT)


@triton.jit
def store_tokens(even, odd, even_amax, odd_amax, codes, scales, codes_stride, cols, EXACT: tl.constexpr = False):
    """Quantise a tile in 128x1 groups: as in `store_rows`, with the amax of even and odd columns [64].

    codes: E4M3, the transposed tile's first; scales: FP32, of its first column.
    """
    even_scale, odd_scale = group_scale(even_amax), group_scale(odd_amax)
    col = tl.arange(0, 128)
    tl.store(scales + col, tl.reshape(tl.join(even_scale, odd_scale), (128,)), mask=col < cols)
    _store_column_codes(even, odd, even_scale, odd_scale, codes, codes_stride, 128, cols, EXACT)


@triton.jit
def token_group(starts, sizes):
    """(number, first token, tokens) of this program's token group, the first two int64; starts, sizes: INT32 [groups]."""
    group = tl.program_id(1).to(tl.int64)
    return group, tl.load(starts + group).to(tl.int64), tl.load(sizes + group)


@triton.jit
def store_word_rows(words, codes, scales, codes_stride, rows, cols):
    """`store_rows` of a tile of words [16, 64, 8], each an even and an odd column."""
    largest = amax_words(words, 1)
    row_amax = _nan_maximum(low_half(largest), high_half(largest))
    store_rows(low_half(words), high_half(words), row_amax, codes, scales, codes_stride, rows, cols)


@triton.jit
def store_word_tokens(words, codes, scales, codes_stride, cols):
    """`store_tokens` of a tile of words [16, 64, 8], each an even and an odd column."""
    largest = amax_words(amax_words(words, 2), 0)
    store_tokens(low_half(words), high_half(words), low_half(largest), high_half(largest), codes, scales, codes_stride, cols)


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
    take_turn()
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
    code = _encode(tile.to(tl.float32), scale[:, None], tile.dtype == tl.float32)
    tl.store(codes + row64 * codes_stride + col[None, :], code, mask=stored)


@triton.jit(do_not_specialize=["groups", "scales_stride", "row_scales_stride"])
def _tokens_kernel(
    x,  # BF16 or FP32 [T, cols], row stride x_stride, unit column stride
    starts,  # INT32 [groups]: first token of each group
    sizes,  # INT32 [groups]: its tokens, 1 to 128
    codes,  # E4M3 [cols, 128 * groups] contiguous
    scales,  # FP32 [cols, groups], stored by columns: strides (1, scales_stride)
    row_codes,  # E4M3 [T, stored_cols], row stride row_codes_stride; unused without ROWS
    row_scales,  # FP32 [T, ceil(cols / 128)], stored by columns: strides (1, row_scales_stride); unused without ROWS
    groups,
    cols,
    stored_cols,
    x_stride,
    scales_stride,
    row_codes_stride,
    row_scales_stride,
    ROWS: tl.constexpr,  # also quantise in 1x128 groups
):
    """128x1 groups of one token group and one block of 128 columns."""
    first = tl.program_id(0) * 128
    group, start, size = token_group(starts, sizes)
    left = cols - first
    x += start * x_stride + first
    codes += first.to(tl.int64) * (groups * 128) + group * 128
    scales += group * scales_stride + first
    row_codes += start * row_codes_stride + first
    row_scales += tl.program_id(0).to(tl.int64) * row_scales_stride + start
    if x.dtype.element_ty == tl.bfloat16:
        words = whole(load_words, (x, x_stride, size, left))
        if ROWS:
            store_word_rows(words, row_codes, row_scales, row_codes_stride, size, stored_cols - first)
        store_word_tokens(words, codes, scales, groups * 128, left)
    else:
        even, odd = halves(whole(_load_part, (x, x_stride, size, left)))
        if ROWS:
            row_amax = _nan_maximum(amax(even, 1), amax(odd, 1))
            store_rows(even, odd, row_amax, row_codes, row_scales, row_codes_stride, size, stored_cols - first, EXACT=True)
        even_amax, odd_amax = amax(amax(even, 2), 0), amax(amax(odd, 2), 0)
        store_tokens(even, odd, even_amax, odd_amax, codes, scales, groups * 128, left, EXACT=True)


@triton.jit(do_not_specialize=["rows"])
def _weight_kernel(
    w,  # BF16 or FP32 [rows, cols], row stride w_stride, unit column stride
    codes,  # E4M3 [stored_rows, cols], row stride cols: stored_rows - rows rows of zeros at the end
    scales,  # FP32 [ceil(stored_rows / 128), ceil(cols / 128)] contiguous
    codes_t,  # E4M3 [cols, stored_rows], row stride codes_t_stride: the transpose of codes
    scales_t,  # FP32 [ceil(cols / 128), ...], row stride scales_t_stride: the transpose of scales
    rows,
    cols,
    stored_rows,
    w_stride,
    codes_t_stride,
    scales_t_stride,
):
    """One 128x128 block."""
    blocks = tl.cdiv(cols, 128)
    row_block = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    first = block.to(tl.int64) * 128
    rows_left = rows - row_block * 128
    stored_left = stored_rows - row_block * 128
    row_block = row_block.to(tl.int64)
    cols_left = cols - block * 128
    w += row_block * 128 * w_stride + first
    if w.dtype.element_ty == tl.bfloat16:
        words = whole(load_words, (w, w_stride, rows_left, cols_left))
    else:
        words = to_words(*halves(whole(_load_part, (w, w_stride, rows_left, cols_left))))
    largest = amax_words(amax_words(amax_words(words, 1), 1), 0)
    scale = group_scale(_nan_maximum(low_half(largest), high_half(largest)))
    tl.store(scales + row_block * blocks + block, scale)
    tl.store(scales_t + block.to(tl.int64) * scales_t_stride + row_block, scale)
    even, odd = low_half(words), high_half(words)
    row_scale, column_scale = tl.broadcast_to(scale, (16, 8)), tl.broadcast_to(scale, (64,))
    _store_row_codes(even, odd, row_scale, codes + row_block * 128 * cols + first, cols, stored_left, cols_left, False)
    codes_t += first * codes_t_stride + row_block * 128
    _store_column_codes(even, odd, column_scale, column_scale, codes_t, codes_t_stride, stored_left, cols_left, False)


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
    _rows_kernel[grid](x, codes, scales, rows, cols, codes.shape[1], *strides, ROWS=_ROWS, num_warps=4, **OPTIONS)


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
    grid = (_blocks(cols), groups.count)
    # Without rows the kernel never touches these arguments.
    row_codes, row_scales = (rows.codes, rows.scales) if rows else (codes, scales)
    _tokens_kernel[grid](
        x,
        groups.starts,
        groups.sizes,
        codes,
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
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
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
    for first, size, to, padded in _spans(parts):
        _weight_kernel[(_blocks(padded) * _blocks(w.shape[1]),)](
            w[first : first + size],
            out.codes[to : to + padded],
            out.scales[to // GROUP :],
            out.codes_t[:, to:],
            out.scales_t[:, to // GROUP :],
            size,
            w.shape[1],
            padded,
            w.stride(0),
            out.codes_t.stride(0),
            out.scales_t.stride(0),
            num_warps=_WARPS,
        )
    return out
