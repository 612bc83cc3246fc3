"""Finding and comparing answers in free text.

Problem: small slips here (a lost minus, `1,000` read as 1, text behind `#### 42`) turn right answers into reward 0, and
the run learns from noise. Method: one number grammar, one finder of the last marked answer, exact comparison as
`Decimal`. All scans are linear in the text, so a long rambling completion costs microseconds. Given up: numbers in
words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from jetrl.rl.types import Grade, Problem

# A sign counts only where no digit, letter or closing bracket stands before it: "7-2" ends in 2, "= -2" in -2.
_SIGN = r"(?:(?<![\w.)\]}])[-+])?"
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
_NUMBER = rf"(?:{_SIGN}(?:{_WHOLE}|(?<![0-9])\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
_NUMBER_ANYWHERE = re.compile(_NUMBER)
# Behind `####` a number is the answer if words or nothing follow it, but not if an expression goes on.
_NUMBER_FIRST = re.compile(rf"({_NUMBER})(?=\s*$|[.,;:!)]*(?:\s+[^\s0-9+\-*/^=\\%<>]|\s*$))")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_CHARACTERS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u00f7": "/", "\u00a0": " "})


@dataclass(frozen=True, slots=True)
class Marked:
    """An answer that the text marks as such: what stands behind `####`, or in a box."""

    text: str
    position: int
    boxed: bool


def to_number(text: str) -> Decimal | None:
    """The value if `text` is one plain number, perhaps with `$`, a final period or thousands commas, else None."""
    text = tidy(text)
    return _decimal(text) if _NUMBER_ANYWHERE.fullmatch(text) else None


def last_number(text: str) -> Decimal | None:
    """The last number in a text, with its sign, or None."""
    plain = re.sub(r"-\s?\\?\$\s?(?=[0-9.])", "-", text.translate(_CHARACTERS))  # -$5
    numbers = _NUMBER_ANYWHERE.findall(plain)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:  # an exponent of 20 digits
        return None


def tidy(text: str) -> str:
    """Take off what decorates an answer: `$`, `**`, a final period, `\\text{}` around the whole, LaTeX thin spaces."""
    text = text.translate(_CHARACTERS).replace("{,}", ",").replace("\\!", "").replace("\\,", "").replace("\\$", "")
    text = text.strip().strip("*$ \t\n").rstrip(".").strip("*$ \t\n")
    whole = re.fullmatch(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}", text)
    text = whole.group(1).strip() if whole else text
    text = re.sub(r"^([-+])\s*\$?\s*(?=[0-9.])", r"\1", text)
    # A plain mixed number, 3 1/2, which math-verify would read as 2.
    return re.sub(r"^([-+]?[0-9]+)\s+([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}", text)


def last_boxed(text: str) -> Marked | None:
    """The last balanced, non-empty `\\boxed{...}`; of nested boxes the innermost content. None where there is none."""
    opened: list[tuple[bool, int]] = []
    found: Marked | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.endswith("{") and token != "\\{":
            opened.append((len(token) > 1, match.end()))
        elif token == "}" and opened:
            is_box, start = opened.pop()
            content = text[start : match.start()] if is_box else ""
            if content.strip():
                found = Marked(content.strip(), start, True)
    if found is None:
        return None
    inner = last_boxed(found.text) if "boxed" in found.text or "fbox" in found.text else None
    return found if inner is None else Marked(inner.text, found.position, True)


def last_hashes(text: str) -> Marked | None:
    """What stands behind the last `####` on its line; of a number followed by words, the number."""
    position = text.rfind("####")
    if position < 0:
        return None
    lines = text[position:].lstrip("#").lstrip().splitlines()
    line = tidy(lines[0]) if lines else ""
    number = _NUMBER_FIRST.match(line)
    content = number.group(1) if number else line
    return Marked(content, position, False) if content else None


def last_marked(text: str) -> Marked | None:
    """The later one of the last `#### answer` and the last balanced box, or None."""
    marks = [mark for mark in (last_hashes(text), last_boxed(text)) if mark is not None]
    return max(marks, key=lambda mark: mark.position) if marks else None


def grade_last_number(problem: Problem, completion: str) -> Grade:
    """Right if the last number of the completion equals the problem's answer, an integer; no number: not parsed."""
    number = last_number(completion)
    correct = number is not None and number == Decimal(problem.answer)
    return Grade(float(correct), correct, parsed=number is not None)
