"""Numbers derived from a configuration, by hand."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl.config import RunConfig, parse_config
from jetrl.footprint import Footprint, Meter, Place, kept_bytes, layers_to_recompute, moment_bytes, parameter_count
from jetrl.model.checkpoint import parameter_shapes
from jetrl.model.config import ModelConfig, linear_names, read_config
from jetrl.model.shapes import SHAPES
from jetrl.plan import BatchPlan, describe_cache, memory_plan, plan_batches
from tests.random_models import random_model
from tests.tiny_runs import SIZES, tiny_model

CPU = Place("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_config(tiny_model(tmp_path_factory.mktemp("model")))


def config(**changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "steps": 10,
        "device": "cpu",
        "rollout": {"prompts_per_step": 6, "group_size": 4, "max_completion_tokens": 50},
        "algorithm": {"updates_per_step": 3},
        "optimizer": {"microbatch_tokens": 200},
        "eval": {"prompts": 5},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    return parse_config(tree)


def test_batch_numbers(model: ModelConfig) -> None:
    plan = plan_batches(config(), model, 10, CPU)
    assert (plan.longest, plan.completions, plan.per_update, plan.updates) == (60, 24, 8, 30)
    assert plan.microbatches == 3  # three sequences of 60 fit 200 tokens; 8 of them need 3 microbatches
    assert plan.limits.max_sequences == 24
    assert plan.limits.cache_tokens == 24 * (64 + 64)  # whole blocks, and one for the prompt that the group shares


@pytest.mark.parametrize(
    ("changes", "running"),
    [
        ({"rollout": {"max_sequences": 7}}, 7),
        ({"eval": {"prompts": 20, "samples": 3}}, 60),
        ({"eval": {"prompts": 200, "samples": 3}}, 256),
    ],
)
def test_sequences_that_run_together(model: ModelConfig, changes: dict[str, Any], running: int) -> None:
    assert plan_batches(config(**changes), model, 10, CPU).limits.max_sequences == running


def test_a_sequence_longer_than_a_microbatch_has_its_own(model: ModelConfig) -> None:
    assert plan_batches(config(optimizer={"microbatch_tokens": 1}), model, 10, CPU).microbatches == 8


def test_positions_are_checked_with_the_numbers(model: ModelConfig) -> None:
    assert plan_batches(config(), model, 462, CPU).longest == 512
    with pytest.raises(ValueError, match=r"\(463 tokens\).*=50 makes 513 tokens.*512 positions.*max_prompt_tokens to 462"):
        plan_batches(config(), model, 463, CPU)


def test_a_cache_for_less_than_one_sequence_is_refused_with_the_numbers(model: ModelConfig) -> None:
    small = config(rollout={"cache_tokens": 64}, task={"max_prompt_tokens": 10})
    assert plan_batches(small, model, 10, CPU).limits.cache_tokens == 64
    with pytest.raises(ValueError, match=r"rollout\.cache_tokens to 64 or more"):
        plan_batches(config(rollout={"cache_tokens": 63}, task={"max_prompt_tokens": 10}), model, 10, CPU)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_parameters_are_counted_once(tmp_path: Path, family: str, tied: bool) -> None:
    counted = parameter_count(read_config(tiny_model(tmp_path, family, tied=tied)))
    theirs = random_model(family, tied=tied, **SIZES)
    assert counted == sum(p.numel() for p in theirs.parameters())


def test_memory_grows_with_what_needs_it(model: ModelConfig) -> None:
    def plan(**changes: Any) -> dict[str, float]:
        settings = config(**changes)
        found = memory_plan(settings, model, plan_batches(settings, model, 10, CPU), CPU)
        assert found.peak_gb == max(found.rollout_gb, found.training_gb)
        assert found.rollout_gb == pytest.approx(sum(gb for _, gb in found.stays + found.rollout))
        return dict(found.stays + found.rollout + found.training)

    base = plan()
    assert base["reference model for the KL"] == 0 and all(v >= 0 for v in base.values())
    parameters = parameter_count(model)
    assert (base["masters"], base["moments"], base["gradients, in training"]) == tuple(n * parameters / 1e9 for n in (4, 8, 8))
    assert base["KV cache, in rollouts"] == 24 * 128 * 2 * 2 * 16 * 2 / 1e9  # tokens, layers, keys and values, width, bytes
    assert plan(algorithm={"kl_coef": 0.1})["reference model for the KL"] > 0
    assert plan(flow="fp8_rollout")["weights as the kernels read them"] > base["weights as the kernels read them"]
    assert plan(kv_cache="fp8")["KV cache, in rollouts"] == 24 * 128 * 2 * 2 * 1 * (16 + 4) / 1e9  # one key head: a scale
    small = plan(optimizer={"microbatch_tokens": 60})
    assert small["activations of one microbatch, in training"] < base["activations of one microbatch, in training"]


def test_a_gpu_keeps_codes_and_their_transposes_and_fp32_gradients(model: ModelConfig) -> None:
    def plan(kind: str, flow: str) -> dict[str, float]:
        settings, place = config(flow=flow), Place(kind)
        found = memory_plan(settings, model, plan_batches(settings, model, 10, place), place)
        return dict(found.stays + found.rollout + found.training)

    shapes = parameter_shapes(model)
    linear = sum(prod(shapes[name]) for name in linear_names(model))
    rest, what = parameter_count(model) - linear, "weights as the kernels read them"
    head = model.vocab_size * model.hidden_size
    assert plan("cuda", "bf16")[what] == 2 * (linear + rest) / 1e9
    assert plan("cuda", "fp8")[what] == (2 * (linear + rest) + 8 * linear / 128**2) / 1e9
    assert plan("cpu", "fp8")[what] == (9 * linear + 10 * head + 2 * (rest - head)) / 1e9
    gpu, cpu = plan("cuda", "fp8"), plan("cpu", "fp8")
    assert gpu["gradients, in training"] == parameter_count(model) * 4 / 1e9
    assert gpu["KV cache, in rollouts"] == cpu["KV cache, in rollouts"]
    assert "Python and its libraries" in cpu and "CUDA and libraries" in gpu


def test_quantised_moments_take_a_byte_and_a_share_of_a_scale(model: ModelConfig) -> None:
    optimizer = config(optimizer={"moments": "fp8"}).optimizer
    small = sum(n for n in map(prod, parameter_shapes(model).values()) if n < 4096 or n % 256)
    assert moment_bytes(model, optimizer) == 2 * ((parameter_count(model) - small) * (1 + 4 / 256) + 4 * small)
    halved = config(optimizer={"moments": "fp8", "masters": "bf16"}).optimizer
    assert moment_bytes(model, optimizer) - moment_bytes(model, halved) == 2 * 2 * small


# --- An 8B model on one GPU

EIGHT = SHAPES["qwen3-8b"]


def eight(moments: str = "fp8", completion: int = 8192, **changes: Any) -> RunConfig:
    rollout = {"prompts_per_step": 6, "group_size": 8, "max_completion_tokens": completion} | changes.pop("rollout", {})
    optimizer = {"moments": moments, "microbatch_tokens": 8192} | changes.pop("optimizer", {})
    return config(rollout=rollout, optimizer=optimizer, **changes)


def planned(settings: RunConfig, gb: float = 150.1) -> tuple[BatchPlan, Footprint]:
    place = Place("cuda", gb)
    batches = plan_batches(settings, EIGHT, 256, place)
    return batches, memory_plan(settings, EIGHT, batches, place)


def test_8b_trains_on_one_h200_with_nothing_computed_anew() -> None:
    batches, plan = planned(eight())
    assert batches.recompute_layers == 0 and plan.peak_gb < 148.2
    assert dict(plan.stays)["masters"] == pytest.approx(32.8, abs=0.1)
    assert dict(plan.stays)["moments"] == pytest.approx(16.6, abs=0.1)
    assert 400_000 < batches.limits.cache_tokens <= batches.wanted_cache


def test_what_does_not_fit_is_computed_anew_in_as_few_layers_as_must_be() -> None:
    fits = [planned(eight(completion=c), gb)[0].recompute_layers for c, gb in ((8192, 150.1), (8192, 130), (16384, 150.1))]
    assert 0 == fits[0] < fits[1] < fits[2] < 36
    _, plan = planned(eight(), 130)
    assert plan.training_gb <= 128
    with pytest.raises(ValueError, match="with 4 of 36 layers computed anew"):
        planned(eight(optimizer={"recompute_layers": 4}), 130)
    assert planned(eight(optimizer={"recompute_layers": 36}), 130)[0].recompute_layers == 36
    with pytest.raises(ValueError, match="recompute_layers is 37, but the model has 36"):
        planned(eight(optimizer={"recompute_layers": 37}))


@pytest.mark.parametrize(
    ("settings", "gb", "knob"),
    [
        (eight("fp32"), 150.1, "set optimizer.moments=fp8"),
        (eight("fp8"), 85.0, "set optimizer.masters=bf16"),
        (eight(optimizer={"masters": "bf16"}), 85.0, "use a smaller model"),
        (eight(flow="fp8_rollout"), 110.0, "use flow=fp8, which has one copy"),
        (eight(optimizer={"microbatch_tokens": 200_000}), 120.0, "lower optimizer.microbatch_tokens .200000., down to 8448"),
        (eight(completion=16384), 109.0, "lower rollout.max_completion_tokens .16384."),
        (eight(optimizer={"recompute_layers": 0}), 130.0, "leave optimizer.recompute_layers out"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers_and_the_knob(settings: RunConfig, gb: float, knob: str) -> None:
    with pytest.raises(ValueError, match=rf"training needs [\d.]+ GB .*masters [\d.]+, .*gradients.*To make it fit: .*{knob}"):
        planned(settings, gb)


def test_fp8_keeps_less_for_the_backward_than_bf16() -> None:
    fp8, anew = kept_bytes(EIGHT, True, "cuda")
    bf16, _ = kept_bytes(EIGHT, False, "cuda")
    assert fp8 == pytest.approx(123_784, rel=0.01) and bf16 == pytest.approx(139_400, rel=0.01) and anew == 8192


def test_a_cache_on_a_gpu_is_what_fits_and_says_so() -> None:
    settings = eight(rollout={"prompts_per_step": 24})
    batches, plan = planned(settings)
    assert batches.limits.cache_tokens < batches.wanted_cache == 192 * (8448 + 64)
    assert plan.rollout_gb == pytest.approx(148.1, abs=0.01)
    assert f"what fits; {batches.wanted_cache:,} would hold 192 sequences at full length" in describe_cache(settings, batches)
    more = eight(rollout={"cache_tokens": 900_000})
    with pytest.raises(ValueError, match=r"cache_tokens is 900000, but beside .* GB that are taken only \d+ tokens fit"):
        planned(more)


def test_places() -> None:
    assert Place.of("cpu") == CPU and Place.of("cpu", "H200").gb == 150.1 and Place.of("auto", "96.5") == Place("cuda", 96.5)
    for wrong in ("b300", "0", "-1", "1e3"):
        with pytest.raises(ValueError, match=r"wanted one of h200, h100, or a number of GB"):
            Place.of("cpu", wrong)


def test_the_meter_stands_beside_the_plan(model: ModelConfig) -> None:
    settings = config()
    meter = Meter(memory_plan(settings, model, plan_batches(settings, model, 10, CPU), CPU), torch.device("cpu"))
    assert meter.metrics()["memory/peak_gb"] == 0.0
    meter.measure("rollout")
    meter.measure("training")
    seen = meter.metrics()
    assert 0.1 < seen["memory/rollout_gb"] <= seen["memory/training_gb"] == seen["memory/peak_gb"]
    assert seen["memory/planned_gb"] == meter.plan.peak_gb


def test_a_gpus_peak_is_that_of_its_tensors_and_of_all_else_there(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "mem_get_info": (60_000_000_000, 150_000_000_000),  # free, all: with the KV cache and CUDA's own
        "memory_reserved": 50_000_000_000,
        "max_memory_allocated": 45_000_000_000,
        "reset_peak_memory_stats": None,
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, value=value: value)
    meter = Meter(planned(eight())[1], torch.device("cuda", 1))
    meter.measure("rollout")
    assert meter.metrics()["memory/rollout_gb"] == 85.0  # 40 outside torch, and 45 of its 50 at the most


def test_layers_to_recompute_without_a_limit(model: ModelConfig) -> None:
    assert layers_to_recompute(config(), model, 60, 8, CPU) == 0
    assert layers_to_recompute(config(optimizer={"recompute_layers": 2}), model, 60, 8, CPU) == 2
