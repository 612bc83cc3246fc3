"""The report page, on synthetic run folders: what it must show, and what must not break it."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jetrl.config import RunConfig, parse_config
from jetrl.report.charts import Series, line_chart, thin, tick_label, ticks
from jetrl.report.page import group_runs, mean_line, write_report
from jetrl.report.read import flatten, read_run, summarize
from jetrl.report.record import RunFolder

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)> & $title ${x}"


def train_row(step: int, steps: int, flow: str, rng: random.Random) -> dict[str, Any]:
    course = step / steps
    gain = 0.35 if flow != "fp8_rollout" else 0.30 * math.sin(min(course * 1.5, 1.45) * math.pi * 0.62)
    accuracy = min(1.0, max(0.0, 0.4 + gain * (1 - math.exp(-3 * course)) + rng.gauss(0, 0.03)))
    differs = flow == "fp8_rollout"
    diff = math.exp(rng.gauss(-2.2 + course, 0.4)) if differs else 0.0
    rollout, train = rng.gauss(1.1, 0.08), rng.gauss(0.8, 0.05)
    return {
        "policy_version": step - 1,
        "reward/mean": accuracy * 0.97 + 0.01,
        "reward/std": 0.45,
        "accuracy/train": accuracy,
        "accuracy/unparsed": 0.12 * math.exp(-4 * course),
        "grade/errors": 0,
        "length/mean": 14 + 10 * course + rng.gauss(0, 0.7),
        "length/max": 48,
        "length/truncated": 0.09 * math.exp(-3 * course) + abs(rng.gauss(0, 0.005)),
        "advantage/zero_groups": float(round(3 + 4 * course + rng.random())),
        "logprob_diff/max": diff,
        "logprob_diff/mean": diff / 30,
        "mismatch_kl": diff**2 / 40,
        "token_diff/share": 0.94 if differs else 0.0,
        "loss/policy": rng.gauss(0, 0.02),
        "loss/kl": 0.0,
        "entropy": 0.9 - 0.5 * course + rng.gauss(0, 0.02),
        "ratio/clipped_low": 0.0,
        "ratio/clipped_high": 0.0,
        "grad_norm": 0.8 + abs(rng.gauss(0, 0.2)),
        "lr": 1e-4,
        "optimizer/skipped": 0,
        "time/rollout": rollout,
        "time/grade": 0.04,
        "time/train": train,
        "time/publish": 0.06,
        "time/step": rollout + train + 0.13,
        "throughput/rollout": 2200 / rollout,
        "throughput/train": 3600 / train,
        "memory/peak_gb": 0.71,
    }


def sample_rows(step: int, rng: random.Random, text: str = "7 + 6 = 13\nSo the answer is 13.") -> list[dict[str, Any]]:
    tokens = re.findall(r"\s?\S+|\s", text)
    return [
        {
            "step": step,
            "group": 0,
            "problem_id": "add-1",
            "prompt": "Q: 4 + 5 =\nA: 9\n\nQ: 7 + 6 =\nA:",
            "completion": text,
            "answer": "13",
            "reward": float(i == 1),
            "correct": i == 1,
            "parsed": True,
            "advantage": 1.0 if i else -1.0,
            "finish_reason": "stop",
            "policy_version": step - 1,
            "token_ids": list(range(len(tokens))),
            "logprobs": [-rng.expovariate(1.2) for _ in tokens],
            "tokens": tokens,
        }
        for i in range(2)
    ]


def write_run(folder: Path, flow: str = "fp8", seed: int = 0, steps: int = 120, **more: Any) -> Path:
    """A synthetic run folder, written by the same code that a run uses."""
    rng = random.Random(f"{flow}{seed}")
    tree = {"flow": flow, "seed": seed, "steps": steps, "folder": str(folder), **more}
    with RunFolder(folder, parse_config(tree)) as run:
        for step in range(steps + 1):
            row = train_row(step, steps, flow, rng)
            if step:
                run.train(step, row)
                run.samples(sample_rows(step, rng))
            if step % max(steps // 6, 1) == 0:
                accuracy = row["accuracy/train"]
                values = {"eval/avg@k": accuracy, "eval/pass@k": accuracy**0.4, "eval/k": 4, "eval/prompts": 64}
                run.evaluation(step, values | {"eval/unparsed": 0.01, "eval/length": 20.0, "time/eval": 2.0})
        if flow == "fp8_rollout":
            run.event(steps // 2, "grade_error", "problem add-17: the reward function raised ZeroDivisionError; reward 0")
    return folder


def put(folder: Path, rows: list[dict[str, Any]], samples: list[dict[str, Any]] | None = None) -> Path:
    with RunFolder(folder, RunConfig()) as run:
        for row in rows:
            run.train(row["step"], {k: v for k, v in row.items() if k != "step"})
        run.samples(samples or [])
    return folder


class Tags(HTMLParser):
    """Which elements a page really has, and that they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in {"src", "href"}], attrs
        if tag not in {"meta", "br", "img", "link"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(folders: list[Path], out: Path) -> tuple[str, list[str]]:
    html = write_report(folders, out).read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(html)
    assert not tags.open
    assert not {"img", "link", "iframe", "base", "object"} & set(tags.seen)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert not re.search(r"\bnan\b|NaN|Infinity", html)
    return html, tags.seen


def test_one_run(tmp_path: Path) -> None:
    html, tags = page_of([write_run(tmp_path / "demo")], tmp_path / "sub" / "report.html")
    assert "the same 32 bits at all 120 steps" in html
    assert "exactly 0 at every step" in html
    assert "avg@4" in html and "pass@4" in html
    assert [f"<h3>Step {s} <" in html for s in (1, 61, 120)] == [True] * 3
    before = read_run(tmp_path / "demo").evals[0]["eval/avg@k"]
    assert f"{before * 100:.1f}%" in html
    assert tags.count("svg") >= 12


def test_runs_of_one_flow_share_a_colour_and_a_mean(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"{f}-{s}", f, s, 12) for f in ("bf16", "fp8", "fp8_rollout") for s in (0, 1, 2)]
    groups = group_runs([read_run(folder) for folder in folders])
    assert [(g.label, g.color, len(g.runs)) for g in groups] == [("bf16", 0, 3), ("fp8", 1, 3), ("fp8_rollout", 2, 3)]
    html, _ = page_of(folders, tmp_path / "r.html")
    assert "9 runs compared" in html and html.count("<nav>") == 1
    assert html.count("mean of 3") == 3
    assert "grade_error: 3" in html
    assert 'class="bad">' in html and 'class="good">0.0' in html


