"""The fastest kernels that promise nothing: cuBLAS products and cuDNN attention, in the place of ours.

cuBLAS chooses its split of K by M, so that a row's bits depend on the batch; cuDNN's backward adds with atomics. Everything
else (norms, rotary, SiLU-mul) stays our fused BF16 kernels, so that a difference to ours is that of products and attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from jetrl.kernels.attention import LaneSequences, Sequences
from jetrl.kernels.hopper.ops import Bf16Weight, HopperOps
from jetrl.kernels.ops import Activation, Operand, Spec
from jetrl.kernels.quant import TokenGroups


def _batched(x: Tensor, batch: int) -> Tensor:
    """A view [B, heads, S, dim] of packed rows [B * S, heads, dim]."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """Rows [B * S, heads, dim] of [B, heads, S, dim]; no copy where memory lies as in `_batched`."""
    return x.transpose(1, 2).flatten(0, 1)


def cudnn_attention(q: Tensor, keys: Tensor, values: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Causal attention of `batch` packed sequences of equal length: out like q, and cuDNN's statistics of the softmax."""
    q4, k4, v4 = (_batched(x, batch) for x in (q, keys, values))
    length = q4.shape[2]
    out, lse, *_ = torch.ops.aten._cudnn_attention_forward(q4, k4, v4, None, None, None, length, length, True, 0.0, True, False)
    return _packed(out), lse


def cudnn_attention_grad(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `cudnn_attention`; not deterministic."""
    d4, q4, k4, v4, o4 = (_batched(x, batch) for x in (dout, q, keys, values, out))
    length, seed = q4.shape[2], torch.zeros((), dtype=torch.int64, device=q.device)
    lse = lse if lse.dim() == 4 else lse.unsqueeze(-1)
    dq, dk, dv = torch.ops.aten._cudnn_attention_backward(
        d4, q4, k4, v4, o4, lse, seed, seed, None, None, None, length, length, 0.0, True
    )
    return _packed(dq), _packed(dk), _packed(dv)


def _equal_sequences(layout: Sequences | LaneSequences) -> int:
    """How many sequences of one length are packed; 0 for a paged cache, which stays with our kernel."""
    if isinstance(layout, LaneSequences) or layout.block_tables is not None:
        return 0
    assert len(set(layout.query_lengths)) == 1, layout.query_lengths
    return len(layout.query_lengths)


class FastFp8Ops(HopperOps):
    """Ours, with cuDNN's attention for packed sequences of equal length."""

    def attention(
        self, q: Operand, keys: Operand, values: Operand, layout: Sequences | LaneSequences, spec: Spec
    ) -> tuple[Activation, Tensor | None, Tensor | None]:
        batch = _equal_sequences(layout)
        if not batch:
            return super().attention(q, keys, values, layout, spec)
        assert isinstance(q, Tensor) and isinstance(keys, Tensor) and isinstance(values, Tensor)
        out, lse = cudnn_attention(q, keys, values, batch)
        return self.activation(out.flatten(1), spec), out, lse

    def attention_grad(
        self, dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor | None, layout: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert lse is not None
        return cudnn_attention_grad(dout, q, keys, values, out, lse, _equal_sequences(layout))


class FastBf16Ops(FastFp8Ops):
    """cuBLAS products, cuDNN attention; weight gradients are added in FP32 within the product, as HopperOps does."""

    def linear(self, x: Activation, weight: Any, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, Bf16Weight) and x.value is not None
        return functional.linear(x.value, weight.value, bias)


class OverwritingBf16Ops(FastBf16Ops):
    """Weight gradients in BF16 that replace the old ones: no accumulation over microbatches, half the memory traffic."""

    gradient_dtype = torch.bfloat16

    def grad_weight(self, dy: Activation, x: Activation, groups: TokenGroups, accumulator: Tensor) -> None:
        torch.mm(dy.tokens.t(), x.tokens, out=accumulator)
