"""The scheduler, driven without a model over a cache that remembers what each slot holds.

A slot of the simulated cache holds the tokens up to its position, as keys and values do in the real one. Whoever reads a
slot that another sequence overwrote, or that nobody filled, is caught.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.rollout.blocks import BlockPool
from jetrl.rollout.scheduler import Plan, Scheduler
from jetrl.rollout.sequence import Group, Sequence

Slot = tuple[int, ...]


@dataclass
class Simulation:
    """Runs requests as the engine does and checks every invariant after each step."""

    blocks: int
    block_size: int
    max_sequences: int = 8
    max_batch_tokens: int = 1 << 20
    slots: dict[int, Slot] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    computed: int = 0
    lag: int = 0  # steps that results stay behind
    stops: dict[int, int] = field(default_factory=dict)  # completion length at which the sequence of a seed meets an EOS
    under_way: list[list[Sequence]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(BlockPool(self.blocks, self.block_size), self.max_sequences, self.max_batch_tokens)
        self.sequences: list[Sequence] = []

    def submit(self, prompt: list[int], lengths: list[int]) -> list[Sequence]:
        """One request: a sequence for each completion length. Sampled tokens tell sequences apart."""
        group = Group(prompt, waiting=len(lengths))
        new = [Sequence(group, len(self.sequences) + i, length, list(prompt)) for i, length in enumerate(lengths)]
        self.sequences += new
        self.scheduler.waiting.extend(new)
        return new

    def step(self) -> Plan:
        running = list(self.scheduler.running)
        plan = self.scheduler.plan() if self.scheduler.waiting or self.scheduler.running else Plan()
        self.plans.append(plan)
        self.admitted += [s for s in self.scheduler.running if s not in running and s not in self.admitted]
        self._check_budget(plan)
        for source, target in plan.copies:
            for offset in range(self.block_size):
                self.slots[target * self.block_size + offset] = self.slots.get(source * self.block_size + offset, ())
        sampling = list(plan.joined)
        for sequence, count in plan.work:  # all write before any reads, as in a forward
            for position in range(sequence.computed, sequence.computed + count):
                self.slots[self._slot(sequence, position)] = self._prefix(sequence, position)
        for sequence, count in plan.work:
            self.computed += count
            before, sequence.computed = sequence.computed, sequence.computed + count
            self._check_reads(sequence)
            if before < sequence.prompt_length <= sequence.computed:
                self.scheduler.prompt_ready(sequence)
            if sequence.remaining == 0:
                sampling.append(sequence)
        for sequence in plan.joined:
            self._check_reads(sequence)
        for sequence in sampling:
            sequence.pending += 1
            if sequence.exhausted:
                self.scheduler.finish(sequence)
        self.under_way.append(sampling)
        while len(self.under_way) > (self.lag if plan.work or plan.joined else 0):
            for sequence in self.under_way.pop(0):
                sequence.pending -= 1
                if sequence.finish_reason is None:
                    sequence.append(1000 + sequence.seed, 0.0, frozenset({1000 + sequence.seed} if self.ends(sequence) else ()))
                    if sequence.finish_reason is not None:
                        self.scheduler.finish(sequence)
        self._check_references()
        return plan

    def ends(self, sequence: Sequence) -> bool:
        """Whether an EOS comes now."""
        return len(sequence.completion) + 1 == self.stops.get(sequence.seed, 0)

    def _prefix(self, sequence: Sequence, position: int) -> Slot:
        """What a slot at `position` holds; the host may not have the last token yet."""
        return tuple([*sequence.tokens, *[1000 + sequence.seed] * sequence.pending][: position + 1])

    def run(self) -> None:
        for _ in range(100 + 20 * sum(len(s.tokens) + s.max_tokens for s in self.sequences)):
            if not (self.scheduler.waiting or self.scheduler.running or self.under_way):
                break
            self.step()
        for s in self.sequences:
            stopped = 0 < self.stops.get(s.seed, 0) <= s.max_tokens
            assert s.finish_reason == ("stop" if stopped else "length")
            assert len(s.completion) == (self.stops[s.seed] if stopped else s.max_tokens)
            assert not s.pending
        self.scheduler.prefixes.clear()
        assert self.scheduler.pool.free == self.blocks

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _check_reads(self, sequence: Sequence) -> None:
        for position in range(sequence.computed):
            assert self.slots[self._slot(sequence, position)] == self._prefix(sequence, position)

    def _check_budget(self, plan: Plan) -> None:
        assert sum(count for _, count in plan.work) <= self.max_batch_tokens
        assert all(count > 0 for _, count in plan.work)
        assert len(self.scheduler.running) <= self.max_sequences
        taking_part = [s for s, _ in plan.work] + plan.joined
        assert len({id(s) for s in taking_part}) == len(taking_part)
        assert all(s in self.scheduler.running for s in taking_part)

    def _check_references(self) -> None:
        groups = {id(s.group): s.group for s in self.sequences}.values()
        kept = [block for _, block in self.scheduler.prefixes._kept.values()]
        holders = [*(s.blocks for s in self.scheduler.running), *(g.blocks for g in groups), kept]
        counted = Counter(block for blocks in holders for block in blocks)
        pool = self.scheduler.pool
        assert [counted[b] for b in range(self.blocks)] == pool._references
        assert sorted([*counted, *pool._free]) == list(range(self.blocks))
        for group in groups:
            waiting = sum(s.group is group for s in self.scheduler.waiting)
            assert group.waiting == waiting
            assert waiting or not group.blocks, "a prompt is kept for nobody"


def work_of(plan: Plan, *sequences: Sequence) -> list[int]:
    counts = {id(s): n for s, n in plan.work}
    return [counts.get(id(s), 0) for s in sequences]


def test_the_budget_is_shared_in_the_order_of_admission() -> None:
    sim = Simulation(20, 4, max_batch_tokens=6)
    (a,) = sim.submit([1] * 4, [3])
    (b,) = sim.submit([2] * 9, [3])
    (c,) = sim.submit([3] * 2, [3])
    assert work_of(sim.step(), a, b, c) == [4, 2, 0]
    assert work_of(sim.step(), a, b, c) == [1, 5, 0]
    assert work_of(sim.step(), a, b, c) == [1, 2, 2]
    sim.run()
    assert sim.admitted == [a, b, c]


def test_max_sequences_is_respected_and_who_waits_comes_next() -> None:
    sim = Simulation(20, 4, max_sequences=2)
    sequences = [sim.submit([i], [2])[0] for i in range(5)]
    sim.run()
    assert max(len(p.work) for p in sim.plans) == 2
    assert sim.admitted == sequences


@pytest.mark.parametrize(("prompt", "size"), [(1, 4), (3, 4), (4, 4), (5, 4), (8, 4), (7, 1), (5, 16)])
def test_a_group_computes_its_prompt_once_and_copies_only_the_partial_block(prompt: int, size: int) -> None:
    sim = Simulation(100, size, max_batch_tokens=3)
    group = sim.submit(list(range(prompt)), [4] * 5)
    sim.run()
    assert sim.computed == prompt + 5 * 3  # the last token of a completion is never computed
    assert [s for p in sim.plans for s in p.joined] == group[1:]
    copies = [c for p in sim.plans for c in p.copies]
    assert len(copies) == (4 if prompt % size else 0)
    assert len({source for source, _ in copies}) <= 1


def test_members_of_a_group_share_full_blocks() -> None:
    sim = Simulation(100, 4)
    a, b = sim.submit(list(range(10)), [4, 4])
    sim.step()
    sim.step()
    assert a.blocks[:2] == b.blocks[:2]
    assert a.blocks[2] != b.blocks[2]
    assert sim.scheduler.pool.peak == 4


def test_the_prompt_is_computed_by_one_member_while_others_pass() -> None:
    sim = Simulation(100, 4, max_batch_tokens=4)
    leader, follower = sim.submit(list(range(10)), [2, 2])
    (other,) = sim.submit([77], [2])
    assert work_of(sim.step(), leader, follower, other) == [4, 0, 0]  # no budget is left
    assert work_of(sim.step(), leader, follower, other) == [4, 0, 0]
    assert work_of(sim.step(), leader, follower, other) == [2, 0, 1]  # the follower waits; the one behind it need not
    assert sim.scheduler.waiting[0] is follower
    assert sim.step().joined == [follower]


def test_preemption_takes_the_last_one_and_it_comes_back_first() -> None:
    sim = Simulation(6, 2, max_sequences=2)
    (a,) = sim.submit([1] * 3, [6])
    (b,) = sim.submit([2] * 3, [6])
    (c,) = sim.submit([3], [1])
    sim.step()
    assert (len(a.blocks), len(b.blocks), len(c.blocks)) == (2, 2, 0)
    while not sim.scheduler.preemptions:
        sim.step()
    assert (a.preempted, b.preempted) == (0, 1)
    assert list(sim.scheduler.waiting) == [b, c]
    assert b.blocks == []
    assert b.computed == 0
    tokens = list(b.tokens)
    sim.run()
    assert b.tokens[: len(tokens)] == tokens
    assert a.preempted == 0


def test_the_one_that_needs_a_block_is_preempted_itself_if_it_is_last() -> None:
    sim = Simulation(4, 2)
    (a,) = sim.submit([1] * 4, [3])
    (b,) = sim.submit([2] * 2, [4])
    sim.run()
    assert (a.preempted, b.preempted) == (0, 1)


def test_a_kept_prompt_is_dropped_before_anything_is_preempted() -> None:
    sim = Simulation(4, 2)
    (x,) = sim.submit([9] * 2, [4])
    a, b = sim.submit([1] * 4, [1, 1])
    sim.step()
    assert a.finish_reason == "length"
    sim.step()
    sim.step()
    assert len(b.group.blocks) == 2  # x holds the other two; b would need a third one
    sim.step()
    assert (x.computed, len(x.blocks), b.group.blocks) == (5, 0, [])  # x took a block, and has finished
    sim.run()
    assert sim.scheduler.preemptions == 0
    assert sim.computed == (2 + 3) + 4 + 4  # b computed the prompt again


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize(("prompt", "length"), [(1, 1), (17, 1), (16, 1), (5, 12), (16, 16), (15, 2)])
def test_the_smallest_legal_cache_never_locks(members: int, size: int, prompt: int, length: int) -> None:
    sim = Simulation(-(-(prompt + length) // size), size)
    sim.submit(list(range(prompt)), [length] * members)
    sim.submit(list(range(prompt)), [1])
    sim.run()


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(1, 15), min_size=1, max_size=4)), min_size=1, max_size=5
    ),
    size=st.sampled_from([1, 2, 3, 4, 8]),
    spare=st.sampled_from([*range(13), 500]),
    max_sequences=st.integers(1, 6),
    budget=st.sampled_from([1, 2, 5, 16, 1 << 20]),
    lag=st.integers(0, 2),
    stops=st.dictionaries(st.integers(0, 8), st.integers(1, 9)),
)
def test_any_load_finishes_and_no_block_is_used_twice(
    requests: list[tuple[int, list[int]]],
    size: int,
    spare: int,
    max_sequences: int,
    budget: int,
    lag: int,
    stops: dict[int, int],
) -> None:
    longest = max(prompt + max(lengths) for prompt, lengths in requests)
    sim = Simulation(-(-longest // size) + spare, size, max_sequences, budget, lag=lag, stops=stops if lag else {})
    for number, (prompt, lengths) in enumerate(requests):
        sim.submit([number] * prompt, lengths)
    sim.run()
    if spare == 500 and not sim.stops:  # room for all: nothing is computed twice
        assert sim.computed == sum(prompt + sum(lengths) - len(lengths) for prompt, lengths in requests)
