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


class PagedArena:
    """See `Arena`. It lives as long as the process: its range is never given back."""

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
        self._address = checked(driver.cuMemAddressReserve(self._size, 0, 0, 0))
        self._pages: Any = None
        self.restore()
        self.bytes: Tensor = torch.as_tensor(_Range(int(self._address), size), device=device)

    def release(self) -> None:
        if self._pages is None:
            return
        torch.cuda.synchronize(self._device)  # nothing may still read or write there
        checked(self._driver.cuMemUnmap(self._address, self._size))
        checked(self._driver.cuMemRelease(self._pages))
        self._pages = None

    def restore(self) -> None:
        if self._pages is not None:
            return
        torch.cuda.empty_cache()
        status, pages = self._driver.cuMemCreate(self._size, self._place, 0)
        if int(status):
            free, total = torch.cuda.mem_get_info(self._device)
            raise ValueError(
                f"the KV cache wants {self._size / 1e9:.1f} GB, but {free / 1e9:.1f} of the GPU's {total / 1e9:.1f} GB are "
                f"free ({status!r}). Set rollout.cache_tokens to less, or end what else uses the GPU."
            )
        checked(self._driver.cuMemMap(self._address, self._size, 0, pages, 0))
        access = self._driver.CUmemAccessDesc()
        access.location = self._place.location
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        checked(self._driver.cuMemSetAccess(self._address, self._size, [access], 1))
        self._pages = pages
