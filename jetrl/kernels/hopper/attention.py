"""Causal attention with grouped queries on Hopper: one set of bits for training, prefill, chunked prefill and decode.

Problem: the sampler decodes one token at a time out of a paged cache, the trainer sees whole packed sequences. If the two
sum over keys in another order, or multiply with another instruction, their log-probabilities differ.

Method: a tile is `rows` (64 or 128) query rows that share a key head. With G = heads / kv_heads, row r of a tile is token
r // G and query head r % G of that key head; a tile holds rows // G tokens, and what remains is padding. A program walks
the keys 0, 64, 128, .. of its sequence with an online softmax:

    s = q k^T                    BF16 `wgmma`, FP32
    m' = max(m, rowmax(s) c)     c = log2(e) / sqrt(dim)
    p = exp2(s c - m')           FP32; exactly 0 for hidden keys
    total = total exp2(m - m') + sum p    the FP32 sum of the unrounded p
    o = o exp2(m - m') + bf16(p) v
    out = bf16(o / total),  lse = (m + log2 total) ln 2

Why a row's bits are the same everywhere:
- keys come in tiles of 64 that start at key 0, in every variant, so the order of the sum is the key's position alone;
- each product is `wgmma`, whose rows do not depend on one another. 16-row tiles would become `mma.sync`, which rounds
  otherwise: a decoded token is padded to 64 rows;
- a row lies within the threads of one quad, whatever the tile: 64 rows take 4 warps, 128 rows 4 or 8, so that sums over a
  row are shuffled in one order. More warps would split rows and are refused;
- hidden keys have s = -inf, and rows of keys and values beyond the sequence are loaded as zeros. A key tile that a row does
  not see at all multiplies o and total by exp2(0) = 1 and adds zeros. So skipping the mask where all is visible, or having
  more rows in the tile, changes no bit;
- multiply-add is fused where the code says `tl.fma` and nowhere else (`enable_fp_fusion=False`).

Two kernels compute this, with the same bits. `_forward_kernel`, here, takes every case: keys are addressed as packed rows
(key_start + position) or through a block table, and only the address differs. `prefill` (jetrl/kernels/hopper/prefill.py)
takes packed keys alone and is faster there: the copies, products and softmax of different warps overlap. So training and
whole packed sequences on a GPU go through it, for all heads; paged keys (so chunked prefill), decode and the interpreter have
`_forward_kernel`. Both keep to the list above, and tests/gpu/test_attention.py compares them.

Backward, packed only and deterministic (no atomics): delta = rowsum(dout * out), then one kernel that owns a tile of keys
and walks the queries (dk, dv), and one that owns a tile of queries and walks the keys (dq).

Given up: the backward forms s and dp twice, 7 products where 5 would do with atomics. A NaN in a value reaches earlier
tokens of its own sequence that share its tile (in `prefill` its 64 keys), since 0 * NaN is NaN. Head dims other than 16, 32,
64 and 128.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.hopper.overlap import OPTIONS, take_turn
from jetrl.kernels.hopper.prefill import KEYS as PREFILL_KEYS
from jetrl.kernels.hopper.prefill import LOG2_E, prefill, work_list

KEYS = PREFILL_KEYS.value  # keys a tile of the forward: part of the numerics, the same in every variant
MAX_GROUP = 16
DIMS = (16, 32, 64, 128)


@dataclass(slots=True, frozen=True)
class Launch:
    """How a kernel is launched. Changes speed, never bits (of the forward)."""

    rows: int  # query rows a tile
    warps: int
    stages: int  # tiles of keys (or of queries, in the backward) that are on their way, and the one in use


PREFILL = Launch(rows=64, warps=4, stages=3)
DECODE = Launch(rows=64, warps=4, stages=3)
GRAD_QUERIES = Launch(rows=64, warps=4, stages=2)
GRAD_KEYS = Launch(rows=32, warps=4, stages=3)
GRAD_KEY_TILE = 64  # keys that a program of the dk, dv kernel owns


@dataclass(slots=True, frozen=True)
class Tiles:
    """The work list of a forward: device tensors, made once and shared by all layers."""

    sequence: Tensor  # int32 [N], sequence of each tile
    token: Tensor  # int32 [N], first token of the tile within its sequence's new tokens
    query_start: Tensor  # int32 [S], flat row of the sequence's first query
    query_length: Tensor  # int32 [S], new tokens; 0 pads a captured graph: such a sequence reads and writes nothing
    context: Tensor  # int32 [S], keys that the sequence ends with, new ones included
    key_start: Tensor | None = None  # int64 [S], flat row of the sequence's first key; packed keys
    work: Tensor | None = None  # int32 [N' * 5], the same sequences for `prefill`, see its work_list; packed keys
    table: Tensor | None = None  # int32 [S, most blocks], block of the cache for each block of the sequence; paged keys
    block_size: int = 0  # keys a block; 0 for packed keys
    rows: int = 64  # 64 or 128 query rows a tile
    decode: bool = False  # no sequence has more than one new token
    key_sequence: Tensor | None = None  # int32 [M], packed keys, all of them new: sequence of each key tile of the backward
    key_token: Tensor | None = None  # int32 [M], first key of that tile
    key_tile: int = 0  # keys a tile of the backward


# The fields of Tiles that `make_tiles` copies to the device, in that order; the last four for packed keys only.
_COPIED = ("sequence", "token", "query_start", "query_length", "context", "key_start", "work", "key_sequence", "key_token")


# ------------------------------------------------------------------------------------------------ device functions


@triton.jit
def _row_offsets(GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Token and offset, in heads, of each row of a tile, from the tile's first token and first head."""
    row = tl.arange(0, ROWS)
    return row // GROUP, row // GROUP * HEADS + row % GROUP


