"""Lanes: a step's inputs and ends against a model in plain Python, and the uniform numbers of `rl.seeds`.

`require_the_reference` holds another implementation against this one, byte by byte: the GPU's, in Triton's interpreter
(test_hopper_lanes.py) and on a GPU (gpu/test_engine.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jetrl.kernels import lanes as reference
from jetrl.kernels.lanes import COLUMNS, DONE, FORCED, LENGTH, LIMIT, PROMPT, SEED, TOKEN, DecodeInputs, Lanes
from jetrl.rl import seeds

SIZE, BLOCKS, SPARE = 4, 6, 4000
EOS_IDS = [(), (7,), (3, 5, 11)]
Begin = Callable[[Lanes, Tensor], DecodeInputs]
End = Callable[[Lanes, Tensor, Tensor, Tensor], Tensor]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bytes, NaN included."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed


def random_lanes(rng: random.Random, count: int, eos: tuple[int, ...]) -> Lanes:
    """`count` lanes and nobody's: a third done, a third forced, half of the seeds 2^63 or more, some at their last token."""
    lanes = Lanes.empty(count, BLOCKS, list(eos), SIZE, SPARE, torch.device("cpu"))
    for lane in range(count):
        prompt = rng.randint(1, SIZE * BLOCKS - 8)
        length = rng.randint(prompt, SIZE * BLOCKS - 4)  # room for four steps
        row = lanes.state[lane]
        row[TOKEN], row[LENGTH], row[PROMPT] = rng.randrange(20), length, prompt
        row[LIMIT] = length - prompt + rng.randint(1, 3)
        row[SEED] = signed(rng.getrandbits(63) | rng.randrange(2) << 63)
        row[DONE], row[FORCED] = rng.random() < 0.3, rng.random() < 0.3
    lanes.table[:] = torch.tensor([[rng.randrange(900) for _ in range(BLOCKS)] for _ in range(count + 1)])
    return lanes


def random_step(rng: random.Random, count: int, rows: int, padding: int) -> Tensor:
    """int32 [3, rows + padding]: lanes in any order, every second one with a new block or a forced token; then nobody.

    Rows lie in a wider tensor, as those of a step do in the buffer that graphs read.
    """
    step = torch.full((3, rows + padding + 5), -1, dtype=torch.int32)[:, : rows + padding]
    step[0] = count
    step[0, :rows] = torch.tensor(rng.sample(range(count), rows))
    for row in range(rows):
        step[1, row] = rng.choice([-1, rng.randrange(20)])
        step[2, row] = rng.choice([-1, rng.randrange(900)])
    return step


def moved(lanes: Lanes, device: torch.device | str) -> Lanes:
    """A copy on a device."""
    return replace(lanes, **{name: getattr(lanes, name).clone().to(device) for name in ("state", "table", "eos")})


def require_the_reference(begin: Begin, end: End, device: str = "cpu") -> None:
    """The same bytes in every output and in the lanes, over several steps of batches that fill programs or do not."""
    for case, (count, rows, padding) in enumerate([(1, 1, 0), (9, 5, 3), (80, 64, 0), (80, 63, 1), (200, 130, 20), (3, 0, 2)]):
        rng = random.Random(case)
        wanted = random_lanes(rng, count, EOS_IDS[case % 3])
        seen = moved(wanted, device)
        for _ in range(3):
            step = random_step(rng, count, rows, padding)
            takers = wanted.state[step[0, :rows].long(), DONE] == 0
            there = step._base.to(device)[:, : rows + padding]
            right, mine = reference.begin(wanted, step), begin(seen, there)
            for name in ("tokens", "positions", "slots", "uniforms", "forced"):
                assert same_bits(getattr(mine, name).cpu(), getattr(right, name)), (name, case)
            here = step[0, :rows].long()  # others' entries of what is by lane mean nothing
            for name in ("query_start", "query_length", "context"):
                assert same_bits(getattr(mine, name).cpu()[here], getattr(right, name)[here]), (name, case)
            assert not padding or int(mine.query_length[count]) == int(mine.context[count]) == 0
            tokens = torch.tensor([rng.randrange(12) for _ in range(rows + padding)])
            logprobs = torch.tensor([-rng.random() for _ in range(rows + padding)])
            logprobs[:1] = torch.nan
            right = reference.end(wanted, step[0], tokens, logprobs)
            mine = end(seen, there[0], tokens.to(device), logprobs.to(device))
            assert same_bits(mine.cpu(), right)
            assert same_bits(seen.state.cpu(), wanted.state) and same_bits(seen.table.cpu(), wanted.table)
            assert torch.equal(right[0, :rows] >= 0, takers) and bool((right[0, rows:] == -1).all())


# --- The numbers


def require_the_numbers_of_the_seeds(begin: Begin, device: str = "cpu") -> None:
    """Any 64 bits are a seed, and any place in a completion has the number that `rl.seeds.uniform` gives it."""
    rng = random.Random(0)
    pairs = [(rng.getrandbits(64), rng.randrange(1 << 17)) for _ in range(2000)]
    pairs += [(seed, position) for seed in (0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1) for position in (0, 1, 4095)]
    lanes = Lanes.empty(len(pairs), 1, [], 1 << 20, SPARE, torch.device(device))
    for column, values in ((SEED, [signed(s) for s, _ in pairs]), (LENGTH, [9 + p for _, p in pairs])):
        lanes.state[:-1, column] = torch.tensor(values, device=device)
    lanes.state[:-1, PROMPT], lanes.state[:-1, DONE] = 9, 0
    step = torch.full((3, len(pairs)), -1, dtype=torch.int32)
    step[0] = torch.arange(len(pairs))
    seen = begin(lanes, step.to(device)).uniforms
    assert seen.dtype == torch.float64
    assert seen.tolist() == [seeds.uniform(s, p) for s, p in pairs]


