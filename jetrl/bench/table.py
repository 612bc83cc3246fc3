"""Rows of a bench: what was measured, the roofline, the target and whether it was met; as a table and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text


@dataclass(slots=True, frozen=True)
class Target:
    """A limit that a row's `value` is held against."""

    text: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def at_least(value: float, limit: float | None, unit: str) -> Target | None:
    """`value` must reach `limit`; no target without a limit."""
    return None if limit is None else Target(f"≥ {limit:g}{unit}", value, limit)


@dataclass(slots=True)
class Row:
    """One case: times in us, or rates in tokens/s."""

    case: str
    ours: float
    baseline: float | None = None
    roofline: float | None = None
    target: Target | None = None
    extra: dict[str, float | str] = field(default_factory=dict)  # further columns, by their heads
    rate: bool = False

    @property
    def ratio(self) -> float | None:
        """How many times faster than the baseline."""
        return None if self.baseline is None else self.ours / self.baseline if self.rate else self.baseline / self.ours

    @property
    def share(self) -> float | None:
        """Of the roofline, 1 where nothing could be faster."""
        return None if self.roofline is None else self.ours / self.roofline if self.rate else self.roofline / self.ours


@dataclass(slots=True)
class Table:
    """Rows that are measured the same way; `ours` and `baseline` say against what."""

    title: str
    rows: list[Row]
    ours: str = "ours"
    baseline: str = ""

    def columns(self) -> list[str]:
        """Heads of the further columns, in the order of their first use."""
        return list(dict.fromkeys(head for row in self.rows for head in row.extra))


def total(case: str, rows: list[Row], target: float | None, extra: tuple[str, ...] = ()) -> Row:
    """The sum of rows, its ratio held against `target`; the further columns named in `extra` are summed too."""
    ours, baseline = sum(r.ours for r in rows), sum(r.baseline or 0.0 for r in rows)
    sums: dict[str, float | str] = {head: sum(float(r.extra[head]) for r in rows) for head in extra}
    return Row(case, ours, baseline, sum(r.roofline or 0.0 for r in rows), at_least(baseline / ours, target, "x"), sums)


def caption(meta: dict[str, Any]) -> str:
    """Under each table: the machine, the versions, and what is measured and what nominal."""
    c = meta["ceilings"]
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    return (
        f"times in us, rates in tokens/s; {meta['gpu']}; {versions}; {meta['date']}; {meta['command']}\n"
        f"measured: copy {c['copy_tb_s']:.2f} TB/s, BF16 cuBLAS {c['bf16_tflops']:.0f} TFLOP/s on a random square product; "
        f"nominal: dense BF16 {c['bf16_nominal_tflops']:.0f}, FP8 {c['fp8_nominal_tflops']:.0f} TFLOP/s. "
        "Roofline: operations at the nominal peak or bytes at the copy's rate, whichever takes longer"
    )


def _cell(value: float | str | None, digits: int = 1) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:,.{digits}f}"


def _verdict(target: Target | None) -> str:
    if target is None:
        return ""
    return f"{target.text} [green]met[/]" if target.met else f"{target.text} [bold red]missed[/]"


def render(table: Table, meta: dict[str, Any]) -> Group:
    """For a terminal: the table and its caption. Columns that no row fills are left out."""
    out = RichTable(title=table.title, title_justify="left")
    extra, rows = table.columns(), table.rows
    out.add_column("case", overflow="fold", min_width=min(48, max((len(r.case) for r in rows), default=4)))
    versus, bound = any(r.baseline is not None for r in rows), any(r.roofline is not None for r in rows)
    judged = any(r.target for r in rows)
    heads = [table.ours, *([table.baseline, "ratio"] if versus else [])]
    for head in [*heads, *(["roofline", "share"] if bound else []), *extra, *(["target"] if judged else [])]:
        out.add_column(head.replace(", ", ",\n"), justify="right")
    for row in rows:
        digits = 0 if row.rate else 1
        cells = [escape(row.case), _cell(row.ours, digits)]
        if versus:
            cells += [_cell(row.baseline, digits), "" if row.ratio is None else f"{row.ratio:.2f}x"]
        if bound:
            cells += [_cell(row.roofline, digits), "" if row.share is None else f"{row.share:.0%}"]
        cells += [_cell(row.extra.get(head), digits) for head in extra] + ([_verdict(row.target)] if judged else [])
        out.add_row(*cells, style="bold" if row.case.startswith("sum") else None)
    return Group(out, Text(caption(meta) + "\n", style="dim"))  # outside, as a narrow table would fold it


def as_json(bench: str, tables: list[Table], meta: dict[str, Any]) -> dict[str, Any]:
    """One object: `meta`, and `rows` of all tables."""
    rows = [
        {
            "bench": bench,
            "table": table.title,
            "case": row.case,
            "ours": table.ours,
            "baseline": table.baseline or None,
            f"ours_{'tokens_s' if row.rate else 'us'}": row.ours,
            f"baseline_{'tokens_s' if row.rate else 'us'}": row.baseline,
            "ratio": row.ratio,
            f"roofline_{'tokens_s' if row.rate else 'us'}": row.roofline,
            "target": row.target.text if row.target else None,
            "met": row.target.met if row.target else None,
            "extra": row.extra,
        }
        for table in tables
        for row in table.rows
    ]
    return {"meta": meta, "rows": rows}
