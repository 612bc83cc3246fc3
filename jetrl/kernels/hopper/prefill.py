"""Causal attention of whole packed sequences on Hopper: two warpgroups share the keys that a third party copies.

Problem: `_forward_kernel` in jetrl/kernels/hopper/attention.py computes and waits in turn. Its four warps copy keys, multiply,
and while they form a softmax the tensor cores idle; each 64 rows read all their keys from the L2 cache. Training and whole
prompts have no pages to look up and thousands of rows a head, so they can do better.

Method: the same rows, bit for bit. The docstring there gives the arithmetic and why a row's bits do not depend on its tile; a
key tile is 64 keys from key 0 here too, a product is `wgmma`, and the sums over a row run over the same threads in the same
order. Different is only who does what, and when:

- a program stays on its multiprocessor and walks the work list, heaviest tiles first, there and back over the programs, so
  that they end together;
- a tile is the rows of 2 * (64 // G) tokens of one key head, G query heads a key head: two warpgroups of 64 rows. One more
  warp has the bulk copy engine (TMA) bring 64 keys and 64 values at a time into a ring that both warpgroups read: half the
  traffic a row. It runs ahead, over the end of a tile too;
- a warpgroup starts s of key tile j + 1 and o += p v of tile j together, and forms the softmax of j + 1 while o is under way.
  The two take turns at starting products, so that one's softmax falls in the other's products;
- q stays in registers: products of 64 columns that read both operands from shared memory would be bound by it.

    step of the ring     0      1      2     ..   n - 1   n = step 0 of the next tile
    keys of tile         0      1      2     ..   n - 1   0 of the next tile
    values of tile       -      0      1     ..   n - 2   n - 1

Layout: q, keys and values are dense BF16 [rows, heads, dim] that start at multiples of 16 bytes; fewer than 2^31 rows. Rows of
keys and values after a sequence's last may belong to somebody else or lie past the tensor's end, where the copy engine fills in
zeros. Hidden keys get s = -inf whatever they are; values meet p = 0, which hides no NaN, so those after a sequence's last are
set to zero in shared memory.

Given up: paged keys (a block of 16 tokens is less than a box of the copy engine) and decode, which is bound by memory anyway.
A NaN in a value reaches the tokens of its own sequence that share its 64 keys, not only those that share its tile of queries.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # from the stub, which leaves them untyped like the rest of Triton: [tool.pyright] in pyproject.toml
    from triton import TensorDescriptor, gl, gluon, hopper
else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

KEYS = gl.constexpr(64)  # keys a tile: part of the numerics
STAGES = gl.constexpr(4)  # steps of the ring
RECORD = gl.constexpr(5)  # numbers a tile in the work list
LOG2_E = 1.4426950408889634
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.6 has the second name
# Layouts of s [64, KEYS] in the registers of a warpgroup, and of what belongs to its rows.
_S = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_ROW = gl.constexpr(gl.SliceLayout(1, _S.value))


@gluon.constexpr_function
def _wide(dim):
    """Layout of [64, dim] for loads and stores: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def _out(dim):
    """Layout of o [64, dim] in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])


# ------------------------------------------------------------------------------------------------ the work list


@gluon.jit
def _place(step):
    """Where in the work list this program's tile number `step` lies: there and back over the programs."""
    programs = gl.num_programs(0)
    lane = gl.program_id(0)
    return step * programs + gl.where(step % 2 == 0, lane, programs - 1 - lane)


@gluon.jit
def _record(work_ptr, place, last, KV_HEADS: gl.constexpr):
    """(query row, its tokens, keys ahead, first key's row, the sequence's keys) of the tile at `place`, clamped to the list."""
    at = work_ptr + gl.minimum(place, last) // KV_HEADS * RECORD
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


@gluon.jit
def _key_tiles(tokens, ahead):
    return (ahead + tokens + KEYS - 1) // KEYS


# ------------------------------------------------------------------------------------------------ the copying warp


