"""The command: check what was asked for, measure, print, write JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from jetrl.bench import attention, gemm, head, layer, rollout, step
from jetrl.bench.shapes import named, shape_of
from jetrl.bench.table import Table, as_json, render
from jetrl.bench.timing import Ceilings, measure_ceilings, require_gpu
from jetrl.model.shapes import DEFAULT
from jetrl.rl.types import MismatchError
from jetrl.train.optim import check_moments

BENCHES = {"gemm": gemm.bench, "attention": attention.bench, "layer": layer.bench, "head": head.bench}
JUDGED_TOKENS = 8192
_PACKAGES = {"torch": "torch", "triton": "triton", "deep_gemm": "sgl-deep-gemm", "flash_attn": "flash-attn-4"}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def command_line() -> str:
    """The command as it was typed; folders lose their path."""
    return " ".join(["jetrl", *(Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:])])


def facts(gpu: str, ceilings: Ceilings) -> dict[str, Any]:
    """What a reader of the numbers must know."""
    return {
        "gpu": gpu,
        "versions": {name: _version(package) for name, package in _PACKAGES.items()},
        "command": command_line(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "ceilings": {
            "copy_tb_s": ceilings.copy / 1e12,
            "bf16_tflops": ceilings.bf16 / 1e12,
            "bf16_nominal_tflops": ceilings.bf16_nominal / 1e12,
            "fp8_nominal_tflops": ceilings.fp8_nominal / 1e12,
        },
    }


def run_bench(name: str, shape: str, tokens: int, file: Path | None, console: Console, **options: bool) -> None:
    """Measure one of `BENCHES` and print it; write JSON to `file`.

    Raises ValueError for an unknown shape, a number of tokens that eight sequences cannot share, or a machine without a Hopper
    GPU; OSError for a file that cannot be written. All before the work.
    """
    config = shape_of(shape)
    if tokens < 64 or tokens % 8:
        raise ValueError(f"--tokens is {tokens}; wanted a multiple of 8, at least 64: eight sequences share them")
    ceilings, meta = _prepare(file)
    meta |= {"shape": shape, "tokens": tokens}
    tables = BENCHES[name](config, tokens, ceilings, shape == DEFAULT and tokens == JUDGED_TOKENS, **options)
    _save(name, tables, meta, file)
    _show(tables, meta, file, console)


def run_rollout(
    shape: str, cases: str, flows: str, tail_sequences: int, check: int, profile: bool, file: Path | None, console: Console
) -> None:
    """Measure the engine, see `bench.rollout`. JSON is written after each case, so that an interrupted run leaves what it has.

    Raises ValueError for an unknown shape, case or flow, or a machine without a Hopper GPU, before the work; and MismatchError
    after it, if any log-probability differs from the trainer's.
    """
    config = shape_of(shape)
    chosen = rollout.chosen(cases, flows)
    ceilings, meta = _prepare(file)
    meta |= {"shape": shape, "vllm": "0.22.1, recorded earlier on the same type of GPU, not in this run"}
    measured: list[rollout.Measured] = []
    tables: list[Table] = []
    for m in rollout.bench(config, *chosen, tail_sequences, check, profile):
        measured.append(m)
        console.print(f"{m.label}: {m.rate:,.0f} tokens/s, {m.seconds:.1f} s", style="dim", highlight=False)
        tables = rollout.tables(config, measured, ceilings, shape == DEFAULT)
        _save("rollout", tables, meta, file)
    _show(tables, meta, file, console)
    if differing := sum(m.differing for m in measured):
        raise MismatchError(f"{differing} log-probabilities of engine and trainer differ; `jetrl check` finds the operator")


def run_step(
    shape: str,
    cases: str,
    flows: str,
    steps: int,
    moments: str,
    tokens: int,
    weights: bool,
    file: Path | None,
    console: Console,
) -> None:
    """Measure whole steps, see `bench.step`. JSON is written after each case.

    Raises ValueError for an unknown shape, case or flow, for what does not fit the GPU, or a machine without a Hopper GPU,
    before the work; and MismatchError, from the loop, if rollout and trainer differ.
    """
    config = shape_of(shape)
    if weights and not Path(shape).expanduser().is_dir():
        raise ValueError(f"--weights reads the weights of a model folder, but --shape is {shape!r}; give its path")
    picked = named("--cases", cases, step.CASES), [flow.name for flow in named("--flows", flows, rollout.FLOWS)]
    check_moments(step.settings(picked[0][0], picked[1][0], steps, moments, tokens).optimizer)
    ceilings, meta = _prepare(file)
    meta |= {"shape": shape, "tokens": tokens, "moments": moments}
    measured: list[step.Measured] = []
    tables: list[Table] = []
    folder = Path(shape).expanduser() if weights else None

    def told(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    for m in step.bench(config, folder, *picked, steps, moments, tokens, "cuda", told):
        measured.append(m)
        tables = step.tables(config, measured, ceilings, shape == DEFAULT and tokens == JUDGED_TOKENS)
        _save("step", tables, meta | {"rows": [{"case": n.case.name, "flow": n.flow, "steps": n.rows} for n in measured]}, file)
    _show(tables, meta, file, console)


def _prepare(file: Path | None) -> tuple[Ceilings, dict[str, Any]]:
    """What the GPU can do, and the facts; a file that cannot be written is found out before the work."""
    require_gpu()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    return ceilings, facts(torch.cuda.get_device_name(), ceilings)


def _save(name: str, tables: list[Table], meta: dict[str, Any], file: Path | None) -> None:
    if file:
        file.write_text(json.dumps(as_json(name, tables, meta), indent=1) + "\n", encoding="utf-8")


def _show(tables: list[Table], meta: dict[str, Any], file: Path | None, console: Console) -> None:
    for table in tables:
        console.print(render(table, meta))
    if file:
        console.print(f"written to {file}")
