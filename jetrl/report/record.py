"""The files of a run: written line by line, so that a killed run keeps everything that it had computed.

A run folder holds `config.yaml` (the resolved configuration), `metrics.jsonl` (rows of kind train, eval and event) and
`samples.jsonl` (completions for the reader). A row is one JSON object, written and flushed as one line. On resume, rows
beyond the checkpoint's step are dropped, so the files of a continued run have the rows of an unbroken one. For that,
everything that belongs to a step must be written before the step's checkpoint.

JSON has no NaN and no infinity: both are written as null, and the readers count a null as "not finite", never as 0.
TensorBoard (where it is installed, unless `loggers` says otherwise), W&B and trackio (if asked for) get the same numbers.
TensorBoard's files are rebuilt from metrics.jsonl on resume; W&B and trackio are append-only, so after a resume they can
hold a repeated step twice.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from jetrl.config import RunConfig, save_config
from jetrl.report.read import CONFIG, METRICS, SAMPLES, read_rows
from jetrl.rl.types import Rollout

_NOT_CURVES = {"kind", "step", "time"}
# A lone surrogate in a decoded text cannot be UTF-8; its backslash form is what JSON writes for it anyway.
_TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace"}


def _finite(value: Any, key: str = "row") -> Any:
    """`value` as JSON can hold it: non-finite floats become None. Raises ValueError for what is not JSON."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v, key) for v in value]
    raise ValueError(f"{key} is a {type(value).__name__}; a run file holds numbers, texts and lists. Use .item() or float()")


def sample_row(rollout: Rollout, step: int, tokens: list[str] | None = None) -> dict[str, Any]:
    """The samples.jsonl row of one rollout; `tokens` are its completion's tokens, decoded one by one."""
    completion, grade, problem = rollout.completion, rollout.grade, rollout.prompt.problem
    row = {
        "step": step,
        "group": rollout.group,
        "problem_id": problem.id,
        "prompt": rollout.prompt.text,
        "completion": rollout.text,
        "answer": problem.answer,
        "reward": grade.reward,
        "correct": grade.correct,
        "parsed": grade.parsed,
        "advantage": rollout.advantage,
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
    }
    return row if tokens is None else row | {"tokens": tokens}


class _Logger(Protocol):
    def log(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def _need(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"loggers asks for {extra!r}, but the package {error.name!r} is not installed. Install it with "
            f"pip install 'jetrl[{extra}]', or take {extra!r} out of loggers."
        ) from None


def _curves(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row that a plot can show."""
    return {k: float(v) for k, v in row.items() if k not in _NOT_CURVES and isinstance(v, int | float)}


class _TensorBoard:
    """Event files through the tensorboard package alone, rebuilt from the rows that the run already has."""

    def __init__(self, folder: Path, rows: Iterable[Mapping[str, Any]]):
        writer = _need("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _need("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._summary = _need("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        for old in (folder / "tensorboard").glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = writer.EventFileWriter(str(folder / "tensorboard"))
        for row in rows:
            if row["kind"] != "event":
                self._add(row)
        self._writer.flush()

    def _add(self, row: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in _curves(row).items()]
        event = self._event(wall_time=row["time"], step=row["step"], summary=self._summary(value=values))
        self._writer.add_event(event)

    def log(self, row: Mapping[str, Any]) -> None:
        self._add(row)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Weights & Biases. WANDB_MODE=offline keeps everything in the run folder, to be sent later with `wandb sync`."""

    def __init__(self, folder: Path, config: RunConfig):
        wandb = _need("wandb", "wandb")
        name = folder / "wandb_id"
        if not name.exists():
            name.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project="jetrl",
            name=folder.name,
            id=name.read_text().strip(),
            dir=str(folder),
            config=config.model_dump(mode="json"),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log(_curves(row) | {"step": row["step"]})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, folder: Path, config: RunConfig):
        trackio = _need("trackio", "trackio")
        self._run = trackio.init(project="jetrl", name=folder.name, config=config.model_dump(mode="json"), resume="allow")

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log(_curves(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def loggers_of(config: RunConfig) -> list[str]:
    """The loggers that a configuration names; where it names none, TensorBoard if it is installed."""
    if config.loggers is not None:
        return list(config.loggers)
    return ["tensorboard"] if find_spec("tensorboard") else []


class RunFolder:
    """A run folder open for writing; a context manager.

    `resume_step` None starts a run: the folder is made, and one that already has metrics is refused. An integer reopens
    a run whose last checkpoint is of that step (0: none yet) and drops the rows beyond it. Raises ValueError, before
    anything is written, for a folder that does not fit and for a logger whose package is missing.
    """

    def __init__(self, path: str | Path, config: RunConfig, *, resume_step: int | None = None):
        self.path = Path(path)
        names = loggers_of(config)
        for name in names:
            _need(name, name)
        self._check(resume_step)
        self.path.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}
        self._loggers: list[_Logger] = []
        if resume_step is not None:
            self.truncate_after(resume_step)
        save_config(config, self.path / CONFIG)
        for name in (METRICS, SAMPLES):
            self._open(name)
        self._loggers = [self._logger(name, config) for name in names]

    def _check(self, resume_step: int | None) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"the run folder {str(self.path)!r} is a file. Choose another folder=...")
        metrics = self.path / METRICS
        if resume_step is None and metrics.exists() and metrics.stat().st_size:
            raise ValueError(f"the run folder {str(self.path)!r} already holds a run. Resume it, or choose another folder=...")
        if resume_step is not None and not metrics.is_file():
            raise ValueError(f"nothing to resume in {str(self.path)!r}: it has no {METRICS}. Start a new run instead.")

    def _logger(self, name: str, config: RunConfig) -> _Logger:
        if name == "tensorboard":
            return _TensorBoard(self.path, read_rows(self.path / METRICS))
        return _Wandb(self.path, config) if name == "wandb" else _Trackio(self.path, config)

    def _open(self, name: str) -> None:
        self._files[name] = (self.path / name).open("a", **_TEXT)

    def truncate_after(self, step: int) -> None:
        """Drop the rows of steps beyond `step`, and a last line that was cut off by a kill."""
        for name in (METRICS, SAMPLES):
            file = self.path / name
            if name in self._files:
                self._files[name].close()
            if file.is_file():
                kept = [row for row in read_rows(file) if row["step"] <= step]
                scratch = file.with_suffix(".tmp")
                scratch.write_text("".join(map(_line, kept)), **_TEXT)
                os.replace(scratch, file)
            if name in self._files:
                self._open(name)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        file = self._files[name]
        file.write(_line(row))
        file.flush()

    def _metrics(self, kind: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        row = _finite({"kind": kind, "step": step, "time": time.time(), **values})
        assert row["kind"] == kind and row["step"] == step, f"values must not name kind or step: {values}"
        self._append(METRICS, row)
        for logger in self._loggers if kind != "event" else []:
            logger.log(row)
        return row

    def train(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append the train row of `step` (1-based) and return it as written."""
        return self._metrics("train", step, values)

    def evaluation(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Append an eval row; `step` 0 is before training."""
        return self._metrics("eval", step, values)

    def event(self, step: int, event: str, detail: str = "") -> dict[str, Any]:
        """Append an event: something that the reader should know and that is not a number."""
        return self._metrics("event", step, {"event": event, "detail": detail})

    def samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows made by `sample_row`."""
        for row in rows:
            self._append(SAMPLES, _finite(row))

    def close(self) -> None:
        """Close the files and every logger."""
        for file in self._files.values():
            file.close()
        for logger in self._loggers:
            logger.close()
        self._loggers = []

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
