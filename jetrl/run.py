"""From a configuration to a run: check everything that can be checked, load, resume, train, report."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from jetrl.check import diagnose
from jetrl.config import RunConfig, load_config
from jetrl.flow import Flow, build_flow, check_flow
from jetrl.footprint import Footprint, Meter, Place
from jetrl.kernels.select import device_of
from jetrl.loop import Job, train
from jetrl.model.checkpoint import load_weights
from jetrl.model.config import ModelConfig, read_config
from jetrl.model.shapes import model_to_plan
from jetrl.model.sources import resolve_model
from jetrl.model.tokenizer import load_tokenizer, stop_token_ids
from jetrl.model.transformer import Transformer
from jetrl.plan import BatchPlan, memory_plan, plan_batches
from jetrl.report.display import Display
from jetrl.report.page import write_report
from jetrl.report.read import CONFIG, METRICS, flatten, read_rows, read_run, summarize
from jetrl.report.record import RunFolder, sample_row
from jetrl.rl.types import Prompt, Rollout
from jetrl.rollout.engine import Engine
from jetrl.tasks import MissingData, PromptCounts, Task, build_prompts, load_task, order
from jetrl.train.optim import check_moments
from jetrl.train.state import State, checkpoint_step, latest_checkpoint, load_state, save_state
from jetrl.train.trainer import Objective, Trainer

log = logging.getLogger("jetrl")

# What may change when a run goes on: how far, where, how often it saves and evaluates, and how much fits at once. The rest
# would make one folder hold two runs.
_MAY_CHANGE = {"steps", "folder", "save_every", "on_mismatch", "loggers", "eval.every"} | {
    *(f"optimizer.{key}" for key in ("microbatch_tokens", "recompute_layers")),
    *(f"rollout.{key}" for key in ("max_sequences", "max_batch_tokens", "cache_tokens", "block_size")),
}


@dataclass(slots=True)
class Plan:
    """What a dry run shows."""

    config: RunConfig
    model: ModelConfig
    flow: Flow
    prompts: list[Prompt]  # empty where tokenizer or data are not here
    held_out: list[Prompt]
    notes: list[str]  # what the user should know: prompts left out, contexts cut, what was not checked
    batches: BatchPlan
    footprint: Footprint


@dataclass(slots=True)
class Setup(Plan):
    """All that a run needs, before its weights are loaded."""

    source: Path
    tokenizer: PreTrainedTokenizerBase
    eos: tuple[int, ...]
    task: Task

    @property
    def device(self) -> torch.device:
        """Where the run's models live."""
        return device_of(self.config.device)

    def decode(self, token_ids: list[int]) -> str:
        """Text of completion tokens, special tokens left out."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def setup(config: RunConfig, place: Place | None = None) -> Setup:
    """Resolve model, task, prompts, batches and flow. Raises ValueError for whatever would fail later.

    `place`: the machine to plan for, by default the configuration's device on this one.
    """
    source = resolve_model(config.model)
    model = read_config(source)
    check_moments(config.optimizer)
    tokenizer = load_tokenizer(source, model)
    eos = stop_token_ids(model, tokenizer)
    task = load_task(config.task, seed=config.seed)
    plan = _plan(config, model, tokenizer, task, place, [])
    planned: dict[str, Any] = {f.name: getattr(plan, f.name) for f in fields(plan)}
    return Setup(**planned, source=source, tokenizer=tokenizer, eos=eos, task=task)


def dry_run(config: RunConfig, place: Place | None = None) -> Plan:
    """`setup` without weights. What is not on this machine, tokenizer, data or a library, is noted as not checked.

    Raises ValueError for whatever else would fail, and for a model of unknown sizes.
    """
    source, model, notes = model_to_plan(config.model)
    tokenizer = load_tokenizer(source, model) if source else None
    if tokenizer:
        stop_token_ids(model, tokenizer)
    task = None
    try:
        task = load_task(config.task, seed=config.seed)
        task.close()
    except MissingData as error:
        notes.append(f"not checked: problems of task {config.task.name}, because {error}")
    try:
        check_moments(config.optimizer)
    except ValueError as error:
        notes.append(f"not checked: that moments can be kept, because {error}")
    return _plan(config, model, tokenizer, task, place, notes)


def _plan(
    config: RunConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    task: Task | None,
    place: Place | None,
    notes: list[str],
) -> Plan:
    """Flow, prompts and batches; without tokenizer or task, prompts as long as they may be."""
    flow = build_flow(config.flow, model, config.kv_cache)
    check_flow(flow)
    place = place or Place.of(config.device)
    notes = [*model.notes, *notes]
    prompts: list[Prompt] = []
    held_out: list[Prompt] = []
    longest = config.task.max_prompt_tokens
    if task is not None:
        notes += [f"{count} problems left out: {why}" for why, count in task.dropped.items() if count]
        notes += _check_held_out(config, task)
    if task is not None and tokenizer is not None:
        prompts, counts = build_prompts(task, task.train, tokenizer, config.task)
        notes += _overlong("prompts", counts, config)
        if config.eval.prompts:
            held_out, counts = build_prompts(task, task.held_out[: config.eval.prompts], tokenizer, config.task)
            notes += _overlong("held-out prompts", counts, config)
        longest = max(len(p.token_ids) for p in [*prompts, *held_out])
    else:
        notes.append(f"not checked: lengths of prompts; the longest is taken to have task.max_prompt_tokens={longest}")
    batches = plan_batches(config, model, longest, place)
    return Plan(config, model, flow, prompts, held_out, notes, batches, memory_plan(config, model, batches, place))


def _check_held_out(config: RunConfig, task: Task) -> list[str]:
    wanted, there = config.eval.prompts, len(task.held_out)
    if wanted and not there:
        raise ValueError(
            f"eval.prompts is {wanted}, but task {task.name} has no held-out problem. Give task.eval_data, or "
            "5 problems or more in task.data, or eval.prompts=0."
        )
    return [f"eval.prompts is {wanted}, but there are {there} held-out problems only"] if there < wanted else []


def _overlong(what: str, counts: PromptCounts, config: RunConfig) -> list[str]:
    if not counts.overlong:
        return []
    limit = config.task.max_prompt_tokens
    total = counts.overlong + counts.kept
    return [f"{counts.overlong} of {total} {what} left out: over task.max_prompt_tokens={limit} (longest {counts.longest})"]


class RunMonitor:
    """Sends each row to the run folder, then to the screen."""

    def __init__(self, folder: RunFolder, display: Display, tokenizer: PreTrainedTokenizerBase) -> None:
        self.folder, self.display, self._tokenizer = folder, display, tokenizer

    def train(self, step: int, values: dict[str, Any]) -> None:
        self.display.train(self.folder.train(step, values))

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        self.display.evaluation(self.folder.evaluation(step, values))

    def event(self, step: int, event: str, detail: str = "") -> None:
        self.display.event(self.folder.event(step, event, detail))

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        self.folder.samples(
            sample_row(r, step, [str(self._tokenizer.decode([t])) for t in r.completion.token_ids]) for r in rollouts
        )

    def phase(self, name: str) -> None:
        self.display.phase(name)


def _models(s: Setup) -> tuple[Transformer, Transformer]:
    """The trainer's model and the engine's: one object where both sides have the same FP8 layers and attention."""
    flow = s.flow
    trainer = Transformer(s.model, flow.trainer_layers(s.model), s.device, flow.trainer_kv_fp8)
    sampling = frozenset(flow.rollout_layers(s.model)), flow.rollout_kv_fp8
    return trainer, trainer if sampling == (trainer.fp8_layers, trainer.kv_fp8) else Transformer(
        s.model, sampling[0], s.device, sampling[1]
    )


def build_job(s: Setup, monitor: RunMonitor, run: Path, resume: bool, stopping: Callable[[], bool]) -> Job:
    """Load the weights and wire trainer and engine; with `resume`, from the latest checkpoint in the run folder."""
    config, model = s.config, s.model
    training, sampling = _models(s)
    weights = load_weights(s.source, model)
    reference = None
    if config.algorithm.kl_coef:
        reference = Transformer(model, training.fp8_layers, training.device, training.kv_fp8)
        reference.load(weights)
    temperature = config.rollout.temperature
    objective = Objective(
        config.algorithm,
        config.optimizer,
        temperature,
        config.rollout.max_completion_tokens,
        s.batches.updates,
        s.batches.recompute_layers,
        config.seed,
    )
    trainer = Trainer(training, weights, objective, [] if sampling is training else [sampling], reference)
    layers = sorted(s.flow.trainer_layers(model))
    checkpoint = latest_checkpoint(run) if resume else None
    start = load_state(checkpoint, trainer, config.flow, layers, config.kv_cache).step if checkpoint else 0
    engine = Engine(sampling, s.batches.limits, s.eos)
    engine.published(trainer.policy_version)

    def save(step: int) -> None:
        counts = step, trainer.policy_version, trainer.optimizer.steps, trainer.optimizer.skipped
        state = State(*counts, config.flow, layers, config.kv_cache)
        save_state(run, trainer, state, model, s.source)

    def prompts(step: int) -> list[Prompt]:
        return [s.prompts[i] for i in order(config.seed, step - 1, config.rollout.prompts_per_step, len(s.prompts))]

    return Job(
        config=config,
        exact=s.flow.exact,
        prompts=prompts,
        held_out=s.held_out,
        grade=s.task.grade_all,
        decode=s.decode,
        generator=engine,
        learner=trainer,
        monitor=monitor,
        save=save,
        diagnose=lambda rollout, token: diagnose(sampling, training, rollout, token, temperature),
        memory=Meter(s.footprint, training.device),
        stopping=stopping,
        start=start,
    )


def run_training(config: RunConfig, resume: bool = False) -> bool:
    """Run a configuration to its end; False if a signal stopped it before. See `setup` for the errors.

    The first Ctrl-C (or SIGTERM) finishes the step, saves and reports; a second one stops at once.
    """
    run = Path(config.folder or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.flow}")
    # `auto` becomes the device it means: a run that went on elsewhere would not be the unbroken one.
    config = config.model_copy(update={"folder": str(run), "device": device_of(config.device).type})
    checkpoint = latest_checkpoint(run)
    if resume:
        check_resumable(config, run)
    elif checkpoint:
        raise ValueError(f"the run folder {str(run)!r} already holds checkpoints. Resume it, or choose another folder=...")
    start = checkpoint_step(checkpoint) if checkpoint else 0
    if start >= config.steps:
        log.warning("nothing to do: steps is %d and %s is there. Give more steps to go on.", config.steps, checkpoint)
        return True
    s = setup(config)
    try:
        with (
            # -1: without a checkpoint everything is done again, the evaluation before training as well.
            RunFolder(run, config, resume_step=(start or -1) if resume else None) as folder,
            Display(config.steps, exact=s.flow.exact) as display,
            _stop_signals() as stopping,
        ):
            monitor = RunMonitor(folder, display, s.tokenizer)
            job = build_job(s, monitor, run, resume, stopping)
            for note in s.notes if start == 0 else []:
                monitor.event(0, "note", note)
            try:
                done = train(job)
            finally:
                report = _write_report(run)
            display.final(summarize(read_run(run)), report)
    finally:
        s.task.close()
    if done < config.steps:
        log.warning("stopped after step %d of %d. Go on with: jetrl train %s --resume", done, config.steps, run / CONFIG)
    return done == config.steps


def check_resumable(config: RunConfig, run: Path) -> None:
    """Raise ValueError unless `run` holds a run of this configuration, but for what may change in the middle of one."""
    if not (run / METRICS).is_file() or not (run / CONFIG).is_file():
        raise ValueError(f"nothing to resume in {str(run)!r}: it has no {CONFIG} and {METRICS}. Leave --resume out.")
    before, now = (flatten(c.model_dump(mode="json")) for c in (load_config(run / CONFIG), config))
    # The schedule is a function of all steps: with another number the learning rate would jump.
    may_change = _MAY_CHANGE if config.optimizer.schedule == "constant" else _MAY_CHANGE - {"steps"}
    changed = [key for key in before | now if before.get(key) != now.get(key) and key not in may_change]
    if changed:
        listed = ", ".join(f"{key} (was {before.get(key)!r}, now {now.get(key)!r})" for key in changed)
        checkpoint = latest_checkpoint(run)
        model = checkpoint / "model" if checkpoint else config.model
        raise ValueError(
            f"{str(run)!r} cannot go on with other settings: {listed}. Resume it with its own, jetrl train {run / CONFIG} "
            f"--resume folder={run}, or start a new run in another folder with model={model}."
        )


def _write_report(run: Path) -> Path | None:
    """The report of a run that did a step; None for one that failed before."""
    if not any(row.get("kind") == "train" for row in read_rows(run / METRICS)):
        return None
    return write_report([run], run / "report.html")


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """True after the first SIGINT or SIGTERM; the handlers that were there come back, so a second one ends the program."""
    seen: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        log.warning("stopping after this step and saving; once more to stop at once")
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
