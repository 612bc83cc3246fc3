"""Rollout and training speed and peak memory on a CPU, flows fp8 and bf16 side by side, with limits and a baseline.

    python benchmarks/cpu.py --json benchmarks/results/cpu.json

Each measurement is a process of its own (`cases.py`). The baseline is `transformers.generate` of the same model and batch,
which promises no equal bits: the difference is the price of exactness on a CPU, not on an accelerator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import Case, Kind
from machine import cores, facts
from rich.console import Console
from rich.table import Table

from jetrl.model.sources import resolve_model

Result = dict[str, Any]
# model: sequences, prompt tokens, completion tokens: of the rollout, then of one training step
SIZES = {"demo": ((128, 16, 32), (128, 16, 24)), "SmolLM2-135M": ((16, 32, 24), (4, 48, 16))}
QUICK = ((4, 5, 4), (2, 6, 4))
BASELINES = ("bfloat16", "float32")
FLOWS = ("fp8", "bf16")
COLUMNS = ["model", "quantity", *FLOWS, *(f"transformers {dtype}" for dtype in BASELINES), "GEMM limit", "memory limit", "aim"]
MARKERS = ("<!-- cpu table -->", "<!-- end of cpu table -->")
# model, kind, what is compared, its unit and what we aim at
LINES = [
    ("demo", "rollout", "tokens_per_s", "rollout, tokens/s", "≥ 2,000"),
    ("demo", "rollout", "decode_tokens_per_s", "decode alone, tokens/s", ""),
    ("demo", "training", "tokens_per_s", "training, tokens/s", ""),
    ("demo", "rollout", "peak_memory_gb", "peak memory of rollout, GB", ""),
    ("demo", "training", "peak_memory_gb", "peak memory of training, GB", ""),
    ("SmolLM2-135M", "rollout", "decode_tokens_per_s", "decode, tokens/s", "≥ 30"),
    ("SmolLM2-135M", "rollout", "tokens_per_s", "rollout, tokens/s", ""),
    ("SmolLM2-135M", "training", "tokens_per_s", "training, tokens/s", ""),
    ("SmolLM2-135M", "rollout", "peak_memory_gb", "peak memory of rollout, GB", "< 4"),
    ("SmolLM2-135M", "training", "peak_memory_gb", "peak memory of training, GB", ""),
]


def cases(folder: str, model: str, threads: int, repeats: int, quick: bool) -> Iterator[Case]:
    """What is measured of a model, in this order."""
    sampling, training = QUICK if quick else SIZES[model]
    kinds: list[tuple[Kind, tuple[str, ...], tuple[int, int, int]]] = [
        ("limits", ("rollout",), sampling),
        ("limits", ("training",), training),
        ("rollout", FLOWS, sampling),
        ("training", FLOWS, training),
        ("transformers", BASELINES, sampling),
    ]
    for kind, flows, sizes in kinds:
        for flow in flows:
            yield Case(kind, folder, flow, *sizes, threads=threads, repeats=repeats)


def in_own_process(case: Case) -> Result:
    """Measure a case in a fresh Python. Raises RuntimeError with the end of its output when it fails."""
    command = [sys.executable, str(Path(__file__).with_name("cases.py")), json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def find(results: list[Result], model: str, kind: str, flow: str) -> Result | None:
    """The result of a model's case, if it was measured."""
    return next((r for r in results if (r["model"], r["kind"], r["flow"]) == (model, kind, flow)), None)


def rows(results: list[Result]) -> list[list[str]]:
    """The table's cells: models and quantities down; flows, baseline and limits across."""
    found = []
    for model, kind, key, label, aim in LINES:
        flows = [find(results, model, kind, flow) for flow in FLOWS]
        if None in flows:
            continue
        baseline = [find(results, model, "transformers", dtype) if kind == "rollout" else None for dtype in BASELINES]
        limit = (find(results, model, "limits", kind) or {}) if key.endswith("tokens_per_s") else {}
        bounds = [limit.get(name, {}).get("tokens_per_s") for name in ("gemm", "bandwidth")]
        numbers = [*(r.get(key) if r else None for r in (*flows, *baseline)), *bounds]
        found.append([model, label, *map(_number, numbers), aim])
    return found


def table(results: list[Result]) -> Table:
    """The table for a screen."""
    shown = Table(title="jetrl on a CPU", title_justify="left")
    for i, column in enumerate(COLUMNS):
        shown.add_column(column, justify="left" if i < 2 else "right")
    for row in rows(results):
        shown.add_row(*row)
    return shown


def put_into(readme: Path, known: dict[str, Any], results: list[Result]) -> None:
    """Replace what stands between the two markers of `readme` by the table in Markdown. Raises ValueError without them."""
    text = readme.read_text(encoding="utf-8")
    before, found, rest = text.partition(MARKERS[0])
    _, closed, after = rest.partition(MARKERS[1])
    if not (found and closed):
        raise ValueError(f"{readme} lacks the lines {MARKERS[0]} and {MARKERS[1]}; the table goes between them")
    versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    lines = [COLUMNS, ["---", "---", *["--:"] * (len(COLUMNS) - 2)], *rows(results)]
    body = [
        "{date}: {cpu}, {cores} cores, {threads} threads; ".format(**known) + f"{versions}. `{known['command']}`",
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
        "\n".join(f"- {line}" for line in limit_lines(results)),
    ]
    readme.write_text(before + MARKERS[0] + "\n" + "\n\n".join(body) + "\n" + MARKERS[1] + after, encoding="utf-8")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 20 else f"{value:.2f}"


def limit_lines(results: list[Result]) -> list[str]:
    """The measured rates behind the limits."""
    lines = []
    for r in results:
        if r["kind"] == "limits":
            rates = [f"float64 GEMM {r['gemm']['gflops']:.1f} GFLOP/s"]
            if "bandwidth" in r:
                b = r["bandwidth"]
                rates.append(f"reading {b['weights_gb']:.3f} GB of float64 weights {b['gb_per_s']:.1f} GB/s")
            lines.append(f"{r['model']}, {r['flow']}: {', '.join(rates)}")
    return lines


def main(arguments: list[str] | None = None) -> list[Result]:
    """Measure, print the table, and write the JSON file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", default="demo", help="the demo model's folder")
    parser.add_argument("--smollm2", default="smollm2", help="SmolLM2's folder; default: where `jetrl fetch smollm2` puts it")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--readme", type=Path, help="put the table into this Markdown file, between its markers")
    parser.add_argument("--threads", type=int, default=cores(), help="torch threads; default: all cores")
    parser.add_argument("--repeats", type=int, default=3, help="best of so many")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that everything runs; the numbers mean nothing"
    )
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)  # a log is not folded to 80 columns
    known, results = facts(options.threads), []
    if known["load_before"] > 0.5:
        console.print(f"load average {known['load_before']}: the machine is not quiet, the numbers will be low", style="yellow")
    for model, name in (("demo", options.demo), ("SmolLM2-135M", options.smollm2)):
        try:
            folder = resolve_model(name)
        except ValueError as error:
            console.print(f"{model} left out: {error}", style="yellow", markup=False)
            continue
        for case in cases(str(folder), model, options.threads, options.repeats, options.quick):
            console.print(f"{model}: {case.kind} {case.flow}", style="dim")
            results.append(in_own_process(case) | {"model": model, "folder": folder.name})
    console.print(table(results))
    for line in limit_lines(results):
        console.print(line)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(known | {"results": results}, indent=1) + "\n")
    if options.readme:
        put_into(options.readme, known, results)
    return results


if __name__ == "__main__":
    main()
