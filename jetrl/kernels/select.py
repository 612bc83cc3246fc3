"""Which `Ops` a device gets. Chosen once, from the device and what is installed, never from the size of a batch."""

from __future__ import annotations

import logging

import torch

from jetrl.kernels.cpu import CpuOps
from jetrl.kernels.ops import Ops

log = logging.getLogger("jetrl")


def device_of(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means: `auto` is a Hopper GPU whose kernels can run here, else the CPU.

    Raises ValueError for `cuda` where the kernels cannot run.
    """
    why_not = missing()
    if name == "cuda" and why_not:
        raise ValueError(f"device is 'cuda', but {why_not}. Use device=cpu.")
    if name == "auto" and why_not and torch.cuda.is_available():
        log.warning("running on the CPU: %s", why_not)
    return torch.device("cpu" if name == "cpu" or why_not else "cuda")


def missing() -> str:
    """Why the GPU kernels cannot run here; empty where they can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"the GPU has compute capability {major}.{minor}; FP8 block products with wgmma need a Hopper GPU, 9.0"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed; pip install 'jetrl[hopper]'"
    return ""


def ops_for(device: torch.device) -> Ops:
    """The operators of a device. Raises ValueError, saying why, where there are none."""
    if device.type == "cpu":
        return CpuOps()
    if device.type != "cuda":
        raise ValueError(f"device is {device.type!r}; wanted 'cpu' or 'cuda' (a Hopper GPU)")
    device_of("cuda")
    from jetrl.kernels.hopper.ops import HopperOps

    return HopperOps(device)
