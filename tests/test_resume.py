"""A continued run is the unbroken one, to the bit; what cannot be continued is refused before anything is touched."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from jetrl.config import load_config, parse_config
from jetrl.model.checkpoint import load_weights
from jetrl.model.config import read_config
from jetrl.run import run_training
from jetrl.train.state import checkpoint_folder, checkpoint_step, latest_checkpoint, load_state
from tests.tiny_runs import own_task, rows, tiny_config, tiny_model


class Setting:
    """A model, a task and an unbroken run of 4 steps that saved at 2 and 4."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = tiny_model(root / "model")
        (root / "task").mkdir()
        self.task = own_task(root / "task")
        self.whole = root / "whole"
        assert run_training(self.config("whole"))

    def config(self, name: str, **changes: Any) -> Any:
        settings = {"task": self.task, "save_every": 2, "eval__every": 2, "algorithm": {"updates_per_step": 2}}
        return tiny_config(self.model, self.root / name, **{**settings, **changes})

    def copy(self, name: str, without: tuple[int, ...] = (), source: str = "whole") -> Path:
        """A copy of a run, as if it had been killed before the checkpoints `without` were written."""
        run = self.root / name
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.root / source, run)
        for step in without:
            shutil.rmtree(checkpoint_folder(run, step))
        return run


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("resume"))


def snapshot(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}


def assert_equal_runs(a: Path, b: Path, step: int = 4) -> None:
    for name in ("masters", "optimizer", "model/model"):
        one, other = (load_file(checkpoint_folder(run, step) / f"{name}.safetensors") for run in (a, b))
        assert one.keys() == other.keys() and one
        assert [key for key in one if not torch.equal(one[key], other[key])] == [], name
    states = [json.loads((checkpoint_folder(run, step) / "state.json").read_text()) for run in (a, b)]
    assert states[0] == states[1]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert rows(a, name) == rows(b, name), name


