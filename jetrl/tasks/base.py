"""What a task is: problems, a wording, and a judge.

Problem: each task must agree on the same things (which problems train and which are held out, how a prompt reads with
and without worked examples, where a base model's answer ends), or two tasks drift apart in details that change the
reward. Method: a task is data. `Task` holds two lists of problems that share no question, a `Wording` for raw text and
chat, and one `judge` function that grades a batch. Everything random comes from `random.Random` seeded by a string, so
that a problem list is the same on any machine. Given up: problems are kept in memory (10,000 generated ones take about
5 MB).
"""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetrl.rl.types import Grade, Problem

Judge = Callable[[Sequence[tuple[Problem, str]]], list[Grade]]
HELD_OUT_SIZE = 512  # default number of held-out problems, where no file of them is given


@dataclass(frozen=True, slots=True)
class Wording:
    """How a question reads. In raw text a worked example is `raw + solution + ending`, and the prompt ends after `raw`.

    `raw` and `chat` hold the word {question}. `stop` is the text with which a further, made-up example would begin.
    """

    raw: str = "{question}"
    chat: str = "{question}"
    lead: str = ""  # between raw question and solution in a worked example, e.g. a space
    ending: str = "\n"
    stop: str = "\n"


@dataclass(frozen=True)
class Task:
    """Problems and their grading.

    With raw template and worked examples, a model goes on with examples of its own after its answer; grading sees the
    text before `wording.stop` only (for the one-line tasks: up to the first newline). Otherwise it sees the whole
    completion.
    """

    name: str
    train: Sequence[Problem]
    held_out: Sequence[Problem]  # shares no question with `train` or `examples`
    judge: Judge
    wording: Wording = field(default_factory=Wording)
    template: str = "raw"
    examples: Sequence[Problem] = ()  # worked examples, in no other list
    dropped: dict[str, int] = field(default_factory=dict)  # rows of the data left out at load, by reason
    close: Callable[[], None] = lambda: None  # ends worker processes; may be called twice

    def prompt_text(self, problem: Problem) -> str | list[dict[str, str]]:
        """The raw prompt, or the chat messages, with worked examples before the question."""
        if self.template == "raw":
            parts = [self._raw(p) + self.wording.lead + _solution(p) + self.wording.ending for p in self.examples]
            return "".join(parts) + self._raw(problem)
        messages: list[dict[str, str]] = []
        for example in self.examples:
            messages.append({"role": "user", "content": self._chat(example)})
            messages.append({"role": "assistant", "content": _solution(example)})
        return [*messages, {"role": "user", "content": self._chat(problem)}]

    def grade(self, problem: Problem, completion: str) -> Grade:
        """The verdict on one completion (its text without EOS)."""
        return self.grade_all([(problem, completion)])[0]

    def grade_all(self, pairs: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """Verdicts in the order of `pairs`. Never raises for what a completion or a user's reward does."""
        if self.template == "raw" and self.examples:
            pairs = [(problem, text.split(self.wording.stop, 1)[0]) for problem, text in pairs]
        grades = self.judge(pairs)
        assert len(grades) == len(pairs), f"task {self.name}: {len(grades)} grades for {len(pairs)} completions"
        return grades

    def _raw(self, problem: Problem) -> str:
        return self.wording.raw.replace("{question}", problem.question)

    def _chat(self, problem: Problem) -> str:
        return self.wording.chat.replace("{question}", problem.question)


def _solution(problem: Problem) -> str:
    return str(problem.metadata.get("solution", problem.answer))


def judge_each(grade: Callable[[Problem, str], Grade]) -> Judge:
    """A judge from a function that grades one completion."""
    return lambda pairs: [grade(problem, text) for problem, text in pairs]


def make_problem(task: str, question: str, answer: str, metadata: dict[str, Any] | None = None) -> Problem:
    """A problem whose id depends on the task's name and the question alone."""
    return Problem(f"{task}:{digest(question)[:12]}", question, answer, metadata or {})


def same_question(question: str) -> str:
    """The form in which two questions are compared: white space does not count."""
    return " ".join(question.split())


def digest(text: str) -> str:
    """A stable hash of a question, in hexadecimal."""
    return hashlib.sha256(same_question(text).encode("utf-8", "surrogatepass")).hexdigest()


def read_options(task: str, given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`defaults` with `given` over them. Raises ValueError for an unknown key and for a value of another type."""
    for key, value in given.items():
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, n=1, cutoff=0.0)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"task {task}: unknown option {key!r}; {hint}Options: {', '.join(defaults) or 'none'}")
        default = defaults[key]
        wanted = (int, float) if isinstance(default, float) else type(default)
        if default is not None and (not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool)):
            raise ValueError(
                f"task {task}: option {key} is {value!r}; like the default {default!r}, a {type(default).__name__} is wanted"
            )
    return {**defaults, **given}


def interval(task: str, key: str, value: list[Any], low: int, high: int) -> tuple[int, int]:
    """Check an option [min, max] of integers within low..high. Raises ValueError."""
    whole = len(value) == 2 and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if not whole or not low <= value[0] <= value[1] <= high:
        raise ValueError(f"task {task}: option {key} is {value!r}; [min, max] with {low} <= min <= max <= {high} is wanted")
    return value[0], value[1]


def at_least(task: str, options: dict[str, Any], **limits: int) -> None:
    """Check integer options against lower limits. Raises ValueError."""
    for key, low in limits.items():
        if options[key] < low:
            raise ValueError(f"task {task}: option {key} is {options[key]}; {low} or more is wanted")


def generate(
    task: str, draw: Callable[[random.Random], Problem], shots: int, held_out: int, train: int, seed: int
) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Worked examples, held-out and training problems, no question twice in any of them.

    Examples and held-out problems are the same for each seed and each `train`, so that runs can be compared; the
    training problems follow the seed. In a small space (there are 100 one-digit sums) a fifth is held out at most, and
    fewer than `train` problems come back. Raises ValueError when nothing is left to train on.
    """
    pool = _distinct(draw, random.Random(f"{task}/held-out"), shots + 5 * held_out, set())
    examples, rest = pool[:shots], pool[shots:]
    held = rest[: min(held_out, len(rest) // 5)]
    taken = {same_question(p.question) for p in examples + held}
    problems = _distinct(draw, random.Random(f"{task}/train/{seed}"), train, taken)
    if len(examples) < shots or not problems:
        raise ValueError(
            f"task {task}: its options allow {len(pool)} questions, too few for {shots} worked examples and "
            "something to train on. Widen the options or lower task.shots."
        )
    return examples, held, problems


def _distinct(draw: Callable[[random.Random], Problem], rng: random.Random, count: int, taken: set[str]) -> list[Problem]:
    problems: list[Problem] = []
    seen, misses = set(taken), 0
    while len(problems) < count and misses < 1000:  # 1000 draws in a row without a new question: the space is used up
        problem = draw(rng)
        key = same_question(problem.question)
        misses = misses + 1 if key in seen else 0
        if not misses:
            seen.add(key)
            problems.append(problem)
    return problems
