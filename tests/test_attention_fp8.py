"""FP8 attention's definition, on a CPU: against plain softmax, and one set of bits in every phase, packing and paging."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.kernels import attention as kernel
from jetrl.kernels.attention import Layout, attention_fp8
from jetrl.kernels.cpu import CpuOps
from jetrl.kernels.ops import Heads, HeadWeights
from jetrl.kernels.quant import Quantized, decode, dequantize_heads, quantize_heads, quantize_rows
from jetrl.model.context import KVCache, PackedContext, PagedContext, bytes_per_token
from tests.test_attention import noise, same_bits

HEADS = [(6, 2, 24), (4, 4, 40), (8, 1, 64), (2, 1, 2), (3, 1, 128)]  # query heads, key heads, dimension
LENGTHS = [33, 1, 70, 5, 130, 64]


def dequantized(q: Quantized) -> Tensor:
    return decode(q.codes) * q.scales.double().unsqueeze(-1)


def operands(lengths: list[int], heads: int, kv_heads: int, dim: int) -> list[Quantized]:
    """Codes of noise with a zero head, a large token, and an outlier; every seventh value is 50 times as large."""
    tokens = sum(lengths)
    v = noise(tokens, kv_heads, dim, seed=2)
    v[::7] *= 50.0
    return [quantize_heads(x) for x in (noise(tokens, heads, dim), noise(tokens, kv_heads, dim, seed=1), v)]


def part(q: Quantized, at: Any) -> Quantized:
    return Quantized(q.codes.view(torch.uint8)[at].view(q.codes.dtype), q.scales[at])


def packed(q: Quantized, k: Quantized, v: Quantized, lengths: list[int]) -> Tensor:
    context = PackedContext.of(lengths, kv_fp8=True)
    target = context.target(0, *k.codes.shape[1:])
    target.store(k, v)
    assert isinstance(context.layout, Layout)
    return attention_fp8(q, *target.codes, context.layout)


def cache_of(lengths: list[int], size: int, kv_heads: int, dim: int, garbage: int) -> tuple[KVCache, Tensor]:
    """A cache whose bytes are garbage, and block tables in shuffled order, padded with a block of another sequence."""
    needed = [-(-n // size) for n in lengths]
    cache = KVCache.allocate(1, sum(needed) + 3, size, kv_heads, dim, kind="fp8")
    for tensor in cache.tensors:
        tensor.view(torch.uint8).fill_(garbage)
    blocks = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(5))
    tables = blocks[-1].repeat(len(lengths), max(needed))
    for row, own in enumerate(blocks[: sum(needed)].split(needed)):
        tables[row, : len(own)] = own
    return cache, tables


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float64 causal softmax attention of one sequence, differentiable."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_values_are_those_of_plain_softmax_attention_of_the_codes(heads: int, kv_heads: int, dim: int) -> None:
    """A probability moves by 2^-4 of itself at most, or by 2^-10 / 448 of what its tile's largest value would give."""
    q, k, v = operands([130], heads, kv_heads, dim)
    seen, wide = packed(q, k, v, [130]).double(), [dequantized(x) for x in (q, k, v)]
    wanted, sizes = plain(*wide), plain(wide[0], wide[1], wide[2].abs())
    largest = wide[2].abs().amax((1, 2)).cummax(0).values.view(-1, 1, 1)
    assert ((seen - wanted).abs() <= (2.0**-4 + 2.0**-8) * sizes + 130 * 2.0**-10 / 448 * largest).all()
    shapes = (130, heads, dim), (130, kv_heads, dim), (130, kv_heads, dim)
    q, k, v = (
        quantize_heads(torch.randn(s, generator=torch.Generator().manual_seed(i)).bfloat16()) for i, s in enumerate(shapes)
    )
    seen, wanted = packed(q, k, v, [130]).double(), plain(*(dequantized(x) for x in (q, k, v)))
    share = (seen - wanted).norm() / wanted.norm()
    assert 5e-3 < share < 0.04, "probabilities are rounded, and no more than that"


