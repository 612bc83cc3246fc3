"""What a forward must know besides tokens: positions, and where keys and values come from.

This is the only branch on the phase that the contract allows. In training keys and values are the packed rows just
computed; in the engine they are written to a paged cache and read back through block tables. Both end in a `Layout`, and
from there on prefill, decode and training are one code.

Worked example, two sequences in the engine, block size 4: sequence A decodes its 6th token, blocks [2, 0]; sequence B
prefills 3 tokens, block [5]. Flat tokens are A B B B; query_lengths [1, 3], context_lengths [6, 3], slot_mapping
[0*4+1, 20, 21, 22]; A's keys lie in slots 8 9 10 11 0 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Literal, Protocol

import torch
from torch import Tensor

from jetrl.kernels.attention import Bucket, LaneSequences, Layout, Sequences
from jetrl.kernels.lanes import DecodeInputs, Lanes
from jetrl.kernels.ops import Target
from jetrl.kernels.quant import E4M3, TokenGroups, token_groups

CacheKind = Literal["bf16", "fp8"]
FP8_BLOCK = 64  # keys that a GPU's kernel of FP8 attention reads at once, from one block

_SMALLEST_KEYS, _SMALLEST_QUERIES = 64, 16  # buckets below these sizes would cost more calls than padding


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device, by a copy that nobody waits for; one that is there already as it is."""
    return tensor if tensor.device.type == device.type else tensor.pin_memory().to(device, non_blocking=True)


class Context(Protocol):
    """Positions and token groups of the flat tokens, and where a layer's keys and values lie."""

    positions: Tensor  # int64 [T]
    layout: Layout | Sequences | LaneSequences  # on a CPU, on a GPU
    groups: TokenGroups | None  # only when gradients are wanted

    def target(self, layer: int, kv_heads: int, dim: int) -> Target:
        """Where a layer's new keys and values go; its flat rows are what `layout` points into."""
        ...


def _bucket_key(query_length: int, context_length: int) -> tuple[int, int]:
    queries = 1 if query_length == 1 else max(_SMALLEST_QUERIES, 1 << (query_length - 1).bit_length())
    return queries, max(_SMALLEST_KEYS, 1 << (context_length - 1).bit_length())


def build_layout(query_lengths: list[int], context_lengths: list[int], key_rows: Callable[[Tensor, Tensor], Tensor]) -> Layout:
    """Group sequences of similar length into buckets.

    query_lengths: new tokens of each sequence, packed in this order; context_lengths: keys each ends with, the new ones
    included. `key_rows(sequences [S], positions [S, K])` gives the flat row of each key, int64 [S, K].
    """
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for sequence, (query, context) in enumerate(zip(query_lengths, context_lengths, strict=True)):
        if query:
            members[_bucket_key(query, context)].append(sequence)
    lengths, contexts = torch.tensor(query_lengths), torch.tensor(context_lengths)
    starts = lengths.cumsum(0) - lengths
    return Layout([_bucket(torch.tensor(m), starts, lengths, contexts, key_rows) for m in members.values()])


def _bucket(
    sequences: Tensor, starts: Tensor, lengths: Tensor, contexts: Tensor, key_rows: Callable[[Tensor, Tensor], Tensor]
) -> Bucket:
    start, length, context = (x[sequences].unsqueeze(1) for x in (starts, lengths, contexts))
    query = torch.arange(int(length.max())).unsqueeze(0)
    position = torch.where(query < length, context - length + query, -1)
    key = torch.arange(int(context.max())).unsqueeze(0)
    return Bucket(
        query_index=start + torch.minimum(query, length - 1),
        query_position=position,
        key_index=key_rows(sequences, torch.where(key < context, key, 0)),
    )


