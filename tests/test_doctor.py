"""`jetrl doctor` says what runs where, on a CPU and, its questions answered in a GPU's place, on a Hopper GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jetrl import doctor

GpuRows = Callable[..., dict[str, str]]


def test_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = dict(doctor.where_things_run())
    assert rows["device"] == "cpu: torch sees no GPU"
    assert "float64" in rows["FP8 linear forward"] and "DeepGEMM" not in str(rows)


def test_a_gpu_that_cannot_be_used_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    rows = dict(doctor.where_things_run())
    assert rows["device"].startswith("cpu; there is a GPU that cannot be used: the GPU has compute capability 8.9")
    assert "FP8 linear forward" in rows


@pytest.fixture
def gpu_rows(monkeypatch: pytest.MonkeyPatch) -> GpuRows:
    """What a Hopper GPU would be told, with these environment variables."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from jetrl.kernels.hopper import flash, gemm

    def rows(**variables: str) -> dict[str, str]:
        kept = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "DG_JIT_CACHE_DIR")
        for name in ("JETRL_GEMM", "JETRL_ATTENTION_GRAD", "CUDA_HOME", "CUDA_PATH", *kept):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        gemm.preferred.cache_clear()
        flash._library.cache_clear()
        return dict(doctor.where_things_run())

    monkeypatch.setattr(doctor, "missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gemm.DeepGemm, "__init__", lambda self: None)
    monkeypatch.setattr(flash, "_load", lambda: "flash-attn-4 is not installed")
    yield rows  # type: ignore[misc]
    gemm.preferred.cache_clear()
    flash._library.cache_clear()


def test_on_a_hopper_gpu_with_deep_gemm(gpu_rows: GpuRows, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(0o755)
    rows = gpu_rows(JETRL_GEMM="deep_gemm", CUDA_HOME=str(tmp_path), DG_JIT_CACHE_DIR="kept")
    assert rows["device"] == "cuda: NVIDIA H200"
    wanted = "DeepGEMM (JETRL_GEMM chooses); it wants N and K multiples of 16"
    assert rows["FP8 linear, forward and grad_input"].startswith(wanted)
    assert rows["DeepGEMM's compiled kernels"] == f"kept (DG_JIT_CACHE_DIR), compiler {nvcc}"
    assert "DeepGEMM" in rows["BF16 linear forward"] and "DeepGEMM" in rows["lm_head"]
    assert "float64" not in str(rows)


def test_deep_gemm_without_a_compiler(gpu_rows: GpuRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    kept = gpu_rows(JETRL_GEMM="deep_gemm")["DeepGEMM's compiled kernels"]
    assert kept.startswith(str(Path.home() / ".deep_gemm")) and "no nvcc found" in kept


@pytest.mark.parametrize(("chosen", "name"), [("scaled_mm", "torch._scaled_mm"), ("triton", "Triton")])
def test_other_backends_have_no_compiler_to_look_for(gpu_rows: GpuRows, chosen: str, name: str) -> None:
    rows = gpu_rows(JETRL_GEMM=chosen)
    assert rows["FP8 linear, forward and grad_input"].startswith(name) and "DeepGEMM's compiled kernels" not in rows
    assert rows["BF16 linear forward"].startswith("Triton") and "Triton" in rows["lm_head"]


def test_a_backend_that_cannot_be_had_is_said(gpu_rows: GpuRows) -> None:
    assert gpu_rows(JETRL_GEMM="cutlass")["matrix products"].startswith("cannot run: JETRL_GEMM is 'cutlass'; wanted one of")


def test_who_makes_attentions_gradients(gpu_rows: GpuRows, monkeypatch: pytest.MonkeyPatch) -> None:
    name, compiled = "attention, backward", "FlashAttention's compiled kernels"
    rows = gpu_rows(JETRL_GEMM="triton")
    assert rows[name].startswith("Triton, without atomics") and "flash-attn-4 is not installed" in rows[name]
    assert compiled not in rows
    for chosen, why in (("flash", "is flash, but"), ("cudnn", "is 'cudnn'; wanted one of")):
        rows = gpu_rows(JETRL_GEMM="triton", JETRL_ATTENTION_GRAD=chosen)
        assert rows[name].startswith(f"cannot run: JETRL_ATTENTION_GRAD {why}")

    monkeypatch.setattr("jetrl.kernels.hopper.flash._load", lambda: print)
    rows = gpu_rows(JETRL_GEMM="triton")
    assert rows[name].startswith("FlashAttention 4 (JETRL_ATTENTION_GRAD chooses)") and "64 and 128: else Triton" in rows[name]
    assert rows[compiled].startswith("compiled anew by each process")
    keeping = {"JETRL_GEMM": "triton", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
    assert "flash_attention_cute_dsl_cache (" in gpu_rows(**keeping)[compiled]
    rows = gpu_rows(**keeping, FLASH_ATTENTION_CUTE_DSL_CACHE_DIR="kept")
    assert rows[compiled] == "kept (FLASH_ATTENTION_CUTE_DSL_CACHE_DIR)"
    assert gpu_rows(JETRL_GEMM="triton", JETRL_ATTENTION_GRAD="triton")[name].endswith("JETRL_ATTENTION_GRAD is triton")
