"""`jetrl bench rollout` without a GPU: cases, rooflines, rows and tables, the command, and a tiny model measured on a CPU."""

from __future__ import annotations

import io
import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from jetrl.bench import rollout, run
from jetrl.bench.profiling import LONG_GAP, Profile, gap_rows, one_after_the_other
from jetrl.bench.rollout import CASES, FLOWS, Case, Measured
from jetrl.bench.table import render
from jetrl.bench.timing import BF16_NOMINAL, FP8_NOMINAL, Ceilings
from jetrl.model.shapes import SHAPES
from jetrl.rl.types import MismatchError
from jetrl.rollout.decoder import ladder
from jetrl.rollout.engine import Engine
from jetrl.rollout.generation import Generation, Stats
from tests.tiny_models import tiny_model
from tests.tiny_runs import command

QWEN = SHAPES["qwen3-8b"]
CEILINGS = Ceilings(copy=4e12, bf16=700e12)
LINEAR = 36 * (6144 * 4096 + 4096 * 4096 + 24576 * 4096 + 4096 * 12288)
HEAD = 2 * 151936 * 4096
PLAIN, TAIL = Case("plain", 6, 1, 70, (9,) * 6), Case("tail", 3, 4, 10, rollout.tail_lengths(12, 10, 2, 40), share=70.0)


def measured(case: str = "wide", flow: str = "fp8", seconds: float = 13.0, **changes: Any) -> Measured:
    limits = CASES[case].limits
    stats = Stats(
        decode_steps=max(limits) - 1, decode_tokens=sum(limits) - len(limits), decode_seconds=seconds - 1, prefill_seconds=1.0
    )
    return replace(Measured(CASES[case], FLOWS[flow], seconds, 20.0, stats, 200_000, 0), **changes)


# Cases


def test_cases_are_the_issues() -> None:
    sizes = {c.name: (c.prompts * c.group, c.prompt, max(c.limits)) for c in CASES.values()}
    assert sizes == {"wide": (256, 256, 1024), "middle": (64, 256, 512), "narrow": (16, 256, 256), "tail": (512, 256, 8192)}
    assert all(len(c.limits) == c.prompts * c.group for c in CASES.values())
    assert [c.text for c in CASES.values()][0::3] == ["wide 256 x (256, 1024)", "tail 64 x 8 x (256, up to 8192)"]


def test_tail_lengths_never_change() -> None:
    lengths = CASES["tail"].limits
    assert (sum(lengths), min(lengths), max(lengths), lengths.count(8192)) == (819005, 49, 8192, 6)
    assert 800 < sorted(lengths)[256] < 1250
    assert min(rollout.tail_lengths(2000, median=50)) == 16


def test_prompts_are_random_and_distinct_with_a_seed_a_completion() -> None:
    requests = CASES["tail"].requests(1000)
    assert requests == CASES["tail"].requests(1000)
    assert len({tuple(r.prompt) for r in requests}) == 64 and all(len(r.prompt) == 256 for r in requests)
    assert len({seed for r in requests for seed in r.seeds}) == 512


def test_lists_of_names() -> None:
    cases, flows = rollout.chosen("tail, wide,tail", "bf16,fp8+kv8")
    assert ([c.name for c in cases], [f.name for f in flows]) == (["tail", "wide"], ["bf16", "fp8+kv8"])


# Rooflines


def test_a_decode_step_reads_weights_once_and_each_key_and_value() -> None:
    fp8, bf16 = (rollout.weight_bytes(QWEN, fp8) for fp8 in (True, False))
    assert fp8 == LINEAR + 4 * LINEAR // 128**2 + HEAD
    assert bf16 == 2 * LINEAR + HEAD
    case = Case("", 2, 1, 100, (4, 1))  # tokens 2, 3 and 4 of the first read 101, 102 and 103 keys
    for flow, per_token, weights in (
        ("fp8", 36 * 2 * 8 * 256, fp8),
        ("fp8+kv8", 36 * 2 * 8 * 132, fp8),
        ("bf16", 36 * 4096, bf16),
    ):
        bound = rollout.decode_bound(QWEN, case, FLOWS[flow], 3, CEILINGS)
        assert bound == pytest.approx(1e6 * (3 * weights + 306 * per_token) / 4e12)


