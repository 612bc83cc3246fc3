"""A model of a few ten thousand parameters and runs that take a second, for the tests of trainer, loop and command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl.config import RunConfig, parse_config
from tests.random_models import save_random_model

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
# What a clock or a machine decides, in a row of metrics.jsonl.
_MEASURED = ("time", "throughput/", "memory/", "rollout/prefill_seconds", "rollout/decode_seconds")


def tiny_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Write a tiny random model with a byte tokenizer; a token is a byte, so one-digit sums have prompts of 4 tokens."""
    return save_random_model(folder, family, **{"tied": True, **SIZES, **changes})


REWARD = """
def score(question, completion, answer):
    return len(set(completion)) / 6  # any model gets some of it

def odd(question, completion, answer):
    n = len(completion.encode())
    if n % 3 == 0:
        raise KeyError("no such key")
    return None if n % 3 == 1 else float("nan")

def huge(question, completion, answer):
    return 1e31
"""


def own_task(folder: Path, function: str = "score", problems: int = 20) -> dict[str, Any]:
    """A task with a user's reward: files in `folder`, and the settings that name them."""
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    lines = [json.dumps({"question": f"q{i}:", "answer": str(i)}) for i in range(problems)]
    (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {"name": f"{folder / 'reward.py'}:{function}", "data": str(folder / "data.jsonl")}


def tiny_config(model: Path, folder: Path, /, **changes: Any) -> RunConfig:
    """A run of 4 steps with 2 x 4 completions of 6 tokens; `changes` by dotted key with __ for the dot."""
    tree: dict[str, Any] = {
        "model": str(model),
        "folder": str(folder),
        "steps": 4,
        "task": {"options": {"digits": [1, 1]}},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 6},
        "optimizer": {"lr": 1e-3},
        "eval": {"prompts": 4},
    }
    for key, value in changes.items():
        section, _, leaf = key.rpartition("__")
        (tree.setdefault(section, {}) if section else tree)[leaf] = value
    return parse_config(tree)


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows of a run's file, without what a clock or a machine decides."""
    lines = [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(_MEASURED)} for row in lines]


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run `jetrl WORDS` in this process: exit status, standard output, standard error. An exception is the test's failure."""
    from jetrl.cli import main

    monkeypatch.setattr(sys, "argv", ["jetrl", *map(str, words)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def environment() -> dict[str, str]:
    """For subprocesses: one thread, so that tests do not starve each other."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
