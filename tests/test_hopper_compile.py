"""The matrix products of the GPU kernels, compiled for Hopper without a GPU: `wgmma` in every variant, and no spilled register.

A row's bits are the same in decode and in training only if both use one instruction (docs/precision.md). Which one a tile
gets is the compiler's choice, so it is checked in what it made.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from jetrl.kernels.hopper import (  # noqa: E402
    attention,
    attention_fp8,
    gemm,
    grad_weight,
    heads,
    norm,
    prefill,
    quant,
)
from jetrl.kernels.ops import Heads  # noqa: E402
from jetrl.kernels.quant import GROUP  # noqa: E402

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
POINTERS = {
    "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "out_ptr": "*bf16", "lse_ptr": "*fp32", "sequence_ptr": "*i32",
    "token_ptr": "*i32", "query_start_ptr": "*i32", "query_length_ptr": "*i32", "context_ptr": "*i32", "key_start_ptr": "*i64",
    "table_ptr": "*i32", "tokens": "i32", "table_stride": "i32", "c": "fp32", "scale": "fp32", "dout_ptr": "*bf16",
    "delta_ptr": "*fp32", "lse2_ptr": "*fp32", "dk_ptr": "*bf16", "dv_ptr": "*bf16", "dq_ptr": "*bf16",
    "key_sequence_ptr": "*i32", "key_token_ptr": "*i32", "work_ptr": "*i32", "last": "i32", "all_tokens": "i32",
}  # fmt: skip
HEADS = {"8B": (8, 4, 128), "Qwen2.5-7B": (4, 7, 128), "SmolLM2": (3, 3, 64)}  # key heads, query heads a key head, dimension


def compile_for_hopper(kernel: Any, types: dict[str, str], fixed: dict[str, Any], **options: Any) -> str:
    """PTX of a kernel whose pointers and sizes are multiples of 16, as real ones are."""
    signature = {name: "constexpr" if name in fixed else types[name] for name in kernel.arg_names}
    places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    aligned = {places[n]: [["tt.divisibility", 16]] for n, kind in signature.items() if kind in ("i32",) or kind[0] == "*"}
    source = ASTSource(kernel, signature, {places[n]: value for n, value in fixed.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def spilled_bytes(ptx: str, folder: Path, serial: bool = False) -> int:
    """`serial`: whether `wgmma` may wait for itself, which costs speed and no bit."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    command = [str(PTXAS), "-v", "--gpu-name=sm_90a", str(file), "-o", "/dev/null"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert serial or "serializ" not in report, report
    found = re.search(r"(\d+) bytes spill stores", report)
    assert found, report
    return int(found[1])


def require_wgmma(ptx: str) -> None:
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx


@pytest.mark.parametrize("block_size", [0, 16, 64])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_uses_wgmma_in_every_phase(heads: str, block_size: int, tmp_path: Path) -> None:
    """Packed keys (0), blocks that hold whole tiles of keys, and blocks that do not."""
    kv_heads, group, dim = HEADS[heads]
    launch = attention.DECODE if block_size else attention.PREFILL
    fixed = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "BLOCK_SIZE": block_size, "ROWS": launch.rows}
    fixed |= {"KEYS": attention.KEYS, "SKIP": not block_size, "WANT_LSE": not block_size}
    fixed |= {"key_start_ptr": None, "lse_ptr": None} if block_size else {"table_ptr": None}
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": False}
    ptx = compile_for_hopper(attention._forward_kernel, POINTERS, fixed, **options)
    require_wgmma(ptx)
    assert spilled_bytes(ptx, tmp_path) == 0


