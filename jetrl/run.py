"""From a configuration to a run: check everything that can be checked, load, resume, train, report."""

from __future__ import annotations

import logging
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

from jetrl.check import diagnose
from jetrl.config import RunConfig
from jetrl.flow import Flow, build_flow, check_flow
from jetrl.loop import Job, train
from jetrl.model.checkpoint import load_weights
from jetrl.model.config import ModelConfig, read_config
from jetrl.model.sources import resolve_model
from jetrl.model.tokenizer import load_tokenizer, stop_token_ids
from jetrl.model.transformer import Transformer
from jetrl.plan import BatchPlan, plan_batches
from jetrl.report.display import Display
from jetrl.report.page import write_report
from jetrl.report.read import read_run, summarize
from jetrl.report.record import RunFolder, sample_row
from jetrl.rl.types import Prompt, Rollout
from jetrl.rollout.engine import Engine
from jetrl.tasks import Task, build_prompts, load_task, order
from jetrl.train.state import State, latest_checkpoint, load_state, save_state
from jetrl.train.trainer import Objective, Trainer

log = logging.getLogger("jetrl")


@dataclass(slots=True)
class Setup:
    """What is known before weights are loaded: everything that a dry run shows."""

    config: RunConfig
    source: Path
    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    eos: tuple[int, ...]
    task: Task
    prompts: list[Prompt]
    held_out: list[Prompt]
    notes: list[str]  # what the user should know: prompts left out, contexts cut
    batches: BatchPlan
    flow: Flow

    def decode(self, token_ids: list[int]) -> str:
        """Text of completion tokens, special tokens left out."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def setup(config: RunConfig) -> Setup:
    """Resolve model, task, prompts, batches and flow. Raises ValueError for whatever would fail later."""
    source = resolve_model(config.model)
    model = read_config(source)
    flow = build_flow(config.flow, model)
    check_flow(flow)
    tokenizer = load_tokenizer(source, model)
    task = load_task(config.task, seed=config.seed)
    notes = [*model.notes, *(f"{count} problems left out: {why}" for why, count in task.dropped.items() if count)]
    prompts, counts = build_prompts(task, task.train, tokenizer, config.task)
    held_out: list[Prompt] = []
    longest = max(len(p.token_ids) for p in prompts)
    if config.eval.prompts:
        held_out, _ = build_prompts(task, task.held_out[: config.eval.prompts], tokenizer, config.task)
        longest = max(longest, max(len(p.token_ids) for p in held_out))
    if counts.overlong:
        notes.append(f"{counts.overlong} of {counts.overlong + counts.kept} prompts are longer than task.max_prompt_tokens="
                     f"{config.task.max_prompt_tokens} (longest {counts.longest}) and left out")  # fmt: skip
    batches = plan_batches(config, model, longest)
    return Setup(
        config,
        source,
        model,
        tokenizer,
        stop_token_ids(model, tokenizer),
        task,
        prompts,
        held_out,
        notes,
        batches,
        flow,
    )


def load_rollout_model(s: Setup) -> Transformer:
    """The model as the rollout side of the flow sees it, weights loaded."""
    model = Transformer(s.model, s.flow.rollout_layers(s.model))
    model.load(load_weights(s.source, s.model))
    return model


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
            sample_row(r, step, [self._tokenizer.decode([t]) for t in r.completion.token_ids]) for r in rollouts
        )

    def phase(self, name: str) -> None:
        self.display.phase(name)


def _models(s: Setup) -> tuple[Transformer, Transformer]:
    """The trainer's model and the engine's: one object where both sides have the same FP8 layers."""
    trainer_layers, rollout_layers = s.flow.trainer_layers(s.model), s.flow.rollout_layers(s.model)
    trainer = Transformer(s.model, trainer_layers)
    return trainer, trainer if set(trainer_layers) == set(rollout_layers) else Transformer(s.model, rollout_layers)


def build_job(s: Setup, monitor: RunMonitor, run: Path, resume: bool, stopping: Callable[[], bool]) -> Job:
    """Load the weights and wire trainer and engine; with `resume`, from the latest checkpoint in the run folder."""
    config, model = s.config, s.model
    training, sampling = _models(s)
    weights = load_weights(s.source, model)
    reference = None
    if config.algorithm.kl_coef:
        reference = Transformer(model, s.flow.trainer_layers(model))
        reference.load(weights)
    temperature = config.rollout.temperature
    objective = Objective(
        config.algorithm, config.optimizer, temperature, config.rollout.max_completion_tokens, s.batches.updates
    )
    trainer = Trainer(training, weights, objective, [] if sampling is training else [sampling], reference)
    layers = sorted(s.flow.trainer_layers(model))
    checkpoint = latest_checkpoint(run) if resume else None
    start = load_state(checkpoint, trainer, config.flow, layers).step if checkpoint else 0
    engine = Engine(sampling, s.batches.limits, s.eos)
    engine.published(trainer.policy_version)

    def save(step: int) -> None:
        state = State(step, trainer.policy_version, trainer.optimizer.steps, trainer.optimizer.skipped, config.flow, layers)
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
        peak_memory_gb=peak_memory_gb,
        stopping=stopping,
        start=start,
    )


def run_training(config: RunConfig, resume: bool = False) -> Path:
    """Run a configuration to its end, or to Ctrl-C; returns the path of the report. See `setup` for the errors.

    The first Ctrl-C (or SIGTERM) finishes the step, saves and reports; a second one stops at once.
    """
    s = setup(config)
    run = Path(config.folder or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{config.flow}")
    checkpoint = latest_checkpoint(run) if resume else None
    resume_step = (int(checkpoint.name.rsplit("-", 1)[-1]) if checkpoint else 0) if resume else None
    try:
        with (
            RunFolder(run, config, resume_step=resume_step) as folder,
            Display(config.steps, exact=s.flow.exact) as display,
            _stop_signals() as stopping,
        ):
            monitor = RunMonitor(folder, display, s.tokenizer)
            if not resume:
                for note in s.notes:
                    monitor.event(0, "note", note)
            try:
                train(build_job(s, monitor, run, resume, stopping))
            finally:
                report = write_report([run], run / "report.html") if (run / "metrics.jsonl").stat().st_size else None
            display.final(summarize(read_run(run)), report)
    finally:
        s.task.close()
    assert report is not None
    return report


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


def peak_memory_gb() -> float:
    """Largest resident memory of this process so far, GB."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
