"""Memory on a CPU: temporaries that stay in a core's cache, and freed pages that stay with the process.

Problem: an elementwise operator on float64 is bound by memory, and glibc gives the pages of each large temporary back to the
system when it is freed; taking them anew costs more than the arithmetic (a quarter of the time of a decode step, measured).

Method: operators on independent rows work through `row_chunks`. `keep_freed_memory` tells glibc to keep what is freed for
the next temporary. Given up: with it, up to 1 GB of freed memory stays with the process.
"""

from __future__ import annotations

import ctypes
import sys

_CHUNK_ELEMENTS = 1 << 16  # 512 kB in float64: half of a core's L2 on common CPUs
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES = 1 << 30
_LARGEST_FROM_HEAP = 1 << 25  # glibc allows no more; larger tensors still come and go as pages


def row_chunks(rows: int, width: int, elements: int = _CHUNK_ELEMENTS, at_least: int = 64) -> list[slice]:
    """Slices that cover `rows` rows, each with about `elements` elements in rows of `width`, and at least so many rows."""
    step = max(at_least, elements // max(1, width))
    return [slice(first, first + step) for first in range(0, rows, step)]


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory for the rest of the process. False, and nothing changed, where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP) and libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
