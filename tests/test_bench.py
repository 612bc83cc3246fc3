"""`jetrl bench` without a GPU: rooflines and tables from times that are given, JSON, and what is refused."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from jetrl.bench import attention, gemm, head, layer, profiling, run, timing
from jetrl.bench.shapes import products, shape_of
from jetrl.bench.table import Row, Table, Target, as_json, at_least, render, total
from jetrl.bench.timing import BF16_NOMINAL, FP8_NOMINAL, Ceilings
from jetrl.model.shapes import SHAPES
from tests.random_models import save_random_model
from tests.tiny_runs import command

QWEN = SHAPES["qwen3-8b"]
CEILINGS = Ceilings(copy=4e12, bf16=700e12)
META = run.facts("NVIDIA Canned", CEILINGS)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def text_of(table: Table) -> str:
    out = Console(file=io.StringIO(), width=200)
    out.print(render(table, META))
    return out.file.getvalue()  # type: ignore[attr-defined]


# Shapes


def test_products_of_the_8b_model() -> None:
    assert {p.name: (p.n, p.k) for p in products(QWEN)} == {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
    }
    assert layer.weight_count(QWEN) == 192_937_984


@pytest.mark.parametrize("name", [*SHAPES, "smollm2"])
def test_parts_make_up_the_rows(name: str) -> None:
    assert all(sum(p.parts) == p.n for p in products(shape_of(name)))


def test_a_folder_is_a_shape(tmp_path: Path) -> None:
    save_random_model(tmp_path, "qwen2", hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
    assert products(shape_of(str(tmp_path)))[1].n == 48


# Rooflines


def test_roofline_is_the_longer_of_memory_and_arithmetic() -> None:
    assert CEILINGS.roofline(4e12) == pytest.approx(1e6)
    assert CEILINGS.roofline(4e9, fp8=FP8_NOMINAL) == pytest.approx(1e6)
    assert CEILINGS.roofline(0, bf16=BF16_NOMINAL, fp8=FP8_NOMINAL) == pytest.approx(2e6)


def test_small_products_are_bound_by_weights_and_large_ones_by_arithmetic() -> None:
    p = products(QWEN)[2]
    times = {"ours": 40.0, "product": 36.0, "bf16": 64.0}
    small, large = (gemm.forward_row(p, m, times, CEILINGS) for m in (64, 8192))
    size = 24576 * 4096 + 2 * 64 * (4096 + 24576)
    assert small.roofline == pytest.approx(1e6 * size / 4e12)
    assert large.roofline == pytest.approx(1e6 * 2 * 8192 * 24576 * 4096 / 1979e12)
    assert small.ratio == pytest.approx(1.6)
    assert small.extra["TFLOP/s"] == pytest.approx(2 * 64 * 24576 * 4096 / 40e-6 / 1e12)


def test_all_three_products_do_three_times_the_arithmetic() -> None:
    p, times = products(QWEN)[0], {"ours": 100.0, "bf16": 150.0, "overwriting": 140.0}
    row = gemm.all_three_row(p, 8192, times, CEILINGS)
    forward = gemm.forward_row(p, 8192, {"ours": 1.0, "product": 1.0, "bf16": 1.0}, CEILINGS)
    assert row.roofline == pytest.approx(3 * (forward.roofline or math.nan))
    assert row.extra["ratio to it"] == "1.40x"
    summed = gemm.sum_of_all_three([row, row], 8192, 1.45)
    assert (summed.ours, summed.baseline, summed.extra[gemm.OVERWRITING]) == (200.0, 300.0, 280.0)
    assert summed.extra["ratio to it"] == "1.40x"
    assert summed.target and summed.target.met


def test_attention_rates() -> None:
    lengths = attention.packings(8192)["8 x 1024"]
    operations = 4 * 128 * 32 * 8 * 1024 * 1025 // 2
    row = attention.prefill_row(QWEN, "8 x 1024", lengths, {"ours": 216.0, "cudnn": 153.0}, CEILINGS, judged=True)
    assert row.extra["TFLOP/s"] == pytest.approx(operations / 216e-6 / 1e12)
    assert row.target and not row.target.met
    assert row.roofline == pytest.approx(1e6 * operations / BF16_NOMINAL)
    backward = attention.backward_row(QWEN, "8 x 1024", lengths, {"ours": 794.0, "cudnn": 588.0}, CEILINGS)
    assert backward.roofline == pytest.approx(2.5 * (row.roofline or math.nan))


def test_decode_counts_keys_and_values_once() -> None:
    size = 2 * 2 * 256 * 768 * 8 * 128
    fastest = 1e6 * size / 4e12
    row = attention.decode_row(QWEN, (256, 768), fastest / 0.9, CEILINGS, judged=True)
    assert row.roofline == pytest.approx(fastest)
    assert row.extra["% of a copy"] == pytest.approx(90.0)
    assert attention.decode_row(QWEN, (256, 768), fastest / 0.95, CEILINGS, judged=False).target is None
    assert attention.decode_row(QWEN, (16, 8192), fastest, CEILINGS, judged=True).target is None


def test_an_fp8_cache_is_measured_by_its_own_bytes_and_against_bf16() -> None:
    fastest = 1e6 * 2 * 64 * 4096 * 8 * (128 + 4) / 4e12
    row = attention.fp8_row(QWEN, (64, 4096), {"fp8": 2 * fastest, "bf16": 3 * fastest}, CEILINGS, judged=True)
    assert row.roofline == pytest.approx(fastest) and row.extra["TB/s"] == "2.00"
    assert row.ratio == pytest.approx(1.5) and row.target and row.target.met
    slow = attention.fp8_row(QWEN, (64, 4096), {"fp8": 1.0, "bf16": 1.39}, CEILINGS, judged=True)
    assert slow.target and not slow.target.met
    assert attention.fp8_row(QWEN, (256, 768), {"fp8": 1.0, "bf16": 1.0}, CEILINGS, judged=True).target is None


def test_layer_rows() -> None:
    times = {"fp8": 100.0, "bf16": 160.0, "fast": 150.0, "overwriting": 140.0}
    lengths = [1024] * 8
    fp8, bf16 = layer.training_rows(QWEN, "8 x 1024", lengths, times, CEILINGS, 1.41)
    assert fp8.target and fp8.target.met and bf16.target is None
    assert (fp8.ratio, bf16.ratio) == (pytest.approx(1.5), pytest.approx(0.9375))
    attention_part = 3.5 * 4 * 128 * 32 * 8 * 1024 * 1025 / 2 / BF16_NOMINAL
    products_part = 6 * 8192 * layer.weight_count(QWEN) / FP8_NOMINAL
    assert fp8.roofline == pytest.approx(1e6 * (attention_part + products_part))
    assert (bf16.roofline or 0) > 1.5 * (fp8.roofline or 0)
    dear, cheap = (
        layer.exactness_row(QWEN, "", lengths, {"ours": t, "cudnn": 100.0}, CEILINGS, judged=True) for t in (111.0, 109.0)
    )
    assert dear.target and not dear.target.met
    assert cheap.target and cheap.target.met
    decode = layer.decode_row(QWEN, 64, {"fp8": 100.0, "fast": 150.0}, CEILINGS)
    assert decode.roofline == pytest.approx(1e6 * (layer.weight_count(QWEN) + 4 * 64 * 1024 * 1024) / 4e12)


def test_the_longest_kernels_come_first() -> None:
    kernels = {f"void kernel_{i}<[x]>": (6, 30.0 * i) for i in range(25)}
    rows = profiling.kernel_rows(kernels, 3)
    assert len(rows) == profiling.KERNELS + 1
    assert (rows[0].case, rows[0].ours, rows[0].extra["launches"]) == ("kernel_24<[x]>", 240.0, "2")
    assert rows[-1].ours == pytest.approx(10.0 * sum(range(25)))
    assert "kernel_24<[x]>" in text_of(Table("kernels", rows, "time"))
    assert profiling.kernel_rows({}, 3) == []


def test_head_rows() -> None:
    peaks = {"ours": 700_000_000, "torch": 900_000_000}
    row = head.head_row(QWEN, "64 rows", 64, {"ours": 330.0, "torch": 400.0, "drawing": 340.0}, peaks, CEILINGS, False)
    assert row.roofline == pytest.approx(1e6 * 2 * (151936 + 64) * 4096 / 4e12)
    assert row.extra == {"peak, MB": 700.0, "torch peak, MB": 900.0, "with drawing": 340.0}
    backward = head.head_row(QWEN, "", 8192, {"ours": 1.0, "torch": 1.0}, peaks, CEILINGS, True)
    assert backward.roofline == pytest.approx(1e6 * 6 * 8192 * 151936 * 4096 / BF16_NOMINAL)


# Tables and files


def test_a_missed_target_is_shown_with_its_limit() -> None:
    rows = [Row("a", 100.0, 150.0), Row("b", 50.0, 90.0)]
    table = Table("t", [*rows, total("sum", rows, 1.65), total("sum", rows, 1.5)], "FP8", "BF16")
    text = text_of(table)
    assert "≥ 1.65x missed" in text and "≥ 1.5x met" in text and "1.60x" in text
    assert "roofline " in text  # the sum has one, if of nothing
    bare = text_of(Table("t", [Row("a", 1.0)])).split("NVIDIA")[0]
    assert "ratio" not in bare and "target" not in bare and "share" not in bare


def test_limits_hold_from_both_sides() -> None:
    assert at_least(1.0, None, "x") is None
    assert at_least(1.45, 1.45, "x") == Target("≥ 1.45x", 1.45, 1.45) and Target("", 1.45, 1.45).met
    assert Target("", 10.0, 10.0, at_most=True).met
    assert not Target("", 10.1, 10.0, at_most=True).met


def test_caption_says_where_and_how() -> None:
    text = " ".join(text_of(Table("t", [Row("a", 1.0)])).split())
    for word in ("NVIDIA Canned", f"torch {torch.__version__}", "triton", "deep_gemm", META["date"], "jetrl", "4.00 TB/s"):
        assert word in text, word
    assert "measured: copy 4.00 TB/s, BF16 cuBLAS 700 TFLOP/s" in text
    assert "nominal: dense BF16 989, FP8 1979 TFLOP/s" in text


def test_folders_in_the_command_lose_their_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/opt/bin/jetrl", "bench", "gemm", "--json", "/some/where/x.json"])
    assert run.command_line() == "jetrl bench gemm --json x.json"


KEYS = {
    "bench",
    "table",
    "case",
    "ours",
    "baseline",
    "ours_us",
    "baseline_us",
    "ratio",
    "roofline_us",
    "target",
    "met",
    "extra",
}


def test_json_has_meta_and_rows() -> None:
    rows = [Row("a", 100.0, 150.0, 50.0, at_least(1.5, 1.65, "x"), {"TB/s": 3.0}), Row("b", 1.0)]
    tree = json.loads(json.dumps(as_json("gemm", [Table("t", rows, "FP8", "BF16")], META)))
    assert set(tree) == {"meta", "rows"}
    assert set(tree["meta"]) == {"gpu", "versions", "command", "date", "ceilings"}
    assert all(set(row) == KEYS for row in tree["rows"])
    first, second = tree["rows"]
    assert (first["bench"], first["ratio"], first["target"], first["met"]) == ("gemm", 1.5, "≥ 1.65x", False)
    assert (second["baseline_us"], second["ratio"], second["target"], second["met"]) == (None, None, None, None)


def test_a_bench_prints_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command around a bench that measures nothing."""
    seen: dict[str, Any] = {}

    def canned(config: Any, tokens: int, ceilings: Ceilings, judged: bool) -> list[Table]:
        seen[str(tokens)] = (config, judged)
        return [Table("canned", [Row("case", 1.0, 2.0)], "FP8", "BF16")]

    monkeypatch.setitem(run.BENCHES, "head", canned)
    monkeypatch.setattr(run, "require_gpu", lambda: None)
    monkeypatch.setattr(run, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Canned")
    out = Console(file=io.StringIO(), width=128)
    for tokens in (8192, 512):
        run.run_bench("head", "qwen3-8b", tokens, tmp_path / "new" / "head.json", out)
    assert seen == {"8192": (QWEN, True), "512": (QWEN, False)}
    assert "2.00x" in out.file.getvalue()  # type: ignore[attr-defined]
    tree = json.loads((tmp_path / "new" / "head.json").read_text(encoding="utf-8"))
    assert (tree["meta"]["shape"], tree["meta"]["tokens"], tree["rows"][0]["ratio"]) == ("qwen3-8b", 512, 2.0)


# Measuring, as far as it goes without a GPU


def test_sets_outgrow_the_cache() -> None:
    assert timing.rotation(400e6) == 1
    assert timing.rotation(16.8e6) == 12
    assert timing.rotation(1) == timing.MOST_SETS


# What is refused


@no_gpu
@pytest.mark.parametrize("name", ["gemm", "attention", "layer", "head"])
def test_without_a_gpu_it_says_what_is_seen_and_wanted(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(monkeypatch, capsys, "bench", name, "--json", tmp_path / "x.json")
    assert (code, out) == (2, "")
    assert "Hopper GPU" in err and "torch sees no GPU" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--shape", "qwen9"), "shape is 'qwen9'; wanted one of qwen3-8b, llama3.1-8b"),
        (("--shape", "org/name"), "wanted one of"),
        (("--shape", "."), "config.json is missing"),
        (("--tokens", "100"), "--tokens is 100; wanted a multiple of 8"),
        (("--tokens", "8"), "at least 64"),
    ],
)
def test_wrong_arguments(
    words: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(monkeypatch, capsys, "bench", "gemm", *words)
    assert (code, out) == (2, "") and complaint in err


def test_only_the_8b_model_is_judged() -> None:
    row = attention.prefill_row(replace(QWEN, num_heads=8), "1 x 64", [64], {"ours": 1.0, "cudnn": 1.0}, CEILINGS, judged=False)
    assert row.target is None
