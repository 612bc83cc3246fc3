"""The algorithm: GRPO, with rollout and training in one precision flow.

    for each step:
        sample a group of completions for each prompt                 (Generator, policy version v)
        grade them; a completion's advantage is its reward against its group's
        for each update of the step:
            forward and backward of the clipped policy loss           (Learner)
            the forward's log-probabilities are the rollout's, to the bit, or the run stops
            optimizer step, publish version v + 1

Deviations from GRPO as first published: token-mean loss and an asymmetric clip (DAPO), no KL unless asked for, and no
second forward for the old log-probabilities, since in an exact flow the rollout's are the trainer's own.

The loop knows rollout and training through two protocols only, so the same code runs on one CPU and on many GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from jetrl.config import RunConfig
from jetrl.rl.advantage import group_advantages
from jetrl.rl.metrics import avg_at_k, pass_at_k, rollout_metrics
from jetrl.rl.seeds import sample_seed
from jetrl.rl.types import Completion, Grade, MismatchError, Problem, Prompt, Request, Rollout

EVAL_STREAM = -1  # the "step" of evaluation seeds: the same samples are drawn before, during and after training
SAMPLED_GROUPS = 4  # rollout groups of each step that are written to samples.jsonl


Decode = Callable[[list[int]], str]
GradeAll = Callable[[list[tuple[Problem, str]]], list[Grade]]


class Generator(Protocol):
    """The rollout side."""

    def generate(
        self, requests: Sequence[Request], temperature: float, progress: Callable[[int, int], None] | None = None
    ) -> list[list[Completion]]: ...

    def published(self, policy_version: int) -> None: ...

    def sleep(self) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Learner(Protocol):
    """The training side. `accumulate` returns what it saw: loss, mismatch, first_difference, entropy, tokens, flops."""

    policy_version: int

    def old_logprobs(self, rollouts: Sequence[Rollout]) -> list[Any]: ...

    def accumulate(self, rollouts: Sequence[Rollout], old_logprobs: Sequence[Any] | None = None) -> Any: ...

    def apply(self) -> dict[str, float]: ...

    def discard(self) -> None: ...


class Monitor(Protocol):
    """Where rows go: files, loggers, screen."""

    def train(self, step: int, values: dict[str, Any]) -> None: ...

    def evaluation(self, step: int, values: dict[str, Any]) -> None: ...

    def event(self, step: int, event: str, detail: str = "") -> None: ...

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None: ...

    def phase(self, name: str) -> None: ...


class Memory(Protocol):
    """Peaks of memory beside the plan."""

    def measure(self, phase: str) -> None: ...

    def metrics(self) -> dict[str, float]: ...


@dataclass(slots=True)
class Job:
    """All that a run needs, made by `run.build_job`."""

    config: RunConfig
    exact: bool  # the flow promises equal bits
    prompts: Callable[[int], list[Prompt]]  # of a step, from 1: a function of the step alone
    held_out: list[Prompt]
    grade: GradeAll
    decode: Decode
    generator: Generator
    learner: Learner
    monitor: Monitor
    save: Callable[[int], None]
    diagnose: Callable[[Rollout, int], str]  # rollout, completion token: where their mismatch arose
    memory: Memory
    stopping: Callable[[], bool]
    start: int = 0  # steps already done


@dataclass(slots=True)
class Clock:
    """Seconds by phase of one step."""

    monitor: Monitor
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; phases of one name add up."""
        self.monitor.phase(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`time/...` of each phase and of the step."""
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        return times | {"time/step": sum(self.seconds.values())}


def train(job: Job) -> int:
    """Run the steps that are left; returns the last one done, an earlier one than `config.steps` if `stopping` said so.

    Raises MismatchError when an exact flow is not exact; the weights are those of the step before, and are saved first.
    """
    config = job.config
    if job.start == 0:
        evaluate(job, 0)
    for step in range(job.start + 1, config.steps + 1):
        clock = Clock(job.monitor)
        rollouts = sample_rollouts(job, step, clock)
        assign_advantages(rollouts, config.rollout.group_size, config.algorithm.advantage)
        job.memory.measure("rollout")
        values = update(job, step, rollouts, clock)
        job.memory.measure("training")
        record(job, step, rollouts, values, clock)
        last, stop = step == config.steps, job.stopping()
        if last or (config.eval.every and step % config.eval.every == 0):
            evaluate(job, step)
        if last or stop or (config.save_every and step % config.save_every == 0):
            job.save(step)
        if stop:
            return step
    return config.steps


def sample_rollouts(job: Job, step: int, clock: Clock) -> list[Rollout]:
    """`group_size` graded completions for each prompt of the step, groups one behind the other."""
    limits = job.config.rollout
    prompts = job.prompts(step)
    seeds = [[sample_seed(job.config.seed, step, p, s) for s in range(limits.group_size)] for p in range(len(prompts))]
    with clock.phase("rollout"):
        requests = [
            Request(prompt.token_ids, own, limits.max_completion_tokens) for prompt, own in zip(prompts, seeds, strict=True)
        ]
        groups = job.generator.generate(requests, limits.temperature)
    with clock.phase("grade"):
        rollouts = grade_groups(prompts, groups, job.decode, job.grade)
    failed = [r.grade.error for r in rollouts if r.grade.error is not None]
    if failed:
        job.monitor.event(step, "grading failed", f"{len(failed)} of {len(rollouts)} completions, reward 0: {failed[0]}")
    return rollouts


def grade_groups(prompts: list[Prompt], groups: list[list[Completion]], decode: Decode, grade: GradeAll) -> list[Rollout]:
    """Decode and grade completions. One whose grading failed has reward 0 and says why in `grade.error`."""
    flat = [(g, prompts[g], completion) for g, group in enumerate(groups) for completion in group]
    texts = [decode(completion.token_ids) for _, _, completion in flat]
    grades = grade([(prompt.problem, text) for (_, prompt, _), text in zip(flat, texts, strict=True)])
    return [
        Rollout(prompt, completion, text, verdict, group)
        for (group, prompt, completion), text, verdict in zip(flat, texts, grades, strict=True)
    ]


def assign_advantages(rollouts: list[Rollout], group_size: int, kind: Any) -> None:
    """Give each rollout its advantage within its group."""
    rewards = torch.tensor([r.grade.reward for r in rollouts], dtype=torch.float64).view(-1, group_size)
    for rollout, advantage in zip(rollouts, group_advantages(rewards, kind).flatten().tolist(), strict=True):
        rollout.advantage = advantage


def update(job: Job, step: int, rollouts: list[Rollout], clock: Clock) -> dict[str, float]:
    """The optimizer steps on one batch of rollouts; returns their metrics, added up or averaged."""
    job.generator.sleep()  # training takes the memory of the KV cache
    updates = job.config.algorithm.updates_per_step
    size = len(rollouts) // updates
    old = None
    if not job.exact:
        with clock.phase("old_logprobs"):
            old = job.learner.old_logprobs(rollouts)
    loss = differences = None
    entropy = tokens = flops = skipped = 0
    values: dict[str, float] = {}
    for first in range(0, len(rollouts), size):
        batch = slice(first, first + size)
        with clock.phase("train"):
            seen = job.learner.accumulate(rollouts[batch], old[batch] if old else None)
        require_exact(job, step, rollouts[batch], seen)
        with clock.phase("publish"):
            values = job.learner.apply()
            job.generator.published(job.learner.policy_version)
        skipped += values["optimizer/skipped"]
        if values["optimizer/skipped"]:
            job.monitor.event(step, "optimizer step skipped", f"gradient norm {values['grad_norm']}")
        loss = seen.loss if loss is None else loss + seen.loss
        differences = seen.mismatch if differences is None else differences + seen.mismatch
        entropy, tokens, flops = entropy + seen.entropy / updates, tokens + seen.tokens, flops + seen.flops
    assert loss is not None and differences is not None
    values |= {"optimizer/skipped": skipped, "entropy": entropy, "policy_version": job.learner.policy_version}
    seconds = max(clock.seconds["train"] + clock.seconds["publish"], 1e-9)
    values |= {"throughput/train": tokens / seconds, "throughput/train_tflops": flops / seconds / 1e12}
    return values | loss.finish() | differences.finish()


def require_exact(job: Job, step: int, rollouts: Sequence[Rollout], seen: Any) -> None:
    """In an exact flow a single differing bit stops the run, before the weights change, and is traced to its origin."""
    if not job.exact or seen.mismatch.exact:
        return
    index, token = seen.first_difference
    detail = (
        f"{seen.mismatch.differing} of {seen.mismatch.tokens} tokens differ, largest difference {seen.mismatch.max_diff:.3g}; "
        + job.diagnose(rollouts[index], token)
    )
    job.monitor.event(step, "mismatch in an exact flow", detail)
    if job.config.on_mismatch == "stop":
        job.learner.discard()
        job.monitor.train(step, seen.mismatch.finish())  # else the record of a run that failed its proof would show zeros alone
        if step - 1 > job.start:  # tokens are compared before a step's first update only, so these are the last step's weights
            job.save(step - 1)
        raise MismatchError(f"step {step}: {detail} (on_mismatch=continue goes on regardless)")


def record(job: Job, step: int, rollouts: list[Rollout], values: dict[str, float], clock: Clock) -> None:
    """Write the row of a step, and samples of its rollouts."""
    sampled = sum(len(r.completion.token_ids) for r in rollouts)
    speed = {"throughput/rollout": sampled / max(clock.seconds["rollout"], 1e-9)} | job.generator.metrics()
    job.monitor.train(step, rollout_metrics(rollouts) | values | clock.metrics() | speed | job.memory.metrics())
    job.monitor.samples(step, [r for r in rollouts if r.group < SAMPLED_GROUPS])


def evaluate(job: Job, step: int) -> None:
    """Held-out evaluation of the present policy."""
    if not job.held_out:
        return
    job.monitor.phase("eval")
    values, failed = evaluate_rollouts(job.config, job.held_out, job.generator, job.decode, job.grade)
    if failed:
        job.monitor.event(step, "grading failed", f"{len(failed)} held-out completions, counted wrong: {failed[0]}")
    job.monitor.evaluation(step, values)


def evaluate_rollouts(
    config: RunConfig, held_out: list[Prompt], generator: Generator, decode: Decode, grade: GradeAll
) -> tuple[dict[str, float], list[str]]:
    """avg@k and pass@k on held-out prompts, and the errors of grading. The same random numbers are used each time."""
    start = time.perf_counter()
    k, limit = config.eval.samples, config.rollout.max_completion_tokens
    requests = [
        Request(prompt.token_ids, [sample_seed(config.seed, EVAL_STREAM, p, s) for s in range(k)], limit)
        for p, prompt in enumerate(held_out)
    ]
    temperature = config.rollout.temperature if config.eval.temperature is None else config.eval.temperature
    rollouts = grade_groups(held_out, generator.generate(requests, temperature), decode, grade)
    correct = [[r.grade.correct for r in rollouts[i : i + k]] for i in range(0, len(rollouts), k)]
    values = {
        "eval/avg@k": avg_at_k(correct),
        "eval/pass@k": pass_at_k(correct, k),
        "eval/k": k,
        "eval/prompts": len(held_out),
        "eval/unparsed": sum(not r.grade.parsed for r in rollouts) / len(rollouts),
        "eval/length": sum(len(r.completion.token_ids) for r in rollouts) / len(rollouts),
        "time/eval": time.perf_counter() - start,
    }
    return values, [r.grade.error for r in rollouts if r.grade.error is not None]