@gluon.jit
def _copy_step(k_desc, v_desc, k_row, v_row, k_column, v_column, ring, count):
    """Step `count` of the ring: 64 keys, and the values that belong to the keys of the step before."""
    k_ring, v_ring, ready, free = ring
    slot = count % STAGES
    hopper.mbarrier.wait(free.index(slot), (count // STAGES & 1) ^ 1)
    hopper.mbarrier.expect(ready.index(slot), 2 * k_desc.block_type.nbytes)
    hopper.tma.async_copy_global_to_shared(k_desc, [k_row, k_column], ready.index(slot), k_ring.index(slot))
    hopper.tma.async_copy_global_to_shared(v_desc, [v_row, v_column], ready.index(slot), v_ring.index(slot))


@gluon.jit
def _produce(k_desc, v_desc, work_ptr, last, ring, KV_HEADS: gl.constexpr, DIM: gl.constexpr):
    """Keys and values of every tile of this program, in order."""
    count = 0
    step = 0
    row_before = 0
    column_before = 0
    place = _place(0)
    while place <= last:
        _, tokens, ahead, key_row, _ = _record(work_ptr, place, last, KV_HEADS)
        column = place % KV_HEADS * DIM
        for j in range(_key_tiles(tokens, ahead)):
            row = key_row + j * KEYS
            _copy_step(k_desc, v_desc, row, row_before, column, column_before, ring, count)
            row_before = row
            column_before = column
            count += 1
        step += 1
        place = _place(step)
    _copy_step(k_desc, v_desc, row_before, row_before, column_before, column_before, ring, count)


# ------------------------------------------------------------------------------------------------ the warpgroups


@gluon.jit
def _rows(ptr, query_row, tokens, place, HALF: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr):
    """Pointers [64, DIM] to the rows of one warpgroup, and which of them are real."""
    TOKENS: gl.constexpr = 64 // GROUP
    WIDE: gl.constexpr = _wide(DIM)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    token = HALF * TOKENS + row // GROUP
    valid = (token < tokens) & (row < TOKENS * GROUP)
    base = (query_row.to(gl.int64) * KV_HEADS + place % KV_HEADS) * (GROUP * DIM)
    offset = token * (KV_HEADS * GROUP * DIM) + row % GROUP * DIM
    lane = gl.arange(0, DIM, layout=gl.SliceLayout(0, WIDE))
    return ptr + base + (offset[:, None] + lane[None, :]), valid[:, None]


@gluon.jit
def _softmax(s, m, total, c, key, position, visible_end):
    """One key tile of the recurrence, ahead of p v: (m', total, the factor exp2(m - m'), p). `key`: the tile's first."""
    if key + KEYS > visible_end:
        at = key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, _S))
        s = gl.where(at[None, :] <= position[:, None], s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * c)
    shrink = gl.exp2(m - m_new)
    p = gl.exp2(gl.fma(s, c, -m_new[:, None]))
    return m_new, gl.fma(total, shrink, gl.sum(p, 1)), shrink, p


@gluon.jit
def _hide_values(v_tile, first, keys, DIM: gl.constexpr):
    """Zeros over the values after the sequence's last. Both warpgroups do so: they write the same."""
    WIDE: gl.constexpr = _wide(DIM)
    key = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, WIDE))
    v_tile.store(gl.where((key < keys)[:, None], v_tile.load(WIDE), 0.0))
    hopper.fence_async_shared()
    _barrier()


