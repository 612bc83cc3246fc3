"""Who computes what in the next engine step: continuous batching with chunked prefill and preemption.

A step has a budget of tokens. Running sequences come first, in the order in which they were admitted: a decoding one takes
one token, one that is still prefilling takes what the budget leaves. Then waiting sequences are admitted while blocks
and budget last. The first sequence of a group prefills the prompt; the others join it: they share the prompt's full
blocks, copy the last partial one, and start by sampling from the prompt's hidden state.

When blocks run out, kept prefixes that nobody uses are given up first, then prompt blocks kept for sequences that still wait,
then the sequence admitted last is preempted: its blocks go, its tokens stay, and later it is computed anew. Row-independent
numerics make that, and any other schedule, give the same bits.

The device runs behind: a plan may be made while the tokens of the last one are still pending. All that a plan needs is how many
tokens there are, which the host knows but for sequences that ended early; and a preempted sequence starts again only when the
host has all its tokens. Blocks can be given away while the device still works on them: it does things in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from jetrl.rollout.blocks import BlockPool, Prefixes
from jetrl.rollout.sequence import Sequence


@dataclass(slots=True)
class Plan:
    """One engine step."""

    started: list[Sequence] = field(default_factory=list)  # admitted in this step: they have a lane now
    work: list[tuple[Sequence, int]] = field(default_factory=list)  # sequence, tokens to compute now
    joined: list[Sequence] = field(default_factory=list)  # sample from their group's hidden state, nothing to compute
    copies: list[tuple[int, int]] = field(default_factory=list)  # source block, target block


class Scheduler:
    """Waiting and running sequences over a pool of blocks."""

    def __init__(self, pool: BlockPool, max_sequences: int, max_batch_tokens: int, prefixes: Prefixes | None = None) -> None:
        self.pool, self.max_sequences, self.max_batch_tokens = pool, max_sequences, max_batch_tokens
        self.prefixes = Prefixes(pool) if prefixes is None else prefixes  # an empty one is false
        self._lanes = list(range(max_sequences - 1, -1, -1))  # free ones
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def plan(self) -> Plan:
        """Choose the next step's work, and take the blocks that it needs. Empty if all that is left has tokens pending."""
        plan, budget, index = Plan(), self.max_batch_tokens, 0
        # Preemption takes sequences from the end of `running`, so those already in the plan keep their blocks.
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            tokens = min(sequence.remaining, budget)
            if self._reserve(sequence, sequence.computed + tokens):
                plan.work.append((sequence, tokens))
                budget -= tokens
            index += 1
        self._admit(plan, budget)
        assert plan.work or plan.joined or any(s.pending for s in self.waiting), "a step without work"
        return plan

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; nothing happens if it is out already."""
        if sequence in self.running:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            sequence.group.waiting -= 1
        if sequence.group.waiting == 0:
            self.pool.release(sequence.group.blocks)

    def prompt_ready(self, sequence: Sequence) -> bool:
        """The prompt of `sequence` is now cached. Keeps its blocks if others of the group wait, and says whether it did."""
        group = sequence.group
        group.prefilling = False
        self.prefixes.keep(group.prompt, sequence.blocks)
        if group.waiting == 0 or group.blocks:
            return False
        group.blocks = self.pool.share(sequence.blocks[: self.pool.needed(len(group.prompt))])
        return True

    def _admit(self, plan: Plan, budget: int) -> None:
        passed_over: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_sequences:
            if self.waiting[0].group.prefilling:
                passed_over.append(self.waiting.popleft())
                continue
            # It still waits while this is decided: its own group's kept prompt may have to be dropped for it.
            if self.waiting[0].pending or not self._can_start(self.waiting[0], budget):
                break
            budget -= self._start(self.waiting.popleft(), plan, budget)
        self.waiting.extendleft(reversed(passed_over))

    def _can_start(self, sequence: Sequence, budget: int) -> bool:
        joins = bool(sequence.group.blocks)
        to_compute = len(sequence.tokens) - (sequence.prompt_length if joins else 0)
        if to_compute > 0 and budget == 0:
            return False
        shared = sequence.prompt_length // self.pool.block_size if joins else len(self.prefixes.find(sequence.group.prompt))
        missing = self.pool.needed(len(sequence.tokens) + 1) - shared - self.pool.free
        if missing > 0 and (self.prefixes.give_up(missing) or (not self.running and self._drop_kept_prompts())):
            return self._can_start(sequence, budget)
        return missing <= 0

    def _start(self, sequence: Sequence, plan: Plan, budget: int) -> int:
        """Admit a sequence; returns the tokens of the budget that it takes."""
        group = sequence.group
        group.waiting -= 1
        self.running.append(sequence)
        sequence.lane, sequence.tabled = self._lanes.pop(), 0
        plan.started.append(sequence)
        if group.blocks:
            self._join(sequence, plan)
        else:
            group.prefilling = True
            sequence.blocks = self.pool.share(self.prefixes.find(group.prompt))
            sequence.computed = len(sequence.blocks) * self.pool.block_size
        tokens = min(sequence.remaining, budget)
        if tokens == 0:
            plan.joined.append(sequence)
            return 0
        reserved = self._reserve(sequence, sequence.computed + tokens)
        assert reserved, "admission counted the blocks"
        plan.work.append((sequence, tokens))
        return tokens

    def _join(self, sequence: Sequence, plan: Plan) -> None:
        """Share the group's full prompt blocks and copy the partial one, which the sequence will write to."""
        group, size = sequence.group, self.pool.block_size
        full, rest = divmod(len(group.prompt), size)
        sequence.blocks = self.pool.share(group.blocks[:full])
        if rest:
            sequence.blocks.append(self.pool.take())
            plan.copies.append((group.blocks[full], sequence.blocks[-1]))
        sequence.computed = len(group.prompt)
        if group.waiting == 0:
            self.pool.release(group.blocks)

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence blocks for its first `tokens` tokens. False if it was preempted itself."""
        while (missing := self.pool.needed(tokens) - len(sequence.blocks)) > self.pool.free:
            if self.prefixes.give_up(missing - self.pool.free) or self._drop_kept_prompts():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += [self.pool.take() for _ in range(missing)]
        return True

    def _drop_kept_prompts(self) -> bool:
        groups = [s.group for s in self.waiting if s.group.blocks]
        for group in groups:
            self.pool.release(group.blocks)
        return bool(groups)

    def _stop(self, sequence: Sequence) -> None:
        """Out of the running ones; blocks and lane are free."""
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        self._lanes.append(sequence.lane)
        sequence.lane = -1
        if sequence.computed < sequence.prompt_length:
            sequence.group.prefilling = False

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        sequence.computed = 0
        sequence.preempted += 1
        sequence.group.waiting += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)
