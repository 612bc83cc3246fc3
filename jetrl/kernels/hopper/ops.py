"""`Ops` on a Hopper GPU: which fused kernel makes what the next product reads.

    add_rms_norm     sum, norm and 1x128 codes in one pass; the 128x1 codes for training in a second, from the sum
    silu_mul         both layouts from one read, and so its gradient
    activation       what arrives in BF16, attention's output and gradients: both layouts from one read
    linear           DeepGEMM, torch or Triton, see hopper/gemm.py
    grad_weight      a CUDA kernel of our own, see hopper/grad_weight.py
    attention        BF16 in hopper/attention.py and prefill.py, FP8 in hopper/attention_fp8.py, which in decode hands on codes;
                     its gradient by FlashAttention 4 or in two kernels, see hopper/flash.py

In flow bf16 the same operators hand on BF16 tensors, and the forward's products are batch-invariant BF16 ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetrl.kernels.arena import Arena
from jetrl.kernels.attention import LaneSequences, Sequences
from jetrl.kernels.hopper import arena, attention, attention_fp8, flash, gemm, grad_weight, lanes, logprob, norm, quant
from jetrl.kernels.hopper import heads as split
from jetrl.kernels.lanes import DecodeInputs, Lanes
from jetrl.kernels.logprob import Slope
from jetrl.kernels.ops import Activation, Heads, HeadWeights, Operand, Spec, Target
from jetrl.kernels.quant import Quantized, TokenGroups


@dataclass(slots=True, frozen=True)
class Fp8Weight:
    """A weight [N, K] as codes, with the transpose that grad_input reads."""

    codes: quant.WeightCodes
    parts: tuple[int, ...]
    padded: tuple[int, ...]  # rows of each part in `codes`

    def published(self) -> list[Tensor]:
        """What a publish wrote."""
        return [self.codes.codes, self.codes.scales, self.codes.codes_t, self.codes.scales_t]


@dataclass(slots=True, frozen=True)
class Bf16Weight:
    """A weight [N, K] in BF16."""

    value: Tensor


class HopperOps:
    """See `kernels.ops.Ops`."""

    gradient_dtype = torch.float32

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A missing library, or a choice that cannot be had, is said at start.
        gemm.preferred()
        grad_weight.kernel_name()

    def check_heads(self, heads: Heads) -> None:
        if (
            heads.dim not in attention.DIMS
            or heads.heads % heads.kv_heads
            or heads.heads // heads.kv_heads > attention.MAX_GROUP
        ):
            raise ValueError(
                f"the model has {heads.heads} query heads, {heads.kv_heads} key heads and head dimension {heads.dim}; "
                f"the GPU's attention takes dimensions {attention.DIMS} and up to {attention.MAX_GROUP} query heads a "
                "key head. Use device=cpu."
            )
        if heads.fp8 and heads.dim not in attention_fp8.DIMS:
            raise ValueError(
                f"the model's head dimension is {heads.dim}, but FP8 attention takes {attention_fp8.DIMS} on a GPU. "
                "Use kv_cache=bf16, or device=cpu."
            )
        flash.takes(heads.heads, heads.kv_heads, heads.dim)  # a wrong choice of its backward is said at start

    def weight(self, w: Tensor, parts: tuple[int, ...], fp8: bool, previous: Any) -> Fp8Weight | Bf16Weight:
        if not fp8:
            if previous is None:
                return Bf16Weight(w.to(torch.bfloat16, copy=True))
            previous.value.copy_(w)
            return previous
        if previous is None:
            return Fp8Weight(quant.quantize_weight(w, parts), parts, quant.padded_parts(parts))
        quant.quantize_weight(w, parts, out=previous.codes)
        return previous

    def activation(self, x: Tensor, spec: Spec) -> Activation:
        if not spec.fp8:
            return Activation(x, tokens=x if spec.groups is not None else None)
        value = x if spec.value else None
        if spec.groups is None:
            return Activation(value, quant.quantize_rows(x))
        return Activation(value, *quant.quantize_both(x, spec.groups, spec.parts or None))

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, spec: Spec
    ) -> tuple[Tensor, Activation, Tensor]:
        total, y, inverse = norm.add_rms_norm(x, delta, weight, eps, spec.fp8)
        if isinstance(y, Tensor):
            return total, self.activation(y, spec), inverse
        tokens = None if spec.groups is None else norm.rms_norm_tokens(total, inverse, weight, spec.groups)
        return total, Activation(rows=y, tokens=tokens), inverse

    def rms_norm_grad(
        self, dy: Tensor, x: Tensor, statistics: Tensor | None, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert statistics is not None
        return norm.rms_norm_grad(dy, x, statistics, weight, residual)

    def linear(self, x: Activation, weight: Fp8Weight | Bf16Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Bf16Weight):
            assert x.value is not None
            y = gemm.backend_for(*weight.value.shape).bf16(x.value, weight.value, torch.bfloat16)
        else:
            assert x.rows is not None
            codes = weight.codes
            y = gemm.backend_for(*codes.codes.shape).fp8(x.rows, codes.codes, codes.scales)
            if weight.padded != weight.parts:
                y = torch.cat([p[:, :size] for p, size in zip(y.split(weight.padded, 1), weight.parts, strict=True)], 1)
        return y if bias is None else y.add_(bias)

    def grad_input(self, dy: Activation, weight: Fp8Weight | Bf16Weight) -> Tensor:
        if isinstance(weight, Bf16Weight):
            assert dy.value is not None
            return torch.mm(dy.value, weight.value)
        assert dy.rows is not None
        codes = weight.codes
        return gemm.backend_for(*codes.codes_t.shape).fp8(dy.rows, codes.codes_t, codes.scales_t)

    def grad_weight(self, dy: Activation, x: Activation, groups: TokenGroups, accumulator: Tensor) -> None:
        if isinstance(x.tokens, Quantized):
            grad_weight.accumulate(dy.tokens, x.tokens, accumulator)
        else:
            logprob.add_product(accumulator, dy.tokens.t(), x.tokens)

    def split_heads(
        self, fused: Tensor, weights: HeadWeights, heads: Heads, positions: Tensor, target: Target, keep: bool
    ) -> tuple[Operand, Operand, Operand, tuple[Tensor, ...]]:
        assert heads.fp8 == (target.key_scales is not None), "the cache is not of the model's kind"
        if heads.fp8:
            codes, kept = split.split_heads_fp8(fused, weights, heads, positions, target, keep)
            return codes, *target.codes, kept
        q = split.split_heads(fused, weights, heads, positions, target)
        return q, target.keys, target.values, (q, target.keys, target.values)

    def split_heads_grad(
        self, grads: tuple[Tensor, Tensor, Tensor], fused: Tensor, weights: HeadWeights, heads: Heads, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if weights.q_norm is None:
            fused = grads[0].new_empty(fused.shape[0], heads.width)  # read only where there are norms
        return split.split_heads_grad(*grads, fused, weights, heads, positions)

    def attention(
        self, q: Operand, keys: Operand, values: Operand, layout: Sequences | LaneSequences, spec: Spec
    ) -> tuple[Activation, Tensor | None, Tensor | None]:
        keep = spec.groups is not None
        if isinstance(q, Quantized):
            assert isinstance(keys, Quantized) and isinstance(values, Quantized)
            tiles = _tiles(layout, q.codes.shape[1], keys.codes.shape[1], codes=True)
            if spec.fp8 and not keep and attention_fp8.takes_codes(tiles, q.codes.shape[2]):
                return Activation(rows=attention_fp8.decode_codes(q, keys, values, tiles)), None, None
            out, lse = attention_fp8.attention(q, keys, values, tiles, keep)
        else:
            assert isinstance(keys, Tensor) and isinstance(values, Tensor)
            out, lse = attention.attention(q, keys, values, _tiles(layout, q.shape[1], keys.shape[1]), keep)
        return self.activation(out.flatten(1), spec), out, lse

    def attention_grad(
        self, dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor | None, layout: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert lse is not None
        if flash.takes(q.shape[1], keys.shape[1], q.shape[2]):
            return flash.grad(dout, q, keys, values, out, lse, layout)
        return attention.attention_grad(dout, q, keys, values, out, lse, _tiles(layout, q.shape[1], keys.shape[1]))

    def silu_mul(self, gate_up: Tensor, spec: Spec) -> Activation:
        if not spec.fp8:
            y, _ = norm.silu_mul(gate_up, quantize=False)
            assert isinstance(y, Tensor)
            return self.activation(y, spec)
        rows, tokens = norm.silu_mul(gate_up, quantize=True, groups=spec.groups)
        assert isinstance(rows, Quantized)
        return Activation(rows=rows, tokens=tokens)

    def silu_mul_grad(self, dy: Tensor, gate_up: Tensor, spec: Spec) -> Activation:
        if spec.fp8 and not spec.value:
            rows, tokens = norm.silu_mul_grad(dy, gate_up, spec.groups)
            return Activation(rows=rows, tokens=tokens)  # type: ignore[arg-type]
        dgate_up = norm.silu_mul_grad(dy, gate_up)
        assert isinstance(dgate_up, Tensor)
        return self.activation(dgate_up, spec)

    def embedding_grad(self, accumulator: Tensor, tokens: Tensor, grad: Tensor) -> None:
        logprob.embedding_grad(accumulator, tokens, grad)

    def chosen_logprobs(self, hidden: Tensor, head: Bf16Weight, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return logprob.chosen_logprobs_of_hidden(hidden, head.value, tokens, temperature, gemm.head_logits)

    def chosen_logprobs_with_grad(
        self,
        slope: Slope,
        hidden: Tensor,
        head: Bf16Weight,
        tokens: Tensor,
        temperature: float,
        accumulator: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        arguments = hidden, head.value, tokens, temperature, gemm.head_logits, accumulator
        return logprob.chosen_logprobs_with_grad(slope, *arguments)

    def next_tokens(
        self, hidden: Tensor, head: Bf16Weight, uniforms: Tensor, forced: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        results = []
        for part in logprob.row_slices(hidden.shape[0]):
            logits = gemm.head_logits(hidden[part], head.value)
            if temperature:
                results.append(logprob.sample(logits, uniforms[part], temperature, forced[part]))
            else:
                results.append(logprob.greedy(logits, forced[part]))
        tokens, logprobs = zip(*results, strict=True)
        return torch.cat(tokens), torch.cat(logprobs)

    def begin(self, running: Lanes, step: Tensor) -> DecodeInputs:
        return lanes.begin(running, step)

    def end(self, running: Lanes, lane: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        return lanes.end(running, lane, tokens, logprobs)

    def arena(self, size: int) -> Arena:
        return arena.arena(size, self.device)


def _tiles(layout: Sequences | LaneSequences, heads: int, kv_heads: int, codes: bool = False) -> attention.Tiles:
    """The kernel's work list, made at the first layer. `codes`: of keys in blocks, which training has beside packed ones."""
    key = (heads, kv_heads, codes)
    if key not in layout.made:
        if isinstance(layout, LaneSequences):
            layout.made[key] = _lane_tiles(layout)
        else:
            packed = layout.key_starts is not None and not codes
            where = (layout.key_starts, None, 0) if packed else (None, layout.block_tables, layout.block_size)
            lengths = layout.query_lengths, layout.context_lengths
            layout.made[key] = attention.make_tiles(*lengths, heads, kv_heads, *where, layout.device)
    return layout.made[key]


def _lane_tiles(layout: LaneSequences) -> attention.Tiles:
    """One tile a row, in the order of the rows: the engine names the longest sequences first."""
    return attention.Tiles(
        layout.lane, torch.zeros_like(layout.lane), layout.query_start, layout.query_length, layout.context,
        table=layout.block_tables, block_size=layout.block_size, rows=attention.DECODE.rows, decode=True,
    )  # fmt: skip
