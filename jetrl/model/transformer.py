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
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from jetrl.kernels.checksum import checksum
from jetrl.kernels.logprob import Slope
from jetrl.kernels.ops import Heads, Spec
from jetrl.kernels.select import ops_for
from jetrl.model import layer as layers
from jetrl.model.checkpoint import load_weights, parameter_shapes
from jetrl.model.config import ModelConfig, RopeScaling, linear_names
from jetrl.model.context import FP8_BLOCK, Context, PackedContext, send
from jetrl.model.layer import ChosenLogprobsFunction, EmbedFunction, Layer, LayerFunction, NormFunction, Recordable
from jetrl.model.leaf import Kind, Leaf

Trace = Callable[[str, Tensor], None]


def _parts(config: ModelConfig, name: str, rows: int) -> tuple[int, ...]:
    """Rows of the projections that a fused weight joins; each is quantised as if it were alone."""
    kind = name.rsplit(".", 1)[-1]
    if kind == "qkv":
        return (config.q_size, config.kv_size, config.kv_size)
    if kind == "gate_up":
        return (config.intermediate_size, config.intermediate_size)
    return (rows,)


def random_weights(config: ModelConfig, device: torch.device, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Names and BF16 tensors of a model whose activations stay near one, made one at a time."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in parameter_shapes(config).items():
        noise = torch.randn(shape, generator=generator, device=device)
        value = 1.0 + 0.2 * noise if "norm" in name else noise * (0.3 if "bias" in name else shape[-1] ** -0.5)
        yield name, value.to(torch.bfloat16)


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

    def __init__(
        self, config: ModelConfig, fp8_layers: Collection[str], device: torch.device | str = "cpu", kv_fp8: bool = False
    ) -> None:
        """`fp8_layers`: names out of `linear_names(config)` that run in FP8; the others run in BF16. With `kv_fp8` queries,
        keys and values are quantised, and attention's products run in FP8.

        Raises ValueError for a device without kernels, or for a model that its kernels cannot run.
        """
        self.config, self.device, self.kv_fp8 = config, torch.device(device), kv_fp8
        self.fp8_layers = frozenset(fp8_layers)
        matrices = set(linear_names(config))
        assert self.fp8_layers <= matrices, self.fp8_layers - matrices
        self.ops = ops_for(self.device)
        self.leaves: dict[str, Leaf] = {}
        head = "embed" if config.tie_word_embeddings else "head"
        for name, shape in parameter_shapes(config).items():
            kind: Kind = "fp8" if name in self.fp8_layers else "bf16" if name in matrices | {head} else "plain"
            self.leaves[name] = Leaf(name, shape, kind, _parts(config, name, shape[0]))
        self.head = self.leaves[head]
        angles = torch.arange(config.max_position_embeddings).unsqueeze(1) * rotary_frequencies(config)
        cos, sin = (table.float().to(self.device) for table in (angles.cos(), angles.sin()))
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, cos, sin, kv_fp8)
        self.ops.check_heads(heads)
        self.layers = [self._layer(i, heads) for i in range(config.num_layers)]

    def _layer(self, index: int, heads: Heads) -> Layer:
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): leaf for name, leaf in self.leaves.items() if name.startswith(prefix)}
        return Layer(index, own, heads, self.config.rms_norm_eps, self.ops)

    @staticmethod
    def of_folder(
        folder: Path,
        config: ModelConfig,
        fp8_layers: Collection[str],
        device: torch.device | str = "cpu",
        kv_fp8: bool = False,
    ) -> Transformer:
        """The model of a Hugging Face folder whose `config` was read before, weights loaded. Errors: see `load_weights`."""
        model = Transformer(config, fp8_layers, device, kv_fp8)
        model.load(load_weights(folder, config))
        return model

    @staticmethod
    def random(
        config: ModelConfig,
        fp8_layers: Collection[str],
        device: torch.device | str = "cpu",
        seed: int = 0,
        kv_fp8: bool = False,
    ) -> Transformer:
        """A model of random weights whose activations stay near one: for checks and benches, where no checkpoint is needed."""
        model = Transformer(config, fp8_layers, device, kv_fp8)
        for name, value in random_weights(config, model.device, seed):
            model.leaves[name].assign(value, model.ops)
        return model

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Publish tensors, BF16 or FP32, as BF16 values, all leaves or none: names, shapes and dtypes are checked first."""
        if weights.keys() != self.leaves.keys():
            missing, extra = self.leaves.keys() - weights.keys(), weights.keys() - self.leaves.keys()
            raise ValueError(f"weights do not fit the model: missing {sorted(missing)}, unexpected {sorted(extra)}")
        for name, leaf in self.leaves.items():
            leaf.check(weights[name])
        for name, leaf in self.leaves.items():
            leaf.assign(weights[name], self.ops)

    def checksum(self) -> str:
        """Of the published weights, codes and scales as the kernels read them; to compare models on one kind of device."""
        return checksum(tensor for name in sorted(self.leaves) for tensor in self.leaves[name].published())

    def packed(self, lengths: list[int]) -> PackedContext:
        """The context of whole sequences of these lengths, packed one behind the other."""
        return PackedContext.of(lengths, self.device, self.kv_fp8)

    @property
    def least_block(self) -> int:
        """Tokens of the smallest block of a cache that the device can read; others hold a multiple of it."""
        return FP8_BLOCK if self.kv_fp8 and self.device.type != "cpu" else 1

    def forward(self, tokens: Tensor, context: Context, trace: Trace | None = None, recompute: int = 0) -> Tensor:
        """Hidden states after the final norm. tokens: int64 [T]. Returns BF16 [T, H]. Differentiable where gradients are on.

        The first `recompute` layers keep next to nothing for the backward, which computes them anew. They are its last ones:
        what the other layers kept is gone by then.
        """
        tokens, record = send(tokens, self.device), _recorder(trace)
        training = torch.is_grad_enabled()
        embed = self.leaves["embed"]
        x = EmbedFunction.apply(layers.anchor(), tokens, embed, self.ops) if training else embed.table()[tokens]
        record("embed", x)
        delta = None
        for layer in self.layers:
            if training:
                x, delta = LayerFunction.apply(x, delta, layer, context, layer.index < recompute, record)
            else:
                x, delta, _ = layers.forward(layer, x, delta, context, None, record)
        final, eps = self.leaves["final_norm"], self.config.rms_norm_eps
        if training:
            hidden, total = NormFunction.apply(x, delta, final, eps, self.ops)
        else:
            total, normed, _ = self.ops.add_rms_norm(x, delta, final.value, eps, Spec(fp8=False))
            assert normed.value is not None
            hidden = normed.value
        record(f"layers.{self.config.num_layers - 1}.output", total)
        record("final_norm", hidden)
        return hidden

    def chosen_logprobs(self, hidden: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability (float32 [R], differentiable) of tokens [R] after hidden states [R, H], and entropy [R]."""
        tokens = tokens.to(self.device)
        if torch.is_grad_enabled():
            return ChosenLogprobsFunction.apply(hidden, self.head, tokens, temperature, self.ops)  # type: ignore[return-value]
        return self.ops.chosen_logprobs(hidden, self.head.value, tokens, temperature)

    def chosen_logprobs_with_grad(
        self, slope: Slope, hidden: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and entropy as of `chosen_logprobs`, and the gradient towards hidden, BF16 [R, H], of a loss whose
        derivative by the log-probabilities of some rows `slope` gives. The head's gradient goes into its leaf.
        """
        arguments = hidden.detach(), self.head.value, send(tokens, self.device), temperature, self.head.grad
        return self.ops.chosen_logprobs_with_grad(slope, *arguments)

    def next_tokens(self, hidden: Tensor, uniforms: Tensor, forced: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Tokens after hidden states [R, H] and their log-probabilities; see `Ops.next_tokens`."""
        uniforms, forced = (x.to(self.device, non_blocking=True) for x in (uniforms, forced))
        return self.ops.next_tokens(hidden, self.head.value, uniforms, forced, temperature)


def _recorder(trace: Trace | None) -> layers.Record:
    """Recorder of tensors and of what holds several, for a trace that takes tensors."""

    def record(name: str, tensor: Tensor | Recordable) -> None:
        if trace is None:
            return
        parts = {"": tensor} if isinstance(tensor, Tensor) else tensor.tensors()
        for suffix, part in parts.items():
            trace(name + suffix, part)

    return record
