"""RMSNorm with its residual, SiLU-mul and their gradients on Hopper, each fused with the quantisation of what it makes.

Problem: these operators are bound by memory, and written one by one they pass the same activation through memory four
times: the residual sum, the norm, the 1x128 codes for the forward, the 128x1 codes for the weight gradient.

Method: one read, and every output from registers. Wherever the flow of single operators has a BF16 tensor, the value is
rounded to BF16 in registers, so fused bytes equal unfused bytes. Two shapes of tile:

    a row       one program holds a whole row as [groups of 128, 128]: norms, whose sum needs all of it
    a square    one token group x 128 columns: both quantised layouts (1x128 and 128x1) of one read

Layout rules: the sum over a row has one order, which depends on the row's width alone: one program a row, warps chosen by
the width, operands aligned to 16 bytes (others are copied first), no fused multiply-add (`enable_fp_fusion=False`), so
that variants of a kernel cannot contract differently. Largest magnitudes have no order; SiLU tiles may be of any shape.
Gradients of norm weights are summed in two stages: a number of row chunks that depends on T alone, then those in order.

Given up: the norm's 128x1 codes take a second read of the residual, since a row's scale must be known first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.hopper.overlap import OPTIONS, take_turn
from jetrl.kernels.hopper.quant import (
    amax,
    amax_words,
    empty_rows,
    empty_tokens,
    encode_bf16,
    group_scale,
    halves,
    high_half,
    load_words,
    low_half,
    quantize_both,
    store_rows,
    store_tokens,
    store_word_rows,
    store_word_tokens,
    to_words,
    token_group,
    whole,
)
from jetrl.kernels.quant import Quantized, TokenGroups

_MAX_WIDTH = 16384  # of a normed row: it has to fit in the registers of one program
_MAX_CHUNKS = 512  # of rows, in the first stage of a norm weight's gradient: four programs of 8 warps an SM
_SQUARE_WARPS = 8  # of a program on a square: 64 elements a thread
_SQUARE_REGISTERS = 128  # a thread: two programs an SM, so that one loads while the other computes
_ROW_GROUPS = 16  # groups of 128 columns of a SiLU program: two 16-byte loads of each operand in each of 128 threads


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in FP32 within a few units in the last place, 0 below 2^-126; half of Triton's instructions."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;",
        "=f,f",
        [x * -1.4426950408889634],  # -log2(e)
        tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def inverse_rms(squares, eps, WIDTH: tl.constexpr):
    """1 / sqrt(mean + eps) of a sum of squares over WIDTH elements, FP32."""
    root = tl.sqrt_rn(squares * (1.0 / WIDTH) + eps)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def _add_rms_norm(
    x_ptr,  # bf16 [T, WIDTH], contiguous like all below
    delta_ptr,  # bf16 [T, WIDTH], added to x; unread without HAS_DELTA
    weight_ptr,  # bf16 [WIDTH]
    sum_ptr,  # bf16 [T, WIDTH], out: x + delta; unwritten without HAS_DELTA
    y_ptr,  # out: bf16 [T, WIDTH], or e4m3 codes with QUANTIZE
    scales_ptr,  # fp32, out: scale of (row, group) at group * scale_stride + row; unwritten without QUANTIZE
    inverse_ptr,  # fp32 [T], out: 1 / sqrt(mean(sum^2) + eps)
    eps,
    scale_stride,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,  # of 128 columns, rounded up to a power of two
    HAS_DELTA: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = col < WIDTH
    # 8 elements a thread, also where codes could be stored 16 at a time: else the sum's order would depend on QUANTIZE.
    place = tl.max_contiguous(row * WIDTH + col, (1, 8))
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        total = (x + tl.load(delta_ptr + place, mask=inside, other=0.0).to(tl.float32)).to(tl.bfloat16)
        tl.store(sum_ptr + place, total, mask=inside)
        x = total.to(tl.float32)
    inverse = inverse_rms(tl.sum(tl.sum(x * x, 1), 0), eps, WIDTH)
    tl.store(inverse_ptr + row, inverse)
    y = (x * inverse * weight).to(tl.bfloat16)
    if QUANTIZE:
        wide = y.to(tl.float32)
        scale = group_scale(amax(wide, 1))
        tl.store(scales_ptr + group.to(tl.int64) * scale_stride + row, scale, mask=group * 128 < WIDTH)
        tl.store(y_ptr + place, encode_bf16(wide, scale[:, None]), mask=inside)
    else:
        tl.store(y_ptr + place, y, mask=inside)


@triton.jit
def _rms_norm_part(part: tl.constexpr, x_ptr, inverse_ptr, even_weight, odd_weight, row_stride, size, cols):
    """y of a part of a square, as words [16, 64]; x_ptr: of the square's first element; inverse_ptr: of its first token."""
    row = 8 * tl.arange(0, 16) + part
    x = load_words(part, x_ptr, row_stride, size, cols)
    inverse = tl.load(inverse_ptr + row, mask=row < size, other=0.0)[:, None]
    y = to_words(low_half(x) * inverse * even_weight[None, :], high_half(x) * inverse * odd_weight[None, :])
    return tl.where((row < size)[:, None], y, 0)  # 0 * a negative weight would be -0


