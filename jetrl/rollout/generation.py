"""One `generate`: requests in, steps, completions out; the host plans and launches while the device works.

    step    plan    who computes what, from what the host knows              scheduler
            launch  copies, joined samples, one forward; nothing waits       decoder (a graph) or one flat forward
            collect the results of the step before, when they have arrived   tokens, ends, the clock

Problem: a token decides what the next step does, so a host that waits for tokens and a device that waits for plans take turns.

Method: what a plan needs of a token is only that it exists. The device keeps tokens in lanes and goes on by itself; the host
fetches them a step later (`LAG`). A sequence that met an EOS is then one step further than it should: on the device it takes
part no more, and the host drops that row. Pure decode steps go through `Decoder`; a step with prompt tokens is one flat
forward of all new tokens, prefill chunks and decoding sequences alike.

On a CPU nothing runs on its own, so results are collected at once. Numerics are row-independent: none of this changes a bit.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jetrl.kernels.lanes import COLUMNS, FORCED, LENGTH, LIMIT, PROMPT, SEED, TOKEN, Lanes
from jetrl.model.context import KVCache, PagedContext, send
from jetrl.model.transformer import Trace, Transformer
from jetrl.rl.seeds import uniform
from jetrl.rollout.decoder import Decoder
from jetrl.rollout.scheduler import Plan, Scheduler
from jetrl.rollout.sequence import Sequence

LAG = 1  # steps that the host stays behind a GPU

Tracer = Callable[[list[tuple[int, int]]], Trace]


@dataclass(slots=True)
class Stats:
    """Totals of one generation. Seconds are those between results; a step with any prompt token counts as prefill."""

    steps: int = 0
    computed_tokens: int = 0  # through the model, recomputation after preemption included
    sampled_tokens: int = 0
    prefill_tokens: int = 0  # of the computed ones, those in steps with prompt tokens
    prefill_seconds: float = 0.0
    decode_tokens: int = 0  # sampled in pure decode steps
    decode_seconds: float = 0.0
    decode_steps: int = 0
    preemptions: int = 0
    peak_blocks: int = 0

    def metrics(self) -> dict[str, float]:
        """For a run's row."""
        return {
            "throughput/prefill": self.prefill_tokens / max(self.prefill_seconds, 1e-9),
            "throughput/decode": self.decode_tokens / max(self.decode_seconds, 1e-9),
            "rollout/prefill_seconds": self.prefill_seconds,
            "rollout/decode_seconds": self.decode_seconds,
            "rollout/preemptions": float(self.preemptions),
        }


@dataclass(slots=True, frozen=True)
class Machine:
    """What a generation runs on; it belongs to the engine and outlives the generation."""

    model: Transformer
    cache: KVCache
    lanes: Lanes
    decoder: Decoder
    tables: Tensor  # int32 [L + 1, most blocks], the host's copy of the lanes' tables
    eos: frozenset[int]


@dataclass(slots=True)
class _Launched:
    """A step under way."""

    sampled: list[tuple[list[Sequence], Tensor]]  # rows, and int32 [2, rows or more]: tokens, bits of log-probabilities
    arrived: torch.cuda.Event | None
    prefill_tokens: int
    decode: bool


