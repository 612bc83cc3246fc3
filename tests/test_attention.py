"""Attention against plain float64 softmax, and one set of bits for prefill, decode, packing, paging, padding and chunks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.kernels import attention as kernel
from jetrl.kernels.attention import Bucket, Layout, attention, attention_grad, prepare
from jetrl.model.context import KVCache, PackedContext, PagedContext

HEADS = [(6, 2, 24), (4, 4, 40), (8, 1, 64), (2, 1, 2)]  # query heads, key heads, dimension
LENGTHS = [33, 1, 70, 5, 130, 2]  # several buckets, none full


def noise(*shape: int, seed: int = 0) -> Tensor:
    """BF16 noise; token 3 of head 0 is zero, token 4 is large, token 5 has an outlier (of those that exist)."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[3:4, 0], x[4:5] = 0.0, x[4:5] * 30.0
    x[5:6, :, 0] *= 1e4
    return x.bfloat16()


def operands(tokens: int, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return noise(tokens, heads, dim), *prepare(noise(tokens, kv_heads, dim, seed=1), noise(tokens, kv_heads, dim, seed=2))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as BF16 bits; unlike torch.equal, 0.0 is not -0.0."""
    return a.dtype == b.dtype == torch.bfloat16 and torch.equal(a.view(torch.int16), b.view(torch.int16))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float64 causal softmax attention of one sequence, head by head and query by query."""
    groups = q.shape[1] // k.shape[1]
    rows = []
    for t in range(q.shape[0]):
        heads = []
        for h in range(q.shape[1]):
            keys, values = k[: t + 1, h // groups], v[: t + 1, h // groups]
            heads.append(torch.softmax(keys @ q[t, h] / math.sqrt(q.shape[2]), 0) @ values)
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def single(queries: int, keys: int) -> Layout:
    """One sequence by hand: the last `queries` of `keys` tokens ask."""
    positions = torch.arange(keys - queries, keys).unsqueeze(0)
    return Layout([Bucket(torch.arange(queries).unsqueeze(0), positions, torch.arange(keys).unsqueeze(0))])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("tokens", [1, 2, 37, 130])
def test_values_are_those_of_plain_softmax_attention(heads: int, kv_heads: int, dim: int, tokens: int) -> None:
    """Half a BF16 unit in the last place (2^-8 of the value at most), and the grids: 2^-16 of the largest value seen, twice."""
    q, k, v = noise(tokens, heads, dim), noise(tokens, kv_heads, dim, seed=1), noise(tokens, kv_heads, dim, seed=2)
    seen = attention(q, *prepare(k, v), single(tokens, tokens))
    wanted = plain(q.double(), k.double(), v.double())
    largest = v.double().abs().amax((1, 2)).cummax(0).values.view(-1, 1, 1)
    assert ((seen.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-15 * largest).all()


def test_prepare_stays_within_the_grid_and_is_done_once() -> None:
    k, v = noise(50, 2, 40, seed=1), noise(50, 2, 40, seed=2)
    keys, values = prepare(k, v)
    assert keys.dtype == values.dtype == torch.bfloat16
    for seen, wanted, bits in ((keys, k, 23), (values, v, 16)):
        assert ((seen.double() - wanted.double()).abs() <= 2.0**-bits * wanted.double().abs().amax(-1, keepdim=True)).all()
    wide = torch.tensor([[[1000.0, 1.0 / 64, 1.0 / 128 + 1.0 / 256]]]).bfloat16()  # the grid of this row: 2^-6
    assert prepare(wide, wide)[1].flatten().tolist() == [1000.0, 1.0 / 64, 1.0 / 64]
    assert all(same_bits(a, b) for a, b in zip(prepare(keys, values), (keys, values), strict=True))
    assert same_bits(prepare(k[7:8], v[7:8])[1], values[7:8])


def test_sums_over_keys_have_no_order() -> None:
    """The last query sees all keys, so their order means nothing to it: equal bits even before the rounding to BF16."""
    k = torch.randn(300, 2, 40, generator=torch.Generator().manual_seed(1))
    spread = torch.exp(3 * torch.randn(300, 2, 40, generator=torch.Generator().manual_seed(2)))  # values over 8 decades
    q, (keys, values) = noise(1, 6, 40), prepare(k.bfloat16(), (k.flip(0) * spread).bfloat16())
    outcomes = []
    for seed in range(8):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed)).unsqueeze(0)
        chunk = Bucket(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[299]]), order)
        x = kernel._operands(chunk, q, keys, values)
        outcomes.append(kernel._attend(x))
        weights = torch.softmax((x.q @ x.k.transpose(-1, -2)) / math.sqrt(40), -1)
        assert torch.allclose(outcomes[-1], weights @ x.v, rtol=0, atol=2.0**-18 * float(values.double().abs().max()))
    assert all(torch.equal(seen, outcomes[0]) for seen in outcomes)
    assert kernel.MAX_KEYS << (kernel._VALUE_BITS + kernel._WEIGHT_BITS) <= 2**53  # what random data cannot reach
    assert kernel.MAX_KEYS << kernel._SUM_BITS <= 2**53


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_one_query_equals_its_row_of_prefill(heads: int, kv_heads: int, dim: int) -> None:
    q, k, v = operands(150, heads, kv_heads, dim)
    wanted = attention(q, k, v, single(150, 150))
    for t in (*range(20), 63, 64, 65, 127, 128, 149):
        assert same_bits(attention(q[t : t + 1], k, v, single(1, t + 1)), wanted[t : t + 1]), t
    for first, last in ((0, 7), (5, 64), (100, 150)):
        assert same_bits(attention(q[first:last], k, v, single(last - first, last)), wanted[first:last])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_packed_equals_alone(heads: int, kv_heads: int, dim: int) -> None:
    q, k, v = operands(sum(LENGTHS), heads, kv_heads, dim)
    packed = attention(q, k, v, PackedContext.of(LENGTHS).layout)
    sequences = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    alone = [attention(a, b, c, single(len(a), len(a))) for a, b, c in sequences]
    assert same_bits(packed, torch.cat(alone))
    order = [4, 1, 5, 0, 3, 2]
    q, k, v = (torch.cat([x.split(LENGTHS)[i] for i in order]) for x in (q, k, v))
    seen = attention(q, k, v, PackedContext.of([LENGTHS[i] for i in order]).layout)
    assert same_bits(seen, torch.cat([alone[i] for i in order]))


