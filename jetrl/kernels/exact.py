"""Sums without an order: matrix products on a CPU whose bits no library, batch or thread count can change.

Problem: a row of a float matrix product changes with the number of rows, since the library picks another order of
summation. Exact flows forbid that, and a fixed order written by hand would be slow.

Method: make every sum exact, so that all orders give the same bits. Operands are rounded to a grid: multiples of
2^(e - bits), where 2^e bounds the largest magnitude of the row. Then each product is a multiple of one quantum, and a sum
of n of them needs bits_a + bits_b + log2(n) bits. Up to 53 of them float64 holds every partial sum exactly, whatever
kernel, tile, thread or neighbouring row computes it. E4M3 codes are such integers already: 128 products need 43 bits.

Layout: the contracted dimension is the last one of both operands. The grid of a row depends on that row alone.

Given up: float64 speed, and elements below 2^-20 of their row's largest lose low bits. BF16 itself rounds at 2^-9.
"""

from __future__ import annotations

import torch
from torch import Tensor

MANTISSA = 53
_EXPONENT_SHIFT = 52


def to_grid(x: Tensor, bits: int) -> Tensor:
    """Round x (float64) to multiples of 2^(e - bits), where 2^e is the power of two above the row's largest magnitude.

    NaN and infinities stay visible.
    """
    assert x.dtype == torch.float64 and 1 <= bits <= 50
    biased = x.abs().amax(-1, keepdim=True).view(torch.int64) >> _EXPONENT_SHIFT
    # 1.5 * 2^(e + 52 - bits): adding it pushes the bits below the quantum out, to nearest even; taking it away is exact.
    magic = (((biased + (MANTISSA - bits)) << _EXPONENT_SHIFT) | (1 << (_EXPONENT_SHIFT - 1))).view(torch.float64)
    return (x + magic).sub_(magic)


def power_above(x: Tensor) -> Tensor:
    """The power of two above |x| (float64, positive or zero), as float64; the smallest normal number for 0."""
    biased = (x.view(torch.int64) >> _EXPONENT_SHIFT) + 1
    return (biased << _EXPONENT_SHIFT).view(torch.float64)


def operand_bits(contracted: int) -> tuple[int, int]:
    """Grid bits (left, right) with which a product over `contracted` elements is exact in float64."""
    total = min(MANTISSA - max(contracted - 1, 1).bit_length(), 48)
    return total - total // 2, total // 2


def left_operand(x: Tensor) -> Tensor:
    """Activations [..., rows, K] (BF16 or FP32) as the exact left operand of `exact_product`, float64."""
    return to_grid(x.double(), operand_bits(x.shape[-1])[0])


def right_operand(w: Tensor) -> Tensor:
    """Weights or keys [..., cols, K] (BF16 or FP32) as the exact right operand of `exact_product`, float64."""
    return to_grid(w.double(), operand_bits(w.shape[-1])[1])


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """left [..., rows, K] times right [..., cols, K] transposed: float64 [..., rows, cols], exact for gridded operands."""
    product = left @ right.transpose(-1, -2)
    # Over one element some kernels keep the sign of a zero and some start from +0; adding +0 makes all of them +0.
    return product.add_(0.0) if left.shape[-1] == 1 else product


def order_free_sum(x: Tensor, bits: int) -> Tensor:
    """Sum over the last dimension of x (float64, values in [0, 1]) on the absolute grid 2^-bits; [..., 1].

    Exact, so free of order, for up to 2^(53 - bits) elements.
    """
    assert x.shape[-1] <= 1 << (MANTISSA - bits), (x.shape, bits)
    magic = 1.5 * 2.0 ** (_EXPONENT_SHIFT - bits)
    return (x + magic).sub_(magic).sum(-1, keepdim=True)
