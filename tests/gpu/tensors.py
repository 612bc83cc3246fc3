"""Tensors on the GPU for the kernels' tests, and when two are the same."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.quant import Quantized


def noise(*shape: int, seed: int = 0) -> Tensor:
    """BF16 noise on the GPU; a zero row, a tiny, a huge, and one with an outlier, of those that exist."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    for row, factor in ((1, 0.0), (2, 1e-5), (3, 1e4)):
        x[row : row + 1] *= factor
    x[4:5, ..., :1] *= 3000.0
    return x.bfloat16().cuda()


def vector(width: int, seed: int = 9) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def same(a: Tensor | Quantized, b: Tensor | Quantized) -> bool:
    """Equal bits, NaN and the sign of zero included."""
    if isinstance(a, Quantized):
        return same(a.codes, b.codes) and same(a.scales, b.scales)
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
