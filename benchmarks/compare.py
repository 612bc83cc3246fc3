"""The runs of `make compare` in one file and one table: what three flows did to accuracy and to the mismatch.

    python benchmarks/compare.py runs/compare/*-? --json benchmarks/results/compare-cpu.json

Reads run folders only; the numbers are those of their metrics.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from machine import facts

from jetrl.report.read import read_run, summarize

LAST = 20  # steps over which the end of a run is averaged


def run_result(folder: Path) -> dict[str, Any]:
    """The figures of one run."""
    run = read_run(folder)
    summary = summarize(run)

    def finite(key: str) -> list[float]:
        return run.values(key) or [math.nan]

    return {
        "run": folder.name,
        "flow": run.config["flow"],
        "seed": run.config["seed"],
        "steps": summary.steps,
        "held_out": [(row["step"], row["eval/avg@k"]) for row in run.evals],
        "reward_last_steps": fmean(finite("reward/mean")[-LAST:]),
        "logprob_diff_max": max(finite("logprob_diff/max")),
        "steps_not_finite": summary.mismatch_broken,
        "logprob_diff_mean": fmean(finite("logprob_diff/mean")),
        "mismatch_kl": fmean(finite("mismatch_kl")),
        "token_diff_share": fmean(finite("token_diff/share")),
        "rollout_tokens_per_s": summary.rollout_speed,
        "training_tokens_per_s": summary.train_speed,
        "seconds": summary.seconds,
    }


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table, one line a flow: means over seeds, with the deviation of the final accuracy."""
    lines = [
        "| flow | held-out before | after (deviation over seeds) | reward, last 20 steps | largest difference "
        "| mean difference | mismatch KL | tokens that differ | rollout, tokens/s | training, tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for flow in dict.fromkeys(r["flow"] for r in results):
        runs = [r for r in results if r["flow"] == flow]
        final = [r["held_out"][-1][1] for r in runs]
        spread = f" ({stdev(final):.3f})" if len(final) > 1 else ""

        def mean(key: str, runs: list[dict[str, Any]] = runs) -> float:
            return fmean(r[key] for r in runs)

        cells = [
            f"{fmean(r['held_out'][0][1] for r in runs):.3f}",
            f"{fmean(final):.3f}{spread}",
            f"{mean('reward_last_steps'):.3f}",
            f"{max(r['logprob_diff_max'] for r in runs):.3g}",
            f"{mean('logprob_diff_mean'):.2g}",
            f"{mean('mismatch_kl'):.2g}",
            f"{mean('token_diff_share'):.0%}",
            f"{mean('rollout_tokens_per_s'):,.0f}",
            f"{mean('training_tokens_per_s'):,.0f}",
        ]
        lines.append(f"| `{flow}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    results = [run_result(folder) for folder in options.runs]
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps({"machine": facts(1), "runs": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
