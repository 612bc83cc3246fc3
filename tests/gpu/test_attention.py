"""Hopper attention: against float64, and one set of bits for training, prefill, chunked prefill and decode."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
kernel = pytest.importorskip("jetrl.kernels.hopper.attention", exc_type=ImportError)

SHAPES = [(4, 4, 64), (9, 3, 64), (28, 4, 128), (32, 8, 128)]  # heads, key heads, head dim
LENGTHS = [1, 63, 64, 65, 200]
LONG = [4200, 65, 1, 700]
# For the comparison of the two kernels, with groups of 1, 3, 4, 5, 7 and 16 and every head dim; and lengths around tiles of
# queries and keys, tensors shorter than a tile among them.
PAIRED = [(32, 8, 128), (28, 4, 128), (9, 3, 64), (10, 2, 32), (16, 1, 16), (4, 4, 64)]
EDGES = [[1, 63, 64, 65, 127, 128, 129, 4097], [2], [3, 1], [5, 0, 1], [64], [128, 128]]


def noise(*shape: int, seed: int) -> Tensor:
    """BF16 noise; row 3 is zero in its first head, row 4 is large."""
    x = torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    x[3:4, 0], x[4:5] = 0.0, x[4:5] * 3.0
    return x.bfloat16()


def operands(tokens: int, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(noise(tokens, n, dim, seed=s) for s, n in enumerate((heads, kv_heads, kv_heads)))  # type: ignore[return-value]


def starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:s]) for s in range(len(lengths))]


def packed(lengths: list[int], shape: tuple[int, int, int], rows: int | None = None) -> kernel.Tiles:
    return kernel.make_tiles(lengths, lengths, shape[0], shape[1], starts(lengths), None, 0, "cuda", rows)


def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """float64 attention and LSE of one whole sequence."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device="cuda").triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def error(seen: Tensor, wanted: Tensor) -> float:
    """Norm of the difference, as a share of the norm. NaN fails every comparison."""
    return ((seen.double() - wanted).norm() / wanted.norm()).item()


