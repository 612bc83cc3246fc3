"""What one sees while a run goes on: one aligned line a step, and at the end a table.

On a terminal the lines are coloured and a progress bar with the current phase, the time left and the course of the
reward stays below them. Elsewhere (a pipe, a CI log) the same lines come plain, under 80 columns.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from jetrl.report.read import MISMATCH, Row, Summary, duration, number

_COLUMNS = (
    ("reward", 8, "reward/mean", "{:.3f}"),
    ("accuracy", 9, "accuracy/train", "{:.3f}"),
    ("length", 8, "length/mean", "{:.1f}"),
    ("max diff", 10, MISMATCH, ""),
    ("roll tok/s", 12, "throughput/rollout", "{:,.0f}"),
    ("train tok/s", 12, "throughput/train", "{:,.0f}"),
)
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """The course of `values` in one line of block characters."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int((value - low) / span * 8))] for value in values)


class Display:
    """Shows the rows of one run; a context manager. `exact` says whether a difference is an error of this flow."""

    def __init__(self, steps: int, *, exact: bool, console: Console | None = None):
        self.console = console or Console()
        self._steps, self._exact = steps, exact
        self._seconds: deque[float] = deque(maxlen=10)
        self._rewards: deque[float] = deque(maxlen=24)
        self._lines = 0
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[left]} left  reward {task.fields[course]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._bar = self._progress.add_task("starting", total=steps, left="-", course="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, name: str) -> None:
        """Say what is going on now (rollout, train, ...); seen on a terminal only."""
        self._progress.update(self._bar, description=name)

    def train(self, row: Row) -> None:
        """Show a train row."""
        if row.get("time/step") is not None:
            self._seconds.append(row["time/step"])
        if row.get("reward/mean") is not None:
            self._rewards.append(row["reward/mean"])
        if self._lines % 25 == 0:
            self._head()
        self._lines += 1
        left = self._left(row["step"])
        line = Text(f"{row['step']}/{self._steps}".rjust(9))
        for _, width, key, form in _COLUMNS:
            if key == MISMATCH:
                text, style = self._mismatch(row)
            else:
                text, style = (form.format(row[key]) if row.get(key) is not None else "-"), ""
            line.append(text.rjust(width), style)
        self._print(line.append(left.rjust(8)))
        course = "" if self.console.options.ascii_only else sparkline(list(self._rewards))
        self._progress.update(self._bar, completed=row["step"], left=left, course=course)

    def _head(self) -> None:
        names = "".join(name.rjust(width) for name, width, _, _ in _COLUMNS)
        self._print(Text(f"{'step':>9}{names}{'left':>8}", "bold"))

    def _left(self, step: int) -> str:
        if not self._seconds:
            return "-"
        return duration(sum(self._seconds) / len(self._seconds) * (self._steps - step))

    def _mismatch(self, row: Row) -> tuple[str, str]:
        if MISMATCH not in row:
            return "-", ""
        value = row[MISMATCH]
        if value is None:
            return "not finite", "bold red"
        if value == 0.0:
            return "0.0", "green"
        return f"{value:.2e}", "bold red" if self._exact else "yellow"

    def evaluation(self, row: Row) -> None:
        """Show an eval row."""
        k = row.get("eval/k", "k")
        parts = [f"{name} {row[key]:.3f}" for name, key in ((f"avg@{k}", "eval/avg@k"), (f"pass@{k}", "eval/pass@k"))
                 if row.get(key) is not None]  # fmt: skip
        when = "before training" if row["step"] == 0 else f"after step {row['step']}"
        about = f" ({number(row.get('eval/prompts'))} held-out prompts, {duration(row.get('time/eval'))})"
        self._print(Text(f"   eval {when}: {', '.join(parts) or 'not finite'}{about}", "cyan"))

    def event(self, row: Row) -> None:
        """Show an event row."""
        detail = f": {row['detail']}" if row.get("detail") else ""
        self._print(Text(f"   event at step {row['step']}: {row['event']}{detail}", "yellow"))

    def final(self, summary: Summary, report: Path | None = None) -> None:
        """Stop the progress bar and print the table that sums the run up."""
        self._progress.stop()
        table = Table(title="Run", show_header=False, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in _final_rows(summary):
            good = value == "0.0" and summary.exact
            table.add_row(Text(name), Text(value, "green" if good else ""))
        self.console.print(table)
        if report is not None:
            self._print(Text(f"report: {report}"))  # below the table: a path is long, and folded it cannot be copied

    def _print(self, line: Text) -> None:
        # soft_wrap: a log file is not 80 columns wide, and a wrapped line is hard to search
        self.console.print(line, soft_wrap=True)


def _final_rows(summary: Summary) -> list[tuple[str, Any]]:
    def show(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    accuracy = f"{show(summary.accuracy_before, '{:.3f}')} -> {show(summary.accuracy_after, '{:.3f}')}"
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        accuracy += f" ({summary.accuracy_after - summary.accuracy_before:+.3f})"
    rows = [
        (summary.accuracy_name, accuracy),
        ("max logprob difference", summary.mismatch_text()),
        ("rollout", show(summary.rollout_speed, "{:,.0f} tokens/s")),
        ("training", show(summary.train_speed, "{:,.0f} tokens/s")),
        ("steps", f"{summary.steps} in {duration(summary.seconds)}"),
    ]
    if summary.memory:
        rows.append(("peak memory", "{:.2f} GB, {:.2f} planned".format(*summary.memory)))
    if summary.skipped:
        rows.append(("skipped updates", str(summary.skipped)))
    return rows
