"""`jetrl bench step` without a GPU: rows and targets by hand, and the real loop on a tiny model."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from jetrl.bench import run, step
from jetrl.bench.step import CASES, Case, Measured, grade, random_prompts
from jetrl.bench.timing import Ceilings
from jetrl.model.config import training_flops
from jetrl.model.shapes import SHAPES
from jetrl.rl.types import Problem
from tests.tiny_runs import command

QWEN = SHAPES["qwen3-8b"]
TINY = replace(
    QWEN, vocab_size=300, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
CEILINGS = Ceilings(copy=4e12, bf16=700e12)


def row(**seconds: float) -> dict[str, Any]:
    """A step of 1,000 completion tokens and 1,500 trained ones."""
    training = seconds["train"] + seconds["publish"]
    times = {f"time/{phase}": value for phase, value in seconds.items()}
    memory = {f"memory/{phase}{end}_gb": 100.0 for phase in ("rollout", "training") for end in ("", "_planned")}
    rates = {"throughput/rollout": 1000 / seconds["rollout"], "throughput/train": 1500 / training}
    memory |= {"memory/peak_gb": 100.0, "memory/planned_gb": 102.0}
    work = {"throughput/train_tflops": 494.5, "logprob_diff/max": 0.0, "length/max": 1024.0, "token_diff/tokens": 1000.0}
    return times | rates | memory | work


def measured(flow: str, **seconds: float) -> Measured:
    return Measured(CASES["1k"], flow, [row(**seconds), row(**seconds)])


def test_ratios_are_those_of_the_phases() -> None:
    fp8 = measured("fp8", rollout=10.0, train=8.0, publish=0.5, grade=0.5)
    bf16 = measured("bf16", rollout=13.0, train=12.0, publish=0.5, grade=0.5, old_logprobs=3.0)
    speeds, phases, memory = step.tables(QWEN, [fp8, bf16], CEILINGS, judged=True)
    found = {r.case: r for r in speeds.rows}
    assert found["1k, rollout"].ratio == pytest.approx(1.3) and found["1k, rollout"].target is None
    assert found["1k, training"].ratio == pytest.approx(12.5 / 8.5)
    assert found["1k, step"].ratio == pytest.approx(26 / 19)
    assert found["1k, step, BF16 with old log-probabilities"].ratio == pytest.approx(29 / 19)
    met = [r.target.met for r in speeds.rows if r.target]
    assert met == [True, True, True]
    late = step.tables(QWEN, [fp8, measured("bf16", rollout=10.0, train=10.0, publish=0.5, grade=0.5)], CEILINGS, judged=True)
    assert [r.target.met for r in late[0].rows if r.target] == [False, False, False]
    assert phases.rows[0].extra["MFU"] == "50.0%" and phases.rows[1].extra["old_logprobs, s"] == "3.00"
    assert memory.rows[0].ratio == pytest.approx(1.02) and memory.rows[0].extra["logprob_diff/max"] == "0.0"
    assert memory.rows[0].extra["tokens compared"] == "2,000"
    alone = step.tables(QWEN, [fp8], CEILINGS, judged=True)[0].rows
    assert len(alone) == 3 and all(r.ratio is None and r.target is None for r in alone)


def test_model_flops_by_hand() -> None:
    weights = 6144 * 4096 + 4096 * 4096 + 24576 * 4096 + 4096 * 12288
    pairs = 3 * 4 // 2 + 5 * 6 // 2
    expected = 3 * (36 * (2 * weights * 8 + 4 * 32 * 128 * pairs) + 2 * 151936 * 4096 * 7)
    assert training_flops(QWEN, [3, 5], 7) == expected


def test_rewards_and_prompts() -> None:
    texts = ["2 4 7", "2 3", "", "1 3 5 8"]
    assert [g.reward for g in grade([(Problem("0", ""), text) for text in texts])] == [1.0, 0.0, 0.0, 0.0]
    prompts = random_prompts(Case("x", 3, 2, 5, 7), 100)
    assert prompts(1) == prompts(1) != prompts(2)
    assert all(len(p.token_ids) == 5 and max(p.token_ids) < 100 for p in prompts(1))


def test_the_real_loop_on_a_tiny_model() -> None:
    cases = [Case("plain", 2, 4, 8, 12), Case("tail", 2, 4, 8, 40, mean=8)]
    said: list[str] = []
    flows = ["fp8", "bf16", "fp8+kv8"]
    found = list(step.bench(TINY, None, cases, flows, 2, "fp8", 64, "cpu", said.append))
    assert [(m.case.name, m.flow) for m in found] == [(case, flow) for flow in flows for case in ("plain", "tail")]
    for m in found:
        assert len(m.rows) == 2 and m.most("logprob_diff/max") == 0.0 and m.seconds("train") > 0
        assert (m.seconds("old_logprobs") > 0) == (m.flow == "bf16")
    assert found[0].completed == pytest.approx(96) and found[0].trained == pytest.approx(8 * 19)
    assert found[1].completed < 8 * 40  # some met an EOS
    assert found[0].rows[0]["entropy"] != found[4].rows[0]["entropy"]  # the cache is another one
    assert sum("step 1" in line for line in said) == 12
    rows = step.tables(TINY, found, CEILINGS, judged=False)[0].rows
    assert len(rows) == 16 and rows[8].case == "plain, FP8 KV cache, rollout"


def test_bad_input_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=io.StringIO())
    for change, message in (
        ({"cases": "2k"}, "--cases has '2k'; wanted some of 1k, 8k, tail"),
        ({"flows": "fp4"}, "--flows has 'fp4'"),
        ({"weights": True}, "--weights reads the weights of a model folder"),
    ):
        options = {"cases": "1k", "flows": "fp8", "weights": False} | change
        with pytest.raises(ValueError, match=message):
            run.run_step("qwen3-8b", options["cases"], options["flows"], 1, "fp8", 8192, options["weights"], None, console)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ValueError, match="needs torchao"):
        run.run_step("qwen3-8b", "1k", "fp8", 1, "fp8", 8192, False, None, console)
    monkeypatch.undo()
    status, _, said = command(monkeypatch, capsys, "bench", "step", "--moments", "fp4")
    assert status == 2 and "optimizer.moments" in said and "'fp4'" in said
