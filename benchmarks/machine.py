"""What the machine can do at best: facts, and the two rates that bound exact arithmetic on a CPU.

Exact flows multiply in float64, so the bounds are the float64 rate of the BLAS on the model's own shapes, and the rate at
which float64 weights of that size can be read. Both are measured here, alone, in the same run as what they bound.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jetrl
from jetrl.model.checkpoint import parameter_shapes
from jetrl.model.config import ModelConfig, linear_names


def best_seconds(work: Callable[[], object], repeats: int = 5, at_least: float = 0.02) -> float:
    """Shortest wall time of one call, s. Calls are grouped so that each measurement takes `at_least` seconds."""
    work()
    start = time.perf_counter()
    work()
    calls = 1 + int(at_least / max(time.perf_counter() - start, 1e-9))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's own name for itself, as well as it can be had."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.is_file() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def facts(threads: int) -> dict[str, Any]:
    """Date, processor, cores, versions and the command, for a result file. Folders in the command lose their path."""
    command = [Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:]]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *command]),
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": threads,
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version()}
        | {"jetrl": jetrl.__version__}
        | {n: metadata.version(n) for n in ("torch", "transformers")},
    }


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shape [N, K] of every weight that a token is multiplied with, the head included."""
    shapes = parameter_shapes(config)
    head = "embed" if config.tie_word_embeddings else "head"
    return {name: (shapes[name][0], shapes[name][1]) for name in [*linear_names(config), head]}


def _gemm_seconds(rows: int, shape: tuple[int, int], backward: bool) -> float:
    """Time of x W^T for `rows` rows in float64; with `backward`, of dy W and dy^T x as well."""
    n, k = shape
    x, w, dy = (torch.randn(s, dtype=torch.float64) for s in ((rows, k), (n, k), (rows, n)))
    operands = [(x, w.t()), (dy, w), (dy.t(), x)] if backward else [(x, w.t())]
    return sum(product_seconds(*pair) for pair in operands)


def product_seconds(left: Tensor, right: Tensor) -> float:
    """Shortest wall time of a product into memory that is already there, s."""
    out = left @ right
    return best_seconds(lambda: torch.mm(left, right, out=out))


def gemm_limit(config: ModelConfig, rows: int, head_rows: int, backward: bool) -> dict[str, float]:
    """Best tokens/s if nothing but float64 matrix products took time, and their GFLOP/s.

    `rows` tokens pass the layers together and `head_rows` of them the head.
    """
    shapes = matrices(config)
    passes = [(head_rows if name in ("embed", "head") else rows, shape) for name, shape in shapes.items()]
    one = {p: _gemm_seconds(*p, backward) for p in set(passes)}
    seconds = sum(one[p] for p in passes)
    operations = sum(2 * m * n * k for m, (n, k) in passes) * (3 if backward else 1)
    return {"tokens_per_s": rows / seconds, "gflops": operations / seconds / 1e9}


def bandwidth_limit(config: ModelConfig, rows: int) -> dict[str, float]:
    """Best tokens/s if nothing but reading the float64 weights once for `rows` tokens took time, and the GB/s."""
    weights = sum(n * k for n, k in matrices(config).values())
    memory = torch.ones(weights, dtype=torch.float64)
    rate = 8 * weights / best_seconds(memory.sum)
    return {"tokens_per_s": rows * rate / (8 * weights), "gb_per_s": rate / 1e9, "weights_gb": 8 * weights / 1e9}