@dataclass(slots=True)
class Generation:
    """Sequences on their way. `requests[i]` are the sequences of request i."""

    machine: Machine
    scheduler: Scheduler
    requests: list[list[Sequence]]
    temperature: float
    trace: Tracer | None = None
    lag: int = 0  # steps that results stay behind
    policy_version: int = 0
    stats: Stats = field(default_factory=Stats)
    finished: int = 0
    _under_way: deque[_Launched] = field(default_factory=deque)
    _number: dict[int, int] = field(default_factory=dict)  # of each sequence, by identity; for traces
    _clock: float = 0.0

    def __post_init__(self) -> None:
        sequences = [s for request in self.requests for s in request]
        self.scheduler.waiting.extend(sequences)
        self._number = {id(s): i for i, s in enumerate(sequences)}
        self._clock = time.perf_counter()

    @property
    def done(self) -> bool:
        """Whether every sequence has ended and every result arrived."""
        return not (self.scheduler.waiting or self.scheduler.running or self._under_way)

    def step(self) -> None:
        """Launch one step, if there is work, and collect what the host should have by now. Not for a generation that is done.

        Raises ValueError for logits that are not finite.
        """
        plan = self.scheduler.plan() if self.scheduler.waiting or self.scheduler.running else Plan()
        launched = bool(plan.work or plan.joined)
        if launched:
            self._under_way.append(self._launch(plan))
            self.stats.steps += 1
        while len(self._under_way) > (self.lag if launched else 0):
            self._collect(self._under_way.popleft())
        self.stats.preemptions, self.stats.peak_blocks = self.scheduler.preemptions, self.scheduler.pool.peak

    def abort(self, request: int, sample: int | None = None) -> None:
        """End a request, or one of its samples, with what the host has of it, for the reason "abort". Ended ones stay so."""
        chosen = self.requests[request] if sample is None else [self.requests[request][sample]]
        for sequence in chosen:
            if sequence.finish_reason is None:
                sequence.finish_reason = "abort"
                self.finished += 1
                self.scheduler.finish(sequence)

    def close(self) -> None:
        """Take every sequence out, so that all blocks are free; for a generation that is not carried to its end."""
        for request in range(len(self.requests)):
            self.abort(request)
        self._under_way.clear()

    # ---- launch

    def _launch(self, plan: Plan) -> _Launched:
        self._admit(plan.started)
        for source, target in plan.copies:
            self.machine.cache.copy_block(source, target)
        sampled = []
        if plan.joined:
            rows = [s.group.hidden for s in plan.joined if s.group.hidden is not None]
            assert len(rows) == len(plan.joined)
            sampled.append((plan.joined, self._sample(torch.stack(rows), plan.joined)))
        decode = (
            bool(plan.work)
            and self.trace is None
            and all(s.remaining == 1 and s.computed >= s.prompt_length for s, _ in plan.work)
        )
        prefill = 0
        if plan.work and decode:
            sequences = sorted((s for s, _ in plan.work), key=lambda s: -s.length)  # attention starts with the longest
            sampled.append((sequences, self._decode(sequences)))
        elif plan.work:
            prefill = sum(n for _, n in plan.work)
            sampled += self._forward(plan)
        self.stats.computed_tokens += sum(n for _, n in plan.work)
        for sequences, _ in sampled:
            for sequence in sequences:
                sequence.pending += 1
                if sequence.exhausted:  # its blocks may go: what is under way runs before whoever gets them
                    self.scheduler.finish(sequence)
        return self._fetch(sampled, prefill, decode)

    def _admit(self, started: list[Sequence]) -> None:
        """Lanes of new sequences."""
        if not started:
            return
        lanes, device = self.machine.lanes, self.machine.model.device
        state = torch.tensor([_lane_state(s) for s in started])
        lanes.state[send(torch.tensor([s.lane for s in started]), device)] = send(state, device)

    def _decode(self, sequences: list[Sequence]) -> Tensor:
        """One token each, through the decoder. A block that a sequence got for this step goes along."""
        self._table([s for s in sequences if len(s.blocks) > s.tabled + 1])
        fresh = [s.blocks[-1] if len(s.blocks) > s.tabled else -1 for s in sequences]
        for s, block in zip(sequences, fresh, strict=True):
            if block >= 0:
                self.machine.tables[s.lane, s.tabled] = block
                s.tabled += 1
            s.computed += 1
        step = torch.tensor([[s.lane for s in sequences], [s.forced_token() for s in sequences], fresh], dtype=torch.int32)
        return self.machine.decoder.run(step, self.temperature)

    def _table(self, sequences: list[Sequence]) -> None:
        """Bring the tables of sequences up to date, here and on the device."""
        if not sequences:
            return
        tables, lanes = self.machine.tables, torch.tensor([s.lane for s in sequences])
        for s in sequences:
            tables[s.lane, s.tabled : len(s.blocks)] = torch.tensor(s.blocks[s.tabled :], dtype=torch.int32)
            s.tabled = len(s.blocks)
        device = self.machine.model.device
        self.machine.lanes.table[send(lanes, device)] = send(tables[lanes], device)

    def _forward(self, plan: Plan) -> list[tuple[list[Sequence], Tensor]]:
        """One flat forward of the plan's new tokens; samples for the sequences whose last token was among them."""
        work, machine = plan.work, self.machine
        self._table([s for s, _ in work if len(s.blocks) > s.tabled])
        widest = max(len(s.blocks) for s, _ in work)
        tables = machine.tables[torch.tensor([s.lane for s, _ in work]), :widest].long()
        context = PagedContext.of(machine.cache, [n for _, n in work], [s.computed + n for s, n in work], tables)
        recorder = self.trace(self._rows(plan)) if self.trace else None
        hidden = machine.model.forward(self._tokens(plan), context, recorder)
        sampling, rows, first = [], [], 0
        for s, count in work:
            last_of_prompt = s.prompt_length - 1 - s.computed
            s.computed += count
            if 0 <= last_of_prompt < count and self.scheduler.prompt_ready(s):
                s.group.hidden = hidden[first + last_of_prompt].clone()
            if s.remaining == 0:
                sampling.append(s)
                rows.append(first + count - 1)
            first += count
        if not sampling:
            return []
        return [(sampling, self._sample(hidden[send(torch.tensor(rows), machine.model.device)], sampling))]

    def _rows(self, plan: Plan) -> list[tuple[int, int]]:
        return [(self._number[id(s)], position) for s, n in plan.work for position in range(s.computed, s.computed + n)]

    def _tokens(self, plan: Plan) -> Tensor:
        """The plan's new tokens, on the device; a pending one comes from its lane."""
        tokens = []
        for s, n in plan.work:
            known = s.tokens[s.computed : s.computed + n]
            tokens += known if len(known) == n else [*known, -1 - s.lane]
            assert len(known) >= n - 1, "only the last token can be pending"
        there = send(torch.tensor(tokens), self.machine.model.device)
        return torch.where(there < 0, self.machine.lanes.state[(-1 - there).clamp(min=0), TOKEN], there)

    def _sample(self, hidden: Tensor, sequences: list[Sequence]) -> Tensor:
        """Tokens after hidden states [R, H], booked in the lanes; see `Ops.end`."""
        model, device = self.machine.model, self.machine.model.device
        uniforms = torch.tensor([uniform(s.seed, s.length - s.prompt_length) for s in sequences], dtype=torch.float64)
        forced, lanes = [s.forced_token() for s in sequences], [s.lane for s in sequences]
        numbers = send(uniforms, device), send(torch.tensor(forced), device)
        tokens, logprobs = model.next_tokens(hidden, *numbers, self.temperature)
        return model.ops.end(self.machine.lanes, send(torch.tensor(lanes, dtype=torch.int32), device), tokens, logprobs)

    def _fetch(self, sampled: list[tuple[list[Sequence], Tensor]], prefill: int, decode: bool) -> _Launched:
        """Start the way of results to the host."""
        if self.machine.model.device.type == "cpu":
            return _Launched(sampled, None, prefill, decode)
        here = []
        for sequences, out in sampled:
            copy = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
            here.append((sequences, copy.copy_(out, non_blocking=True)))
        arrived = torch.cuda.Event()
        arrived.record()
        return _Launched(here, arrived, prefill, decode)

    # ---- collect

    def _collect(self, launched: _Launched) -> None:
        """Wait for a step's results and book them."""
        if launched.arrived is not None:
            launched.arrived.synchronize()
        before = self.stats.sampled_tokens
        for sequences, out in launched.sampled:
            tokens, logprobs = out[0].tolist(), out[1].view(torch.float32).tolist()
            for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=False):
                self._book(sequence, token, logprob)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        if launched.prefill_tokens:
            self.stats.prefill_tokens += launched.prefill_tokens
            self.stats.prefill_seconds += seconds
        else:
            self.stats.decode_tokens += self.stats.sampled_tokens - before
            self.stats.decode_seconds += seconds
            self.stats.decode_steps += launched.decode

    def _book(self, sequence: Sequence, token: int, logprob: float) -> None:
        sequence.pending -= 1
        if sequence.finish_reason is not None:
            return  # it ended at a token that was still under way when this step was planned
        if math.isnan(logprob) or math.isinf(logprob):
            raise ValueError(
                "the model's logits are not finite, so nothing can be sampled from them. Its weights hold a NaN, an infinity "
                "or values beyond BF16; load another checkpoint."
            )
        assert token >= 0, "the device ended a sequence that the host has running"
        sequence.append(token, logprob, self.machine.eos)
        self.stats.sampled_tokens += 1
        if sequence.finish_reason is not None:
            self.finished += 1
            self.scheduler.finish(sequence)


def _lane_state(s: Sequence) -> list[int]:
    """The row of a sequence that starts, see `Lanes.state`."""
    row = [0] * COLUMNS
    row[TOKEN], row[LENGTH], row[PROMPT], row[LIMIT] = s.tokens[-1], s.length, s.prompt_length, s.limit
    row[SEED] = s.seed - (1 << 64) if s.seed >= 1 << 63 else s.seed
    row[FORCED] = int(s.forced is not None)
    return row
