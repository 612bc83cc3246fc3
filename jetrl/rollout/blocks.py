"""Blocks of the KV cache: who uses which, counted; and full prompt blocks kept for prompts that begin alike.

A key or value depends on the tokens up to its own and on the weights, and rows are independent, so a block that another
sequence filled holds the very bits that this one would compute. Kept prefixes are valid within one policy version: `clear`
them when weights change or the cache's memory goes. They are given up, least recently used first, before anybody is preempted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice


class BlockPool:
    """Reference-counted blocks. A block is free when nobody refers to it."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count, self.block_size = count, block_size
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self.peak = 0  # most blocks in use at once

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def take(self) -> int:
        """A free block, with one reference. The caller makes sure that there is one."""
        assert self._free, "no free block"
        block = self._free.pop()
        self._references[block] = 1
        self.peak = max(self.peak, self.count - self.free)
        return block

    def share(self, blocks: list[int]) -> list[int]:
        """One more reference to each block; returns a copy of the list."""
        for block in blocks:
            assert self._references[block] > 0, block
            self._references[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Give up one reference to each block and empty the list."""
        for block in blocks:
            assert self._references[block] > 0, block
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
        blocks.clear()

    def references(self, block: int) -> int:
        """How many refer to a block."""
        return self._references[block]


class Prefixes:
    """Full blocks of prompts, found again by the tokens up to their end. Holds one reference to each."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # (node of the block before, the block's tokens) -> (its own node, block), least recently used first. Nodes are never
        # used twice, so what followed a block that was given up is not found by mistake.
        self._kept: OrderedDict[tuple[int, tuple[int, ...]], tuple[int, int]] = OrderedDict()
        self._nodes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, prompt: list[int]) -> list[int]:
        """Blocks that hold the beginning of a prompt, not shared yet. One token at least is left to compute."""
        blocks, keys = [], []
        for key in self._keys(prompt[:-1]):
            if key not in self._kept:
                break
            keys.append(key)
            blocks.append(self._kept[key][1])
        for key in reversed(keys):  # a block is of no use without those before it: they go last
            self._kept.move_to_end(key)
        return blocks

    def keep(self, prompt: list[int], blocks: list[int]) -> None:
        """Keep the full blocks of a prompt that is now in the cache; `blocks`: its own, in order."""
        found = len(self.find([*prompt, -1]))
        for number, key in enumerate(self._keys(prompt)):
            if number >= found:
                self._nodes += 1
                self._kept[key] = (self._nodes, self._pool.share([blocks[number]])[0])
        self.find([*prompt, -1])

    def give_up(self, wanted: int) -> bool:
        """Free up to `wanted` blocks that nobody else refers to; whether any was freed."""
        unused = (key for key, (_, block) in self._kept.items() if self._pool.references(block) == 1)
        found = list(islice(unused, wanted))  # most often the first ones: no search through all
        for key in found:
            self._pool.release([self._kept.pop(key)[1]])
        return bool(found)

    def clear(self) -> None:
        """Forget everything."""
        self._pool.release([block for _, block in self._kept.values()])
        self._kept.clear()

    def _keys(self, tokens: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Keys of the full blocks of `tokens`, as far as the blocks before are kept."""
        size, node = self._pool.block_size, 0
        for start in range(0, len(tokens) - size + 1, size):
            key = (node, tuple(tokens[start : start + size]))
            yield key
            if key not in self._kept:
                return
            node = self._kept[key][0]
