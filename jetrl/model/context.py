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
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from jetrl.kernels.attention import Bucket, Layout, Sequences
from jetrl.kernels.ops import Target
from jetrl.kernels.quant import TokenGroups, token_groups

_SMALLEST_KEYS, _SMALLEST_QUERIES = 64, 16  # buckets below these sizes would cost more calls than padding


class Context(Protocol):
    """Positions and token groups of the flat tokens, and where a layer's keys and values lie."""

    positions: Tensor  # int64 [T]
    layout: Layout | Sequences  # on a CPU, on a GPU
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
    for sequence, lengths in enumerate(zip(query_lengths, context_lengths, strict=True)):
        members[_bucket_key(*lengths)].append(sequence)
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
    layout: Layout | Sequences
    groups: TokenGroups | None

    @staticmethod
    def of(lengths: list[int], device: torch.device | str = "cpu") -> PackedContext:
        """Context of sequences with these lengths in tokens."""
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        positions = torch.arange(int(sizes.sum())) - torch.repeat_interleave(starts, sizes)
        layout: Layout | Sequences
        if torch.device(device).type == "cpu":
            layout = build_layout(lengths, lengths, lambda sequences, position: starts[sequences].unsqueeze(1) + position)
        else:
            layout = Sequences(lengths, lengths, starts.tolist(), None, 0, torch.device(device))
        return PackedContext(positions.to(device), layout, token_groups(lengths, device))

    def target(self, layer: int, kv_heads: int, dim: int) -> Target:
        keys, values = self.positions.new_empty((2, len(self.positions), kv_heads, dim), dtype=torch.bfloat16)
        return Target(keys, values, None)


@dataclass(slots=True)
class KVCache:
    """Paged keys and values of every layer; a slot is one token's place, `block * block_size + offset`."""

    keys: Tensor  # bfloat16 [layers, slots, kv_heads, D]
    values: Tensor  # bfloat16 [layers, slots, kv_heads, D]
    block_size: int

    @staticmethod
    def allocate(
        layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, device: torch.device | str = "cpu"
    ) -> KVCache:
        """An empty cache of `blocks` blocks of `block_size` tokens."""
        shape = (layers, blocks * block_size, kv_heads, head_dim)
        keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        return KVCache(keys, values, block_size)

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` slots of a block, in all layers."""
        old, new = source * self.block_size, target * self.block_size
        for tensor in (self.keys, self.values):
            tensor[:, new : new + tokens] = tensor[:, old : old + tokens]


@dataclass(slots=True)
class PagedContext:
    """New tokens of running sequences, whose earlier keys and values lie in the paged cache."""

    positions: Tensor
    layout: Layout | Sequences
    cache: KVCache
    slot_mapping: Tensor  # int64 [T], slot of each new token
    groups: TokenGroups | None = None

    @staticmethod
    def of(cache: KVCache, query_lengths: list[int], context_lengths: list[int], block_tables: Tensor) -> PagedContext:
        """block_tables: int64 [S, most blocks], padded with any valid block."""
        size = cache.block_size

        def slots(sequences: Tensor, position: Tensor) -> Tensor:
            return block_tables[sequences].gather(1, position // size) * size + position % size

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
            layout = Sequences(query_lengths, context_lengths, None, block_tables.int().to(device), size, device)
        return PagedContext(positions.to(device), layout, cache, mapping.to(device))

    def target(self, layer: int, kv_heads: int, dim: int) -> Target:
        return Target(self.cache.keys[layer], self.cache.values[layer], self.slot_mapping)
