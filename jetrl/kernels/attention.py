"""Causal attention with grouped queries: one definition for training, prefill and decode.

Problem: prefill sees many queries at once, decode one, and keys lie packed in one case and paged in the other; if the
softmax or the sum over keys takes another order, prefill, decode and training disagree.

Method, for the query at position t with keys 0..t, d = head dimension:

    s[j] = (q . k[j]) / sqrt(d)         exact product on the operands' grids, float64
    p[j] = exp(s[j] - max s)            float64
    out  = bf16( sum_j p[j] v[j]  /  sum_j p[j] )       both sums free of order (see `exact`)

For sum p v to be exact the grid of p[j] follows v[j]'s size: p[j] 2^e[j] is rounded to the grid of its row, then divided by
2^e[j] again, where 2^e[j] bounds v[j]. Keys that a query must not see weigh exactly 0, so padding and batching change no bit.

With an FP8 cache q, k, v are codes, each head of each token with a scale, and so are the probabilities. Then keys are taken in
tiles of 64 from key 0 on, as the GPU takes them: what p is rounded to depends on the largest score so far. For a row, with a
tile's keys j, all that it does not see left out, and code products d exact:

    x[j] = (d(q, k[j]) k_scale[j]) (q_scale / sqrt(d));   m' = max(m, max x);   shrink = exp(m - m');   p[j] = exp(x[j] - m')
    total = total shrink + sum p;   v_max = max v_scale;   code[j] = e4m3(p[j] v_scale[j] (448 / v_max))
    o = o shrink + (v_max / 448) sum_j code[j] v[j];   out = bf16(o / total)

so that the probabilities carry the values' scales, in a range of their own for each tile. One step of a row follows the other;
within a tile the sums are exact, and a tile of which a row sees no key multiplies by 1 and adds 0.

Layout: a `Layout` lists buckets of sequences of similar length. Queries are rows of a flat [T, heads, D] tensor. Keys and
values are rows of a flat [R, kv_heads, D] tensor: the packed tokens in training, the slots of the paged cache in the
engine; `key_index` is the only thing that differs. Codes lie in blocks (see `ops.Target`), and their rows are slots.
`prepare` rounds keys and values to their grids before they are stored, which BF16 holds exactly.

Given up: a weight below 2^-20 of the largest contribution is rounded; at most 2^17 keys. Scores of a bucket are held in
float64, chunked over queries. A NaN in a value reaches earlier tokens of its own sequence too, since 0 * NaN is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.exact import exact_product, operand_bits, order_free_sum, power_above, to_grid
from jetrl.kernels.quant import AMAX_FLOOR, E4M3, E4M3_MAX, Quantized, decode

_VALUE_BITS = 16
_WEIGHT_BITS = 20
_SUM_BITS = 36
MAX_KEYS = 1 << 17  # 16 + 20 + 17 = 53 bits
_CHUNK_SCORES = 1 << 18  # scores held at once: 2 MB in float64
TILE = 64  # keys of one step with an FP8 cache: part of the numerics
_TILE_SUM_BITS = 46  # and 6 for 64 keys


@dataclass(slots=True, frozen=True)
class Bucket:
    """S sequences padded to Q queries and K keys."""

    query_index: Tensor  # int64 [S, Q], row of the flat queries; padding repeats the last one
    query_position: Tensor  # int64 [S, Q], position of the query in its sequence; -1 marks padding
    key_index: Tensor  # int64 [S, K], row of the flat keys; padding repeats the first one


@dataclass(slots=True, frozen=True)
class Layout:
    """Where the queries and keys of a forward lie."""

    buckets: list[Bucket]


@dataclass(frozen=True)
class Sequences:
    """The same for a GPU, where a kernel works the indices out: which tokens are new, and where each sequence's keys lie."""

    query_lengths: list[int]  # new tokens, packed in this order
    context_lengths: list[int]  # keys each ends with, the new ones included
    key_starts: list[int] | None  # packed keys: flat row of each sequence's first key
    block_tables: Tensor | None  # paged keys: int32 [S, most blocks]
    block_size: int
    device: torch.device
    made: dict[object, Any] = field(default_factory=dict)  # what the kernels of all layers share; tiles by (heads, kv_heads)


@dataclass(frozen=True)
class LaneSequences:
    """One new token a row, on a GPU, where lengths are known on the device alone (see `kernels.lanes`)."""

    lane: Tensor  # int32 [R], lane of each row
    query_start: Tensor  # int32 [L + 1], row of the lane's query
    query_length: Tensor  # int32 [L + 1], 1, or 0: the row takes no part
    context: Tensor  # int32 [L + 1], keys, the new one included
    block_tables: Tensor  # int32 [L + 1, most blocks]
    block_size: int
    made: dict[object, Any] = field(default_factory=dict)  # as in `Sequences`


