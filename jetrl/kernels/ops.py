"""What a device must be able to do: the operators of the model, and the data that passes between them.

Problem: fused kernels make the speed. A norm that writes FP8 codes at once has no BF16 output, so the model cannot be
written in terms of BF16 tensors alone, and it must not be written twice.

Method: the model is written once against `Ops`. What enters a matrix product is an `Activation`, which holds whatever its
device and its flow need: BF16 values on a CPU, codes and scales on a Hopper GPU. A `Spec` says what the product downstream
wants, so that the operator upstream can make it in one pass.

    CpuOps      the reference: one torch function after the other, exact by construction      (kernels/cpu.py)
    HopperOps   fused Triton kernels and FP8 tensor cores, exact by fixed orders of summation   (kernels/hopper/ops.py)

Layout: T tokens, H hidden size, M rows, [N, K] the shape of a weight. BF16 between operators, gradients included.
Given up: autograd inside a layer; `model/layer.py` writes the backward out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from jetrl.kernels.arena import Arena
from jetrl.kernels.lanes import DecodeInputs, Lanes
from jetrl.kernels.logprob import Slope
from jetrl.kernels.quant import Quantized, TokenGroups

Operand = Tensor | Quantized  # of attention: BF16, or codes and scales


@dataclass(slots=True, frozen=True)
class Spec:
    """What the product downstream reads."""

    fp8: bool
    groups: TokenGroups | None = None  # set where a weight gradient will be wanted
    parts: tuple[int, ...] = ()  # rows of each fused projection; for gradients, whose columns are the weight's rows
    value: bool = False  # BF16 is wanted besides (a bias gradient)


@dataclass(slots=True, frozen=True)
class Activation:
    """An operand of a linear layer's products: its input [M, K], or its output's gradient [M, N]."""

    value: Tensor | None = None  # BF16
    rows: Quantized | None = None  # FP8, 1x128: for forward and grad_input
    tokens: Any = None  # what grad_weight reads: Quantized 128x1, or BF16

    def tensors(self) -> dict[str, Tensor]:
        """What the product reads, by suffix: for recordings."""
        if self.rows is None:
            assert self.value is not None
            return {"": self.value}
        return self.rows.tensors()


@dataclass(slots=True, frozen=True)
class Heads:
    """How the columns of q, k and v divide into heads, and what happens to them before attention."""

    heads: int
    kv_heads: int
    dim: int
    eps: float  # of the q and k norms
    cos: Tensor  # float32 [positions, dim / 2]
    sin: Tensor  # float32 [positions, dim / 2]
    fp8: bool = False  # q, k and v are quantised, each head of each token by itself, before attention reads them

    @property
    def width(self) -> int:
        """Columns of q, k and v side by side."""
        return (self.heads + 2 * self.kv_heads) * self.dim


@dataclass(slots=True, frozen=True)
class HeadWeights:
    """The vectors between the qkv product and attention, BF16; None where the family has none."""

    bias: Tensor | None  # [(heads + 2 kv_heads) * dim]
    q_norm: Tensor | None  # [dim]
    k_norm: Tensor | None  # [dim]


@dataclass(slots=True, frozen=True)
class Target:
    """Where new keys and values go: BF16 rows, or blocks of codes, whose slots are `block * block_size + offset`."""

    keys: Tensor  # BF16 [R, kv_heads, dim]; E4M3 [blocks, kv_heads, block_size, dim]
    values: Tensor  # BF16 [R, kv_heads, dim]; E4M3 [blocks, kv_heads, dim, block_size], as the product over keys wants them
    rows: Tensor | None  # int64 [T], the row or slot of each token; None: token t is row t
    key_scales: Tensor | None = None  # FP32 [blocks, kv_heads, block_size]
    value_scales: Tensor | None = None  # like key_scales

    @property
    def codes(self) -> tuple[Quantized, Quantized]:
        """Keys and values of an FP8 cache as attention reads them."""
        assert self.key_scales is not None and self.value_scales is not None
        return Quantized(self.keys, self.key_scales), Quantized(self.values, self.value_scales)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Block of each token and its place within, int64 [T] each; of codes."""
        assert self.rows is not None and self.key_scales is not None
        size = self.key_scales.shape[2]
        return self.rows // size, self.rows % size

    def store(self, keys: Quantized, values: Quantized) -> None:
        """Put codes [T, kv_heads, dim] and scales [T, kv_heads] of the new tokens in their places."""
        assert self.key_scales is not None and self.value_scales is not None
        block, at = self.places
        self.keys.view(torch.uint8)[block, :, at] = keys.codes.view(torch.uint8)
        self.values.view(torch.uint8)[block, :, :, at] = values.codes.view(torch.uint8)
        self.key_scales[block, :, at], self.value_scales[block, :, at] = keys.scales, values.scales

    def tensors(self) -> dict[str, Tensor]:
        """What lies there of each token, by suffix: for recordings."""
        if self.key_scales is None or self.value_scales is None:
            rows = slice(None) if self.rows is None else self.rows
            return {".keys": self.keys[rows], ".values": self.values[rows]}
        block, at = self.places
        return {
            ".keys": self.keys.view(torch.uint8)[block, :, at],
            ".keys.scales": self.key_scales[block, :, at],
            ".values": self.values.view(torch.uint8)[block, :, :, at],
            ".values.scales": self.value_scales[block, :, at],
        }


