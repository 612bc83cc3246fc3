"""Rewards: math answers, worker processes, data files and users' functions."""

from __future__ import annotations

import json
import sys
import threading
import time
import types

import pytest

from jetrl.config import TaskConfig
from jetrl.rl.types import Problem
from jetrl.tasks import MissingData, load_task
from jetrl.tasks.answers import last_boxed, last_number, to_number
from jetrl.tasks.mathematics import MathJudge, compare, gold_answer
from jetrl.tasks.workers import WorkerPool


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def judge():
    judge = MathJudge(1, 20.0)
    yield judge
    judge.pool.close()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 7-2", "2"),
        ("x = -2", "-2"),
        ("x=-2 done", "-2"),
        ("minus \u22125", "-5"),
        ("costs -$5", "-5"),
        ("1,234,567 in all", "1234567"),
        ("1,2", "2"),
        ("1e-1", "0.1"),
        ("0.50", "0.5"),
        (".5", "0.5"),
        ("46.", "46"),
        ("12345,678", "678"),
        ("9" * 5000, "9" * 5000),
        ("1e" + "9" * 30, None),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == (None if value is None else to_number(value))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{42}", "42"),
        ("\\boxed{\\frac{1}{2}} and \\boxed{", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{ 3 and \\boxed{4}", "4"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("put it in \\boxed", None),
        ("put it in \\boxed{}", None),
        ("put it in \\boxed{ and go", None),
        ("}}}{\\", None),
    ],
)
def test_last_boxed(text, answer):
    found = last_boxed(text)
    assert (found.text if found else None) == answer


def test_finders_are_linear():
    start = time.monotonic()
    for text in (
        "\\boxed{" * 50_000,
        "{" * 300_000,
        "1," * 150_000,
        "####" * 80_000,
        "- $" * 100_000,
        "\\boxed{1" * 50_000,
    ):
        compare("42", text)
    assert time.monotonic() - start < 5.0


@pytest.mark.parametrize(
    ("gold", "completion", "correct", "parsed"),
    [
        ("42", "#### 42" + " and so on, 7 more" * 500, True, True),
        ("42", "#### 42\nThen 13 of them\n", True, True),
        ("42", "#### 42 apples because 3 + 4 = 7", True, True),
        ("-42", "#### -42", True, True),
        ("-42", "#### 42", False, True),
        ("42", "#### -42", False, True),
        ("-5", "#### -$5", True, True),
        ("1000", "#### 1,000", True, True),
        ("1,000", "it is \\boxed{1000}", True, True),
        ("1000", "#### 1,001", False, True),
        ("0.1", "\\boxed{1e-1}", True, True),
        ("0.5", "#### 0.50", True, True),
        ("42", "\\boxed{41} no, #### 42", True, True),
        ("42", "#### 41\nno, \\boxed{42}", True, True),
        ("42", "put it in \\boxed: 42", True, True),
        ("42", "#### Conclusion\nThe answer is 42.", True, True),
        ("42", "I do not know", False, False),
        ("42", "", False, False),
        ("42", "\\boxed{" + "(" * 5000 + "}", False, False),
        ("Monday", "\\boxed{\\text{monday}}", True, True),
        ("Monday", "\\boxed{dynamo}", False, True),
    ],
)
def test_numbers_and_words_need_no_worker(gold, completion, correct, parsed):
    grade = compare(gold, completion)
    assert not isinstance(grade, dict)
    assert (grade.correct, grade.parsed, grade.reward) == (correct, parsed, float(correct))


def test_math_verify_settles_the_rest_off_the_main_thread(judge):
    cases = [
        ("\\frac{1}{2}", "\\boxed{0.5}", True, True),
        ("\\frac{1}{2}", "so it is $\\frac{2}{4}$.", True, True),
        ("3", "\\boxed{\\frac{6}{2}}", True, True),
        ("3", "#### 6/2", True, True),
        ("x^2+1", "\\boxed{1+x^2}", True, True),
        ("x^2+1", "\\boxed{x^2-1}", False, True),
        ("3.5", "#### 3 1/2", True, True),
        ("@@@", "\\boxed{@@@}", False, False),
        ("???", "\\boxed{}", False, False),
        ("2", "\\boxed{@@@}", False, False),
    ]
    grades = []
    pairs = [(Problem("x", "", gold), text) for gold, text, _, _ in cases]
    thread = threading.Thread(target=lambda: grades.extend(judge(pairs)))
    thread.start()
    thread.join()
    assert [(g.correct, g.parsed, g.error) for g in grades] == [(c, p, None) for _, _, c, p in cases]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("3 * 2 = <<3*2=6>>6\n#### 6", "6"),
        ("so #### $1,200.", "1,200"),
        ("thus \\boxed{\\frac12}.", "\\frac12"),
        ("7", "7"),
        ("$x+1$", "x+1"),
        ("A long proof.\nIt is clear.", None),
        ("", None),
    ],
)
def test_gold_answer(solution, answer):
    assert gold_answer(solution) == answer


