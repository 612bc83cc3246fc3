"""A run from its configuration to its files, and what ends it before or in the middle."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl.config import load_config
from jetrl.loop import MismatchError
from jetrl.report.read import read_run, summarize
from jetrl.run import run_training, setup
from tests.tiny_runs import own_task, rows, tiny_config, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_a_run_folder_holds_everything(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT)
    assert run_training(tiny_config(model, run, steps=2, task=own_task(tmp_path), loggers=["tensorboard"]))
    assert signal.getsignal(signal.SIGINT) is before
    names = {p.name for p in run.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "samples.jsonl", "report.html", "checkpoints", "tensorboard"}
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000002"]
    assert load_config(run / "config.yaml").folder == str(run)
    kinds = [(row["kind"], row["step"]) for row in rows(run) if row["kind"] != "event"]
    assert kinds == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]
    train = [row for row in rows(run) if row["kind"] == "train"]
    assert [row["logprob_diff/max"] for row in train] == [0.0, 0.0]
    assert all(row["token_diff/tokens"] > 8 and 0 < row["reward/mean"] <= 1 for row in train)
    samples = rows(run, "samples.jsonl")
    assert len(samples) == 2 * 8
    for sample in samples:
        assert len(sample["tokens"]) == len(sample["token_ids"]) == len(sample["logprobs"]) <= 6
        assert sample["prompt"].startswith("q") and sample["reward"] > 0
    assert "q1" in (run / "report.html").read_text(encoding="utf-8")  # a sample


def test_the_default_folder_names_time_and_flow(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny_config(model, Path("x"), steps=1, flow="bf16", eval__prompts=0).model_copy(update={"folder": None})
    assert run_training(config)
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("-bf16")
    assert load_config(run / "config.yaml").folder == f"runs/{run.name}"  # so that it can be resumed as it is


def test_fp8_rollout_runs_on_a_known_mismatch(model: Path, tmp_path: Path) -> None:
    settings = {"flow": "fp8_rollout", "algorithm": {"importance_cap": 2.0, "kl_coef": 0.1}, "task": own_task(tmp_path)}
    assert run_training(tiny_config(model, tmp_path / "run", steps=2, **settings))
    train = [row for row in rows(tmp_path / "run") if row["kind"] == "train"]
    assert all(1e-5 < row["logprob_diff/max"] < 5 and row["token_diff/share"] > 0.5 for row in train)
    assert [e for e in rows(tmp_path / "run") if e["kind"] == "event" and "mismatch" in e["event"]] == []


@pytest.mark.parametrize(("function", "words"), [("odd", ("KeyError", "None", "nan")), ("huge", ("1e+31",))])
def test_a_reward_that_fails_is_counted_and_the_run_goes_on(
    model: Path, tmp_path: Path, function: str, words: tuple[str, ...]
) -> None:
    assert run_training(tiny_config(model, tmp_path / "run", steps=2, task=own_task(tmp_path, function)))
    train = [row for row in rows(tmp_path / "run") if row["kind"] == "train"]
    assert [row["reward/mean"] for row in train] == [0.0, 0.0]
    events = [row for row in rows(tmp_path / "run") if row.get("event") == "grading failed"]
    assert {row["step"] for row in events} == {0, 1, 2}
    assert all("8 of 8 completions, reward 0" in row["detail"] for row in events if row["step"] == 1)
    assert any(word in events[0]["detail"] for word in words)


def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetrl.run.load_weights", lambda *_: pytest.fail("weights were loaded"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"max_prompt_tokens": 1}}, "no prompt is left"),
        ({"rollout__max_completion_tokens": 509}, "512 positions"),
        ({"task": {"max_prompt_tokens": 10}, "rollout__cache_tokens": 16, "rollout__block_size": 32}, "needs 1 blocks"),
        ({"task": {"name": "arithmetics"}}, "did you mean 'arithmetic'"),
        ({"task": {"options": {"digit": 1}}}, "did you mean 'digits'"),
        ({"loggers": ["wandb"]}, r"pip install 'jetrl\[wandb\]'"),
        ({"task": {"name": "nowhere.py:score"}}, "no file 'nowhere.py'"),
    ],
)
def test_what_cannot_work_is_said_before_weights_load(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    _no_weights(monkeypatch)
    with pytest.raises(ValueError, match=message):
        run_training(tiny_config(model, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_too_few_problems_to_hold_some_out(model: Path, tmp_path: Path) -> None:
    task = own_task(tmp_path, problems=4)
    with pytest.raises(ValueError, match=r"eval.prompts is 4, but task .* has no held-out problem.*eval\.prompts=0"):
        setup(tiny_config(model, tmp_path / "run", task=task))
    assert len(setup(tiny_config(model, tmp_path / "run", task=task, eval={"prompts": 0})).prompts) == 4
    s = setup(tiny_config(model, tmp_path / "run", task=own_task(tmp_path, problems=11)))
    assert len(s.held_out) == 2
    assert "eval.prompts is 4, but there are 2 held-out problems only" in s.notes


def test_prompts_left_out_are_noted_on_both_sides(model: Path, tmp_path: Path) -> None:
    task = own_task(tmp_path, problems=20) | {"max_prompt_tokens": 3}  # "q7:" fits, "q10:" does not
    s = setup(tiny_config(model, tmp_path / "run", task=task))
    assert all(len(p.token_ids) == 3 for p in [*s.prompts, *s.held_out])
    assert [note.split(" of ")[1] for note in s.notes] == [
        "16 prompts left out: over task.max_prompt_tokens=3 (longest 4)",
        "4 held-out prompts left out: over task.max_prompt_tokens=3 (longest 4)",
    ]
    assert run_training(replace(s).config.model_copy(update={"steps": 1}))
    notes = [row["detail"] for row in rows(tmp_path / "run") if row.get("event") == "note"]
    assert notes == s.notes


def test_a_failure_before_the_first_step_names_its_cause_and_leaves_the_folder_usable(model: Path, tmp_path: Path) -> None:
    broken = tiny_model(tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-100])
    config = tiny_config(broken, tmp_path / "run", steps=1, task=own_task(tmp_path) | {"max_prompt_tokens": 3})
    with pytest.raises(ValueError, match="truncated"):
        run_training(config)
    (broken / "model.safetensors").write_bytes(weights)
    assert run_training(config)


def test_a_failure_in_the_middle_keeps_what_was_done(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's log-probabilities are moved by one unit in the last place from the third step on."""
    from torch import Tensor

    from jetrl.model.transformer import Transformer

    real = Transformer.next_tokens
    run = tmp_path / "run"

    def moved(*arguments: Any) -> tuple[Tensor, Tensor]:
        tokens, logprobs = real(*arguments)
        if sum(row["kind"] == "train" for row in rows(run)) < 2:
            return tokens, logprobs
        return tokens, torch.nextafter(logprobs, torch.tensor(0.0))

    monkeypatch.setattr(Transformer, "next_tokens", moved)
    config = tiny_config(model, run, task=own_task(tmp_path))
    with pytest.raises(MismatchError, match=r"step 3: .*tokens differ.*hidden states agree; first difference.*logprob"):
        run_training(config)
    differences = [row["logprob_diff/max"] for row in rows(run) if row["kind"] == "train"]
    assert differences[:2] == [0.0, 0.0] and 0 < differences[2] < 1e-5
    assert "mismatch in an exact flow" in [row.get("event") for row in rows(run)]
    assert (run / "report.html").is_file() and not summarize(read_run(run)).exact
    monkeypatch.setattr(Transformer, "next_tokens", real)
    assert run_training(config, resume=True)  # from the checkpoint that the failure left
    unbroken = tmp_path / "unbroken"
    assert run_training(tiny_config(model, unbroken, task=own_task(tmp_path)))
    assert rows(run) == rows(unbroken) and rows(run, "samples.jsonl") == rows(unbroken, "samples.jsonl")


def test_unknown_files_of_a_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        setup(tiny_config(tmp_path / "m", tmp_path / "run"))
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        setup(tiny_config(tmp_path / "m", tmp_path / "run"))