def test_padding_changes_nothing() -> None:
    """More padded queries and keys than any bucket makes, the padding keys being large ones of another sequence."""
    q, k, v = operands(40, 6, 2, 24)
    wanted = attention(q[:9], k, v, single(9, 9))
    for queries, keys in ((9, 9), (16, 64), (31, 200)):
        position = torch.where(torch.arange(queries) < 9, torch.arange(queries), -1).unsqueeze(0)
        index = torch.where(torch.arange(keys) < 9, torch.arange(keys), 20).unsqueeze(0)
        layout = Layout([Bucket(torch.arange(queries).clamp(max=8).unsqueeze(0), position, index)])
        assert same_bits(attention(q[:9], k, v, layout), wanted)


@pytest.mark.parametrize("budget", [1, 300, 5_000, 40_000])
def test_chunks_change_nothing(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands(sum(LENGTHS), 6, 2, 24)
    dout, layout = noise(*q.shape, seed=3), PackedContext.of(LENGTHS).layout
    wanted, gradients = attention(q, k, v, layout), attention_grad(dout, q, k, v, layout)
    monkeypatch.setattr(kernel, "_CHUNK_SCORES", budget)
    pieces = [piece for bucket in layout.buckets for piece in kernel._chunks(bucket, 6)]
    assert len(pieces) > len(layout.buckets)
    assert sorted(torch.cat([p.query_index[p.query_position >= 0] for p in pieces]).tolist()) == list(range(sum(LENGTHS)))
    assert same_bits(attention(q, k, v, layout), wanted)
    for seen, gradient in zip(attention_grad(dout, q, k, v, layout), gradients, strict=True):
        assert torch.allclose(seen.double(), gradient.double(), rtol=2.0**-7, atol=1e-6)


def test_threads_change_nothing() -> None:
    (q, k, v), layout, before = operands(sum(LENGTHS), 6, 2, 24), PackedContext.of(LENGTHS).layout, torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = attention(q, k, v, layout)
        torch.set_num_threads(2)
        assert same_bits(attention(q, k, v, layout), wanted)
    finally:
        torch.set_num_threads(before)


def cache_of(lengths: list[int], size: int, kv_heads: int, dim: int, garbage: float) -> tuple[KVCache, Tensor]:
    """A cache full of garbage and block tables in shuffled order, padded with a block of another sequence."""
    needed = [-(-n // size) for n in lengths]
    cache = KVCache.allocate(1, sum(needed) + 3, size, kv_heads, dim)
    for tensor in (cache.keys, cache.values):
        tensor.fill_(garbage)
    blocks = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(5))
    tables = blocks[-1].repeat(len(lengths), max(needed))
    for row, part in enumerate(blocks[: sum(needed)].split(needed)):
        tables[row, : len(part)] = part
    return cache, tables


@pytest.mark.parametrize("garbage", [0.0, 1e30, float("nan")])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_paged_equals_packed_and_stale_slots_do_not_leak(size: int, garbage: float) -> None:
    """All sequences prefill in two chunks, then the last token of each is decoded, from one cache."""
    lengths = [33, 2, 70, 5, 130]
    q, k, v = operands(sum(lengths), 6, 2, 24)
    wanted = attention(q, k, v, PackedContext.of(lengths).layout).split(lengths)
    cache, tables = cache_of(lengths, size, 2, 24, garbage)
    parts = [x.split(lengths) for x in (q, k, v)]
    done = [0] * len(lengths)
    for ends in ([n // 2 for n in lengths], [n - 1 for n in lengths], lengths):
        active = [i for i, end in enumerate(ends) if end > done[i]]
        spans = [slice(done[i], ends[i]) for i in active]
        new = [torch.cat([x[i][span] for i, span in zip(active, spans, strict=True)]) for x in parts]
        context = PagedContext.of(cache, [s.stop - s.start for s in spans], [s.stop for s in spans], tables[active])
        assert context.positions.tolist() == [t for s in spans for t in range(s.start, s.stop)]
        target = context.target(0, 2, 24)
        target.keys[target.rows], target.values[target.rows] = new[1], new[2]
        seen = attention(new[0], target.keys, target.values, context.layout)
        assert same_bits(seen, torch.cat([wanted[i][span] for i, span in zip(active, spans, strict=True)]))
        done = ends


def test_the_worked_example_of_a_paged_context() -> None:
    cache = KVCache.allocate(1, 6, 4, 1, 2)
    context = PagedContext.of(cache, [1, 3], [6, 3], torch.tensor([[2, 0], [5, 5]]))
    assert context.slot_mapping.tolist() == [1, 20, 21, 22]
    assert context.positions.tolist() == [5, 0, 1, 2]
    a, b = sorted(context.layout.buckets, key=lambda bucket: int(bucket.query_index[0, 0]))
    assert a.key_index.tolist() == [[8, 9, 10, 11, 0, 1]] and b.key_index.tolist() == [[20, 21, 22]]


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_copy_block_copies_a_block_of_all_layers_and_nothing_else(kind: Any) -> None:
    cache = KVCache.allocate(2, 3, 4, 1, 2, kind=kind)
    generator = torch.Generator().manual_seed(0)
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    before = [tensor.float() for tensor in cache.tensors]
    cache.copy_block(2, 0)
    for tensor, old in zip(cache.tensors, before, strict=True):
        blocks, old_blocks = (x.float().view(2, 3, -1) for x in (tensor, old))
        assert torch.equal(blocks[:, 0], old_blocks[:, 2]) and torch.equal(blocks[:, 1:], old_blocks[:, 1:])
    assert len(before) == (2 if kind == "bf16" else 4)


def test_bad_values_are_visible_from_their_position_on_and_in_their_sequence_alone() -> None:
    lengths = [20, 30, 10]
    q, k, v = operands(60, 6, 2, 24)
    layout = PackedContext.of(lengths).layout
    wanted = attention(q, k, v, layout)
    for name in ("q", "k", "v"):
        changed = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
        changed[name][40, :, 3] = torch.nan
        seen = attention(changed["q"], *prepare(changed["k"], changed["v"]), layout)
        assert seen[40].isnan().any()
        assert same_bits(seen[:20], wanted[:20]) and same_bits(seen[50:], wanted[50:])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_gradients(heads: int, kv_heads: int, dim: int) -> None:
    """Against float64 autograd: one BF16 rounding, and 2^-14 of the largest of the tensor for the rounded queries."""
    lengths = [17, 1, 40]
    shapes = [(58, heads, dim), (58, kv_heads, dim), (58, kv_heads, dim)]
    q, k, v = (torch.randn(s, generator=torch.Generator().manual_seed(i)).bfloat16() for i, s in enumerate(shapes))
    k, v = prepare(k, v)
    dout = torch.randn(shapes[0], generator=torch.Generator().manual_seed(9)).bfloat16()
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out = torch.cat([plain(*parts) for parts in zip(*(x.split(lengths) for x in wide), strict=True)])
    out.backward(dout.double())
    for seen, x in zip(attention_grad(dout, q, k, v, PackedContext.of(lengths).layout), wide, strict=True):
        assert x.grad is not None and seen.dtype == torch.bfloat16
        assert ((seen.double() - x.grad).abs() <= 2.0**-8 * x.grad.abs() + 2.0**-14 * x.grad.abs().max()).all()
