"""RMSNorm, rotary embedding and SiLU-mul: the operators of a block that work on one row at a time.

Problem: a mean over a row is a sum with an order, and some of torch's own elementwise functions give other bits in the
vectorised middle of a tensor than in its tail (`sigmoid` and `silu` do on a CPU, `exp`, `log` and `sqrt` do not; measured).

Method: sums are order-free (see `exact`); the rest is written with add, mul, div, sqrt and exp, one torch call each, so no
compiler may fuse a product into a sum. Inside an operator numbers are FP32 or float64; what leaves it is BF16.
Each operator has its gradient beside it, from BF16 to BF16, as the contract hands gradients over in BF16.

    rms_norm   y = x / sqrt(mean(x^2) + eps) * w
    rotary     (a, b) at position t  ->  (a cos - b sin, b cos + a sin), halves as in the Hugging Face layout
    silu_mul   y = g / (1 + exp(-g)) * u
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.exact import to_grid
from jetrl.kernels.memory import row_chunks

_SQUARE_BITS = 19  # squares of 19-bit numbers: 2^15 of them sum exactly in float64


def add(x: Tensor, y: Tensor) -> Tensor:
    """BF16 sum of two BF16 tensors of one shape: the residual stream."""
    return x + y


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension of x (float64), order-free; [..., 1]."""
    assert x.shape[-1] <= 1 << 15, x.shape
    gridded = to_grid(x, _SQUARE_BITS)
    mean = (gridded * gridded).sum(-1, keepdim=True) / x.shape[-1]
    return torch.ones_like(mean) / torch.sqrt(mean + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension. x: BF16 [..., H]; weight: BF16 [H]. Returns BF16 [..., H]."""
    rows, wide_weight = x.reshape(-1, x.shape[-1]), weight.double()
    y = torch.empty_like(rows)
    for part in row_chunks(*rows.shape):
        wide = rows[part].double()
        y[part] = wide.mul_(_inverse_rms(wide, eps)).mul_(wide_weight)
    return y.view(x.shape)


def rms_norm_grad(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`: dx BF16 like x, and the weight's, float64 [H], summed over all rows."""
    wide, dwide = x.double(), dy.double()
    inverse = _inverse_rms(wide, eps)
    unit = wide * inverse
    dweight = (dwide * unit).reshape(-1, x.shape[-1]).sum(0)
    scaled = dwide.mul_(weight.double())
    dx = scaled.sub_(unit.mul_((scaled * unit).mean(-1, keepdim=True))).mul_(inverse)
    return dx.to(torch.bfloat16), dweight


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding. x: BF16 [T, heads, D]; cos, sin: FP32 [T, D / 2]. Returns BF16 [T, heads, D].

    The gradient is the same function with -sin.
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first = (a * cos).sub_(b * sin)
    second = (b * cos).add_(a * sin)
    return torch.cat((first, second), -1).to(torch.bfloat16)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU(gate) * up. gate_up: BF16 [T, 2 F], gate first. Returns BF16 [T, F]."""
    y = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=torch.bfloat16)
    for part in row_chunks(*y.shape):
        gate, up = (half.float() for half in gate_up[part].chunk(2, -1))
        denominator = gate.neg().exp_().add_(1.0)
        y[part] = gate.div_(denominator).mul_(up)
    return y


def silu_mul_grad(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of `silu_mul`. dy: BF16 [T, F]. Returns BF16 [T, 2 F]."""
    dgate_up = torch.empty_like(gate_up)
    for part in row_chunks(*dy.shape):
        gate, up = (half.float() for half in gate_up[part].chunk(2, -1))
        dgate, dup = dgate_up[part].chunk(2, -1)
        wide = dy[part].float()
        sigmoid = torch.ones_like(gate).div_(gate.neg().exp_().add_(1.0))
        silu = gate.mul_(sigmoid)
        dup.copy_(wide * silu)
        dgate.copy_(wide.mul_(up).mul_(sigmoid.add_(silu.mul_(1.0 - sigmoid))))
    return dgate_up