@triton.jit
def tile_of_program(
    sequence_ptr,  # int32 [N], see Tiles
    token_ptr,  # int32 [N]
    query_length_ptr,  # int32 [S]
    context_ptr,  # int32 [S]
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a full tile
):
    """This program's key head, sequence, first token, keys ahead of the new tokens, tokens, and the end of what it sees."""
    head, tile = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    sequence, token = tl.load(sequence_ptr + tile), tl.load(token_ptr + tile)
    length = tl.load(query_length_ptr + sequence)
    before = tl.load(context_ptr + sequence) - length
    here = tl.minimum(length - token, TOKENS)
    return head, sequence, token, before, here, before + token + here


@triton.jit
def _key_tile(
    key_start,  # int64, flat row of the sequence's first key; packed keys
    table_ptr,  # int32 [most blocks], the sequence's blocks; paged keys
    key,  # int32, first key of the tile, a multiple of KEYS
    key_end,  # int32, keys from here on are not to be read
    BLOCK_SIZE: tl.constexpr,  # 0: packed
    STRIDE: tl.constexpr,  # elements a flat row
    KEYS: tl.constexpr,
):
    """Where the tile's keys lie, in elements: one int64 for the tile and an offset for each of its keys."""
    lane = tl.arange(0, KEYS)
    if BLOCK_SIZE == 0:
        return (key_start + key) * STRIDE, lane * STRIDE
    elif BLOCK_SIZE % KEYS == 0:  # the tile lies in one block
        block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
        return (block * BLOCK_SIZE + key % BLOCK_SIZE) * STRIDE, lane * STRIDE
    else:
        position = key + lane
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=position < key_end, other=0).to(tl.int64)
        return tl.zeros((), tl.int64), (block * BLOCK_SIZE + position % BLOCK_SIZE) * STRIDE


@triton.jit
def _load_rows(ptr, base, offset, valid, DIM: tl.constexpr):
    """Rows [len(offset), DIM] at ptr + base + offset; zeros where a row is not valid."""
    return tl.load(ptr + base + (offset[:, None] + tl.arange(0, DIM)[None, :]), mask=valid[:, None], other=0.0)