def test_prefill_counts_each_prompt_once_at_its_types_peak() -> None:
    pairs = 64 * 256 * 257 // 2
    attention, head = 36 * 4 * 128 * 32 * pairs, 2 * 512 * 151936 * 4096
    linear = 2 * 64 * 256 * LINEAR
    for flow, fp8 in (("fp8", linear), ("fp8+kv8", linear + attention), ("bf16", 0)):
        bound = rollout.prefill_bound(QWEN, CASES["tail"], FLOWS[flow], CEILINGS)
        assert bound == pytest.approx(1e6 * (fp8 / FP8_NOMINAL + (linear + attention + head - fp8) / BF16_NOMINAL))


@pytest.mark.parametrize(("case", "about"), [("wide", 28_000), ("middle", 20_000), ("narrow", 7_600)])
def test_rooflines_are_those_of_the_issue(case: str, about: float) -> None:
    row = rollout.rate_row(QWEN, measured(case), None, Ceilings(copy=4.3e12, bf16=700e12), judged=True)
    assert row.roofline == pytest.approx(about, rel=0.06)


# Rows


def test_rates_are_held_against_targets_and_the_baseline() -> None:
    fast, slow = measured(seconds=13.0), measured(seconds=14.0)
    row = rollout.rate_row(QWEN, fast, measured(flow="bf16", seconds=26.0), CEILINGS, judged=True)
    assert row.ours == pytest.approx(262_144 / 13) and row.ratio == pytest.approx(2.0)
    assert row.target and row.target.met and (row.target.limit, row.extra["vLLM BF16, recorded"]) == (19_000, 14_130)
    assert row.share is not None and row.share == pytest.approx(row.ours / (row.roofline or 1)) and row.share < 1
    missed = rollout.rate_row(QWEN, slow, None, CEILINGS, judged=True)
    assert missed.target and not missed.target.met
    assert rollout.rate_row(QWEN, fast, None, CEILINGS, judged=False).target is None
    assert rollout.rate_row(QWEN, measured(flow="bf16"), None, CEILINGS, judged=True).target is None


def test_the_tail_is_held_against_its_roofline() -> None:
    case, flow = CASES["tail"], FLOWS["fp8"]
    bound = rollout.prefill_bound(QWEN, case, flow, CEILINGS) + rollout.decode_bound(QWEN, case, flow, 8191, CEILINGS)
    for share, met in ((0.71, True), (0.69, False)):
        row = rollout.rate_row(QWEN, measured("tail", seconds=1e-6 * bound / share), None, CEILINGS, judged=True)
        assert row.share == pytest.approx(share) and row.target and row.target.met is met


def test_the_mean_step_and_the_phases() -> None:
    row = rollout.step_row(QWEN, measured(seconds=13.0), CEILINGS)
    assert row.ours == pytest.approx(12e6 / 1023)
    assert row.roofline == pytest.approx(rollout.decode_bound(QWEN, CASES["wide"], FLOWS["fp8"], 1023, CEILINGS) / 1023)
    assert (row.extra["tokens"], row.extra["prefill, s"], "preempted" in row.extra) == (256.0, "1.00", False)


