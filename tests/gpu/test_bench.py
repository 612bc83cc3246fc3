"""Each bench at tiny sizes: it runs, prints, and writes rows that make sense. Speed is not a test's business."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from jetrl.bench import attention, gemm, head, layer, timing
from jetrl.model.shapes import SHAPES
from tests.tiny_runs import command

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sizes, repeats and compiled kernels."""
    tiny = dataclasses.replace(
        SHAPES["qwen3-8b"],
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=4, head_dim=64,
    )  # fmt: skip
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    monkeypatch.setattr(timing, "REPEATS", 3)
    monkeypatch.setattr(timing, "COPIED", 1 << 24)
    monkeypatch.setattr(timing, "PRODUCT", 1024)
    monkeypatch.setattr(timing, "MOST_SETS", 2)
    monkeypatch.setattr(gemm, "ROWS", (64,))
    monkeypatch.setattr(gemm, "BACKEND_ROWS", ())
    monkeypatch.setattr(attention, "DECODE", ((5, 200),))
    monkeypatch.setattr(layer, "DECODE", (5,))
    monkeypatch.setattr(layer, "CONTEXT", 200)
    monkeypatch.setattr(head, "SAMPLING", (3,))


@pytest.mark.parametrize(("name", "rows"), [("gemm", 19), ("attention", 5), ("layer", 8), ("head", 3)])
def test_runs_and_prints(
    name: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    words = ["bench", name, "--shape", "tiny", "--tokens", 512, "--json", file]
    code, out, err = command(monkeypatch, capsys, *words, *(["--backends"] if name == "gemm" else []))
    assert code == 0, err
    assert "TB/s" in out and "bench.json" in out
    tree = json.loads(file.read_text(encoding="utf-8"))
    assert len(tree["rows"]) >= rows
    for row in tree["rows"]:
        assert row["ours_us"] > 0 and math.isfinite(row["ours_us"]), row
        assert row["target"] is None
    assert tree["meta"]["ceilings"]["copy_tb_s"] > 0


def test_cudnn_computes_what_ours_computes() -> None:
    """The baseline does the same job: packed views, and the sequences' borders where they are."""
    import torch

    from jetrl.bench.baseline import cudnn_attention, cudnn_attention_grad
    from jetrl.kernels.hopper import attention as kernel

    lengths = [128] * 4
    q, dout = timing.noise(512, 8, 64), timing.noise(512, 8, 64)
    k, v = timing.noise(512, 2, 64), timing.noise(512, 2, 64)
    tiles = kernel.make_tiles(lengths, lengths, 8, 2, [0, 128, 256, 384], None, 0, q.device)
    out, lse = kernel.attention(q, k, v, tiles, True)
    assert lse is not None
    theirs, their_lse = cudnn_attention(q, k, v, 4)
    assert float((out.float() - theirs.float()).norm() / out.float().norm()) < 0.01
    mine = kernel.attention_grad(dout, q, k, v, out, lse, tiles)
    for a, b in zip(mine, cudnn_attention_grad(dout, q, k, v, theirs, their_lse, 4), strict=True):
        assert a.shape == b.shape
        assert float((a.float() - b.float()).norm() / a.float().norm()) < 0.02
    torch.cuda.synchronize()
