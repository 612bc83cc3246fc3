"""Run folders and the live display."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jetrl.config import RunConfig, load_config, parse_config
from jetrl.report.display import Display, sparkline
from jetrl.report.read import duration, number, read_run, summarize
from jetrl.report.record import RunFolder, loggers_of, sample_row
from jetrl.rl.types import Completion, Grade, Problem, Prompt, Rollout


def write_steps(run: RunFolder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        run.train(step, {"reward/mean": step / 10, "time/step": 1.0, "logprob_diff/max": 0.0})
        run.samples([{"step": step, "completion": f"text {step}"}])
        if step % 2 == 0:
            run.evaluation(step, {"eval/avg@k": step / 10, "eval/k": 1})
            run.event(step, "note", "x")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = [*(folder / "metrics.jsonl").open(), *(folder / "samples.jsonl").open()]
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def test_a_continued_run_has_the_files_of_an_unbroken_one(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "whole", RunConfig()) as run:
        write_steps(run, 1, 6)
    with RunFolder(tmp_path / "killed", RunConfig()) as run:
        write_steps(run, 1, 5)
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    with RunFolder(tmp_path / "killed", RunConfig(), resume_step=3) as run:
        write_steps(run, 4, 6)
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    assert not list((tmp_path / "killed").glob("*.tmp"))


def test_truncation_of_an_open_run_goes_on_writing(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "r", RunConfig()) as run:
        write_steps(run, 1, 3)
        run.truncate_after(1)
        write_steps(run, 2, 2)
    assert [row["step"] for row in read_run(tmp_path / "r").train] == [1, 2]


def test_each_row_is_on_disk_at_once(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r", RunConfig())
    run.train(1, {"reward/mean": 0.1})
    assert (tmp_path / "r" / "metrics.jsonl").read_text().endswith("}\n")
    run.close()


def test_a_folder_in_use_and_a_folder_without_a_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "r", RunConfig()):
        pass
    with RunFolder(tmp_path / "r", parse_config({"seed": 3})) as run:  # nothing was written yet: not a run
        run.train(1, {})
    assert load_config(tmp_path / "r" / "config.yaml").seed == 3
    with pytest.raises(ValueError, match=r"already holds a run.*Resume it, or choose another"):
        RunFolder(tmp_path / "r", RunConfig())
    with pytest.raises(ValueError, match="nothing to resume"):
        RunFolder(tmp_path / "none", RunConfig(), resume_step=0)
    assert not (tmp_path / "none").exists()


def test_not_finite_becomes_null_and_tensors_are_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "r", RunConfig()) as run:
        row = run.train(1, {"a": math.nan, "b": -math.inf, "c": 1.5})
        assert (row["a"], row["b"], row["c"]) == (None, None, 1.5)
        with pytest.raises(ValueError, match=r"row\.d is a complex"):
            run.train(2, {"d": 1j})
    assert len(read_run(tmp_path / "r").train) == 1


def test_sample_row_keeps_the_bits_of_the_logprobs(tmp_path: Path) -> None:
    logprobs = [-0.10000000149011612, -3.4028234663852886e38]
    prompt = Prompt(Problem("p1", "1+1", "2"), "1+1=", [5, 6])
    rollout = Rollout(prompt, Completion([7, 8], logprobs, "stop", 4), "2\u2028\ud83d", Grade(1.0, True), 3, 0.5)
    with RunFolder(tmp_path / "r", RunConfig()) as run:
        run.train(1, {})
        run.samples([sample_row(rollout, 1, ["2", ""])])
    (row,) = read_run(tmp_path / "r").samples
    assert row["logprobs"] == logprobs and row["completion"] == "2\u2028\ud83d"
    assert (row["group"], row["answer"], row["policy_version"], row["tokens"]) == (3, "2", 4, ["2", ""])


def test_a_missing_logger_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match=rf"pip install 'jetrl\[{name}\]'"):
            RunFolder(tmp_path / "r", parse_config({"loggers": [name]}))
    assert not (tmp_path / "r").exists()


def test_tensorboard_is_the_default_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loggers_of(parse_config({"loggers": []})) == []
    monkeypatch.setattr("jetrl.report.record.find_spec", lambda name: object())
    assert loggers_of(parse_config({})) == ["tensorboard"]
    monkeypatch.setattr("jetrl.report.record.find_spec", lambda name: None)
    assert loggers_of(parse_config({})) == []


def test_tensorboard_holds_the_rows_also_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = parse_config({"loggers": ["tensorboard"]})
    with RunFolder(tmp_path / "r", config) as run:
        write_steps(run, 1, 5)
    with RunFolder(tmp_path / "r", config, resume_step=3) as run:
        write_steps(run, 4, 4)
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("reward/mean")
    assert [s.step for s in scalars] == [1, 2, 3, 4]
    assert [round(s.value, 6) for s in scalars] == [0.1, 0.2, 0.3, 0.4]


def test_wandb_and_trackio_get_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tracker:
        def __init__(self) -> None:
            self.logged: list[tuple[Any, ...]] = []
            self.ids: list[Any] = []
            self.finished = 0

        def init(self, **options: Any) -> Tracker:
            self.ids.append(options.get("id"))
            return self

        def define_metric(self, *_: Any, **__: Any) -> None: ...

        def log(self, values: dict[str, float], step: int | None = None) -> None:
            self.logged.append((values, step))

        def finish(self) -> None:
            self.finished += 1

    trackers = {name: Tracker() for name in ("wandb", "trackio")}
    for name, tracker in trackers.items():
        module = types.ModuleType(name)
        module.init = tracker.init  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    config = parse_config({"loggers": ["wandb", "trackio"]})
    with RunFolder(tmp_path / "r", config) as run:
        run.train(1, {"a": 2.0, "b": math.nan})
        run.event(1, "note")
    with RunFolder(tmp_path / "r", config, resume_step=1):
        pass
    assert trackers["wandb"].logged == [({"a": 2.0, "step": 1}, None)]
    assert trackers["trackio"].logged == [({"a": 2.0}, 1)]
    assert len(set(trackers["wandb"].ids)) == 1 and [t.finished for t in trackers.values()] == [2, 2]


def shown(exact: bool, terminal: bool, rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system="standard" if terminal else None)
    with Display(40, exact=exact, console=console) as display:
        display.phase("rollout")
        for row in rows:
            display.train(row)
        display.evaluation({"step": 2, "eval/avg@k": 0.5, "eval/pass@k": 0.75, "eval/k": 4, "time/eval": 3})
        display.event({"step": 2, "event": "grade_error", "detail": "[red]not markup[/red] " + "x" * 90})
    return out.getvalue()


def test_plain_lines_are_aligned_and_hold_no_control_codes() -> None:
    row = {"step": 1, "reward/mean": 0.5, "accuracy/train": 0.25, "logprob_diff/max": 0.0, "time/step": 2.0}
    text = shown(True, False, [row, row | {"step": 2, "logprob_diff/max": None, "throughput/train": 12345.6}])
    head, first, second, evaluation, event = text.splitlines()
    assert "\x1b" not in text and len(head) == len(first) == len(second) < 80
    assert first.split() == ["1/40", "0.500", "0.250", "-", "0.0", "-", "-", "1:18"]
    assert second.split()[-4:] == ["finite", "-", "12,346", "1:16"]
    assert "avg@4 0.500, pass@4 0.750" in evaluation
    assert "[red]not markup[/red]" in event and event.endswith("x" * 90)


def test_the_colour_of_a_difference_depends_on_the_flow() -> None:
    row = {"step": 1, "logprob_diff/max": 1e-6}
    assert "\x1b[1;31m  1.00e-06" in shown(True, True, [row])
    assert "\x1b[33m  1.00e-06" in shown(False, True, [row])


def test_final_table(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "r", RunConfig()) as run:
        run.evaluation(0, {"eval/avg@k": 0.4, "eval/k": 4})
        write_steps(run, 1, 1)
        run.evaluation(1, {"eval/avg@k": 0.7, "eval/k": 4})
    out = io.StringIO()
    display = Display(1, exact=True, console=Console(file=out, width=100))
    display.final(summarize(read_run(tmp_path / "r")), Path("runs/r/report.html"))
    text = out.getvalue()
    assert "0.400 -> 0.700 (+0.300)" in text and "avg@4" in text
    assert re.search(r"max logprob difference\W+0\.0 ", text) and "runs/r/report.html" in text


def test_small_things() -> None:
    assert [duration(s) for s in (None, 42, 187, 3787)] == ["–", "42s", "3:07", "1:03:07"]
    assert [number(v) for v in (None, 0.0, 0.1234, 2345.6, 1e-7)] == ["–", "0", "0.123", "2,346", "1.00e-07"]
    assert sparkline([0, 1, 2]) == "▁▅█"
    assert sparkline([]) == "" and sparkline([3, 3]) == "▁▁"
