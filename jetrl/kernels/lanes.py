"""What the device knows of running sequences, so that a decode step needs nothing from the host but who takes part.

Problem: a step that hands its tokens to the host and gets the next inputs back leaves the GPU idle in between.

Method: each running sequence has a lane, a row of a small table on the device: its last token, length, seed, limit. `begin`
makes a step's inputs out of the lanes, `end` writes the sampled tokens back, counts, and notices who is done. A sequence that
is done takes part no more (no key is written, no key read), though the host, which trails behind, may still name it.

    begin    per row: token, position, the cache slot of its keys, the uniform number of `rl.seeds`, the forced token
             per lane: where its query lies, how many new tokens (0 or 1), how many keys
    end      state[lane] = token, length + 1, done;   out = token (-1: took no part) and the bits of its log-probability

Layout: int64 state [L + 1, COLUMNS], one row a lane; row L is nobody's and always done, padding rows of a captured graph point
there. A step's input is int32 [3, R]: lane, forced token or -1, new block or -1 (a block that the host gives the lane now).
Given up: lanes are a fixed number, and a forced sequence has its tokens sent along step by step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOKEN, LENGTH, PROMPT, LIMIT, SEED, DONE, FORCED = range(7)
COLUMNS = 8
LANE, FORCED_TOKEN, NEW_BLOCK = range(3)


@dataclass(slots=True, frozen=True)
class Lanes:
    """State of the running sequences. L lanes and nobody's."""

    state: Tensor  # int64 [L + 1, COLUMNS]: last token, tokens so far, prompt, completion limit, seed, done, forced
    table: Tensor  # int32 [L + 1, most blocks], block of the cache for each block of the sequence
    eos: Tensor  # int64 [E], tokens that end a sequence
    block_size: int
    spare_slot: int  # where rows that take no part write their keys

    @staticmethod
    def empty(count: int, most_blocks: int, eos: list[int], block_size: int, spare_slot: int, device: torch.device) -> Lanes:
        """`count` lanes, all done."""
        state = torch.zeros(count + 1, COLUMNS, dtype=torch.int64, device=device)
        state[:, DONE] = 1
        table = torch.zeros(count + 1, most_blocks, dtype=torch.int32, device=device)
        return Lanes(state, table, torch.tensor(eos, dtype=torch.int64, device=device), block_size, spare_slot)


@dataclass(slots=True, frozen=True)
class DecodeInputs:
    """What a decode step of R rows reads. The last three are indexed by lane, [L + 1]."""

    tokens: Tensor  # int64 [R]
    positions: Tensor  # int64 [R]
    slots: Tensor  # int64 [R], cache slot of the row's keys and values
    uniforms: Tensor  # float64 [R]
    forced: Tensor  # int64 [R], -1 where the token is to be drawn
    query_start: Tensor  # int32 [L + 1], row of the lane's query
    query_length: Tensor  # int32 [L + 1], 1, or 0 for who takes no part
    context: Tensor  # int32 [L + 1], keys, the new one included


def _multiply(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2^64; int64 holds the 64 bits."""
    return x * (factor - (1 << 64) if factor >= 1 << 63 else factor)


def _shift(x: Tensor, bits: int) -> Tensor:
    """The 64 bits of x shifted right, zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """`rl.seeds.mix64` of int64 that holds the 64 bits."""
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = _multiply(x ^ _shift(x, 30), 0xBF58476D1CE4E5B9)
    x = _multiply(x ^ _shift(x, 27), 0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """`rl.seeds.uniform` of int64 seeds (the 64 bits) and positions in the completion: float64, the same numbers."""
    return _shift(mix64(seeds ^ mix64(positions)), 11).double() * 2.0**-53


def begin(lanes: Lanes, step: Tensor) -> DecodeInputs:
    """The inputs of one decode step; new blocks go into the table. step: int32 [3, R]."""
    lane, forced, new_block = step.long()
    state = lanes.state[lane]
    takes_part = state[:, DONE] == 0
    position = state[:, LENGTH] - 1
    block = position // lanes.block_size
    fresh = (new_block >= 0) & takes_part
    lanes.table[lane[fresh], block[fresh]] = new_block[fresh].int()
    slots = lanes.table[lane, block.clamp(min=0)].long() * lanes.block_size + position % lanes.block_size
    none = torch.zeros(lanes.state.shape[0], dtype=torch.int32, device=step.device)
    query_start, query_length, context = none.clone(), none.clone(), none.clone()
    query_start[lane] = torch.arange(len(lane), dtype=torch.int32, device=step.device)
    query_length[lane] = takes_part.int()
    context[lane] = torch.where(takes_part, position + 1, 0).int()
    return DecodeInputs(
        tokens=torch.where(takes_part, state[:, TOKEN], 0),
        positions=torch.where(takes_part, position, 0),
        slots=torch.where(takes_part, slots, lanes.spare_slot),
        uniforms=uniforms(state[:, SEED], state[:, LENGTH] - state[:, PROMPT]),
        forced=forced,
        query_start=query_start,
        query_length=query_length,
        context=context,
    )


def end(lanes: Lanes, lane: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
    """Book the tokens [R] sampled for lanes [R] (no lane twice but nobody's); returns int32 [2, R], see above."""
    lane = lane.long()
    state = lanes.state[lane]
    takes_part = state[:, DONE] == 0
    length = state[:, LENGTH] + 1
    stops = torch.isin(tokens, lanes.eos) & (state[:, FORCED] == 0)
    done = stops | (length - state[:, PROMPT] >= state[:, LIMIT])
    changed = state.clone()
    changed[:, TOKEN], changed[:, LENGTH], changed[:, DONE] = tokens, length, done.long()
    lanes.state[lane[takes_part]] = changed[takes_part]
    return torch.stack([torch.where(takes_part, tokens, -1).int(), logprobs.view(torch.int32)])