@dataclass(slots=True)
class PackedContext:
    """Whole sequences packed one behind the other: training, scoring, and the reference of every check."""

    positions: Tensor
    layout: Layout | Sequences | LaneSequences
    groups: TokenGroups | None
    slots: Tensor | None = None  # int64 [T], of each token in the blocks that each layer's codes get; None: BF16, no blocks
    blocks: tuple[int, int] = (0, 0)  # how many and how large

    @staticmethod
    def of(lengths: list[int], device: torch.device | str = "cpu", kv_fp8: bool = False) -> PackedContext:
        """Context of sequences with these lengths in tokens.

        With `kv_fp8` keys and values lie in blocks as in the engine: on a GPU each sequence begins one.
        """
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        positions = torch.arange(int(sizes.sum())) - torch.repeat_interleave(starts, sizes)
        layout: Layout | Sequences
        if torch.device(device).type == "cpu":
            layout = build_layout(lengths, lengths, lambda sequences, position: starts[sequences].unsqueeze(1) + position)
        else:
            layout = Sequences(lengths, lengths, starts.tolist(), None, 0, torch.device(device))
        there = torch.device(device)
        groups = token_groups(lengths, "cpu")
        groups = TokenGroups(send(groups.starts, there), send(groups.sizes, there), groups.count)
        context = PackedContext(send(positions, there), layout, groups)
        if isinstance(layout, Layout) and kv_fp8:
            context.slots, context.blocks = torch.arange(len(positions)), (1, len(positions))
        elif isinstance(layout, Sequences) and kv_fp8:
            context._lay_blocks(lengths)
        return context

    def _lay_blocks(self, lengths: list[int]) -> None:
        needed = [-(-n // FP8_BLOCK) for n in lengths]
        first = torch.tensor(list(accumulate(needed, initial=0)))
        tables = first[:-1].unsqueeze(1) + torch.arange(max(needed, default=1))
        gaps = first[:-1] * FP8_BLOCK - (torch.tensor(lengths).cumsum(0) - torch.tensor(lengths))
        slots = torch.arange(sum(lengths)) + torch.repeat_interleave(gaps, torch.tensor(lengths))
        device = self.positions.device
        assert isinstance(self.layout, Sequences)
        self.layout = replace(self.layout, block_tables=send(tables.int(), device), block_size=FP8_BLOCK)
        self.slots, self.blocks = send(slots, device), (sum(needed), FP8_BLOCK)

    def target(self, layer: int, kv_heads: int, dim: int) -> Target:
        if self.slots is not None:
            return KVCache.layer_of_codes(*self.blocks, kv_heads, dim, self.positions.device).target(0, self.slots)
        keys, values = self.positions.new_empty((2, len(self.positions), kv_heads, dim), dtype=torch.bfloat16)
        return Target(keys, values, None)


@dataclass(slots=True)
class KVCache:
    """Paged keys and values of every layer; a slot is one token's place, `block * block_size + offset`.

    BF16 rows, or E4M3 codes in blocks, values transposed, with a scale for each head of each token (see `kernels.ops.Target`).
    """

    keys: Tensor  # bfloat16 [layers, slots, kv_heads, D]; E4M3 [layers, blocks, kv_heads, block_size, D]
    values: Tensor  # bfloat16 [layers, slots, kv_heads, D]; E4M3 [layers, blocks, kv_heads, D, block_size]
    block_size: int
    key_scales: Tensor | None = None  # float32 [layers, blocks, kv_heads, block_size]
    value_scales: Tensor | None = None  # like key_scales

    @staticmethod
    def allocate(
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        kind: CacheKind = "bf16",
    ) -> KVCache:
        """An empty cache of `blocks` blocks of `block_size` tokens. Raises ValueError as `check_block_size` does."""
        check_block_size(kind, block_size, device)
        size = blocks * block_size * bytes_per_token(kind, layers, kv_heads, head_dim)
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
        return KVCache.over(memory, kind, layers, blocks, block_size, kv_heads, head_dim)

    @staticmethod
    def layer_of_codes(blocks: int, block_size: int, kv_heads: int, head_dim: int, device: torch.device | str) -> KVCache:
        """Blocks of one layer's codes, uninitialised."""
        size = blocks * block_size * bytes_per_token("fp8", 1, kv_heads, head_dim)
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return KVCache.over(memory, "fp8", 1, blocks, block_size, kv_heads, head_dim)

    @staticmethod
    def over(
        memory: Tensor, kind: CacheKind, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int
    ) -> KVCache:
        """A cache in `memory`, uint8, of at least `blocks * block_size` times `bytes_per_token`. Errors: `check_block_size`."""
        check_block_size(kind, block_size, memory.device)
        lead, rows = (layers, blocks, kv_heads), (layers, blocks * block_size, kv_heads, head_dim)
        if kind == "fp8":
            shapes = [(*lead, block_size, head_dim), (*lead, head_dim, block_size), (*lead, block_size), (*lead, block_size)]
            dtypes = [E4M3, E4M3, torch.float32, torch.float32]
        else:
            shapes, dtypes = [rows, rows], [torch.bfloat16, torch.bfloat16]
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        parts = memory[: sum(sizes)].split(sizes)
        tensors = [p.view(d).view(s) for p, d, s in zip(parts, dtypes, shapes, strict=True)]
        return KVCache(tensors[0], tensors[1], block_size, *tensors[2:])

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [x for x in (self.keys, self.values, self.key_scales, self.value_scales) if x is not None]

    def target(self, layer: int, slots: Tensor) -> Target:
        """Where a layer's new keys and values go. slots: int64 [T]."""
        return Target(self.keys[layer], self.values[layer], slots, *(x[layer] for x in self.tensors[2:]))

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block, in all layers."""
        for tensor in self.tensors:
            blocks = tensor if self.key_scales is not None else tensor.unflatten(1, (-1, self.block_size))
            blocks[:, target] = blocks[:, source]


def check_block_size(kind: CacheKind, block_size: int, device: torch.device | str) -> None:
    """Raise ValueError for blocks of codes that a GPU's kernel cannot read."""
    if kind == "fp8" and torch.device(device).type != "cpu" and block_size % FP8_BLOCK:
        raise ValueError(
            f"rollout.block_size is {block_size}, but with kv_cache=fp8 on a GPU blocks hold a multiple of {FP8_BLOCK} tokens; "
            f"set rollout.block_size={-(-block_size // FP8_BLOCK) * FP8_BLOCK}"
        )


def bytes_per_token(kind: CacheKind, layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of a cache for one token in all layers."""
    return layers * 2 * kv_heads * (head_dim + 4 if kind == "fp8" else 2 * head_dim)


def _slots_of(tables: Tensor, size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Slot of each position [S, K] of sequences [S], by block tables int64 [all, most blocks]; see `build_layout`."""
    return lambda sequences, position: tables[sequences].gather(1, position // size) * size + position % size


@dataclass(slots=True)
class PagedContext:
    """New tokens of running sequences, whose earlier keys and values lie in the paged cache."""

    positions: Tensor
    layout: Layout | Sequences | LaneSequences
    cache: KVCache
    slot_mapping: Tensor  # int64 [T], slot of each new token
    groups: TokenGroups | None = None

    @staticmethod
    def of(cache: KVCache, query_lengths: list[int], context_lengths: list[int], block_tables: Tensor) -> PagedContext:
        """block_tables: int64 [S, most blocks], padded with any valid block."""
        slots = _slots_of(block_tables, cache.block_size)
        lengths, contexts = torch.tensor(query_lengths), torch.tensor(context_lengths)
        sequence = torch.repeat_interleave(torch.arange(len(query_lengths)), lengths)
        first = torch.repeat_interleave(contexts - lengths - (lengths.cumsum(0) - lengths), lengths)
        positions = torch.arange(int(lengths.sum())) + first
        mapping = slots(sequence, positions.unsqueeze(1)).squeeze(1)
        device = cache.keys.device
        layout: Layout | Sequences
        if device.type == "cpu":
            layout = build_layout(query_lengths, context_lengths, slots)
        else:
            layout = Sequences(query_lengths, context_lengths, None, send(block_tables.int(), device), cache.block_size, device)
        return PagedContext(send(positions, device), layout, cache, send(mapping, device))

    @staticmethod
    def of_lanes(cache: KVCache, lanes: Lanes, lane: Tensor, inputs: DecodeInputs) -> PagedContext:
        """One new token of each lane [R]. On a GPU nothing here waits for the device or depends on what it holds."""
        layout: Layout | Sequences | LaneSequences
        if lane.device.type == "cpu":
            # A row that takes no part keeps its place among the queries; any key will do.
            contexts = inputs.context[lane.long()].clamp(min=1).tolist()
            slots = _slots_of(lanes.table[lane.long()].long(), lanes.block_size)
            layout = build_layout([1] * len(contexts), contexts, slots)
        else:
            by_lane = (inputs.query_start, inputs.query_length, inputs.context)
            layout = LaneSequences(lane, *by_lane, lanes.table, lanes.block_size)
        return PagedContext(inputs.positions, layout, cache, inputs.slots)

    def target(self, layer: int, kv_heads: int, dim: int) -> Target:
        return self.cache.target(layer, self.slot_mapping)