def test_groups_are_named_by_what_differs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", steps=3)
    b = write_run(tmp_path / "b", steps=3, optimizer={"lr": 3e-5})
    groups = group_runs([read_run(a), read_run(b)])
    assert [g.label for g in groups] == ["fp8 · lr=1e-06", "fp8 · lr=3e-05"]
    html, _ = page_of([a, b], tmp_path / "r.html")
    assert "<td>optimizer.lr</td><td>1e-06</td><td>3e-05</td>" in html


def test_texts_of_a_run_are_escaped_and_template_signs_stay(tmp_path: Path) -> None:
    folder = tmp_path / "<b>run"
    with RunFolder(folder, parse_config({"model": HOSTILE, "steps": 1})) as run:
        run.train(1, {"reward/mean": 0.5})
        run.event(1, HOSTILE, HOSTILE)
        rows = sample_rows(1, random.Random(0), HOSTILE)
        rows[0] |= {"prompt": HOSTILE * 9, "answer": HOSTILE}
        run.samples([rows[0], rows[1] | {"tokens": None, "reward": None}])
    html, tags = page_of([folder, write_run(tmp_path / "ok", steps=2)], tmp_path / "r.html")
    assert "<script>alert" not in html and "b" in tags and "<b>run" not in html
    assert html.count("$title ${x}") > 3


