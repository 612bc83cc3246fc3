"""Tasks: problems, wordings, prompts and the order of the data."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections import Counter

import pytest

from jetrl.config import TaskConfig
from jetrl.rl.types import Problem
from jetrl.tasks import build_prompts, load_task, order
from jetrl.tasks.countdown import grade_countdown, read_expression
from jetrl.tasks.generated import GENERATORS, _evaluate


def task(name: str = "arithmetic", seed: int = 0, **fields):
    fields.setdefault("options", {})
    fields["options"] = (
        {"train_size": 200, "held_out_size": 20, **fields["options"]} if "data" not in fields else fields["options"]
    )
    return load_task(TaskConfig(name=name, **fields), seed=seed)


class Characters:
    """A tokenizer of characters; BOS is 1, EOS 2."""

    eos_token_id = 2
    chat_template: str | None = "<{role}>{content}"

    def encode(self, text, *, add_special_tokens):
        return [1] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        return "\x01" + "".join(f"<{m['role']}>{m['content'].strip()}" for m in conversation) + "<assistant>"


@pytest.mark.parametrize("name", [*GENERATORS, "countdown"])
def test_generated_problems_are_distinct_disjoint_repeatable_and_solvable(name):
    a, again, other = (task(name, seed=s, shots=3) for s in (0, 0, 1))
    assert list(a.train) == list(again.train)
    assert list(a.train) != list(other.train)
    assert list(a.held_out) == list(other.held_out), "held-out problems must not follow the seed"
    groups = [{p.question for p in group} for group in (a.train, a.held_out, a.examples)]
    assert [len(g) for g in groups] == [len(a.train), len(a.held_out), 3]
    assert len(set.union(*groups)) == sum(map(len, groups))
    assert {p.question for p in other.train}.isdisjoint(p.question for p in other.held_out)
    assert len({p.id for p in a.train}) == len(a.train)
    for p in a.train:
        assert a.grade(p, f" {p.answer}\n").correct
        assert not a.grade(p, " 123456789\n").correct
        if name == "arithmetic":
            assert eval(p.question.rstrip("=")) == int(p.answer)  # noqa: S307 (our own text)


def test_small_space_is_split_without_loss_or_overlap():
    t = task(options={"digits": [1, 1], "operators": "+", "train_size": 1000, "held_out_size": 512}, shots=4)
    assert len(t.train) + len(t.held_out) + 4 == 100
    assert len(t.held_out) == 19


def test_arithmetic_format_is_the_demo_models():
    t = task(options={"digits": [2, 2], "operators": "+"}, shots=2)
    lines = t.prompt_text(t.train[0]).split("\n")
    assert len(lines) == 3
    for line, example in zip(lines, t.examples, strict=False):
        assert line == example.question + example.answer
    a, b = lines[2].removesuffix("=").split("+")
    assert lines[2] == f"{int(a)}+{int(b)}="
    assert task(options={"digits": [2, 2]}).prompt_text(Problem("x", "47+38=", "85")) == "47+38="
    chat = task(template="chat", shots=1).prompt_text(Problem("x", "47+38=", "85"))
    assert [m["role"] for m in chat] == ["user", "assistant", "user"]
    assert "47+38=" in chat[2]["content"]


def test_multiplication_binds_first():
    assert _evaluate([2, 3, 4, 5, 6], ["-", "*", "+", "*"]) == 2 - 3 * 4 + 5 * 6


def test_made_up_lines_after_the_answer_do_not_count_with_shots():
    p = Problem("x", "47+38=", "85")
    assert task(shots=1).grade(p, "85\n1+1=2\n").correct
    assert not task(shots=1).grade(p, "84\n47+38=85\n").correct
    assert task(shots=0).grade(p, "I think\n85").correct
    assert task(shots=1).grade(p, "\n85").parsed is False
    assert task(shots=0).grade(Problem("x", "3-7=", "-4"), "it is -4.").correct
    assert not task(shots=0).grade(Problem("x", "3-7=", "-4"), "3-7=4").correct


def test_grade_all_keeps_order():
    t = task()
    pairs = [(p, p.answer if i % 3 else "none") for i, p in enumerate(t.train)]
    assert [g.correct for g in t.grade_all(pairs)] == [bool(i % 3) for i in range(len(pairs))]


@pytest.mark.parametrize(
    ("text", "parsed", "correct"),
    [
        ("(3+4)*5 = 35", True, True),
        ("First 3*4=12.\nThen \\boxed{5 \\times (3+4)} it is", True, True),
        ("<answer>5*(4+3)</answer> and 1+1", True, True),
        ("5*(4+3", False, False),
        ("5*7", True, False),  # 7 is not given
        ("35", True, False),
        ("5*(4+3)*5/5", True, False),  # 5 used three times
        ("9**9**9**9", False, False),
        ("__import__('os').getcwd()", False, False),
        ("\\boxed{5(4+3)}", False, False),
        ("\\boxed{3/(5-5)}", True, False),
        ("((((((" * 60, False, False),
        ("", False, False),
    ],
)
def test_countdown_grading(text, parsed, correct):
    p = Problem("x", "", metadata={"numbers": [3, 4, 5], "target": 35, "use_all": True})
    grade = grade_countdown(p, text)
    assert (grade.parsed, grade.correct, grade.reward) == (parsed, correct, float(correct))


def test_countdown_use_all_and_exact_fractions():
    metadata = {"numbers": [8, 3, 3, 1], "target": 24, "use_all": False}
    assert grade_countdown(Problem("x", "", metadata=metadata), "8*3").correct
    assert not grade_countdown(Problem("x", "", metadata={**metadata, "use_all": True}), "8*3").correct
    value, used = read_expression("8/(3-8/3)") or (None, None)
    assert value == 24
    assert used == Counter([8, 8, 3, 3])


@pytest.mark.parametrize("n", [1, 5, 7, 12, 100])
@pytest.mark.parametrize("per_step", [1, 4, 12, 25])
def test_order_visits_each_index_once_an_epoch_and_resumes(n, per_step):
    steps = [order(3, step, per_step, n) for step in range(2 * n)]
    assert all(len(s) == per_step for s in steps)
    row = [i for s in steps for i in s]
    epochs = [row[i : i + n] for i in range(0, len(row) - n + 1, n)]
    assert all(sorted(e) == list(range(n)) for e in epochs)
    assert [order(3, step, per_step, n) for step in reversed(range(2 * n))] == steps[::-1]
    if n >= 12:
        assert epochs[0] != epochs[1]
        assert steps != [order(4, step, per_step, n) for step in range(2 * n)]


def test_order_is_the_same_in_another_process():
    code = "from jetrl.tasks import order; print(order(5, 7, 6, 100))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=".")
    assert json.loads(out.stdout) == order(5, 7, 6, 100)


def test_tasks_import_no_torch():
    code = "import sys, jetrl.tasks; sys.exit('torch' in sys.modules or 'math_verify' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_overlong_prompts_are_left_out_and_counted():
    t = task(options={"digits": [1, 3], "operators": "+"})
    config = TaskConfig(max_prompt_tokens=6)  # BOS and 5 characters
    prompts, counts = build_prompts(t, t.train, Characters(), config)
    short = [p for p in t.train if len(p.question) <= 5]
    assert [p.problem for p in prompts] == short
    assert prompts[0].token_ids == [1] + [ord(c) for c in prompts[0].text]
    assert (counts.kept, counts.overlong) == (len(short), len(t.train) - len(short))
    assert counts.longest == 1 + max(len(p.question) for p in t.train)
    with pytest.raises(ValueError, match=r"no prompt is left of 200.*max_prompt_tokens is 2"):
        build_prompts(t, t.train, Characters(), TaskConfig(max_prompt_tokens=2))
    with pytest.raises(ValueError, match="no prompt is left of 0"):
        build_prompts(t, [], Characters(), config)


def test_chat_prompts_are_tokenized_without_a_second_bos():
    t = task(template="chat", shots=2)
    prompts, _ = build_prompts(t, t.train[:3], Characters(), TaskConfig(template="chat"))
    assert prompts[0].token_ids == [ord(c) for c in prompts[0].text]
    assert prompts[0].text.endswith("<assistant>")


def test_tokenizers_that_cannot_serve_are_refused():
    class NoTemplate(Characters):
        chat_template = None

    class LastTurnOnly(Characters):
        def apply_chat_template(self, conversation, **options):
            return super().apply_chat_template(conversation[-1:], **options)

    class AddsEos(Characters):
        def encode(self, text, *, add_special_tokens):
            return [*super().encode(text, add_special_tokens=add_special_tokens), 2]

    class Empty(Characters):
        def encode(self, text, *, add_special_tokens):
            return []

    config = TaskConfig()
    chat, raw = task(template="chat", shots=1), task()
    for tokenizer, t, message in [
        (NoTemplate(), chat, "no chat template"),
        (LastTurnOnly(), chat, "drops or changes"),
        (AddsEos(), raw, "add_eos_token"),
        (Empty(), raw, "no tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_prompts(t, t.train, tokenizer, config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "aritmetic"}, "did you mean 'arithmetic'"),
        ({"options": {"digit": [1, 2]}}, "did you mean 'digits'"),
        ({"options": {"digits": [3, 1]}}, r"digits is \[3, 1\]"),
        ({"options": {"digits": [True, 2]}}, "digits is"),
        ({"options": {"operators": "+/"}}, "operators is '\\+/'"),
        ({"options": {"terms": "2"}}, "an? int"),
        ({"options": {"terms": True}}, "an? int"),
        ({"options": {"train_size": 0}}, "1 or more"),
        ({"options": {"digits": [1, 1], "operators": "+"}, "shots": 64, "name": "nothing:here"}, "there is no task"),
        ({"name": "math"}, "needs task.data"),
        ({"name": "math", "data": "no/such/file.jsonl"}, "no data file"),
        ({"name": "missing.py:reward", "data": "x.jsonl"}, "no file 'missing.py'"),
    ],
)
def test_bad_configuration_says_what_is_wrong(fields, message):
    with pytest.raises(ValueError, match=message):
        load_task(TaskConfig(**fields), seed=0)


def test_reasoning_gym_names_the_extra_and_uses_its_scoring(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'jetrl\[reasoning-gym\]'"):
        task("reasoning_gym:toy")

    class Toy:
        def __init__(self, seed, base):
            self.n = base + seed % 1000

        def __getitem__(self, index):
            return {"question": f"say {self.n}", "answer": str(self.n), "metadata": {"n": self.n}}

        def score_answer(self, answer, entry):
            return 1.0 if answer == entry["answer"] else float("nan") if answer == "nan" else 0.25

    def create_dataset(name, size, seed, **settings):
        if name != "toy":
            raise ValueError(f"Dataset {name!r} not registered")
        return Toy(seed, **settings)

    monkeypatch.setitem(sys.modules, "reasoning_gym", types.SimpleNamespace(create_dataset=create_dataset))
    t = task("reasoning_gym:toy", options={"base": 5})
    p = t.train[0]
    assert t.grade(p, f"so <answer> {p.answer} </answer>").correct
    assert t.grade(p, f"\\boxed{{{p.answer}}}").correct
    assert t.grade(p, "wrong").reward == 0.25
    assert t.grade(p, "nan").error is not None
    with pytest.raises(ValueError, match="refuses 'other'"):
        task("reasoning_gym:other", options={"base": 5})


def test_arithmetic_with_spaces() -> None:
    config = TaskConfig(name="arithmetic", shots=1, options={"digits": [1, 2], "operators": "-", "spaces": True})
    task = load_task(config, seed=0)
    problem = task.train[0]
    a, sign, b, equals = problem.question.split(" ")
    assert (sign, equals, int(problem.answer)) == ("-", "=", int(a) - int(b))
    example = task.examples[0]
    assert task.prompt_text(problem) == f"{example.question} {example.answer}\n{problem.question}"
    assert task.grade(problem, f" {problem.answer}\n1 - 1 = 0").correct