def paged(k: Tensor, v: Tensor, lengths: list[int], block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed keys and values in a cache with shuffled blocks, NaN where nothing was written, and its table."""
    blocks = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(block_size)).tolist()
    table = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
    caches = [torch.full(((sum(blocks) + 2) * block_size, *k.shape[1:]), torch.nan, device="cuda").bfloat16() for _ in "kv"]
    for s, (start, length) in enumerate(zip(starts(lengths), lengths, strict=True)):
        table[s, : blocks[s]] = torch.tensor([order.pop() for _ in range(blocks[s])])
        position = torch.arange(length)
        slots = (table[s, position // block_size].long() * block_size + position % block_size).cuda()
        for cache, x in zip(caches, (k, v), strict=True):
            cache[slots] = x[start : start + length]
    return *caches, table.cuda()


@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_against_float64(shape: tuple[int, int, int]) -> None:
    """BF16 rounds p and the output: 0.3% of the norm; the gradients round p, ds and themselves."""
    q, k, v = operands(sum(LENGTHS), *shape)
    dout = noise(sum(LENGTHS), shape[0], shape[2], seed=7)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    parts = [plain(*x) for x in zip(*(x.split(LENGTHS) for x in wide), strict=True)]
    wanted_out, wanted_lse = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)
    wanted = torch.autograd.grad(wanted_out, wide, dout.double())
    tiles = packed(LENGTHS, shape)
    out, lse = kernel.attention(q, k, v, tiles, True)
    assert error(out, wanted_out) < 5e-3
    torch.testing.assert_close(lse.double(), wanted_lse.detach(), rtol=1e-4, atol=1e-3)
    for name, seen, right in zip(
        ("dq", "dk", "dv"), kernel.attention_grad(dout, q, k, v, out, lse, tiles), wanted, strict=True
    ):
        assert error(seen, right) < 1e-2, name
        for s, (a, b) in enumerate(zip(seen.split(LENGTHS), right.split(LENGTHS), strict=True)):
            assert (a.double() - b).norm() < 1e-2 * b.norm() + 1e-3 * right.norm(), (name, s)


@pytest.mark.parametrize(("shape", "block_size"), [*((SHAPES[1], b) for b in (3, 16, 64, 128)), (SHAPES[2], 64)])
def test_prefill_chunks_and_decode_have_the_bits_of_training(shape: tuple[int, int, int], block_size: int) -> None:
    heads, kv_heads, _ = shape
    q, k, v = operands(sum(LONG), *shape)
    trained = kernel.attention(q, k, v, packed(LONG, shape, 128), True)[0]
    assert torch.equal(kernel.attention(q, k, v, packed(LONG, shape, 64), True)[0], trained)
    keys, values, table = paged(k, v, LONG, block_size)

    def asked(new: list[int], contexts: list[int], rows: int | None = None) -> None:
        """The last `new` of `contexts` tokens of each sequence, from the cache, against the training rows."""
        at = torch.cat([s + torch.arange(c - n, c) for s, c, n in zip(starts(LONG), contexts, new, strict=True)]).cuda()
        tiles = kernel.make_tiles(new, contexts, heads, kv_heads, None, table, block_size, "cuda", rows)
        assert torch.equal(kernel.attention(q[at], keys, values, tiles, False)[0], trained[at]), (new, contexts)

    for rows in (64, 128):
        asked(LONG, LONG, rows)
        asked([1000, 1, 0, 37], [1000, 1, 0, 37], rows)
        asked([63, 64, 1, 600], [1063, 65, 1, 637], rows)
        asked([3137, 0, 1, 1], LONG, rows)
    asked([1, 1, 1, 1], LONG)

    positions = torch.tensor([0, 1, 62, 63, 64, 65, 127, 128, 700, 4094, 4095, 4096, 4199], device="cuda")
    contexts = (positions + 1).tolist()
    own = table[:1].expand(len(contexts), -1).contiguous()
    tiles = kernel.make_tiles([1] * len(contexts), contexts, heads, kv_heads, None, own, block_size, "cuda")
    assert torch.equal(kernel.attention(q[positions], keys, values, tiles, False)[0], trained[positions])

    # What lies behind the last key must not be read, or not matter: NaN in the rest of its block.
    later = torch.arange(701, LONG[0], device="cuda")
    slots = table[0, later // block_size].long() * block_size + later % block_size
    keys[slots], values[slots] = torch.nan, torch.nan
    tiles = kernel.make_tiles([1], [701], heads, kv_heads, None, own[:1], block_size, "cuda")
    assert torch.equal(kernel.attention(q[700:701], keys, values, tiles, False)[0], trained[700:701])
    tiles = kernel.make_tiles([701], [701], heads, kv_heads, None, own[:1], block_size, "cuda")
    assert torch.equal(kernel.attention(q[:701], keys, values, tiles, False)[0], trained[:701])


def spread(x: Tensor, lengths: list[int], gap: int) -> Tensor:
    """The sequences' rows with `gap` rows of NaN behind each."""
    nothing = torch.full((gap, *x.shape[1:]), torch.nan, device="cuda").bfloat16()
    return torch.cat([part for rows in x.split(lengths) for part in (rows, nothing)])


@pytest.mark.parametrize("shape", PAIRED)
def test_prefill_has_the_bits_of_the_other_kernel(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies behind a sequence: NaN, its neighbour, or nothing, where the tensor ends in the middle of a tile."""
    heads, kv_heads, _ = shape
    for lengths in EDGES:
        q, k, v = operands(sum(lengths), *shape)
        right = kernel.forward(q, k, v, packed(lengths, shape), True, kernel.PREFILL, True)
        assert right[1] is not None and not right[0].isnan().any()
        for gap in (0, 1, 100):
            keys, values = (spread(x, lengths, gap) for x in (k, v))
            first = [start + gap * s for s, start in enumerate(starts(lengths))]
            tiles = kernel.make_tiles(lengths, lengths, heads, kv_heads, first, None, 0, "cuda")
            for run in range(3):
                with monkeypatch.context() as only_prefill:
                    only_prefill.setattr(kernel, "_forward_kernel", None)
                    out, lse = kernel.attention(q, keys, values, tiles, True)
                assert lse is not None
                assert torch.equal(out, right[0]) and torch.equal(lse, right[1]), (lengths, gap, run)


def test_prefill_after_older_packed_keys_has_the_bits_of_the_other_kernel() -> None:
    heads, kv_heads, _ = shape = SHAPES[3]
    new, contexts = [3, 100, 1, 40, 0], [70, 100, 300, 4000, 9]
    _, k, v = operands(sum(contexts), *shape)
    q = noise(sum(new), heads, shape[2], seed=9)
    tiles = kernel.make_tiles(new, contexts, heads, kv_heads, starts(contexts), None, 0, "cuda")
    right = kernel.forward(q, k, v, tiles, True, kernel.PREFILL, True)
    for a, b in zip(kernel.attention(q, k, v, tiles, True), right, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(kernel.attention(q, k, v, tiles, False)[0], right[0])
    between = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view_as(q).copy_(q)
    assert torch.equal(kernel.attention(between, k, v, tiles, False)[0], right[0]), "not at a multiple of 16 bytes"


def test_prefill_of_32768_tokens() -> None:
    """All rows have the bits of the other kernel; some are compared with float64."""
    heads, kv_heads, dim = shape = SHAPES[3]
    tokens = 1 << 15
    q, k, v = operands(tokens, *shape)
    tiles = packed([tokens], shape)
    out, lse = kernel.attention(q, k, v, tiles, True)
    right, right_lse = kernel.forward(q, k, v, tiles, True, kernel.PREFILL, True)
    assert lse is not None and right_lse is not None
    assert torch.equal(out, right) and torch.equal(lse, right_lse)
    for row in (0, 1, 31, 32, 63, 64, 4095, 4096, 16383, 20000, 32703, 32704, 32767):
        mine = q[row].double().view(kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("hgd,nhd->hgn", mine, k[: row + 1].double()) / math.sqrt(dim)
        wanted = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v[: row + 1].double()).view(heads, dim)
        assert error(out[row], wanted) < 5e-3, row
        torch.testing.assert_close(lse[:, row].double(), scores.logsumexp(-1).view(-1), rtol=1e-4, atol=1e-3)


def test_prefill_in_a_cuda_graph_reads_its_operands_anew() -> None:
    shape = SHAPES[3]
    operand = operands(sum(LENGTHS), *shape)
    tiles = packed(LENGTHS, shape)
    kernel.attention(*operand, tiles, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = kernel.attention(*operand, tiles, True)
    for x in operand:
        x.copy_(x.flip(0))
    graph.replay()
    for a, b in zip(seen, kernel.forward(*operand, tiles, True, kernel.PREFILL, True), strict=True):
        assert torch.equal(a, b)


def test_the_branch_around_the_mask_and_the_stages_change_no_bit() -> None:
    shape = SHAPES[2]
    q, k, v = operands(sum(LONG), *shape)
    right = kernel.attention(q, k, v, packed(LONG, shape), True)
    for rows, warps, stages, skip in [(64, 4, 2, False), (128, 8, 2, False), (128, 8, 4, True), (128, 4, 2, True)]:
        tiles = packed(LONG, shape, rows)
        for a, b in zip(kernel.forward(q, k, v, tiles, True, kernel.Launch(rows, warps, stages), skip), right, strict=True):
            assert torch.equal(a, b), (rows, warps, stages, skip)


def test_order_and_company_of_sequences_change_no_bit_and_runs_repeat() -> None:
    shape = SHAPES[2]
    lengths = [1, 63, 64, 65, 200, 1000]
    q, k, v = operands(sum(lengths), *shape)
    dout = noise(sum(lengths), shape[0], shape[2], seed=7)

    def run(chosen: list[int]) -> list[tuple[Tensor, ...]]:
        """Output, LSE and gradients of each chosen sequence, packed together in that order."""
        at = torch.cat([starts(lengths)[s] + torch.arange(lengths[s]) for s in chosen]).cuda()
        sizes = [lengths[s] for s in chosen]
        mine = [x[at] for x in (q, k, v)]
        tiles = packed(sizes, shape)
        out, lse = kernel.attention(*mine, tiles, True)
        results = [out, lse.t(), *kernel.attention_grad(dout[at], *mine, out, lse, tiles)]
        return list(zip(*(x.split(sizes) for x in results), strict=True))

    everything = run([0, 1, 2, 3, 4, 5])
    for chosen in ([0, 1, 2, 3, 4, 5], [4, 2, 5, 0, 3, 1], [5], [3, 3, 2]):
        for s, seen in zip(chosen, run(chosen), strict=True):
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), seen, everything[s], strict=True):
                assert torch.equal(a, b), (chosen, s, name)


@pytest.mark.parametrize("block_size", [3, 64])
def test_a_cache_of_more_than_2_to_31_elements(block_size: int) -> None:
    heads, kv_heads, dim = shape = SHAPES[3]
    lengths = [200, 65]
    q, k, v = operands(sum(lengths), *shape)
    trained = kernel.attention(q, k, v, packed(lengths, shape), True)[0]
    small_keys, small_values, table = paged(k, v, lengths, block_size)
    blocks = (1 << 31) // (kv_heads * dim * block_size) + 1
    rows = blocks * block_size + small_keys.shape[0]
    if torch.cuda.mem_get_info()[0] < 6 * rows * kv_heads * dim:
        pytest.skip("needs 13 GB of GPU memory")
    keys, values = (torch.empty(rows, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    keys[blocks * block_size :], values[blocks * block_size :] = small_keys, small_values
    table = torch.where(table < 0, table, table + blocks)
    for new in (lengths, [1, 1]):
        at = torch.cat([s + torch.arange(n - m, n) for s, n, m in zip(starts(lengths), lengths, new, strict=True)]).cuda()
        tiles = kernel.make_tiles(new, lengths, heads, kv_heads, None, table, block_size, "cuda")
        assert torch.equal(kernel.attention(q[at], keys, values, tiles, False)[0], trained[at])


def test_packed_rows_of_more_than_2_to_31_elements() -> None:
    """Two sequences at the far end of q and of the keys: output, LSE and gradients as from compact tensors."""
    heads, kv_heads, dim = shape = SHAPES[3]
    lengths = [200, 65]
    tokens, far = sum(lengths), (1 << 31) // (kv_heads * dim) + 100
    far_query = (1 << 31) // (heads * dim) + 100
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GB of GPU memory")
    q, k, v = operands(tokens, *shape)
    dout = noise(tokens, heads, dim, seed=7)
    tiles = packed(lengths, shape)
    out, lse = kernel.attention(q, k, v, tiles, True)
    right = kernel.attention_grad(dout, q, k, v, out, lse, tiles)

    def moved(x: Tensor, by: int) -> Tensor:
        big = torch.empty(by + tokens, *x.shape[1:], dtype=x.dtype, device="cuda")
        big[by:] = x
        return big

    big_q, big_dout, big_k, big_v = moved(q, far_query), moved(dout, far_query), moved(k, far), moved(v, far)
    assert tiles.work is not None
    far_work = (tiles.work.view(-1, 5) + tiles.work.new_tensor([far_query, 0, 0, far, 0])).flatten()
    there = replace(tiles, query_start=tiles.query_start + far_query, key_start=tiles.key_start + far, work=far_work)
    by_hand = kernel.forward(big_q, big_k, big_v, there, True, kernel.PREFILL, True)
    assert torch.equal(by_hand[0][far_query:], out) and torch.equal(by_hand[1][:, far_query:], lse)
    del by_hand
    big_out, big_lse = kernel.attention(big_q, big_k, big_v, there, True)
    assert torch.equal(big_out[far_query:], out)
    assert torch.equal(big_lse[:, far_query:], lse)
    grads = kernel.attention_grad(big_dout, big_q, big_k, big_v, big_out, big_lse, there)
    for name, big, start, small in zip(("dq", "dk", "dv"), grads, (far_query, far, far), right, strict=True):
        assert torch.equal(big[start:], small), name


def test_decode_in_a_cuda_graph_follows_its_work_list() -> None:
    """Captured once; the lengths then change in place, and a sequence of the batch goes away."""
    heads, kv_heads, _ = shape = SHAPES[3]
    q, k, v = operands(sum(LONG), *shape)
    trained = kernel.attention(q, k, v, packed(LONG, shape), True)[0]
    keys, values, table = paged(k, v, LONG, 64)

    def work(contexts: list[int]) -> tuple[kernel.Tiles, Tensor]:
        new = [min(c, 1) for c in contexts]
        tiles = kernel.make_tiles(new, contexts, heads, kv_heads, None, table, 64, "cuda")
        # One row of q for each sequence, with a token or not.
        tiles.query_start.copy_(torch.arange(len(contexts)))
        return tiles, torch.tensor([s + max(c, 1) - 1 for s, c in zip(starts(LONG), contexts, strict=True)], device="cuda")

    tiles, at = work([4096, 65, 1, 20])
    static = q[at]
    kernel.attention(static, keys, values, tiles, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = kernel.attention(static, keys, values, tiles, False)
    for contexts in ([4096, 65, 1, 20], [4200, 2, 1, 700], [64, 65, 0, 699]):
        new, at = work(contexts)
        for name in ("sequence", "token", "query_start", "query_length", "context"):
            getattr(tiles, name).copy_(getattr(new, name))
        static.copy_(q[at])
        graph.replay()
        live = torch.tensor([c > 0 for c in contexts], device="cuda")
        assert torch.equal(out[live], trained[at][live]), contexts
