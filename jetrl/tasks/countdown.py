"""Countdown: reach a target from given numbers with + - * / and brackets.

Problem: many expressions are right, so an answer has to be evaluated, and it comes from a model. Method: the last
candidate in the completion is parsed to a syntax tree, of which only integer constants, brackets and the four operators
are walked, in exact fractions; nothing is ever executed. Given up: unary signs, decimals and powers are refused.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from fractions import Fraction
from typing import Any

from jetrl.config import TaskConfig
from jetrl.rl.types import Grade, Problem
from jetrl.tasks.answers import last_boxed, tidy
from jetrl.tasks.base import Task, Wording, at_least, generate, interval, judge_each, make_problem, read_options
from jetrl.tasks.generated import SIZES

OPTIONS: dict[str, Any] = {"numbers": [3, 4], "maximum": 25, "target_maximum": 100, "use_all": True, **SIZES}
_EXPRESSION = re.compile(r"[0-9(][0-9+\-*/() \t]*")
_MAX_CHARACTERS = 200  # bounds depth and size of the tree; 6 numbers need about 40
_NAME = "countdown"


def load_countdown(config: TaskConfig, seed: int) -> Task:
    """Options: `numbers` [min, max] given, each 1 to `maximum`; integer target 1 to `target_maximum`; `use_all`: each
    number must be used exactly once, otherwise at most once; train_size, held_out_size. Each problem has a solution.
    Raises ValueError.
    """
    options = read_options(_NAME, config.options, OPTIONS)
    at_least(_NAME, options, train_size=1, held_out_size=0, maximum=2, target_maximum=2)
    low, high = interval(_NAME, "numbers", options["numbers"], 2, 6)

    def draw(rng: random.Random) -> Problem:
        while True:
            numbers = [rng.randint(1, options["maximum"]) for _ in range(rng.randint(low, high))]
            expression, value = _combine(rng, numbers)
            if value.denominator == 1 and 1 <= value <= options["target_maximum"]:
                question = f"numbers {' '.join(map(str, numbers))}, target {value}"
                metadata = {"numbers": numbers, "target": int(value), "use_all": options["use_all"]}
                return make_problem(_NAME, question, expression, metadata)

    examples, held_out, train = generate(_NAME, draw, config.shots, options["held_out_size"], options["train_size"], seed)
    once = "exactly once" if options["use_all"] else "at most once"
    wording = Wording(
        raw="{question}:",
        lead=" ",
        chat=f"Write an arithmetic expression that equals the target. Use +, -, *, / and brackets, and each number "
        f"{once}. End with the expression alone on the last line.\n{{question}}",
    )
    return Task(_NAME, train, held_out, judge_each(grade_countdown), wording, config.template, examples)


def _combine(rng: random.Random, numbers: list[int]) -> tuple[str, Fraction]:
    parts = [(str(n), Fraction(n)) for n in numbers]
    while len(parts) > 1:
        (left, a), (right, b) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        operator = rng.choice("+-*/" if b else "+-*")
        parts.append((f"({left}{operator}{right})", _apply(operator, a, b)))
    expression, value = parts[0]
    return expression[1:-1], value


def _apply(operator: str, a: Fraction, b: Fraction) -> Fraction:
    if operator in "+-":
        return a + b if operator == "+" else a - b
    return a * b if operator == "*" else a / b


def grade_countdown(problem: Problem, completion: str) -> Grade:
    """Reward 1 for an expression of the allowed numbers that equals the target, else 0; no expression: not parsed."""
    read = read_expression(candidate(completion))
    if read is None:
        return Grade(0.0, False, parsed=False)
    value, used = read
    given = Counter(problem.metadata["numbers"])
    allowed = used == given if problem.metadata["use_all"] else used <= given
    correct = allowed and value == problem.metadata["target"]
    return Grade(float(correct), correct)


def candidate(completion: str) -> str:
    """The expression that a completion ends with: in `<answer>` tags, in a box, or the last with an operator."""
    tags = re.findall(r"<answer>([^<]*)</answer>", completion)
    boxed = last_boxed(completion)
    if tags or boxed:
        text = tags[-1] if tags else boxed.text if boxed else ""
        text = tidy(text).replace("\\times", "*").replace("\\div", "/").replace("\\cdot", "*")
        return text.split("=")[0].strip()
    found = [m.group().rstrip("+-*/( \t") for m in _EXPRESSION.finditer(tidy(completion))]
    with_operator = [text for text in found if re.search(r"[0-9) \t][+\-*/]", text)]
    return (with_operator or found or [""])[-1]


def read_expression(text: str) -> tuple[Fraction | None, Counter[int]] | None:
    """Value and numbers of an expression of + - * / and brackets over integers.

    None if it is no such expression; a value of None for a division by zero.
    """
    if len(text) > _MAX_CHARACTERS or not re.fullmatch(r"[0-9+\-*/() \t]+", text):
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    used: Counter[int] = Counter()
    try:
        return _walk(tree, used), used
    except ZeroDivisionError:
        return None, used
    except _NotAllowed:
        return None


class _NotAllowed(ValueError):
    """A part of the tree that is not + - * / over integers."""


_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def _walk(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _walk(node.left, used), _walk(node.right, used)
        return _apply(_OPERATORS[type(node.op)], left, right)
    raise _NotAllowed
