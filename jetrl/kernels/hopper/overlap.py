"""Kernels that are started while the one before them still runs: programmatic dependent launch.

Problem: a decode step is some four hundred kernels of a few microseconds. Between two of them the GPU is idle for most of one:
the first has to drain, and the next has to be started, fetch its parameters and set up its barriers.

Method: a kernel launched with `OPTIONS` may start as soon as every program of the one before has called `take_turn` or is done.
It calls it too, before it reads or writes anything; the call returns when the kernel before is complete and its results are
visible. So no more than two kernels are under way, and what a kernel sees is what it would see without overlap: this changes
speed, never bits. DeepGEMM's kernels wait likewise (`deep_gemm.set_pdl`).

Rule: a kernel that is launched with `OPTIONS` calls `take_turn` in every program, ahead of its first load or store; a
test reads that in the compiler's output. One that did not wait would also break the wait of the kernel after it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OPTIONS = {"launch_pdl": True}  # of a launch

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # there, one kernel follows the other


@triton.jit
def take_turn():
    """Return when what earlier kernels wrote is there; the next kernel may start, and wait in its turn."""
    if not _INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()