def test_the_unbroken_run_did_something(setting: Setting) -> None:
    masters = load_file(checkpoint_folder(setting.whole, 4) / "masters.safetensors")
    start = load_weights(setting.model, read_config(setting.model))
    assert all(not torch.equal(masters[name], start[name].float()) for name in start)
    metrics = rows(setting.whole)
    assert [(r["kind"], r["step"]) for r in metrics if r["kind"] != "event"] == [
        ("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4),
    ]  # fmt: skip
    assert all(r["logprob_diff/max"] == 0.0 and r["grad_norm"] > 0 for r in metrics if r["kind"] == "train")
    state = json.loads((checkpoint_folder(setting.whole, 4) / "state.json").read_text())
    assert (state["step"], state["optimizer_steps"], state["policy_version"], state["flow"]) == (4, 8, 8, "fp8")
    assert len(state["fp8_layers"]) == 8


def test_a_run_cut_in_two_equals_the_unbroken_one(setting: Setting) -> None:
    assert run_training(setting.config("half", steps=2))
    run = setting.copy("rest", source="half")
    assert run_training(setting.config("rest"), resume=True)
    assert_equal_runs(run, setting.whole)
    assert load_config(run / "config.yaml") == setting.config("rest", device="cpu")  # what `auto` meant when the run began


def test_a_killed_run_drops_what_lies_beyond_its_checkpoint(setting: Setting) -> None:
    run = setting.copy("killed", without=(4,))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # killed while writing
    assert run_training(setting.config("killed"), resume=True)
    assert_equal_runs(run, setting.whole)


def test_partial_and_foreign_checkpoint_folders_are_ignored(setting: Setting) -> None:
    run = setting.copy("partial", without=(4,))
    good, where = checkpoint_folder(run, 2), run / "checkpoints"
    shutil.copytree(good, where / ".step-000004.partial")  # killed while writing
    shutil.copytree(good, where / "step-000004")  # cut short by a copy
    (where / "step-000004" / "state.json").unlink()
    shutil.copytree(good, where / "step-000003-old")  # the user's own
    assert [checkpoint_step(p) for p in sorted(where.iterdir())] == [-1, 2, -1, -1]
    assert latest_checkpoint(run) == good
    assert run_training(setting.config("partial"), resume=True)
    assert_equal_runs(run, setting.whole)


def test_the_latest_checkpoint_is_the_one_of_the_largest_step(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    for step in (999_999, 1_000_000, 5):
        checkpoint_folder(tmp_path, step).mkdir(parents=True)
        (checkpoint_folder(tmp_path, step) / "state.json").write_text("{}")
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 1_000_000)


def test_without_a_checkpoint_the_run_starts_again(setting: Setting) -> None:
    run = setting.copy("again", without=(2, 4))
    assert run_training(setting.config("again"), resume=True)
    assert_equal_runs(run, setting.whole)


def test_after_the_last_step_there_is_nothing_to_do(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    run = setting.copy("done")
    before = snapshot(run)
    with caplog.at_level(logging.WARNING, logger="jetrl"):
        assert run_training(setting.config("done"), resume=True)
        assert run_training(setting.config("done", steps=3), resume=True)
    assert snapshot(run) == before
    assert [message.startswith("nothing to do: steps is") for message in caplog.messages] == [True, True]


def test_more_steps_cadences_and_limits_may_change(setting: Setting) -> None:
    run = setting.copy("more", without=(4,))
    changes = {"steps": 3, "save_every": 1, "eval__every": 1, "rollout": {
        "prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 6, "max_sequences": 3, "block_size": 8,
    }, "optimizer": {"lr": 1e-3, "microbatch_tokens": 7}}  # fmt: skip
    assert run_training(setting.config("more", **changes), resume=True)
    assert checkpoint_step(checkpoint_folder(run, 3)) == 3
    kept = [r for r in rows(run) if r["kind"] == "train"]
    whole = [r for r in rows(setting.whole) if r["kind"] == "train"]
    assert kept[:2] == whole[:2]
    # The rollouts are the same to the bit; sums of the loss may differ in the last place.
    assert kept[2]["reward/mean"] == whole[2]["reward/mean"] and kept[2]["grad_norm"] == pytest.approx(whole[2]["grad_norm"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 5}, ["seed (was 0, now 5)"]),
        ({"flow": "bf16"}, ["flow (was 'fp8', now 'bf16')"]),
        ({"optimizer": {"lr": 1e-4}}, ["optimizer.lr (was 0.001, now 0.0001)"]),
        ({"rollout__prompts_per_step": 4, "algorithm": {}}, ["rollout.prompts_per_step", "algorithm.updates_per_step"]),
        ({"task": {"options": {"digits": [1, 1]}}}, ["task.name", "task.data", "task.options"]),
        ({"eval__prompts": 3}, ["eval.prompts (was 4, now 3)"]),
    ],
)
def test_another_run_is_refused_and_nothing_is_touched(setting: Setting, changes: dict[str, Any], words: list[str]) -> None:
    run = setting.root / "other"
    if not run.exists():
        setting.copy("other")
    before = snapshot(run)
    with pytest.raises(ValueError, match="cannot go on with other settings") as caught:
        run_training(setting.config("other", steps=9, **changes), resume=True)
    assert [word for word in [*words, "step-000004", "config.yaml"] if word not in str(caught.value)] == []
    assert snapshot(run) == before


