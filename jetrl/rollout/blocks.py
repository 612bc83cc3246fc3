"""Blocks of the KV cache: who uses which, counted."""

from __future__ import annotations


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
