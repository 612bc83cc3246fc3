"""`kernels.arena` on a GPU: a reserved range of addresses whose pages come and go.

Problem: see there. torch's allocator can give memory back, but not the same address again.

Method: the driver's virtual memory calls. The range is reserved once. `restore` makes pages and maps them there, `release`
unmaps them and gives them to the driver, so that torch's allocator, or another process, can have them. Pages of 2 MB come from
wherever they are free: nothing fragments. torch sees the range as a tensor through the array interface.

Given up: without cuda-bindings the bytes are an ordinary tensor that keeps its memory (said once).
"""

from __future__ import annotations

import importlib.util
import logging
import weakref
from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.hopper.driver import checked

log = logging.getLogger("jetrl")


def arena(size: int, device: torch.device) -> PagedArena | KeptArena:
    """An arena of `size` bytes, memory included. Raises ValueError, saying what is free, if there is not enough."""
    if gives_back():
        return PagedArena(size, device)
    log.warning("cuda-bindings is not installed, so the KV cache keeps its memory during training; pip install 'jetrl[hopper]'")
    return KeptArena(size, device)


def gives_back() -> bool:
    """Whether an arena can give its memory back here."""
    return bool(importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"))


class KeptArena:
    """An ordinary tensor."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def release(self) -> None:
        pass

    def restore(self) -> None:
        pass


class _Range:
    """Reserved addresses as torch reads them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Pages:
    """A range of addresses, and the memory behind it while there is some."""

    def __init__(self, size: int, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver, self._device = driver, device
        torch.cuda.current_stream(device).synchronize()  # makes the device's context the current one
        self._place = driver.CUmemAllocationProp()
        self._place.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._place.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._place.location.id = device.index or 0
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        step = int(checked(driver.cuMemGetAllocationGranularity(self._place, smallest)))
        self._size = -(-size // step) * step
        self.address = checked(driver.cuMemAddressReserve(self._size, 0, 0, 0))
        self._handle: Any = None

    @property
    def mapped(self) -> bool:
        return self._handle is not None

    def unmap(self) -> None:
        if not self.mapped:
            return
        torch.cuda.synchronize(self._device)  # nothing may still read or write there
        checked(self._driver.cuMemUnmap(self.address, self._size))
        checked(self._driver.cuMemRelease(self._handle))
        self._handle = None

    def map(self) -> None:
        if self.mapped:
            return
        torch.cuda.empty_cache()
        status, handle = self._driver.cuMemCreate(self._size, self._place, 0)
        if int(status):
            free, total = torch.cuda.mem_get_info(self._device)
            raise ValueError(
                f"the KV cache wants {self._size / 1e9:.1f} GB, but {free / 1e9:.1f} of the GPU's {total / 1e9:.1f} GB are "
                f"free ({status!r}). Set rollout.cache_tokens to less, or end what else uses the GPU."
            )
        checked(self._driver.cuMemMap(self.address, self._size, 0, handle, 0))
        access = self._driver.CUmemAccessDesc()
        access.location = self._place.location
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        checked(self._driver.cuMemSetAccess(self.address, self._size, [access], 1))
        self._handle = handle

    def give_up(self) -> None:
        """Memory and addresses, for good."""
        self.unmap()
        checked(self._driver.cuMemAddressFree(self.address, self._size))


class PagedArena:
    """See `Arena`. Memory and addresses are given back for good when nothing refers to `bytes` or a view of it any more."""

    def __init__(self, size: int, device: torch.device) -> None:
        pages = _Pages(size, device)
        pages.map()
        there = _Range(int(pages.address), size)  # which torch keeps as long as a tensor reads it
        weakref.finalize(there, pages.give_up).atexit = False  # at its end a process loses all of it anyway
        self._pages = pages
        self.bytes: Tensor = torch.as_tensor(there, device=device)

    def release(self) -> None:
        self._pages.unmap()

    def restore(self) -> None:
        self._pages.map()