ECHO = """
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "hang":
        while True: pass
    if request["do"] == "die":
        os._exit(9)
    print(json.dumps({"n": request["n"]}), flush=True)
"""


def test_hung_and_dead_workers_are_replaced_and_only_their_request_fails(tmp_path):
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    pool = WorkerPool(script, workers=2, timeout=0.5)
    actions = ["echo", "hang", "echo", "die", "echo", "echo", "hang", "echo"]
    start = time.monotonic()
    replies = pool.map([{"do": action, "n": n} for n, action in enumerate(actions)])
    assert time.monotonic() - start < 30
    for n, (action, reply) in enumerate(zip(actions, replies, strict=True)):
        if action == "echo":
            assert reply == {"n": n}
        else:
            assert isinstance(reply, str)
            assert ("timeout" if action == "hang" else "died") in reply
    assert pool.restarts == 3
    processes = [w._process for w in pool._workers if w is not None]
    pool.close()
    assert processes
    assert all(p.poll() is not None for p in processes)
    assert pool.map([{"do": "echo", "n": 7}]) == [{"n": 7}]
    pool.close()


def test_a_worker_that_cannot_start_is_an_error_not_a_reward(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import no_such_module_at_all")
    with pytest.raises(RuntimeError, match=r"broken\.py"):
        WorkerPool(script, workers=1, timeout=1.0).map([{"n": 0}])


def test_a_hanging_parser_scores_zero_and_is_counted(tmp_path, monkeypatch):
    script = tmp_path / "hang.py"
    script.write_text(ECHO.replace('request["do"] == "hang"', "True"))
    judge = MathJudge(1, 0.3)
    judge.pool = WorkerPool(script, 1, 0.3)
    pairs = [(Problem("x", "", "x+1"), "\\boxed{1+x}"), (Problem("y", "", "3"), "#### 3")]
    hung, right = judge(pairs)
    judge.pool.close()
    assert (hung.reward, hung.correct) == (0.0, False)
    assert hung.error is not None
    assert "timeout" in hung.error
    assert right.correct


def math_rows(n, start=0):
    return [
        {"question": f"What is {i} plus 1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(start, n)
    ]


def load(data, **fields):
    return load_task(TaskConfig(name=fields.pop("name", "math"), data=data, **fields), seed=0)


def test_math_task_splits_by_question_and_counts_what_it_drops(tmp_path):
    rows = [
        *math_rows(40),
        {"question": "What is  3 plus 1?", "answer": "4"},
        {"question": "why", "answer": "x\ny"},
        {"question": " ", "answer": "1"},
        {"question": "how", "answer": None},
    ]
    t = load(write(tmp_path / "a.jsonl", rows), shots=2)
    assert t.dropped == {"repeated question": 1, "no answer": 2, "no question": 1}
    assert (len(t.held_out), len(t.train)) == (8, 30)
    questions = [p.question for p in (*t.train, *t.held_out, *t.examples)]
    assert sorted(questions) == sorted(row["question"] for row in math_rows(40))
    shuffled = load(write(tmp_path / "b.jsonl", rows[::-1]), shots=2)
    assert [p.id for p in shuffled.held_out] == [p.id for p in t.held_out]
    text = t.prompt_text(t.train[0])
    assert text.count("Question: ") == 3
    assert text.endswith("\nAnswer:")
    assert "<<" not in text
    p = t.train[0]
    assert t.grade(p, f" {p.answer}\n\nQuestion: what is 8 plus 1?\nAnswer: 9\n#### 9").correct


def test_eval_data_is_taken_out_of_the_training_data(tmp_path):
    t = load(write(tmp_path / "a.jsonl", math_rows(20)), eval_data=write(tmp_path / "b.jsonl", math_rows(25, start=15)))
    assert (len(t.train), len(t.held_out), t.dropped) == (15, 10, {"also held out": 5})


def test_chat_instruction_fits_the_data(tmp_path):
    hashes = load(write(tmp_path / "a.jsonl", math_rows(10)), template="chat")
    assert "####" in hashes.prompt_text(hashes.train[0])[-1]["content"]
    rows = [{"problem": f"p{i}", "solution": f"so \\boxed{{{i}}}", "level": 3} for i in range(10)]
    boxed = load(write(tmp_path / "b.jsonl", rows), template="chat", shots=1)
    messages = boxed.prompt_text(boxed.train[0])
    assert messages[-1]["content"].endswith("\\boxed{}.")
    assert "so \\boxed{" in messages[1]["content"]


def boxed_rows(n, start=0):
    return [
        {"problem": f"Half of {i}?", "solution": f"It is \\boxed{{\\frac{{{i}}}{{2}}}}.", "level": 3} for i in range(start, n)
    ]


def test_a_mixture_keeps_each_question_once_and_takes_its_sources_in_turn(tmp_path):
    again = {"problem": "What is  3 plus 1?", "solution": "\\boxed{4}"}
    a = write(tmp_path / "a.jsonl", [*math_rows(20), {"question": " ", "answer": "1"}])
    b = write(tmp_path / "b.jsonl", [*boxed_rows(40), again])
    held = [write(tmp_path / "c.jsonl", math_rows(30, start=18)), write(tmp_path / "d.jsonl", boxed_rows(44, start=39))]
    t = load([a, b], eval_data=held)
    assert t.dropped == {"repeated question": 1, "no question": 1, "also held out": 3}
    assert sorted(p.question for p in t.train) == sorted(
        [r["question"] for r in math_rows(18)] + [r["problem"] for r in boxed_rows(39)]
    )
    first = [p.question for p in t.held_out]
    assert first[:10] == [q for i in range(5) for q in (f"What is {i + 18} plus 1?", f"Half of {i + 39}?")]
    assert first[10:] == [f"What is {i} plus 1?" for i in range(23, 30)]
    assert load([a]).train == load(a).train
    mixed = load([a, b])
    assert {p.question[:4] for p in mixed.held_out} == {"What", "Half"}
    assert not {p.question for p in mixed.held_out} & {p.question for p in mixed.train}


def test_a_mixture_is_asked_for_a_box_and_graded_by_either_mark(tmp_path):
    a, b = write(tmp_path / "a.jsonl", math_rows(10)), write(tmp_path / "b.jsonl", boxed_rows(10))
    for sources in ([a, b], [b, a]):
        t = load(sources, template="chat")
        for problem in t.train:
            assert t.prompt_text(problem)[-1]["content"].endswith("\\boxed{}.")
        hashes = next(p for p in t.train if p.question.startswith("What"))
        for text in (f"#### {hashes.answer}", f"so \\boxed{{{hashes.answer}}}"):
            assert t.grade(hashes, text).correct
    assert "####" in load([a], template="chat").prompt_text(load([a]).train[0])[-1]["content"]


def test_a_source_of_a_mixture_that_gives_nothing_is_named(tmp_path):
    a = write(tmp_path / "a.jsonl", [*math_rows(10), {"question": " ", "answer": "1"}])
    with pytest.raises(ValueError, match=r"b\.jsonl' holds no usable problem; dropped: nothing, it is empty"):
        load([a, write(tmp_path / "b.jsonl", [])])
    with pytest.raises(
        ValueError, match=r"a\.jsonl' holds no usable problem; dropped: {'repeated question': 10, 'no question': 1}"
    ):
        load([a, a])
    with pytest.raises(ValueError, match=r"no data file at 'nope\.jsonl'"):
        load([a, "nope.jsonl"])
    with pytest.raises(ValueError, match="leaves no training problem"):
        load([])


@pytest.fixture
def hub(monkeypatch):
    """The `datasets` library, with three sets; what was asked of it."""
    asked = []
    deep = [{"question": f"Deep {i}?", "final_answer": str(i), "r1_solution_1": "long"} for i in range(20)]
    sets = {"own/sums": math_rows(20), "own/halves": boxed_rows(20), "own/deep": deep}

    def load_dataset(name, subset, *, split):
        asked.append((name, subset, split))
        if name not in sets:
            raise FileNotFoundError(f"{name} is not on the hub")
        if subset == "none":
            raise ValueError("BuilderConfig 'none' not found. Available: ['main']")
        return sets[name]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_names_of_a_mixture_bring_their_own_subset_and_split(hub, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"question": "one?", "answer": "1"}])
    t = load(
        ["own/sums:main", "own/halves@train[:50]", "own/deep", file], eval_data="own/sums:main@test", options={"subset": "all"}
    )
    assert hub == [
        ("own/sums", "main", "train"),
        ("own/halves", "all", "train[:50]"),
        ("own/deep", "all", "train"),
        ("own/sums", "main", "test"),
    ]
    assert {p.answer for p in t.train if p.question.startswith("Deep")} == {str(i) for i in range(20)}
    assert len(t.train) == 41 and len(t.held_out) == 20
    hub.clear()
    load("own/sums", options={"subset": "main", "split": "train[:9]"})
    load("own/sums")
    assert hub == [("own/sums", "main", "train[:9]"), ("own/sums", None, "train")]


