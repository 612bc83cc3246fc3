"""Memory that can be given back and taken again while everything that points into it stays valid.

Problem: on one device the KV cache takes what training leaves, and training wants it back between rollouts. Freed and
allocated anew it would lie elsewhere, and captured CUDA graphs hold addresses.

Method: an arena is one tensor of bytes whose place is fixed and whose memory is not. `release` gives the memory back, `restore`
takes it again; what was in it is lost. On a CPU a tensor's storage is resized, which its views follow; on a GPU the address
range stays reserved while its pages go (jetrl/kernels/hopper/arena.py).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Arena(Protocol):
    """Bytes at a fixed place."""

    bytes: Tensor  # uint8 [size]; its views must not be read or written between `release` and `restore`

    def release(self) -> None:
        """Give the memory back. Nothing happens if it is given back already."""
        ...

    def restore(self) -> None:
        """Take memory again, with arbitrary content. Nothing happens if it is there.

        Raises ValueError, saying what is free, if there is not enough.
        """
        ...


class CpuArena:
    """See `Arena`."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.zeros(size, dtype=torch.uint8)
        self._size = size

    def release(self) -> None:
        self.bytes.untyped_storage().resize_(0)

    def restore(self) -> None:
        self.bytes.untyped_storage().resize_(self._size)