@triton.jit(do_not_specialize=["tokens", "table_stride"])
def _forward_kernel(
    q_ptr,  # BF16 [tokens, heads, DIM]
    k_ptr,  # BF16 [R, KV_HEADS, DIM], packed rows or slots of the cache
    v_ptr,  # BF16 like k_ptr
    out_ptr,  # BF16 like q_ptr
    lse_ptr,  # FP32 [heads, tokens], natural log of the sum of exp(score); None if not wanted
    sequence_ptr,  # int32 [N], see Tiles
    token_ptr,  # int32 [N]
    query_start_ptr,  # int32 [S]
    query_length_ptr,  # int32 [S]
    context_ptr,  # int32 [S]
    key_start_ptr,  # int64 [S] or None
    table_ptr,  # int32 [S, table_stride] or None
    tokens,  # int32, rows of q
    table_stride,  # int32, most blocks
    c,  # FP32, log2(e) / sqrt(dim)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a key head
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # keys a block of the cache; 0: packed keys
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SKIP: tl.constexpr,  # branch around the mask where every row sees the whole tile of keys
    WANT_LSE: tl.constexpr,
):
    """One tile of query rows of one key head, in any phase. `prefill` is a second kernel, for speed, with the same bits."""
    take_turn()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    STRIDE: tl.constexpr = KV_HEADS * DIM
    head, sequence, token, before, here, key_end = tile_of_program(
        sequence_ptr, token_ptr, query_length_ptr, context_ptr, KV_HEADS, ROWS // GROUP
    )
    if BLOCK_SIZE == 0:
        key_start = tl.load(key_start_ptr + sequence)
        blocks = key_start_ptr  # not read
    else:
        key_start = tl.zeros((), tl.int64)
        blocks = table_ptr + sequence.to(tl.int64) * table_stride

    row_token, row_offset = _row_offsets(GROUP, HEADS, ROWS)
    valid = row_token < here
    position = tl.minimum(before + token + row_token, key_end - 1)  # padding sees what the last token sees
    flat = tl.load(query_start_ptr + sequence).to(tl.int64) + token
    base = (flat * HEADS + head * GROUP) * DIM
    q = _load_rows(q_ptr, base, row_offset * DIM, valid, DIM)

    o = tl.zeros((ROWS, DIM), tl.float32)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    k_head = k_ptr + head * DIM
    v_head = v_ptr + head * DIM
    visible_end = before + token + 1  # keys that every row of the tile sees
    for key in range(0, key_end, KEYS):
        key_base, key_offset = _key_tile(key_start, blocks, key, key_end, BLOCK_SIZE, STRIDE, KEYS)
        at = key + tl.arange(0, KEYS)
        # Both loads ahead of the branch: the pipeline then waits once for the pair.
        k = _load_rows(k_head, key_base, key_offset, at < key_end, DIM)
        v = _load_rows(v_head, key_base, key_offset, at < key_end, DIM)
        s = tl.dot(q, tl.trans(k))
        if not SKIP or key + KEYS > visible_end:
            s = tl.where(at[None, :] <= position[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * c)
        shrink = tl.exp2(m - m_new)
        p = tl.exp2(tl.fma(s, c, -m_new[:, None]))
        total = tl.fma(total, shrink, tl.sum(p, 1))
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None])
        m = m_new

    at = out_ptr + base + (row_offset[:, None] * DIM + tl.arange(0, DIM)[None, :])
    tl.store(at, (o / total[:, None]).to(out_ptr.dtype.element_ty), mask=valid[:, None])
    if WANT_LSE:
        row_head = (head * GROUP + tl.arange(0, ROWS) % GROUP).to(tl.int64)
        lse = (m + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + row_head * tokens + flat + row_token, lse, mask=valid)


