"""Whole steps of reinforcement learning, by phase: FP8, BF16, and BF16 with a second forward for the old log-probabilities.

Problem: a fast kernel, engine or trainer is worth what it saves of a step. Rollout, forward and backward, optimizer and publish
take turns in one memory, and each handover costs.

Method: the real loop (`loop.train`) with engine and trainer on one model. Prompts are random tokens. A completion's reward is
whether most of its token ids are even, which is random enough for advantages to differ. One short step before the measured ones
compiles and captures. Flow `bf16` runs as frameworks do that cannot trust their rollout's log-probabilities: with a forward for
the old ones. Without the time of that phase it is exact BF16, since the phases follow each other.

    1k, 8k    every completion has so many tokens
    tail      up to 8,192 tokens; any token ends a completion with probability 1/1024, through 1/1024 of the vocabulary as EOS

Model FLOPs utilisation: what forward and backward must do (`training_flops`) at the nominal dense peak of BF16, in both
flows, in the time of accumulate, optimizer and publish. Memory is measured beside the plan that was made before any of it
was allocated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from jetrl.bench.rollout import FLOWS, collect
from jetrl.bench.shapes import products
from jetrl.bench.table import Row, Table, at_least
from jetrl.bench.timing import Ceilings
from jetrl.config import RunConfig, parse_config
from jetrl.footprint import Meter, Place
from jetrl.loop import Job, train
from jetrl.model.checkpoint import load_weights
from jetrl.model.config import ModelConfig, linear_names
from jetrl.model.transformer import Transformer, random_weights
from jetrl.plan import memory_plan, plan_batches
from jetrl.rl.types import Grade, Problem, Prompt, Rollout
from jetrl.rollout.engine import Engine
from jetrl.train.trainer import Objective, Trainer

WARM_UP = 32  # tokens of a completion
PHASES = ("rollout", "old_logprobs", "train", "publish", "grade")
TARGETS = {"training": 1.41, "step": 1.25, "step, BF16 with old log-probabilities": 1.35}


@dataclass(slots=True, frozen=True)
class Case:
    """Completions of a step."""

    name: str
    prompts: int
    group: int
    prompt: int  # tokens
    completion: int  # tokens, at most
    mean: int | None = None  # tokens after which a completion ends on average; None: all are as long as they may be

    @property
    def text(self) -> str:
        often = f"up to {self.completion}, about {self.mean}" if self.mean else f"{self.completion}"
        return f"{self.name}: {self.prompts} x {self.group} x ({self.prompt}, {often})"


CASES = {
    c.name: c for c in (Case("1k", 16, 8, 256, 1024), Case("8k", 4, 8, 256, 8192), Case("tail", 4, 8, 256, 8192, mean=1024))
}


@dataclass(slots=True)
class Measured:
    """The rows of a case's steps in a flow."""

    case: Case
    flow: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def seconds(self, phase: str) -> float:
        """Of the mean step."""
        return fmean(row.get(f"time/{phase}", 0.0) for row in self.rows)

    @property
    def training(self) -> float:
        """Seconds of forward, backward, optimizer and publish of the mean step."""
        return self.seconds("train") + self.seconds("publish")

    @property
    def trained(self) -> float:
        """Prompt and completion tokens of the mean step."""
        return fmean(row["throughput/train"] * (row["time/train"] + row["time/publish"]) for row in self.rows)

    @property
    def completed(self) -> float:
        """Completion tokens of the mean step."""
        return fmean(row["throughput/rollout"] * row["time/rollout"] for row in self.rows)

    @property
    def step(self) -> float:
        """Seconds of the mean step, the old log-probabilities left out."""
        return sum(self.seconds(phase) for phase in PHASES if phase != "old_logprobs")

    def mean(self, key: str) -> float:
        return fmean(row[key] for row in self.rows)

    def most(self, key: str) -> float:
        return max(row[key] for row in self.rows)


def settings(case: Case, flow: str, steps: int, moments: str, microbatch: int) -> RunConfig:
    """The configuration of a run of the case."""
    kind = FLOWS[flow]
    return parse_config(
        {
            "flow": "fp8" if kind.fp8 else "bf16",
            "kv_cache": "fp8" if kind.kv_fp8 else "bf16",
            "steps": steps,
            "rollout": {
                "prompts_per_step": case.prompts,
                "group_size": case.group,
                "max_completion_tokens": case.completion,
            },
            "optimizer": {"moments": moments, "microbatch_tokens": microbatch},
            "eval": {"prompts": 0},
        }
    )


