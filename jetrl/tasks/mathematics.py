"""GSM8K- and MATH-style sets: word problems with a final answer that can be checked.

Problem: the same value has many spellings, and the parser that knows them all cannot be trusted to return. Method: the
marked answer (`#### 42`, else the last balanced box) is taken from the text; plain numbers are compared exactly right
here; the rest goes to `math-verify` in worker processes under a timeout. An answer that nothing can parse is wrong and
`parsed` is False; a verdict that never came is wrong with `error` set. Given up: answers that need a judge (proofs,
free text beyond equal words).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jetrl.config import TaskConfig
from jetrl.rl.types import Grade, Problem
from jetrl.tasks.answers import last_boxed, last_hashes, last_marked, last_number, tidy, to_number
from jetrl.tasks.base import Task, Wording, at_least, make_problem, read_options
from jetrl.tasks.data import DATA_OPTIONS, load_problems
from jetrl.tasks.workers import WorkerPool

OPTIONS: dict[str, Any] = {**DATA_OPTIONS, "instruction": "", "timeout": 5.0, "workers": 2}
BOX = "Reason step by step, and put the final answer in \\boxed{}."
HASHES = 'Reason step by step, and end with a line "#### " followed by the final answer.'
_LONGEST_ANSWER = 1000  # characters; a longer "answer" is running text
_Verdict = Grade | dict[str, Any]


def load_math(config: TaskConfig) -> Task:
    """Options: question_key, answer_key, subset, split, eval_split (of a Hugging Face dataset), held_out_size,
    instruction (put behind the question; chat has a default that fits the data's own mark), timeout (seconds a
    verdict), workers. Raises ValueError for bad data or options, and when `math-verify` is missing.
    """
    options = read_options(config.name, config.options, OPTIONS)
    at_least(config.name, options, workers=1)
    if options["timeout"] <= 0:
        raise ValueError(f"task {config.name}: option timeout is {options['timeout']}; seconds above 0 are wanted")
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(f"task {config.name} needs the math-verify library: pip install math-verify")
    examples, held_out, train, dropped = load_problems(config, options, _to_problem, need_answer=True)
    hashes = all("####" in problem.metadata["solution"] for problem in train)  # of a mixture not all: a box holds any answer
    default = (HASHES if hashes else BOX) if config.template == "chat" else ""
    instruction = options["instruction"] or default
    question = "{question}" + (f"\n{instruction}" if instruction else "")
    wording = Wording(f"Question: {question}\nAnswer:", question, lead=" ", ending="\n\n", stop="\nQuestion:")
    judge = MathJudge(min(options["workers"], os.cpu_count() or 1), float(options["timeout"]))
    return Task(config.name, train, held_out, judge, wording, config.template, examples, dropped, judge.pool.close)


def _to_problem(question: str, solution: str, row: dict[str, Any]) -> Problem | None:
    answer = gold_answer(solution)
    worked = row["solution"] if isinstance(row.get("solution"), str) else solution  # MATH: `answer` beside `solution`
    worked = re.sub(r"<<[^<>]*>>", "", worked)  # GSM8K's calculator marks
    return make_problem("math", question, answer, {"solution": worked}) if answer else None


def gold_answer(solution: str) -> str | None:
    """The final answer of a reference solution: behind `####`, else in the last box, else a short text whole."""
    mark = last_hashes(solution) or last_boxed(solution)
    if mark is not None:
        return tidy(mark.text)
    whole = tidy(solution)
    return whole if whole and len(whole) <= 100 and "\n" not in whole else None


class MathJudge:
    """Grades batches; what plain comparison cannot settle goes to the worker pool."""

    def __init__(self, workers: int, timeout: float) -> None:
        self.pool = WorkerPool(Path(__file__).with_name("math_worker.py"), workers, timeout)

    def __call__(self, pairs: Sequence[tuple[Problem, str]]) -> list[Grade]:
        verdicts = [compare(problem.answer, text) for problem, text in pairs]
        requests = [v for v in verdicts if isinstance(v, dict)]
        replies = iter(self.pool.map(requests)) if requests else iter(())
        return [_grade(next(replies)) if isinstance(v, dict) else v for v in verdicts]


def _grade(reply: dict[str, Any] | str) -> Grade:
    if isinstance(reply, str):
        return Grade(0.0, False, error=reply)
    return Grade(float(reply["correct"]), reply["correct"], parsed=reply["parsed"] and reply["gold_parsed"])


def compare(gold: str, completion: str) -> _Verdict:
    """A verdict where numbers or words settle it, else the request for a worker."""
    number = to_number(gold)
    mark = last_marked(completion)
    if mark is not None and not mark.boxed and number is not None and not re.search(r"[0-9]", mark.text):
        mark = last_boxed(completion)  # a heading such as "#### Conclusion" is no answer
    if mark is None and number is not None:
        return _verdict(number, last_number(completion))
    if mark is None:
        return {"gold": gold, "answer": completion[-_LONGEST_ANSWER:], "loose": True}
    answer = tidy(mark.text)
    if number is not None and to_number(answer) is not None:
        return _verdict(number, to_number(answer))
    if re.fullmatch(r"[A-Za-z]{3}[A-Za-z ]*", tidy(gold)):  # words: symbols multiplied would make anagrams equal
        return _verdict(tidy(gold).casefold(), answer.casefold() or None)
    if not answer or len(answer) > _LONGEST_ANSWER:
        return Grade(0.0, False, parsed=False)
    return {"gold": gold, "answer": answer, "loose": False}


def _verdict(gold: Any, answer: Any) -> Grade:
    correct = answer is not None and gold == answer
    return Grade(float(correct), correct, parsed=answer is not None)