@gluon.jit
def _attend(q, c, tiles, keys, position, visible_end, ring, turns, pin, count, HALF: gl.constexpr, DIM: gl.constexpr):
    """All keys of one tile, from step `count` of the ring: (o, whose last product is under way, m, total, the next step)."""
    OUT: gl.constexpr = _out(DIM)
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    k_ring, v_ring, ready, free = ring
    none = gl.zeros([64, KEYS], gl.float32, _S)
    m = gl.full([64], float("-inf"), gl.float32, _ROW)
    total = gl.zeros([64], gl.float32, _ROW)
    o = gl.zeros([64, DIM], gl.float32, OUT)

    slot = count % STAGES
    hopper.mbarrier.wait(turns.index(HALF), (count & 1) ^ (1 - HALF))
    hopper.mbarrier.wait(ready.index(slot), count // STAGES & 1)
    s = hopper.warpgroup_mma(q, k_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
    hopper.mbarrier.arrive(turns.index(1 - HALF))
    s = hopper.warpgroup_mma_wait(0, [s])
    _barrier()
    hopper.mbarrier.arrive(free.index(slot))
    m, total, shrink, p_wide = _softmax(s, m, total, c, 0, position, visible_end)
    p = gl.convert_layout(p_wide.to(gl.bfloat16), P)
    for j in range(1, tiles):
        count += 1
        slot = count % STAGES
        # Half 1 goes after half 0 of the same step, half 0 after half 1 of the step before.
        hopper.mbarrier.wait(turns.index(HALF), (count & 1) ^ (1 - HALF))
        hopper.mbarrier.wait(ready.index(slot), count // STAGES & 1)
        s = hopper.warpgroup_mma(q, k_ring.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        o = hopper.warpgroup_mma(p, v_ring.index(slot), o, is_async=True)
        hopper.mbarrier.arrive(turns.index(1 - HALF))
        s = hopper.warpgroup_mma_wait(1, [s])
        m, total, shrink, p_wide = _softmax(s, m, total, c, j * KEYS, position, visible_end)
        pin.store(total)  # never read; without a store that needs the softmax, ptxas waits for o ahead of it
        o = hopper.warpgroup_mma_wait(0, [o])
        _barrier()  # the thread that frees the slot does so for all four warps
        hopper.mbarrier.arrive(free.index(slot))
        o = o * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
        p = gl.convert_layout(p_wide.to(gl.bfloat16), P)

    # The last values came along with the next tile's first keys, whose product will free the slot.
    count += 1
    slot = count % STAGES
    hopper.mbarrier.wait(ready.index(slot), count // STAGES & 1)
    v_tile = v_ring.index(slot)
    if tiles * KEYS > keys:
        _hide_values(v_tile, (tiles - 1) * KEYS, keys, DIM)
    return hopper.warpgroup_mma(p, v_tile, o, is_async=True), m, total, count


@gluon.jit
def _consume(
    q_ptr, out_ptr, lse_ptr, work_ptr, last, all_tokens, c, q_tile, ring, turns, pin,
    HALF: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its half of the rows of every tile of this program. Pointers as in `prefill_kernel`."""
    TOKENS: gl.constexpr = 64 // GROUP
    WIDE: gl.constexpr = _wide(DIM)
    row = gl.arange(0, 64, layout=_ROW)
    token = HALF * TOKENS + row // GROUP
    count = 0
    step = 0
    place = _place(0)
    query_row, tokens, ahead, _, keys = _record(work_ptr, place, last, KV_HEADS)
    at, valid = _rows(q_ptr, query_row, tokens, place, HALF, KV_HEADS, GROUP, DIM)
    q_wide = gl.load(at, mask=valid, other=0.0)
    while place <= last:
        q_tile.store(q_wide)
        q = q_tile.load(gl.DotOperandLayout(0, _S, 2))
        step += 1
        next_place = _place(step)
        next_query_row, next_tokens, next_ahead, _, next_keys = _record(work_ptr, next_place, last, KV_HEADS)
        position = ahead + gl.minimum(token, tokens - 1)  # padding sees what the last token sees
        visible_end = ahead + gl.minimum(HALF * TOKENS, tokens - 1) + 1  # keys that every row sees
        tiles = _key_tiles(tokens, ahead)
        o, m, total, count = _attend(q, c, tiles, keys, position, visible_end, ring, turns, pin, count, HALF, DIM)

        # The next tile's rows are on their way while this one's are finished.
        out_at, out_valid = _rows(out_ptr, query_row, tokens, place, HALF, KV_HEADS, GROUP, DIM)
        row_head = (place % KV_HEADS * GROUP + row % GROUP).to(gl.int64)
        lse_at = row_head * all_tokens + query_row + token
        lse_valid = (token < tokens) & (row < TOKENS * GROUP)
        place, query_row, tokens, ahead, keys = next_place, next_query_row, next_tokens, next_ahead, next_keys
        at, valid = _rows(q_ptr, query_row, tokens, place, HALF, KV_HEADS, GROUP, DIM)
        q_wide = gl.load(at, mask=valid, other=0.0)

        o = hopper.warpgroup_mma_wait(0, [o])
        _barrier()
        q_tile.store((o / gl.convert_layout(total, gl.SliceLayout(1, _out(DIM)))[:, None]).to(gl.bfloat16))
        gl.store(out_at, q_tile.load(WIDE), mask=out_valid)
        if lse_ptr is not None:
            gl.store(lse_ptr + lse_at, (m + gl.log2(total)) * 0.6931471805599453, mask=lse_valid)


@gluon.jit(do_not_specialize=["last", "all_tokens"])
def prefill_kernel(
    q_ptr,  # BF16 [tokens, KV_HEADS * GROUP, DIM]
    k_desc,  # BF16 [R, KV_HEADS * DIM], boxes of [KEYS, DIM]
    v_desc,  # BF16 like k_desc
    out_ptr,  # BF16 like q_ptr, result
    lse_ptr,  # FP32 [KV_HEADS * GROUP, tokens], result: natural log of the sum of exp(score); None if not wanted
    work_ptr,  # int32 [N, RECORD], see work_list
    last,  # int32, N * KV_HEADS - 1
    all_tokens,  # int32, rows of q
    c,  # FP32, log2(e) / sqrt(dim)
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,  # query heads a key head
    DIM: gl.constexpr,
):
    """Tiles `_place(0)`, `_place(1)`, .. of the work list."""
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIM], gl.bfloat16)
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], TILE)  # also the way out of the results
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], TILE)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], TILE)
    pins = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)  # the step's keys and values are there
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)  # both warpgroups are done with them
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)  # the other warpgroup has started its products
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(i), count=1)
        hopper.mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        hopper.mbarrier.init(turns.index(i), count=1)
    hopper.fence_async_shared()
    ring = (k_ring, v_ring, ready, free)
    gl.warp_specialize(
        [
            (_consume, (
                q_ptr, out_ptr, lse_ptr, work_ptr, last, all_tokens, c, q_tiles.index(0), ring, turns, pins.index(0),
                0, KV_HEADS, GROUP, DIM,
            )),
            (_consume, (
                q_ptr, out_ptr, lse_ptr, work_ptr, last, all_tokens, c, q_tiles.index(1), ring, turns, pins.index(1),
                1, KV_HEADS, GROUP, DIM,
            )),
            (_produce, (k_desc, v_desc, work_ptr, last, ring, KV_HEADS, DIM)),
        ],
        [4, 1],  # warps of the second and the third; the first has the launch's four
        [240, 24],  # registers a thread of these
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ operators


def work_list(query_lengths: list[int], context_lengths: list[int], key_starts: list[int], heads: int, kv_heads: int) -> Tensor:
    """int32 [N * RECORD] on the CPU, a tile after the other, the one with most keys first.

    A tile's numbers: row of its first token in q, its tokens, keys ahead of them, row of the sequence's first key, keys that
    the sequence ends with. Arguments as for `attention.make_tiles`.
    """
    step = 2 * (64 // (heads // kv_heads))
    new, keys, key_row = (torch.tensor(x, dtype=torch.int64) for x in (query_lengths, context_lengths, key_starts))
    count = (new + step - 1) // step
    s = torch.arange(len(query_lengths)).repeat_interleave(count)
    token = (torch.arange(s.numel()) - (count.cumsum(0) - count)[s]) * step
    here = (new[s] - token).clamp(max=step)
    ahead = (keys - new)[s] + token
    tiles = torch.stack([(new.cumsum(0) - new)[s] + token, here, ahead, key_row[s], keys[s]], 1)
    return tiles[(ahead + here).argsort(descending=True, stable=True)].int().flatten()


@cache
def _box(dim: int) -> Any:
    """How 64 rows lie in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([KEYS.value, dim], gl.bfloat16)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# By device, heads, key heads, dim and whether there is an lse: all that the compiler knows. Triton would find that out from
# every argument of every call, which takes longer than short sequences.
_compiled: dict[tuple[object, ...], Any] = {}


def prefill(q: Tensor, keys: Tensor, values: Tensor, work: Tensor, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Causal attention of packed keys: the bits of `attention.forward`.

    q: BF16 [T, heads, dim]; keys, values: BF16 [R, kv_heads, dim]; all contiguous, on a GPU, from a multiple of 16 bytes;
    `work`: see work_list, on the GPU. Returns out, BF16 like q, and lse, FP32 [heads, T] natural log, or None.
    """
    (tokens, heads, dim), (rows, kv_heads, _) = q.shape, keys.shape
    out = torch.empty_like(q)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device) if want_lse else None
    tiles = work.numel() // RECORD.value * kv_heads
    if not tiles:
        return out, lse
    width = kv_heads * dim
    k_desc, v_desc = (TensorDescriptor(x, [rows, width], [width, 1], [KEYS.value, dim], _box(dim)) for x in (keys, values))
    arguments = (
        q, k_desc, v_desc, out, lse, work, tiles - 1, tokens, LOG2_E / math.sqrt(dim), kv_heads, heads // kv_heads, dim
    )  # fmt: skip
    grid = (min(_processors(q.device), tiles), 1, 1)
    key = (q.device, heads, kv_heads, dim, want_lse)
    if key in _compiled:
        _compiled[key][grid](*arguments)
    else:
        jitted: Any = prefill_kernel
        _compiled[key] = jitted[grid](*arguments, num_warps=4, enable_fp_fusion=False)
    return out, lse
