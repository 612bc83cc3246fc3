"""The configuration: what a user may write, and what a wrong line says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jetrl.config import RunConfig, known_keys, load_config, parse_config, save_config


def _load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, list(overrides))


def _refused(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        _load(tmp_path, text, *overrides)
    return str(caught.value)


def test_defaults_are_those_of_the_algorithm(tmp_path: Path) -> None:
    config = _load(tmp_path, "")
    assert config == RunConfig()
    assert (config.flow, config.model, config.on_mismatch) == ("fp8", "demo", "stop")
    assert (config.algorithm.loss, config.algorithm.clip_low, config.algorithm.clip_high) == ("token_mean", 0.2, 0.28)
    assert (config.algorithm.kl_coef, config.algorithm.importance_cap) == (0.0, None)


def test_at_most_fifty_knobs() -> None:
    keys = known_keys()
    assert len(keys) == len(set(keys)) <= 50
    assert {"flow", "task.options", "rollout.group_size", "eval.samples"} <= set(keys)


def test_file_and_overrides(tmp_path: Path) -> None:
    text = "steps: 7\ntask: {name: countdown, options: {numbers: 3}}\nrollout: {group_size: 4}\n"
    config = _load(tmp_path, text, "flow=bf16", "task.options.digits=[1,3]", "optimizer.lr=3e-4", "task.data=a b.jsonl")
    assert (config.steps, config.flow, config.rollout.group_size, config.optimizer.lr) == (7, "bf16", 4, 3e-4)
    assert config.task.options == {"numbers": 3, "digits": [1, 3]}
    assert config.task.data == "a b.jsonl"


def test_an_override_of_a_section_replaces_it(tmp_path: Path) -> None:
    config = _load(tmp_path, "rollout: {group_size: 4, temperature: 0.5}", "rollout={group_size: 2}")
    assert (config.rollout.group_size, config.rollout.temperature) == (2, 1.0)
    assert _load(tmp_path, "loggers: [wandb]", "loggers=[]").loggers == []
    assert _load(tmp_path, "folder: x", "folder=null").folder is None


@pytest.mark.parametrize("written", ["1e-5", "1E-5", "1.0e-5", "+1e-05", "0.00001", ".1e-4", "1.e-5"])
def test_numbers_in_scientific_notation_are_numbers(tmp_path: Path, written: str) -> None:
    text = f"optimizer: {{lr: {written}}}\ntask: {{options: {{x: {written}}}}}"
    config = _load(tmp_path, text, f"task.options.y={written}")
    assert config.optimizer.lr == config.task.options["x"] == config.task.options["y"] == 1e-5


def test_texts_that_only_look_like_numbers_stay_texts(tmp_path: Path) -> None:
    config = _load(tmp_path, "", "task.options={a: 1e5x, b: e5, c: '1e5', d: 1e5-2}")
    assert config.task.options == {"a": "1e5x", "b": "e5", "c": "1e5", "d": "1e5-2"}


def test_an_empty_section_is_the_default_and_can_be_overridden(tmp_path: Path) -> None:
    assert _load(tmp_path, "rollout:\n  # group_size: 4\n") == RunConfig()
    assert _load(tmp_path, "rollout:\n", "rollout.group_size=4").rollout.group_size == 4


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("stepz", "steps"),
        ("rolout", "rollout"),
        ("rolout.group_size", "rollout"),
        ("rollout.group_sise", "rollout.group_size"),
        ("group_size", "rollout.group_size"),
        ("temperature", "rollout.temperature"),
        ("temprature", "rollout.temperature"),
        ("eval.temprature", "eval.temperature"),
        ("rollout.lr", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer."),
        ("task.optoins", "task.options"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, key: str, meant: str) -> None:
    assert f"did you mean '{meant}" in _refused(tmp_path, "", f"{key}=3")
    tree: dict[str, object] = {}
    *parents, leaf = key.split(".")
    inner = tree
    for parent in parents:
        inner = inner.setdefault(parent, {})  # type: ignore[assignment]
    inner[leaf] = 3
    message = _refused(tmp_path, yaml.safe_dump(tree))
    assert "unknown key" in message
    assert f"did you mean '{meant}" in message
    assert "c.yaml" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps=many", ["steps", "integer", "'many'"]),
        ("steps=1.5", ["steps", "1.5"]),
        ("steps=yes", ["steps", "truth value"]),
        ("steps=0", ["steps", "greater than or equal to 1", "0"]),
        ("optimizer.lr=0", ["optimizer.lr", "greater than 0"]),
        ("optimizer.lr=.nan", ["optimizer.lr", "finite"]),
        ("rollout.temperature=.inf", ["rollout.temperature", "finite"]),
        ("rollout.temperature=0", ["rollout.temperature", "greater than 0"]),
        ("algorithm.clip_low=1", ["algorithm.clip_low", "less than 1"]),
        ("algorithm.loss=mean", ["algorithm.loss", "token_mean", "'mean'"]),
        ("flow=fp16", ["flow", "fp8_rollout", "'fp16'"]),
        ("loggers=[tensorbord]", ["loggers.0", "tensorboard", "'tensorbord'"]),
        ("model=3", ["model", "string", "3"]),
        ("task=countdown", ["task is a section", "task.name="]),
        ("task.options=3", ["task.options", "dictionary"]),
        ("task.name.x=3", ["task.name", "string"]),
        ("steps", ["not key=value"]),
        ("=3", ["not key=value"]),
        ("task.options.digits=[1,", ["task.options.digits=[1,", "not valid YAML"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_wanted(tmp_path: Path, override: str, words: list[str]) -> None:
    message = _refused(tmp_path, "", override)
    assert [word for word in words if word not in message] == []


def test_an_override_below_a_plain_value_is_refused(tmp_path: Path) -> None:
    assert "'steps' is 3, not a section" in _refused(tmp_path, "steps: 3", "steps.x=3")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.group_size=1"], ["group_size is 1", "Use 2 or more"]),
        (["rollout.group_size=1", "algorithm.advantage=dr_grpo"], ["group_size is 1", "Use 2 or more"]),
        (["algorithm.importance_cap=2"], ["importance_cap is 2.0", "'fp8'", "flow=fp8_rollout"]),
        (["rollout.prompts_per_step=6", "algorithm.updates_per_step=4"], ["(6)", "multiple", "(4)"]),
        (["rollout.cache_tokens=1000"], ["cache_tokens is 1000", "1280", "1024", "256"]),
    ],
)
def test_combinations_that_cannot_work_are_refused(tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    message = _refused(tmp_path, "", *overrides)
    assert [word for word in words if word not in message] == []


def test_the_neighbouring_combinations_work(tmp_path: Path) -> None:
    _load(tmp_path, "", "rollout.group_size=2", "algorithm.advantage=dr_grpo")
    _load(tmp_path, "", "algorithm.importance_cap=2", "flow=fp8_rollout")
    _load(tmp_path, "", "rollout.cache_tokens=1280")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("- a\n- b\n", "holds a list"),
        ("[]", "holds a list"),
        ("just words", "holds a str"),
        ("a: [1", "not valid YAML"),
        ("steps: 1\nsteps: 2\n", "'steps' stands there twice"),
        ("rollout: {group_size: 2, group_size: 4}\n", "'group_size' stands there twice"),
        ("1: 2\n", "not a valid configuration"),
        ("model: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, word: str) -> None:
    assert word in _refused(tmp_path, text)


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ValueError, match="no configuration file"):
            load_config(path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00steps")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_config(tmp_path / "binary.yaml")


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=1e-7", "task.options={digits: [1, 3], word: größer, rate: 1e-9}", "loggers=[wandb]"]
    config = _load(tmp_path, "flow: fp8_rollout", *overrides, "algorithm.importance_cap=2", "eval.temperature=0")
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    saved = yaml.safe_load((tmp_path / "saved.yaml").read_text(encoding="utf-8"))
    assert saved == config.model_dump(mode="json")  # every default is written, and plain YAML readers agree
    assert parse_config(saved) == config


def test_the_configuration_needs_no_torch() -> None:
    code = "import sys, jetrl.config; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sampling_that_cuts_the_support_is_refused_with_the_reason(tmp_path: Path) -> None:
    message = _refused(tmp_path, "", "rollout.top_p=0.9")
    assert "rollout.top_p is refused: it samples from another distribution" in message and "did you mean" not in message
