"""Weight gradients on Hopper: accumulator [N, K] FP32 += dy^T x, both operands in FP8 with a scale every 128 tokens.

Problem: each 128 tokens, every element of a tile is multiplied by two scales and added in FP32. Where that work waits for the
tensor cores, and they for it, half of their time is lost (54% busy in DeepGEMM's kernel, whose tile of 152 columns spills).

Method: one CUDA kernel for all sizes, `grad_weight.cu`: TMA, a ring of four stages, two warpgroups that take turns on the
tensor cores so that one scales while the other multiplies. NVRTC compiles it at first use, in about a second, and no compiler
or header has to be installed. Where cuda-bindings are missing, or N x K is odd, a Triton kernel with the same bits runs.

    acc[n, k] = fma(a_scale[n, g] * b_scale[k, g], dot(a[n, group g], b[k, group g]), acc[n, k])    for g = 0, 1, ..

A tile's sum is added to memory once, so the result depends on neither timing nor the number of programs.

Layout: `tokens` operands of hopper/quant.py: codes [N, 128 G] contiguous, scales [N, G] stored by columns that start at
multiples of 16 bytes. Given up: an odd K in the fast kernel, since it adds two floats at once.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.hopper.choice import chosen
from jetrl.kernels.hopper.driver import checked
from jetrl.kernels.quant import GROUP, Quantized

log = logging.getLogger("jetrl")

_VARIABLE = "JETRL_GRAD_WEIGHT"
_SOURCE = Path(__file__).with_suffix(".cu")
# As in the source.
_ROWS, _COLS, _STAGES, _THREADS = 256, 128, 4, 384
_SHARED = 1024 + _STAGES * (_ROWS + _COLS) * (GROUP + 4) + 16 * _STAGES  # bytes, of which 1024 to align the rest


@cache
def kernel_name() -> str:
    """`cuda` or `triton`: the first where cuda-bindings are installed, or what the variable JETRL_GRAD_WEIGHT says.

    Raises ValueError for another name, or for `cuda` where it cannot run.
    """
    installed = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
    name = chosen(_VARIABLE, ("cuda", "triton"))
    if name is None:
        if not installed:
            log.warning("cuda-bindings are not installed: weight gradients run in Triton, at about half the speed")
        return "cuda" if installed else "triton"
    if name == "cuda" and not installed:
        raise ValueError(f"{_VARIABLE} is cuda, which needs cuda-bindings; pip install 'jetrl[hopper]', or unset it")
    return name


def accumulate(a: Quantized, b: Quantized, accumulator: Tensor) -> None:
    """accumulator [N, K] FP32, contiguous, += a b^T; a [N, T] and b [K, T] in 1x128 groups along T, a multiple of 128.

    The bits are the same in both kernels: FP32, groups in order, one addition to what was there.
    """
    n, k = accumulator.shape
    tokens = a.codes.shape[1]
    assert accumulator.is_contiguous() and accumulator.dtype == torch.float32 and tokens and tokens % GROUP == 0
    assert a.codes.shape == (n, tokens) and b.codes.shape == (k, tokens), (a.codes.shape, b.codes.shape, n, k)
    if kernel_name() == "cuda" and k % 2 == 0:
        _cuda_kernel(accumulator.device.index).launch(a, b, accumulator)
        return
    _accumulate_kernel[(triton.cdiv(n, 128) * triton.cdiv(k, 128),)](
        a.codes, a.scales, b.codes, b.scales, accumulator, n, k, tokens, a.scales.stride(1), b.scales.stride(1),
        num_warps=8, num_stages=3,
    )  # fmt: skip


# ---- the CUDA kernel ---------------------------------------------------------------------------------------------------------


def compile_source() -> bytes:
    """Machine code of `grad_weight.cu` for Hopper. Needs NVRTC, no GPU."""
    from cuda.bindings import nvrtc

    program = checked(nvrtc.nvrtcCreateProgram(_SOURCE.read_bytes(), _SOURCE.name.encode(), 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"-std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    said = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
    checked(nvrtc.nvrtcGetProgramLog(program, said))
    assert not int(status), said.decode()
    code = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


@dataclass(slots=True, frozen=True)
class _CudaKernel:
    """The kernel loaded on one device."""

    context: Any  # the device's
    function: Any
    programs: int  # one an SM

    def launch(self, a: Quantized, b: Quantized, accumulator: Tensor) -> None:
        from cuda.bindings import driver

        if not int(checked(driver.cuCtxGetCurrent())):  # a thread that has not called CUDA yet
            checked(driver.cuCtxSetCurrent(self.context))
        (n, k), groups = accumulator.shape, a.codes.shape[1] // GROUP
        maps = (_codes_map(a, _ROWS), _codes_map(b, _COLS), _scales_map(a, _ROWS), _scales_map(b, _COLS))
        values = (*maps, accumulator.data_ptr(), n, k, groups)
        types = (None, None, None, None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
        programs = min(self.programs, triton.cdiv(n, _ROWS) * triton.cdiv(k, _COLS))
        stream = torch.cuda.current_stream(accumulator.device).cuda_stream
        with torch.cuda.device(accumulator.device):
            checked(driver.cuLaunchKernel(self.function, programs, 1, 1, _THREADS, 1, 1, _SHARED, stream, (values, types), 0))


@cache
def _cuda_kernel(device: int) -> _CudaKernel:
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the device's context the current one
        module = checked(driver.cuModuleLoadData(compile_source()))
        function = checked(driver.cuModuleGetFunction(module, b"grad_weight"))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, limit, _SHARED))
        context = checked(driver.cuCtxGetCurrent())
    return _CudaKernel(context, function, torch.cuda.get_device_properties(device).multi_processor_count)


def _codes_map(x: Quantized, rows: int) -> Any:
    """How TMA reads boxes [rows, 128] of x's codes [N, T]."""
    n, tokens = x.codes.shape
    return _tensor_map(x.codes, (tokens, n), (GROUP, rows), tokens)


