"""Leaves of the model (weights with their gradient accumulators) and the operators that autograd sees.

Problem: exactness needs one definition of each operator for engine and trainer, and training needs gradients that stay in
BF16 between operators while weight gradients accumulate in a wide type, across microbatches, without an extra pass.

Method: a `Leaf` holds what kernels read (`value`: BF16 tensor, or a GEMM operand) and, while training, the accumulator
`grad`. Masters are not here; the trainer owns them and publishes BF16 values through `assign`. Each operator below is
its kernel, called directly when no gradient is wanted (the engine) and through `torch.autograd.Function` otherwise.
The backward adds weight gradients into `Leaf.grad` itself, so autograd never holds one.

Given up: `torch.nn.Parameter`, hence optimizers that look for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from jetrl.kernels import attention, gemm, logprob, norm
from jetrl.kernels.attention import Layout
from jetrl.kernels.quant import Quantized, TokenGroups


@dataclass(slots=True)
class Leaf:
    """One tensor of the model: a vector or an embedding in BF16, or the weight of a matrix product."""

    name: str
    shape: tuple[int, ...]
    operand: type[gemm.Fp8Weight] | type[gemm.Bf16Weight] | None = None  # None: read as a plain BF16 tensor
    parts: tuple[int, ...] = ()  # rows of each fused projection, for matrix products
    value: Any = None  # BF16 tensor, Fp8Weight or Bf16Weight; None until the first publish
    grad: Tensor | None = None  # accumulator, set while training

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError unless `tensor` is what `assign` takes."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != torch.bfloat16:
            raise ValueError(f"{self.name}: got {tensor.dtype} {tuple(tensor.shape)}, wanted torch.bfloat16 {self.shape}")

    def assign(self, tensor: Tensor) -> None:
        """Publish a BF16 tensor of this leaf's shape: quantise it if the leaf is FP8."""
        self.check(tensor)
        self.value = self.operand.make(tensor, self.parts) if self.operand else tensor.contiguous()

    def accumulate(self, gradient: Tensor) -> None:
        """Add a gradient of this leaf's shape, if the leaf is being trained."""
        if self.grad is not None:
            self.grad.add_(gradient.to(self.grad.dtype))


class _Embed(Function):
    """hidden[t] = table[token[t]]; `anchor` is an empty tensor that makes autograd record the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, leaf: Leaf) -> Tensor:
        ctx.leaf = leaf
        ctx.save_for_backward(tokens)
        return _table(leaf)[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (tokens,) = ctx.saved_tensors
        if ctx.leaf.grad is not None:
            ctx.leaf.grad.index_add_(0, tokens, grads[0].to(ctx.leaf.grad.dtype))
        return None, None, None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Leaf, bias: Leaf | None, groups: TokenGroups) -> Tensor:
        ctx.weight, ctx.bias, ctx.groups = weight, bias, groups
        if weight.grad is not None:
            saved = gemm.save_activation(x, groups, weight.value)
            ctx.save_for_backward(*((saved.codes, saved.scales) if isinstance(saved, Quantized) else (saved,)))
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        dy = grads[0].contiguous()
        if ctx.weight.grad is not None:
            saved = ctx.saved_tensors
            activation = Quantized(*saved) if len(saved) == 2 else saved[0]
            gemm.grad_weight(dy, activation, ctx.groups, ctx.weight.grad)
        if ctx.bias is not None:
            ctx.bias.accumulate(dy.double().sum(0))
        return gemm.grad_input(dy, ctx.weight.value), None, None, None


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Leaf, eps: float) -> Tensor:
        ctx.leaf, ctx.eps = leaf, eps
        ctx.save_for_backward(x)
        return norm.rms_norm(x, leaf.value, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dx, dweight = norm.rms_norm_grad(grads[0], ctx.saved_tensors[0], ctx.leaf.value, ctx.eps)
        ctx.leaf.accumulate(dweight)
        return dx, None, None


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return norm.rotary(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return norm.rotary(grads[0], cos, -sin), None, None


class _SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return norm.silu_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return norm.silu_mul_grad(grads[0], ctx.saved_tensors[0])


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(q, keys, values)
        return attention.attention(q, keys, values, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, keys, values = ctx.saved_tensors
        return *attention.attention_grad(grads[0], q, keys, values, ctx.layout), None


class _PrepareKeysValues(Function):
    """Gradients pass the grids straight through."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return attention.prepare(keys, values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class _ChosenLogprobs(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Leaf, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        ctx.head, ctx.temperature = head, temperature
        ctx.save_for_backward(hidden, tokens)
        logprobs, entropy = logprob.chosen_logprobs(hidden, head.value, tokens, temperature)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        hidden, tokens = ctx.saved_tensors
        head: Leaf = ctx.head
        dhidden = logprob.chosen_logprobs_grad(grads[0], hidden, head.value, tokens, ctx.temperature, head.grad)
        return dhidden, None, None, None


def _table(leaf: Leaf) -> Tensor:
    return leaf.value.value if isinstance(leaf.value, gemm.Bf16Weight) else leaf.value


def _linear(x: Tensor, weight: Leaf, bias: Leaf | None) -> Tensor:
    y = gemm.forward(x, weight.value)
    return y if bias is None else y + bias.value


def embed(tokens: Tensor, leaf: Leaf) -> Tensor:
    """Embedding rows, BF16 [T, H]. The leaf may be the tied head."""
    if not torch.is_grad_enabled():
        return _table(leaf)[tokens]
    return _Embed.apply(torch.zeros((), requires_grad=True), tokens, leaf)  # type: ignore[return-value]


def linear(x: Tensor, weight: Leaf, bias: Leaf | None, groups: TokenGroups | None) -> Tensor:
    """y = x W^T (+ bias, added in BF16). x: BF16 [T, K]. `groups` are needed when gradients are."""
    if not torch.is_grad_enabled():
        return _linear(x, weight, bias)
    assert groups is not None, "token groups are needed for the weight gradient"
    return _Linear.apply(x, weight, bias, groups)  # type: ignore[return-value]


def rms_norm(x: Tensor, leaf: Leaf, eps: float) -> Tensor:
    """See `kernels.norm.rms_norm`."""
    if not torch.is_grad_enabled():
        return norm.rms_norm(x, leaf.value, eps)
    return _RmsNorm.apply(x, leaf, eps)  # type: ignore[return-value]


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.norm.rotary`."""
    return _Rotary.apply(x, cos, sin) if torch.is_grad_enabled() else norm.rotary(x, cos, sin)  # type: ignore[return-value]


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.norm.silu_mul`."""
    return _SiluMul.apply(gate_up) if torch.is_grad_enabled() else norm.silu_mul(gate_up)  # type: ignore[return-value]


def prepare_keys_values(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.attention.prepare`."""
    if not torch.is_grad_enabled():
        return attention.prepare(keys, values)
    return _PrepareKeysValues.apply(keys, values)  # type: ignore[return-value]


def attend(q: Tensor, keys: Tensor, values: Tensor, layout: Layout) -> Tensor:
    """See `kernels.attention.attention`."""
    if not torch.is_grad_enabled():
        return attention.attention(q, keys, values, layout)
    return _Attention.apply(q, keys, values, layout)  # type: ignore[return-value]


def chosen_logprobs(hidden: Tensor, head: Leaf, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """See `kernels.logprob.chosen_logprobs`; the entropy carries no gradient."""
    if not torch.is_grad_enabled():
        return logprob.chosen_logprobs(hidden, head.value, tokens, temperature)
    return _ChosenLogprobs.apply(hidden, head, tokens, temperature)  # type: ignore[return-value]
