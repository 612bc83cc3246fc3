"""The command line as a user meets it: what each command prints and writes, and one line for what cannot work."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetrl.report.read import read_rows
from jetrl.train.state import checkpoint_step, latest_checkpoint
from tests.tiny_runs import command, own_task, rows, tiny_config, tiny_model


class Shell:
    """A folder with a model and a configuration, and the command line in it."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.model = folder, model
        self._patch, self._capsys = monkeypatch, capsys
        own_task(folder)
        config = tiny_config(model, Path("run"), steps=2, task={"name": "reward.py:score", "data": "data.jsonl"})
        (folder / "c.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")

    def __call__(self, *words: object) -> tuple[int, str, str]:
        return command(self._patch, self._capsys, *words)

    def files(self) -> list[Path]:
        """What lies in the folder; the bytecode of a user's reward is Python's own business."""
        return sorted(path for path in self.folder.rglob("*") if "__pycache__" not in path.parts)

    def refused(self, *words: object) -> str:
        """The reason for which a command was refused: one line, status 2, nothing written."""
        before = self.files()
        code, out, err = self(*words)
        assert (code, out) == (2, ""), (out, err)
        lines = [line for line in err.splitlines() if not line.startswith("Writing model")]
        assert len(lines) == 1 and lines[0].startswith("error: "), err
        assert self.files() == before
        return lines[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def shell(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, model, monkeypatch, capsys)


def test_train_report_and_resume(shell: Shell) -> None:
    code, out, _ = shell("train", "c.yaml", "flow=bf16")
    assert code == 0
    assert re.search(r"^ +2/2 .* 0\.0 ", out, re.M)
    assert "max logprob difference" in out and "run/report.html" in out
    code, out, _ = shell("train", "run/config.yaml", "--resume", "steps=3")
    assert code == 0 and re.search(r"^ +3/3 ", out, re.M) and not re.search(r"^ +2/", out, re.M)
    assert [r["step"] for r in rows(Path("run")) if r["kind"] == "train"] == [1, 2, 3]
    code, out, _ = shell("report", "run", "--out", "page.html")
    assert code == 0 and "page.html" in out and Path("page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_dry_run_prints_the_derived_numbers_and_writes_nothing(shell: Shell) -> None:
    before = shell.files()
    code, out, _ = shell("train", "c.yaml", "--dry-run", "algorithm.updates_per_step=2", "algorithm.kl_coef=0.1")
    assert code == 0
    for words in ("2 x 4 = 8", "2, with 4 optimizer steps", "4 in at most 1 microbatch", "16 prompts, 4 held out", "fp8: exact",
                  "10 tokens", "reference model for the KL", "KV cache"):  # fmt: skip
        assert words in out, (words, out)
    assert shell.files() == before


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["train", "nope.yaml"], "no configuration file at 'nope.yaml'"),
        (["train", "c.yaml", "model=nope"], "no model folder at 'nope'"),
        (["train", "c.yaml", "task.max_prompt_tokens=1"], "no prompt is left"),
        (["train", "c.yaml", "rollout.max_completion_tokens=600"], "512 positions"),
        (["train", "c.yaml", "task.data=nope.jsonl"], "nope.jsonl"),
        (["train", "c.yaml", "--resume"], "nothing to resume in 'run'"),
        (["train", "c.yaml", "--resume", "folder=null"], "folder=RUN_FOLDER"),
        (["train", "c.yaml", "folder=c.yaml"], "is a file"),
        (["train", "c.yaml", "loggers=[trackio]"], "jetrl[trackio]"),
        (["eval", "nope", "--config", "c.yaml"], "no model folder"),
        (["generate", "MODEL"], "give --prompt TEXT or --file FILE"),
        (["generate", "MODEL", "--file", "nope.txt"], "no prompt file"),
        (["generate", "MODEL", "--prompt", ""], "empty prompt"),
        (["generate", "MODEL", "--prompt", "a", "--max-tokens", "600"], "512 positions"),
        (["generate", "MODEL", "--prompt", "a", "--out", "."], "Is a directory"),
        (["check", "MODEL", "--flow", "fp8_rollout"], "nothing to prove"),
        (["report", "nope"], "no run folder at 'nope'"),
        (["report", "."], "not a run folder"),
        (["doctor", "nope.yaml"], "no configuration file"),
        (["fetch", "llama"], "known: smollm2"),
        (["flow", "--svg", "no/such/folder.svg"], "No such file"),
    ],
)
def test_what_cannot_work_is_one_line(shell: Shell, words: list[str], reason: str) -> None:
    if words[0] == "doctor" or words[0] == "flow":  # prints before it comes to the file
        code, _, err = shell(*words)
        assert code == 2 and reason in err and "Traceback" not in err
    else:
        assert reason in shell.refused(*(str(shell.model) if word == "MODEL" else word for word in words))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["rollout.group_size=1"], "group_size is 1"),
        (["algorithm.importance_cap=2"], "importance_cap is 2.0 in flow 'fp8'"),
        (["rollout.prompts_per_step=3", "algorithm.updates_per_step=2"], "must be a multiple"),
        (["rollout.cache_tokens=100"], "cache_tokens is 100"),
        (["optimizer.lrr=1"], "did you mean 'optimizer.lr'"),
    ],
)
def test_a_wrong_setting_is_named_below_its_file(shell: Shell, overrides: list[str], reason: str) -> None:
    code, out, err = shell("train", "c.yaml", *overrides)
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert first == "error: c.yaml is not a valid configuration:" and reason in second
    assert not Path("run").exists()


