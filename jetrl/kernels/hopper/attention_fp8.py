"""Causal attention of FP8 codes on Hopper: both products in FP8 `wgmma`, one set of bits for training, prefill and decode.

Problem: decode is bound by the bytes of its cache, so keys and values as codes should make it twice as fast. But codes that are
converted in the kernel cost more instructions than bytes are saved, and a sampler with an FP8 cache is another policy than a
trainer with BF16 attention. So nothing is converted: q, k, v and the probabilities are all codes, on both sides.

Method: rows, tiles and order are those of hopper/attention.py. Each head of each token of q, k and v has a scale. With a tile
of 64 keys, of which a row sees some, c = log2(e) / sqrt(dim):

    t = (q k^T) k_scale             FP8 `wgmma` of codes into a fresh FP32 sum
    m' = max(m, rowmax(t) c q_scale)
    p = exp2(t c q_scale - m')      exactly 0 for keys that the row does not see
    total = total exp2(m - m') + sum p
    v_max = max v_scale             over the keys that the row sees: later ones do not exist yet in decode
    o = o exp2(m - m') + (v_max / 448) (e4m3(p v_scale (448 / v_max)) v)      FP8 `wgmma`, fresh FP32 sum
    out = bf16(o / total),  lse = (m + log2 total) ln 2

Two parts: tiles of which each row sees every key, without any mask, and what is left, one or two tiles. There rows have their
own v_max; where they see all keys the numbers are those of the first part. Codes of values that are not a visible key's are
zeroed, since stale memory can hold NaN; keys and scales of such places end in scores that the mask replaces.

Decode has one token a tile: up to 8 of its 64 rows matter. Of a product's sum a thread has rows r and r + 8 of each 16. Only
the first eight are gone on with, which halves all work but the products; groups of more than 8 query heads keep all rows. The
last tile, which has a mask, is loaded into registers before the first: it is there when the loop over the others ends.

The sum of the first product lies in a thread as columns 8 h + 2 q + e of each 16 (q: its place in the quad, h, e: 0 or 1), the
second product wants four neighbours, 4 q + 2 h + e, in one register. So keys are loaded in an order in which the columns of a
thread are neighbours: column 16 g + 8 h + 2 q + e holds key 16 g + 4 q + 2 h + e. Then nothing moves between the products.

Layout: the cache as in `kernels.ops.Target`; a tile of keys lies in one block. Keys are always paged: training puts those of a
layer into blocks of 64.

Given up: head dimensions other than 32, 64 and 128; blocks that 64 does not divide. A NaN in a value reaches earlier tokens
that share its tile of keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.hopper.attention import KEYS, LOG2_E, Tiles, _launch, _load_rows, _row_offsets, tile_of_program
from jetrl.kernels.hopper.overlap import OPTIONS, take_turn
from jetrl.kernels.hopper.quant import _to_e4m3, amax, empty_rows, encode_bf16, group_scale
from jetrl.kernels.quant import E4M3, GROUP, Quantized

DIMS = (32, 64, 128)
ROWS = 64  # of a tile, in 4 warps


@dataclass(slots=True, frozen=True)
class Launch:
    """How the kernel is launched. Changes speed, never bits."""

    stages: int  # shared out between the lookup of a block and its codes: 4, 5, 7 for 2, 3, 4 tiles at a time
    registers: int  # a thread: 168 let three programs on an SM


PREFILL = Launch(stages=5, registers=168)
_SMS = 132  # of an H100 or H200


@triton.jit
def _key_of_column(KEYS: tl.constexpr):
    """Which key of a tile each column of scores holds."""
    column = tl.arange(0, KEYS)
    return column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 * 2 + column % 2


@triton.jit
def _by_column(x, KEYS: tl.constexpr):
    """x [KEYS] of a tile's keys, in the order of the columns."""
    return tl.reshape(tl.permute(tl.reshape(x, (KEYS // 16, 4, 2, 2)), (0, 2, 1, 3)), (KEYS,))


@triton.jit
def _by_key(x, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """x [ROWS, KEYS], whose columns are in the order of `_by_column`, in the order of the keys."""
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, KEYS // 16, 2, 4, 2)), (0, 1, 3, 2, 4)), (ROWS, KEYS))


@triton.jit
def _keep(codes, wanted):
    """E4M3 codes, zero where they are not wanted; four neighbours at a time, and rows share the mask."""
    mask = tl.where(wanted, 255, 0).to(tl.uint8)
    kept = tl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [codes.to(tl.uint8, bitcast=True), mask], tl.uint8, is_pure=True, pack=4
    )
    return kept.to(codes.dtype, bitcast=True)


@triton.jit
def _sum_rows(x, ROWS: tl.constexpr, SUMS: tl.constexpr):
    """The rows of a product x [ROWS, columns] that have sums, [SUMS, columns]: all, or the first eight of each 16."""
    if SUMS == ROWS:
        return x
    else:
        halves = tl.permute(tl.reshape(x, (ROWS // 16, 2, 8, x.shape[1])), (0, 2, 3, 1))
        return tl.reshape(tl.split(halves)[0], (SUMS, x.shape[1]))


@triton.jit
def _product_rows(x, ROWS: tl.constexpr, SUMS: tl.constexpr):
    """x [SUMS, columns] as a product's rows, [ROWS, columns]; the others repeat them, and nobody reads what comes of it."""
    if SUMS == ROWS:
        return x
    else:
        twice = tl.reshape(tl.join(x, x), (ROWS // 16, 8, x.shape[1], 2))
        return tl.reshape(tl.permute(twice, (0, 3, 1, 2)), (ROWS, x.shape[1]))


@triton.jit
def _places(
    table_ptr, key, head, within,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Where a tile's keys begin, counted in keys of the cache, and its values, in codes. `within`: whether there is a tile."""
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=within, other=0).to(tl.int64) * KV_HEADS + head
    at = tl.multiple_of(key % BLOCK_SIZE, KEYS)
    return block * BLOCK_SIZE + at, block * (DIM * BLOCK_SIZE) + at


@triton.jit
def _load_tile(
    k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, table_ptr, key, head, within,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Keys [KEYS, DIM], in the order of the columns; their scales; values [DIM, KEYS]; their scales, in that of the columns."""
    slot, value = _places(table_ptr, key, head, within, KV_HEADS, DIM, BLOCK_SIZE, KEYS)
    lane, dim = tl.arange(0, KEYS), tl.arange(0, DIM)
    k = tl.load(k_ptr + slot * DIM + (_key_of_column(KEYS)[:, None] * DIM + dim[None, :]))
    v = tl.load(v_ptr + value + (dim[:, None] * BLOCK_SIZE + lane[None, :]))
    return k, _by_column(tl.load(k_scale_ptr + slot + lane), KEYS), v, _by_column(tl.load(v_scale_ptr + slot + lane), KEYS)


@triton.jit
def _multiply_add(a, b, c):
    """a b + c, rounded once: as an instruction that the compiler leaves where it stands, so c is formed during the product."""
    return tl.inline_asm_elementwise("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, True, 1)


@triton.jit
def _fold(t, row_c, v_scale, v_max, v, o, m, total, ROWS: tl.constexpr, SUMS: tl.constexpr, KEYS: tl.constexpr):
    """One tile into a row's sums. t: FP32 [ROWS, KEYS]; v_scale: [1 or ROWS, KEYS]; v_max: [1 or ROWS, 1]; v: [DIM, KEYS]."""
    m_new = tl.maximum(m, tl.max(t, 1) * row_c)
    shrink = tl.exp2(m - m_new)
    p = tl.exp2(tl.fma(t, row_c[:, None], -m_new[:, None]))
    total = tl.fma(total, shrink, tl.sum(p, 1))
    codes = _to_e4m3(_by_key(p * (v_scale * (448.0 / v_max)), SUMS, KEYS))
    product = _sum_rows(tl.dot(_product_rows(codes, ROWS, SUMS), tl.trans(v)), ROWS, SUMS)
    o = _multiply_add(product, tl.broadcast_to(v_max * (1.0 / 448.0), product.shape), o * shrink[:, None])
    return o, m_new, total


@triton.jit
def _no_sums(SUMS: tl.constexpr, DIM: tl.constexpr):
    """Output, maximum and total of rows that saw no key."""
    m = tl.full((SUMS,), float("-inf"), tl.float32)
    return tl.zeros((SUMS, DIM), tl.float32), m, tl.zeros((SUMS,), tl.float32)


@triton.jit
def _scores(q, k, k_scale, ROWS: tl.constexpr, SUMS: tl.constexpr):
    """q k^T k_scale, FP32 [SUMS, KEYS]."""
    return _sum_rows(tl.dot(q, tl.trans(k)), ROWS, SUMS) * k_scale[None, :]


@triton.jit
def _fold_edge(
    q, row_c, position, key, key_end, k, k_scale, v, v_scale, o, m, total,
    ROWS: tl.constexpr, SUMS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """`_fold` of a tile at `key` of which not every row sees every key: a row sees those up to its `position`."""
    v = _keep(v, (key + tl.arange(0, KEYS) < key_end)[None, :])
    sees = (key + _key_of_column(KEYS))[None, :] <= position[:, None]
    t = tl.where(sees, _scores(q, k, k_scale, ROWS, SUMS), float("-inf"))
    v_scale = tl.where(sees, v_scale[None, :], 0.0)
    v_max = tl.maximum(tl.max(v_scale, 1), 1e-15)[:, None]  # below every scale there is: of rows that see no key here
    return _fold(t, row_c, v_scale, v_max, v, o, m, total, ROWS, SUMS, KEYS)


@triton.jit
def _walk(
    q, row_c, position, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, blocks, head, seen_by_all, key_end,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, SUMS: tl.constexpr, KEYS: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """Output, maximum and total of rows over the keys that they see: all ahead of seen_by_all, and those up to `position`."""
    if ONE_TOKEN:
        last_k, last_k_scale, last_v, last_v_scale = _load_tile(
            k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, blocks, seen_by_all, head, seen_by_all < key_end,
            KV_HEADS, DIM, BLOCK_SIZE, KEYS,
        )  # fmt: skip
    o, m, total = _no_sums(SUMS, DIM)
    for key in range(0, seen_by_all, KEYS):
        k, k_scale, v, v_scale = _load_tile(
            k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, blocks, key, head, True, KV_HEADS, DIM, BLOCK_SIZE, KEYS
        )
        t = _scores(q, k, k_scale, ROWS, SUMS)
        # Over rows that are all the same, so that each thread has it without a way through shared memory.
        v_max = tl.max(tl.broadcast_to(v_scale[None, :], (SUMS, KEYS)), 1)[:, None]
        o, m, total = _fold(t, row_c, v_scale[None, :], v_max, v, o, m, total, ROWS, SUMS, KEYS)
    if ONE_TOKEN:
        if seen_by_all < key_end:
            o, m, total = _fold_edge(
                q, row_c, position, seen_by_all, key_end, last_k, last_k_scale, last_v, last_v_scale, o, m, total,
                ROWS, SUMS, KEYS,
            )  # fmt: skip
    else:
        for key in tl.range(seen_by_all, key_end, KEYS, num_stages=1):
            k, k_scale, v, v_scale = _load_tile(
                k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, blocks, key, head, True, KV_HEADS, DIM, BLOCK_SIZE, KEYS
            )
            o, m, total = _fold_edge(q, row_c, position, key, key_end, k, k_scale, v, v_scale, o, m, total, ROWS, SUMS, KEYS)
    return o, m, total


@triton.jit
def _store_codes(
    out,  # BF16 [ROWS, 128], the tile's results
    codes_ptr,  # E4M3 [tokens, HEADS * 128], result
    scales_ptr,  # FP32, result: scale of (token, head) at head * scale_stride + token
    scale_stride,
    flat,  # int64, the tile's first token
    head,  # its key head
    valid,  # int1 [ROWS]
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantise what the next product reads, in 1x128 groups: a group of 128 columns is a head."""
    row_token, row_offset = _row_offsets(GROUP, HEADS, ROWS)
    wide = out.to(tl.float32)
    scale = group_scale(amax(wide, 1))
    row_head = (head * GROUP + tl.arange(0, ROWS) % GROUP).to(tl.int64)
    tl.store(scales_ptr + row_head * scale_stride + flat + row_token, scale, mask=valid)
    at = codes_ptr + (flat * HEADS + head * GROUP) * 128 + (row_offset[:, None] * 128 + tl.arange(0, 128)[None, :])
    tl.store(at, encode_bf16(wide, scale[:, None]), mask=valid[:, None])


@triton.jit(do_not_specialize=["tokens", "table_stride", "scale_stride"])
def _forward_kernel(
    q_ptr,  # E4M3 [tokens, heads, DIM]
    q_scale_ptr,  # FP32 [tokens, heads]
    k_ptr,  # E4M3 [blocks, KV_HEADS, BLOCK_SIZE, DIM]
    k_scale_ptr,  # FP32 [blocks, KV_HEADS, BLOCK_SIZE]
    v_ptr,  # E4M3 [blocks, KV_HEADS, DIM, BLOCK_SIZE]
    v_scale_ptr,  # FP32 like k_scale_ptr
    out_ptr,  # BF16 [tokens, heads, DIM]; with CODES E4M3 [tokens, heads * 128], for DIM 128
    lse_ptr,  # FP32 [heads, tokens], natural log of the sum of exp(score); None if not wanted
    scales_ptr,  # FP32, with CODES: scale of (token, head) at head * scale_stride + token
    sequence_ptr,  # int32 [N], see Tiles
    token_ptr,  # int32 [N]
    query_start_ptr,  # int32 [S]
    query_length_ptr,  # int32 [S]
    context_ptr,  # int32 [S]
    table_ptr,  # int32 [S, table_stride]
    tokens,  # int32, rows of q
    table_stride,  # int32, most blocks
    scale_stride,  # int32
    c,  # FP32, log2(e) / sqrt(dim)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a key head
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # keys a block of the cache, a multiple of KEYS
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,  # or none, in each tile: decode
    WANT_LSE: tl.constexpr,
    CODES: tl.constexpr,  # the result is quantised
):
    """One tile of query rows of one key head, in any phase."""
    take_turn()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    head, sequence, token, before, here, key_end = tile_of_program(
        sequence_ptr, token_ptr, query_length_ptr, context_ptr, KV_HEADS, ROWS // GROUP
    )
    blocks = table_ptr + sequence.to(tl.int64) * table_stride

    flat = tl.load(query_start_ptr + sequence).to(tl.int64) + token
    first_row = flat * HEADS + head * GROUP

    seen_by_all = (before + token + 1) // KEYS * KEYS
    q_token, q_offset = _row_offsets(GROUP, HEADS, ROWS)
    q = _load_rows(q_ptr, first_row * DIM, q_offset * DIM, q_token < here, DIM)
    SUMS: tl.constexpr = ROWS // 2 if ONE_TOKEN and GROUP <= 8 else ROWS
    row_token, row_offset = _row_offsets(GROUP, HEADS, SUMS)
    valid = row_token < here
    position = tl.minimum(before + token + row_token, key_end - 1)  # padding sees what the last token sees
    row_c = tl.load(q_scale_ptr + first_row + row_offset, mask=valid, other=0.0) * c
    o, m, total = _walk(
        q, row_c, position, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, blocks, head, seen_by_all, key_end,
        KV_HEADS, DIM, BLOCK_SIZE, ROWS, SUMS, KEYS, ONE_TOKEN,
    )  # fmt: skip

    out = (o / total[:, None]).to(tl.bfloat16)
    if CODES:
        _store_codes(out, out_ptr, scales_ptr, scale_stride, flat, head, valid, GROUP, HEADS, SUMS)
    else:
        at = out_ptr + first_row * DIM + (row_offset[:, None] * DIM + tl.arange(0, DIM)[None, :])
        tl.store(at, out, mask=valid[:, None])
    if WANT_LSE:
        row_head = (head * GROUP + tl.arange(0, SUMS) % GROUP).to(tl.int64)
        lse = (m + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + row_head * tokens + flat + row_token, lse, mask=valid)


def _check_operands(q: Quantized, keys: Quantized, values: Quantized, tiles: Tiles) -> None:
    """Raise ValueError for shapes, dtypes and blocks that the kernel does not take."""
    codes = q.codes, keys.codes, values.codes
    if {x.dtype for x in codes} != {E4M3} or {x.scales.dtype for x in (q, keys, values)} != {torch.float32}:
        raise ValueError(f"codes must be E4M3 with FP32 scales, not {[x.dtype for x in codes]}; quantise them")
    if not all(x.is_contiguous() for x in (*codes, q.scales, keys.scales, values.scales)):
        raise ValueError("codes and scales must be contiguous; call .contiguous()")
    blocks, kv_heads, size, dim = keys.codes.shape
    fits = values.codes.shape == (blocks, kv_heads, dim, size) and keys.scales.shape == values.scales.shape == (
        blocks, kv_heads, size,
    )  # fmt: skip
    if not fits or q.codes.shape[2] != dim or q.scales.shape != q.codes.shape[:2] or q.codes.shape[1] % kv_heads:
        shapes = [tuple(x.codes.shape) for x in (q, keys, values)]
        raise ValueError(f"q, keys and values of {shapes} do not fit together; values are [blocks, heads, dim, block size]")
    if dim not in DIMS:
        raise ValueError(f"head dim {dim} is not one of {DIMS}, which FP8 products take; use kv_cache=bf16")
    if tiles.table is None or tiles.block_size != size or size % KEYS:
        raise ValueError(f"blocks of {size} keys, a table for {tiles.block_size}: want a table and a multiple of {KEYS}")


def decode_launch(programs: int) -> Launch:
    """Few programs load further ahead."""
    return Launch(stages=7 if programs <= 4 * _SMS else 5, registers=168)


def forward(
    q: Quantized, keys: Quantized, values: Quantized, tiles: Tiles, want_lse: bool, launch: Launch | None, codes: bool = False
) -> tuple[Tensor | Quantized, Tensor | None]:
    """`attention` with its launch given or chosen. With `codes` the result is `Quantized`."""
    _check_operands(q, keys, values, tiles)
    assert tiles.table is not None and tiles.rows == ROWS, tiles.rows
    tokens, heads, dim = q.codes.shape
    kv_heads, device = keys.codes.shape[1], q.codes.device
    programs = tiles.sequence.shape[0] * kv_heads
    if launch is None:
        launch = decode_launch(programs) if tiles.decode else PREFILL
    out = empty_rows(tokens, heads * dim, device) if codes else torch.empty(q.codes.shape, dtype=torch.bfloat16, device=device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=device) if want_lse else None
    to, scales, scale_stride = (out, None, 0) if isinstance(out, Tensor) else (out.codes, out.scales, out.scales.stride(1))
    _launch(
        _forward_kernel, programs,
        q.codes, q.scales, keys.codes, keys.scales, values.codes, values.scales, to, lse, scales,
        tiles.sequence, tiles.token, tiles.query_start, tiles.query_length, tiles.context, tiles.table,
        tokens, tiles.table.stride(0), scale_stride, LOG2_E / math.sqrt(dim),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, BLOCK_SIZE=tiles.block_size, ROWS=ROWS, KEYS=KEYS,
        ONE_TOKEN=tiles.decode, WANT_LSE=want_lse, CODES=codes,
        num_warps=4, num_stages=launch.stages, maxnreg=launch.registers, enable_fp_fusion=False, **OPTIONS,
    )  # fmt: skip
    return out, lse


def takes_codes(tiles: Tiles, dim: int) -> bool:
    """Whether `decode_codes` can do it."""
    return tiles.decode and dim == GROUP


def decode_codes(q: Quantized, keys: Quantized, values: Quantized, tiles: Tiles) -> Quantized:
    """The bytes of `attention` quantised in 1x128 groups, in one launch: what the next product reads, [T, heads * 128].

    For decode tiles and head dimension 128, where a group is a head.
    """
    assert takes_codes(tiles, q.codes.shape[2])
    out, _ = forward(q, keys, values, tiles, False, None, codes=True)
    assert isinstance(out, Quantized)
    return out


def attention(q: Quantized, keys: Quantized, values: Quantized, tiles: Tiles, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Causal attention of codes. q: E4M3 [T, heads, dim], scales [T, heads]; keys, values: a cache as in `ops.Target`.

    Returns out, BF16 [T, heads, dim], and lse, FP32 [heads, T] natural log, or None. Rows of q that belong to no sequence of
    `tiles` are left unset. Raises ValueError for what the kernel does not take.
    """
    out, lse = forward(q, keys, values, tiles, want_lse, None)
    assert isinstance(out, Tensor)
    return out, lse
