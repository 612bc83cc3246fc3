"""The study of docs/findings.md: a small real model on three tasks, in every flow and with every kind of optimizer state.

    python benchmarks/study.py run --gpus 1 --at-once 8 --seconds 480 --tasks sums gsm8k --out part1.tar.gz
    python benchmarks/study.py collect part1.tar.gz part2.tar.gz --json benchmarks/results/h200-study.json --figures docs/img

`run` starts one `jetrl train` after the other, some at a time on each GPU. At the deadline the runs get a SIGINT, on which they
finish their step; what is there by then counts. The archive holds what the tables need, no weights. `collect` compares the runs
of a task at the last step that all of them evaluated. Pictures are pages of the report's charts, photographed by a Chromium.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from string import Template
from typing import Any

from compare import run_result
from machine import cores, facts

from jetrl.report.charts import Point, Series, line_chart
from jetrl.report.page import mean_line, write_report
from jetrl.report.read import METRICS, SAMPLES, number, read_rows, read_run
from jetrl.report.template import PAGE
from jetrl.tasks.base import digest

FLOWS = {
    "fp8": ["flow=fp8"],
    "bf16": ["flow=bf16"],
    "fp8_rollout": ["flow=fp8_rollout"],
    "fp8_rollout_tis": ["flow=fp8_rollout", "algorithm.importance_cap=2.0"],
}
MOMENTS = {
    "moments_fp8": ["flow=fp8", "optimizer.moments=fp8"],
    "moments_int8": ["flow=fp8", "optimizer.moments=int8"],
    "masters_bf16": ["flow=fp8", "optimizer.moments=fp8", "optimizer.masters=bf16"],
}
# Task: its configuration, and what varies. The runs of `moments` stand beside those of sums in flow fp8, which have FP32.
TASKS = {
    "sums": ("configs/study/sums.yaml", FLOWS),
    "gsm8k": ("configs/study/gsm8k.yaml", FLOWS),
    "stress": ("configs/study/stress.yaml", FLOWS),
    "moments": ("configs/study/sums.yaml", MOMENTS),
}
LABELS = {
    "fp8_rollout_tis": "fp8_rollout, truncated importance sampling",
    "moments_fp8": "FP8 moments, FP32 masters",
    "moments_int8": "INT8 moments, FP32 masters",
    "masters_bf16": "FP8 moments, BF16 masters (stochastic rounding)",
}
FP32_LABEL = "FP32 moments, FP32 masters"
CURVES = {
    "reward": "reward/mean",
    "logprob_diff_max": "logprob_diff/max",
    "logprob_diff_mean": "logprob_diff/mean",
    "mismatch_kl": "mismatch_kl",
    "token_diff_share": "token_diff/share",
    "grad_norm": "grad_norm",
    "entropy": "entropy",
    "length": "length/mean",
    "truncated": "length/truncated",
    "clipped_high": "ratio/clipped_high",
    "zero_groups": "advantage/zero_groups",
}
SHOTS = 2  # rows that become worked examples, see `sums`
STARTS, GRACE = 90.0, 60.0  # seconds: a run needs so many to be worth its start; and to finish its step and save


# Data


def sums(seed: str, longest: int, count: int, without: set[str]) -> list[dict[str, str]]:
    """Sums of 2 to `longest` terms, log-uniform, worked out a step a line. No question twice, and none of `without`.

    The task takes the rows with the last digests as worked examples: those are kept short, so that prompts are.
    """
    rng, rows = random.Random(seed), {}

    def short(row: dict[str, str]) -> bool:
        return 2 <= row["question"].count("+") <= 4

    while len(rows) < count:
        terms = int(math.exp(rng.uniform(math.log(2), math.log(longest + 1))))
        total = rng.randint(1, 30)
        question, lines = str(total), []
        for _ in range(terms - 1):
            term = rng.randint(1, 9)
            lines.append(f"{total} + {term} = {total + term}")
            question, total = f"{question} + {term}", total + term
        if question not in without:
            rows[question] = {"question": question, "answer": "\n".join(lines) + f"\n#### {total}"}
    ordered = sorted(rows.values(), key=lambda row: digest(row["question"]))
    while not all(map(short, ordered[-SHOTS:])):
        del ordered[max(i for i, row in enumerate(ordered) if not short(row))]
    return ordered


def write_data(folder: Path) -> None:
    """The sums of both lengths, held out and for training."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, longest in (("sums", 5), ("long", 64)):
        held_out = sums(f"{name}/test", longest, 200, set())
        train = sums(f"{name}/train", longest, 2000, {row["question"] for row in held_out})
        for split, rows in (("test", held_out), ("train", train)):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}-{split}.jsonl").write_text(text, encoding="utf-8")


