"""Rewards that others wrote: a user's function in a Python file, and the reasoning-gym library.

Problem: such code may raise, return None, NaN, a list or a text, and one bad value in hour five must not end a run or
become a NaN in the loss. Method: one guarded call turns whatever happens into a finite number or an error text; errors
are grades with reward 0 that the run counts and logs. What can be checked at load is: file, function, arguments, data.
Given up: the code runs in our process, so a reward that never returns hangs the run.
"""

from __future__ import annotations

import importlib.util
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jetrl.config import TaskConfig
from jetrl.rl.types import Grade, Problem
from jetrl.tasks.answers import last_boxed
from jetrl.tasks.base import HELD_OUT_SIZE, Task, Wording, at_least, generate, judge_each, make_problem, read_options
from jetrl.tasks.data import DATA_OPTIONS, load_problems

LARGEST = 1e30  # advantages are float32
CORRECT_AT = 1.0  # default of option correct_at: rewards from here up count as correct


def guarded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, BaseException | None]:
    """Call foreign code: (value, None) or (None, what it raised). Ctrl-C passes through."""
    try:
        return function(*args, **kwargs), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 (foreign code: anything may come)
        return None, error


def reward_grade(function: Callable[..., Any], correct_at: float, *args: Any, **kwargs: Any) -> Grade:
    """The grade from a foreign reward; reward 0 with `error` set unless it is one finite number."""
    value, error = guarded(function, *args, **kwargs)
    if error is None and hasattr(value, "__float__"):  # numbers, numpy and torch scalars; not texts, lists or None
        value, error = guarded(float, value)
    if error is not None:
        return Grade(0.0, False, error=f"the reward raised {type(error).__name__}: {str(error)[:200]}")
    if not isinstance(value, float) or not abs(value) <= LARGEST:  # not: so that NaN is caught
        return Grade(0.0, False, error=f"the reward returned {repr(value)[:80]}; a number within +-{LARGEST:g} is wanted")
    return Grade(value, value >= correct_at)


def load_user(config: TaskConfig) -> Task:
    """`path.py:function`: `function(question, completion, answer, **metadata) -> float`, problems from `config.data`.

    `metadata` are the row's other keys, except those named like the first three parameters; a function without
    `**metadata` gets only the keys that it names. Options: those of the data, and correct_at (the reward from which a
    completion counts as correct). Raises ValueError for what can be known now.
    """
    options = read_options(config.name, config.options, {**DATA_OPTIONS, "correct_at": CORRECT_AT})
    function = _load_function(config.name)
    accepts = _accepted(config.name, function)

    def to_problem(question: str, answer: str, row: dict[str, Any]) -> Problem:
        return make_problem("user", question, answer, {k: v for k, v in row.items() if accepts(k)})

    examples, held_out, train, dropped = load_problems(config, options, to_problem, need_answer=False)
    for problem in (*examples, *held_out, *train):
        _check_call(config.name, function, problem)

    def grade(problem: Problem, completion: str) -> Grade:
        return reward_grade(function, options["correct_at"], problem.question, completion, problem.answer, **problem.metadata)

    wording = Wording(lead=" ", ending="\n\n", stop="\n\n")
    return Task(config.name, train, held_out, judge_each(grade), wording, config.template, examples, dropped)


def _load_function(name: str) -> Callable[..., Any]:
    file, _, function_name = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"task {name}: no file {file!r} (seen from {str(Path.cwd())!r}); path.py:function is wanted")
    spec = importlib.util.spec_from_file_location(f"jetrl_reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _, error = guarded(spec.loader.exec_module, module)
    if error is not None:
        raise ValueError(f"task {name}: importing {file} raised {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(f"task {name}: {file} has no function {function_name!r}; it has {', '.join(names) or 'none'}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"task {name}: {function_name} is async; a plain function is wanted")
    return function


def _accepted(name: str, function: Callable[..., Any]) -> Callable[[str], bool]:
    parameters = list(_signature(name, function).parameters.values())
    first = {p.name for p in parameters[:3] if p.kind is p.POSITIONAL_OR_KEYWORD}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return lambda key: key not in first
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)} - first
    return lambda key: key in named


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise ValueError(f"task {name}: the function's arguments cannot be read ({error}); use a plain function") from error


def _check_call(name: str, function: Callable[..., Any], problem: Problem) -> None:
    try:
        _signature(name, function).bind(problem.question, "", problem.answer, **problem.metadata)
    except TypeError as error:
        raise ValueError(
            f"task {name}: the function cannot be called as function(question, completion, answer, **metadata) "
            f"with the metadata {sorted(problem.metadata)} of the data: {error}"
        ) from error


def load_reasoning_gym(config: TaskConfig, seed: int) -> Task:
    """`reasoning_gym:NAME`, graded by the library. The answer is in `<answer>` tags, else in a box, else all the text.

    Options: train_size, held_out_size, correct_at; all others configure the library's generator. Raises ValueError.
    """
    own = {"train_size": 2000, "held_out_size": HELD_OUT_SIZE // 4, "correct_at": CORRECT_AT}
    options = read_options(config.name, {k: v for k, v in config.options.items() if k in own}, own)
    at_least(config.name, options, train_size=1, held_out_size=0)
    settings = {k: v for k, v in config.options.items() if k not in own}
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(f"task {config.name} needs the reasoning-gym library: pip install 'jetrl[reasoning-gym]'") from None
    name = config.name.partition(":")[2]
    scorer, error = guarded(reasoning_gym.create_dataset, name, size=1, seed=0, **settings)
    if scorer is None:
        raise ValueError(f"task {config.name}: reasoning-gym refuses {name!r} with options {settings}: {error}") from error

    def draw(rng: random.Random) -> Problem:
        entry = reasoning_gym.create_dataset(name, size=1, seed=rng.randrange(2**31), **settings)[0]
        return make_problem(config.name, entry["question"], str(entry["answer"] or ""), {"entry": entry})

    examples, held_out, train = generate(config.name, draw, config.shots, options["held_out_size"], options["train_size"], seed)

    def grade(problem: Problem, completion: str) -> Grade:
        answer = _tagged(completion)
        return reward_grade(scorer.score_answer, options["correct_at"], answer=answer, entry=problem.metadata["entry"])

    wording = Wording(
        "Question: {question}\nAnswer:",
        "{question}\nGive the final answer in <answer></answer> tags.",
        lead=" ",
        ending="\n\n",
        stop="\nQuestion:",
    )
    return Task(config.name, train, held_out, judge_each(grade), wording, config.template, examples)


def _tagged(completion: str) -> str:
    _, opened, rest = completion.rpartition("<answer>")
    if opened:
        return rest.partition("</answer>")[0].strip()
    box = last_boxed(completion)
    return box.text if box else completion.strip()
