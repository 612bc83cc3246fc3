"""`Ops` on a CPU: the references of this folder, one after the other. Nothing is fused, so each step can be read and tested.

Linear layers quantise their own rows; an `Activation` here is BF16, with the 128x1 codes that the weight gradient reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl.kernels import attention, gemm, lanes, logprob, norm
from jetrl.kernels.arena import CpuArena
from jetrl.kernels.attention import Layout
from jetrl.kernels.gemm import Bf16Weight, Fp8Weight
from jetrl.kernels.lanes import DecodeInputs, Lanes
from jetrl.kernels.logprob import Slope
from jetrl.kernels.ops import Activation, Heads, HeadWeights, Operand, Spec, Target
from jetrl.kernels.quant import Quantized, TokenGroups, dequantize_heads, quantize_heads


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """y + bias in BF16."""
    return y if bias is None else y + bias


class CpuOps:
    """See `kernels.ops.Ops`."""

    device = torch.device("cpu")
    gradient_dtype = torch.float64

    def check_heads(self, heads: Heads) -> None:
        pass

    def weight(self, w: Tensor, parts: tuple[int, ...], fp8: bool, previous: Any) -> Fp8Weight | Bf16Weight:
        del previous
        return (Fp8Weight if fp8 else Bf16Weight).make(w.to(torch.bfloat16, copy=True), parts)

    def activation(self, x: Tensor, spec: Spec) -> Activation:
        saved = None if spec.groups is None else gemm.save_activation(x, spec.groups, spec.fp8)
        return Activation(x, tokens=saved)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, spec: Spec
    ) -> tuple[Tensor, Activation, None]:
        total = x if delta is None else norm.add(x, delta)
        return total, self.activation(norm.rms_norm(total, weight, eps), spec), None

    def rms_norm_grad(
        self, dy: Tensor, x: Tensor, statistics: Tensor | None, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        dx, dweight = norm.rms_norm_grad(dy, x, weight, eps)
        return dx if residual is None else norm.add(dx, residual), dweight

    def linear(self, x: Activation, weight: Fp8Weight | Bf16Weight, bias: Tensor | None) -> Tensor:
        assert x.value is not None
        return add_bias(gemm.forward(x.value, weight), bias)

    def grad_input(self, dy: Activation, weight: Fp8Weight | Bf16Weight) -> Tensor:
        assert dy.value is not None
        return gemm.grad_input(dy.value, weight)

    def grad_weight(self, dy: Activation, x: Activation, groups: TokenGroups, accumulator: Tensor) -> None:
        gemm.grad_weight(dy.tokens, x.tokens, groups, accumulator)

    def split_heads(
        self, fused: Tensor, weights: HeadWeights, heads: Heads, positions: Tensor, target: Target, keep: bool
    ) -> tuple[Operand, Operand, Operand, tuple[Tensor, ...]]:
        assert heads.fp8 == (target.key_scales is not None), "the cache is not of the model's kind"
        q, k, v = _parts(add_bias(fused, weights.bias), heads)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = norm.rms_norm(q, weights.q_norm, heads.eps), norm.rms_norm(k, weights.k_norm, heads.eps)
        cos, sin = heads.cos[positions], heads.sin[positions]
        q, k = norm.rotary(q, cos, sin), norm.rotary(k, cos, sin)
        if heads.fp8:
            parts = [quantize_heads(x) for x in (q, k, v)]
            target.store(parts[1], parts[2])
            return parts[0], *target.codes, tuple(map(dequantize_heads, parts)) if keep else ()
        k, v = attention.prepare(k, v)
        rows = slice(None) if target.rows is None else target.rows
        target.keys[rows], target.values[rows] = k, v
        return q, target.keys, target.values, (q, target.keys, target.values)

    def split_heads_grad(
        self, grads: tuple[Tensor, Tensor, Tensor], fused: Tensor, weights: HeadWeights, heads: Heads, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The grids of `prepare` and the quantiser pass gradients straight through."""
        dq, dk, dv = grads
        cos, sin = heads.cos[positions], heads.sin[positions]
        dq, dk = norm.rotary(dq, cos, -sin), norm.rotary(dk, cos, -sin)
        dq_norm = dk_norm = None
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k, _ = _parts(add_bias(fused, weights.bias), heads)
            dq, dq_norm = norm.rms_norm_grad(dq, q, weights.q_norm, heads.eps)
            dk, dk_norm = norm.rms_norm_grad(dk, k, weights.k_norm, heads.eps)
        return torch.cat([x.flatten(1) for x in (dq, dk, dv)], 1), dq_norm, dk_norm

    def attention(
        self, q: Operand, keys: Operand, values: Operand, layout: Layout, spec: Spec
    ) -> tuple[Activation, Tensor, None]:
        if isinstance(q, Quantized):
            assert isinstance(keys, Quantized) and isinstance(values, Quantized)
            out = attention.attention_fp8(q, keys, values, layout)
        else:
            assert isinstance(keys, Tensor) and isinstance(values, Tensor)
            out = attention.attention(q, keys, values, layout)
        return self.activation(out.flatten(1), spec), out, None

    def attention_grad(
        self, dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor | None, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        del out, lse
        return attention.attention_grad(dout, q, keys, values, layout)

    def silu_mul(self, gate_up: Tensor, spec: Spec) -> Activation:
        return self.activation(norm.silu_mul(gate_up), spec)

    def silu_mul_grad(self, dy: Tensor, gate_up: Tensor, spec: Spec) -> Activation:
        return self.activation(norm.silu_mul_grad(dy, gate_up), spec)

    def embedding_grad(self, accumulator: Tensor, tokens: Tensor, grad: Tensor) -> None:
        accumulator.index_add_(0, tokens, grad.to(accumulator.dtype))

    def chosen_logprobs(self, hidden: Tensor, head: Bf16Weight, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return logprob.chosen_logprobs(hidden, head, tokens, temperature)

    def chosen_logprobs_with_grad(
        self,
        slope: Slope,
        hidden: Tensor,
        head: Bf16Weight,
        tokens: Tensor,
        temperature: float,
        accumulator: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return logprob.chosen_logprobs_with_grad(slope, hidden, head, tokens, temperature, accumulator)

    def next_tokens(
        self, hidden: Tensor, head: Bf16Weight, uniforms: Tensor, forced: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        tokens, logprobs = torch.empty_like(forced), torch.empty(len(forced), dtype=torch.float32)
        for part in logprob.logit_chunks(hidden.shape[0], head.value.shape[0]):
            rows = logprob.distribution(hidden[part], head, temperature or 1.0)
            drawn = logprob.sample(rows, uniforms[part]) if temperature else logprob.greedy(rows)
            tokens[part] = torch.where(forced[part] >= 0, forced[part], drawn)
            logprobs[part] = rows.logprobs(tokens[part])
        return tokens, logprobs

    def begin(self, running: Lanes, step: Tensor) -> DecodeInputs:
        return lanes.begin(running, step)

    def end(self, running: Lanes, lane: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        return lanes.end(running, lane, tokens, logprobs)

    def arena(self, size: int) -> CpuArena:
        return CpuArena(size)


def _parts(fused: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k, v in `fused` [T, width], each [T, heads, dim]."""
    sizes = (heads.heads * heads.dim, heads.kv_heads * heads.dim, heads.kv_heads * heads.dim)
    q, k, v = (x.unflatten(1, (-1, heads.dim)) for x in fused.split(sizes, 1))
    return q, k, v
