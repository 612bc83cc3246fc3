"""The engine on a GPU: graphs, lanes, late results, memory that goes and comes, with the bits of any other way to compute."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from jetrl.kernels.checksum import checksum
from jetrl.model.transformer import Transformer
from jetrl.rl.seeds import sample_seed
from jetrl.rl.types import Completion, Request
from jetrl.rollout.engine import Engine, EngineLimits
from tests.gpu.test_model import SHAPES, model_of
from tests.test_checksum import tensors
from tests.test_engine import require_the_trainers_logprobs
from tests.test_lanes import require_the_numbers_of_the_seeds, require_the_reference
from tests.test_load import Load, carry_load, distinct_requests, require_often
from tests.tiny_models import random_weights

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu

DEVICE, VOCABULARY = "cuda", 1009
FLOWS: dict[str, dict[str, Any]] = {
    "fp8": {"flow": "fp8"},
    "bf16": {"flow": "bf16"},
    "fp8, fp8 cache": {"flow": "fp8", "kv_fp8": True},
}
EOS = tuple(range(0, VOCABULARY, 20))  # one token in twenty, more or less
LENGTH = 40
ROOMY = EngineLimits(64, 4096, 64 * 256, 64)
LONGEST = 160 + LENGTH


def of(shape: str, flow: str, **changes: Any) -> Transformer:
    return model_of(device=DEVICE, **{**SHAPES[shape], **FLOWS[flow], **changes})


@cache
def small(flow: str) -> Transformer:
    """Two layers of SmolLM2."""
    return of("smollm2", flow)


def requests_of() -> list[Request]:
    """Prompts of 1 to 160 tokens, lengths at, below and above blocks of 64, in groups of 1 to 4."""
    rng = random.Random(0)
    lengths = (1, 30, 50, 60, 62, 63, 64, 65, 100, 120, 127, 128, 129, 160)
    seeds = [[sample_seed(0, 1, i, s) for s in range(1 + i % 4)] for i in range(len(lengths))]
    return [Request([rng.randrange(VOCABULARY) for _ in range(n)], s, LENGTH) for n, s in zip(lengths, seeds, strict=True)]


def captured(engine: Engine) -> dict[tuple[int, float], int]:
    return {key: id(graph) for key, (graph, _) in engine._machine.decoder._graphs.items()}


@cache
def expected(flow: str) -> list[list[Completion]]:
    """From an engine of its own, by graphs."""
    engine = Engine(small(flow), ROOMY, EOS)
    results = engine.generate(requests_of(), 0.9)
    assert {c.finish_reason for group in results for c in group} == {"stop", "length"}
    assert engine.stats.preemptions == 0
    assert len(captured(engine)) > 3 and {temperature for _, temperature in captured(engine)} == {0.9}
    return results


# --- One result, whatever the way


SCHEDULES: dict[str, tuple[EngineLimits, int]] = {
    "one at a time": (replace(ROOMY, max_sequences=1), 1),
    "five sequences": (replace(ROOMY, max_sequences=5), 1),
    "33 tokens a step": (replace(ROOMY, max_batch_tokens=33), 1),
    "smallest cache": (replace(ROOMY, cache_tokens=64 * (-(-LONGEST // 64) + 1)), 1),
    "results at once": (ROOMY, 0),
    "results two steps late, small cache": (replace(ROOMY, cache_tokens=64 * 8), 2),
    "blocks of 128": (replace(ROOMY, block_size=128), 1),
    "blocks of 16": (replace(ROOMY, block_size=16), 1),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("flow", FLOWS)
def test_schedules_change_no_bit(flow: str, name: str) -> None:
    limits, lag = SCHEDULES[name]
    if limits.block_size == 16 and small(flow).kv_fp8:
        with pytest.raises(ValueError, match="block_size"):
            Engine(small(flow), limits, EOS)
        return
    engine = Engine(small(flow), limits, EOS)
    assert engine.lag == 1
    engine.lag = lag
    assert engine.generate(requests_of(), 0.9) == expected(flow)
    assert (engine.stats.preemptions > 0) == ("cache" in name)
    assert engine.generate(requests_of()[::-1], 0.9) == expected(flow)[::-1]  # once more, with what is captured and kept
    assert engine._pool.free + len(engine._prefixes) == engine._pool.count


@pytest.mark.parametrize("temperature", [0.9, 0.0])
@pytest.mark.parametrize("flow", FLOWS)
def test_a_traced_generation_uses_no_graph_and_has_the_same_bits(flow: str, temperature: float) -> None:
    rows = []

    def trace(of_step: list[tuple[int, int]]) -> Any:
        rows.extend(of_step)
        return lambda name, tensor: None

    engine = Engine(small(flow), ROOMY, EOS)
    traced = engine.generate(requests_of(), temperature, trace=trace)
    assert not captured(engine) and len(rows) == engine.stats.computed_tokens
    assert traced == (engine.generate(requests_of(), temperature) if temperature == 0.0 else expected(flow))
    assert bool(captured(engine)) == (temperature == 0.0)


@pytest.mark.parametrize("flow", FLOWS)
def test_neither_order_nor_company_changes_a_bit(flow: str) -> None:
    requests, order = requests_of(), [5, 0, 13, 2, 9, 12, 1, 11, 3, 10, 4, 8, 7, 6]
    engine = Engine(small(flow), ROOMY, EOS)
    assert engine.generate([requests[i] for i in order], 0.9) == [expected(flow)[i] for i in order]
    for request, group in list(zip(requests, expected(flow), strict=True))[3::4]:
        for seed, completion in zip(request.seeds, group, strict=True):
            engine.published(0)
            assert engine.generate([replace(request, seeds=[seed])], 0.9) == [[completion]]


@pytest.mark.parametrize("flow", FLOWS)
def test_forced_tokens_in_graphs_get_the_logprobs_that_they_were_sampled_with(flow: str) -> None:
    requests = [
        replace(r, seeds=[0] * len(r.seeds), forced=[c.token_ids for c in group])
        for r, group in zip(requests_of(), expected(flow), strict=True)
    ]
    results = Engine(small(flow), ROOMY, EOS).generate(requests, 0.9)
    for group, wanted in zip(results, expected(flow), strict=True):
        assert [(c.token_ids, c.logprobs) for c in group] == [(c.token_ids, c.logprobs) for c in wanted]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("shape", ["smollm2", "qwen3-8b"])
def test_logprobs_are_the_trainers_to_the_bit(shape: str, flow: str) -> None:
    model = of(shape, flow)
    results = Engine(model, replace(ROOMY, cache_tokens=64 * 16), EOS).generate(requests_of(), 0.8)
    require_the_trainers_logprobs(model, requests_of(), results, 0.8)


# --- What lasts


@pytest.mark.parametrize("flow", FLOWS)
def test_a_publish_reaches_graphs_that_are_captured_and_forgets_prefixes(flow: str) -> None:
    model = of("smollm2", flow, seed=1)
    engine = Engine(model, ROOMY, EOS)
    first, graphs, before = engine.generate(requests_of(), 0.9), captured(engine), engine.checksum()
    assert engine.generate(requests_of(), 0.9) == first
    model.load(random_weights(model.config, seed=2))
    engine.published(7)
    assert engine._pool.free == engine._pool.count
    other = of("smollm2", flow, seed=2)
    fresh = Engine(other, ROOMY, EOS)
    fresh.published(7)
    second = engine.generate(requests_of(), 0.9)
    assert second == fresh.generate(requests_of(), 0.9)
    assert [[c.token_ids for c in g] for g in second] != [[c.token_ids for c in g] for g in first]
    assert graphs.items() <= captured(engine).items()  # none was captured anew
    assert engine.checksum() == other.checksum() != before


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("flow", ["fp8", "fp8, fp8 cache"])
def test_a_sleeping_engine_gives_its_memory_to_others_and_wakes_at_the_same_place(flow: str) -> None:
    pytest.importorskip("cuda.bindings")
    before = free()
    engine = Engine(small(flow), replace(ROOMY, cache_tokens=64 * 80_000), EOS)
    size = engine._memory.bytes.numel()
    assert size > 3 << 30 and before - free() >= size
    assert engine.generate(requests_of(), 0.9) == expected(flow)
    address, graphs, awake = engine._machine.cache.keys.data_ptr(), captured(engine), free()
    rest = torch.empty(awake - (2 << 30), dtype=torch.uint8, device=DEVICE)  # so that only the cache's memory can be had
    engine.sleep()
    engine.sleep()
    assert free() - (2 << 30) >= size - (64 << 20)
    other = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="the KV cache wants"):
        engine.wake()
    with pytest.raises(ValueError, match="the KV cache wants"):
        engine.generate(requests_of(), 0.9)
    assert int(other[-1]) == 255
    del other
    engine.wake()
    engine.wake()
    assert engine._machine.cache.keys.data_ptr() == address
    assert engine.generate(requests_of(), 0.9) == expected(flow) and captured(engine) == graphs
    engine.sleep()
    assert engine.generate(requests_of(), 0.9) == expected(flow)  # a generation wakes it
    engine.sleep()
    del rest
    assert before - free() < 1 << 30
    engine.wake()
    pages = engine._memory._pages
    assert pages.mapped
    del engine
    gc.collect()
    assert not pages.mapped  # with an engine its cache goes


# --- Lanes and checksums


def test_lanes_are_the_references_to_the_byte() -> None:
    from jetrl.kernels.hopper import lanes

    require_the_reference(lanes.begin, lanes.end, DEVICE)
    require_the_numbers_of_the_seeds(lanes.begin, DEVICE)


def test_checksums_are_the_cpus_and_depend_on_every_byte() -> None:
    there = [x.to(DEVICE) for x in tensors()]
    first = checksum(there)
    assert first == checksum(tensors())
    seen = {first}
    for tensor in there[:4]:
        data = tensor.view(-1).view(torch.uint8)
        for byte in range(0, data.numel(), 7):
            data[byte] ^= 1
            seen.add(checksum(there))
            data[byte] ^= 1
    assert len(seen) == 1 + sum(-(-x.numel() * x.element_size() // 7) for x in there[:4])
    assert checksum(there) == first
    large = torch.zeros((1 << 26) + 9, dtype=torch.uint8, device=DEVICE)  # more than is read at once
    first = checksum([large])
    large[-1] = 1
    assert checksum([large]) != first


@pytest.mark.parametrize("flow", FLOWS)
def test_equal_weights_have_equal_checksums(flow: str) -> None:
    model, other = of("smollm2", flow), of("smollm2", flow, seed=1)
    assert model.checksum() == small(flow).checksum() != other.checksum()
    other.load(random_weights(model.config, seed=0))
    assert other.checksum() == model.checksum()


# --- All at once


LOADS = {
    "fp8": (20_000, EngineLimits(256, 200, 16 * 260, 16), (None, 2, 0, None)),
    "bf16": (4_000, EngineLimits(256, 200, 16 * 260, 16), (None, None)),
    "fp8, fp8 cache": (4_000, EngineLimits(256, 200, 64 * 90, 64), (None, None)),
}


@pytest.mark.slow
@pytest.mark.parametrize("flow", FLOWS)
def test_thousands_of_requests_give_what_each_gives_alone(flow: str) -> None:
    count, limits, lags = LOADS[flow]
    load = Load(distinct_requests(VOCABULARY, 60, 100), EOS[::2], count, lags)
    seen = carry_load(of("smollm2", flow, num_layers=1), limits, load)
    require_often(seen, count)