@pytest.mark.parametrize("rows", [
    [{"step": 1}],
    [{"step": 1, "reward/mean": math.nan, "logprob_diff/max": math.nan, "time/step": math.nan}],
    [{"step": s, "reward/mean": [0.1, math.nan, math.inf][s % 3], "grad_norm": -math.inf} for s in (1, 2, 5, 9)],
    [{"step": s, "logprob_diff/max": 10.0 ** -s if s % 2 else 0.0, "mismatch_kl": -1e-12} for s in range(1, 5)],
    [{"step": s, "time/rollout": 1.0, "time/step": 0.5, "entropy": 0.0} for s in range(1, 901)],
])  # fmt: skip
def test_rows_that_are_poor(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    poor = put(tmp_path / "poor", rows)
    page_of([poor], tmp_path / "one.html")
    page_of([poor, write_run(tmp_path / "full", steps=5)], tmp_path / "two.html")


def test_a_mismatch_that_is_not_finite_is_never_called_zero(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": 1, "logprob_diff/max": 0.0}, {"step": 2, "logprob_diff/max": math.nan}]
    folder = put(tmp_path / "r", rows)
    summary = summarize(read_run(folder))
    assert not summary.exact and summary.mismatch_text() == "not finite at 1 step"
    html, _ = page_of([folder], tmp_path / "r.html")
    assert "exactly 0 at every step" not in html and "the same 32 bits" not in html
    assert html.count('class="cut"') == 1
    missing = summarize(read_run(put(tmp_path / "m", [{"step": 1, "logprob_diff/max": 0.0}, {"step": 2}])))
    assert not missing.exact


def test_samples_with_too_few_logprobs_or_a_lone_surrogate(tmp_path: Path) -> None:
    rows = sample_rows(1, random.Random(0))
    rows[0]["logprobs"] = [-1.0]
    rows[1]["completion"] = rows[1]["tokens"][0] = "\ud83d"
    html, _ = page_of([put(tmp_path / "r", [{"step": 1}], rows)], tmp_path / "r.html")
    assert "So the answer is 13." in html


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "r.html")
    with pytest.raises(ValueError, match=r"config\.yaml is missing"):
        write_report([tmp_path], tmp_path / "r.html")
    with pytest.raises(ValueError, match="at least one"):
        write_report([], tmp_path / "r.html")
    (tmp_path / "config.yaml").write_text("flow: fp8\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is missing"):
        write_report([tmp_path], tmp_path / "r.html")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "step": 0}\n')
    with pytest.raises(ValueError, match="no row of kind 'train'"):
        write_report([tmp_path], tmp_path / "r.html")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind"\n{"kind": "train", "step": 2}\n')
    with pytest.raises(ValueError, match=r"line 2 is not JSON"):
        write_report([tmp_path], tmp_path / "r.html")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "grad_norm": "big"}\n')
    with pytest.raises(ValueError, match=r"step 1: grad_norm is 'big'; a number is wanted"):
        write_report([tmp_path], tmp_path / "r.html")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "entropy": NaN}\n{"kind"')
    assert read_run(tmp_path).points("entropy") == [(1, None)]
    assert len(read_run(tmp_path).train) == 1


def test_thinning_keeps_the_extremes_and_what_is_not_finite() -> None:
    points: list[tuple[float, float | None]] = [(x, 1.0) for x in range(10_000)]
    points[4321], points[777], points[5] = (4321, 99.0), (777, -3.0), (5, None)
    kept = thin(points)
    assert len(kept) <= 401
    assert {(4321, 99.0), (777, -3.0), (5, None)} <= set(kept)
    assert kept == sorted(kept, key=lambda p: p[0])


@pytest.mark.parametrize("values", [(0.0, -1.4e-17), (-2e-18, 1e-18), (1.0, 1.0 + 2e-16), (0.0, 0.0)])
@pytest.mark.parametrize("from_zero", [False, True])
def test_a_chart_of_values_that_rounding_made_differ_has_an_axis(values: tuple[float, float], from_zero: bool) -> None:
    points = [(step, value) for step, value in enumerate(values, 1)]
    assert "<svg" in line_chart([Series("loss", 0, points)], "Policy loss", from_zero=from_zero)


def test_ticks_are_round_and_span_the_data() -> None:
    for low, high in ((0.0, 0.73), (-0.02, 0.031), (5, 5), (0, 123456), (1e-9, 3e-9)):
        marks = ticks(low, high)
        assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 9
    assert ticks(1, 3, 6, whole=True) == [1, 2, 3]
    assert [tick_label(v) for v in (0.25, 1500, 2e6, 0)] == ["0.25", "1.5k", "2M", "0"]


def test_exact_zero_has_its_own_place_on_the_log_axis() -> None:
    svg = line_chart([Series("d", 0, [(1, 0.0), (2, 1e-3), (3, 1e-1)])], "d", log=True)
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', svg)]
    assert heights[0] > heights[1] > heights[2]
    assert "exactly 0" in svg and "exactly 0 at every step" not in svg


def test_mean_line_uses_only_steps_that_all_runs_have() -> None:
    assert mean_line([[(1, 0.0), (2, 1.0), (3, None)], [(1, 1.0), (2, 3.0), (3, 5.0)]]) == [(1, 0.5), (2, 2.0)]


def test_summary_weighs_speed_by_time(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "throughput/rollout": 100.0, "time/rollout": 9.0, "time/step": 10.0, "accuracy/train": 0.25},
        {"step": 2, "throughput/rollout": 200.0, "time/rollout": 1.0, "time/step": 2.0, "accuracy/train": 0.5},
    ]
    summary = summarize(read_run(put(tmp_path / "r", rows)))
    assert (summary.rollout_speed, summary.seconds) == (110.0, 12.0)
    assert (summary.accuracy_before, summary.accuracy_after, summary.accuracy_name) == (0.25, 0.5, "training accuracy")


def test_tooltip_numbers_are_json(tmp_path: Path) -> None:
    html, _ = page_of([write_run(tmp_path / "r", steps=4)], tmp_path / "r.html")
    blobs = re.findall(r'<script type="application/json">(.*?)</script>', html)
    assert blobs and all(json.loads(blob)["series"] for blob in blobs)


def test_the_room_imports_no_torch() -> None:
    code = "import sys, jetrl.report.page, jetrl.report.record, jetrl.report.display; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": 2}) == {"a.b": 1, "a.c": {}, "d": 2}