@triton.jit
def _rms_norm_tokens(
    x_ptr,  # bf16 [T, width]: the residual sum
    inverse_ptr,  # fp32 [T], as `_add_rms_norm` made it
    weight_ptr,  # bf16 [width]
    starts_ptr,  # int32 [G], first token of each group
    sizes_ptr,  # int32 [G], its tokens
    codes_ptr,  # e4m3 [width, 128 G], out
    scales_ptr,  # fp32, out: scale of (column, group) at group * scale_stride + column
    width,
    code_stride,
    scale_stride,
):
    first = tl.program_id(0) * 128
    group, start, size = token_group(starts_ptr, sizes_ptr)
    left = width - first
    col = tl.arange(0, 128)
    weight = tl.load(weight_ptr + first + col, mask=col < left, other=0.0).to(tl.float32)
    even_weight, odd_weight = tl.split(tl.reshape(weight, (64, 2)))
    x_ptr += start * width + first
    words = whole(_rms_norm_part, (x_ptr, inverse_ptr + start, even_weight, odd_weight, width, size, left))
    codes_ptr += first.to(tl.int64) * code_stride + group * 128
    store_word_tokens(words, codes_ptr, scales_ptr + group * scale_stride + first, code_stride, left)


@triton.jit
def _rms_norm_grad(
    dy_ptr,  # bf16 [T, WIDTH]
    x_ptr,  # bf16 [T, WIDTH]: what was normed
    inverse_ptr,  # fp32 [T], as `_add_rms_norm` made it
    weight_ptr,  # bf16 [WIDTH]
    residual_ptr,  # bf16 [T, WIDTH]: gradient that passes the norm by; unread without HAS_RESIDUAL
    dx_ptr,  # bf16 [T, WIDTH], out
    partials_ptr,  # fp32 [programs, WIDTH], out: this program's share of the weight's gradient
    rows,
    rows_per_program,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,  # loads of the next rows run while one is worked on
):
    program = tl.program_id(0)
    col = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = col < WIDTH
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((GROUPS, 128), tl.float32)
    first = program * rows_per_program
    for row in tl.range(first, tl.minimum(first + rows_per_program, rows), num_stages=STAGES):
        place = tl.cast(row, tl.int64) * WIDTH + col
        dy = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row)
        unit = x * inverse
        dweight += dy * unit
        scaled = dy * weight
        mean = tl.sum(tl.sum(scaled * unit, 1), 0) * (1.0 / WIDTH)
        dx = ((scaled - unit * mean) * inverse).to(tl.bfloat16)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
            dx = (dx.to(tl.float32) + residual).to(tl.bfloat16)
        tl.store(dx_ptr + place, dx, mask=inside)
    tl.store(partials_ptr + program.to(tl.int64) * WIDTH + col, dweight, mask=inside)