def test_tables_fit_a_terminal_and_come_case_by_case() -> None:
    profile = Profile({"void kernel<x>": (8, 720.0)}, [2.0, 78.0], 8)
    found = [measured(c, f, profile=profile if c == "wide" and f == "fp8" else None) for f in FLOWS for c in CASES]
    tables = rollout.tables(QWEN, found, CEILINGS, judged=True)
    assert [r.case for r in tables[0].rows][:4] == ["wide, fp8", "wide, fp8+kv8", "wide, bf16", "middle, fp8"]
    assert [r.baseline is None for r in tables[0].rows] == [False, False, True] * 4
    out = Console(file=io.StringIO(), width=128)
    for table in tables:
        out.print(render(table, run.facts("NVIDIA Canned", CEILINGS)))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text and max(map(len, text.splitlines())) <= 128
    for words in ("recorded", "14,130", "0 of 200,000", "≥ 19000 met", "busy 90.0%", "kernel<x>"):
        assert words in text, words


def test_gaps_are_what_no_kernel_covers() -> None:
    spans = [("a", 30.0, 40.0), ("a", 0.0, 10.0), ("b", 5.0, 8.0), ("c", 9.0, 12.0)]
    assert one_after_the_other(spans) == ({"a": (2, 20.0), "b": (1, 0.0), "c": (1, 2.0)}, [18.0])
    assert one_after_the_other([]) == ({}, [])
    every, late = gap_rows(Profile({"k": (2, 100.0)}, [1.0, LONG_GAP + 9], 2))
    assert (every.ours, every.extra["%"], late.ours) == (10.0, 20.0, 9.5)


# The warm-up


def sizes_of(engine: Engine, case: Case, limits: list[int] | tuple[int, ...]) -> set[int]:
    """Rungs of the ladder that decode steps have in a run."""
    sizes, decoder = ladder(engine.limits.max_sequences), engine._machine.decoder
    seen: set[int] = set()
    original = decoder.run

    def spy(step: torch.Tensor, temperature: float) -> torch.Tensor:
        seen.add(sizes[bisect_left(sizes, step.shape[1])])
        return original(step, temperature)

    decoder.run = spy  # type: ignore[method-assign]
    rollout._run(engine, case, limits)
    decoder.run = original  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(("case", "lanes"), [(PLAIN, 6), (TAIL, 12), (TAIL, 8)])
def test_the_warm_up_meets_every_size_of_a_decode_step(case: Case, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "BATCH_TOKENS", 40)  # prompts come in several steps
    model = tiny_model("qwen3", max_position_embeddings=128)
    engine = Engine(model, rollout.limits_for(case, model, lanes), ())
    warm = rollout.warm_limits(case, lanes)
    assert len(warm) <= len(case.limits) and sum(warm) <= max(4 * sum(case.limits), 400)
    reached = sizes_of(engine, case, warm)
    assert reached >= sizes_of(engine, case, case.limits)
    if case is TAIL:
        assert reached == set(ladder(lanes))


# A tiny model on a CPU


@pytest.mark.parametrize("case", [PLAIN, TAIL], ids=lambda c: c.name)
@pytest.mark.parametrize("flow", ["fp8", "fp8+kv8", "bf16"])
def test_a_case_is_measured_and_scored_again(case: Case, flow: str) -> None:
    model = tiny_model("qwen3", "bf16" if flow == "bf16" else "fp8", max_position_embeddings=128)
    if FLOWS[flow].kv_fp8:
        model = type(model).random(model.config, model.fp8_layers, kv_fp8=True)
    m = rollout.measure_case(model, case, FLOWS[flow], 256, 10**9, profile=False)
    assert (m.scored, m.differing) == (sum(case.limits), 0)
    assert m.stats.sampled_tokens == sum(case.limits) and m.stats.prefill_tokens == case.prompts * case.prompt
    assert m.seconds > 0 and m.warm_up > 0 and m.rate == pytest.approx(sum(case.limits) / m.seconds)
    for table in rollout.tables(model.config, [m], CEILINGS, judged=True):
        assert table.rows[0].case == f"{case.name}, {flow}"


