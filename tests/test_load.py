"""Twenty thousand requests through one engine, with everything that happens to requests at once.

Random lengths, single requests and groups, prompts that begin alike, EOS at random, forced completions, a cache so small
that sequences are preempted all the time, aborts of what waits, prefills or decodes, results that arrive late, and new weights
in between. Each result is compared with that of its sequence alone in an engine. `carry_load` serves the GPU's test too.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice

import pytest

from jetrl.model.transformer import Transformer
from jetrl.rl.types import Completion, Request
from jetrl.rollout.engine import Engine, EngineLimits
from jetrl.rollout.generation import Generation
from jetrl.rollout.sequence import Sequence
from tests.tiny_models import random_weights, tiny_model

TEMPERATURE = 1.0
ABORTS = 0.4  # the share of steps after which some are aborted

Alone = dict[tuple[int, int], Completion]  # by request and sample
Places = dict[int, tuple[int, int]]  # request and sample of a sequence, by its identity


@dataclass(slots=True, frozen=True)
class Load:
    """What is asked. `count` requests, in equal parts to each policy version."""

    distinct: list[Request]
    eos: tuple[int, ...]
    count: int
    lags: Seq[int | None]  # one a policy version; None: what the engine chose

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return max(len(r.prompt) + max([r.max_tokens, *map(len, r.forced or [])]) for r in self.distinct)


def distinct_requests(vocabulary: int, longest_prompt: int, longest_completion: int, count: int = 60) -> list[Request]:
    """Two of three single, the others groups of 2 to 4, which begin alike; one of eight has its tokens forced."""
    rng = random.Random(7)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(1, most))]

    common = [rng.randrange(vocabulary) for _ in range(longest_prompt // 2)]
    requests = []
    for i in range(count):
        prompt = tokens(longest_prompt) if i % 3 else common + tokens(longest_prompt // 2)
        seeds = [rng.getrandbits(64) for _ in range(1 if i % 3 else rng.randint(2, 4))]
        forced = [tokens(longest_completion) for _ in seeds] if i % 12 == 7 or i % 24 == 0 else None
        requests.append(Request(prompt, seeds, rng.randint(1, longest_completion), forced))
    return requests


def run_alone(model: Transformer, load: Load, version: int, limits: EngineLimits) -> Alone:
    """Each sequence by itself, in an engine of its own; on a GPU, for speed, in one that has forgotten all others."""
    results: Alone = {}
    engine = Engine(model, limits, load.eos)
    for number, request in enumerate(load.distinct):
        for sample, seed in enumerate(request.seeds):
            engine = Engine(model, limits, load.eos) if model.device.type == "cpu" else engine
            engine.published(version)
            forced = None if request.forced is None else [request.forced[sample]]
            results[number, sample] = engine.generate([replace(request, seeds=[seed], forced=forced)], TEMPERATURE)[0][0]
    return results


def by_state(generation: Generation) -> dict[str, list[Sequence]]:
    """Sequences that an abort can meet, the waiting ones as far as they come soon."""
    scheduler = generation.scheduler
    found = {"waiting": list(islice(scheduler.waiting, 20)), "prefilling": [], "running": []}
    for s in scheduler.running:
        found["prefilling" if s.computed < s.prompt_length else "running"].append(s)
    return {state: sequences for state, sequences in found.items() if sequences}


def abort_some(generation: Generation, places: Places, count: int, rng: random.Random, seen: Counter[str]) -> None:
    """Abort so many sequences, of each state as many, each alone or with its request."""
    for _ in range(count):
        found = by_state(generation)
        if not found:
            return
        state = rng.choice(list(found))
        sequence = rng.choice(found[state])
        request, sample = places[id(sequence)]
        whole = rng.random() < 0.3
        generation.abort(request, None if whole else sample)
        assert not sequence.blocks and sequence.finish_reason == "abort"
        seen[f"abort {state}"] += 1
        seen["abort pending"] += sequence.pending > 0


def generate_with_aborts(
    engine: Engine, requests: list[Request], rng: random.Random, seen: Counter[str]
) -> list[list[Completion]]:
    """As `Engine.generate`, step by step. Aborts are rare enough to leave most, and go on until the end."""
    generation = engine.start(requests, TEMPERATURE)
    places = {id(s): (r, i) for r, request in enumerate(generation.requests) for i, s in enumerate(request)}
    while not generation.done:
        engine.step(generation)
        if rng.random() < ABORTS:
            abort_some(generation, places, rng.randint(1, 3), rng, seen)
    scheduler = generation.scheduler
    assert sorted(scheduler._lanes) == list(range(scheduler.max_sequences))
    assert generation.finished == sum(len(r.seeds) for r in requests)
    assert not any(s.blocks or s.group.blocks or s.pending for request in generation.requests for s in request)
    return engine.results(generation)


def bits(completion: Completion) -> bytes:
    return array("d", completion.logprobs).tobytes()


def compare(seen: Completion, alone: Completion) -> None:
    """The same to the bit; the beginning of the same, if it was aborted."""
    if seen.finish_reason != "abort":
        assert seen == alone and bits(seen) == bits(alone)
        return
    length = len(seen.token_ids)
    assert length == len(seen.logprobs) < len(alone.token_ids)
    assert (seen.token_ids, seen.logprobs) == (alone.token_ids[:length], alone.logprobs[:length])
    assert seen.policy_version == alone.policy_version


def assert_no_leak(engine: Engine) -> None:
    pool, kept = engine._pool, len(engine._prefixes)
    assert pool.free + kept == pool.count and sum(pool._references) == kept


def carry_load(model: Transformer, limits: EngineLimits, load: Load) -> Counter[str]:
    """One engine, all requests; asserts what the module promises, and returns how often each thing happened."""
    rng = random.Random(1)
    seen: Counter[str] = Counter()
    engine = Engine(model, limits, load.eos)
    alone_limits = replace(limits, max_sequences=1, cache_tokens=-(-load.longest // limits.block_size) * limits.block_size)
    for version, lag in enumerate(load.lags):
        model.load(random_weights(model.config, seed=version))
        alone = run_alone(model, load, version, alone_limits)
        engine.published(version)
        assert engine._pool.free == engine._pool.count
        engine.lag = engine.lag if lag is None else lag
        chosen = [rng.randrange(len(load.distinct)) for _ in range(load.count // len(load.lags))]
        results = generate_with_aborts(engine, [load.distinct[i] for i in chosen], rng, seen)
        assert_no_leak(engine)
        for number, group in zip(chosen, results, strict=True):
            for sample, completion in enumerate(group):
                compare(completion, alone[number, sample])
                seen[completion.finish_reason] += 1
                seen["begun, then aborted"] += completion.finish_reason == "abort" and bool(completion.token_ids)
        seen["requests"] += len(results)
        seen["preemptions"] += engine.stats.preemptions
        seen["computed"] += engine.stats.computed_tokens
    engine.published(len(load.lags))
    assert engine._pool.free == engine._pool.count
    return seen


def require_often(seen: Counter[str], requests: int) -> None:
    """Each thing happened to at least a hundredth of the requests, aborts of each state to a thousandth."""
    assert seen["requests"] == requests
    for name in ("stop", "length", "abort", "preemptions", "begun, then aborted"):
        assert seen[name] > requests // 100, (name, seen)
    for name in ("waiting", "prefilling", "running"):
        assert seen[f"abort {name}"] > requests // 500, (name, seen)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_twenty_thousand_requests_give_what_each_gives_alone() -> None:
    sizes = {"num_layers": 1, "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "head_dim": 8}
    model = tiny_model("qwen3", "bf16", num_kv_heads=1, **sizes)
    load = Load(distinct_requests(31, 14, 16), (3, 5), 20_000, lags=(0, 1, 2, 1))
    seen = carry_load(model, EngineLimits(160, 140, 4 * 250, 4), load)
    require_often(seen, 20_000)