def test_a_broken_model_folder(shell: Shell) -> None:
    Path("m").mkdir()
    Path("m/config.json").write_text('{"architectures": ')
    assert "config.json" in shell.refused("train", "c.yaml", "model=m")
    Path("m/config.json").unlink()
    assert "config.json" in shell.refused("train", "c.yaml", "model=m")


def test_a_folder_in_use_is_refused(shell: Shell) -> None:
    assert shell("train", "c.yaml", "steps=1")[0] == 0
    assert "already holds" in shell.refused("train", "c.yaml")
    assert "seed (was 0, now 1)" in shell.refused("train", "c.yaml", "--resume", "seed=1")


def test_a_wrong_use_of_the_command_line_is_explained(shell: Shell) -> None:
    code, _, err = shell("trian", "c.yaml")
    assert code == 2 and "trian" in err
    code, _, err = shell("flow", "fp16")
    assert code == 2 and "fp8_rollout" in err


def test_eval(shell: Shell) -> None:
    code, out, _ = shell("eval", shell.model, "--config", "c.yaml", "eval.samples=2", "flow=bf16")
    assert code == 0
    assert "avg@2" in out and "pass@2" in out and "4, 2 completions each" in out and "flow bf16" in out
    code, out, _ = shell("eval", shell.model, "--config", "c.yaml", "task.name=reward.py:odd")
    assert code == 0 and "grading failed on 4 completions" in out


def test_generate(shell: Shell) -> None:
    Path("p.txt").write_text("1+2=\n\n3+4=\n", encoding="utf-8")
    Path("p.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": "3+4=", "more": 1}\n', encoding="utf-8")
    options = ("--samples", 2, "--max-tokens", 5, "--seed", 3, "--flow", "bf16")
    tables = []
    for file in ("p.txt", "p.jsonl"):
        code, out, _ = shell("generate", shell.model, "--file", file, "--out", "deep/out.jsonl", *options)
        assert code == 0 and "4 completions in deep/out.jsonl" in out
        lines = [json.loads(line) for line in Path("deep/out.jsonl").read_text(encoding="utf-8").splitlines()]
        tables.append(sorted(lines, key=lambda row: row["index"]))
    assert tables[0] == tables[1]
    assert [row["index"] for row in tables[0]] == [0, 0, 1, 1]
    assert [row["prompt"] for row in tables[0]] == ["1+2=", "1+2=", "3+4=", "3+4="]
    for row in tables[0]:
        assert 1 <= len(row["token_ids"]) == len(row["logprobs"]) <= 5 and max(row["logprobs"]) <= 0
    assert tables[0][0]["token_ids"] != tables[0][1]["token_ids"]
    code, out, _ = shell("generate", shell.model, "--prompt", "[b]hi", "--temperature", 0, "--max-tokens", 3, "--chat")
    assert code == 0 and "[b]hi" in out and "tokens/s" in out
    Path("p.jsonl").write_text('{"question": "1+2="}\n', encoding="utf-8")
    assert "line 1: a JSON object with a `prompt`" in shell.refused("generate", shell.model, "--file", "p.jsonl")


