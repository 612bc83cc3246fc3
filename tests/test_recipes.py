"""The paper's recipes, and dry runs on a machine that has neither their weights nor a network."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from jetrl.config import RunConfig, load_config
from jetrl.model.config import read_config
from jetrl.model.shapes import HUB_IDS, SHAPES, model_to_plan, shape_of
from jetrl.run import dry_run, setup
from tests.tiny_runs import command, own_task, tiny_config, tiny_model

PAPER = Path(__file__).resolve().parents[1] / "configs/paper"
LLAMA, QWEN2, QWEN3 = "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B-Base"
GSM8K_MATH = ["openai/gsm8k:main", "DigitalLearningGmbH/MATH-lighteval:default"]
ROWS = {
    "llama3.1-8b-8k-gsm8k-math": (LLAMA, 8192, GSM8K_MATH),
    "qwen2.5-7b-8k-gsm8k-math": (QWEN2, 8192, GSM8K_MATH),
    "qwen3-8b-base-8k-gsm8k-math": (QWEN3, 8192, GSM8K_MATH),
    "qwen2.5-7b-16k-gsm8k-math": (QWEN2, 16384, GSM8K_MATH),
    "qwen3-8b-base-16k-gsm8k-math": (QWEN3, 16384, GSM8K_MATH),
    "qwen3-8b-base-16k-deepmath": (QWEN3, 16384, "zwhe99/DeepMath-103K"),
}


@pytest.fixture(autouse=True)
def nothing_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no fetched model, no `datasets`; whoever reads weights fails."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when the client was imported, so:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("jetrl.run.load_weights", lambda *_: pytest.fail("weights were loaded"))


@pytest.fixture
def lean(tmp_path: Path) -> Path:
    """A model folder without weights."""
    folder = tiny_model(tmp_path / "lean")
    (folder / "model.safetensors").unlink()
    return folder


def not_checked(config: RunConfig) -> list[str]:
    return [note.removeprefix("not checked: ") for note in dry_run(config).notes if note.startswith("not checked: ")]


def test_a_recipe_for_each_row_of_the_table() -> None:
    assert {file.stem for file in PAPER.glob("*.yaml")} == set(ROWS)
    for name, (model, limit, data) in ROWS.items():
        config = load_config(PAPER / f"{name}.yaml")
        assert (config.model, config.rollout.max_completion_tokens, config.task.data) == (model, limit, data)
        assert (config.flow, config.optimizer.moments) == ("fp8", "fp8")
        text = (PAPER / f"{name}.yaml").read_text(encoding="utf-8")
        assert f"jetrl train configs/paper/{name}.yaml\n" in text and r"\boxed{}" in config.task.options["instruction"]


@pytest.mark.parametrize(
    "words", [["train", "--dry-run"], ["train", "--dry-run", "--gpu", "h200"], ["doctor", "--gpu", "h200"]]
)
@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_passes_a_dry_run_without_weights_and_network(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(monkeypatch, capsys, words[0], PAPER / f"{name}.yaml", *words[1:])
    assert code == 0, err
    model, limit, _ = ROWS[name]
    assert model in out and f"{limit + 1024} tokens" in out and "prompts not known" in out and "64 x 8 = 512" in out
    assert "GPU of 150.1 GB" in out if "h200" in words else "Memory on a CPU" in out
    assert out.count("not checked: ") == 3, out
    for what in ("config.json and tokenizer", "problems of task math", "lengths of prompts", "jetrl[data]"):
        assert what in out, out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["rollout.max_completion_tokens=32000"], "33024 tokens, but the model has 32768 positions"),
        (["rollout.cache_tokens=10000"], "cache_tokens is 10000"),
        (["rollout.max_completions=8"], "did you mean 'rollout.max_completion_tokens'"),
        (["task.options.instructions=x"], "did you mean 'instruction'"),
        (["task.name=maths"], "did you mean 'math'"),
        (["algorithm.importance_cap=2"], "nothing to correct"),
        (["optimizer.recompute_layers=99"], "99, but the model has 36 layers"),
        (["model=Qwen/Qwen3-9B"], "'Qwen/Qwen3-9B' is no folder here, and fetching it as a hub id failed"),
        (["optimizer.moments=fp32", "--gpu", "h200"], "set optimizer.moments=fp8"),
        (["--gpu", "h100"], "and the GPU has 83.0 GB to use"),
    ],
)
def test_a_broken_recipe_is_refused(
    words: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = PAPER / "qwen3-8b-base-16k-gsm8k-math.yaml"
    code, out, err = command(monkeypatch, capsys, "train", recipe, "--dry-run", *words)
    assert (code, out) == (2, "") and reason in err


def test_a_run_of_a_recipe_still_needs_everything() -> None:
    with pytest.raises(ValueError, match=r"fetching it as a hub id failed.*Check the name and the network"):
        setup(load_config(PAPER / "qwen2.5-7b-8k-gsm8k-math.yaml"))


def test_a_folder_without_weights_passes_with_exact_prompts(lean: Path, tmp_path: Path) -> None:
    config = tiny_config(lean, tmp_path / "run", task=own_task(tmp_path))
    assert not_checked(config) == [f"weights, because {lean} has none yet"]
    plan = dry_run(config)
    assert (len(plan.prompts), len(plan.held_out), plan.batches.longest) == (16, 4, 4 + 6)
    whole = tiny_config(tiny_model(tmp_path / "whole"), tmp_path / "run", task=own_task(tmp_path))
    assert dry_run(whole).notes == []
    assert dry_run(whole).batches == setup(whole).batches == plan.batches


def test_data_that_is_not_here_is_noted_and_the_rest_checked(lean: Path, tmp_path: Path) -> None:
    task: dict[str, Any] = {"name": "math", "data": ["nope.jsonl", "a/b:c"], "max_prompt_tokens": 500}
    config = tiny_config(lean, tmp_path / "run", task=task)
    notes = not_checked(config)
    assert len(notes) == 3 and notes[1].startswith("problems of task math, because no data file at 'nope.jsonl'")
    assert dry_run(config).batches.longest == 506
    with pytest.raises(ValueError, match=r"no data file at 'nope\.jsonl'"):
        setup(config)
    with pytest.raises(ValueError, match=r"\(513 tokens\).*512 positions"):
        dry_run(tiny_config(lean, tmp_path / "run", task=task | {"max_prompt_tokens": 513}))


def test_what_is_wrong_with_files_that_are_here_is_refused(lean: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="answer_key"):
        dry_run(tiny_config(lean, tmp_path / "run", task={"name": "math", "data": str(tmp_path / "bad.jsonl")}))
    with pytest.raises(ValueError, match=r"eval.prompts is 4, but task .* has no held-out problem"):
        dry_run(tiny_config(lean, tmp_path / "run", task=own_task(tmp_path, problems=4)))
    (lean / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        dry_run(tiny_config(lean, tmp_path / "run"))


def test_a_dry_run_fetches_no_weights(lean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetched(name: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked[:] = allow_patterns
        return str(lean)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    config = tiny_config(Path("some/model-1.5B"), tmp_path / "run")
    assert dry_run(config).prompts
    assert "*.json" in asked and not [pattern for pattern in asked if "safetensors" in pattern]
    setup(config)
    assert "*.safetensors" in asked
    assert shape_of("some/model-1.5B") == read_config(lean)
    assert "*.safetensors" not in asked


def test_moments_that_need_a_missing_library_are_noted(lean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    config = tiny_config(lean, tmp_path / "run", optimizer={"moments": "fp8"})
    assert "pip install torchao" in not_checked(config)[1]
    with pytest.raises(ValueError, match="pip install torchao"):
        setup(config)


# The base models' config.json, as they were published.
PUBLISHED: dict[str, dict[str, Any]] = {
    LLAMA: {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131072, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                 "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    QWEN2: {
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 131072, "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    QWEN3: {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 32768, "attention_bias": False, "rope_theta": 1000000, "rope_scaling": None,
        "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_sizes_are_those_of_the_published_files(name: str, tmp_path: Path) -> None:
    assert set(HUB_IDS) == set(PUBLISHED)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]), encoding="utf-8")
    read = replace(read_config(tmp_path), eos_token_ids=(), bos_token_id=None, pad_token_id=None)
    assert SHAPES[HUB_IDS[name]] == read == model_to_plan(name)[1]