def test_the_quantiser_of_heads_makes_the_bytes_of_the_quantiser_of_rows() -> None:
    for dim in (64, 128):
        x = noise(50, 3, dim)
        x[7, 1, 3], x[8] = torch.nan, 0.0
        seen, wanted = quantize_heads(x), quantize_rows(x.reshape(-1, dim))
        assert torch.equal(seen.codes.view(torch.uint8).view(-1, dim), wanted.codes.view(torch.uint8))
        assert torch.equal(seen.scales.view(torch.int32).view(-1, 1), wanted.scales.view(torch.int32))
        values = dequantize_heads(seen)
        assert values[7, 1].isnan().all() and not values[8].any()
        ordinary = noise(50, 3, dim)
        error = (dequantize_heads(quantize_heads(ordinary)).double() - ordinary.double()).abs()
        assert (error <= (2.0**-4 + 2.0**-8) * ordinary.double().abs() + 1e-5 * ordinary.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_packed_equals_alone_in_any_order(heads: int, kv_heads: int, dim: int) -> None:
    q, k, v = operands(LENGTHS, heads, kv_heads, dim)
    rows = torch.arange(sum(LENGTHS)).split(LENGTHS)
    wanted = packed(q, k, v, LENGTHS).split(LENGTHS)
    assert not any(x.isnan().any() for x in wanted)
    for order in (*([i] for i in range(6)), [4, 1, 5, 0, 3, 2]):
        at, lengths = torch.cat([rows[i] for i in order]), [LENGTHS[i] for i in order]
        seen = packed(*(part(x, at) for x in (q, k, v)), lengths).split(lengths)
        assert all(same_bits(a, wanted[i]) for a, i in zip(seen, order, strict=True)), order


@pytest.mark.parametrize("garbage", [0, 0x7F, 0x55])
@pytest.mark.parametrize("size", [1, 4, 64, 100])
def test_paged_equals_packed_and_stale_slots_do_not_leak(size: int, garbage: int) -> None:
    """All sequences prefill in two chunks, then the last token of each is decoded, from one cache."""
    lengths = [33, 2, 70, 5, 130]
    q, k, v = operands(lengths, 6, 2, 24)
    rows = torch.arange(sum(lengths)).split(lengths)
    wanted = packed(q, k, v, lengths).split(lengths)
    cache, tables = cache_of(lengths, size, 2, 24, garbage)
    done = [0] * len(lengths)
    for ends in ([n // 2 for n in lengths], [n - 1 for n in lengths], lengths):
        active = [i for i, end in enumerate(ends) if end > done[i]]
        at = torch.cat([rows[i][done[i] : ends[i]] for i in active])
        context = PagedContext.of(cache, [ends[i] - done[i] for i in active], [ends[i] for i in active], tables[active])
        target = context.target(0, 2, 24)
        target.store(part(k, at), part(v, at))
        found = target.tensors()
        assert torch.equal(found[".keys"], k.codes.view(torch.uint8)[at])
        assert torch.equal(found[".values"], v.codes.view(torch.uint8)[at])
        assert torch.equal(found[".keys.scales"], k.scales[at]) and torch.equal(found[".values.scales"], v.scales[at])
        assert isinstance(context.layout, Layout)
        seen = attention_fp8(part(q, at), *target.codes, context.layout)
        assert same_bits(seen, torch.cat([wanted[i][done[i] : ends[i]] for i in active]))
        done = list(ends)


def test_later_keys_of_a_tile_do_not_matter() -> None:
    """Not even their scales, which are in the range of its probabilities for later rows."""
    q, k, v = operands([60], 6, 2, 24)
    wanted = packed(q, k, v, [60])
    louder = v.scales.clone()
    louder[41:] *= 1000.0
    longer = k.scales.clone()
    longer[41:] *= 3.0
    seen = packed(q, Quantized(k.codes, longer), Quantized(v.codes, louder), [60])
    assert same_bits(seen[:41], wanted[:41]) and not same_bits(seen[41:], wanted[41:])
    for t in (0, 5, 40):
        short = packed(*(part(x, slice(0, t + 1)) for x in (q, k, v)), [t + 1])
        assert same_bits(short, wanted[: t + 1])


@pytest.mark.parametrize("budget", [1, 300, 5_000])
def test_chunks_and_threads_change_nothing(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands(LENGTHS, 6, 2, 24)
    wanted, before = packed(q, k, v, LENGTHS), torch.get_num_threads()
    monkeypatch.setattr(kernel, "_CHUNK_SCORES", budget)
    try:
        torch.set_num_threads(1)
        assert same_bits(packed(q, k, v, LENGTHS), wanted)
    finally:
        torch.set_num_threads(before)


def test_bad_values_are_visible_from_their_position_on_and_in_their_sequence_alone() -> None:
    lengths = [20, 90, 10]
    q, k, v = operands(lengths, 6, 2, 24)
    wanted = packed(q, k, v, lengths)
    for name in ("q", "k", "v"):
        parts = {"q": q, "k": k, "v": v}
        values = dequantize_heads(parts[name])
        values[95, :, 3] = torch.nan  # position 75, in the second tile of keys
        parts[name] = quantize_heads(values)
        seen = packed(parts["q"], parts["k"], parts["v"], lengths)
        assert seen[95].isnan().all() and (name == "q" or seen[95:110].isnan().all())
        assert same_bits(seen[:20], wanted[:20]) and same_bits(seen[110:], wanted[110:])


def test_split_heads_quantises_and_keeps_what_the_gradient_reads() -> None:
    shape = Heads(6, 2, 24, 1e-6, torch.rand(9, 12), torch.rand(9, 12), fp8=True)
    fused = noise(30, 10, 24).flatten(1)
    context = PackedContext.of([9, 8, 9, 4], kv_fp8=True)
    ops, target = CpuOps(), context.target(0, 2, 24)
    q, keys, values, kept = ops.split_heads(fused, HeadWeights(None, None, None), shape, context.positions, target, True)
    assert isinstance(q, Quantized) and keys == target.codes[0] and values == target.codes[1]
    found = target.tensors()
    assert torch.equal(kept[0], dequantize_heads(q)) and not torch.equal(kept[2].flatten(1), fused[:, -48:])
    for what, x in ((".keys", kept[1]), (".values", kept[2])):
        codes = Quantized(found[what].view(q.codes.dtype), found[what + ".scales"])
        assert torch.equal(x, dequantize_heads(codes))
    assert ops.split_heads(fused, HeadWeights(None, None, None), shape, context.positions, target, False)[3] == ()
    with pytest.raises(AssertionError, match="not of the model's kind"):
        ops.split_heads(
            fused, HeadWeights(None, None, None), shape, context.positions, PackedContext.of([30]).target(0, 2, 24), False
        )


def test_gradients_are_those_of_attention_over_the_dequantised_operands() -> None:
    lengths = [17, 1, 40]
    q, k, v = operands(lengths, 6, 2, 24)
    wide = [dequantize_heads(x).double().requires_grad_() for x in (q, k, v)]
    dout = noise(58, 6, 24, seed=9)
    out = torch.cat([plain(*parts) for parts in zip(*(x.split(lengths) for x in wide), strict=True)])
    out.backward(dout.double())
    context = PackedContext.of(lengths, kv_fp8=True)
    assert isinstance(context.layout, Layout)
    seen = CpuOps().attention_grad(dout, *(dequantize_heads(x) for x in (q, k, v)), out.detach(), None, context.layout)
    for x, right in zip(seen, wide, strict=True):
        assert right.grad is not None
        assert ((x.double() - right.grad).abs() <= 2.0**-8 * right.grad.abs() + 2.0**-12 * right.grad.abs().max()).all()


def test_a_cache_of_codes_takes_what_it_says_and_a_gpu_wants_whole_tiles() -> None:
    cache = KVCache.allocate(3, 5, 16, 2, 24, kind="fp8")
    assert sum(x.nbytes for x in cache.tensors) == 5 * 16 * bytes_per_token("fp8", 3, 2, 24)
    cache = KVCache.allocate(3, 5, 16, 2, 24)
    assert sum(x.nbytes for x in cache.tensors) == 5 * 16 * bytes_per_token("bf16", 3, 2, 24)
    with pytest.raises(ValueError, match=r"rollout\.block_size is 80, .* multiple of 64 tokens; set rollout\.block_size=128"):
        KVCache.allocate(3, 5, 80, 2, 24, "cuda", "fp8")