def test_a_wrong_log_probability_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3", max_position_embeddings=128)
    original = Generation._book

    def book(self: Generation, sequence: Any, token: int, logprob: float) -> None:
        nudged = sequence.seed % 2 == 0 and len(sequence.completion) == 3
        original(self, sequence, token, logprob * (1 + 2**-22) if nudged else logprob)

    monkeypatch.setattr(Generation, "_book", book)
    wrong = sum(seed % 2 == 0 for r in PLAIN.requests(61) for seed in r.seeds)
    m = rollout.measure_case(model, PLAIN, FLOWS["fp8"], 256, 10**9, profile=False)
    assert 0 < m.differing <= wrong < 6
    row = rollout.rate_row(model.config, m, None, CEILINGS, judged=False)
    assert row.extra["bits differ"] == f"{m.differing} of {sum(PLAIN.limits)}"


def test_some_tokens_are_enough_and_the_longest_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "PACK", 30)  # several forwards
    model = tiny_model("qwen3", max_position_embeddings=128)
    scored = []
    real = rollout._differing
    monkeypatch.setattr(rollout, "_differing", lambda m, p, c: scored.append([len(x.token_ids) for x in c]) or real(m, p, c))
    m = rollout.measure_case(model, TAIL, FLOWS["fp8"], 256, 60, profile=False)
    assert 60 <= m.scored < 60 + max(TAIL.limits) and m.differing == 0
    assert len(scored) > 1 and scored[0][0] == max(TAIL.limits) and sum(map(sum, scored)) == m.scored
    assert rollout.measure_case(model, PLAIN, FLOWS["fp8"], 256, 0, profile=False).scored == 0


# The command


def test_the_command_writes_after_each_case_and_fails_when_bits_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, written = tmp_path / "x.json", []

    def canned(config: Any, cases: Any, flows: Any, lanes: int, tokens: int, profile: bool) -> Iterator[Measured]:
        assert ([c.name for c in cases], [f.name for f in flows], lanes, tokens, profile) == (
            ["wide", "tail"], ["fp8", "bf16"], 512, 1000, True,
        )  # fmt: skip
        for flow in flows:
            for case in cases:
                yield measured(case.name, flow.name, differing=2 if (case.name, flow.name) == ("tail", "bf16") else 0)
                written.append(len(json.loads(file.read_text(encoding="utf-8"))["rows"]))

    monkeypatch.setattr(rollout, "bench", canned)
    monkeypatch.setattr(run, "require_gpu", lambda: None)
    monkeypatch.setattr(run, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Canned")
    words = "bench", "rollout", "--cases", "wide,tail", "--flows", "fp8,bf16", "--tail-sequences", 512, "--check", 1000
    code, out, err = command(monkeypatch, capsys, *words, "--profile", "--json", file)
    assert code == 3 and "2 log-probabilities of engine and trainer differ" in err
    assert written == [2, 4, 6, 8]
    assert "wide, fp8: 20,165 tokens/s" in out and "2 of 200,000" in out and "x.json" in out
    tree = json.loads(file.read_text(encoding="utf-8"))
    assert "recorded earlier" in tree["meta"]["vllm"] and tree["meta"]["shape"] == "qwen3-8b"
    first = tree["rows"][0]
    assert first["ours_tokens_s"] == pytest.approx(262_144 / 13) and first["baseline_tokens_s"] and "ours_us" not in first
    assert issubclass(MismatchError, RuntimeError)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--cases", "wide,broad"), "--cases has 'broad'; wanted some of wide, middle, narrow, tail"),
        (("--flows", "fp8_rollout"), "--flows has 'fp8_rollout'; wanted some of fp8, fp8+kv8, bf16"),
        (("--shape", "qwen9"), "shape is 'qwen9'"),
    ],
)
def test_wrong_arguments(
    words: tuple[str, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(monkeypatch, capsys, "bench", "rollout", "--json", "x.json", *words)
    assert (code, out) == (2, "") and complaint in err
    assert not list(tmp_path.iterdir())