class _Rows:
    """A monitor that keeps the rows of training and tells of each step."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._told = told

    def train(self, step: int, values: dict[str, Any]) -> None:
        self.rows.append(values)
        phases = ", ".join(f"{p} {values[f'time/{p}']:.1f}" for p in PHASES if f"time/{p}" in values)
        self._told(f"step {step}: {values['time/step']:.1f} s ({phases})")

    def evaluation(self, step: int, values: dict[str, Any]) -> None: ...

    def event(self, step: int, event: str, detail: str = "") -> None:
        self._told(f"step {step}: {event}: {detail}")

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None: ...

    def phase(self, name: str) -> None: ...


def grade(pairs: Sequence[tuple[Problem, str]]) -> list[Grade]:
    """1 for completions most of whose token ids are even."""
    even = [2 * sum(int(word) % 2 == 0 for word in text.split()) > len(text.split()) for _, text in pairs]
    return [Grade(float(right), right) for right in even]


def random_prompts(case: Case, vocabulary: int) -> Callable[[int], list[Prompt]]:
    """Prompts of a step, other ones each step."""

    def prompts(step: int) -> list[Prompt]:
        rng = random.Random(step)
        tokens = [[rng.randrange(vocabulary) for _ in range(case.prompt)] for _ in range(case.prompts)]
        return [Prompt(Problem(f"{step}.{i}", ""), "", ids) for i, ids in enumerate(tokens)]

    return prompts


def run_case(
    model: Transformer, trainer: Trainer, case: Case, config: RunConfig, told: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A short step, then those of the configuration; the rows of the latter. Works on any device."""
    place = Place.of(model.device.type)
    batches = plan_batches(config, model.config, case.prompt, place)
    meter = Meter(memory_plan(config, model.config, batches, place), model.device)
    trainer.objective = replace(trainer.objective, max_tokens=case.completion, recompute_layers=batches.recompute_layers)
    told(f"{batches.recompute_layers} layers computed anew; {meter.plan.peak_gb:.1f} GB planned")
    eos = range(model.config.vocab_size // case.mean) if case.mean else ()
    engine = Engine(model, batches.limits, eos)
    monitor = _Rows(told)
    short = config.rollout.model_copy(update={"max_completion_tokens": min(WARM_UP, case.completion)})
    for part in (config.model_copy(update={"steps": 1, "rollout": short}), config):
        monitor.rows.clear()
        train(
            Job(
                config=part,
                exact=config.flow == "fp8",  # in BF16 the old log-probabilities are computed again, and timed
                prompts=random_prompts(case, model.config.vocab_size),
                held_out=[],
                grade=grade,
                decode=lambda ids: " ".join(map(str, ids)),
                generator=engine,
                learner=trainer,
                monitor=monitor,
                save=lambda step: None,
                diagnose=lambda rollout, token: "`jetrl check` finds the operator",
                memory=meter,
                stopping=lambda: False,
            )
        )
    engine.sleep()
    return monitor.rows


def bench(
    shape: ModelConfig,
    folder: Path | None,
    cases: Sequence[Case],
    flows: Sequence[str],
    steps: int,
    moments: str,
    microbatch: int,
    device: str,
    told: Callable[[str], None],
) -> Iterator[Measured]:
    """Measure, one flow after the other. `folder`: whose weights are trained; else random ones.

    Raises ValueError before anything is allocated for what does not fit.
    """
    config = replace(shape, max_position_embeddings=max(case.prompt + case.completion for case in cases))
    runs = [(flow, case, settings(case, flow, steps, moments, microbatch)) for flow in flows for case in cases]
    for _, case, run in runs:
        plan_batches(run, config, case.prompt, Place.of(device))
    for flow in flows:
        kind, first = FLOWS[flow], runs[0][2]
        model = Transformer(config, linear_names(config) if kind.fp8 else (), device, kind.kv_fp8)
        objective = Objective(first.algorithm, first.optimizer, first.rollout.temperature, 0, len(runs) * (steps + 1))
        trainer = Trainer(model, _weights(config, folder, model.device), objective)
        for _, case, run in (r for r in runs if r[0] == flow):
            told(f"{flow}, {case.text}")
            yield Measured(case, flow, run_case(model, trainer, case, run, told))
            collect()
        del model, trainer
        collect()


def _weights(config: ModelConfig, folder: Path | None, device: torch.device) -> dict[str, Tensor]:
    return load_weights(folder, config) if folder else dict(random_weights(config, device, seed=0))


# Rows


def training_roofline(config: ModelConfig, m: Measured, ceilings: Ceilings) -> float:
    """Least seconds of forward and backward of the mean step: projections at their type's peak, the rest at BF16's."""
    linear = 6.0 * m.trained * config.num_layers * sum(p.n * p.k for p in products(config))
    fp8 = linear if FLOWS[m.flow].fp8 else 0.0
    return 1e-6 * ceilings.roofline(0.0, bf16=m.mean("throughput/train_tflops") * 1e12 * m.training - fp8, fp8=fp8)


def speed_rows(config: ModelConfig, fp8: Measured, bf16: Measured | None, ceilings: Ceilings, judged: bool) -> list[Row]:
    """Rates of FP8 beside those of BF16, tokens/s: of the rollout, of training, of the whole step."""
    name = fp8.case.name + (", FP8 KV cache" if FLOWS[fp8.flow].kv_fp8 else "")

    def row(what: str, rates: tuple[float, float | None], roofline: float | None = None) -> Row:
        ours, theirs = rates
        goal = at_least(ours / theirs, TARGETS.get(what) if judged else None, "x") if theirs else None
        return Row(f"{name}, {what}", ours, theirs, roofline, goal, rate=True)

    def both(rate: Callable[[Measured], float]) -> tuple[float, float | None]:
        return rate(fp8), rate(bf16) if bf16 else None

    rows = [
        row("rollout", both(lambda m: m.completed / m.seconds("rollout"))),
        row("training", both(lambda m: m.trained / m.training), fp8.trained / training_roofline(config, fp8, ceilings)),
        row("step", both(lambda m: m.completed / m.step)),
    ]
    if bf16:
        slower = bf16.completed / (bf16.step + bf16.seconds("old_logprobs"))
        rows.append(row("step, BF16 with old log-probabilities", (fp8.completed / fp8.step, slower)))
    return rows


def phase_row(m: Measured, ceilings: Ceilings) -> Row:
    """Where a step's time goes."""
    extra: dict[str, float | str] = {f"{phase}, s": f"{m.seconds(phase):.2f}" for phase in PHASES}
    extra["MFU"] = f"{m.mean('throughput/train_tflops') * 1e12 / ceilings.bf16_nominal:.1%}"
    extra["tokens, completed"] = f"{m.completed:,.0f}"
    extra["tokens, longest"] = f"{m.most('length/max'):,.0f}"
    extra["steps"] = f"{len(m.rows)}"
    return Row(f"{m.case.name}, {m.flow}", 1e6 * (m.step + m.seconds("old_logprobs")), extra=extra)


def memory_row(m: Measured) -> Row:
    """The larger peak beside its plan, GB; both phases, and the mismatch."""
    extra: dict[str, float | str] = {}
    for phase in ("rollout", "training"):
        extra[f"{phase}, measured"] = m.most(f"memory/{phase}_gb")
        extra[f"{phase}, planned"] = m.most(f"memory/{phase}_planned_gb")
    extra["tokens compared"] = f"{sum(row['token_diff/tokens'] for row in m.rows):,.0f}"
    extra["logprob_diff/max"] = f"{m.most('logprob_diff/max')}"
    return Row(f"{m.case.name}, {m.flow}", m.most("memory/peak_gb"), m.most("memory/planned_gb"), extra=extra)


def tables(config: ModelConfig, measured: Iterable[Measured], ceilings: Ceilings, judged: bool) -> list[Table]:
    """All rows, case by case. `judged`: the targets, which are for an 8B model, apply."""
    found = {(m.case.name, m.flow): m for m in measured}
    sizes = "; ".join(dict.fromkeys(m.case.text for m in found.values()))
    speeds = [
        row
        for (name, flow), m in found.items()
        if FLOWS[flow].fp8
        for row in speed_rows(config, m, found.get((name, "bf16")), ceilings, judged)
    ]
    phases = [phase_row(m, ceilings) for m in found.values()]
    return [
        Table(f"step: tokens/s. prompts x group x (prompt, completion): {sizes}", speeds, "FP8", "exact BF16"),
        Table("step: the mean step, and where its time goes", phases, "step"),
        Table("step: peak memory, GB, and the mismatch", [memory_row(m) for m in found.values()], "peak", "planned"),
    ]