# Running


@dataclass
class Job:
    """One run: what is trained, and once started, where and since when."""

    task: str
    variant: str
    seed: int
    overrides: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    gpu: int = 0
    started: float = 0.0
    seconds: float = 0.0
    signalled: list[float] = field(default_factory=list)

    def command(self) -> list[str]:
        config, variants = TASKS[self.task]
        settings = [*self.overrides, *variants[self.variant], f"seed={self.seed}", f"folder={self.folder}", "loggers=[]"]
        return ["jetrl", "train", config, *settings]


def plan(tasks: list[str], seeds: list[int], folder: Path, given: list[str], variants: list[str]) -> list[Job]:
    """All runs, the first seed of every task before the second of any. `given`: overrides, KEY=VALUE or TASK:KEY=VALUE."""
    jobs = []
    for seed in seeds:
        for task in tasks:
            for variant in TASKS[task][1]:
                if variants and variant not in variants:
                    continue
                head = [(item.partition(":")[0], item) for item in given]
                own = [
                    item.partition(":")[2] if name in TASKS else item
                    for name, item in head
                    if name not in TASKS or name == task
                ]
                jobs.append(Job(task, variant, seed, own, folder / f"{task}-{variant}-{seed}"))
    return jobs


def start(job: Job, gpu: int, gpus: int, at_once: int) -> None:
    """Start a run with its output in its folder. Without a GPU (`gpus` 0) nothing is said about devices."""
    job.folder.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, cores() // (max(gpus, 1) * at_once)))
    environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    with (job.folder / "log.txt").open("wb") as log:
        job.process = subprocess.Popen(job.command(), stdout=log, stderr=subprocess.STDOUT, env=environment)
    job.gpu, job.started = gpu, time.monotonic()