def test_an_fp8_cache_is_exact_in_a_run_and_belongs_to_its_checkpoints(setting: Setting) -> None:
    assert run_training(setting.config("codes", steps=2, kv_cache="fp8"))
    run = setting.root / "codes"
    assert all(r["logprob_diff/max"] == 0.0 and r["grad_norm"] > 0 for r in rows(run) if r["kind"] == "train")
    assert rows(run) != rows(setting.whole)[: len(rows(run))], "another policy samples"
    folder = checkpoint_folder(run, 2)
    state = json.loads((folder / "state.json").read_text())
    assert state["kv_cache"] == "fp8"
    with pytest.raises(ValueError, match="kv_cache 'fp8', but the run has flow 'fp8' with 8 and kv_cache 'bf16'"):
        load_state(folder, None, "fp8", state["fp8_layers"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kv_cache \(was 'fp8', now 'bf16'\)"):
        run_training(setting.config("codes"), resume=True)
    assert run_training(setting.config("codes", kv_cache="fp8"), resume=True)
    assert latest_checkpoint(run) == checkpoint_folder(run, 4)


def test_another_model_is_refused(setting: Setting) -> None:
    run = setting.copy("model2", without=(4,))
    other = tiny_model(setting.root / "larger", intermediate_size=80)
    with pytest.raises(ValueError, match=r"model \(was"):
        run_training(setting.config("model2", model=str(other)), resume=True)
    # The folder of that name now holds another model: found when the checkpoint is read.
    saved = load_config(run / "config.yaml").model_copy(update={"model": str(other)})
    (run / "config.yaml").write_text(json.dumps(saved.model_dump(mode="json")))
    with pytest.raises(ValueError, match="holds another model"):
        run_training(setting.config("model2", model=str(other)), resume=True)


def test_a_broken_checkpoint_is_named(setting: Setting) -> None:
    run = setting.copy("broken")
    masters = checkpoint_folder(run, 4) / "masters.safetensors"
    masters.write_bytes(masters.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"step-000004.masters\.safetensors is missing or broken"):
        run_training(setting.config("broken", steps=5), resume=True)


def test_a_schedule_that_depends_on_all_steps_keeps_them(setting: Setting) -> None:
    decay = {"lr": 1e-3, "schedule": "linear"}
    assert run_training(setting.config("decay", steps=1, optimizer=decay))
    with pytest.raises(ValueError, match=r"steps \(was 1, now 2\)"):
        run_training(setting.config("decay", steps=2, optimizer=decay), resume=True)


def test_there_must_be_a_run_to_resume(setting: Setting, tmp_path: Path) -> None:
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="nothing to resume"):
            run_training(setting.config("none", folder=str(folder)), resume=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_before_weights_load(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetrl.run.load_weights", lambda *_: pytest.fail("weights were loaded"))
    run = setting.copy("used")
    before = snapshot(run)
    with pytest.raises(ValueError, match="already holds"):
        run_training(setting.config("used"))
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match="already holds a run"):
        run_training(setting.config("used"))
    assert snapshot(run).items() <= before.items()


def test_the_checkpoint_is_a_model_that_others_load(setting: Setting) -> None:
    checkpoint = checkpoint_folder(setting.whole, 4)
    config = read_config(checkpoint / "model")
    weights = load_weights(checkpoint / "model", config)
    masters = load_file(checkpoint / "masters.safetensors")
    assert weights.keys() == masters.keys()
    assert all(torch.equal(weights[name], masters[name].bfloat16()) for name in weights)
    # transformers: the same BF16 weights in its own layout, so its logits are those of a model filled from ours.
    theirs = AutoModelForCausalLM.from_pretrained(str(checkpoint / "model"), dtype=torch.bfloat16).eval()
    assert torch.equal(theirs.get_input_embeddings().weight, weights["embed"])
    assert theirs.lm_head.weight.data_ptr() == theirs.get_input_embeddings().weight.data_ptr()
    tokens = torch.tensor([[256, 49, 43, 50, 61]])
    with torch.no_grad():
        ours, their_logits = _logits(checkpoint / "model", tokens[0]), theirs(tokens).logits[0].float()
    assert torch.allclose(ours, their_logits, atol=0.03) and ours.std() > 0.05
    # And a run can start from it.
    assert run_training(parse_config({**setting.config("next", steps=1).model_dump(), "model": str(checkpoint / "model")}))


def _logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the BF16 forward of jetrl, centred as log-probabilities are not."""
    from jetrl.model.context import PackedContext
    from jetrl.model.transformer import Transformer

    config = read_config(folder)
    model = Transformer(config, ())
    model.load(load_weights(folder, config))
    hidden = model.forward(tokens, PackedContext.of([len(tokens)]))
    return hidden.float() @ model.head.value.value.float().T
