"""Matrix products on Hopper: block-scaled FP8 through `wgmma`, and BF16 whose rows do not depend on the batch.

    forward        x  [M, K] 1x128    W   [N, K] 128x128      y  [M, N] BF16
    grad_input     dy [M, N] 1x128    W^T [K, N] 128x128      dx [M, K] BF16
    bf16           x  [M, K] BF16     W   [N, K] BF16         y  [M, N] BF16 or FP32

Problem: the row of a product must be the same bits for 1 row and for 8,192. Libraries choose their split of K by M.

Method: three backends, one chosen at start for each pair (N, K), never by M. In all of them a tile owns its outputs, walks K in
blocks in order, and promotes each 128-wide FP8 block to FP32 with both scales:

    acc = fma(dot(x_codes[m, b], w_codes[n, b]), x_scale[m, b] * w_scale[n, b], acc)

    DeepGemm     the fastest, where sgl-deep-gemm is installed and TMA can address the rows: N and K multiples of 16
    ScaledMm     torch's block-scaled product (cuBLAS), for shapes whose rows pass a trial
    TritonGemm   everything else, any size; and BF16 where there is no DeepGEMM

FP8 products are the same bits in all three. BF16 products agree to rounding; within one backend each is deterministic and its
rows are independent. Weight gradients, whose sum runs over tokens, are hopper/grad_weight.py's.

Layout: operands are `Quantized` as hopper/quant.py makes them. Given up: FP8 speed in TritonGemm (about half of DeepGEMM).
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.hopper.choice import chosen
from jetrl.kernels.hopper.quant import empty_rows
from jetrl.kernels.quant import E4M3, Quantized

log = logging.getLogger("jetrl")

_VARIABLE = "JETRL_GEMM"
_MANY_ROWS = 4096  # from here on DeepGEMM's kernels are compiled for N and K
# For 65 to 128 rows and these N DeepGEMM takes tiles of 128 x 192, since all then run at once. They are slow: 88 us for 24576 x
# 4096 on an H200, where 64 rows take 28 and 192 rows 44. So it is given more rows.
_SLOW_ROWS, _SLOW_N, _ROWS_INSTEAD = range(65, 129), range(128 * 132 + 1, 192 * 132 + 1), 192


class Backend(Protocol):
    """The products of the table above."""

    name: str
    wants: str  # what `fits` asks for

    def fits(self, n: int, k: int) -> bool:
        """Whether a product with N = n and K = k can run, for every M."""
        ...

    def fp8(self, x: Quantized, w: Tensor, w_scales: Tensor) -> Tensor:
        """x [M, K] in 1x128, w [N, K] codes in 128x128: BF16 [M, N]."""
        ...

    def bf16(self, x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        """x [M, K], w [N, K], BF16: BF16 or FP32 [M, N], rows independent of M."""
        ...


class DeepGemm:
    """Kernels are compiled for each tile shape at first use and kept in DG_JIT_CACHE_DIR; for many rows, for N and K too.

    Sizes known to the compiler change no bit (tested), save 1 to 10% of the time, and cost a compilation for each shape of a
    layer: worth it in training, where a microbatch has thousands of rows.
    """

    name = "DeepGEMM"
    wants = "N and K multiples of 16"

    def __init__(self) -> None:
        import deep_gemm

        deep_gemm.set_pdl(True)  # see hopper/overlap.py
        self._library = deep_gemm

    def fits(self, n: int, k: int) -> bool:
        return n % 16 == 0 and k % 16 == 0  # TMA: rows of codes, and of BF16 and FP32 outputs, start at 16 bytes

    def fp8(self, x: Quantized, w: Tensor, w_scales: Tensor) -> Tensor:
        rows = x.codes.shape[0]
        if w.shape[0] in _SLOW_N and rows in _SLOW_ROWS:
            x = _with_rows(x, _ROWS_INSTEAD)
        y = torch.empty(x.codes.shape[0], w.shape[0], dtype=torch.bfloat16, device=w.device)
        known = "nk" if y.shape[0] >= _MANY_ROWS else ""
        self._library.fp8_gemm_nt(
            (x.codes, x.scales), (w, w_scales), y, recipe=(1, 128, 128), compiled_dims=known, disable_ue8m0_cast=True
        )
        return y[:rows]

    def bf16(self, x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        y = torch.empty(x.shape[0], w.shape[0], dtype=dtype, device=w.device)
        self._library.bf16_gemm_nt(x, w, y)
        return y


def _with_rows(x: Quantized, rows: int) -> Quantized:
    """x with so many rows, whatever the further ones hold: no row of a product depends on another."""
    wider, there = empty_rows(rows, x.codes.shape[1], x.codes.device), x.codes.shape[0]
    wider.codes.view(torch.uint8)[:there] = x.codes.view(torch.uint8)
    wider.scales[:there] = x.scales
    return wider


class TritonGemm:
    """Own kernels; tiles of 128 columns and 64 or 128 rows, both `wgmma`, whose rows agree to the bit."""

    name = "Triton"
    wants = "any size"

    def fits(self, n: int, k: int) -> bool:
        return n > 0 and k > 0

    def fp8(self, x: Quantized, w: Tensor, w_scales: Tensor) -> Tensor:
        m, n, k = x.codes.shape[0], *w.shape
        y = torch.empty(m, n, dtype=torch.bfloat16, device=w.device)
        rows = 64 if m <= 64 else 128
        grid = (triton.cdiv(m, rows) * triton.cdiv(n, 128),)
        _fp8_kernel[grid](
            x.codes, x.scales, w, w_scales, y, m, n, k, x.codes.stride(0), x.scales.stride(1), w_scales.stride(0),
            ROWS=rows, num_warps=4 if rows == 64 else 8, num_stages=3,
        )  # fmt: skip
        return y

    def bf16(self, x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        m, n, k = x.shape[0], *w.shape
        y = torch.empty(m, n, dtype=dtype, device=w.device)
        rows = 64 if m <= 64 else 128
        grid = (triton.cdiv(m, rows) * triton.cdiv(n, 128),)
        _bf16_kernel[grid](
            x, w, y, m, n, k, x.stride(0), ROWS=rows, num_warps=4 if rows == 64 else 8, num_stages=3
        )  # fmt: skip
        return y


class ScaledMm:
    """torch's block-scaled product. It wants M to be a multiple of 16, so rows are padded; BF16 runs in Triton.

    cuBLAS chooses its kernel by M, and for some long K (4096 x 12288, 3584 x 18944 with torch 2.11) it splits the sum for some
    M only; partial blocks it gets wrong. So it takes whole blocks alone, and only shapes that pass a trial against Triton.
    """

    name = "torch._scaled_mm"
    wants = "N and K multiples of 128, and rows that do not change with M"

    def __init__(self) -> None:
        self._triton = TritonGemm()

    def fits(self, n: int, k: int) -> bool:
        return n % 128 == 0 and k % 128 == 0 and self._agrees(n, k)

    def _agrees(self, n: int, k: int) -> bool:
        """Whether products of random data equal Triton's to the bit for a ladder of M up to 8192."""
        generator = torch.Generator(device="cuda").manual_seed(0)
        normal = torch.randn(8192, k, generator=generator, device="cuda")
        x = Quantized(normal.clamp(-448, 448).to(E4M3), torch.rand(k // 128, 8192, generator=generator, device="cuda").t())
        w = torch.randn(n, k, generator=generator, device="cuda").to(E4M3)
        w_scales = torch.rand(n // 128, k // 128, generator=generator, device="cuda")
        wanted = self._triton.fp8(x, w, w_scales)
        ladder = [*range(16, 272, 16), *(384 << i for i in range(5)), *(512 << i for i in range(5))]
        parts = (Quantized(x.codes[:m], x.scales[:m].t().contiguous().t()) for m in ladder)
        return all(torch.equal(self.fp8(part, w, w_scales), wanted[: part.codes.shape[0]]) for part in parts)

    def fp8(self, x: Quantized, w: Tensor, w_scales: Tensor) -> Tensor:
        rows = x.codes.shape[0]
        x = _padded_rows(x)
        y = torch._scaled_mm(x.codes, w.t(), scale_a=x.scales, scale_b=w_scales.t(), out_dtype=torch.bfloat16)
        return y[:rows]

    def bf16(self, x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        return self._triton.bf16(x, w, dtype)


def _padded_rows(x: Quantized) -> Quantized:
    """x with rows of zero codes up to a multiple of 16, scales dense by columns."""
    rows, groups = x.scales.shape
    missing = -rows % 16
    if not missing and x.scales.stride(1) == rows:
        return x
    codes = x.codes.new_zeros(rows + missing, x.codes.shape[1], dtype=torch.uint8)
    codes[:rows] = x.codes.view(torch.uint8)
    scales = x.scales.new_zeros(groups, rows + missing).t()
    scales[:rows] = x.scales
    return Quantized(codes.view(x.codes.dtype), scales)


_BACKENDS: dict[str, type[DeepGemm] | type[ScaledMm] | type[TritonGemm]] = {
    "deep_gemm": DeepGemm,
    "scaled_mm": ScaledMm,
    "triton": TritonGemm,
}


@cache
def preferred() -> Backend:
    """DeepGEMM where it is installed, else torch; or what the environment variable JETRL_GEMM names.

    Raises ValueError for an unknown name, or for a DeepGEMM that is asked for and cannot be loaded.
    """
    name = chosen(_VARIABLE, _BACKENDS)
    if name is None:
        name = "deep_gemm" if importlib.util.find_spec("deep_gemm") else "scaled_mm"
        if name == "scaled_mm":
            log.warning("sgl-deep-gemm is not installed: FP8 products run through torch._scaled_mm, BF16 ones through Triton")
    try:
        return _BACKENDS[name]()
    except (ImportError, OSError, AssertionError) as error:
        raise ValueError(
            f"DeepGEMM cannot be loaded ({error!r}). It needs nvcc or CUDA_HOME and a version that fits torch "
            f"{torch.__version__}; pip install 'jetrl[hopper]', or set {_VARIABLE}=scaled_mm."
        ) from error


@cache
def backend_for(n: int, k: int) -> Backend:
    """The backend of products with N = n and K = k: the preferred one, else Triton. M has no say."""
    backend = preferred()
    if backend.fits(n, k):
        return backend
    log.warning("products of %d x %d run in Triton: %s cannot take them (%s)", n, k, backend.name, backend.wants)
    return TritonGemm()


def head_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Logits FP32 [R, V] of hidden [R, H] and head [V, H], both BF16; rows independent of R."""
    return backend_for(*head.shape).bf16(hidden, head, torch.float32)


@triton.jit
def _tile_of(pid, m, n, ROWS: tl.constexpr):
    """Row and column block of a program: eight row blocks share a column block's weights in the cache."""
    row_blocks, column_blocks = tl.cdiv(m, ROWS), tl.cdiv(n, 128)
    width = 8 * column_blocks
    first = pid // width * 8
    height = tl.minimum(row_blocks - first, 8)
    return first + pid % width % height, pid % width // height


@triton.jit
def _load_block(rows_ptr, inside, at, k):
    """The columns `at` of rows [R]; zero in rows that are not `inside` and from column k on. rows_ptr: [R, 1]."""
    return tl.load(rows_ptr + at[None, :], mask=inside[:, None] & (at < k)[None, :], other=0.0)


@triton.jit
def _store_tile(y, acc, row, column, m, n):
    """FP32 acc to its rows and columns of y [m, n], rounded to y's type."""
    to = y + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(to, acc.to(y.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def _fp8_kernel(
    x,  # E4M3 [m, k], row stride x_stride
    x_scales,  # FP32 [m, ceil(k / 128)], stored by columns: strides (1, x_scales_stride)
    w,  # E4M3 [n, k] contiguous
    w_scales,  # FP32 [ceil(n / 128), ceil(k / 128)], row stride w_scales_stride
    y,  # BF16 [m, n] contiguous, result
    m,
    n,
    k,
    x_stride,
    x_scales_stride,
    w_scales_stride,
    ROWS: tl.constexpr,
):
    """One tile [ROWS, 128] of y = x w^T."""
    row_block, column_block = _tile_of(tl.program_id(0), m, n, ROWS)
    row, column, inner = row_block * ROWS + tl.arange(0, ROWS), column_block * 128 + tl.arange(0, 128), tl.arange(0, 128)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    w_row = w + column.to(tl.int64)[:, None] * k
    acc = tl.zeros((ROWS, 128), tl.float32)
    for block in range(tl.cdiv(k, 128)):
        at = block * 128 + inner
        a, b = _load_block(x_row, row < m, at, k), _load_block(w_row, column < n, at, k)
        a_scale = tl.load(x_scales + block.to(tl.int64) * x_scales_stride + row, mask=row < m, other=0.0)
        b_scale = tl.load(w_scales + column_block.to(tl.int64) * w_scales_stride + block)
        acc += tl.dot(a, tl.trans(b)) * (a_scale * b_scale)[:, None]
    _store_tile(y, acc, row, column, m, n)


@triton.jit
def _bf16_kernel(
    x,  # BF16 [m, k], row stride x_stride
    w,  # BF16 [n, k] contiguous
    y,  # BF16 or FP32 [m, n] contiguous, result
    m,
    n,
    k,
    x_stride,
    ROWS: tl.constexpr,
):
    """One tile [ROWS, 128] of y = x w^T."""
    row_block, column_block = _tile_of(tl.program_id(0), m, n, ROWS)
    row, column, inner = row_block * ROWS + tl.arange(0, ROWS), column_block * 128 + tl.arange(0, 128), tl.arange(0, 64)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    w_row = w + column.to(tl.int64)[:, None] * k
    acc = tl.zeros((ROWS, 128), tl.float32)
    for block in range(tl.cdiv(k, 64)):
        at = block * 64 + inner
        a, b = _load_block(x_row, row < m, at, k), _load_block(w_row, column < n, at, k)
        acc = tl.dot(a, tl.trans(b), acc)
    _store_tile(y, acc, row, column, m, n)
