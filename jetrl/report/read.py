"""Reading a run folder back, and the few numbers that sum it up.

Tolerant of what a running or killed run leaves (a cut-off last line, no eval, no samples, nulls), strict about the
rest: a broken line in the middle or a missing file is a ValueError that names it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONFIG, METRICS, SAMPLES = "config.yaml", "metrics.jsonl", "samples.jsonl"
MISMATCH = "logprob_diff/max"

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file. A last line without its newline was cut off by a kill and is left out.

    Raises ValueError with file and line number for any other line that is not a JSON object with an integer `step`.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error.msg}): {line[:80]!r}") from None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}, line {number} is not an object with an integer 'step': {line[:80]!r}")
        rows.append(row)
    return rows


@dataclass
class RunData:
    """One run as read. `train` and `evals` are sorted by step, one row a step (the last one written counts)."""

    path: Path
    config: dict[str, Any]
    train: list[Row]
    evals: list[Row]
    events: list[Row]
    samples: list[Row]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def points(self, key: str) -> list[tuple[int, float | None]]:
        """(step, value) of `key`. None: the value was not finite; no entry: the row does not have it."""
        rows = self.evals if key.startswith("eval/") else self.train
        return [(row["step"], row[key]) for row in rows if key in row]

    def values(self, key: str) -> list[float]:
        """The finite values of `key`, in order of steps."""
        return [value for _, value in self.points(key) if value is not None]


def read_run(folder: str | Path) -> RunData:
    """Read a run folder. Raises ValueError that names what is missing or broken."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"no run folder at {str(folder)!r}. Give a folder that jetrl train wrote.")
    for name in (CONFIG, METRICS):
        if not (path / name).is_file():
            raise ValueError(f"{str(folder)!r} is not a run folder: {name} is missing.")
    try:
        config = yaml.safe_load((path / CONFIG).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path / CONFIG} is not valid YAML: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path / CONFIG} holds a {type(config).__name__}; a mapping of keys to values is wanted.")
    rows = read_rows(path / METRICS)
    train, evals = (_by_step(row for row in rows if row.get("kind") == kind) for kind in ("train", "eval"))
    if not train:
        raise ValueError(f"{path / METRICS} has no row of kind 'train': the run stopped before its first step was done.")
    for row in train + evals:
        if bad := [key for key, value in row.items() if key != "kind" and not isinstance(value, int | float | None)]:
            raise ValueError(f"{path / METRICS}, step {row['step']}: {bad[0]} is {row[bad[0]]!r}; a number is wanted.")
    samples = read_rows(path / SAMPLES) if (path / SAMPLES).is_file() else []
    return RunData(path, config, train, evals, [r for r in rows if r.get("kind") == "event"], samples)


def _by_step(rows: Iterable[Row]) -> list[Row]:
    latest = {row["step"]: row for row in rows}
    return [latest[step] for step in sorted(latest)]


@dataclass
class Summary:
    """A run in a few numbers. None: not recorded."""

    steps: int
    accuracy_before: float | None
    accuracy_after: float | None
    accuracy_name: str  # what the accuracy is: held-out avg@k, or training accuracy when the run had no eval
    mismatch: float | None  # largest finite logprob_diff/max
    mismatch_steps: int  # steps that recorded it, finite or not
    mismatch_broken: int  # steps where it was not finite
    rollout_speed: float | None  # completion tokens/s
    train_speed: float | None  # prompt + completion tokens/s
    seconds: float | None  # spent in steps and evals
    skipped: int  # optimizer steps skipped because of a non-finite gradient
    memory: tuple[float, float] | None = None  # peak and planned peak, GB

    @property
    def exact(self) -> bool:
        """Whether every step measured the mismatch and found exactly zero."""
        return self.mismatch == 0.0 and self.mismatch_broken == 0 and self.mismatch_steps == self.steps

    def mismatch_text(self) -> str:
        """The largest difference, never hiding steps where it was not finite."""
        if not self.mismatch_steps:
            return "not recorded"
        if self.mismatch_broken:
            return f"not finite at {self.mismatch_broken} step{'s' * (self.mismatch_broken > 1)}"
        return "0.0" if self.mismatch == 0.0 else number(self.mismatch)


def summarize(run: RunData) -> Summary:
    """The key figures of a run, from its files alone."""
    accuracies, name = run.values("eval/avg@k"), "held-out accuracy"
    if accuracies:
        k = run.evals[-1].get("eval/k")
        name = f"held-out accuracy (avg@{k})" if k else name
    else:
        accuracies, name = run.values("accuracy/train"), "training accuracy"
    mismatches = run.points(MISMATCH)
    return Summary(
        steps=len(run.train),
        accuracy_before=accuracies[0] if accuracies else None,
        accuracy_after=accuracies[-1] if len(accuracies) > 1 else None,
        accuracy_name=name,
        mismatch=max(run.values(MISMATCH), default=None),
        mismatch_steps=len(mismatches),
        mismatch_broken=sum(value is None for _, value in mismatches),
        rollout_speed=_speed(run.train, "throughput/rollout", "time/rollout"),
        train_speed=_speed(run.train, "throughput/train", "time/train"),
        seconds=_seconds(run),
        skipped=round(sum(run.values("optimizer/skipped"))),
        memory=_memory(run),
    )


def _memory(run: RunData) -> tuple[float, float] | None:
    peaks, planned = run.values("memory/peak_gb"), run.values("memory/planned_gb")
    return (max(peaks), planned[-1]) if peaks and planned else None


def _speed(rows: list[Row], key: str, seconds: str) -> float | None:
    """Tokens over time of all steps; a plain mean of the rates would favour the short steps."""
    pairs = [(row[key], row[seconds]) for row in rows if row.get(key) is not None and row.get(seconds)]
    return sum(rate * time for rate, time in pairs) / sum(time for _, time in pairs) if pairs else None


def _seconds(run: RunData) -> float | None:
    """Time spent in steps and evals. Not the span of the clock: a resumed run has a gap."""
    spent = run.values("time/step") + [row["time/eval"] for row in run.evals if row.get("time/eval")]
    return sum(spent) if spent else None


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are there; None if there are none."""
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat


def number(value: float | None) -> str:
    """A number for people: three significant digits, thousands grouped, an en dash for none."""
    if value is None:
        return "–"
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.2e}"


def duration(seconds: float | None) -> str:
    """Seconds as 42s, 3:07 or 1:03:07."""
    if seconds is None:
        return "–"
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{rest // 60}:{rest % 60:02d}" if rest >= 60 else f"{rest}s"
