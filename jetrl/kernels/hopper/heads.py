"""From the fused qkv projection to what attention reads, and the gradient back, on Hopper: one launch for q, k and v.

Problem: bias, norms on query and key heads, rotary embedding and the write into the key-value cache are five passes over the
same numbers when written one by one, and in decode each of them is a launch.

Method: one program takes one token and 16 heads, as two tiles [16, dim / 2] of first and second halves, so that a rotation
needs no exchange between threads. Heads are numbered as they lie in the fused projection: queries, keys, values; each
finds its norm weight and its destination by its number. Where single operators have a BF16 tensor (after the bias, after
the norm, in the backward between rotation and norm) the value is rounded to BF16.

    x = bf16(fused + bias);  y = bf16(x / rms(x) * w);  (a, b) -> bf16(a cos - b sin, b cos + a sin)      values: x

For an FP8 cache the same launch quantises each head of each token, from those BF16 values, and writes codes and scales of keys
and values into their blocks; for training it also writes BF16 of the codes' values, which attention's gradient reads.

Layout rules: as in `norm`, the order of the sum over a head depends on `dim` alone, and nothing is contracted into fused
multiply-adds, so the rotation has the bits of the CPU reference. Norm-weight gradients: chunks of tokens, then those in order.

In decode a launch is mostly latency, so everything is read before the first sum.

Given up: rows of the cache have to be [kv_heads, dim] without gaps. Codes of values lie a block apart, since the cache holds
them transposed, and are written byte by byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.hopper.norm import aligned, inverse_rms, row_chunks, sum_partials
from jetrl.kernels.hopper.overlap import OPTIONS, take_turn
from jetrl.kernels.hopper.quant import amax, encode_bf16, group_scale
from jetrl.kernels.ops import Heads, HeadWeights, Target
from jetrl.kernels.quant import E4M3, Quantized

_MAX_DIM = 256
_HEADS = 16  # of a program: with 64 elements a half head, 8 elements, a 16-byte load, in each of 128 threads
_MAX_CHUNKS = 256  # of tokens, in the first stage of the norm weights' gradients
_GRAD_REGISTERS = 80  # a thread: six programs an SM, so that 256 chunks of 48 heads are on the GPU all at once


@triton.jit
def _kinds(head, HEADS: tl.constexpr, KV_HEADS: tl.constexpr):
    """Whether a head of the fused projection, by its number, is one of queries, keys or values."""
    kv = head - HEADS
    return kv < 0, (kv >= 0) & (kv < KV_HEADS), (kv >= KV_HEADS) & (kv < 2 * KV_HEADS)


@triton.jit
def _half(ptr, offset, inside):
    """A tile of BF16 values in FP32."""
    return tl.load(ptr + offset, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _biased_half(fused_ptr, fused_offset, bias_ptr, bias_offset, inside, HAS_BIAS: tl.constexpr):
    """bf16(fused + bias) of a tile, in FP32."""
    x = _half(fused_ptr, fused_offset, inside)
    if HAS_BIAS:
        x = (x + _half(bias_ptr, bias_offset, inside)).to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, col, col_inside, is_q):
    """The norm weight of each head, FP32 [heads, col]; that of values is unused."""
    q_weight = tl.load(q_norm_ptr + col, mask=col_inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm_ptr + col, mask=col_inside, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])


@triton.jit
def _norm_weights(q_norm_ptr, k_norm_ptr, col, col_inside, is_q, DIM: tl.constexpr):
    """Those of both halves."""
    first = _norm_weight(q_norm_ptr, k_norm_ptr, col, col_inside, is_q)
    return first, _norm_weight(q_norm_ptr, k_norm_ptr, col + DIM // 2, col_inside, is_q)


@triton.jit
def _turn(cos_ptr, sin_ptr, position, col, col_inside, DIM: tl.constexpr):
    """Cosines and sines of a position, FP32 [1, col]."""
    place = position.to(tl.int64) * (DIM // 2) + col
    cos = tl.load(cos_ptr + place, mask=col_inside, other=0.0)
    sin = tl.load(sin_ptr + place, mask=col_inside, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def _quantize_halves(first, second):
    """Codes of both halves, FP32 [heads, col] of BF16 values, and each head's scale [heads]."""
    largest = tl.maximum(amax(first, 1), amax(second, 1), propagate_nan=tl.PropagateNan.ALL)
    scale = group_scale(largest)
    return encode_bf16(first, scale[:, None]), encode_bf16(second, scale[:, None]), scale


