"""One layer of the decoder, forward and backward, for every phase and every device.

Problem: the engine, the training forward and the proof must run the same operators on the same bytes; fused kernels cross
the borders that autograd would draw; and what a layer keeps for its backward decides how many tokens fit.

Method: `forward` is the only definition. The engine calls it as it is; training calls it through one autograd function a
layer, with `keep`, and `backward` below is its gradient by hand. The residual stream travels as a pair (x, delta), so that
the addition at a layer's end is fused with the norm that begins the next one.

    x += delta;  h = qkv(norm(x));  q, k, v = rotary(q_k_norms(h + bias));  a = o(attention(q, k, v))
    x += a;      delta = down(silu_mul(gate_up(norm(x))))

Kept per token: the two residual inputs, q, k, v (with an FP8 cache: of the codes), attention's output, gate and up in BF16,
and the inputs of the four products as the weight gradient reads them (FP8 in an FP8 layer). `kept_bytes` counts them. A layer
that is recomputed keeps the first residual input alone; its backward begins with the same forward once more, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from jetrl.kernels.ops import Activation, Heads, HeadWeights, Ops, Spec
from jetrl.kernels.quant import TokenGroups
from jetrl.model.context import Context
from jetrl.model.leaf import Leaf, tensor_of


class Recordable(Protocol):
    """Several tensors that are recorded under one name."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the suffix of their names."""
        ...


Record = Callable[[str, Tensor | Recordable], None]


@dataclass(slots=True)
class Layer:
    """The leaves of one layer, and how its heads divide."""

    index: int
    leaves: dict[str, Leaf]  # by the name within the layer: input_norm, qkv, qkv_bias, ...
    heads: Heads
    eps: float
    ops: Ops

    def spec(self, name: str, groups: TokenGroups | None) -> Spec:
        """What the product `name` reads as its input."""
        return Spec(self.leaves[name].kind == "fp8", groups)

    def gradient_spec(self, name: str, groups: TokenGroups) -> Spec:
        """What the gradients of the product `name` read as its output's gradient."""
        leaf = self.leaves[name]
        return Spec(leaf.kind == "fp8", groups, leaf.parts, value=f"{name}_bias" in self.leaves)

    def bias(self, name: str) -> Tensor | None:
        return tensor_of(self.leaves.get(f"{name}_bias"))

    def head_weights(self) -> HeadWeights:
        return HeadWeights(self.bias("qkv"), *(tensor_of(self.leaves.get(n)) for n in ("q_norm", "k_norm")))


@dataclass(slots=True)
class Saved:
    """What the backward needs. Shapes: T tokens, H hidden, F intermediate."""

    x: Tensor  # BF16 [T, H], input of the first norm
    statistics: Tensor | None
    fused: Tensor | None  # BF16 [T, width] before q and k norms, if there are any
    operands: tuple[Tensor, ...]  # q, keys and values as attention's gradient reads them, BF16 [T, heads or kv_heads, dim]
    attended: Tensor | None  # BF16 [T, heads, dim]; where gradients are wanted
    lse: Tensor | None
    residual: Tensor  # BF16 [T, H], input of the second norm
    residual_statistics: Tensor | None
    gate_up: Tensor  # BF16 [T, 2 F]
    normed: Activation  # inputs of the four products, what the weight gradients read of them
    attended_input: Activation
    post_normed: Activation
    activated: Activation


def _silent(name: str, tensor: Tensor | Recordable) -> None:
    pass


def forward(
    layer: Layer, x: Tensor, delta: Tensor | None, context: Context, groups: TokenGroups | None, record: Record = _silent
) -> tuple[Tensor, Tensor, Saved]:
    """x, delta: BF16 [T, H], the residual stream and what is still to be added to it; returns the next such pair.

    With `groups`, the operands of the weight gradients are made on the way.
    """
    ops, name = layer.ops, f"layers.{layer.index}."
    value = {n: leaf.value for n, leaf in layer.leaves.items()}
    x, normed, statistics = ops.add_rms_norm(x, delta, value["input_norm"], layer.eps, layer.spec("qkv", groups))
    if delta is not None:
        record(f"layers.{layer.index - 1}.output", x)
    record(name + "input_norm", normed)
    fused = ops.linear(normed, value["qkv"], None)
    record(name + "qkv", fused)
    target = context.target(layer.index, layer.heads.kv_heads, layer.heads.dim)
    q, keys, values, operands = ops.split_heads(
        fused, layer.head_weights(), layer.heads, context.positions, target, groups is not None
    )
    record(name + "query", q)
    record(f"layers.{layer.index}", target)  # .keys and .values
    attended_input, attended, lse = ops.attention(q, keys, values, context.layout, layer.spec("o", groups))
    record(name + "attention", attended_input)
    out = ops.linear(attended_input, value["o"], layer.bias("o"))
    record(name + "o", out)
    residual, post_normed, residual_statistics = ops.add_rms_norm(
        x, out, value["post_norm"], layer.eps, layer.spec("gate_up", groups)
    )
    record(name + "residual", residual)
    record(name + "post_norm", post_normed)
    gate_up = ops.linear(post_normed, value["gate_up"], layer.bias("gate_up"))
    record(name + "gate_up", gate_up)
    activated = ops.silu_mul(gate_up, layer.spec("down", groups))
    record(name + "silu_mul", activated)
    down = ops.linear(activated, value["down"], layer.bias("down"))
    record(name + "down", down)
    inputs = (Activation(tokens=a.tokens) for a in (normed, attended_input, post_normed, activated))
    kept = fused if "q_norm" in layer.leaves else None
    saved = Saved(x, statistics, kept, operands, attended, lse, residual, residual_statistics, gate_up, *inputs)
    return residual, down, saved


