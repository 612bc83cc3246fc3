"""Numbers derived from a configuration, by hand."""

from __future__ import annotations

from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetrl.config import RunConfig, parse_config
from jetrl.model.checkpoint import parameter_shapes
from jetrl.model.config import ModelConfig, linear_names, read_config
from jetrl.plan import describe_cache, memory_plan, parameter_count, peak, plan_batches
from tests.random_models import random_model
from tests.tiny_runs import SIZES, tiny_model


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
    plan = plan_batches(config(), model, longest_prompt=10)
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
    assert plan_batches(config(**changes), model, 10).limits.max_sequences == running


def test_a_sequence_longer_than_a_microbatch_has_its_own(model: ModelConfig) -> None:
    assert plan_batches(config(optimizer={"microbatch_tokens": 1}), model, 10).microbatches == 8


def test_positions_are_checked_with_the_numbers(model: ModelConfig) -> None:
    assert plan_batches(config(), model, 462).longest == 512
    with pytest.raises(ValueError, match=r"\(463 tokens\).*=50 makes 513 tokens.*512 positions.*max_prompt_tokens to 462"):
        plan_batches(config(), model, 463)


def test_a_cache_for_less_than_one_sequence_is_refused_with_the_numbers(model: ModelConfig) -> None:
    small = config(rollout={"cache_tokens": 64}, task={"max_prompt_tokens": 10})
    assert plan_batches(small, model, 10).limits.cache_tokens == 64
    with pytest.raises(ValueError, match=r"rollout\.cache_tokens to 64 or more"):
        plan_batches(config(rollout={"cache_tokens": 63}, task={"max_prompt_tokens": 10}), model, 10)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_parameters_are_counted_once(tmp_path: Path, family: str, tied: bool) -> None:
    counted = parameter_count(read_config(tiny_model(tmp_path, family, tied=tied)))
    theirs = random_model(family, tied=tied, **SIZES)
    assert counted == sum(p.numel() for p in theirs.parameters())


def test_memory_grows_with_what_needs_it(model: ModelConfig) -> None:
    def plan(**changes: Any) -> dict[str, float]:
        settings = config(**changes)
        return dict(memory_plan(settings, model, plan_batches(settings, model, 10)))

    base = plan()
    assert base["reference model for the KL"] == 0 and all(v >= 0 for v in base.values())
    assert base["masters, moments and gradients"] == parameter_count(model) * 20 / 1e9
    assert base["KV cache, in rollouts"] == 24 * 128 * 2 * 2 * 16 * 2 / 1e9  # tokens, layers, keys and values, width, bytes
    assert plan(algorithm={"kl_coef": 0.1})["reference model for the KL"] > 0
    assert plan(flow="fp8_rollout")["weights as the kernels read them"] > base["weights as the kernels read them"]
    assert plan(kv_cache="fp8")["KV cache, in rollouts"] == 24 * 128 * 2 * 2 * 1 * (16 + 4) / 1e9  # one key head: a scale
    small = plan(optimizer={"microbatch_tokens": 60})
    assert small["activations of one microbatch, in training"] < base["activations of one microbatch, in training"]


def test_a_gpu_keeps_codes_and_their_transposes_and_fp32_gradients(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetrl.plan.device_of", lambda name: torch.device(name))

    def plan(device: str, flow: str) -> dict[str, float]:
        settings = config(device=device, flow=flow)
        return dict(memory_plan(settings, model, plan_batches(settings, model, 10)))

    shapes = parameter_shapes(model)
    linear = sum(prod(shapes[name]) for name in linear_names(model))
    head, what = model.vocab_size * model.hidden_size, "weights as the kernels read them"
    assert plan("cuda", "fp8")[what] == plan("cuda", "bf16")[what] == (2 * linear + 2 * head) / 1e9
    assert plan("cpu", "fp8")[what] == (9 * linear + 10 * head) / 1e9
    gpu, cpu = plan("cuda", "fp8"), plan("cpu", "fp8")
    assert gpu["masters, moments and gradients"] == parameter_count(model) * 16 / 1e9
    assert gpu["KV cache, in rollouts"] == cpu["KV cache, in rollouts"]
    assert "Python and its libraries" in cpu and "Python and its libraries" not in gpu


def test_the_phases_share_the_memory(model: ModelConfig) -> None:
    settings = config()
    rows = memory_plan(settings, model, plan_batches(settings, model, 10))
    phases = [gb for name, gb in rows if "rollouts" in name or "training" in name]
    assert len(phases) == 2
    assert peak(rows) == pytest.approx(sum(gb for _, gb in rows) - min(phases))


def test_a_cache_on_a_gpu_is_what_fits_and_says_so(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetrl.plan.device_of", lambda name: torch.device(name))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    fixed = config(device="cuda", rollout={"cache_tokens": 1100})
    rows = memory_plan(fixed, model, plan_batches(fixed, model, 10))
    standing = sum(gb for name, gb in rows if "KV" not in name and "activations" not in name)
    room = (standing + 6.0) * 1e9 + 700 * 2 * 2 * 2 * 16 + 1  # and 700 tokens of keys and values
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=room))
    on_gpu = config(device="cuda")
    plan = plan_batches(on_gpu, model, 10)
    assert plan.wanted_cache == 24 * 128
    assert plan.limits.cache_tokens == 700
    assert "what fits; 3,072 would hold 24 sequences at full length" in describe_cache(on_gpu, plan)
    assert plan_batches(fixed, model, 10).limits.cache_tokens == 1100
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=1e9))
    with pytest.raises(ValueError, match="the KV cache holds 0 blocks"):
        plan_batches(on_gpu, model, 10)