def test_generate_keeps_what_has_ended_when_it_is_interrupted(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    import jetrl.evaluate as evaluate
    from jetrl.rollout.engine import Engine

    monkeypatch.setattr(evaluate, "_RUNNING", 1)  # one after the other
    monkeypatch.setattr(evaluate, "_SAID_EVERY", 0.0)
    prompts = [word for p in ("1+2=", "3+4=", "5+6=") for word in ("--prompt", p)]
    words = ("generate", shell.model, *prompts, "--samples", 2, "--max-tokens", 4, "--out", "out.jsonl")
    code, out, err = shell(*words)
    assert code == 0 and "6 completions in out.jsonl" in out
    assert re.search(r"^3/6 completions, [\d,]+ tokens/s, 0 s$", err, re.M) and "6/6 completions" in err
    whole = Path("out.jsonl").read_text(encoding="utf-8").splitlines()
    real = Engine.step

    def interrupted(engine: Engine, generation: Any) -> None:
        if generation.finished == 5:
            raise KeyboardInterrupt
        real(engine, generation)

    monkeypatch.setattr(Engine, "step", interrupted)
    assert shell(*words)[0] != 0
    assert Path("out.jsonl").read_text(encoding="utf-8").splitlines() == whole[:4]


@pytest.mark.parametrize(("flow", "kv_cache"), [("fp8", "bf16"), ("bf16", "bf16"), ("fp8", "fp8")])
def test_check(shell: Shell, flow: str, kv_cache: str) -> None:
    code, out, _ = shell("check", shell.model, "--flow", flow, "--kv-cache", kv_cache, "--tokens", 60)
    assert code == 0 and f"flow {flow}, kv_cache {kv_cache}" in out
    claims = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    assert len(claims) >= 8 and all(int(claim[-1]) == 0 for claim in claims)
    assert "zero differing bits" in out


def test_check_ends_with_status_1_when_bits_differ(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl.model.transformer import Transformer

    real = Transformer.next_tokens

    def wrong(*arguments: Any) -> tuple[Any, Any]:
        tokens, logprobs = real(*arguments)
        return tokens, logprobs * 1.001

    monkeypatch.setattr(Transformer, "next_tokens", wrong)
    code, out, _ = shell("check", shell.model, "--tokens", 60)
    assert code == 1 and "first difference in logprob" in out and "zero differing bits" not in out


def test_flow(shell: Shell) -> None:
    code, out, _ = shell("flow", "fp8_rollout", "--svg", "f.svg")
    assert code == 0 and "E4M3 1x128" in out and Path("f.svg").read_text(encoding="utf-8").lstrip().startswith("<svg")
    assert "exact: the rollout is a subgraph" in shell("flow", "fp8", "--model", shell.model)[1]
    assert "1xhead" not in out and "E4M3 1xhead" in shell("flow", "bf16", "--kv-cache", "fp8")[1]
    assert "exact: the rollout is a subgraph" not in out


def test_doctor(shell: Shell) -> None:
    code, out, _ = shell("doctor")
    assert code == 0 and "torch" in out and "FP8 linear forward" in out and "What will run" not in out
    assert shell("doctor", "--gpu", "h200")[0] == 2
    code, out, _ = shell("doctor", "c.yaml", "rollout.group_size=2")
    assert code == 0 and "2 x 2 = 4" in out


def test_help_and_configuration_errors_come_without_torch() -> None:
    code = "import sys, jetrl.cli; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _process(folder: Path, *words: str) -> subprocess.Popen[str]:
    code = "import sys; from jetrl.cli import main; sys.argv[0] = 'jetrl'; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ctrl_c_finishes_the_step_saves_and_can_be_resumed(shell: Shell) -> None:
    process = _process(shell.folder, "train", "c.yaml", "steps=100000")
    metrics, deadline = Path("run/metrics.jsonl"), time.monotonic() + 120
    while not metrics.is_file() or '"kind": "train"' not in metrics.read_text(encoding="utf-8"):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    done = max(r["step"] for r in read_rows(metrics) if r["kind"] == "train")
    checkpoint = latest_checkpoint(Path("run"))
    assert checkpoint is not None and checkpoint_step(checkpoint) == done < 100000
    assert Path("run/report.html").is_file() and "max logprob difference" in out
    assert "stopping after this step" in err
    assert f"stopped after step {done} of 100000. Go on with: jetrl train run/config.yaml --resume" in err
    assert "Traceback" not in err
    assert shell("train", "run/config.yaml", "--resume", f"steps={done + 1}")[0] == 0
    assert shell("train", "c.yaml", f"steps={done + 1}", "folder=unbroken")[0] == 0
    assert rows(Path("run")) == rows(Path("unbroken"))
