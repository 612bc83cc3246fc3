"""The only forward: a dense decoder for prefill, decode and training (design contract 3.2).

Flat tokens [T] of any number of sequences go in; there is no batch dimension and no padding. What differs between the
phases is the `Context`. Families differ in options only: biases (Qwen2), norms on query and key heads (Qwen3), rotary
scaling (Llama 3.x), tied embeddings.

    x = embed(tokens)
    each layer:  x += o(attention(rotary(qkv(rms_norm(x)))));  x += down(silu_mul(gate_up(rms_norm(x))))
    hidden = rms_norm(x);   logits = hidden head^T

Every tensor that leaves an operator can be recorded (`trace`), so that a mismatch is named by operator and position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor

from jetrl.kernels import norm
from jetrl.kernels.gemm import Bf16Weight, Fp8Weight
from jetrl.kernels.logprob import Distribution, distribution
from jetrl.model import linear as ops
from jetrl.model.checkpoint import load_weights, parameter_shapes
from jetrl.model.config import ModelConfig, RopeScaling, linear_names
from jetrl.model.context import Context
from jetrl.model.linear import Leaf

Trace = Callable[[str, Tensor], None]


def _parts(config: ModelConfig, name: str, rows: int) -> tuple[int, ...]:
    """Rows of the projections that a fused weight joins; each is quantised as if it were alone."""
    kind = name.rsplit(".", 1)[-1]
    if kind == "qkv":
        return (config.q_size, config.kv_size, config.kv_size)
    if kind == "gate_up":
        return (config.intermediate_size, config.intermediate_size)
    return (rows,)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Angular frequencies, float64 [D / 2], with Llama 3.x scaling where the config asks for it."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponent
    return frequencies if config.rope_scaling is None else _scale_llama3(frequencies, config.rope_scaling)


def _scale_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, with a linear ramp between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = ramp.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


class Transformer:
    """A decoder whose leaves are filled by `load` and refreshed by each publish."""

    def __init__(self, config: ModelConfig, fp8_layers: Collection[str]) -> None:
        """`fp8_layers`: names out of `linear_names(config)` that run in FP8; the others run in BF16."""
        self.config = config
        self.fp8_layers = frozenset(fp8_layers)
        matrices = set(linear_names(config))
        assert self.fp8_layers <= matrices, self.fp8_layers - matrices
        self.leaves: dict[str, Leaf] = {}
        head = "embed" if config.tie_word_embeddings else "head"
        for name, shape in parameter_shapes(config).items():
            operand = Fp8Weight if name in self.fp8_layers else Bf16Weight if name in matrices | {head} else None
            self.leaves[name] = Leaf(name, shape, operand, _parts(config, name, shape[0]))
        self.head = self.leaves[head]
        angles = torch.arange(config.max_position_embeddings).unsqueeze(1) * rotary_frequencies(config)
        self._cos, self._sin = angles.cos().float(), angles.sin().float()

    @staticmethod
    def of_folder(folder: Path, config: ModelConfig, fp8_layers: Collection[str]) -> Transformer:
        """The model of a Hugging Face folder whose `config` was read before, weights loaded. Errors: see `load_weights`."""
        model = Transformer(config, fp8_layers)
        model.load(load_weights(folder, config))
        return model

    def load(self, weights: dict[str, Tensor]) -> None:
        """Publish BF16 tensors, all leaves or none: every name, shape and dtype is checked before the first is assigned."""
        if weights.keys() != self.leaves.keys():
            missing, extra = self.leaves.keys() - weights.keys(), weights.keys() - self.leaves.keys()
            raise ValueError(f"weights do not fit the model: missing {sorted(missing)}, unexpected {sorted(extra)}")
        for name, leaf in self.leaves.items():
            leaf.check(weights[name])
        for name, leaf in self.leaves.items():
            leaf.assign(weights[name])

    def forward(self, tokens: Tensor, context: Context, trace: Trace | None = None) -> Tensor:
        """Hidden states after the final norm. tokens: int64 [T]. Returns BF16 [T, H]."""
        eps = self.config.rms_norm_eps
        cos, sin = self._cos[context.positions], self._sin[context.positions]
        record = trace or (lambda name, tensor: None)
        x = ops.embed(tokens, self.leaves["embed"])
        record("embed", x)
        for i in range(self.config.num_layers):
            layer = f"layers.{i}."
            attended = self._attention(i, ops.rms_norm(x, self.leaves[layer + "input_norm"], eps), context, cos, sin, record)
            x = norm.add(x, attended)
            record(layer + "residual", x)
            normed = ops.rms_norm(x, self.leaves[layer + "post_norm"], eps)
            record(layer + "post_norm", normed)
            activated = ops.silu_mul(self._linear(layer + "gate_up", normed, context, record))
            record(layer + "silu_mul", activated)
            x = norm.add(x, self._linear(layer + "down", activated, context, record))
            record(layer + "output", x)
        hidden = ops.rms_norm(x, self.leaves["final_norm"], eps)
        record("final_norm", hidden)
        return hidden

    def distribution(self, hidden: Tensor, temperature: float) -> Distribution:
        """Next-token distributions of hidden states [R, H], for sampling."""
        return distribution(hidden, self.head.value, temperature)

    def chosen_logprobs(self, hidden: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability (float32 [R], differentiable) of tokens [R] after hidden states [R, H], and entropy [R]."""
        return ops.chosen_logprobs(hidden, self.head, tokens, temperature)

    def _linear(self, name: str, x: Tensor, context: Context, record: Trace) -> Tensor:
        y = ops.linear(x, self.leaves[name], self.leaves.get(name + "_bias"), context.groups)
        record(name, y)
        return y

    def _attention(self, i: int, normed: Tensor, context: Context, cos: Tensor, sin: Tensor, record: Trace) -> Tensor:
        config, layer, tokens = self.config, f"layers.{i}.", normed.shape[0]
        record(layer + "input_norm", normed)
        fused = self._linear(layer + "qkv", normed, context, record)
        sizes = (config.q_size, config.kv_size, config.kv_size)
        q, k, v = (x.reshape(tokens, -1, config.head_dim) for x in fused.split(sizes, 1))
        if config.qk_norm:
            q = ops.rms_norm(q, self.leaves[layer + "q_norm"], config.rms_norm_eps)
            k = ops.rms_norm(k, self.leaves[layer + "k_norm"], config.rms_norm_eps)
        q, k = ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)
        record(layer + "query", q)
        k, v = ops.prepare_keys_values(k, v)
        record(layer + "keys", k)
        record(layer + "values", v)
        keys, values = context.keys_values(i, k, v)
        attended = ops.attend(q, keys, values, context.layout)
        record(layer + "attention", attended)
        return self._linear(layer + "o", attended.reshape(tokens, -1), context, record)
