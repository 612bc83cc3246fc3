"""The algorithm, with fakes for rollout, training and files: what happens, in which order, and what stops it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl.config import RunConfig, parse_config
from jetrl.loop import SAMPLED_GROUPS, Job, MismatchError, train
from jetrl.rl.loss import LossStats
from jetrl.rl.metrics import Mismatch
from jetrl.rl.types import Completion, Grade, Problem, Prompt, Request, Rollout

HELD_OUT = "held-out"


@dataclass
class World:
    """Generator, Learner and Monitor in one; `log` is what was called, in order."""

    config: RunConfig
    exact: bool = True
    mismatch_at: int = -1  # accumulate call (from 0) that sees a differing bit
    skip_at: int = -1  # apply call that skips
    stop_after: int = 10**9  # step
    rewards: Callable[[int], float] = lambda n: float(n % 2)
    grade_error: Callable[[int], str | None] = lambda n: None
    policy_version: int = 0
    log: list[Any] = field(default_factory=list)
    seeds: list[tuple[bool, int]] = field(default_factory=list)  # evaluation?, seed
    batches: list[list[Rollout]] = field(default_factory=list)
    olds: list[Any] = field(default_factory=list)
    train_rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    eval_rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: list[tuple[int, str, str]] = field(default_factory=list)
    sampled: list[Rollout] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    graded: int = 0
    applied: int = 0
    step: int = 0

    def job(self, start: int = 0) -> Job:
        return Job(
            config=self.config, exact=self.exact, prompts=self.prompts, held_out=[_prompt(HELD_OUT), _prompt(HELD_OUT)],
            grade=self.grade, decode=lambda ids: " ".join(map(str, ids)), generator=self, learner=self,
            monitor=SimpleNamespace(train=self._train, evaluation=self._evaluation, event=self._event,
                                    samples=lambda step, rows: self.sampled.extend(rows), phase=lambda name: None),
            save=lambda step: self.log.append(("save", step)), diagnose=lambda r, t: f"token {t} of group {r.group}",
            memory=self, stopping=lambda: self.step >= self.stop_after, start=start,
        )  # fmt: skip

    def measure(self, phase: str) -> None:
        self.log.append(f"measure {phase}")

    def metrics(self) -> dict[str, float]:
        return {"throughput/decode": 12.5, "memory/peak_gb": 1.5}

    def prompts(self, step: int) -> list[Prompt]:
        self.step = step
        return [_prompt(f"{step}.{i}") for i in range(self.config.rollout.prompts_per_step)]

    def generate(self, requests: Sequence[Request], temperature: float, progress: Any = None) -> list[list[Completion]]:
        held_out = requests[0].prompt == [len(HELD_OUT)]
        self.log.append("generate eval" if held_out else f"generate at version {self.policy_version}")
        self.seeds += [(held_out, seed) for request in requests for seed in request.seeds]
        self.temperatures.append(temperature)
        assert all(r.max_tokens == self.config.rollout.max_completion_tokens for r in requests)
        return [[Completion([5, 6, 7], [-1.0] * 3, "stop", self.policy_version) for _ in r.seeds] for r in requests]

    def published(self, policy_version: int) -> None:
        self.log.append(f"published {policy_version}")

    def sleep(self) -> None:
        self.log.append("sleep")

    def grade(self, pairs: list[tuple[Problem, str]]) -> list[Grade]:
        assert all(text == "5 6 7" for _, text in pairs)
        if not pairs[0][0].id.startswith(HELD_OUT):
            self.log.append("grade")
        values = [(self.rewards(n), self.grade_error(n)) for n in range(self.graded, self.graded + len(pairs))]
        self.graded += len(pairs)
        return [Grade(0.0 if error else reward, reward > 0.5, error=error) for reward, error in values]

    def old_logprobs(self, rollouts: Sequence[Rollout]) -> list[Any]:
        self.log.append("old_logprobs")
        return [f"old {id(r)}" for r in rollouts]

    def accumulate(self, rollouts: Sequence[Rollout], old_logprobs: Sequence[Any] | None = None) -> Any:
        broken = len(self.batches) == self.mismatch_at
        self.log.append(f"accumulate {len(rollouts)}")
        self.batches.append(list(rollouts))
        self.olds.append(old_logprobs)
        seen = Mismatch(0.5, 0.5, 0.1, 1, 12, 4) if broken else Mismatch(tokens=12)
        return SimpleNamespace(loss=LossStats(loss=0.25, tokens=12), mismatch=seen, entropy=2.0, tokens=40, flops=1e12,
                               first_difference=(1, 2) if broken else None)  # fmt: skip

    def apply(self) -> dict[str, float]:
        skipped = self.applied == self.skip_at
        self.applied += 1
        self.policy_version += 1
        self.log.append("apply")
        return {"grad_norm": math.nan if skipped else 1.0, "lr": 0.1, "optimizer/skipped": float(skipped)}

    def discard(self) -> None:
        self.log.append("discard")

    def _train(self, step: int, values: dict[str, Any]) -> None:
        self.log.append(f"row {step}")
        self.train_rows[step] = values

    def _evaluation(self, step: int, values: dict[str, Any]) -> None:
        self.log.append(f"eval {step}")
        assert step not in self.eval_rows
        self.eval_rows[step] = values

    def _event(self, step: int, event: str, detail: str = "") -> None:
        self.events.append((step, event, detail))


def _prompt(name: str) -> Prompt:
    return Prompt(Problem(name, name), name, [len(name)])


def world(steps: int = 2, updates: int = 1, *, flow: str = "fp8", tree: dict[str, Any] | None = None, **settings: Any) -> World:
    config = parse_config(
        {
            "steps": steps,
            "flow": flow,
            "rollout": {"prompts_per_step": 4, "group_size": 2, "max_completion_tokens": 9, "temperature": 0.7},
            "algorithm": {"updates_per_step": updates},
            **(tree or {}),
        }
    )
    return World(config, exact=flow != "fp8_rollout", **settings)


def test_the_order_of_a_run() -> None:
    w = world()
    assert train(w.job()) == 2
    assert w.log == [
        "generate eval", "eval 0",
        "generate at version 0", "grade", "measure rollout", "sleep", "accumulate 8", "apply", "published 1",
        "measure training", "row 1",
        "generate at version 1", "grade", "measure rollout", "sleep", "accumulate 8", "apply", "published 2",
        "measure training", "row 2",
        "generate eval", "eval 2", ("save", 2),
    ]  # fmt: skip
    assert w.events == []
    assert w.olds == [None, None]


def test_what_a_row_says() -> None:
    w = world()
    train(w.job())
    row = w.train_rows[1]
    expected = {"logprob_diff/max": 0.0, "token_diff/tokens": 12.0, "loss/total": 0.25, "entropy": 2.0, "grad_norm": 1.0,
                "policy_version": 1, "optimizer/skipped": 0, "reward/mean": 0.5, "memory/peak_gb": 1.5,
                "throughput/decode": 12.5}  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert {"time/rollout", "time/grade", "time/train", "time/publish", "time/step"} <= row.keys()
    assert "time/old_logprobs" not in row
    assert row["time/step"] == pytest.approx(sum(v for k, v in row.items() if k.startswith("time/") and k != "time/step"))
    assert row["throughput/rollout"] > 0 and row["throughput/train"] > 0
    assert row["throughput/train_tflops"] == pytest.approx(row["throughput/train"] / 40)  # 40 tokens cost 1e12 operations
    assert all(isinstance(v, int | float) for v in row.values())


def test_seeds_differ_across_steps_prompts_and_samples_and_evaluations_repeat_them() -> None:
    w = world(5, tree={"eval": {"every": 2, "samples": 3}})
    train(w.job())
    trained = [seed for held_out, seed in w.seeds if not held_out]
    assert len(trained) == len(set(trained)) == 5 * 4 * 2
    evals = [seed for held_out, seed in w.seeds if held_out]
    assert len(evals) == 4 * 6 and len(set(evals)) == 6 and evals[:6] == evals[-6:]
    assert not set(evals) & set(trained)
    other = world(1, tree={"seed": 1})
    train(other.job())
    assert not {seed for _, seed in other.seeds} & {seed for _, seed in w.seeds}


def test_a_resumed_run_draws_what_the_unbroken_one_would() -> None:
    whole, rest = world(4), world(4)
    train(whole.job())
    train(rest.job(start=2))
    assert "eval 0" not in rest.log and list(rest.train_rows) == [3, 4]
    trained = [seed for held_out, seed in whole.seeds if not held_out]
    assert [seed for held_out, seed in rest.seeds if not held_out] == trained[2 * 8 :]


def test_advantages_are_of_the_own_group() -> None:
    w = world(1, rewards=lambda n: [1.0, 0.0, 0.2, 0.4, 1.0, 1.0, 0.0, 0.0][n % 8])
    w.config.eval.prompts = 0
    job = w.job()
    job.held_out = []
    train(job)
    (batch,) = w.batches
    assert [r.group for r in batch] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [r.advantage for r in batch] == pytest.approx([1, -1, -1, 1, 0, 0, 0, 0])
    assert not w.eval_rows
    plain = world(1, rewards=lambda n: [0.2, 0.4][n % 2], tree={"algorithm": {"advantage": "dr_grpo"}})
    train(plain.job())
    assert [r.advantage for r in plain.batches[0][:2]] == pytest.approx([-0.1, 0.1])


def test_updates_split_the_batch_in_whole_groups() -> None:
    w = world(1, updates=2)
    train(w.job())
    assert [[r.group for r in batch] for batch in w.batches] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    middle = w.log[w.log.index("accumulate 4") : w.log.index("row 1")]
    assert middle == ["accumulate 4", "apply", "published 1", "accumulate 4", "apply", "published 2", "measure training"]
    row = w.train_rows[1]
    assert (row["loss/total"], row["entropy"], row["token_diff/tokens"], row["policy_version"]) == (0.5, 2.0, 24.0, 2)


def test_an_inexact_flow_recomputes_the_old_logprobs_once_a_step() -> None:
    w = world(1, updates=2, flow="fp8_rollout", mismatch_at=0)
    train(w.job())
    assert w.log.count("old_logprobs") == 1
    assert w.log.index("old_logprobs") < w.log.index("accumulate 4")
    assert [old for batch in w.olds for old in batch] == [f"old {id(r)}" for batch in w.batches for r in batch]
    assert w.train_rows[1]["logprob_diff/max"] == 0.5  # measured, and no reason to stop
    assert w.events == [] and "time/old_logprobs" in w.train_rows[1]


def test_a_mismatch_stops_an_exact_run_before_the_weights_change() -> None:
    w = world(5, mismatch_at=2, tree={"save_every": 100})
    with pytest.raises(MismatchError, match=r"step 3.*token 2 of group 0.*on_mismatch=continue"):
        train(w.job())
    assert w.log[-4:] == ["accumulate 8", "discard", "row 3", ("save", 2)]  # what two steps have made is not lost
    assert w.policy_version == 2 and list(w.train_rows) == [1, 2, 3]
    assert (w.train_rows[3]["logprob_diff/max"], w.train_rows[3]["token_diff/tokens"]) == (0.5, 12.0)
    ((step, event, detail),) = w.events
    assert (step, event) == (3, "mismatch in an exact flow")
    assert "1 of 12 tokens differ" in detail and "0.5" in detail and "token 2 of group 0" in detail


def test_a_mismatch_in_the_first_step_saves_nothing() -> None:
    for start in (0, 3):
        w = world(5, mismatch_at=0)
        with pytest.raises(MismatchError):
            train(w.job(start))
        assert w.log[-2:] == ["discard", f"row {start + 1}"]


def test_on_mismatch_continue_says_so_and_goes_on() -> None:
    w = world(3, mismatch_at=1, tree={"on_mismatch": "continue"})
    assert train(w.job()) == 3
    assert [e[:2] for e in w.events] == [(2, "mismatch in an exact flow")]
    assert w.train_rows[2]["logprob_diff/max"] == 0.5 and w.train_rows[3]["logprob_diff/max"] == 0.0
    assert "discard" not in w.log


def test_a_skipped_step_is_counted_and_said() -> None:
    w = world(2, updates=2, skip_at=0)
    train(w.job())
    assert w.events == [(1, "optimizer step skipped", "gradient norm nan")]
    assert [row["optimizer/skipped"] for row in w.train_rows.values()] == [1, 0]


def test_failed_grading_is_counted_and_said() -> None:
    w = world(1, grade_error=lambda n: "no verdict" if n in (1, 4, 5) else None)
    train(w.job())
    events = [(step, event, detail) for step, event, detail in w.events if "failed" in event]
    assert events == [
        (0, "grading failed", "1 held-out completions, counted wrong: no verdict"),
        (1, "grading failed", "2 of 8 completions, reward 0: no verdict"),
    ]
    assert [r.grade.reward for r in w.batches[0]][2:4] == [0.0, 0.0]


def test_stopping_saves_after_the_step_and_leaves_out_the_last_evaluation() -> None:
    w = world(9, stop_after=3)
    assert train(w.job()) == 3
    assert w.log[-2:] == ["row 3", ("save", 3)]
    assert list(w.eval_rows) == [0]
    last = world(3, stop_after=3)
    assert train(last.job()) == 3
    assert list(last.eval_rows) == [0, 3]


@pytest.mark.parametrize(("every", "evals", "saves"), [(0, [0, 5], [5]), (2, [0, 2, 4, 5], [2, 4, 5]), (5, [0, 5], [5])])
def test_cadence_of_evaluations_and_checkpoints(every: int, evals: list[int], saves: list[int]) -> None:
    w = world(5, tree={"eval": {"every": every}, "save_every": every})
    train(w.job())
    assert list(w.eval_rows) == evals
    assert [step for kind, step in (e for e in w.log if isinstance(e, tuple)) if kind == "save"] == saves
    for step in saves:  # what belongs to a step is written before its checkpoint
        saved = w.log.index(("save", step))
        assert w.log.index(f"row {step}") < saved
        assert step not in evals or w.log.index(f"eval {step}") < saved


def test_evaluation_settings() -> None:
    w = world(1, rewards=lambda n: float(n == 0), tree={"eval": {"samples": 2, "temperature": 0.0}})
    train(w.job())
    assert w.temperatures == [0.0, 0.7, 0.0]
    before = w.eval_rows[0]
    assert (before["eval/avg@k"], before["eval/pass@k"], before["eval/k"], before["eval/prompts"]) == (0.25, 0.5, 2, 2)
    same = world(1)
    train(same.job())
    assert same.temperatures == [0.7, 0.7, 0.7]


def test_samples_are_of_a_few_groups() -> None:
    w = world(1, tree={"rollout": {"prompts_per_step": 6, "group_size": 2, "max_completion_tokens": 9}})
    train(w.job())
    assert [r.group for r in w.sampled] == [g for g in range(SAMPLED_GROUPS) for _ in range(2)]


def test_nothing_is_left_to_do() -> None:
    w = world(3)
    assert train(w.job(start=3)) == 3
    assert w.log == []
