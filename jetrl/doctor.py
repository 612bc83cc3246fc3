"""What this machine has and what will run where."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

_PACKAGES = [
    "jetrl",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "triton",
    "sgl-deep-gemm",
    "math-verify",
    "reasoning-gym",
    "gguf",
    "pyarrow",
    "datasets",
    "tensorboard",
    "wandb",
    "trackio",
    "ray",
    "vllm",
]


def machine() -> list[tuple[str, str]]:
    """Processor, memory and accelerator."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    rows = [
        ("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
        (
            "CPU",
            f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads, {torch.backends.cpu.get_cpu_capability()}",
        ),
        ("memory", f"{memory:.1f} GB"),
    ]
    if not torch.cuda.is_available():
        return [*rows, ("GPU", "none that torch sees")]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        rows.append((f"GPU {i}", f"{p.name}, compute {p.major}.{p.minor}, {p.total_memory / 1e9:.0f} GB"))
    return rows


def packages() -> list[tuple[str, str]]:
    """Versions of what jetrl uses, optional ones included."""
    rows: list[tuple[str, str]] = []
    for name in _PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def where_things_run() -> list[tuple[str, str]]:
    """Which implementation each operator uses on this machine, and why."""
    reason = "" if not torch.cuda.is_available() else " (a GPU is present; its kernels are not part of this version)"
    return [
        ("device", "cpu" + reason),
        ("FP8 linear forward", "float64 block products of E4M3 codes, exact"),
        ("FP8 linear gradients", "float64 products of dequantised values"),
        ("BF16 linear, attention, lm_head", "float64 on grids where every sum is exact"),
        ("norms, rotary, SiLU-mul", "torch, one rounding to BF16"),
        ("sampling", "integer inversion with a counter-based generator a sample"),
    ]