def test_uniform_numbers_are_those_of_the_seeds() -> None:
    require_the_numbers_of_the_seeds(reference.begin)


def test_mix64_is_that_of_the_seeds() -> None:
    rng = random.Random(1)
    values = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, *(rng.getrandbits(64) for _ in range(500))]
    assert reference.mix64(torch.tensor([signed(v) for v in values])).tolist() == [signed(seeds.mix64(v)) for v in values]


# --- A step


class Model:
    """What lanes mean, one lane at a time, with Python's integers."""

    def __init__(self, lanes: Lanes) -> None:
        self.rows = [row.tolist() for row in lanes.state]
        self.tables = [row.tolist() for row in lanes.table]
        self.eos = set(lanes.eos.tolist())

    def begin(self, lane: int, new_block: int) -> tuple[int, int, int, int, int]:
        """Token, position, slot, new tokens, keys."""
        row = self.rows[lane]
        if row[DONE]:
            return 0, 0, SPARE, 0, 0
        position = row[LENGTH] - 1
        if new_block >= 0:
            self.tables[lane][position // SIZE] = new_block
        slot = self.tables[lane][position // SIZE] * SIZE + position % SIZE
        return row[TOKEN], position, slot, 1, row[LENGTH]

    def end(self, lane: int, token: int) -> int:
        row = self.rows[lane]
        if row[DONE]:
            return -1
        row[TOKEN], row[LENGTH] = token, row[LENGTH] + 1
        row[DONE] = int((token in self.eos and not row[FORCED]) or row[LENGTH] - row[PROMPT] == row[LIMIT])
        return token


@pytest.mark.parametrize("eos", EOS_IDS)
def test_steps_do_what_a_plain_model_does(eos: tuple[int, ...]) -> None:
    rng = random.Random(2)
    lanes = random_lanes(rng, 40, eos)
    model = Model(lanes)
    ended = 0
    for _ in range(4):
        step = random_step(rng, 40, 30, 5)
        lane, forced, new_block = step.tolist()
        inputs = reference.begin(lanes, step)
        wanted = [model.begin(*pair) for pair in zip(lane, new_block, strict=True)]
        index = step[0].long()
        by_lane = [inputs.query_length[index], inputs.context[index]]
        seen = [x.tolist() for x in (inputs.tokens, inputs.positions, inputs.slots, *by_lane)]
        assert list(zip(*seen, strict=True)) == wanted
        assert inputs.forced.tolist() == forced
        assert inputs.query_start[index[:30]].tolist() == list(range(30))
        for place, uniform in zip(lane[:30], inputs.uniforms.tolist(), strict=False):
            row = model.rows[place]
            assert uniform == seeds.uniform(row[SEED] % (1 << 64), row[LENGTH] - row[PROMPT])
        tokens = [rng.randrange(12) for _ in lane]
        logprobs = torch.tensor([-rng.random() for _ in lane])
        out = reference.end(lanes, step[0], torch.tensor(tokens), logprobs)
        before = sum(row[DONE] for row in model.rows)
        assert out[0].tolist() == [model.end(*pair) for pair in zip(lane, tokens, strict=True)]
        assert torch.equal(out[1].view(torch.float32), logprobs)
        assert lanes.state.tolist() == model.rows and lanes.table.tolist() == model.tables
        ended += sum(row[DONE] for row in model.rows) - before
    assert ended > 5


def test_a_forced_lane_passes_an_eos_and_ends_at_its_limit() -> None:
    lanes = Lanes.empty(2, 1, [3], SIZE, SPARE, torch.device("cpu"))
    for lane, forced in enumerate((0, 1)):
        lanes.state[lane] = torch.tensor([1, 1, 1, 2, 0, 0, forced, 0])
    both = torch.tensor([0, 1], dtype=torch.int32)
    assert reference.end(lanes, both, torch.tensor([3, 3]), torch.zeros(2))[0].tolist() == [3, 3]
    assert lanes.state[:, DONE].tolist() == [1, 0, 1]
    assert reference.end(lanes, both, torch.tensor([4, 4]), torch.zeros(2))[0].tolist() == [-1, 4]
    assert lanes.state[:, DONE].tolist() == [1, 1, 1]
    assert lanes.state[0, TOKEN] == 3  # who is done changes no more


def test_empty_lanes_are_all_done_and_write_to_the_spare_slot() -> None:
    lanes = Lanes.empty(3, 2, [], SIZE, SPARE, torch.device("cpu"))
    assert lanes.state.shape == (4, COLUMNS)
    inputs = reference.begin(lanes, torch.tensor([[0, 1, 2, 3], [-1] * 4, [9] * 4], dtype=torch.int32))
    assert inputs.slots.tolist() == [SPARE] * 4 and not inputs.context.any() and not lanes.table.any()


def test_the_comparison_finds_an_error() -> None:
    """What the GPU's kernels are held to would not pass with a wrong number anywhere."""
    require_the_reference(reference.begin, reference.end)

    def wrong_begin(name: str) -> Begin:
        def begin(lanes: Lanes, step: Tensor) -> DecodeInputs:
            inputs = reference.begin(lanes, step)
            return replace(inputs, **{name: getattr(inputs, name) + 1})

        return begin

    for name in DecodeInputs.__slots__:
        with pytest.raises(AssertionError):
            require_the_reference(wrong_begin(name), reference.end)

    def no_forced(lanes: Lanes, lane: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        state = lanes.state.clone()
        lanes.state[:, FORCED] = 0
        out = reference.end(lanes, lane, tokens, logprobs)
        lanes.state[:, FORCED] = state[:, FORCED]
        return out

    with pytest.raises(AssertionError):
        require_the_reference(reference.begin, no_forced)
