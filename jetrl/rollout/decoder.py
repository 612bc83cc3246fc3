"""Decode steps: one new token of each running sequence, on a GPU as one launch of a captured CUDA graph.

Problem: a step of a large model is some four hundred kernels of a few microseconds each. Launched one by one from Python they
take longer than they run; and a host that looks at each token before it starts the next step leaves the GPU waiting.

Method: everything that a step reads and writes is on the device, in lanes (`kernels.lanes`). The step is captured once for each
size of a ladder and temperature, at first use, with padding rows that belong to nobody. A replay gets int32 [3, rows] from the
host (who takes part, forced tokens, new blocks) and leaves int32 [2, rows] (tokens, log-probabilities) for it to fetch
whenever it likes. Weights are published in place and the cache keeps its address, so a graph serves for the whole run.

On a CPU the same function runs as it is. Given up: rows of padding, less than a fifth of a step beyond eight sequences;
some ten graphs' memory, which they share.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from jetrl.kernels.lanes import Lanes
from jetrl.model.context import KVCache, PagedContext
from jetrl.model.transformer import Transformer


def ladder(most: int) -> list[int]:
    """Sizes of a step that get a graph: 1, 2, 4, 8, then four to each doubling, up to `most`."""
    sizes = [1, 2, 4]
    base = 8
    while base < most:
        sizes += [base + base // 4 * i for i in range(4)]
        base *= 2
    return [*(s for s in sizes if s < most), most]


class Decoder:
    """Runs decode steps over lanes."""

    def __init__(self, model: Transformer, cache: KVCache, lanes: Lanes, most: int) -> None:
        """`most`: sequences of the largest step."""
        self._model, self._cache, self._lanes = model, cache, lanes
        self._captures = model.device.type == "cuda"
        self._sizes = ladder(most)
        self._nobody = lanes.state.shape[0] - 1
        self._step = torch.empty(3, most, dtype=torch.int32, device=model.device)
        self._graphs: dict[tuple[int, float], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None

    def run(self, step: Tensor, temperature: float) -> Tensor:
        """One token for each row of `step`, int32 [3, R] on the CPU; see `kernels.lanes`.

        Returns int32 [2, R or more] on the device, as `Ops.end` does; the next call overwrites it.
        """
        if not self._captures:
            return self._body(step, temperature)
        rows = self._sizes[bisect_left(self._sizes, step.shape[1])]
        if (rows, temperature) not in self._graphs:
            self._graphs[rows, temperature] = self._capture(rows, temperature)
        graph, out = self._graphs[rows, temperature]
        padded = self._idle(rows)
        padded[:, : step.shape[1]] = step
        self._step[:, :rows].copy_(padded.pin_memory(), non_blocking=True)
        graph.replay()
        return out

    def _idle(self, rows: int) -> Tensor:
        """A step in which nobody takes part."""
        step = torch.full((3, rows), -1, dtype=torch.int32)
        step[0] = self._nobody
        return step

    def _capture(self, rows: int, temperature: float) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        step = self._step[:, :rows]
        step.copy_(self._idle(rows))
        self._body(step, temperature)  # compiles what is not compiled yet, which a capture must not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = self._body(step, temperature)
        return graph, out

    def _body(self, step: Tensor, temperature: float) -> Tensor:
        model, lane = self._model, step[0]
        inputs = model.ops.begin(self._lanes, step)
        context = PagedContext.of_lanes(self._cache, self._lanes, lane, inputs)
        hidden = model.forward(inputs.tokens, context)
        tokens, logprobs = model.next_tokens(hidden, inputs.uniforms, inputs.forced, temperature)
        return model.ops.end(self._lanes, lane, tokens, logprobs)
