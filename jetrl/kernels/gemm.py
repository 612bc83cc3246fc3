"""Matrix products of a linear layer: y = x W^T, and its two gradients, in FP8 blocks or in BF16.

                     left operand            right operand            result
    forward          x   [M, K] 1x128        W   [N, K] 128x128       y  [M, N] BF16
    grad_input       dy  [M, N] 1x128        W   [N, K] 128x128       dx [M, K] BF16
    grad_weight      dy  [M, N] 128x1        x   [M, K] 128x1         dW [N, K] added to the accumulator

The forward is exact: a row of y depends on its row of x and on W, never on M. In FP8 each 128-wide block product is
computed in float64, where it has no rounding at all (see `exact`), then scaled and added block by block, in order:

    y[m, n] = bf16( fp32( sum over blocks b, in order, of dot(x_codes[m, b], w_codes[n, b]) * x_scale[m, b] * w_scale[n, b] ))

In BF16 both operands are put on a grid on which the whole product is exact. The gradients are products of the
dequantised values in float64, rounded at the end. (torch rounds float64 to BF16 by way of FP32, here and everywhere.)

This file is the reference that runs on a CPU; a Hopper backend takes the same operands.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from jetrl.kernels import quant
from jetrl.kernels.exact import exact_product, left_operand, right_operand
from jetrl.kernels.memory import row_chunks
from jetrl.kernels.quant import GROUP, Quantized, TokenGroups

_CHUNK_ELEMENTS = 1 << 18  # output elements computed together: a float64 chunk of 2 MB stays in a core's cache


@dataclass(slots=True)
class Fp8Weight:
    """A weight [N, K] as E4M3 codes and 128x128 scales, with the float64 operands that the CPU multiplies."""

    quantized: Quantized
    parts: tuple[int, ...]
    decoded: Tensor = field(init=False)  # float64 [N, K], the codes
    row_scales: Tensor = field(init=False)  # float64 [ceil(K / 128), N], the scale of each row's block

    def __post_init__(self) -> None:
        self.decoded = quant.decode(self.quantized.codes)
        index = quant.row_blocks(self.parts)
        self.row_scales = self.quantized.scales.double()[index].t().contiguous()

    @staticmethod
    def make(w: Tensor, parts: tuple[int, ...]) -> Fp8Weight:
        """Quantise w [N, K] (BF16); N is the sum of `parts`, the rows of each fused projection."""
        return Fp8Weight(quant.quantize_weight(w, parts), parts)

    def dequantized(self) -> Tensor:
        return quant.dequantize_weight(self.quantized, self.parts)

    def published(self) -> list[Tensor]:
        """What a publish wrote."""
        return [self.quantized.codes, self.quantized.scales]


@dataclass(slots=True)
class Bf16Weight:
    """A weight [N, K] in BF16, with its exact float64 operand for the CPU."""

    value: Tensor  # bfloat16 [N, K]
    gridded: Tensor = field(init=False)  # float64 [N, K]

    def __post_init__(self) -> None:
        self.gridded = right_operand(self.value)

    @staticmethod
    def make(w: Tensor, parts: tuple[int, ...]) -> Bf16Weight:
        """Keep w [N, K] in BF16. `parts` changes nothing here."""
        del parts
        return Bf16Weight(w.bfloat16())

    def dequantized(self) -> Tensor:
        return self.value.double()


Weight = Fp8Weight | Bf16Weight


def _row_chunks(x: Tensor) -> list[slice]:
    """Slices of rows whose float64 copy stays in cache: large temporaries cost more in page faults than in arithmetic."""
    return row_chunks(*x.shape, elements=_CHUNK_ELEMENTS)


def forward(x: Tensor, weight: Weight) -> Tensor:
    """y = x W^T. x: BF16 [M, K]. Returns BF16 [M, N], rows independent of M."""
    rows = weight.gridded.shape[0] if isinstance(weight, Bf16Weight) else weight.decoded.shape[0]
    y = torch.empty(x.shape[0], rows, dtype=torch.bfloat16)
    for part in _row_chunks(y):
        if isinstance(weight, Bf16Weight):
            y[part] = exact_product(left_operand(x[part]), weight.gridded)
        else:
            quantized = quant.quantize_rows(x[part])
            y[part] = _block_sum(quant.decode(quantized.codes), quantized.scales.double(), weight)
    return y


def _block_sum(codes: Tensor, scales: Tensor, weight: Fp8Weight) -> Tensor:
    """Float64 [rows, N]: exact block products, scaled and added in the order of the blocks.

    Multiplication and addition are separate calls: a compiler that fuses them in vector lanes but not in a tail would make a
    row depend on its place.
    """
    total: Tensor | None = None
    for block in range(scales.shape[1]):
        columns = slice(block * GROUP, (block + 1) * GROUP)
        term = exact_product(codes[:, columns], weight.decoded[:, columns])
        term.mul_(scales[:, block : block + 1]).mul_(weight.row_scales[block])
        total = term if total is None else total.add_(term)
    assert total is not None
    return total


def grad_input(dy: Tensor, weight: Weight) -> Tensor:
    """dx = dy W. dy: BF16 [M, N]. Returns BF16 [M, K]."""
    right = weight.dequantized()
    quantized = quant.quantize_rows(dy) if isinstance(weight, Fp8Weight) else None
    dx = torch.empty(dy.shape[0], right.shape[1], dtype=torch.bfloat16)
    for part in _row_chunks(dy):
        left = dy[part].double() if quantized is None else quant.dequantize_rows(quantized, part)
        dx[part] = left @ right
    return dx


def save_activation(x: Tensor, groups: TokenGroups, fp8: bool) -> Quantized | Tensor:
    """What grad_weight reads of x [M, K] or dy [M, N], BF16: 128x1 codes and scales in FP8 (half of BF16), else the same."""
    return quant.quantize_tokens(x, groups) if fp8 else x


def grad_weight(dy: Quantized | Tensor, x: Quantized | Tensor, groups: TokenGroups, accumulator: Tensor) -> None:
    """accumulator += dy^T x. dy [M, N] and x [M, K]: from `save_activation`; accumulator: float64 or float32 [N, K]."""
    for part in _row_chunks(dy.codes if isinstance(dy, Quantized) else dy):
        left, right = (
            quant.dequantize_tokens(saved, groups, part) if isinstance(saved, Quantized) else saved[part].double()
            for saved in (dy, x)
        )
        if accumulator.dtype == torch.float64:
            accumulator.addmm_(left.t(), right)
        else:
            accumulator.add_((left.t() @ right).to(accumulator.dtype))
