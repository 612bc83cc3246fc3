"""Matrix products on a GPU: against float64, rows independent of M, and what the three backends promise one another."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from jetrl.kernels import quant as reference
from jetrl.kernels.quant import Quantized

pytest.importorskip("triton")
from jetrl.kernels.hopper import gemm, quant

pytestmark = pytest.mark.gpu

BACKENDS = [*(["deep_gemm"] if importlib.util.find_spec("deep_gemm") else []), "scaled_mm", "triton"]
# N x K of real layers: 8B (24576, which DeepGEMM gets more rows for, with a short K), Qwen2.5-7B, SmolLM2 (576, 192 and 1536
# are not multiples of 128), and odd ones for Triton
SHAPES = [(6144, 4096), (24576, 512), (4096, 12288), (3584, 18944), (960, 576), (576, 1536), (3072, 576)]
ODD = [(1, 1), (130, 257), (200, 72)]
ROWS = [1, 2, 3, 7, 16, 31, 63, 64, 65, 127, 128, 129, 255, 513, 1000, 2047, 4097]


def noise(rows: int, cols: int, seed: int = 0, std: float = 1.0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator, device="cuda") * std
    x[:: max(1, rows // 3), :: max(1, cols // 3)] *= 50.0  # outliers
    x[rows // 2, : cols // 2] = 0.0
    return x.bfloat16()


def values(q: Quantized, cols: int) -> Tensor:
    return q.codes.double() * q.scales.double().repeat_interleave(128, 1)[:, :cols]


def weight_values(w: Tensor) -> Tensor:
    return reference.dequantize_weight(reference.quantize_weight(w.cpu())).cuda()


def close(seen: Tensor, wanted: Tensor, limit: float) -> None:
    distance = float((seen.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
    assert distance < limit, distance


def backend(name: str) -> gemm.Backend:
    return gemm._BACKENDS[name]()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES + ODD)
def test_fp8_products_against_float64(name: str, shape: tuple[int, int]) -> None:
    n, k = shape
    if not backend(name).fits(n, k):
        pytest.skip(f"{name} leaves {n} x {k} to Triton")
    w = noise(n, k, 1, k**-0.5)
    codes = quant.quantize_weight(w, (n,))
    for m in (1, 65, 300):
        x = quant.quantize_rows(noise(m, k, m))
        close(backend(name).fp8(x, codes.codes, codes.scales), values(x, k) @ weight_values(w).t(), 3e-3)
        if not backend(name).fits(k, n):
            continue
        dy = quant.quantize_rows(noise(m, n, m))
        close(backend(name).fp8(dy, codes.codes_t, codes.scales_t), values(dy, n) @ weight_values(w), 3e-3)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_rows_do_not_depend_on_their_number(name: str, shape: tuple[int, int]) -> None:
    n, k = shape
    if not backend(name).fits(n, k):
        pytest.skip(f"{name} leaves {n} x {k} to Triton")
    codes, x = quant.quantize_weight(noise(n, k, 1), (n,)), noise(max(ROWS), k)
    whole = backend(name).fp8(quant.quantize_rows(x), codes.codes, codes.scales)
    for m in ROWS:
        first = m * 37 % (max(ROWS) - m + 1)
        rows = backend(name).fp8(quant.quantize_rows(x[first : first + m]), codes.codes, codes.scales)
        assert torch.equal(rows, whole[first : first + m]), m


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (960, 576), (49152, 576)])
def test_bf16_rows_do_not_depend_on_their_number(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = shape
    w, x = noise(n, k, 1, k**-0.5), noise(max(ROWS), k)
    whole = backend(name).bf16(x, w, dtype)
    close(whole[:300], x[:300].double() @ w.double().t(), 3e-3 if dtype == torch.bfloat16 else 3e-5)
    for m in ROWS:
        first = m * 37 % (max(ROWS) - m + 1)
        assert torch.equal(backend(name).bf16(x[first : first + m], w, dtype), whole[first : first + m]), m


@pytest.mark.parametrize("shape", SHAPES)
def test_backends_agree_to_the_bit(shape: tuple[int, int]) -> None:
    n, k = shape
    codes = quant.quantize_weight(noise(n, k, 1), (n,))
    fits = {(name, *pair): backend(name).fits(*pair) for name in BACKENDS for pair in ((n, k), (k, n))}
    for m in (1, 64, 130, 2048):
        x = quant.quantize_rows(noise(m, k, m))
        dy = quant.quantize_rows(noise(m, n, m))
        first, *others = (backend(name).fp8(x, codes.codes, codes.scales) for name in BACKENDS if fits[name, n, k])
        assert all(torch.equal(first, other) for other in others), m
        first, *others = (backend(name).fp8(dy, codes.codes_t, codes.scales_t) for name in BACKENDS if fits[name, k, n])
        assert all(torch.equal(first, other) for other in others), m


def test_the_backend_is_chosen_by_sizes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in gemm._BACKENDS.items():
        if name not in BACKENDS:
            continue
        monkeypatch.setenv("JETRL_GEMM", name)
        gemm.preferred.cache_clear()
        gemm.backend_for.cache_clear()
        assert isinstance(gemm.backend_for(4096, 4096), kind)
        assert isinstance(gemm.backend_for(4096, 577), gemm.TritonGemm)
    monkeypatch.setenv("JETRL_GEMM", "cutlass")
    gemm.preferred.cache_clear()
    with pytest.raises(ValueError, match="cutlass"):
        gemm.preferred()
    monkeypatch.delenv("JETRL_GEMM")
    gemm.preferred.cache_clear()
    gemm.backend_for.cache_clear()


def test_a_product_of_more_than_2_to_the_31_elements() -> None:
    """Logits of 16,400 rows over 131,072 tokens: the last rows lie beyond 32 bits."""
    x, w = noise(16400, 64), noise(131072, 64, 1)
    whole = gemm.TritonGemm().bf16(x, w, torch.bfloat16)
    assert torch.equal(whole[-5:], gemm.TritonGemm().bf16(x[-5:], w, torch.bfloat16))
    if "deep_gemm" in BACKENDS:
        whole = gemm.DeepGemm().bf16(x, w, torch.bfloat16)
        assert torch.equal(whole[-5:], gemm.DeepGemm().bf16(x[-5:], w, torch.bfloat16))
