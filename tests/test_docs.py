"""README, docs and configs say what is: their commands, keys, paths, links and settings exist.

`python -m tests.test_docs` writes the table of keys in docs/configuration.md anew.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import typer
from pydantic import BaseModel

from jetrl.config import RunConfig, known_keys, load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
RECIPES = sorted((ROOT / "configs/paper").glob("*.yaml"))  # see test_recipes.py
TABLE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- keys: python -m tests.test_docs -->", "<!-- end of keys -->"


def field_of(key: str) -> Any:
    model: type[BaseModel] = RunConfig
    *sections, leaf = key.split(".")
    for section in sections:
        model = model.model_fields[section].annotation  # pyright: ignore[reportAssignmentType]
    return model.model_fields[leaf]


def texts_of(annotation: Any) -> list[str]:
    return [t for a in get_args(annotation) for t in ([a] if isinstance(a, str) else texts_of(a))]


def values_of(field: Any) -> str:
    """What a key may hold: the texts of a choice, or a type with its limits."""
    annotation = field.annotation
    if texts := texts_of(annotation):
        return ("list of " if "list" in str(annotation) else "") + ", ".join(f"`{t}`" for t in texts)
    kinds = [t for t in get_args(annotation) if t is not type(None)] if "None" in str(annotation) else [annotation]
    names = {int: "integer", float: "number", str: "text", bool: "true or false", list[str]: "list of texts"}
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [f"{sign} {getattr(m, name):g}" for m in field.metadata for name, sign in signs.items() if hasattr(m, name)]
    return ", ".join([" or ".join(names.get(kind, "mapping") for kind in kinds), *limits])


def default_of(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    return "none" if value is None else f"`{json.dumps(value)}`" if value in ([], {}) else f"`{value}`"


def key_table() -> str:
    lines = ["| key | default | values | meaning |", "|---|---|---|---|"]
    for key in known_keys():
        field = field_of(key)
        meaning = field.description.replace("|", "\\|")
        lines.append(f"| `{key}` | {default_of(field)} | {values_of(field)} | {meaning} |")
    return "\n".join(lines)


def test_key_table_is_current() -> None:
    text = TABLE.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == key_table(), "run: python -m tests.test_docs"


# Pages


def code(page: Path) -> list[str]:
    """The code of a page: fenced and indented blocks by line, and inline code."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (\S.*)", prose, re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()] + indented + re.findall(r"`([^`\n]+)`", prose)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {target} has no such heading"


