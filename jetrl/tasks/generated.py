"""Small generated tasks with an integer answer: arithmetic, sequence, gcd, counting.

Problem: a laptop and a model of a few million parameters need tasks in which some answers of a group are right and some
are wrong. Method: one table; an entry is a wording, its options, and a function that makes the drawing of one problem
from the options. The answer of each is the LAST number in the completion. Raw arithmetic is exactly `47+38=` (no
spaces, unless asked for), and a worked example is the line `12+34=46`: the demo model is trained on that format. Given up:
no partial reward.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jetrl.config import TaskConfig
from jetrl.rl.types import Problem
from jetrl.tasks.answers import grade_last_number
from jetrl.tasks.base import (
    HELD_OUT_SIZE,
    Task,
    Wording,
    at_least,
    generate,
    interval,
    judge_each,
    make_problem,
    read_options,
)

Draw = Callable[[random.Random], tuple[str, int]]  # question, answer
SIZES = {"train_size": 10_000, "held_out_size": HELD_OUT_SIZE}


@dataclass(frozen=True, slots=True)
class Generator:
    """One row of the table."""

    wording: Wording
    options: dict[str, Any]
    drawing: Callable[[dict[str, Any]], Draw]  # checks the options; raises ValueError


def load_generated(config: TaskConfig, seed: int) -> Task:
    """The task `config.name` of the table, with options train_size, held_out_size and its own. Raises ValueError."""
    generator = GENERATORS[config.name]
    options = read_options(config.name, config.options, {**generator.options, **SIZES})
    at_least(config.name, options, train_size=1, held_out_size=0)
    question_and_answer = generator.drawing(options)

    def draw(rng: random.Random) -> Problem:
        question, answer = question_and_answer(rng)
        return make_problem(config.name, question, str(answer))

    examples, held_out, train = generate(config.name, draw, config.shots, options["held_out_size"], options["train_size"], seed)
    judge = judge_each(grade_last_number)
    wording = replace(generator.wording, lead=" ") if options.get("spaces") else generator.wording
    return Task(config.name, train, held_out, judge, wording, config.template, examples)


def _arithmetic(options: dict[str, Any]) -> Draw:
    """`digits` [min, max] of each term (one digit is 0 to 9), `operators` of "+-*", `terms` in a row; * binds first.

    `spaces` writes `47 + 38 =`, as models of natural text know it.
    """
    low, high = interval("arithmetic", "digits", options["digits"], 1, 9)
    operators, terms = options["operators"], options["terms"]
    if not operators or set(operators) - set("+-*"):
        raise ValueError(f"task arithmetic: option operators is {operators!r}; one or more of + - * are wanted, as '+-'")
    at_least("arithmetic", options, terms=2)

    def draw(rng: random.Random) -> tuple[str, int]:
        numbers = [_number(rng, rng.randint(low, high)) for _ in range(terms)]
        signs = [rng.choice(operators) for _ in range(terms - 1)]
        text = str(numbers[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, numbers[1:], strict=True))
        question = re.sub(r"([-+*])", r" \1 ", text) + " =" if options["spaces"] else f"{text}="
        return question, _evaluate(numbers, signs)

    return draw


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def _evaluate(numbers: list[int], signs: list[str]) -> int:
    """A row of + - * from left to right; * binds first."""
    total, product, sign = 0, numbers[0], 1
    for operator, number in zip(signs, numbers[1:], strict=True):
        if operator == "*":
            product *= number
        else:
            total, product, sign = total + sign * product, number, 1 if operator == "+" else -1
    return total + sign * product


def _sequence(options: dict[str, Any]) -> Draw:
    """Rising arithmetic sequences: `terms` shown, the next asked; start up to `maximum`, difference up to `step`."""
    at_least("sequence", options, terms=2, maximum=0, step=1)

    def draw(rng: random.Random) -> tuple[str, int]:
        start, step = rng.randint(0, options["maximum"]), rng.randint(1, options["step"])
        row = [start + i * step for i in range(options["terms"] + 1)]
        return " ".join(map(str, row[:-1])), row[-1]

    return draw


def _gcd(options: dict[str, Any]) -> Draw:
    """Greatest common divisor of two numbers up to `maximum`; half of the pairs share a factor by construction."""
    at_least("gcd", options, maximum=4)

    def draw(rng: random.Random) -> tuple[str, int]:
        factor = rng.choice((1, rng.randint(2, options["maximum"] // 2)))
        a, b = (factor * rng.randint(1, options["maximum"] // factor) for _ in range(2))
        return f"What is the greatest common divisor of {a} and {b}?", math.gcd(a, b)

    return draw


def _counting(options: dict[str, Any]) -> Draw:
    """How often one of `letters` letters occurs in a row of `length` [min, max] letters."""
    low, high = interval("counting", "length", options["length"], 1, 100)
    at_least("counting", options, letters=2)
    alphabet = "abcdefghijklmnopqrstuvwxyz"[: options["letters"]]

    def draw(rng: random.Random) -> tuple[str, int]:
        row = rng.choices(alphabet, k=rng.randint(low, high))
        letter = rng.choice(alphabet)
        return f"How many times does the letter {letter} occur in: {' '.join(row)}?", row.count(letter)

    return draw


_ASKED = Wording(raw="Question: {question}\nAnswer:", lead=" ", ending="\n\n", stop="\n")
GENERATORS: dict[str, Generator] = {
    "arithmetic": Generator(
        Wording(raw="{question}", chat="What is {question}?"),
        {"digits": [1, 2], "operators": "+-", "terms": 2, "spaces": False},
        _arithmetic,
    ),
    "sequence": Generator(
        Wording(raw="{question} ->", lead=" ", chat="Which number comes next? {question}"),
        {"terms": 4, "maximum": 20, "step": 10},
        _sequence,
    ),
    "gcd": Generator(_ASKED, {"maximum": 50}, _gcd),
    "counting": Generator(_ASKED, {"length": [3, 8], "letters": 3}, _counting),
}