@triton.jit
def _sum_partials(
    partials_ptr,  # fp32 [rows, width]
    total_ptr,  # fp32 [width], out: sum over the rows
    rows,
    width,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, rows, ROWS):
        inside = (first + row < rows)[:, None] & (col < width)[None, :]
        total += tl.load(partials_ptr + (first + row)[:, None] * width + col[None, :], mask=inside, other=0.0)
    tl.store(total_ptr + col, tl.sum(total, 0), mask=col < width)


@triton.jit
def _silu_mul(gate, up):
    """SiLU(gate) * up, fp32, not yet rounded."""
    return gate * sigmoid(gate) * up


@triton.jit
def _silu_mul_grad(dy, gate, up):
    """Gradients of gate and up, fp32, not yet rounded."""
    turn = sigmoid(gate)
    silu = gate * turn
    return dy * up * tl.fma(silu, 1.0 - turn, turn), dy * silu


@triton.jit
def _silu_mul_rows(
    gate_up_ptr,  # bf16 [T, 2 width], gate first
    y_ptr,  # out: bf16 [T, width], or e4m3 codes with QUANTIZE
    scales_ptr,  # fp32, out: scale of (row, group) at group * scale_stride + row; unwritten without QUANTIZE
    width,
    programs_per_row,
    scale_stride,
    GROUPS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    take_turn()
    program = tl.program_id(0)
    row = (program // programs_per_row).to(tl.int64)
    group = program % programs_per_row * GROUPS + tl.arange(0, GROUPS)
    col = tl.max_contiguous(group[:, None] * 128 + tl.arange(0, 128)[None, :], (1, 8))  # codes could take 16 a thread
    inside = col < width
    gate_place = gate_up_ptr + row * 2 * width + col
    gate = tl.load(gate_place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_place + width, mask=inside, other=0.0).to(tl.float32)
    y = _silu_mul(gate, up).to(tl.bfloat16)
    if QUANTIZE:
        wide = y.to(tl.float32)
        scale = group_scale(amax(wide, 1))
        tl.store(scales_ptr + group.to(tl.int64) * scale_stride + row, scale, mask=group * 128 < width)
        tl.store(y_ptr + row * width + col, encode_bf16(wide, scale[:, None]), mask=inside)
    else:
        tl.store(y_ptr + row * width + col, y, mask=inside)


@triton.jit
def _silu_mul_part(part: tl.constexpr, gate_up_ptr, width, size, cols):
    """y of a part of a square, as words [16, 64]; gate_up_ptr: of the square's first gate."""
    gate = load_words(part, gate_up_ptr, 2 * width, size, cols)
    up = load_words(part, gate_up_ptr + width, 2 * width, size, cols)
    even = _silu_mul(low_half(gate), low_half(up))
    return to_words(even, _silu_mul(high_half(gate), high_half(up)))


@triton.jit
def _silu_mul_square(
    gate_up_ptr,  # bf16 [T, 2 width], gate first
    starts_ptr,  # int32 [G], first token of each group
    sizes_ptr,  # int32 [G], its tokens
    row_codes_ptr,  # e4m3 [T, width], out
    row_scales_ptr,  # fp32, out: scale of (row, column group) at column group * row_scale_stride + row
    codes_ptr,  # e4m3 [width, 128 G], out
    token_scales_ptr,  # fp32, out: scale of (column, token group) at token group * token_scale_stride + column
    width,
    row_scale_stride,
    code_stride,
    token_scale_stride,
):
    block = tl.program_id(0)
    group, start, size = token_group(starts_ptr, sizes_ptr)
    left = width - block * 128
    gate_up_ptr += start * 2 * width + block * 128
    row_codes_ptr += start * width + block * 128
    row_scales_ptr += block.to(tl.int64) * row_scale_stride + start
    words = whole(_silu_mul_part, (gate_up_ptr, width, size, left))
    store_word_rows(words, row_codes_ptr, row_scales_ptr, width, size, left)
    codes_ptr += (block * 128).to(tl.int64) * code_stride + group * 128
    token_scales_ptr += group * token_scale_stride + block * 128
    store_word_tokens(words, codes_ptr, token_scales_ptr, code_stride, left)


@triton.jit
def _silu_mul_grad_rows(
    dy_ptr,  # bf16 [T, width]
    gate_up_ptr,  # bf16 [T, 2 width], gate first
    dgate_up_ptr,  # bf16 [T, 2 width], out
    width,
    programs_per_row,
    COLS: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // programs_per_row).to(tl.int64)
    col = program % programs_per_row * COLS + tl.arange(0, COLS)
    inside = col < width
    place = row * 2 * width + col
    dy = tl.load(dy_ptr + row * width + col, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + place + width, mask=inside, other=0.0).to(tl.float32)
    dgate, dup = _silu_mul_grad(dy, gate, up)
    tl.store(dgate_up_ptr + place, dgate.to(tl.bfloat16), mask=inside)
    tl.store(dgate_up_ptr + place + width, dup.to(tl.bfloat16), mask=inside)


@triton.jit
def _silu_mul_grad_part(part: tl.constexpr, dy_ptr, gate_up_ptr, width, size):
    """Gradients of a part of a square, as words [16, 128] of gate and up. Pointers: to the square's start."""
    dy = load_words(part, dy_ptr, width, size, 128)
    gate = load_words(part, gate_up_ptr, 2 * width, size, 128)
    up = load_words(part, gate_up_ptr + width, 2 * width, size, 128)
    even_gate, even_up = _silu_mul_grad(low_half(dy), low_half(gate), low_half(up))
    odd_gate, odd_up = _silu_mul_grad(high_half(dy), high_half(gate), high_half(up))
    return tl.reshape(tl.join(to_words(even_gate, even_up), to_words(odd_gate, odd_up)), (16, 128))


@triton.jit
def _store_both(
    tile, row_amax, col_amax, row_codes_ptr, row_scales_ptr, codes_ptr, scales_ptr, row_code_stride, code_stride, size
):
    """Both quantised layouts of a square of fp32 [16, 128, 8]. row_amax: fp32 [16, 8]; col_amax: fp32 [128]."""
    even, odd = halves(tile)
    store_rows(even, odd, row_amax, row_codes_ptr, row_scales_ptr, row_code_stride, size, 128)
    even_amax, odd_amax = tl.split(tl.reshape(col_amax, (64, 2)))
    store_tokens(even, odd, even_amax, odd_amax, codes_ptr, scales_ptr, code_stride, 128)


@triton.jit
def _silu_mul_grad_square(
    dy_ptr,  # bf16 [T, width], width divisible by 128
    gate_up_ptr,  # bf16 [T, 2 width], gate first
    starts_ptr,  # int32 [G], first token of each group
    sizes_ptr,  # int32 [G], its tokens
    row_codes_ptr,  # e4m3 [T, 2 width], out
    row_scales_ptr,  # fp32, out: scale of (row, column group) at column group * row_scale_stride + row
    codes_ptr,  # e4m3 [2 width, 128 G], out
    token_scales_ptr,  # fp32, out: scale of (column, token group) at token group * token_scale_stride + column
    width,
    row_scale_stride,
    code_stride,
    token_scale_stride,
):
    block = tl.program_id(0)
    group, start, size = token_group(starts_ptr, sizes_ptr)
    gate_up_ptr += start * 2 * width + block * 128
    dy_ptr += start * width + block * 128
    row_codes_ptr += start * 2 * width + block * 128
    row_scales_ptr += block.to(tl.int64) * row_scale_stride + start
    codes_ptr += (block * 128).to(tl.int64) * code_stride + group * 128
    token_scales_ptr += group * token_scale_stride + block * 128
    words = whole(_silu_mul_grad_part, (dy_ptr, gate_up_ptr, width, size))
    rows, cols = amax_words(words, 1), amax_words(amax_words(words, 2), 0)
    to = (row_codes_ptr, row_scales_ptr, codes_ptr, token_scales_ptr)
    _store_both(low_half(words), low_half(rows), low_half(cols), *to, 2 * width, code_stride, size)
    row_scales_ptr += (width // 128).to(tl.int64) * row_scale_stride
    codes_ptr += width.to(tl.int64) * code_stride
    up_to = (row_codes_ptr + width, row_scales_ptr, codes_ptr, token_scales_ptr + width)
    _store_both(high_half(words), high_half(rows), high_half(cols), *up_to, 2 * width, code_stride, size)


def aligned(x: Tensor) -> Tensor:
    """x if it is contiguous and aligned to 16 bytes, else a copy: the width of loads must not depend on whose view x is."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _row_tile(width: int) -> tuple[int, int]:
    """Groups of 128 columns, a power of two, of a whole row, and the warps of its program."""
    assert 1 <= width <= _MAX_WIDTH, f"a norm of {width} elements; at most {_MAX_WIDTH} fit in one program"
    groups = triton.next_power_of_2(triton.cdiv(width, 128))
    return groups, min(max(groups // 4, 1), 32)


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, quantize: bool
) -> tuple[Tensor, Tensor | Quantized, Tensor]:
    """RMSNorm of x + delta. x, delta: BF16 [T, H]; weight: BF16 [H].

    Returns the sum, BF16 [T, H] (x itself without delta); y, BF16 [T, H], or its 1x128 codes; and 1 / rms, FP32 [T].
    """
    rows, width = x.shape
    groups, warps = _row_tile(width)
    source = aligned(x)
    total = x if delta is None else torch.empty_like(source)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    y = empty_rows(rows, width, x.device) if quantize else torch.empty_like(source)
    codes, scales = (y.codes, y.scales) if isinstance(y, Quantized) else (y, inverse)
    _add_rms_norm[(rows,)](
        source,
        source if delta is None else aligned(delta),
        aligned(weight),
        total,
        codes,
        scales,
        inverse,
        eps,
        scales.stride(-1),
        WIDTH=width,
        GROUPS=groups,
        HAS_DELTA=delta is not None,
        QUANTIZE=quantize,
        num_warps=warps,
        enable_fp_fusion=False,
        **OPTIONS,
    )
    return total, y, inverse


def rms_norm_tokens(x: Tensor, inverse: Tensor, weight: Tensor, groups: TokenGroups) -> Quantized:
    """128x1 codes (transposed, padded) of the norm's BF16 y. x: BF16 [T, H], the sum; inverse: FP32 [T], of `add_rms_norm`."""
    width = x.shape[1]
    out = empty_tokens(width, groups.count, x.device)
    _rms_norm_tokens[(triton.cdiv(width, 128), groups.count)](
        aligned(x),
        inverse,
        aligned(weight),
        groups.starts,
        groups.sizes,
        out.codes,
        out.scales,
        width,
        out.codes.shape[1],
        out.scales.stride(1),
        num_warps=_SQUARE_WARPS,
        maxnreg=_SQUARE_REGISTERS,
        enable_fp_fusion=False,
    )
    return out


def row_chunks(rows: int, most: int) -> tuple[int, int]:
    """(chunks, rows of each) of a two-stage sum over `rows` rows; they depend on the number of rows alone."""
    chunks = min(most, triton.next_power_of_2(max(rows, 1)))
    return chunks, triton.cdiv(rows, chunks)


def sum_partials(partials: Tensor) -> Tensor:
    """Sum over the rows of partials, FP32 [rows, width], contiguous, in one fixed order. Returns FP32 [width]."""
    rows, width = partials.shape
    total = torch.empty(width, dtype=torch.float32, device=partials.device)
    _sum_partials[(triton.cdiv(width, 16),)](partials, total, rows, width, ROWS=256, COLS=16, num_warps=4)
    return total


def rms_norm_grad(dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of the norm. dy, x (what was normed), residual: BF16 [T, H]; inverse: FP32 [T], of `add_rms_norm`.

    Returns dx = bf16(bf16(gradient) + residual), BF16 [T, H], and the weight's gradient, FP32 [H].
    """
    rows, width = x.shape
    groups, warps = _row_tile(width)
    chunks, rows_per_program = row_chunks(rows, _MAX_CHUNKS)
    dy = aligned(dy)
    dx = torch.empty_like(dy)
    partials = torch.empty(chunks, width, dtype=torch.float32, device=x.device)
    _rms_norm_grad[(chunks,)](
        dy,
        aligned(x),
        inverse,
        aligned(weight),
        dy if residual is None else aligned(residual),
        dx,
        partials,
        rows,
        rows_per_program,
        WIDTH=width,
        GROUPS=groups,
        HAS_RESIDUAL=residual is not None,
        STAGES=3 if width <= 8192 else 2,  # rows in flight, as many as fit in shared memory
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return dx, sum_partials(partials)


def _launch_squares(
    kernel: Any, operands: tuple[Tensor, ...], groups: TokenGroups, rows: Quantized, tokens: Quantized, width: int
) -> None:
    """Runs a kernel of squares over `width` columns, which fills both layouts."""
    kernel[(triton.cdiv(width, 128), groups.count)](
        *operands,
        groups.starts,
        groups.sizes,
        rows.codes,
        rows.scales,
        tokens.codes,
        tokens.scales,
        width,
        rows.scales.stride(1),
        tokens.codes.shape[1],
        tokens.scales.stride(1),
        num_warps=_SQUARE_WARPS,
        maxnreg=_SQUARE_REGISTERS,
        enable_fp_fusion=False,
    )


def silu_mul(gate_up: Tensor, quantize: bool, groups: TokenGroups | None = None) -> tuple[Tensor | Quantized, Quantized | None]:
    """SiLU(gate) * up. gate_up: BF16 [T, 2 F], gate first; `groups` only with `quantize`.

    Returns y, BF16 [T, F], or its 1x128 codes; and with `groups` its 128x1 codes as well, else None.
    """
    assert quantize or groups is None, "token groups are for quantised outputs"
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = aligned(gate_up)
    y = empty_rows(rows, width, gate_up.device) if quantize else gate_up.new_empty(rows, width)
    codes, scales = (y.codes, y.scales) if isinstance(y, Quantized) else (y, y)
    if groups is None:
        programs = triton.cdiv(width, 128 * _ROW_GROUPS)
        _silu_mul_rows[(rows * programs,)](
            gate_up,
            codes,
            scales,
            width,
            programs,
            scales.stride(1),
            GROUPS=_ROW_GROUPS,
            QUANTIZE=quantize,
            num_warps=4,
            enable_fp_fusion=False,
            **OPTIONS,
        )
        return y, None
    assert isinstance(y, Quantized)
    tokens = empty_tokens(width, groups.count, gate_up.device)
    _launch_squares(_silu_mul_square, (gate_up,), groups, y, tokens, width)
    return y, tokens


def silu_mul_grad(dy: Tensor, gate_up: Tensor, groups: TokenGroups | None = None) -> Tensor | tuple[Quantized, Quantized]:
    """Gradient of `silu_mul`. dy: BF16 [T, F]; gate_up: BF16 [T, 2 F].

    Returns BF16 [T, 2 F], or with `groups` its 1x128 codes and its 128x1 codes; gate and up are parts of their own there.
    """
    rows, width = dy.shape
    if groups is not None and width % 128 == 0:
        return _silu_mul_grad_both(aligned(dy), aligned(gate_up), groups)
    dgate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    programs = triton.cdiv(width, 1024)
    _silu_mul_grad_rows[(rows * programs,)](
        aligned(dy), aligned(gate_up), dgate_up, width, programs, COLS=1024, num_warps=4, enable_fp_fusion=False
    )
    return dgate_up if groups is None else quantize_both(dgate_up, groups, (width, width))


def _silu_mul_grad_both(dy: Tensor, gate_up: Tensor, groups: TokenGroups) -> tuple[Quantized, Quantized]:
    """Both quantised layouts of the gradient in one pass; F is divisible by 128."""
    rows, width = dy.shape
    by_rows = empty_rows(rows, 2 * width, dy.device)
    by_tokens = empty_tokens(2 * width, groups.count, dy.device)
    _launch_squares(_silu_mul_grad_square, (dy, gate_up), groups, by_rows, by_tokens, width)
    return by_rows, by_tokens