def test_a_set_that_is_not_here_is_told_from_a_wrong_subset(hub, monkeypatch):
    with pytest.raises(
        MissingData, match=r"'own/other' \(subset 'main', split 'train'\) cannot be loaded: own/other is not.*NAME:SUBSET"
    ):
        load(["own/sums", "own/other:main"])
    with pytest.raises(ValueError, match=r"subset 'none'.*Available: \['main'\]") as caught:
        load("own/sums:none")
    assert not isinstance(caught.value, MissingData)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingData, match=r"no file 'own/sums'.*pip install 'jetrl\[data\]'"):
        load("own/sums:main")


def test_parquet_equals_jsonl(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(math_rows(20)), tmp_path / "a.parquet")
    a, b = load(str(tmp_path / "a.parquet")), load(write(tmp_path / "a.jsonl", math_rows(20)))
    assert (a.train, a.held_out) == (b.train, b.held_out)
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        load(str(tmp_path / "b.parquet"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no usable problem"),
        ('{"question": "a", "answer": "1"}\n{bad', r":2: not a line of JSON"),
        ("[1]\n", "a list; an object"),
        ('{"q": "a", "answer": "1"}', "question_key"),
        ('{"question": "a", "gold": "1"}', "answer_key"),
        ('{"question": [1], "answer": "1"}', "the question is a list"),
        ('{"question": "a", "answer": null}', "no usable problem"),
    ],
)
def test_bad_data_is_refused_at_load(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load(str(path))


REWARDS = """
import math
def reward(question, completion, answer, **metadata):
    if completion == "raise": raise KeyError("no")
    if completion == "exit": raise SystemExit(3)
    return {"none": None, "nan": math.nan, "inf": math.inf, "text": "1.0", "list": [1.0], "true": True, "int": 1,
            "half": 0.5, "level": metadata["level"] / 10}[completion]
def named(question, completion, answer, *, level): return level
def wrong(question): return 1.0
async def later(question, completion, answer): return 1.0
constant = 3
"""


@pytest.fixture
def user(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"question": f"q{i}", "answer": str(i), "level": 7, "completion": "given"} for i in range(10)]
    data = write(tmp_path / "d.jsonl", rows)
    return lambda function: load(data, name=f"{tmp_path}/rewards.py:{function}")


def test_user_reward_values(user):
    t = user("reward")
    p = t.train[0]
    for text, reward, correct in [("true", 1.0, True), ("int", 1.0, True), ("half", 0.5, False), ("level", 0.7, False)]:
        grade = t.grade(p, text)
        assert (grade.reward, grade.correct, grade.error) == (reward, correct, None)
        assert type(grade.reward) is float
    for text in ("raise", "exit", "none", "nan", "inf", "text", "list"):
        grade = t.grade(p, text)
        assert (grade.reward, grade.correct) == (0.0, False), text
        assert grade.error, text
    assert user("named").grade(p, "any").reward == 7.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", "it has reward, named"),
        ("constant", "no function"),
        ("wrong", "cannot be called as"),
        ("later", "async"),
    ],
)
def test_user_functions_that_cannot_work_are_refused_at_load(user, function, message):
    with pytest.raises(ValueError, match=message):
        user(function)


def test_user_file_that_does_not_import(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:")
    with pytest.raises(ValueError, match=r"importing .* raised SyntaxError"):
        load(write(tmp_path / "d.jsonl", math_rows(5)), name=f"{tmp_path}/bad.py:f")
