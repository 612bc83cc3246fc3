"""Where the GPU's time goes: the kernels of a piece of work, and the gaps between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from jetrl.bench.table import Row
from jetrl.bench.timing import Call

KERNELS = 20  # lines of the table
LONG_GAP = 10.0  # us; within a graph kernels follow each other closer than that, so a longer gap waits for the host


@dataclass(slots=True, frozen=True)
class Profile:
    """What ran on the GPU in `runs` runs of a work, one after the other."""

    kernels: dict[str, tuple[int, float]]  # launches and us, by name
    gaps: list[float]  # us in which nothing ran, between the first kernel and the last
    runs: int

    @property
    def busy(self) -> float:
        """Share of the time in which a kernel ran."""
        time = sum(time for _, time in self.kernels.values())
        return time / max(time + sum(self.gaps), 1e-9)


def gaps_between(spans: Iterable[tuple[float, float]]) -> list[float]:
    """Lengths of what no span (start, end) covers; spans may overlap."""
    gaps, until = [], None
    for start, end in sorted(spans):
        if until is not None and start > until:
            gaps.append(start - until)
        until = end if until is None else max(until, end)
    return gaps


def profiled(work: Call, runs: int) -> Profile:
    """Run once, and then `runs` times under the profiler."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            work()
        torch.cuda.synchronize()
    seen = [e for e in profiler.key_averages() if e.device_type.name == "CUDA"]
    kernels = {e.key: (e.count, e.self_device_time_total) for e in seen}
    ranges = [e.time_range for e in profiler.events() or [] if e.device_type.name == "CUDA"]
    return Profile(kernels, gaps_between((r.start, r.end) for r in ranges), runs)


def kernel_rows(kernels: dict[str, tuple[int, float]], runs: int) -> list[Row]:
    """The longest kernels. kernels: launches and us in `runs` runs, by name."""
    everything = sum(time for _, time in kernels.values())
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:KERNELS]
    rows = [
        Row(name.removeprefix("void ")[:80], time / runs, extra={"launches": f"{n / runs:g}", "%": 100 * time / everything})
        for name, (n, time) in longest
    ]
    return [*rows, Row("sum of all kernels", everything / runs, extra={"%": 100.0})] if rows else []


def gap_rows(profile: Profile) -> list[Row]:
    """Time without a kernel, and what of it waited for the host; shares are of the kernels' time, as in `kernel_rows`."""
    everything = sum(time for _, time in profile.kernels.values())
    rows = []
    for name, gaps in (
        ("nothing runs", profile.gaps),
        (f"of it in gaps above {LONG_GAP:g} us: the host is late", [g for g in profile.gaps if g > LONG_GAP]),
    ):
        share = 100 * sum(gaps) / max(everything, 1e-9)
        rows.append(Row(name, sum(gaps) / profile.runs, extra={"launches": f"{len(gaps) / profile.runs:g}", "%": share}))
    return rows