def prepare(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [T, kv_heads, D] BF16, each row rounded to its grid; still BF16."""
    key_bits = operand_bits(keys.shape[-1])[1]
    return (
        to_grid(keys.double(), key_bits).to(torch.bfloat16),
        to_grid(values.double(), _VALUE_BITS).to(torch.bfloat16),
    )


def _chunks(bucket: Bucket, heads: int) -> list[Bucket]:
    """Cut a bucket over sequences, then over queries, so that its scores fit the budget."""
    sequences, queries = bucket.query_index.shape
    per_query = heads * bucket.key_index.shape[1]
    query_step = max(1, min(queries, _CHUNK_SCORES // per_query))
    sequence_step = max(1, _CHUNK_SCORES // (per_query * query_step)) if query_step == queries else 1
    return [
        Bucket(
            bucket.query_index[s : s + sequence_step, t : t + query_step],
            bucket.query_position[s : s + sequence_step, t : t + query_step],
            bucket.key_index[s : s + sequence_step],
        )
        for s in range(0, sequences, sequence_step)
        for t in range(0, queries, query_step)
    ]


def _heads_first(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [S, L] of x [R, heads, D], as float64 [S, heads, L, D]; contiguous, as `bmm` would copy it otherwise."""
    heads, dim = x.shape[1:]
    flat = index.unsqueeze(1) * heads + torch.arange(heads).view(-1, 1)
    return x.reshape(-1, dim).index_select(0, flat.view(-1)).double().view(*flat.shape, dim)


@dataclass(slots=True)
class _Operands:
    """One chunk, query heads grouped by their key head: G = heads / kv_heads."""

    q: Tensor  # float64 [S, kv_heads, G * Q, D], on its grid
    k: Tensor  # float64 [S, kv_heads, K, D]
    v: Tensor  # float64 [S, kv_heads, K, D]
    hidden: Tensor  # bool [S, 1, G * Q, K], True where a key must not be seen
    groups: int


def _operands(chunk: Bucket, q: Tensor, k: Tensor, v: Tensor) -> _Operands:
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    groups, (sequences, queries) = heads // kv_heads, chunk.query_index.shape
    keys = chunk.key_index.shape[1]
    hidden = torch.arange(keys) > chunk.query_position.unsqueeze(-1)
    wide_q = to_grid(_heads_first(q, chunk.query_index), operand_bits(dim)[0])
    return _Operands(
        wide_q.reshape(sequences, kv_heads, groups * queries, dim),
        _heads_first(k, chunk.key_index),
        _heads_first(v, chunk.key_index),
        hidden.unsqueeze(1).expand(-1, groups, -1, -1).reshape(sequences, 1, groups * queries, keys),
        groups,
    )


def _weights(x: _Operands) -> Tensor:
    """exp(score - row maximum), float64 [S, kv_heads, G * Q, K], exactly 0 for hidden keys."""
    scores = exact_product(x.q, x.k).mul_(1.0 / math.sqrt(x.q.shape[-1]))
    scores.masked_fill_(x.hidden, -torch.inf)
    # A padding query sees no key at all; its maximum of -inf would make NaN of what is thrown away anyway.
    largest = scores.amax(-1, keepdim=True).clamp_(min=-1e300)
    return scores.sub_(largest).exp_()


def _attend(x: _Operands) -> Tensor:
    weights = _weights(x)
    total = order_free_sum(weights, _SUM_BITS)
    bound = power_above(x.v.abs().amax(-1)).unsqueeze(-2)
    weighted = to_grid(weights.mul_(bound), _WEIGHT_BITS).mul_(torch.ones_like(bound).div_(bound))
    return (weighted @ x.v).div_(total)


def _rows(x: Tensor, chunk: Bucket, groups: int) -> tuple[Tensor, Tensor]:
    """Undo the grouping: valid query rows [n] and their values, BF16 [n, heads, D], of x [S, kv_heads, G * Q, D]."""
    sequences, kv_heads, _, dim = x.shape
    queries = chunk.query_index.shape[1]
    per_head = x.to(torch.bfloat16).view(sequences, kv_heads * groups, queries, dim).transpose(1, 2)
    valid = chunk.query_position >= 0
    return chunk.query_index[valid], per_head[valid]


def attention(q: Tensor, keys: Tensor, values: Tensor, layout: Layout) -> Tensor:
    """Causal attention. q: BF16 [T, heads, D]; keys, values: BF16 [R, kv_heads, D], from `prepare`. Returns BF16 like q."""
    out = torch.zeros_like(q)
    for bucket in layout.buckets:
        assert bucket.key_index.shape[1] <= MAX_KEYS, bucket.key_index.shape
        for chunk in _chunks(bucket, q.shape[1]):
            operands = _operands(chunk, q, keys, values)
            index, rows = _rows(_attend(operands), chunk, operands.groups)
            out[index] = rows
    return out


def _gather(x: Tensor, block: Tensor, at: Tensor) -> Tensor:
    """Codes or scales of slots [S, n], float64 [S, kv_heads, n, ...]; x: [blocks, kv_heads, block_size, ...]."""
    found = x.view(torch.uint8)[block, :, at].view(x.dtype) if x.dtype == E4M3 else x[block, :, at]
    found = found.transpose(1, 2).contiguous()
    return decode(found) if x.dtype == E4M3 else found.double()


def _probability_codes(p: Tensor, factor: Tensor) -> Tensor:
    """p * factor rounded to E4M3, as float64."""
    return decode((p * factor).float().clamp_(max=E4M3_MAX).to(E4M3))


def _attend_fp8(chunk: Bucket, q: Quantized, keys: Quantized, values: Quantized) -> Tensor:
    """Output [S, kv_heads, G * Q, D], float64, of one chunk."""
    heads, dim = q.codes.shape[1:]
    kv_heads, size = keys.scales.shape[1:]
    (sequences, queries), groups = chunk.query_index.shape, heads // kv_heads
    rows = sequences, kv_heads, groups * queries
    wide_q = decode(q.codes.view(torch.uint8)[chunk.query_index].transpose(1, 2).contiguous().view(E4M3)).view(*rows, dim)
    scale = q.scales[chunk.query_index].transpose(1, 2).double().mul(1.0 / math.sqrt(dim)).reshape(*rows, 1)
    position = chunk.query_position.repeat(1, groups).view(sequences, 1, groups * queries, 1)
    # Not -inf: a padding query sees no key at all, and -inf - -inf is NaN.
    m, total, o = (wide_q.new_full((*rows, n), x) for n, x in ((1, -1e300), (1, 0.0), (dim, 0.0)))
    for first in range(0, chunk.key_index.shape[1], TILE):
        slots = chunk.key_index[:, first : first + TILE]
        place = slots // size, slots % size
        hidden = torch.arange(first, first + slots.shape[1]) > position
        scores = exact_product(wide_q, _gather(keys.codes, *place)).mul_(_gather(keys.scales, *place).unsqueeze(2)).mul_(scale)
        scores.masked_fill_(hidden, -torch.inf)
        largest = torch.maximum(m, scores.amax(-1, keepdim=True))
        shrink, p = torch.exp(m - largest), torch.exp(scores - largest)
        total = total.mul_(shrink).add_(order_free_sum(p, _TILE_SUM_BITS))
        v_scale = _gather(values.scales, *place).unsqueeze(2)
        v_max = v_scale.masked_fill(hidden, 0.0).amax(-1, keepdim=True).clamp_(min=AMAX_FLOOR / E4M3_MAX)
        codes = _probability_codes(p, v_scale * (E4M3_MAX / v_max))
        # A sum of zeros has the sign of its order; + 0 makes it +0.
        product = (codes @ _gather(values.codes.transpose(2, 3), *place)).add_(0.0)
        o = o.mul_(shrink).add_(product.mul_(v_max / E4M3_MAX))
        m = largest
    return o.div_(total)


def attention_fp8(q: Quantized, keys: Quantized, values: Quantized, layout: Layout) -> Tensor:
    """Causal attention of codes. q: [T, heads, D], scales [T, heads]; keys, values: blocks as in `ops.Target`, to whose slots
    the layout points. Returns BF16 like q."""
    out = torch.zeros(q.codes.shape, dtype=torch.bfloat16)
    heads, groups = q.codes.shape[1], q.codes.shape[1] // keys.scales.shape[1]
    for bucket in layout.buckets:
        for chunk in _chunks(bucket, heads):
            index, rows = _rows(_attend_fp8(chunk, q, keys, values), chunk, groups)
            out[index] = rows
    return out


def attention_grad(dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` for packed keys and values, BF16, in float64 inside; the grids pass gradients straight through.

    P = softmax(S), dV = P^T dO, dS = P * (dO V^T - rowsum(dO O)), dQ = dS K / sqrt(d), dK = dS^T Q / sqrt(d).
    """
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in (keys, values))
    scale = 1.0 / math.sqrt(q.shape[-1])
    for bucket in layout.buckets:
        for chunk in _chunks(bucket, q.shape[1]):
            x = _operands(chunk, q, keys, values)
            weights = _weights(x)
            p = weights.div_(weights.sum(-1, keepdim=True).clamp_(min=1.0))
            do = _heads_first(dout, chunk.query_index).reshape(x.q.shape)
            dp = do @ x.v.transpose(-1, -2)
            ds = dp.sub_((p * dp).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            index, rows = _rows(ds @ x.k, chunk, x.groups)
            dq[index] = rows
            flat = chunk.key_index.reshape(-1)
            for total, part in ((dk, ds.transpose(-1, -2) @ x.q), (dv, p.transpose(-1, -2) @ do)):
                total.index_add_(0, flat, part.transpose(1, 2).reshape(-1, *total.shape[1:]))
    return dq, dk.to(torch.bfloat16), dv.to(torch.bfloat16)
