"""What this machine has and what will run where."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import torch

from jetrl.kernels.select import missing

_PACKAGES = [
    "jetrl",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "triton",
    "sgl-deep-gemm",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "torchao",
    "math-verify",
    "reasoning-gym",
    "gguf",
    "pyarrow",
    "datasets",
    "tensorboard",
    "wandb",
    "trackio",
    "ray",
    "vllm",
]


def machine() -> list[tuple[str, str]]:
    """Processor, memory and accelerator."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    rows = [
        ("system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
        (
            "CPU",
            f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads, {torch.backends.cpu.get_cpu_capability()}",
        ),
        ("memory", f"{memory:.1f} GB"),
    ]
    if not torch.cuda.is_available():
        return [*rows, ("GPU", "none that torch sees")]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        rows.append((f"GPU {i}", f"{p.name}, compute {p.major}.{p.minor}, {p.total_memory / 1e9:.0f} GB"))
    return rows


def packages() -> list[tuple[str, str]]:
    """Versions of what jetrl uses, optional ones included."""
    rows: list[tuple[str, str]] = []
    for name in _PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def where_things_run() -> list[tuple[str, str]]:
    """Which implementation each operator uses with `device: auto` on this machine, and why."""
    why_not = missing()
    if not why_not:
        return [("device", f"cuda: {torch.cuda.get_device_name()}"), *_on_a_gpu()]
    seen = torch.cuda.is_available()
    return [("device", f"cpu; there is a GPU that cannot be used: {why_not}" if seen else f"cpu: {why_not}"), *_on_a_cpu()]


def _on_a_cpu() -> list[tuple[str, str]]:
    return [
        ("FP8 linear forward", "float64 block products of E4M3 codes, exact"),
        ("FP8 linear gradients", "float64 products of dequantised values"),
        ("BF16 linear, attention, lm_head", "float64 on grids where every sum is exact"),
        ("norms, rotary, SiLU-mul", "torch, one rounding to BF16"),
        ("sampling", "integer inversion with a counter-based generator a sample"),
    ]


def _on_a_gpu() -> list[tuple[str, str]]:
    from jetrl.kernels.hopper import gemm

    try:
        backend = gemm.preferred()
    except ValueError as error:
        return [("matrix products", f"cannot run: {error}")]
    deep, own = (backend.name == kind.name for kind in (gemm.DeepGemm, gemm.TritonGemm))
    others = "" if own else f"; it wants {backend.wants}: else Triton"
    bf16 = backend.name if deep else gemm.TritonGemm.name
    return [
        ("FP8 linear, forward and grad_input", f"{backend.name} (JETRL_GEMM chooses){others}"),
        *([("DeepGEMM's compiled kernels", _deep_gemm())] if deep else []),
        ("FP8 linear, grad_weight", _grad_weight()),
        ("BF16 linear forward", f"{bf16}, rows independent of the batch"),
        ("attention", "two Triton kernels, for packed sequences and for paged keys, with the same bits; one for kv_cache=fp8"),
        *_attention_grad(),
        ("norms, rotary, SiLU-mul, quantiser", "Triton, fused with each other"),
        ("lm_head", f"BF16 product with FP32 logits: {bf16}; log-probabilities in Triton"),
        ("sampling", "Triton, integer inversion with a counter-based generator a sample"),
        ("decode steps", "CUDA graphs, captured at first use for each size of batch"),
        ("KV cache during training", _arena()),
    ]


def _arena() -> str:
    """Whether training gets the cache's memory."""
    from jetrl.kernels.hopper import arena

    return "gives its memory back" if arena.gives_back() else "keeps its memory: cuda-bindings is not installed"


def _grad_weight() -> str:
    """Which kernel makes the weight gradients."""
    from jetrl.kernels.hopper import grad_weight

    try:
        name = grad_weight.kernel_name()
    except ValueError as error:
        return str(error)
    kernel = "a CUDA kernel, compiled by NVRTC" if name == "cuda" else "Triton; cuda-bindings would bring a faster kernel"
    return f"{kernel} (JETRL_GRAD_WEIGHT chooses)"


def _attention_grad() -> list[tuple[str, str]]:
    """Whose kernels make attention's gradients, and where FlashAttention keeps what it compiles."""
    from jetrl.kernels.hopper import flash

    try:
        why_not = flash.missing()
    except ValueError as error:
        return [("attention, backward", f"cannot run: {error}")]
    if why_not:
        return [("attention, backward", f"Triton, without atomics: the same bits in each run; {why_not}")]
    dims = " and ".join(map(str, flash.DIMS))
    return [
        (
            "attention, backward",
            "FlashAttention 4 (JETRL_ATTENTION_GRAD chooses), additions in order: the same bits in each run; "
            f"it is used for head dimensions {dims}: else Triton",
        ),
        ("FlashAttention's compiled kernels", _flash()),
    ]


def _flash() -> str:
    """The library reads both variables when it is imported; without the first it keeps nothing."""
    if os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") != "1":
        return "compiled anew by each process; FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps them"
    default = Path(tempfile.gettempdir()) / getpass.getuser() / "flash_attention_cute_dsl_cache"
    return f"{os.environ.get('FLASH_ATTENTION_CUTE_DSL_CACHE_DIR') or default} (FLASH_ATTENTION_CUTE_DSL_CACHE_DIR)"


def _deep_gemm() -> str:
    """Where DeepGEMM keeps what it compiles, and the compiler it needs for a shape that is not there yet."""
    folder = os.environ.get("DG_JIT_CACHE_DIR") or str(Path.home() / ".deep_gemm")
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ] + ["/usr/local/cuda"]
    nvcc = next(filter(None, (shutil.which("nvcc", path=f"{home}/bin") for home in homes)), shutil.which("nvcc"))
    compiler = f"compiler {nvcc}" if nvcc else "no nvcc found: new shapes cannot be compiled; set CUDA_HOME"
    return f"{folder} (DG_JIT_CACHE_DIR), {compiler}"