def tidy(folder: Path) -> None:
    """Take away what is large: weights, the page, and all samples but one of the first and last steps."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "report.html").unlink(missing_ok=True)
    file = folder / SAMPLES
    if file.is_file() and (rows := read_rows(file)):
        steps = {rows[0]["step"], rows[-1]["step"]}
        kept = [
            rows[i] for i in range(len(rows)) if rows[i]["step"] in steps and (i == 0 or rows[i - 1]["step"] != rows[i]["step"])
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


def stop(job: Job) -> None:
    """SIGINT, on which a run finishes its step and saves; a kill when it takes too long."""
    assert job.process is not None
    now = time.monotonic()
    if not job.signalled:
        job.process.send_signal(signal.SIGINT)
        job.signalled.append(now)
    elif now > job.signalled[0] + GRACE:
        job.process.kill()


def run_all(jobs: list[Job], gpus: int, at_once: int, seconds: float, stagger: float) -> None:
    """Run the jobs in their order, `at_once` on each GPU, until the deadline. A failed one stops no other."""
    deadline = time.monotonic() + seconds
    waiting, running = list(jobs), []
    while waiting or running:
        free = [gpu for gpu in range(max(gpus, 1)) if sum(job.gpu == gpu for job in running) < at_once]
        if waiting and free and time.monotonic() < deadline - STARTS:
            job = waiting.pop(0)
            start(job, min(free, key=lambda gpu: sum(j.gpu == gpu for j in running)), gpus, at_once)
            print(f"started {job.folder.name} on GPU {job.gpu}, {deadline - time.monotonic():.0f} s left", flush=True)
            running.append(job)
            time.sleep(stagger)
        else:
            time.sleep(0.2)
        if time.monotonic() >= deadline - STARTS and not running:
            break
        for job in list(running):
            assert job.process is not None
            if job.process.poll() is not None:
                job.seconds = time.monotonic() - job.started
                running.remove(job)
                tidy(job.folder)
            elif time.monotonic() > deadline:
                stop(job)


def outcome(job: Job) -> str:
    """A line of the table that `run` prints."""
    if job.process is None:
        return f"{job.folder.name:32} not started"
    lines = [line for line in (job.folder / "log.txt").read_text(errors="replace").splitlines() if line.strip()]
    if not (job.folder / METRICS).is_file():
        said = lines[-1][:160] if lines else "no output"
        return f"{job.folder.name:32} exit {job.process.returncode}, {job.seconds:.0f} s: {said}"
    rows = read_rows(job.folder / METRICS)
    train = [row for row in rows if row["kind"] == "train"]
    evals = [(row["step"], row["eval/avg@k"]) for row in rows if row["kind"] == "eval"]
    worst = max((row.get("logprob_diff/max") or 0.0 for row in train), default=0.0)
    ends = f"{evals[0][1]:.3f} -> {evals[-1][1]:.3f} (step {evals[-1][0]})" if evals else "no evaluation"
    text = f"exit {job.process.returncode}, {len(train)} steps, {ends}, largest difference {worst:.3g}, {job.seconds:.0f} s"
    return f"{job.folder.name:32} {text}" + (f": {lines[-1][:160]}" if job.process.returncode not in (0, 130) and lines else "")


def pack(jobs: list[Job], machine: Path, out: Path) -> None:
    """One archive of the folders of all runs that were started, and of the file about the machine."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:gz") as archive:
        for job in jobs:
            for name in ("config.yaml", METRICS, SAMPLES, "log.txt"):
                if (job.folder / name).is_file():
                    archive.add(job.folder / name, f"{job.folder.name}/{name}")
        archive.add(machine, f"{out.name.split('.')[0]}-machine.json")
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def gpu_name() -> str | None:
    """The first GPU by name, asked without a CUDA context in this process."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return lines[0] if lines else None


def run(options: argparse.Namespace) -> None:
    write_data(Path("data"))
    jobs = plan(options.tasks, options.seeds, options.folder, options.set, options.variants)
    options.folder.mkdir(parents=True, exist_ok=True)
    machine = options.folder / "machine.json"
    shared = {"gpu": gpu_name(), "gpus": options.gpus, "runs_at_once_on_a_gpu": options.at_once}
    machine.write_text(json.dumps(facts(1) | shared), encoding="utf-8")
    try:
        run_all(jobs, options.gpus, options.at_once, options.seconds, options.stagger)
    finally:
        for job in jobs:
            if job.process is not None and job.process.poll() is None:
                job.process.kill()
        pack(jobs, machine, options.out)
    print("\n".join(outcome(job) for job in jobs))


# Collecting


@dataclass
class Result:
    """A run as the tables and pictures need it."""

    task: str
    variant: str
    folder: Path
    figures: dict[str, Any]


def unpacked(sources: list[Path], folder: Path) -> Iterator[Path]:
    """Run folders below folders and inside archives; archives are unpacked into `folder`."""
    for source in sources:
        if source.is_dir():
            yield from sorted(file.parent for file in source.rglob(METRICS))
            continue
        with tarfile.open(source) as archive:
            names = sorted({name.split("/")[0] for name in archive.getnames()})
            archive.extractall(folder, filter="data")
        yield from (folder / name for name in names if (folder / name / METRICS).is_file())


def result(folder: Path) -> Result:
    """Read a run. Raises ValueError for one that did no step."""
    task, variant, _ = folder.name.rsplit("-", 2)
    data = read_run(folder)
    curves = {name: data.points(key) for name, key in CURVES.items()}
    lengths = [(row["step"], row["eval/length"]) for row in data.evals if "eval/length" in row]
    tokens = sum(row.get("token_diff/tokens", 0.0) for row in data.train)
    skipped = sum(data.values("optimizer/skipped"))
    extra = {"task": task, "variant": variant, "curves": curves, "held_out_length": lengths}
    return Result(task, variant, folder, run_result(folder) | extra | {"tokens_compared": tokens, "updates_skipped": skipped})


def groups(results: list[Result], task: str) -> dict[str, list[Result]]:
    """Runs by variant, in the study's order; `moments` begins with the runs of sums that have FP32, of the same seeds."""
    named = {}
    if task == "moments":
        seeds = {r.figures["seed"] for r in results if r.task == task}
        named[FP32_LABEL] = [r for r in results if (r.task, r.variant) == ("sums", "fp8") and r.figures["seed"] in seeds]
    for variant in TASKS[task][1]:
        named[LABELS.get(variant, variant)] = [r for r in results if (r.task, r.variant) == (task, variant)]
    return {label: runs for label, runs in named.items() if runs}


