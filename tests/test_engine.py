"""The engine: completions that depend on the request alone, never on batch, cache or schedule; and equal to the trainer's."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from jetrl.model.context import PackedContext, bytes_per_token
from jetrl.model.transformer import Transformer
from jetrl.rl.seeds import sample_seed, uniform
from jetrl.rl.types import Completion, Request
from jetrl.rollout.engine import Engine, EngineLimits
from tests.tiny_models import EOS, FAMILIES, random_weights, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ROOMY = EngineLimits(64, 1 << 20, 4096, 16)
LENGTH = 10
LONGEST = 23 + LENGTH


@cache
def model_of(family: str = "qwen2", flow: Any = "fp8", kv_fp8: bool = False) -> Transformer:
    return tiny_model(family, flow, kv_fp8=kv_fp8)


def requests_of(group: int = 3) -> list[Request]:
    """Five prompts of 1 to 23 tokens in groups; lengths at, below and above a block."""
    rng = random.Random(0)
    lengths = (1, 4, 9, 16, 23)
    prompts = [[rng.randrange(61) for _ in range(n)] for n in lengths]
    return [Request(p, [sample_seed(0, 1, i, s) for s in range(group)], LENGTH) for i, p in enumerate(prompts)]


def generate(limits: EngineLimits = ROOMY, requests: list[Request] | None = None, temperature: float = 0.9, **of: Any) -> Any:
    engine = Engine(model_of(**of), limits, EOS)
    return engine.generate(requests_of() if requests is None else requests, temperature), engine.stats


@pytest.fixture(scope="module")
def expected() -> list[list[Completion]]:
    results, stats = generate()
    assert stats.preemptions == 0
    assert {c.finish_reason for group in results for c in group} == {"stop", "length"}  # the data shows both
    return results


# --- The same bits under every schedule

LIMITS = {
    "one sequence at a time": replace(ROOMY, max_sequences=1),
    "four sequences": replace(ROOMY, max_sequences=4),
    "one token a step": replace(ROOMY, max_batch_tokens=1),
    "seven tokens a step": replace(ROOMY, max_batch_tokens=7),
    "64 tokens a step": replace(ROOMY, max_batch_tokens=64),
    "blocks of 1": replace(ROOMY, block_size=1),
    "blocks of 4": replace(ROOMY, block_size=4),
    "blocks larger than any sequence": replace(ROOMY, block_size=64),
    "smallest cache": replace(ROOMY, block_size=4, cache_tokens=36),
    "smallest cache, blocks of 1": replace(ROOMY, block_size=1, cache_tokens=LONGEST),
    "smallest cache, chunks": EngineLimits(5, 7, 36, 4),
    "two sequences' cache": EngineLimits(15, 16, 2 * LONGEST, 1),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_change_no_bit(name: str, expected: list[list[Completion]]) -> None:
    results, stats = generate(LIMITS[name])
    assert results == expected
    assert (stats.preemptions > 0) == ("cache" in name)
    assert stats.peak_blocks <= LIMITS[name].cache_tokens // LIMITS[name].block_size


def test_neither_order_nor_company_changes_a_bit(expected: list[list[Completion]]) -> None:
    requests = requests_of()
    order = [3, 0, 4, 2, 1]
    shuffled, _ = generate(requests=[requests[i] for i in order])
    assert shuffled == [expected[i] for i in order]
    for request, group in zip(requests, expected, strict=True):
        assert generate(requests=[request])[0] == [group]
    for seed, completion in zip(requests[4].seeds, expected[4], strict=True):
        assert generate(requests=[replace(requests[4], seeds=[seed])])[0] == [[completion]]


def test_an_engine_can_be_used_again(expected: list[list[Completion]]) -> None:
    engine = Engine(model_of(), EngineLimits(5, 7, 36, 4), EOS)
    assert engine.generate(requests_of(), 0.9) == expected
    assert engine.generate(requests_of(), 0.9) == expected


def require_the_trainers_logprobs(
    model: Transformer, requests: list[Request], results: list[list[Completion]], temperature: float
) -> None:
    """Each sampled token's log-probability is, to the bit, what the training forward gives it."""
    pairs = [(r.prompt, c) for r, group in zip(requests, results, strict=True) for c in group]
    tokens = [p + c.token_ids[:-1] for p, c in pairs]
    hidden = model.forward(torch.tensor([t for s in tokens for t in s]), model.packed([len(s) for s in tokens]))
    assert hidden.requires_grad
    rows = torch.cat([h[len(p) - 1 :] for (p, _), h in zip(pairs, hidden.split([len(s) for s in tokens]), strict=True)])
    chosen = torch.tensor([t for _, c in pairs for t in c.token_ids])
    theirs, _ = model.chosen_logprobs(rows, chosen, temperature)
    ours = torch.tensor([x for _, c in pairs for x in c.logprobs], dtype=torch.float64)
    assert torch.equal(ours.float().double(), ours)  # each is a float32
    assert torch.equal(ours.float().view(torch.int32), theirs.detach().cpu().view(torch.int32))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("flow", ["fp8", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_the_trainers_to_the_bit(family: str, flow: str, temperature: float) -> None:
    results, _ = generate(EngineLimits(6, 40, 160, 4), None, temperature, family=family, flow=flow)
    require_the_trainers_logprobs(model_of(family, flow), requests_of(), results, temperature)


@pytest.mark.parametrize("lag", [0, 1])
def test_an_fp8_cache_is_as_exact(lag: int) -> None:
    model = model_of("qwen3", "fp8", True)
    wanted = Engine(model, ROOMY, EOS).generate(requests_of(), 0.9)
    require_the_trainers_logprobs(model, requests_of(), wanted, 0.9)
    for limits in (LIMITS["smallest cache, chunks"], LIMITS["blocks larger than any sequence"]):
        engine = Engine(model, limits, EOS)
        engine.lag = lag
        assert engine.generate(requests_of(), 0.9) == wanted


# --- What is sampled


def logits_after(model: Transformer, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.forward(torch.tensor(tokens), PackedContext.of([len(tokens)]))[-1:]
    return (hidden.double() @ model.head.value.value.double().t())[0]


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature_divides_the_logits_before_the_softmax(temperature: float) -> None:
    request = requests_of()[2]
    results, _ = generate(requests=[request], temperature=temperature)
    for completion in results[0]:
        for i, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            logits = logits_after(model_of(), request.prompt + completion.token_ids[:i])
            right = float(torch.log_softmax(logits / temperature, 0)[token])
            assert logprob == pytest.approx(right, abs=2e-6)
            assert abs(float(torch.log_softmax(logits, 0)[token]) - right) > 1e-4  # the data tells them apart


def test_temperature_0_takes_the_likeliest_token_with_its_logprob_at_temperature_1() -> None:
    request = replace(requests_of()[1], seeds=[1, 2])
    ((first, second),), _ = generate(requests=[request], temperature=0.0)
    assert first == second
    for i, (token, logprob) in enumerate(zip(first.token_ids, first.logprobs, strict=True)):
        logits = logits_after(model_of(), request.prompt + first.token_ids[:i])
        assert token == int(logits.float().argmax())
        assert logprob == pytest.approx(float(torch.log_softmax(logits, 0)[token]), abs=2e-6)


def test_equal_seeds_give_equal_completions_and_a_groups_seeds_do_not() -> None:
    prompt = [7, 8, 9]
    seeds = [sample_seed(0, 1, 0, s) for s in range(8)]
    requests = [Request(prompt, [*seeds, seeds[0]], 10), Request(prompt, seeds[:1], 10)]
    results = Engine(model_of(), ROOMY, ()).generate(requests, 0.9)
    texts = [tuple(c.token_ids) for c in results[0]]
    assert len(set(texts[:8])) == 8
    assert texts[8] == texts[0] == tuple(results[1][0].token_ids)


def test_tokens_follow_the_distribution() -> None:
    model = tiny_model("mistral", vocab_size=7, eos_token_ids=())
    count, prompt, temperature = 4000, [1, 5, 2], 1.3
    seeds = [sample_seed(3, 0, 0, s) for s in range(count)]
    (group,) = Engine(model, EngineLimits(count, 1 << 20, 16 * 16, 16), ()).generate([Request(prompt, seeds, 1)], temperature)
    probabilities = torch.softmax(logits_after(model, prompt) / temperature, 0)
    seen = Counter(c.token_ids[0] for c in group)
    chi2 = sum((seen[t] - count * float(p)) ** 2 / (count * float(p)) for t, p in enumerate(probabilities))
    assert chi2 < 22.5  # 6 degrees of freedom, 0.999
    assert min(seen.values()) > 5
    # Inversion: the token is the first one whose cumulative probability exceeds the sample's own number.
    cumulative = probabilities.cumsum(0)
    for seed, completion in zip(seeds, group, strict=True):
        u = uniform(seed, 0)
        if float((cumulative - u).abs().min()) > 1e-6:
            assert completion.token_ids == [int((cumulative <= u).sum())]


# --- When it stops


def test_every_eos_id_stops_and_is_part_of_the_completion(expected: list[list[Completion]]) -> None:
    ends = Counter()
    for completion in (c for group in expected for c in group):
        stopped = completion.finish_reason == "stop"
        ends[completion.token_ids[-1]] += stopped
        assert len(completion.token_ids) == len(completion.logprobs)
        assert (completion.token_ids[-1] in EOS) == stopped
        assert not set(completion.token_ids[:-1]) & set(EOS)
        assert stopped or len(completion.token_ids) == LENGTH
    wide = Engine(model_of(), ROOMY, range(0, 61, 2)).generate(requests_of(8), 0.9)
    lasts = {c.token_ids[-1] for group in wide for c in group if c.finish_reason == "stop"}
    assert len(lasts) > 5
    assert all(t % 2 == 0 for t in lasts)


def test_an_eos_as_the_last_allowed_token_is_a_stop() -> None:
    everything_stops = Engine(model_of(), ROOMY, range(61)).generate(requests_of(), 1.0)
    assert {(len(c.token_ids), c.finish_reason) for g in everything_stops for c in g} == {(1, "stop")}
    one = [replace(r, max_tokens=1) for r in requests_of()]
    assert [[c.token_ids for c in g] for g in Engine(model_of(), ROOMY, range(61)).generate(one, 1.0)] == [
        [c.token_ids for c in g] for g in everything_stops
    ]


def test_max_tokens_1_and_without_eos() -> None:
    requests = [replace(r, max_tokens=1) for r in requests_of()]
    results = Engine(model_of(), EngineLimits(2, 5, 24, 1), ()).generate(requests, 0.9)
    assert {(len(c.token_ids), c.finish_reason) for g in results for c in g} == {(1, "length")}
    longer = Engine(model_of(), ROOMY, ()).generate(requests_of(), 0.9)
    assert [[c.token_ids[:1] for c in g] for g in longer] == [[c.token_ids for c in g] for g in results]
    assert {len(c.token_ids) for g in longer for c in g} == {LENGTH}


def test_forced_completions_are_scored_as_they_were_sampled(expected: list[list[Completion]]) -> None:
    forced = [
        replace(r, seeds=[0] * 3, max_tokens=1, forced=[c.token_ids for c in group])
        for r, group in zip(requests_of(), expected, strict=True)
    ]
    results, _ = generate(EngineLimits(4, 9, 80, 4), forced)
    for group, wanted in zip(results, expected, strict=True):
        assert [(c.token_ids, c.logprobs) for c in group] == [(c.token_ids, c.logprobs) for c in wanted]
        assert {c.finish_reason for c in group} == {"length"}
    (((through),),), _ = generate(requests=[Request([1], [0], 4, [[EOS[0], 9, EOS[1], 2]])])
    assert through.token_ids == [EOS[0], 9, EOS[1], 2]  # an EOS does not end what is forced


# --- Versions, weights, counts


def test_completions_carry_the_policy_version_and_new_weights_are_used_at_once() -> None:
    model = tiny_model("qwen3", seed=1)
    engine = Engine(model, ROOMY, EOS)
    before = engine.generate(requests_of(), 1.0)
    assert {c.policy_version for g in before for c in g} == {0}
    model.load(random_weights(model.config, seed=2))
    engine.published(5)
    after = engine.generate(requests_of(), 1.0)
    fresh = Engine(tiny_model("qwen3", seed=2), ROOMY, EOS)
    fresh.published(5)
    assert after == fresh.generate(requests_of(), 1.0)
    assert {c.policy_version for g in after for c in g} == {5}
    assert [[c.token_ids for c in g] for g in after] != [[c.token_ids for c in g] for g in before]


def test_stats_count_a_groups_prompt_once(expected: list[list[Completion]]) -> None:
    _, stats = generate()
    requests = requests_of()
    completions = [len(c.token_ids) for group in expected for c in group]
    assert stats.sampled_tokens == sum(completions)
    assert stats.computed_tokens == sum(len(r.prompt) for r in requests) + sum(completions) - len(completions)
    assert stats.steps == max(completions[i] + (i % 3 > 0) for i in range(len(completions)))  # who joins starts a step later
    _, preempted = generate(LIMITS["smallest cache"])
    assert preempted.sampled_tokens == stats.sampled_tokens
    assert preempted.computed_tokens > stats.computed_tokens


def test_progress_counts_up_to_all(expected: list[list[Completion]]) -> None:
    seen: list[tuple[int, int]] = []
    engine = Engine(model_of(), replace(ROOMY, max_sequences=4), EOS)
    engine.generate(requests_of(), 0.9, lambda *counts: seen.append(counts))
    assert seen == sorted(seen)
    assert seen[-1] == (15, sum(len(c.token_ids) for group in expected for c in group))
    assert len(seen) == engine.stats.steps


def test_nothing_to_do() -> None:
    assert generate(requests=[])[0] == []
    assert generate(requests=[Request([1], [], 4)])[0] == [[]]


# --- Between generations: kept prefixes, and memory that comes and goes

COMMON = [7 * i % 61 for i in range(40)]  # two blocks of 16 and a half


def alike(*tails: int) -> list[Request]:
    """Groups whose prompts begin alike."""
    return [Request([*COMMON, tail], [sample_seed(1, 0, tail, s) for s in range(2)], 6) for tail in tails]


def test_a_prefix_is_computed_once_in_a_policy_version_and_changes_no_bit() -> None:
    fresh = [Engine(model_of(), ROOMY, ()).generate([r], 0.9) for r in alike(1, 2, 3)]
    engine = Engine(model_of(), ROOMY, ())
    computed = []
    for request, wanted in zip(alike(1, 2, 3), fresh, strict=True):
        assert engine.generate([request], 0.9) == wanted
        computed.append(engine.stats.computed_tokens)
    decoded = 2 * 5  # the last token of a completion is never computed
    assert computed == [41 + decoded, 41 - 32 + decoded, 41 - 32 + decoded]
    engine.published(1)
    assert engine._pool.free == engine._pool.count
    again = engine.generate(alike(2), 0.9)
    assert engine.stats.computed_tokens == 41 + decoded
    assert [[replace(c, policy_version=0) for c in group] for group in again] == fresh[1]


def test_a_prefix_serves_those_who_come_later_in_the_same_generation() -> None:
    engine = Engine(model_of(), replace(ROOMY, max_sequences=1), ())
    results = engine.generate(alike(1, 2, 3), 0.9)
    assert engine.stats.computed_tokens == 41 + 2 * (41 - 32) + 3 * (2 * 5)
    assert results == Engine(model_of(), ROOMY, ()).generate(alike(1, 2, 3), 0.9)


def test_the_last_token_of_a_prompt_is_computed_even_if_all_of_it_is_kept() -> None:
    request = Request(COMMON[:32], [5], 3)
    engine = Engine(model_of(), ROOMY, ())
    first = engine.generate([request], 0.9)
    assert engine.generate([request], 0.9) == first
    assert engine.stats.computed_tokens == 16 + 2
    assert engine.generate([replace(request, prompt=COMMON[:33])], 0.9) and engine.stats.computed_tokens == 1 + 2


def test_new_weights_do_not_meet_old_prefixes() -> None:
    model = tiny_model("qwen3", seed=1)
    engine = Engine(model, ROOMY, EOS)
    for version, seed in enumerate((1, 2, 1, 3)):
        model.load(random_weights(model.config, seed))
        engine.published(version)
        fresh = Engine(tiny_model("qwen3", seed=seed), ROOMY, EOS)
        fresh.published(version)
        for _ in range(2):
            assert engine.generate(alike(1, 2), 0.9) == fresh.generate(alike(1, 2), 0.9)


def test_kept_prefixes_make_room_for_sequences_before_anything_is_preempted() -> None:
    engine = Engine(model_of(), EngineLimits(1, 64, 48, 4), ())
    for tail in range(5):
        engine.generate([Request([tail] * 20, [0], 6)], 0.9)
        assert engine.stats.preemptions == 0
        assert engine._pool.free + len(engine._prefixes) == 12
    assert len(engine._prefixes) >= 10


def test_a_sleeping_engine_holds_no_cache_and_wakes_to_the_same_results(expected: list[list[Completion]]) -> None:
    engine = Engine(model_of(), EngineLimits(5, 7, 36, 4), EOS)
    storage = engine._memory.bytes.untyped_storage()
    size = storage.nbytes()
    assert size >= 36 * bytes_per_token("bf16", 2, 2, 12) and engine.generate(requests_of(), 0.9) == expected
    for woken in (True, False):
        engine.sleep()
        engine.sleep()
        assert storage.nbytes() == 0 and engine._pool.free == engine._pool.count
        if woken:
            engine.wake()
            engine.wake()
            assert storage.nbytes() == size
        assert engine.generate(requests_of(), 0.9) == expected  # one that sleeps is woken by it
        assert storage.nbytes() == size
    assert engine._machine.cache.keys.untyped_storage().data_ptr() == storage.data_ptr()


def test_the_engines_checksum_is_the_models() -> None:
    model = tiny_model("qwen3", seed=1)
    engine = Engine(model, ROOMY, EOS)
    first = engine.checksum()
    assert first == model.checksum()
    model.load(random_weights(model.config, 2))
    assert first != engine.checksum() == tiny_model("qwen3", seed=2).checksum()


# --- Refusals

GOOD = Request([1, 2], [0], 4)
BAD: dict[str, tuple[Request, str]] = {
    "empty prompt": (Request([], [0], 4), "request 1 has an empty prompt"),
    "token too large": (Request([1, 61], [0], 4), "request 1 has token id 61, outside the vocabulary of 61"),
    "token negative": (Request([-1], [0], 4), "request 1 has token id -1, outside the vocabulary of 61"),
    "forced token": (Request([1], [0], 4, [[2, 99]]), "request 1 has token id 99, outside the vocabulary of 61"),
    "no tokens": (Request([1], [0], 0), "request 1 asks for 0 tokens"),
    "empty forced": (Request([1], [0, 1], 4, [[1], []]), "request 1 forces an empty completion"),
    "forced count": (Request([1], [0, 1], 4, [[1]]), "request 1 forces 1 completions for 2 seeds"),
    "positions": (Request([1] * 500, [0], 13), r"request 1 can reach 513 tokens .* the model has 512 positions"),
    "forced positions": (Request([1] * 500, [0], 4, [[1] * 13]), r"can reach 513 tokens .* 512 positions"),
    "cache": (
        Request([1] * 30, [0], 51),
        r"holds 5 blocks of 16 tokens, but one sequence of 81 tokens needs 6 blocks\. Set rollout\.cache_tokens to 96 or more",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def forward(*arguments: Any) -> None:
        pytest.fail("work was done")

    engine = Engine(model_of(), EngineLimits(4, 64, 80, 16), EOS)
    monkeypatch.setattr(Transformer, "forward", forward)
    request, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        engine.generate([GOOD, request], 1.0)


@pytest.mark.parametrize("temperature", [-0.5, math.nan, math.inf])
def test_a_bad_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature is {temperature}"):
        generate(requests=[GOOD], temperature=temperature)


def test_the_longest_sequence_that_fits_is_served() -> None:
    exact = Request([1] * 30, [0, 1], 50)
    results, _ = generate(EngineLimits(4, 64, 80, 16), [exact])
    assert len(results[0]) == 2
    results, _ = generate(EngineLimits(4, 512, 512, 16), [Request([1] * 500, [0], 12)])
    assert results[0][0].finish_reason in ("stop", "length")


def test_logits_that_are_not_finite_are_refused_with_a_reason() -> None:
    model = tiny_model("llama", "bf16")
    weights = random_weights(model.config, 0)
    weights["final_norm"][3] = float("nan")
    model.load(weights)
    with pytest.raises(ValueError, match="logits are not finite"):
        Engine(model, EngineLimits(2, 64, 256, 16), ()).generate([Request([1, 2], [0], 4)], 1.0)