@triton.jit(do_not_specialize=["tokens"])
def _row_terms_kernel(
    dout_ptr,  # BF16 [tokens, HEADS, DIM]
    out_ptr,  # BF16 like dout_ptr
    lse_ptr,  # FP32 [HEADS, tokens], natural log
    delta_ptr,  # FP32 [tokens, HEADS], result: sum of dout * out over a row
    lse2_ptr,  # FP32 [tokens, HEADS], result: lse as a power of 2
    tokens,  # int32
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """What the backward needs of each query row, in the order in which its tiles read rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < tokens.to(tl.int64) * HEADS
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    dout = tl.load(dout_ptr + at, mask=valid[:, None], other=0.0).to(tl.float32)
    out = tl.load(out_ptr + at, mask=valid[:, None], other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row % HEADS * tokens + row // HEADS, mask=valid, other=0.0)
    tl.store(delta_ptr + row, tl.sum(dout * out, 1), mask=valid)
    tl.store(lse2_ptr + row, lse * 1.4426950408889634, mask=valid)


@triton.jit
def _grad_keys_kernel(
    dout_ptr,  # BF16 [tokens, heads, DIM]
    q_ptr,  # BF16 like dout_ptr
    k_ptr,  # BF16 [R, KV_HEADS, DIM], packed
    v_ptr,  # BF16 like k_ptr
    delta_ptr,  # FP32 [tokens, heads]
    lse2_ptr,  # FP32 [tokens, heads]
    dk_ptr,  # BF16 like k_ptr, result
    dv_ptr,  # BF16 like k_ptr, result
    key_sequence_ptr,  # int32 [M], see Tiles
    key_token_ptr,  # int32 [M]
    query_start_ptr,  # int32 [S]
    query_length_ptr,  # int32 [S]
    key_start_ptr,  # int64 [S]
    scale,  # FP32, 1 / sqrt(dim)
    c,  # FP32, log2(e) / sqrt(dim)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """dk and dv of one tile of keys of one key head: the sum over all later tokens and the group's heads, in order."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    TOKENS: tl.constexpr = ROWS // GROUP
    STRIDE: tl.constexpr = KV_HEADS * DIM
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    sequence = tl.load(key_sequence_ptr + tile)
    key = tl.load(key_token_ptr + tile)
    length = tl.load(query_length_ptr + sequence)
    lane = tl.arange(0, TILE)
    base = (tl.load(key_start_ptr + sequence) + key) * STRIDE + head * DIM
    k = _load_rows(k_ptr, base, lane * STRIDE, key + lane < length, DIM)
    v = _load_rows(v_ptr, base, lane * STRIDE, key + lane < length, DIM)
    first = tl.load(query_start_ptr + sequence).to(tl.int64) * HEADS + head * GROUP
    q_head, dout_head = q_ptr + first * DIM, dout_ptr + first * DIM
    delta_head, lse2_head = delta_ptr + first, lse2_ptr + first
    dk = tl.zeros((TILE, DIM), tl.float32)
    dv = tl.zeros((TILE, DIM), tl.float32)
    row_token, row_offset = _row_offsets(GROUP, HEADS, ROWS)
    # Rows of padding are zeros in q, dout and delta, so they add zeros.
    for token in range(key, length, TOKENS):
        row_base = tl.cast(token, tl.int64) * HEADS
        valid = row_token < tl.minimum(length - token, TOKENS)
        q = _load_rows(q_head, row_base * DIM, row_offset * DIM, valid, DIM)
        dout = _load_rows(dout_head, row_base * DIM, row_offset * DIM, valid, DIM)
        lse2 = tl.load(lse2_head + row_base + row_offset, mask=valid, other=0.0)
        delta = tl.load(delta_head + row_base + row_offset, mask=valid, other=0.0)
        p = tl.exp2(tl.fma(tl.dot(k, tl.trans(q)), c, -lse2[None, :]))
        if token < key + TILE - 1:
            p = tl.where((key + lane)[:, None] <= (token + row_token)[None, :], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv)
        ds = p * (tl.dot(v, tl.trans(dout)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    at = base + (lane[:, None] * STRIDE + tl.arange(0, DIM)[None, :])
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=(key + lane < length)[:, None])
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=(key + lane < length)[:, None])


@triton.jit
def _grad_queries_kernel(
    dout_ptr,  # BF16 [tokens, heads, DIM]
    q_ptr,  # BF16 like dout_ptr
    k_ptr,  # BF16 [R, KV_HEADS, DIM], packed
    v_ptr,  # BF16 like k_ptr
    delta_ptr,  # FP32 [tokens, heads]
    lse2_ptr,  # FP32 [tokens, heads]
    dq_ptr,  # BF16 like q_ptr, result
    sequence_ptr,  # int32 [N], see Tiles
    token_ptr,  # int32 [N]
    query_start_ptr,  # int32 [S]
    query_length_ptr,  # int32 [S]
    key_start_ptr,  # int64 [S]
    scale,  # FP32, 1 / sqrt(dim)
    c,  # FP32, log2(e) / sqrt(dim)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dq of one tile of query rows of one key head: the sum over the keys they see, in order."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    STRIDE: tl.constexpr = KV_HEADS * DIM
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    sequence = tl.load(sequence_ptr + tile)
    token = tl.load(token_ptr + tile)
    here = tl.minimum(tl.load(query_length_ptr + sequence) - token, TOKENS)
    key_end = token + here
    row_token, row_offset = _row_offsets(GROUP, HEADS, ROWS)
    valid = row_token < here
    position = tl.minimum(token + row_token, key_end - 1)
    base = (tl.load(query_start_ptr + sequence).to(tl.int64) + token) * HEADS + head * GROUP
    q = _load_rows(q_ptr, base * DIM, row_offset * DIM, valid, DIM)
    dout = _load_rows(dout_ptr, base * DIM, row_offset * DIM, valid, DIM)
    delta = tl.load(delta_ptr + base + row_offset, mask=valid, other=0.0)
    lse2 = tl.load(lse2_ptr + base + row_offset, mask=valid, other=0.0)
    key_base = tl.load(key_start_ptr + sequence) * STRIDE + head * DIM
    k_head, v_head = k_ptr + key_base, v_ptr + key_base
    lane = tl.arange(0, KEYS)
    dq = tl.zeros((ROWS, DIM), tl.float32)
    for key in range(0, key_end, KEYS):
        here_base = tl.cast(key, tl.int64) * STRIDE
        k = _load_rows(k_head, here_base, lane * STRIDE, key + lane < key_end, DIM)
        v = _load_rows(v_head, here_base, lane * STRIDE, key + lane < key_end, DIM)
        p = tl.exp2(tl.fma(tl.dot(q, tl.trans(k)), c, -lse2[:, None]))
        if key + KEYS > token + 1:
            p = tl.where((key + lane)[None, :] <= position[:, None], p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    at = base * DIM + (row_offset[:, None] * DIM + tl.arange(0, DIM)[None, :])
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=valid[:, None])


# ------------------------------------------------------------------------------------------------ the work list


def _tile_list(lengths: list[int], order: list[int], step: int) -> tuple[list[int], list[int]]:
    """Sequence and first token of each tile of `step` tokens, sequences in `order`, each one's tokens in order."""
    pairs = [(s, t) for s in order for t in range(0, lengths[s], step)]
    return [s for s, _ in pairs], [t for _, t in pairs]


def _to_device(parts: list[Tensor], device: torch.device | str) -> list[Tensor]:
    """CPU integer tensors, on the device, by one copy. Each begins at a multiple of 16 bytes, so that one compiled kernel
    serves all sizes."""
    words = [p.contiguous().view(torch.int32) for p in parts]
    starts = list(accumulate((-(-w.numel() // 4) * 4 for w in words), initial=0))
    on_gpu = torch.device(device).type == "cuda"
    host = torch.zeros(max(starts[-1], 4), dtype=torch.int32, pin_memory=on_gpu)
    for word, start in zip(words, starts, strict=False):
        host[start : start + word.numel()] = word
    there = host.to(device, non_blocking=True)
    return [there[a : a + w.numel()].view(p.dtype) for p, w, a in zip(parts, words, starts, strict=False)]


def _check_lengths(query_lengths: list[int], context_lengths: list[int]) -> None:
    if len(query_lengths) != len(context_lengths):
        raise ValueError(f"{len(query_lengths)} query lengths but {len(context_lengths)} context lengths; give one each")
    for s, (new, context) in enumerate(zip(query_lengths, context_lengths, strict=True)):
        if not 0 <= new <= context:
            raise ValueError(f"sequence {s} has {new} new tokens but ends with {context} keys, which must include them")


def make_tiles(
    query_lengths: list[int],
    context_lengths: list[int],
    heads: int,
    kv_heads: int,
    key_starts: list[int] | None,
    table: Tensor | None,
    block_size: int,
    device: torch.device | str,
    rows: int | None = None,
    key_tile: int = GRAD_KEY_TILE,
) -> Tiles:
    """The work list for sequences whose new tokens lie one after the other in q, by one copy to the device.

    `query_lengths` new tokens of each sequence, `context_lengths` its keys with the new ones. Keys are packed, with the flat
    row of each sequence's first key in `key_starts`, or paged, with `table` int32 [S, most blocks] on the device and
    `block_size`. If no sequence has more than one new token, tiles have 64 rows and each sequence has exactly one, also
    where it has no token; else `rows` (64 or 128). Sequences with most keys come first, and within a sequence the tiles with
    most keys: a sequence's tiles stay together, so that they find its keys in the cache. For packed keys `prefill` gets a list
    of its own, with tiles of its own size. Raises ValueError for lengths, heads or addresses that do not fit together.
    """
    _check_lengths(query_lengths, context_lengths)
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise ValueError(f"{heads} heads over {kv_heads} key heads: need a whole number from 1 to {MAX_GROUP}; split kv_heads")
    if (key_starts is None) == (table is None):
        raise ValueError("give key_starts for packed keys or table for paged keys, one of the two")
    if table is not None and (table.dtype != torch.int32 or table.stride(-1) != 1 or block_size < 1):
        raise ValueError(f"table must be int32 with contiguous rows and block_size >= 1, not {table.dtype}, {block_size}")
    decode = max(query_lengths, default=0) <= 1
    rows = DECODE.rows if decode else rows or PREFILL.rows
    order = sorted(range(len(context_lengths)), key=lambda s: -context_lengths[s])
    if decode:
        sequence, token = order, [0] * len(order)
    else:
        step = rows // (heads // kv_heads)
        sequence, token = _tile_list([-(-n // step) for n in query_lengths], order, 1)
        # Late tokens see most keys: count the tiles of a sequence from its end.
        token = [(-(-query_lengths[s] // step) - 1 - t) * step for s, t in zip(sequence, token, strict=True)]
    starts = list(accumulate(query_lengths, initial=0))[:-1]
    parts = [torch.tensor(x, dtype=torch.int32) for x in (sequence, token, starts, query_lengths, context_lengths)]
    if key_starts is not None:
        parts.append(torch.tensor(key_starts, dtype=torch.int64))
        parts.append(work_list(query_lengths, context_lengths, key_starts, heads, kv_heads))
        if query_lengths == context_lengths:
            parts += [torch.tensor(x, dtype=torch.int32) for x in _tile_list(context_lengths, order, key_tile)]
    there = _to_device(parts, device)
    shape = {"table": table, "block_size": 0 if table is None else block_size, "rows": rows, "decode": decode}
    return Tiles(**dict(zip(_COPIED, there, strict=False)), **shape, key_tile=key_tile)


# ------------------------------------------------------------------------------------------------ operators


def _launch(jitted: Any, programs: int, *arguments: object, **options: object) -> None:
    """Start a kernel; where Triton is absent its decorator has no type, hence Any."""
    if programs:
        jitted[(programs,)](*arguments, **options)


def _check_operands(q: Tensor, keys: Tensor, values: Tensor) -> None:
    """The kernels read dense rows; FP32 passes only where there is no GPU, for the interpreter."""
    dtypes = {x.dtype for x in (q, keys, values)}
    if dtypes != {torch.bfloat16} and (q.is_cuda or dtypes != {torch.float32}):
        raise ValueError(f"q, keys and values must be BF16, not {sorted(map(str, dtypes))}; cast them")
    if not all(x.dim() == 3 and x.is_contiguous() for x in (q, keys, values)):
        raise ValueError("q, keys and values must be contiguous [rows, heads, dim]; call .contiguous()")
    if keys.shape != values.shape or q.shape[2] != keys.shape[2] or q.shape[1] % keys.shape[1]:
        raise ValueError(f"q {tuple(q.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} do not fit together")
    if q.shape[2] not in DIMS:
        raise ValueError(
            f"head dim {q.shape[2]} is not one of {DIMS}; pad q, keys and values with zeros to the next one "
            f"and scale q by sqrt(padded / {q.shape[2]})"
        )


def forward(
    q: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, want_lse: bool, launch: Launch, skip: bool
) -> tuple[Tensor, Tensor | None]:
    """`attention` by `_forward_kernel`, with its launch given.

    `launch.rows` must be the tiles', `skip` branches around the mask of visible tiles.
    """
    _check_operands(q, keys, values)
    if (launch.rows, launch.warps) not in ((64, 4), (128, 4), (128, 8)) or launch.rows != tiles.rows:
        raise ValueError(f"{launch} for tiles of {tiles.rows} rows: a row must stay in one warp, so 16 or 32 rows a warp")
    tokens, heads, dim = q.shape
    kv_heads = keys.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device) if want_lse else None
    # Triton shares its stages out between the lookup of a block and the load of its keys: twice as many buy the same depth.
    stages = launch.stages if tiles.table is None else 2 * launch.stages - 1
    _launch(
        _forward_kernel, tiles.sequence.shape[0] * kv_heads,
        q, keys, values, out, lse,
        tiles.sequence, tiles.token, tiles.query_start, tiles.query_length, tiles.context, tiles.key_start, tiles.table,
        tokens, 0 if tiles.table is None else tiles.table.stride(0), LOG2_E / math.sqrt(dim),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, BLOCK_SIZE=tiles.block_size, ROWS=launch.rows, KEYS=KEYS,
        SKIP=skip, WANT_LSE=want_lse,
        num_warps=launch.warps, num_stages=stages, enable_fp_fusion=False, **OPTIONS,
    )  # fmt: skip
    return out, lse


def _for_rows(launch: Launch, rows: int) -> Launch:
    """The launch for tiles of so many rows, 16 a warp."""
    return Launch(rows, rows // 16, launch.stages)


def attention(q: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Causal attention. q: BF16 [T, heads, dim]; keys, values: BF16 [R, kv_heads, dim]; all contiguous.

    Returns out, BF16 like q, and lse, FP32 [heads, T] natural log, or None. Rows of q that belong to no sequence of `tiles`
    are left unset. Raises ValueError for shapes, dtypes or head dims that the kernels do not take. On a GPU packed keys go
    through `prefill`, whatever the heads, unless a tensor starts between multiples of 16 bytes; the bits are the same.
    """
    if tiles.decode:  # bound by memory: the mask is free, and one loop keeps the pipeline full to the last tile
        return forward(q, keys, values, tiles, want_lse, DECODE, skip=False)
    if q.is_cuda and tiles.work is not None and all(x.data_ptr() % 16 == 0 for x in (q, keys, values)):
        _check_operands(q, keys, values)
        return prefill(q, keys, values, tiles.work, want_lse)
    return forward(q, keys, values, tiles, want_lse, _for_rows(PREFILL, tiles.rows), skip=True)


def row_terms(dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """delta = rowsum(dout * out) and lse / ln 2, both FP32 [T, heads]."""
    tokens, heads, dim = out.shape
    delta = torch.empty((tokens, heads), dtype=torch.float32, device=out.device)
    lse2 = torch.empty_like(delta)
    _launch(
        _row_terms_kernel, triton.cdiv(tokens * heads, 64), dout, out, lse, delta, lse2, tokens, HEADS=heads, DIM=dim, ROWS=64
    )
    return delta, lse2


def grad_keys(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, delta: Tensor, lse2: Tensor, tiles: Tiles, launch: Launch
) -> tuple[Tensor, Tensor]:
    """dk and dv, BF16 like keys; rows that belong to no sequence are zeros."""
    kv_heads, dim = keys.shape[1:]
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    assert tiles.key_sequence is not None
    _launch(
        _grad_keys_kernel, tiles.key_sequence.shape[0] * kv_heads,
        dout, q, keys, values, delta, lse2, dk, dv,
        tiles.key_sequence, tiles.key_token, tiles.query_start, tiles.query_length, tiles.key_start,
        1.0 / math.sqrt(dim), LOG2_E / math.sqrt(dim),
        KV_HEADS=kv_heads, GROUP=q.shape[1] // kv_heads, DIM=dim, ROWS=launch.rows, TILE=tiles.key_tile,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return dk, dv


def grad_queries(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, delta: Tensor, lse2: Tensor, tiles: Tiles, launch: Launch
) -> Tensor:
    """dq, BF16 like q."""
    kv_heads, dim = keys.shape[1:]
    dq = torch.empty_like(q)
    _launch(
        _grad_queries_kernel, tiles.sequence.shape[0] * kv_heads,
        dout, q, keys, values, delta, lse2, dq,
        tiles.sequence, tiles.token, tiles.query_start, tiles.query_length, tiles.key_start,
        1.0 / math.sqrt(dim), LOG2_E / math.sqrt(dim),
        KV_HEADS=kv_heads, GROUP=q.shape[1] // kv_heads, DIM=dim, ROWS=launch.rows, KEYS=KEYS,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return dq


def attention_grad(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of `attention`, BF16, deterministic; packed keys with no keys ahead of the queries.

    dout, q, out: BF16 [T, heads, dim]; keys, values: BF16 [R, kv_heads, dim]; lse: FP32 [heads, T]. With
    P = exp(S - lse): dV = P^T dO, dS = P * (dO V^T - delta), dQ = dS K / sqrt(d), dK = dS^T Q / sqrt(d).
    Raises ValueError for tiles with paged or older keys.
    """
    _check_operands(q, keys, values)
    if tiles.key_sequence is None:
        raise ValueError("attention_grad needs packed keys, all of them new: make_tiles with key_starts and equal lengths")
    dout = dout.contiguous()
    delta, lse2 = row_terms(dout, out, lse)
    dk, dv = grad_keys(dout, q, keys, values, delta, lse2, tiles, GRAD_KEYS)
    dq = grad_queries(dout, q, keys, values, delta, lse2, tiles, _for_rows(GRAD_QUERIES, tiles.rows))
    return dq, dk, dv
