"""Memory that is given back and taken again while what points into it stays valid, on a CPU."""

from __future__ import annotations

import torch

from jetrl.kernels.arena import CpuArena
from jetrl.model.context import KVCache, bytes_per_token


def test_released_memory_is_gone_and_comes_back_where_views_look_for_it() -> None:
    arena = CpuArena(4096)
    storage = arena.bytes.untyped_storage()
    numbers = arena.bytes[1024:2048].view(torch.float32).view(16, 16)
    numbers.fill_(3.0)
    assert storage.nbytes() == 4096
    arena.release()
    assert storage.nbytes() == 0
    arena.release()
    assert storage.nbytes() == 0
    arena.restore()
    assert storage.nbytes() == 4096 and arena.bytes.numel() == 4096
    arena.bytes.zero_()
    numbers[2, 3] = 5.0
    assert arena.bytes.untyped_storage().data_ptr() == storage.data_ptr() == numbers.untyped_storage().data_ptr()
    assert arena.bytes.view(torch.float32)[256 + 2 * 16 + 3] == 5.0


def test_restoring_what_was_not_released_keeps_what_is_there() -> None:
    arena = CpuArena(64)
    arena.bytes.fill_(7)
    arena.restore()
    assert bool((arena.bytes == 7).all())


def test_a_cache_over_an_arena_follows_it() -> None:
    for kind in ("bf16", "fp8"):
        arena = CpuArena(6 * 4 * bytes_per_token(kind, 2, 3, 8))
        cache = KVCache.over(arena.bytes, kind, 2, 6, 4, 3, 8)
        assert sum(x.numel() * x.element_size() for x in cache.tensors) == arena.bytes.numel()
        arena.release()
        arena.restore()
        arena.bytes.zero_()
        for tensor in cache.tensors:
            tensor.view(torch.uint8).fill_(1)
        assert bool((arena.bytes == 1).all())  # no byte twice, none left out