@pytest.mark.parametrize(("heads", "want_lse"), [("8B", True), ("SmolLM2", False)])
def test_prefill_uses_wgmma_and_forms_the_softmax_meanwhile(heads: str, want_lse: bool, tmp_path: Path) -> None:
    kv_heads, group, dim = HEADS[heads]
    fixed: dict[str, Any] = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim} | ({} if want_lse else {"lse_ptr": None})
    names = prefill.prefill_kernel.arg_names
    box = f"tensordesc<bf16[64, {dim}],{prefill._box(dim)!r}>"
    types = {**POINTERS, "k_desc": box, "v_desc": box}
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] == "*"}
    source = GluonASTSource(prefill.prefill_kernel, signature, {(names.index(n),): v for n, v in fixed.items()}, aligned)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    require_wgmma(ptx)
    assert prefill.KEYS.value == attention.KEYS
    # Two warpgroups with a first and a steady step each: s is made of the products that decode and chunks use.
    assert len(re.findall(r"m64n64k16.*bf16", ptx)) >= 2 * 2 * dim // 16
    assert spilled_bytes(ptx, tmp_path) == 0
    cubin = tmp_path / "kernel.cubin"
    subprocess.run([PTXAS, "--gpu-name=sm_90a", tmp_path / "kernel.ptx", "-o", cubin], check=True)
    code = subprocess.run([PTXAS.with_name("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
    # Between the wait for s and the wait for o lies a row's softmax: 32 p and 2 factors a thread.
    meanwhile = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1(.*?)WARPGROUP\.DEPBAR\.LE gsb0, 0x0", code, re.S)
    assert [part.count("MUFU.EX2") for part in meanwhile] == [34, 34]


@pytest.mark.parametrize("heads", HEADS)
def test_the_gradients_of_attention_use_wgmma(heads: str) -> None:
    kv_heads, group, dim = HEADS[heads]
    fixed = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim}
    keys, queries = attention.GRAD_KEYS, attention.GRAD_QUERIES
    for kernel, launch, tile in (
        (attention._grad_keys_kernel, keys, {"TILE": attention.GRAD_KEY_TILE}),
        (attention._grad_queries_kernel, queries, {"KEYS": attention.KEYS}),
    ):
        sizes = {**fixed, **tile, "ROWS": launch.rows}
        require_wgmma(compile_for_hopper(kernel, POINTERS, sizes, num_warps=launch.warps, num_stages=launch.stages))


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp32 out", "accumulate"])
def test_products_use_wgmma(kind: str, rows: int, tmp_path: Path) -> None:
    sizes = dict.fromkeys(("m", "n", "k", "t", "x_stride", "x_scales_stride", "w_scales_stride"), "i32")
    sizes |= dict.fromkeys(("a_scales_stride", "b_scales_stride"), "i32")
    operand = "*bf16" if kind in ("bf16", "fp32 out") else "*fp8e4nv"
    types = sizes | dict.fromkeys(("x", "w", "a", "b"), operand) | {"y": "*fp32" if kind == "fp32 out" else "*bf16"}
    types |= dict.fromkeys(("x_scales", "w_scales", "a_scales", "b_scales", "accumulator"), "*fp32")
    kernel = {"fp8": gemm._fp8_kernel, "accumulate": grad_weight._accumulate_kernel}.get(kind, gemm._bf16_kernel)
    if kind == "accumulate" and rows == 64:
        pytest.skip("weight gradients have tiles of 128 rows only")
    fixed = {} if kind == "accumulate" else {"ROWS": rows}
    ptx = compile_for_hopper(kernel, types, fixed, num_warps=4 if rows == 64 else 8, num_stages=3)
    require_wgmma(ptx)
    assert spilled_bytes(ptx, tmp_path, serial=True) == 0  # what is left where DeepGEMM cannot run need not be fast


def test_the_cuda_kernel_and_its_launch_have_the_same_sizes() -> None:
    source = grad_weight._SOURCE.read_text(encoding="utf-8")
    sizes = {"ROWS": grad_weight._ROWS, "COLS": grad_weight._COLS, "GROUP": GROUP, "STAGES": grad_weight._STAGES}
    for name, value in sizes.items():
        assert re.search(rf"\b{name} = (\d+)[,;]", source)[1] == str(value), name  # type: ignore[index]
    consumers = re.search(r"CONSUMERS = (\d+);", source)
    assert consumers and int(consumers[1]) + 128 == grad_weight._THREADS


def test_the_cuda_kernel_compiles_without_spills(tmp_path: Path) -> None:
    """Where NVRTC is installed, which it is with a CUDA build of torch."""
    pytest.importorskip("cuda.bindings.nvrtc")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(grad_weight.compile_source())
    usage = subprocess.run([PTXAS.with_name("cuobjdump"), "-res-usage", cubin], capture_output=True, text=True, check=True)
    assert "STACK:0 " in usage.stdout and "LOCAL:0 " in usage.stdout, usage.stdout


# --- Kernels that start while the one before them runs


def early_starters() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Every kernel that is launched with `overlap.OPTIONS`, with types of its arguments and its compile-time sizes."""
    norm_types = {"x_ptr": "*bf16", "delta_ptr": "*bf16", "weight_ptr": "*bf16", "sum_ptr": "*bf16", "y_ptr": "*fp8e4nv"}
    norm_types |= {"scales_ptr": "*fp32", "inverse_ptr": "*fp32", "eps": "fp32", "scale_stride": "i32", "gate_up_ptr": "*bf16"}
    norm_types |= {"width": "i32", "programs_per_row": "i32"}
    row_types = {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32"}
    row_types |= dict.fromkeys(("rows", "cols", "stored_cols", "x_stride", "codes_stride", "scales_stride"), "i32")
    head_types = {n: "*bf16" if n.endswith("_ptr") else "i32" for n in heads._split_heads.arg_names} | {"eps": "fp32"}
    head_types |= {n: "*fp8e4nv" for n in head_types if "codes" in n} | {n: "*fp32" for n in head_types if "scales" in n}
    head_types |= {"positions_ptr": "*i64", "rows_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    head_sizes = heads._tile(Heads(32, 8, 128, 1e-6, torch.empty(0), torch.empty(0)))[0] | {
        "HAS_BIAS": True,
        "HAS_NORM": True,
        "HAS_ROWS": True,
    }
    codes = {"q_ptr": "*fp8e4nv", "k_ptr": "*fp8e4nv", "v_ptr": "*fp8e4nv", "out_ptr": "*fp8e4nv", "scale_stride": "i32"}
    codes = POINTERS | codes | dict.fromkeys(("q_scale_ptr", "k_scale_ptr", "v_scale_ptr", "scales_ptr"), "*fp32")
    tile = {"KV_HEADS": 8, "GROUP": 4, "DIM": 128, "BLOCK_SIZE": 64, "ROWS": 64, "KEYS": 64, "WANT_LSE": False, "lse_ptr": None}
    return [
        (norm._add_rms_norm, norm_types, {"WIDTH": 4096, "GROUPS": 32, "HAS_DELTA": True, "QUANTIZE": True}),
        (norm._silu_mul_rows, norm_types, {"GROUPS": 16, "QUANTIZE": True}),
        (quant._rows_kernel, row_types, {"ROWS": 32}),
        (heads._split_heads, head_types, head_sizes | {"BLOCK_SIZE": 64, "KEEP": False}),
        (heads._split_heads, head_types, head_sizes | {"BLOCK_SIZE": 0, "KEEP": True}),
        (attention._forward_kernel, POINTERS, tile | {"SKIP": False, "key_start_ptr": None}),
        (attention_fp8._forward_kernel, codes, tile | {"ONE_TOKEN": True, "CODES": True}),
    ]


@pytest.mark.parametrize("which", range(7))
def test_a_kernel_that_starts_early_waits_before_it_touches_memory(which: int) -> None:
    kernel, types, fixed = early_starters()[which]
    ptx = compile_for_hopper(kernel, types, fixed, num_warps=4, enable_fp_fusion=False, launch_pdl=True)
    touches = re.search(r"(ld|st|cp\.async\S*|prefetch|red|atom)\.\S*global", ptx)
    assert touches and ptx.count("griddepcontrol.wait;") == ptx.count("griddepcontrol.launch_dependents;") == 1
    assert ptx.index("griddepcontrol.wait;") < ptx.index("griddepcontrol.launch_dependents;") < touches.start()
    body = ptx[ptx.index("{") : ptx.index("griddepcontrol.wait;")]
    assert not re.search(r"\bbra\b|\bret;", body)  # every program waits


def test_every_kernel_that_starts_early_is_tried() -> None:
    launches = sum(file.read_text().count("**OPTIONS") for file in Path(norm.__file__).parent.glob("*.py"))
    assert launches == len({kernel for kernel, _, _ in early_starters()})