# Files and folders that a run or a reader makes, and no checkout holds; path.py stands for a reader's file.
MADE = re.compile(
    r"(runs|data|models|RUN|checkpoints|step-\d+|benchmarks)/|(config\.yaml|report\.html|state\.json|path\.py|fp8\.svg)$"
    r"|(metrics|samples)\.jsonl$|(generation_|tokenizer_)?config\.json$|.*\.safetensors"
)
PATH = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|md|yaml|jsonl|json|lock|svg|png|toml|html)\b|(?:[\w-]+/)+(?=[\s`,;)]|$)")


def exists(path: str) -> bool:
    """In the repository, its package, docs/, configs/ or tests/, or as a file in one of the package's rooms."""
    places = [ROOT / room / path for room in (".", "jetrl", "docs", "configs", "tests")]
    return any(p.exists() for p in places) or ("/" not in path and any((ROOT / "jetrl").glob(f"*/{path}")))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_exist(page: Path) -> None:
    for line in code(page):
        for path in PATH.findall(line):
            assert MADE.match(path) or exists(path), f"{page.name} names {path} in: {line}"


def command() -> click.Group:
    from jetrl.cli import app

    group = typer.main.get_command(app)
    assert hasattr(group, "commands")
    return group  # type: ignore[return-value]


def jetrl_lines(page: Path) -> list[list[str]]:
    found = [re.search(r"(?:^|&& |\$ |bin/)(jetrl(?: .*)?)$", line.split("  #")[0].rstrip()) for line in code(page)]
    return [shlex.split(match[1]) for match in found if match]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page: Path) -> None:
    """Every `jetrl ...` names a command, its options, known keys and configs that are there."""
    for words in jetrl_lines(page):
        if len(words) == 1:
            continue
        commands = command().commands
        assert words[1] in commands or words[1] == "--help", words
        parameters = commands[words[1]].params if words[1] in commands else []
        options = {o for p in parameters for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        for word in words[2:]:
            key, equals, _ = word.partition("=")
            if word.startswith("--"):
                assert key in options, f"{page.name}: {' '.join(words)}"
            elif equals and re.fullmatch(r"[a-z_0-9.]+", key):
                assert key in known_keys() or key.startswith("task.options."), f"{page.name}: {' '.join(words)}"
            elif word.startswith("configs/"):
                assert (ROOT / word).is_file(), f"{page.name}: {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_targets_and_extras_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(
        re.findall(r"^([\w-]+) = \[", project.split("[project.optional-dependencies]")[1].split("\n[")[0], re.MULTILINE)
    )
    for line in code(page):
        for target in re.findall(r"\bmake ([a-z]+)\b", line):
            assert target in targets, f"{page.name}: make {target}"
        for names in re.findall(r"(?:jetrl|\.)\[([\w,-]+)\]", line):
            assert set(names.split(",")) <= extras, f"{page.name}: {line}"


@pytest.mark.parametrize("page", [*PAGES, *CONFIGS], ids=lambda p: p.name)
def test_no_machine_or_registry_is_named(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"pypi|pythonhosted|(?<![\w./])/(work|tmp|root|home|Users|mnt)\b|huggingface\.co/(?!docs)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_lines_fit(page: Path) -> None:
    long = [n for n, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1) if len(line) > 150 and "|" not in line]
    assert not long, f"{page.name}: lines {long}"


def test_readme_is_one_screen_and_its_config_is_the_quickstart() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 95
    assert f"[{len(known_keys())} keys](docs/configuration.md)" in text
    shown = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    quickstart = [
        line for line in (ROOT / "configs/quickstart.yaml").read_text(encoding="utf-8").splitlines() if line[0] != "#"
    ]
    assert shown[0].splitlines() == quickstart
    assert len(quickstart) <= 20


def test_yaml_in_docs_loads(tmp_path: Path) -> None:
    for page in PAGES:
        for number, text in enumerate(
            re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        ):
            file = tmp_path / f"{page.stem}-{number}.yaml"
            file.write_text(text, encoding="utf-8")
            load_config(file)


# Configurations


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with many positions, and data, for configurations whose own are not at hand."""
    from tests.random_models import save_random_model

    folder = tmp_path_factory.mktemp("models")
    save_random_model(folder / "model", "qwen2", max_position_embeddings=4096)
    for split, first in (("train", 0), ("test", 1000)):
        rows = [
            {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(first, first + 300)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


@pytest.mark.parametrize("file", sorted({*CONFIGS} - {*RECIPES}), ids=lambda p: p.relative_to(ROOT / "configs").as_posix())
def test_config_passes_a_dry_run(file: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl.run import setup

    monkeypatch.chdir(ROOT)
    config = load_config(file)
    overrides = [] if config.model == "demo" else [f"model={models / 'model'}"]
    if config.task.data is None:
        overrides.append("task.options.train_size=200")
    elif str(config.task.data).startswith("data/"):
        overrides += [f"task.data={models / 'train.jsonl'}", f"task.eval_data={models / 'test.jsonl'}"]
    s = setup(load_config(file, overrides))
    s.task.close()
    assert s.prompts and s.held_out
    assert s.flow.exact == (config.flow != "fp8_rollout")
    assert not s.notes, s.notes


def test_example_reward() -> None:
    from examples.own_reward import reward

    assert reward("47+38=", "85", "85", brief=2) == 1.0
    assert reward("47+38=", "7+8=15;4+3+1=8;85", "85", brief=2) == 0.8
    assert reward("47+38=", "86", "85", brief=2) == 0.1
    assert reward("47+38=", "", "85", brief=2) == 0.0


def test_example_rewards_of_own_reward_yaml_are_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl.tasks import load_task

    monkeypatch.chdir(ROOT)
    task = load_task(load_config(ROOT / "configs/own_reward.yaml").task, seed=0)
    problem = task.held_out[0]
    right, wordy, wrong = (task.grade(problem, text) for text in (problem.answer, f"it is {problem.answer}", "-1"))
    assert (right.reward, right.correct, right.error) == (1.0, True, None)
    assert (wordy.reward, wordy.correct) == (0.8, True)
    assert (wrong.reward, wrong.correct) == (0.1, False)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    head, rest = TABLE.read_text(encoding="utf-8").split(BEGIN)
    TABLE.write_text(f"{head}{BEGIN}\n{key_table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")
