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


def one_after_the_other(spans: Iterable[tuple[str, float, float]]) -> tuple[dict[str, tuple[int, float]], list[float]]:
    """Number and time of spans (name, start, end) by name, and the lengths of what no span covers.

    Time in which several run is that of the first: a kernel that starts early does nothing but wait for the one before.
    """
    times: dict[str, tuple[int, float]] = {}
    gaps, until = [], None
    for name, start, end in sorted(spans, key=lambda span: span[1:]):
        if until is not None and start > until:
            gaps.append(start - until)
        count, time = times.get(name, (0, 0.0))
        times[name] = count + 1, time + max(end - (start if until is None else max(start, until)), 0.0)
        until = end if until is None else max(until, end)
    return times, gaps


def profiled(work: Call, runs: int) -> Profile:
    """Run once, and then `runs` times under the profiler."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            work()
        torch.cuda.synchronize()
    seen = [e for e in profiler.events() or [] if e.device_type.name == "CUDA"]
    kernels, gaps = one_after_the_other((e.name, e.time_range.start, e.time_range.end) for e in seen)
    return Profile(kernels, gaps, runs)


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