def backward(layer: Layer, saved: Saved, context: Context, dx: Tensor, ddelta: Tensor) -> Tensor:
    """Gradient towards the layer's x, which is also that towards its delta; weight gradients go into the leaves.

    dx, ddelta: BF16 [T, H], gradients of the pair that `forward` returned.
    """
    ops, groups = layer.ops, context.groups
    assert groups is not None and saved.attended is not None
    dactivated = _product(layer, "down", ops.activation(ddelta, layer.gradient_spec("down", groups)), saved.activated, groups)
    dgate_up = ops.silu_mul_grad(dactivated, saved.gate_up, layer.gradient_spec("gate_up", groups))
    dnormed = _product(layer, "gate_up", dgate_up, saved.post_normed, groups)
    dx = _norm(layer, "post_norm", dnormed, saved.residual, saved.residual_statistics, dx)
    dout = ops.activation(dx, layer.gradient_spec("o", groups))
    dattended = _product(layer, "o", dout, saved.attended_input, groups).view(saved.attended.shape)
    q, keys, values = saved.operands
    grads = ops.attention_grad(dattended, q, keys, values, saved.attended, saved.lse, context.layout)
    fused = q if saved.fused is None else saved.fused
    dfused, *dnorms = ops.split_heads_grad(grads, fused, layer.head_weights(), layer.heads, context.positions)
    for name, gradient in zip(("q_norm", "k_norm"), dnorms, strict=True):
        if gradient is not None:
            layer.leaves[name].accumulate(gradient)
    dqkv = ops.activation(dfused, layer.gradient_spec("qkv", groups))
    return _norm(layer, "input_norm", _product(layer, "qkv", dqkv, saved.normed, groups), saved.x, saved.statistics, dx)


def _product(layer: Layer, name: str, dy: Activation, x: Activation, groups: TokenGroups) -> Tensor:
    """The gradients of one product: weight and bias into the leaves, the input's returned."""
    weight, bias = layer.leaves[name], layer.leaves.get(f"{name}_bias")
    if weight.grad is not None:
        layer.ops.grad_weight(dy, x, groups, weight.grad)
    if bias is not None and bias.grad is not None:
        assert dy.value is not None
        bias.accumulate(dy.value.sum(0, dtype=bias.grad.dtype))
    return layer.ops.grad_input(dy, weight.value)


def _norm(layer: Layer, name: str, dy: Tensor, x: Tensor, statistics: Tensor | None, residual: Tensor) -> Tensor:
    leaf = layer.leaves[name]
    dx, dweight = layer.ops.rms_norm_grad(dy, x, statistics, leaf.value, layer.eps, residual)
    leaf.accumulate(dweight)
    return dx


class LayerFunction(Function):
    """`forward` and `backward` as autograd sees them; with `recompute` the backward begins by repeating the forward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, layer: Layer, context: Context, recompute: bool, record: Record
    ) -> tuple[Tensor, Tensor]:
        groups = None if recompute else context.groups
        new_x, new_delta, saved = forward(layer, x, delta, context, groups, record)
        ctx.saved = saved.x if recompute else saved  # x + delta, rounded: the layer's result depends on nothing else
        ctx.layer, ctx.context, ctx.paired = layer, context, delta is not None
        return new_x, new_delta

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, layer, context = ctx.saved, ctx.layer, ctx.context
        del ctx.saved
        if isinstance(saved, Tensor):
            saved = forward(layer, saved, None, context, context.groups)[2]
        dx = backward(layer, saved, context, grads[0].contiguous(), grads[1].contiguous())
        return dx, dx if ctx.paired else None, None, None, None, None


class NormFunction(Function):
    """The last norm, x + delta before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, leaf: Leaf, eps: float, ops: Ops) -> tuple[Tensor, Tensor]:
        total, normed, statistics = ops.add_rms_norm(x, delta, leaf.value, eps, Spec(fp8=False))
        assert normed.value is not None
        ctx.leaf, ctx.eps, ctx.ops = leaf, eps, ops
        ctx.save_for_backward(total, statistics)
        ctx.mark_non_differentiable(total)
        return normed.value, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, statistics = ctx.saved_tensors
        dx, dweight = ctx.ops.rms_norm_grad(grads[0].contiguous(), total, statistics, ctx.leaf.value, ctx.eps, None)
        ctx.leaf.accumulate(dweight)
        return dx, dx, None, None, None


class EmbedFunction(Function):
    """Rows of the embedding; `anchor` is an empty tensor that makes autograd record the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, leaf: Leaf, ops: Ops) -> Tensor:
        ctx.leaf, ctx.ops = leaf, ops
        ctx.save_for_backward(tokens)
        return leaf.table()[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (tokens,) = ctx.saved_tensors
        if ctx.leaf.grad is not None:
            ctx.ops.embedding_grad(ctx.leaf.grad, tokens, grads[0].contiguous())
        return None, None, None, None


class ChosenLogprobsFunction(Function):
    """Log-probabilities of chosen tokens; the entropy carries no gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Leaf, tokens: Tensor, temperature: float, ops: Ops) -> tuple[Tensor, Tensor]:
        ctx.head, ctx.temperature, ctx.ops = head, temperature, ops
        ctx.save_for_backward(hidden, tokens)
        logprobs, entropy = ops.chosen_logprobs(hidden, head.value, tokens, temperature)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, tokens = ctx.saved_tensors
        head: Leaf = ctx.head
        dlogprobs = grads[0].contiguous()
        found = ctx.ops.chosen_logprobs_with_grad(
            lambda _, part: dlogprobs[part], hidden, head.value, tokens, ctx.temperature, head.grad
        )
        return found[2], None, None, None, None


def anchor() -> Tensor:
    """What makes autograd record a graph whose leaves are not autograd's."""
    return torch.zeros((), requires_grad=True)
