"""Rows of data from JSONL, parquet or Hugging Face datasets, one source or a mixture, and their split.

Problem: data sets differ in format and in key names, contain rows without an answer, and repeat questions across their
splits and each other. Method: read everything into dictionaries, name file and line in each complaint, count what is dropped,
and hold out by a hash of the question, so that the split depends neither on the order of the rows nor on the seed. The
problems of a mixture are taken from its sources in turn, so that the first held-out ones are of each. Given up: streaming (a
set must fit in memory), and weights of sources: the larger one trains more.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jetrl.config import TaskConfig
from jetrl.rl.types import Problem
from jetrl.tasks.base import at_least, digest, same_question

QUESTION_KEYS = ("question", "problem", "prompt")
ANSWER_KEYS = ("answer", "final_answer", "solution")
DATA_OPTIONS: dict[str, Any] = {
    "question_key": "",
    "answer_key": "",
    "subset": "",
    "split": "train",
    "eval_split": "test",
    "held_out_size": 512,
}
Row = dict[str, Any]
ToProblem = Callable[[str, str, Row], Problem | None]


class MissingData(ValueError):
    """Data, or the library that reads them, are not on this machine; all else may be right, and a dry run goes on."""


def load_problems(
    config: TaskConfig,
    options: dict[str, Any],
    to_problem: ToProblem,
    need_answer: bool,
) -> tuple[list[Problem], list[Problem], list[Problem], dict[str, int]]:
    """Worked examples, held-out and training problems, and counts of dropped rows by reason.

    `to_problem(question, answer, other keys)` may return None for a row without a usable answer. With
    `config.eval_data` all its problems are held out (and left out of the training ones), otherwise `held_out_size`, at
    most a fifth. Raises ValueError for broken data, missing keys, and when nothing is left, of it MissingData for data
    that are not here.
    """
    at_least(config.name, options, held_out_size=0)
    if config.data is None:
        raise ValueError(f"task {config.name} needs task.data: JSONL or parquet files, or Hugging Face dataset names")
    dropped: Counter[str] = Counter()
    problems = _problems(config.data, options["split"], options, to_problem, need_answer, dropped)
    if config.eval_data is not None:
        held_out = _problems(config.eval_data, options["eval_split"], options, to_problem, need_answer, dropped)
    else:
        by_hash = sorted(problems, key=lambda p: digest(p.question))
        held_out = by_hash[: min(options["held_out_size"], len(problems) // 5)]
    taken = {same_question(p.question) for p in held_out}
    train = [p for p in problems if same_question(p.question) not in taken]
    if config.eval_data is not None and len(train) < len(problems):
        dropped["also held out"] += len(problems) - len(train)
    # Examples come from the far end of the hash order, so that more of them does not change the held-out problems.
    examples = sorted(train, key=lambda p: digest(p.question))[::-1][: config.shots]
    chosen = {p.id for p in examples}
    train = [p for p in train if p.id not in chosen]
    if not train:
        raise ValueError(
            f"task {config.name}: {config.data!r} leaves no training problem: {len(problems)} usable rows, "
            f"{len(held_out)} held out, {len(examples)} worked examples, dropped {dict(dropped)}"
        )
    return examples, held_out, train, dict(dropped)


def _problems(
    sources: str | list[str],
    split: str,
    options: dict[str, Any],
    to_problem: ToProblem,
    need_answer: bool,
    dropped: Counter[str],
) -> list[Problem]:
    """The problems of one source, or of several in turn; a question of two belongs to the first."""
    seen: set[str] = set()
    names = [sources] if isinstance(sources, str) else sources
    found = [_of_source(name, split, options, to_problem, need_answer, seen, dropped) for name in names]
    return [problem for turn in zip_longest(*found) for problem in turn if problem is not None]


def _of_source(
    source: str,
    split: str,
    options: dict[str, Any],
    to_problem: ToProblem,
    need_answer: bool,
    seen: set[str],
    dropped: Counter[str],
) -> list[Problem]:
    problems: list[Problem] = []
    left_out: Counter[str] = Counter()
    for place, row in read_rows(source, options["subset"], split):
        row = dict(row)
        question = _take(row, options["question_key"], QUESTION_KEYS, "question_key", place, needed=True)
        answer = _take(row, options["answer_key"], ANSWER_KEYS, "answer_key", place, needed=need_answer)
        if question is not None and not isinstance(question, str):
            raise ValueError(
                f"{place}: the question is a {type(question).__name__}; text is wanted. Name the key of the "
                "text in task.options.question_key"
            )
        if not question or not question.strip():
            left_out["no question"] += 1
            continue
        key = same_question(question)
        problem = None if answer is None and need_answer else to_problem(question, "" if answer is None else str(answer), row)
        if problem is None:
            left_out["no answer"] += 1
        elif key in seen:
            left_out["repeated question"] += 1
        else:
            seen.add(key)
            problems.append(problem)
    if not problems:
        raise ValueError(f"{source!r} holds no usable problem; dropped: {dict(left_out) or 'nothing, it is empty'}")
    dropped.update(left_out)
    return problems


def _take(row: Row, named: str, usual: tuple[str, ...], option: str, place: str, needed: bool) -> Any:
    for key in (named,) if named else usual:
        if key in row:
            return row.pop(key)
    if not needed and not named:
        return None
    wanted = repr(named) if named else " or ".join(map(repr, usual))
    raise ValueError(f"{place}: no key {wanted} among {sorted(row)}. Name the right one in task.options.{option}")


def read_rows(source: str, subset: str = "", split: str = "train") -> Iterator[tuple[str, Row]]:
    """(place, row) for each row of a file or Hugging Face dataset; `place` names it in messages. Raises ValueError.

    A dataset's name may bring its own subset and split: `openai/gsm8k:main@train[:500]`.
    """
    path = Path(source)
    if path.is_file():
        if path.suffix == ".parquet":
            return _parquet(path)
        if path.suffix in (".jsonl", ".json"):
            return _jsonl(path)
        raise ValueError(f"{source!r} ends in {path.suffix!r}; .jsonl or .parquet is wanted")
    like_a_path = path.is_absolute() or source.startswith(".") or source.count("/") > 1
    if like_a_path or path.suffix in (".jsonl", ".json", ".parquet"):
        raise MissingData(
            f"no data file at {source!r} (seen from {str(Path.cwd())!r}). Give the path of a .jsonl or "
            ".parquet file, or a Hugging Face dataset name such as openai/gsm8k:main"
        )
    name, _, own_split = source.partition("@")
    name, _, own_subset = name.partition(":")
    return _hugging_face(name, own_subset or subset, own_split or split)


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not a line of JSON ({error}). One object a line is wanted") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: a {type(row).__name__}; an object with keys is wanted")
            yield f"{path}:{number}", row


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingData(f"{path}: reading parquet needs pyarrow: pip install 'jetrl[data]', or give JSONL") from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row


def _hugging_face(name: str, subset: str, split: str) -> Iterator[tuple[str, Row]]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingData(
            f"there is no file {name!r}, and to load a Hugging Face dataset of that name needs the datasets "
            "library: pip install 'jetrl[data]'"
        ) from None
    try:
        rows = datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError) as error:  # no network, no such set, no right to it: OSError; no such subset: ValueError
        raise (MissingData if isinstance(error, OSError) else ValueError)(
            f"the Hugging Face dataset {name!r} (subset {subset or None!r}, split {split!r}) cannot be loaded: {error}. "
            "Subset and split are those of task.options, or stand behind the name: NAME:SUBSET@SPLIT"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{name}[{split}], row {number}", dict(row)