def comparable(results: list[Result]) -> list[Result]:
    """Runs that came at least half as far as the longest of their task; the others are named and left out."""
    kept = []
    for r in results:
        longest = max(other.figures["steps"] for other in results if other.task == r.task)
        if r.figures["steps"] * 2 >= longest and r.figures["held_out"]:
            kept.append(r)
        else:
            print(f"left out: {r.folder.name} did {r.figures['steps']} of {longest} steps", file=sys.stderr)
    return kept


def at_step(runs: list[Result], step: int) -> list[float]:
    """Held-out accuracy of each run after `step` steps."""
    return [dict(map(tuple, r.figures["held_out"]))[step] for r in runs]


def spread(values: list[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def table(results: list[Result], task: str) -> str:
    """A Markdown table of a task: mean and deviation over seeds, at the last step that all its runs evaluated."""
    found = groups(results, task)
    everyone = [r for runs in found.values() for r in runs]
    step = max(set.intersection(*({s for s, _ in r.figures["held_out"]} for r in everyone)))
    lines = [
        f"| {task} | seeds | held-out before | best | after {step} steps | reward, steps {step // 2 + 1} to {step} "
        "| largest difference | mean difference | mismatch KL | gradient norm | tokens a completion |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for label, runs in found.items():
        late = range(step // 2 + 1, step + 1)

        def over(name: str, steps: range, runs: list[Result] = runs) -> list[float]:
            return [v for r in runs for s, v in r.figures["curves"][name] if s in steps and v is not None]

        best = [max(v for s, v in r.figures["held_out"] if s <= step) for r in runs]
        everything = range(1, step + 1)
        means = [fmean(over(name, everything) or [math.nan]) for name in ("logprob_diff_mean", "mismatch_kl")]
        broken = sum(v is None for r in runs for _, v in r.figures["curves"]["logprob_diff_max"])
        worst = number(max(over("logprob_diff_max", everything), default=math.nan))
        cells = [
            str(len(runs)),
            spread(at_step(runs, 0)),
            spread(best),
            spread(at_step(runs, step)),
            f"{fmean(over('reward', late) or [math.nan]):.3f}",
            worst + (f", not finite in {broken} steps" if broken else ""),
            *map(number, means),
            number(fmean(over("grad_norm", late) or [math.nan])),
            f"{fmean(over('length', late) or [math.nan]):.0f}",
        ]
        lines.append(f"| {f'`{label}`' if label in FLOWS else label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def collect(options: argparse.Namespace) -> None:
    results: list[Result] = []
    for folder in unpacked(options.sources, options.folder):
        try:
            results.append(result(folder))
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
    results = comparable(results)
    tasks = [task for task in TASKS if any(r.task == task for r in results)]
    for task in tasks:
        print(table(results, task) + "\n")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        machines = [json.loads(file.read_text()) for file in sorted(options.folder.glob("*machine.json"))]
        text = json.dumps({"machines": machines, "runs": [_rounded(r.figures) for r in results]}, separators=(",", ":"))
        options.json.write_text(text.replace('{"run":', '\n{"run":') + "\n", encoding="utf-8")
    if options.figures:
        for task in tasks:
            page = options.folder / f"study_{task}.html"
            height = draw(results, task, page)
            photograph(page, options.figures / f"study_{task}.png", 1040, height, options.browser)
    if options.report:
        folders = [r.folder for runs in groups(results, options.report).values() for r in runs]
        page = write_report(folders, options.folder / "study_report.html")
        photograph(page, options.figures / "study_report.png", 1200, options.report_height, options.browser, scale=1.0)


def _rounded(value: Any) -> Any:
    """Six significant digits: a tenth of the file, and more than anybody reads."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value


# Pictures

PANELS = [
    ("Held-out accuracy", "", "held_out", False),
    ("Reward in training", "mean of five steps", "reward", False),
    ("Largest log-probability difference of a step", "rollout against trainer, on the same tokens", "logprob_diff_max", True),
    ("Mismatch KL", "estimated from the same tokens", "mismatch_kl", True),
    ("Gradient norm", "before clipping, of a step's last update", "grad_norm", False),
    ("Tokens a completion", "mean of a step", "length", False),
]


def draw(results: list[Result], task: str, page: Path) -> int:
    """Write the page with a task's charts: a thin line a run, a thick one for the mean. Returns the page's height, pixels."""
    found = groups(results, task)
    chips = "".join(f'<span><i class="dot" style="--c:var(--c{i})"></i>{escape(label)}</span>' for i, label in enumerate(found))
    charts = ""
    panels = PANELS if task != "moments" else PANELS[:2]
    for title, note, name, log in panels:
        series = []
        for color, (label, runs) in enumerate(found.items()):
            lines = [_line(r, name) for r in runs]
            series += [Series(label, color, line, color, faint=len(lines) > 1) for line in lines]
            series += [Series(label, color, mean_line(lines), color)] if len(lines) > 1 else []
        chart = line_chart(series, title, log=log, from_zero=not log)
        charts += f'<figure><figcaption>{title}</figcaption><p class="note">{note or "&nbsp;"}</p>{chart}</figure>'
    look = (
        "<style>main{max-width:1040px;padding:14px 18px} header{display:none} .grid{grid-template-columns:1fr 1fr}"
        ".chips{display:flex;flex-wrap:wrap;gap:4px 22px;margin-bottom:12px;font-size:15px} .tick{font-size:11px}</style>"
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    body = f'{look}<div class="chips">{chips}</div><div class="grid">{charts}</div>'
    page.write_text(Template(PAGE).substitute(title=task, about="", legend="", body=body), encoding="utf-8")
    legend = 1 + sum(len(label) + 6 for label in found) // 120  # lines
    return 22 + 34 * legend + 292 * math.ceil(len(panels) / 2)


def _line(run: Result, name: str) -> list[Point]:
    if name == "held_out":
        return [(step, value) for step, value in run.figures["held_out"]]
    points = run.figures["curves"][name]
    if name != "reward":
        return points
    rewards = [value for _, value in points]
    return [(points[i][0], fmean(rewards[max(0, i - 4) : i + 1])) for i in range(len(points))]


def photograph(page: Path, png: Path, width: int, height: int, browser: str | None, scale: float = 1.5) -> None:
    """The page's upper `height` pixels as a PNG. Without a Chromium the page stays, and the output says so."""
    names = [browser] if browser else ["chromium", "chromium-browser", "google-chrome", "chrome-headless-shell"]
    program = next((found for name in names if (found := shutil.which(name))), None)
    if program is None:
        print(f"no Chromium among {', '.join(names)}: {png.name} is not drawn; the page is {page}", file=sys.stderr)
        return
    png.parent.mkdir(parents=True, exist_ok=True)
    size = [f"--window-size={width},{height}", f"--force-device-scale-factor={scale}", f"--screenshot={png.resolve()}"]
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *size]
    subprocess.run([program, *flags, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)
    print(f"{png}: {png.stat().st_size / 1e3:.0f} kB")


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = root.add_subparsers(required=True)
    runs = commands.add_parser("run", help="train")
    runs.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    runs.add_argument("--variants", nargs="+", default=[], help="only these")
    runs.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    runs.add_argument("--gpus", type=int, default=1, help="GPUs of this machine; 0: leave the device to jetrl")
    runs.add_argument("--at-once", type=int, default=8, help="runs that share a GPU")
    runs.add_argument("--seconds", type=float, default=480, help="after these the runs are told to stop")
    runs.add_argument("--stagger", type=float, default=1.0, help="seconds between two starts")
    runs.add_argument("--set", nargs="+", default=[], help="overrides: KEY=VALUE for all, TASK:KEY=VALUE for a task's")
    runs.add_argument("--folder", type=Path, default=Path("runs/study"))
    runs.add_argument("--out", type=Path, default=Path("runs/study.tar.gz"))
    runs.set_defaults(act=run)
    found = commands.add_parser("collect", help="tables, JSON and pictures of finished runs")
    found.add_argument("sources", type=Path, nargs="+", help="archives, or folders with run folders in them")
    found.add_argument("--folder", type=Path, default=Path("runs/study"), help="where archives and pages go")
    found.add_argument("--json", type=Path)
    found.add_argument("--figures", type=Path, help="folder of the PNGs")
    found.add_argument("--report", choices=list(TASKS), help="also photograph the report page of this task's runs")
    found.add_argument("--report-height", type=int, default=1725)
    found.add_argument("--browser", help="a Chromium; default: the one that is installed")
    found.set_defaults(act=collect)
    return root


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    options.act(options)


if __name__ == "__main__":
    main()
