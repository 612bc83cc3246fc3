"""One generation, step by step: results that arrive late, aborts of whatever is under way, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from jetrl.model.transformer import Transformer
from jetrl.rl.types import Completion, Request
from jetrl.rollout.engine import Engine, EngineLimits
from jetrl.rollout.generation import Generation
from tests.test_engine import LENGTH, LIMITS, ROOMY, requests_of
from tests.tiny_models import EOS, random_weights, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

LAGS = [0, 1, 2]


@cache
def one_layer() -> Transformer:
    return tiny_model("qwen2", num_layers=1)


def engine_of(limits: EngineLimits = ROOMY, lag: int = 0, model: Transformer | None = None) -> Engine:
    engine = Engine(one_layer() if model is None else model, limits, EOS)
    engine.lag = lag
    return engine


@pytest.fixture(scope="module")
def expected() -> list[list[Completion]]:
    results = engine_of().generate(requests_of(), 0.9)
    assert {c.finish_reason for group in results for c in group} == {"stop", "length"}
    return results


def assert_no_leak(engine: Engine) -> None:
    assert engine._pool.free + len(engine._prefixes) == engine._pool.count
    engine.published(engine.policy_version)
    assert engine._pool.free == engine._pool.count


# --- Results that arrive late


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("name", LIMITS)
def test_late_results_change_no_bit(name: str, lag: int, expected: list[list[Completion]]) -> None:
    engine = engine_of(LIMITS[name], lag)
    assert engine.generate(requests_of(), 0.9) == expected
    assert_no_leak(engine)


@pytest.mark.parametrize("lag", LAGS)
def test_results_arrive_as_late_as_the_lag_says(lag: int) -> None:
    engine = engine_of(lag=lag)
    generation = engine.start([Request([1, 2], [0], 6, [[7] * 6])], 1.0)
    seen = []
    while not generation.done:
        engine.step(generation)
        seen.append(generation.stats.sampled_tokens)
    assert seen == [max(0, i - lag) for i in range(1, 7)] + ([6] if lag else [])
    assert generation.stats.steps == 6 and engine.results(generation)[0][0].token_ids == [7] * 6


@pytest.mark.parametrize("lag", LAGS)
def test_the_first_token_ends_sequences_that_go_on_meanwhile(lag: int) -> None:
    """Everything is an EOS: whoever is a step or two further takes part no more, and its lane and blocks are used again."""
    engine = Engine(one_layer(), EngineLimits(4, 16, 80, 4), range(61))
    engine.lag = lag
    results = engine.generate(requests_of(8), 1.0)
    assert {(len(c.token_ids), c.finish_reason) for g in results for c in g} == {(1, "stop")}
    assert engine.stats.sampled_tokens == 40
    assert_no_leak(engine)


def test_late_results_mix_with_forced_tokens(expected: list[list[Completion]]) -> None:
    requests = [
        replace(r, forced=[c.token_ids for c in group]) if i % 2 else r
        for i, (r, group) in enumerate(zip(requests_of(), expected, strict=True))
    ]
    for lag in (1, 2):
        results = engine_of(EngineLimits(4, 9, 80, 4), lag).generate(requests, 0.9)
        for seen, wanted in zip(results, expected, strict=True):
            assert [(c.token_ids, c.logprobs) for c in seen] == [(c.token_ids, c.logprobs) for c in wanted]


# --- Aborts

Wanted = Callable[[Generation], bool]
SEQUENCE = EngineLimits(1, 1 << 20, 4096, 16)  # one sequence at a time: all others wait
CHUNKS = EngineLimits(64, 4, 4096, 4)


def carry(engine: Engine, wanted: Wanted, abort: Callable[[Generation], None]) -> list[list[Completion]]:
    """Generate; abort at the first step at which `wanted` holds, which must come."""
    generation = engine.start(requests_of(), 0.9)
    while not wanted(generation):
        assert not generation.done, "that did not happen"
        engine.step(generation)
    abort(generation)
    while not generation.done:
        engine.step(generation)
    assert generation.finished == 15
    assert not any(s.blocks or s.group.blocks or s.pending for request in generation.requests for s in request)
    return engine.results(generation)


def assert_aborted(results: list[list[Completion]], expected: list[list[Completion]], aborted: set[tuple[int, int]]) -> None:
    """Those hold a beginning of what they would have become; the others are as if nothing had happened."""
    for request, (group, wanted_group) in enumerate(zip(results, expected, strict=True)):
        for sample, (seen, wanted) in enumerate(zip(group, wanted_group, strict=True)):
            if (request, sample) not in aborted:
                assert seen == wanted
                continue
            assert seen.finish_reason == "abort" and len(seen.token_ids) == len(seen.logprobs) < len(wanted.token_ids)
            assert seen.token_ids == wanted.token_ids[: len(seen.token_ids)]
            assert seen.logprobs == wanted.logprobs[: len(seen.token_ids)]


def of(generation: Generation, request: int, sample: int = 0):
    return generation.requests[request][sample]


def members(request: int) -> set[tuple[int, int]]:
    return {(request, sample) for sample in range(3)}


CASES: dict[str, tuple[EngineLimits, Wanted, Callable[[Generation], None], set[tuple[int, int]]]] = {
    "before the first step": (ROOMY, lambda g: True, lambda g: g.abort(1), members(1)),
    "one that waits": (SEQUENCE, lambda g: g.finished == 2, lambda g: g.abort(3, 1), {(3, 1)}),
    "a group that waits": (SEQUENCE, lambda g: g.finished == 2, lambda g: g.abort(3), members(3)),
    "one that prefills, for others that wait": (
        CHUNKS, lambda g: 0 < of(g, 4).computed < 23, lambda g: g.abort(4, 0), {(4, 0)},
    ),
    "a group that prefills": (CHUNKS, lambda g: 0 < of(g, 4).computed < 23, lambda g: g.abort(4), members(4)),
    "the last that a kept prompt waits for": (
        replace(ROOMY, max_sequences=2), lambda g: len(of(g, 4).group.blocks) > 0 and of(g, 4).group.waiting == 1,
        lambda g: g.abort(4, 2), {(4, 2)},
    ),
    "one that decodes": (ROOMY, lambda g: len(of(g, 2, 2).completion) == 2, lambda g: g.abort(2, 2), {(2, 2)}),
    "a group that decodes": (ROOMY, lambda g: len(of(g, 2, 2).completion) == 2, lambda g: g.abort(2), members(2)),
    "one that was preempted": (
        LIMITS["smallest cache"], lambda g: any(s.preempted and s in g.scheduler.waiting for s in g.requests[3]),
        lambda g: g.abort(3), members(3),
    ),
    "everything": (
        EngineLimits(5, 7, 36, 4), lambda g: g.finished == 2, lambda g: [g.abort(i) for i in range(5)] and None,
        {(r, s) for r in range(5) for s in range(3)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("name", CASES)
def test_an_abort_ends_what_it_names_and_nothing_else(name: str, lag: int, expected: list[list[Completion]]) -> None:
    limits, wanted, abort, named = CASES[name]
    ended: set[tuple[int, int]] = set()

    def note_and_abort(generation: Generation) -> None:
        ended.update((r, s) for r, s in named if of(generation, r, s).finish_reason is not None)
        abort(generation)
        gone = [of(generation, r, s) for r, s in named]
        assert not any(s.blocks or s in generation.scheduler.running or s in generation.scheduler.waiting for s in gone)

    engine = engine_of(limits, lag)
    results = carry(engine, wanted, note_and_abort)
    assert named - ended
    assert_aborted(results, expected, named - ended)  # who had ended before stays as it was
    assert_no_leak(engine)


def test_an_abort_of_what_has_ended_changes_nothing(expected: list[list[Completion]]) -> None:
    engine = engine_of(replace(ROOMY, max_sequences=1))
    results = carry(engine, lambda g: g.finished == 3, lambda g: g.abort(0))
    assert results == expected


# --- What goes wrong


@pytest.mark.parametrize("lag", LAGS)
def test_a_generation_that_fails_leaves_the_engine_usable(lag: int, expected: list[list[Completion]]) -> None:
    model = tiny_model("qwen2", num_layers=1)
    good, bad = random_weights(model.config), random_weights(model.config)
    bad["final_norm"][3] = float("nan")
    engine = engine_of(EngineLimits(5, 7, 80, 4), lag, model)
    model.load(bad)
    engine.published(1)
    with pytest.raises(ValueError, match="logits are not finite"):
        engine.generate(requests_of(), 0.9)
    model.load(good)
    engine.published(2)
    assert engine._pool.free == engine._pool.count
    results = engine.generate(requests_of(), 0.9)
    assert results == [[replace(c, policy_version=2) for c in group] for group in expected]


class Interrupted(Exception):
    """Raised by a test's progress."""


@pytest.mark.parametrize("lag", LAGS)
def test_an_interrupted_generation_leaves_no_trace(lag: int, expected: list[list[Completion]]) -> None:
    engine = engine_of(EngineLimits(5, 7, 80, 4), lag)

    def progress(finished: int, tokens: int) -> None:
        if tokens > 20:
            raise Interrupted

    for _ in range(2):
        with pytest.raises(Interrupted):
            engine.generate(requests_of(), 0.9, progress)
        assert engine._pool.free + len(engine._prefixes) == engine._pool.count
    assert engine.generate(requests_of(), 0.9) == expected


def test_two_generations_at_a_time_are_refused() -> None:
    engine = engine_of(lag=1)
    first = engine.start(requests_of(), 0.9)
    engine.step(first)
    with pytest.raises(AssertionError, match="two generations at a time"):
        engine.start(requests_of(), 0.9)
    first.close()
    assert first.done and {c.finish_reason for g in engine.results(first) for c in g} == {"abort"}
    assert len(engine.generate([Request([1], [0], LENGTH)], 0.9)) == 1
