"""`kernels.lanes` on a GPU: a decode step's inputs in one launch, and its tokens booked in another; both can be captured.

Problem and meaning: see `jetrl.kernels.lanes`, whose bytes these kernels make. In torch's operators a step would begin and end
with some forty launches.

Layout: as there; a program takes `ROWS` rows. Rows of one step have different lanes, but for padding, which all has nobody's:
there the programs write over one another, and nothing reads what they leave.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels import lanes as reference
from jetrl.kernels.lanes import DecodeInputs, Lanes

ROWS = 64
_TOKEN, _LENGTH, _PROMPT, _LIMIT, _SEED, _DONE, _FORCED = (
    tl.constexpr(getattr(reference, name)) for name in ("TOKEN", "LENGTH", "PROMPT", "LIMIT", "SEED", "DONE", "FORCED")
)
_COLUMNS = tl.constexpr(reference.COLUMNS)


@triton.jit
def _mix64(x):
    """`rl.seeds.mix64` of uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """`rl.seeds.uniform` of int64 seed and position, FP64."""
    bits = _mix64(seed.to(tl.uint64, bitcast=True) ^ _mix64(position.to(tl.uint64, bitcast=True))) >> 11
    return bits.to(tl.int64, bitcast=True).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=["rows", "step_stride", "table_stride", "spare_slot"])
def _begin_kernel(
    step_ptr,  # int32 [3, rows], rows step_stride apart: lane, forced token or -1, new block or -1
    state_ptr,  # int64 [L + 1, COLUMNS], see kernels.lanes
    table_ptr,  # int32 [L + 1, table_stride], in and out
    tokens_ptr,  # int64 [rows], out
    positions_ptr,  # int64 [rows], out
    slots_ptr,  # int64 [rows], out
    uniforms_ptr,  # FP64 [rows], out
    forced_ptr,  # int64 [rows], out
    query_start_ptr,  # int32 [L + 1], out, by lane
    query_length_ptr,  # int32 [L + 1], out, by lane
    context_ptr,  # int32 [L + 1], out, by lane
    rows,
    step_stride,
    table_stride,
    spare_slot,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    lane = tl.load(step_ptr + row, mask=inside, other=0).to(tl.int64)
    forced = tl.load(step_ptr + step_stride + row, mask=inside, other=-1)
    new_block = tl.load(step_ptr + 2 * step_stride + row, mask=inside, other=-1)
    state = state_ptr + lane * _COLUMNS
    takes_part = inside & (tl.load(state + _DONE, mask=inside, other=1) == 0)
    length = tl.load(state + _LENGTH, mask=inside, other=1)
    position = tl.where(takes_part, length - 1, 0)
    place = table_ptr + lane * table_stride + position // BLOCK_SIZE
    fresh = takes_part & (new_block >= 0)
    tl.store(place, new_block, mask=fresh)
    block = tl.where(fresh, new_block, tl.load(place, mask=takes_part, other=0)).to(tl.int64)
    slot = tl.where(takes_part, block * BLOCK_SIZE + position % BLOCK_SIZE, spare_slot)
    token = tl.load(state + _TOKEN, mask=takes_part, other=0)
    drawn = length - tl.load(state + _PROMPT, mask=inside, other=0)
    uniform = _uniform(tl.load(state + _SEED, mask=inside, other=0), drawn)
    tl.store(tokens_ptr + row, token, mask=inside)
    tl.store(positions_ptr + row, position, mask=inside)
    tl.store(slots_ptr + row, slot, mask=inside)
    tl.store(uniforms_ptr + row, uniform, mask=inside)
    tl.store(forced_ptr + row, forced.to(tl.int64), mask=inside)
    tl.store(query_start_ptr + lane, row, mask=inside)
    tl.store(query_length_ptr + lane, takes_part.to(tl.int32), mask=inside)
    tl.store(context_ptr + lane, tl.where(takes_part, length, 0).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["rows", "ends"])
def _end_kernel(
    lane_ptr,  # int32 [rows]
    tokens_ptr,  # int64 [rows], sampled
    logprobs_ptr,  # FP32 [rows]
    state_ptr,  # int64 [L + 1, COLUMNS], in and out
    eos_ptr,  # int64 [ends]
    out_ptr,  # int32 [2, rows], out: token or -1, bits of the log-probability
    rows,
    ends,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    lane = tl.load(lane_ptr + row, mask=inside, other=0).to(tl.int64)
    token = tl.load(tokens_ptr + row, mask=inside, other=-1)
    logprob = tl.load(logprobs_ptr + row, mask=inside, other=0.0)
    state = state_ptr + lane * _COLUMNS
    takes_part = inside & (tl.load(state + _DONE, mask=inside, other=1) == 0)
    length = tl.load(state + _LENGTH, mask=inside, other=0) + 1
    stops = tl.zeros((ROWS,), tl.int1)
    for i in range(ends):
        stops = stops | (token == tl.load(eos_ptr + i))
    stops = stops & (tl.load(state + _FORCED, mask=inside, other=0) == 0)
    full = length - tl.load(state + _PROMPT, mask=inside, other=0) >= tl.load(state + _LIMIT, mask=inside, other=0)
    tl.store(state + _TOKEN, token, mask=takes_part)
    tl.store(state + _LENGTH, length, mask=takes_part)
    tl.store(state + _DONE, (stops | full).to(tl.int64), mask=takes_part)
    tl.store(out_ptr + row, tl.where(takes_part, token, -1).to(tl.int32), mask=inside)
    tl.store(out_ptr + rows + row, logprob.to(tl.int32, bitcast=True), mask=inside)


def begin(lanes: Lanes, step: Tensor) -> DecodeInputs:
    """See `kernels.lanes.begin`. step: int32 [3, R], unit stride in a row."""
    rows, device = step.shape[1], step.device
    longs = torch.empty(4, rows, dtype=torch.int64, device=device)
    uniforms = torch.empty(rows, dtype=torch.float64, device=device)
    by_lane = torch.empty(3, lanes.state.shape[0], dtype=torch.int32, device=device)
    tokens, positions, slots, forced = longs
    kernel: Any = _begin_kernel
    kernel[(triton.cdiv(rows, ROWS),)](
        step, lanes.state, lanes.table, tokens, positions, slots, uniforms, forced, *by_lane,
        rows, step.stride(0), lanes.table.stride(0), lanes.spare_slot,
        BLOCK_SIZE=lanes.block_size, ROWS=ROWS, num_warps=2,
    )  # fmt: skip
    return DecodeInputs(tokens, positions, slots, uniforms, forced, *by_lane)


def end(lanes: Lanes, lane: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
    """See `kernels.lanes.end`. lane: int32 [R]; tokens: int64 [R]; logprobs: FP32 [R]."""
    rows = lane.shape[0]
    out = torch.empty(2, rows, dtype=torch.int32, device=lane.device)
    kernel: Any = _end_kernel
    kernel[(triton.cdiv(rows, ROWS),)](
        lane, tokens, logprobs, lanes.state, lanes.eos, out, rows, lanes.eos.shape[0], ROWS=ROWS, num_warps=2
    )
    return out