def _scales_map(x: Quantized, rows: int) -> Any:
    """How TMA reads boxes [1, rows] of x's scales, seen as [groups, N]."""
    distance = x.scales.stride(1)
    return _tensor_map(x.scales, (distance, x.scales.shape[1]), (rows, 1), distance)


def _tensor_map(x: Tensor, shape: tuple[int, int], box: tuple[int, int], distance: int) -> Any:
    """A CUtensorMap, sizes with the inner dimension first. Codes take the 128-byte swizzle that wgmma wants."""
    from cuda.bindings import driver

    is_codes = x.element_size() == 1
    kind, swizzle = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    return checked(
        driver.cuTensorMapEncodeTiled(
            kind.CU_TENSOR_MAP_DATA_TYPE_UINT8 if is_codes else kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            2,
            x.data_ptr(),
            [u64(size) for size in shape],
            [u64(distance * x.element_size())],
            [u32(size) for size in box],
            [u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle.CU_TENSOR_MAP_SWIZZLE_128B if is_codes else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


# ---- the Triton kernel -------------------------------------------------------------------------------------------------------


@triton.jit
def _accumulate_kernel(
    a,  # E4M3 [n, t] contiguous
    a_scales,  # FP32 [n, t / 128], stored by columns: strides (1, a_scales_stride)
    b,  # E4M3 [k, t] contiguous
    b_scales,  # FP32 [k, t / 128], stored by columns: strides (1, b_scales_stride)
    accumulator,  # FP32 [n, k] contiguous, added to
    n,
    k,
    t,
    a_scales_stride,
    b_scales_stride,
):
    """One tile [128, 128] of accumulator += a b^T."""
    column_blocks = tl.cdiv(k, 128)
    row = tl.program_id(0) // column_blocks * 128 + tl.arange(0, 128)
    column, inner = tl.program_id(0) % column_blocks * 128 + tl.arange(0, 128), tl.arange(0, 128)
    a_row, b_row = a + row.to(tl.int64)[:, None] * t, b + column.to(tl.int64)[:, None] * t
    acc = tl.zeros((128, 128), tl.float32)
    for block in range(t // 128):
        at = block * 128 + inner
        left = tl.load(a_row + at[None, :], mask=(row < n)[:, None], other=0.0)
        right = tl.load(b_row + at[None, :], mask=(column < k)[:, None], other=0.0)
        left_scale = tl.load(a_scales + block.to(tl.int64) * a_scales_stride + row, mask=row < n, other=0.0)
        right_scale = tl.load(b_scales + block.to(tl.int64) * b_scales_stride + column, mask=column < k, other=0.0)
        acc += tl.dot(left, tl.trans(right)) * (left_scale[:, None] * right_scale[None, :])
    to = accumulator + row.to(tl.int64)[:, None] * k + column[None, :]
    inside = (row < n)[:, None] & (column < k)[None, :]
    tl.store(to, tl.load(to, mask=inside, other=0.0) + acc, mask=inside)