class Ops(Protocol):
    """The operators of one device. Shapes as above; each forward operator's rows are independent of the batch."""

    device: torch.device
    gradient_dtype: torch.dtype  # of the weights' accumulators

    def check_heads(self, heads: Heads) -> None:
        """Raise ValueError for a model whose attention this device cannot run."""
        ...

    def weight(self, w: Tensor, parts: tuple[int, ...], fp8: bool, previous: Any) -> Any:
        """Publish a weight [N, K], BF16 or FP32 that is rounded to BF16 first, in the form the products read.

        `previous`, if given, may be overwritten.
        """
        ...

    def activation(self, x: Tensor, spec: Spec) -> Activation:
        """A BF16 tensor [M, K] as an operand."""
        ...

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, spec: Spec
    ) -> tuple[Tensor, Activation, Tensor | None]:
        """x + delta, its RMSNorm, and the norm's statistics for `rms_norm_grad` (None if it needs none)."""
        ...

    def rms_norm_grad(
        self, dy: Tensor, x: Tensor, statistics: Tensor | None, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gradient towards x plus `residual`, BF16, each rounded once; and the weight's, [H], wide."""
        ...

    def linear(self, x: Activation, weight: Any, bias: Tensor | None) -> Tensor:
        """y = x W^T, BF16 [M, N]; a bias is added in BF16."""
        ...

    def grad_input(self, dy: Activation, weight: Any) -> Tensor:
        """dx = dy W, BF16 [M, K]."""
        ...

    def grad_weight(self, dy: Activation, x: Activation, groups: TokenGroups, accumulator: Tensor) -> None:
        """accumulator [N, K] += dy^T x."""
        ...

    def split_heads(
        self, fused: Tensor, weights: HeadWeights, heads: Heads, positions: Tensor, target: Target, keep: bool
    ) -> tuple[Operand, Operand, Operand, tuple[Tensor, ...]]:
        """From qkv [T, width] to q [T, heads, dim] and all keys and values, the new ones written to `target`.

        BF16, or with `heads.fp8` codes and scales [T, heads]. If `keep`, also q, keys and values as `attention_grad` reads
        them: the same in BF16, or the new tokens' codes times scales, rounded to BF16 [T, heads or kv_heads, dim].
        """
        ...

    def split_heads_grad(
        self, grads: tuple[Tensor, Tensor, Tensor], fused: Tensor, weights: HeadWeights, heads: Heads, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """From the gradients of q, k, v to that of `fused`, BF16, and those of the q and k norms' weights."""
        ...

    def attention(
        self, q: Operand, keys: Operand, values: Operand, layout: Any, spec: Spec
    ) -> tuple[Activation, Tensor | None, Tensor | None]:
        """Causal attention as the product downstream reads it, [T, heads * dim].

        With `spec.groups` also for its gradient: the same in BF16 [T, heads, dim], and what it needs of the softmax.
        """
        ...

    def attention_grad(
        self, dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor | None, layout: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `attention` for packed keys and values, BF16."""
        ...

    def silu_mul(self, gate_up: Tensor, spec: Spec) -> Activation:
        """SiLU(gate) * up of [T, 2 F]."""
        ...

    def silu_mul_grad(self, dy: Tensor, gate_up: Tensor, spec: Spec) -> Activation:
        """Gradient of `silu_mul`, as the operand of the gate_up product's gradients."""
        ...

    def embedding_grad(self, accumulator: Tensor, tokens: Tensor, grad: Tensor) -> None:
        """accumulator[tokens] += grad."""
        ...

    def chosen_logprobs(self, hidden: Tensor, head: Any, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability of one token a row, float32 [R], and the entropy [R]."""
        ...

    def chosen_logprobs_with_grad(
        self, slope: Slope, hidden: Tensor, head: Any, tokens: Tensor, temperature: float, accumulator: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`chosen_logprobs`, and the gradient towards hidden, BF16, of a loss whose derivative by the log-probabilities of some
        rows `slope` gives; the head's is added to `accumulator`. Logits are made once, some rows at a time.
        """
        ...

    def next_tokens(
        self, hidden: Tensor, head: Any, uniforms: Tensor, forced: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Tokens int64 [R] and their log-probabilities float32 [R], without waiting for the device.

        uniforms: float64 [R] in [0, 1); forced: int64 [R], -1 where the token is to be drawn. Temperature 0 takes the most
        likely token, with its log-probability at temperature 1. A row whose logits are not finite has a log-probability of NaN.
        """
        ...

    def begin(self, running: Lanes, step: Tensor) -> DecodeInputs:
        """The inputs of a decode step, see `kernels.lanes`. step: int32 [3, R]."""
        ...

    def end(self, running: Lanes, lane: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Book sampled tokens, int64 [R], of lanes, int32 [R].

        Returns int32 [2, R]: the token, or -1 where the lane took no part, and the bits of its log-probability.
        """
        ...

    def arena(self, size: int) -> Arena:
        """`size` bytes at a fixed place, whose memory can be given back. Raises ValueError if there is not so much."""
        ...