@triton.jit
def _store_codes(
    first, second, scale, token, slot, head, col, col_inside,
    q_codes_ptr, q_scales_ptr, key_codes_ptr, key_scales_ptr, value_codes_ptr, value_scales_ptr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a token's heads, those of queries at `token`, of keys and values at `slot` of their blocks."""
    is_q, is_k, is_v = _kinds(head, HEADS, KV_HEADS)
    q_row = token * HEADS + head
    in_block, at = slot // BLOCK_SIZE * KV_HEADS, slot % BLOCK_SIZE
    k_row = (in_block + head - HEADS) * BLOCK_SIZE + at
    v_block = in_block + head - (HEADS + KV_HEADS)
    tl.store(q_scales_ptr + q_row, scale, mask=is_q)
    tl.store(key_scales_ptr + k_row, scale, mask=is_k)
    tl.store(value_scales_ptr + v_block * BLOCK_SIZE + at, scale, mask=is_v)
    q_place = q_codes_ptr + q_row[:, None] * DIM + col[None, :]
    tl.store(q_place, first, mask=is_q[:, None] & col_inside[None, :])
    tl.store(q_place + DIM // 2, second, mask=is_q[:, None] & col_inside[None, :])
    k_place = key_codes_ptr + k_row[:, None] * DIM + col[None, :]
    tl.store(k_place, first, mask=is_k[:, None] & col_inside[None, :])
    tl.store(k_place + DIM // 2, second, mask=is_k[:, None] & col_inside[None, :])
    v_place = value_codes_ptr + (v_block[:, None] * DIM + col[None, :]) * BLOCK_SIZE + at
    tl.store(v_place, first, mask=is_v[:, None] & col_inside[None, :])
    tl.store(v_place + DIM // 2 * BLOCK_SIZE, second, mask=is_v[:, None] & col_inside[None, :])


@triton.jit
def _split_heads(
    fused_ptr,  # bf16 [T, (HEADS + 2 KV_HEADS) * DIM], rows fused_stride apart
    bias_ptr,  # bf16 [(HEADS + 2 KV_HEADS) * DIM]; unread without HAS_BIAS
    q_norm_ptr,  # bf16 [DIM], weight of the queries' norm; unread without HAS_NORM
    k_norm_ptr,  # bf16 [DIM], of the keys' norm
    cos_ptr,  # fp32 [positions, DIM / 2]
    sin_ptr,  # fp32 [positions, DIM / 2]
    positions_ptr,  # int32 or int64 [T]
    rows_ptr,  # int64 [T], row or slot of each token in keys and values; unread without HAS_ROWS: token t has row t
    q_ptr,  # bf16 [T, HEADS, DIM], out; this and the next two unwritten with codes and without KEEP
    keys_ptr,  # bf16 [R, KV_HEADS, DIM], rows keys_stride apart, out; with codes token t has row t
    values_ptr,  # bf16 [R, KV_HEADS, DIM], rows values_stride apart, out
    q_codes_ptr,  # e4m3 [T, HEADS, DIM], out; this and the next five unwritten without BLOCK_SIZE
    q_scales_ptr,  # fp32 [T, HEADS], out
    key_codes_ptr,  # e4m3 [blocks, KV_HEADS, BLOCK_SIZE, DIM], out
    key_scales_ptr,  # fp32 [blocks, KV_HEADS, BLOCK_SIZE], out
    value_codes_ptr,  # e4m3 [blocks, KV_HEADS, DIM, BLOCK_SIZE], out
    value_scales_ptr,  # fp32 like key_scales, out
    eps,
    fused_stride,
    keys_stride,
    values_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # DIM / 2 rounded up to a power of two
    BLOCK: tl.constexpr,  # heads of a program
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens a block of codes; 0: BF16
    KEEP: tl.constexpr,  # with codes, their values besides
):
    take_turn()
    BLOCKS: tl.constexpr = (HEADS + 2 * KV_HEADS + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, HALF)
    col_inside = col < DIM // 2
    is_q, is_k, is_v = _kinds(head, HEADS, KV_HEADS)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & col_inside[None, :]
    place = head[:, None] * DIM + col[None, :]

    position = tl.load(positions_ptr + token)
    row = tl.load(rows_ptr + token) if HAS_ROWS else token
    fused_ptr += token * fused_stride
    a = _biased_half(fused_ptr, place, bias_ptr, place, inside, HAS_BIAS)
    b = _biased_half(fused_ptr, place + DIM // 2, bias_ptr, place + DIM // 2, inside, HAS_BIAS)
    if HAS_NORM:
        first_weight, second_weight = _norm_weights(q_norm_ptr, k_norm_ptr, col, col_inside, is_q, DIM)
    cos, sin = _turn(cos_ptr, sin_ptr, position, col, col_inside, DIM)
    first, second = a, b
    if HAS_NORM:
        inverse = inverse_rms(tl.sum(a * a, 1) + tl.sum(b * b, 1), eps, DIM)[:, None]
        first, second = a * inverse * first_weight, b * inverse * second_weight
        first, second = first.to(tl.bfloat16).to(tl.float32), second.to(tl.bfloat16).to(tl.float32)

    turned_first = (first * cos - second * sin).to(tl.bfloat16)
    turned_second = (second * cos + first * sin).to(tl.bfloat16)
    if BLOCK_SIZE > 0:
        a, b = tl.where(is_v[:, None], a, turned_first.to(tl.float32)), tl.where(is_v[:, None], b, turned_second.to(tl.float32))
        first_code, second_code, scale = _quantize_halves(a, b)
        _store_codes(
            first_code, second_code, scale, token, row, head, col, col_inside,
            q_codes_ptr, q_scales_ptr, key_codes_ptr, key_scales_ptr, value_codes_ptr, value_scales_ptr,
            HEADS, KV_HEADS, DIM, BLOCK_SIZE,
        )  # fmt: skip
        a, b = first_code.to(tl.float32) * scale[:, None], second_code.to(tl.float32) * scale[:, None]
        turned_first, turned_second, row = a.to(tl.bfloat16), b.to(tl.bfloat16), token
    if BLOCK_SIZE == 0 or KEEP:
        q_place = q_ptr + token * (HEADS * DIM) + place
        tl.store(q_place, turned_first, mask=is_q[:, None] & inside)
        tl.store(q_place + DIM // 2, turned_second, mask=is_q[:, None] & inside)
        k_place = keys_ptr + row * keys_stride + (place - HEADS * DIM)
        tl.store(k_place, turned_first, mask=is_k[:, None] & inside)
        tl.store(k_place + DIM // 2, turned_second, mask=is_k[:, None] & inside)
        v_place = values_ptr + row * values_stride + (place - (HEADS + KV_HEADS) * DIM)
        tl.store(v_place, a.to(tl.bfloat16), mask=is_v[:, None] & inside)
        tl.store(v_place + DIM // 2, b.to(tl.bfloat16), mask=is_v[:, None] & inside)


@triton.jit
def _store_shares(share_ptr, first, second, mine, col, col_inside, DIM: tl.constexpr):
    """Sum both halves of a norm weight's gradient over the heads that are `mine`. share_ptr: fp32 [DIM], out."""
    tl.store(share_ptr + col, tl.sum(tl.where(mine, first, 0.0), 0), mask=col_inside)
    tl.store(share_ptr + DIM // 2 + col, tl.sum(tl.where(mine, second, 0.0), 0), mask=col_inside)


@triton.jit
def _split_heads_grad(
    dq_ptr,  # bf16 [T, HEADS, DIM], strides dq_token and dq_head
    dk_ptr,  # bf16 [T, KV_HEADS, DIM], strides dk_token and dk_head
    dv_ptr,  # bf16 [T, KV_HEADS, DIM], strides dv_token and dv_head
    fused_ptr,  # bf16 [T, (HEADS + 2 KV_HEADS) * DIM], rows fused_stride apart; unread without HAS_NORM, like the next three
    bias_ptr,  # bf16 [(HEADS + 2 KV_HEADS) * DIM]; unread without HAS_BIAS
    q_norm_ptr,  # bf16 [DIM]
    k_norm_ptr,  # bf16 [DIM]
    cos_ptr,  # fp32 [positions, DIM / 2]
    sin_ptr,  # fp32 [positions, DIM / 2]
    positions_ptr,  # int32 or int64 [T]
    dfused_ptr,  # bf16 [T, (HEADS + 2 KV_HEADS) * DIM], contiguous, out
    partials_ptr,  # fp32 [programs, 2, DIM], out: shares of the gradients of q_norm and k_norm; unwritten without HAS_NORM
    eps,
    tokens,
    tokens_per_program,
    dq_token,
    dq_head,
    dk_token,
    dk_head,
    dv_token,
    dv_head,
    fused_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # DIM / 2 rounded up to a power of two
    BLOCK: tl.constexpr,  # heads of a program
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    BLOCKS: tl.constexpr = (HEADS + 2 * KV_HEADS + BLOCK - 1) // BLOCK
    head = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, HALF)
    col_inside = col < DIM // 2
    is_q, is_k, is_v = _kinds(head[:, None], HEADS, KV_HEADS)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & col_inside[None, :]
    place = head[:, None] * DIM + col[None, :]
    # A head's gradient lies in dq, dk or dv: one load from where it is, not a choice among three.
    grad_offset = tl.where(is_q, head[:, None] * dq_head, (head - HEADS)[:, None] * dk_head)
    grad_offset = tl.where(is_v, (head - HEADS - KV_HEADS)[:, None] * dv_head, grad_offset) + col[None, :]
    grad_token = tl.where(is_q, dq_token, tl.where(is_k, dk_token, dv_token)).to(tl.int64)
    grad_ptr = tl.where(is_q, dq_ptr, tl.where(is_k, dk_ptr, dv_ptr)) + grad_offset
    if HAS_NORM:
        first_weight, second_weight = _norm_weights(q_norm_ptr, k_norm_ptr, col, col_inside, head < HEADS, DIM)
    first_total = tl.zeros((BLOCK, HALF), tl.float32)
    second_total = tl.zeros((BLOCK, HALF), tl.float32)

    start = tl.program_id(0) // BLOCKS * tokens_per_program
    for index in range(start, tl.minimum(start + tokens_per_program, tokens)):
        token = tl.cast(index, tl.int64)
        dfirst = _half(grad_ptr + token * grad_token, 0, inside)
        dsecond = _half(grad_ptr + token * grad_token, DIM // 2, inside)
        cos, sin = _turn(cos_ptr, sin_ptr, tl.load(positions_ptr + token), col, col_inside, DIM)
        first = (dfirst * cos + dsecond * sin).to(tl.bfloat16).to(tl.float32)
        second = (dsecond * cos - dfirst * sin).to(tl.bfloat16).to(tl.float32)
        if HAS_NORM:
            fused_at = fused_ptr + token * fused_stride
            a = _biased_half(fused_at, place, bias_ptr, place, inside & ~is_v, HAS_BIAS)
            b = _biased_half(fused_at, place + DIM // 2, bias_ptr, place + DIM // 2, inside & ~is_v, HAS_BIAS)
            inverse = inverse_rms(tl.sum(a * a, 1) + tl.sum(b * b, 1), eps, DIM)[:, None]
            a, b = a * inverse, b * inverse
            first_total += first * a
            second_total += second * b
            first, second = first * first_weight, second * second_weight
            mean = ((tl.sum(first * a, 1) + tl.sum(second * b, 1)) * (1.0 / DIM))[:, None]
            first, second = (first - a * mean) * inverse, (second - b * mean) * inverse
        first, second = tl.where(is_v, dfirst, first), tl.where(is_v, dsecond, second)
        out = dfused_ptr + token * ((HEADS + 2 * KV_HEADS) * DIM) + place
        tl.store(out, first.to(tl.bfloat16), mask=inside)
        tl.store(out + DIM // 2, second.to(tl.bfloat16), mask=inside)

    if HAS_NORM:
        shares_ptr = partials_ptr + tl.program_id(0).to(tl.int64) * (2 * DIM)
        _store_shares(shares_ptr, first_total, second_total, is_q, col, col_inside, DIM)
        _store_shares(shares_ptr + DIM, first_total, second_total, is_k, col, col_inside, DIM)


def _aligned_rows(x: Tensor) -> Tensor:
    """x [T, width] if its rows, whatever their distance, are aligned to 16 bytes; else a contiguous copy.

    The width of loads, and with it the order of a sum, must not depend on whose view x is.
    """
    distances_fit = x.stride(0) % 16 == x.shape[1] % 16 == 0 or x.is_contiguous()
    return x if x.stride(1) == 1 and distances_fit and x.data_ptr() % 16 == 0 else aligned(x)


def _tile(heads: Heads) -> tuple[dict[str, int], int, int]:
    """Compile-time sizes of a program, programs of a token, warps: 8 elements of each half a thread."""
    assert heads.dim % 2 == 0 and 2 <= heads.dim <= _MAX_DIM, f"head dimension {heads.dim}: even, at most {_MAX_DIM}"
    half = triton.next_power_of_2(heads.dim // 2)
    sizes = {"HEADS": heads.heads, "KV_HEADS": heads.kv_heads, "DIM": heads.dim, "HALF": half, "BLOCK": _HEADS}
    return sizes, triton.cdiv(heads.heads + 2 * heads.kv_heads, _HEADS), max(_HEADS * half // 256, 1)


def _operands(fused: Tensor, weights: HeadWeights, heads: Heads) -> tuple[Tensor, ...]:
    """fused, bias, norm weights, cos and sin as both kernels read them, aligned. `fused` stands for what there is not, which no
    kernel touches."""
    fused = _aligned_rows(fused)
    vectors = (fused if x is None else aligned(x) for x in (weights.bias, weights.q_norm, weights.k_norm))
    return fused, *vectors, aligned(heads.cos), aligned(heads.sin)


def split_heads(fused: Tensor, weights: HeadWeights, heads: Heads, positions: Tensor, target: Target) -> Tensor:
    """Queries, BF16 [T, heads, dim], of the fused projection; keys and values go to the rows of `target`, of any row stride.

    fused: BF16 [T, heads.width], any row stride; positions: int32 or int64 [T].
    """
    q = fused.new_empty(fused.shape[0], heads.heads, heads.dim)
    _launch_split(fused, weights, heads, positions, (q, target.keys, target.values), target.rows, (), 0)
    return q


def split_heads_fp8(
    fused: Tensor, weights: HeadWeights, heads: Heads, positions: Tensor, target: Target, keep: bool
) -> tuple[Quantized, tuple[Tensor, ...]]:
    """`split_heads` for an FP8 cache: codes of queries [T, heads, dim] with scales [T, heads]; those of keys and values go to
    `target`, whose blocks must have no gaps. If `keep`, also q, keys and values of the tokens, codes times scales, BF16
    [T, heads or kv_heads, dim].
    """
    tokens, (blocks, kv_heads, size, dim) = fused.shape[0], target.keys.shape
    assert (kv_heads, dim) == (heads.kv_heads, heads.dim) and target.values.shape == (blocks, kv_heads, dim, size)
    assert target.key_scales is not None and target.value_scales is not None and target.rows is not None
    caches = target.keys, target.key_scales, target.values, target.value_scales
    assert all(x.is_contiguous() for x in caches), "gaps in a layer's blocks"
    codes = torch.empty(tokens, heads.heads, dim, dtype=E4M3, device=fused.device)
    q = Quantized(codes, torch.empty(tokens, heads.heads, device=fused.device))
    plain = tuple(fused.new_empty(tokens if keep else 0, n, dim) for n in (heads.heads, kv_heads, kv_heads))
    _launch_split(fused, weights, heads, positions, plain, target.rows, (q.codes, q.scales, *caches), size)
    return q, plain if keep else ()


def _launch_split(
    fused: Tensor,
    weights: HeadWeights,
    heads: Heads,
    positions: Tensor,
    plain: tuple[Tensor, ...],
    rows: Tensor | None,
    codes: tuple[Tensor, ...],
    block_size: int,
) -> None:
    """plain: q, keys and values in BF16, empty where not wanted; codes: six tensors, or none with a block size of 0."""
    sizes, blocks, warps = _tile(heads)
    for cache in plain[1:]:
        assert cache.shape[1:] == (heads.kv_heads, heads.dim) and cache[:1].is_contiguous(), "gaps in a row of keys or values"
    assert fused.shape[1] == heads.width and (weights.q_norm is None) == (weights.k_norm is None)
    operands = _operands(fused, weights, heads)
    _split_heads[(fused.shape[0] * blocks,)](
        *operands,
        positions,
        positions if rows is None else rows,
        *plain,
        *(codes or (None,) * 6),
        heads.eps,
        operands[0].stride(0),
        plain[1].stride(0),
        plain[2].stride(0),
        **sizes,
        HAS_BIAS=weights.bias is not None,
        HAS_NORM=weights.q_norm is not None,
        HAS_ROWS=rows is not None,
        BLOCK_SIZE=block_size,
        KEEP=plain[0].shape[0] > 0,
        num_warps=warps,
        enable_fp_fusion=False,
        **OPTIONS,
    )


def split_heads_grad(
    dq: Tensor, dk: Tensor, dv: Tensor, fused: Tensor, weights: HeadWeights, heads: Heads, positions: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradient of `split_heads`. dq: BF16 [T, heads, dim]; dk, dv: BF16 [T, kv_heads, dim], unit last stride; rest as there.

    Returns the gradient of fused (and, summed over rows, of the bias), BF16 [T, heads.width], and those of q_norm and
    k_norm, FP32 [dim], or None without norms.
    """
    sizes, blocks, warps = _tile(heads)
    assert dq.stride(2) == dk.stride(2) == dv.stride(2) == 1
    tokens, has_norm = dq.shape[0], weights.q_norm is not None
    chunks, tokens_per_program = row_chunks(tokens, _MAX_CHUNKS) if has_norm else (tokens, 1)
    operands = _operands(fused, weights, heads)
    dfused = torch.empty(tokens, heads.width, dtype=torch.bfloat16, device=dq.device)
    partials = torch.empty(chunks * blocks if has_norm else 0, 2 * heads.dim, dtype=torch.float32, device=dq.device)
    _split_heads_grad[(chunks * blocks,)](
        dq,
        dk,
        dv,
        *operands,
        positions,
        dfused,
        partials,
        heads.eps,
        tokens,
        tokens_per_program,
        *dq.stride()[:2],
        *dk.stride()[:2],
        *dv.stride()[:2],
        operands[0].stride(0),
        **sizes,
        HAS_BIAS=weights.bias is not None,
        HAS_NORM=has_norm,
        num_warps=warps,
        maxnreg=_GRAD_REGISTERS,
        enable_fp_fusion=False,
    )
    if not has_norm:
        return dfused, None, None
    dq_norm, dk_norm = sum_partials(partials).split(heads.dim)
    return dfused, dq_norm, dk_norm
