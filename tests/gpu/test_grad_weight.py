"""Weight gradients on a GPU: against float64, and the same bits from the CUDA kernel and from Triton's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.kernels import quant as reference
from jetrl.kernels.quant import Quantized, token_groups

pytest.importorskip("triton")
from jetrl.kernels.hopper import grad_weight, quant

pytestmark = pytest.mark.gpu

# Part of one tile, tiles that end within N and K, more tiles than an H200 has multiprocessors; no multiple of anything.
SHAPES = [(16, 16), (1, 2), (130, 258), (576, 192), (1024, 576), (3300, 6146)]
LIMIT = 1e-4  # of the error: the tensor cores add FP8 products with some 14 bits
LENGTHS = [[1], [300, 1, 128, 77], [129] * 9, [4096, 5]]  # 1, 6, 18 and 33 groups: the ring of stages ends anywhere


def noise(rows: int, cols: int, seed: int) -> Tensor:
    """With outliers, zero tokens and zero columns."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator, device="cuda")
    x[:: max(1, rows // 3), :: max(1, cols // 3)] *= 1000.0
    x[rows // 2 : rows // 2 + rows // 3] = 0.0
    x[:, cols // 2 :: 7] = 0.0
    return x.bfloat16()


def operands(n: int, k: int, lengths: list[int]) -> tuple[Quantized, Quantized, Tensor]:
    """Both operands, and their product in float64."""
    tokens = sum(lengths)
    dy, x = noise(tokens, n, 1), noise(tokens, k, 2)
    here = token_groups(lengths)
    left, right = (reference.dequantize_tokens(reference.quantize_tokens(t.cpu(), here), here).cuda() for t in (dy, x))
    groups = token_groups(lengths, "cuda")
    return quant.quantize_tokens(dy, groups), quant.quantize_tokens(x, groups), left.t() @ right


def run(monkeypatch: pytest.MonkeyPatch, kernel: str, a: Quantized, b: Quantized, accumulator: Tensor) -> Tensor:
    monkeypatch.setenv("JETRL_GRAD_WEIGHT", kernel)
    grad_weight.kernel_name.cache_clear()
    grad_weight.accumulate(a, b, accumulator)
    monkeypatch.undo()
    grad_weight.kernel_name.cache_clear()
    return accumulator


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{sum(lengths)} tokens")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_kernels_agree_to_the_bit_and_with_float64(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], lengths: list[int]
) -> None:
    a, b, product = operands(*shape, lengths)
    start = noise(*shape, 3).float()
    cuda, triton, again = (run(monkeypatch, name, a, b, start.clone()) for name in ("cuda", "triton", "cuda"))
    assert torch.equal(cuda, triton)
    assert torch.equal(cuda, again)
    wanted = product + start
    assert float((cuda - wanted).norm() / wanted.norm()) < LIMIT
    run(monkeypatch, "cuda", a, b, cuda)
    wanted += product
    assert float((cuda - wanted).norm() / wanted.norm()) < LIMIT


def test_an_odd_k_runs_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, product = operands(200, 71, [300])
    seen = run(monkeypatch, "cuda", a, b, torch.zeros(200, 71, device="cuda"))
    assert float((seen - product).norm() / product.norm()) < LIMIT


def test_nothing_beyond_the_accumulator_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = operands(130, 258, [300])
    around = torch.full((132, 258), 7.0, device="cuda")
    run(monkeypatch, "cuda", a, b, around[1:131])
    assert torch.equal(around[[0, 131]], torch.full((2, 258), 7.0, device="cuda"))


def test_it_runs_in_a_cuda_graph_and_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    a, b, _ = operands(576, 192, [300])
    wanted = run(monkeypatch, "cuda", a, b, torch.zeros(576, 192, device="cuda"))
    captured, threaded = torch.zeros(2, 576, 192, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grad_weight.accumulate(a, b, captured)
    graph.replay()
    thread = threading.Thread(target=grad_weight.accumulate, args=(a, b, threaded))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(captured, wanted)
    assert torch.equal(threaded, wanted)
