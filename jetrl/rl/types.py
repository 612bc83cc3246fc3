"""What crosses the borders between tasks, engine, algorithm and trainer.

One step of a run, with two prompts and `group_size` 2:

    Prompt 0 ──► Completion 0.0, 0.1 ──► Grade, Grade ──► Rollout, Rollout   (a rollout group: one prompt's rollouts)
    Prompt 1 ──► Completion 1.0, 1.1 ──► Grade, Grade ──► Rollout, Rollout

Token ids are the engine's own, never decoded and encoded again. `logprobs[i]` belongs to `token_ids[i]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


class MismatchError(RuntimeError):
    """Rollout and trainer differ in an exact flow."""


@dataclass(slots=True, frozen=True)
class Problem:
    """One question of a task, as text. `answer` and `metadata` serve its grading; the model never sees them."""

    id: str  # stable: the same problem has the same id in every run
    question: str
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Prompt:
    """A problem ready for the engine."""

    problem: Problem
    text: str
    token_ids: list[int]


@dataclass(slots=True, frozen=True)
class Request:
    """What the engine is asked: one completion of the prompt for each seed.

    `forced`, if given, are tokens to take instead of sampled ones, one list for each seed: the engine then scores them.
    """

    prompt: list[int]
    seeds: list[int]
    max_tokens: int
    forced: list[list[int]] | None = None


@dataclass(slots=True, frozen=True)
class Completion:
    """What the engine made of a prompt."""

    token_ids: list[int]  # n sampled tokens; the EOS token is included when the reason is "stop"; 0 or more after an "abort"
    logprobs: list[float]  # n values, each exactly a float32: log-softmax(logits / temperature) of the sampled token
    finish_reason: FinishReason
    policy_version: int  # number of publishes before the first token was sampled


@dataclass(slots=True, frozen=True)
class Grade:
    """The verdict on one completion. An answer that cannot be parsed is wrong, and `parsed` says so."""

    reward: float
    correct: bool
    parsed: bool = True
    error: str | None = None  # why grading itself failed (timeout, exception, bad value); the reward is then 0


@dataclass(slots=True)
class Rollout:
    """Prompt, completion and verdict: the unit of training."""

    prompt: Prompt
    completion: Completion
    text: str  # the completion, decoded once for grading and for the reader
    grade: Grade
    group: int  # index of the rollout group within the step
    advantage: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt.token_ids) + len(self.completion.token_ids)
