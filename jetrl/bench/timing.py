"""Time on the GPU, and what the GPU can do at best.

Problem: small products take less time than their launch, fit into the 60 MB L2 cache, and run slower or faster with the
clock, which follows what ran before and the bits of the data.

Method: CUDA events; where a side is small, both sides are captured in CUDA graphs of many calls. Calls go round through
input sets of together more than `SPREAD` bytes, so that weights come from memory. Data is Gaussian. The sides take turns;
the median counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from jetrl.kernels.select import missing

Call = Callable[[], object]

SPREAD = 200_000_000  # bytes that inputs must exceed, three times the L2 cache
MOST_SETS = 256
GRAPH_CALLS = 16  # at least so many calls in a graph, so that its own start does not count
REPEATS = 21
COPIED, PRODUCT = 1 << 30, 8192  # elements of the copy, size of the square product that give the ceilings

BF16_NOMINAL, FP8_NOMINAL = 989e12, 1979e12  # dense FLOP/s of H100 and H200 (SXM) by their data sheet


@dataclass(slots=True, frozen=True)
class Ceilings:
    """What bounds a row of a table."""

    copy: float  # bytes/s, read and written by a large copy, measured
    bf16: float  # FLOP/s of cuBLAS on a large product, measured
    bf16_nominal: float = BF16_NOMINAL
    fp8_nominal: float = FP8_NOMINAL

    def roofline(self, size: float, bf16: float = 0.0, fp8: float = 0.0) -> float:
        """Least time, us: `size` bytes at the copy's rate, or the operations at the nominal peaks, whichever is longer."""
        return 1e6 * max(size / self.copy, bf16 / self.bf16_nominal + fp8 / self.fp8_nominal)


def require_gpu() -> None:
    """Raise ValueError unless our kernels can run here."""
    why_not = missing()
    if why_not:
        raise ValueError(f"jetrl bench compares FP8 with BF16 on a Hopper GPU (compute capability 9.0), but {why_not}")


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    """Gaussian BF16."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda").mul_(scale)


def rotation(size: float) -> int:
    """Input sets of `size` bytes each that together do not fit into the cache."""
    return min(MOST_SETS, max(1, -(-SPREAD // max(1, int(size)))))


def _captured(calls: Sequence[Call]) -> tuple[Call, int]:
    """A replay of a graph that makes each call, and how many it makes."""
    for call in calls:
        call()  # compiles, and makes what is kept
    torch.cuda.synchronize()
    rounds = -(-GRAPH_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in list(calls) * rounds:
            call()
    return graph.replay, rounds * len(calls)


def _in_turn(calls: Sequence[Call]) -> tuple[Call, int]:
    turn = cycle(calls)
    return lambda: next(turn)(), 1


def measure(sides: Mapping[str, Sequence[Call]], graph: bool) -> dict[str, float]:
    """Median time of one call of each side, us. A side is the same job on one or more input sets."""
    runs = {name: (_captured if graph else _in_turn)(calls) for name, calls in sides.items()}
    for run, _ in [*runs.values()] * 2:
        run()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # about 1 ms in which the CPU gets ahead, so that no launch is waited for
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, (run, _) in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: 1e3 * statistics.median(s.elapsed_time(e) for s, e in events[name]) / runs[name][1] for name in runs}


def peak_bytes(call: Call) -> int:
    """Memory that a call takes besides what was there before, bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_ceilings() -> Ceilings:
    """The rates of a copy of 2 GB, and of BF16 cuBLAS on a product of two square random matrices."""
    source = noise(COPIED)
    there = torch.empty_like(source)
    a, b = noise(PRODUCT, PRODUCT), noise(PRODUCT, PRODUCT)
    times = measure({"copy": [lambda: there.copy_(source)], "product": [lambda: torch.mm(a, b)]}, graph=False)
    return Ceilings(4e6 * COPIED / times["copy"], 2e6 * PRODUCT**3 / times["product"])
