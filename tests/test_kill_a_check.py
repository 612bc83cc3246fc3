"""Kill a check: change one rounding of one operator on the engine's side only, and the exactness check must name it.

There is one definition of each operator, so a change is put in while the engine runs (`torch.inference_mode`) and is absent
from the training forward. The operator named is the first recorded one at or after the change. Where a change flips one
element in millions, or none at random, weights are made with which it shows: the comments say how.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from jetrl.check import check_model, diagnose
from jetrl.kernels import attention, cpu, gemm, logprob, norm, quant
from jetrl.kernels.exact import exact_product, left_operand, order_free_sum, power_above, to_grid
from jetrl.kernels.logprob import Distribution
from jetrl.model.context import KVCache
from jetrl.model.transformer import Transformer, linear_names
from jetrl.rl.types import Completion, Grade, Problem, Prompt, Rollout
from tests.tiny_models import random_weights, tiny_config, tiny_model

# Two, one and three blocks of 128 in the contracted dimensions; 1 / sqrt(24) is no power of two.
SIZES: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 300, "num_heads": 4, "num_kv_heads": 2, "head_dim": 24}
AGREES = "a replay of this rollout agrees to the bit"


@cache
def model_of(family: str = "qwen2", flow: Any = "fp8") -> Transformer:
    return tiny_model(family, flow, **SIZES)


def crafted(change: Callable[[dict[str, Tensor]], None], family: str = "qwen2", **sizes: Any) -> Transformer:
    """A model in FP8 whose random weights `change` edits in place."""
    model = tiny_model(family, **{**SIZES, **sizes})
    weights = random_weights(model.config)
    change(weights)
    model.load(weights)
    return model


def fp8_cache() -> Transformer:
    return tiny_model("qwen2", "fp8", kv_fp8=True, **SIZES)


def small_values() -> Transformer:
    """Values of layer 0 around 1e-6."""
    model = fp8_cache()
    weights = random_weights(model.config)
    weights["layers.0.qkv"][-48:] *= 1e-6
    weights["layers.0.qkv_bias"][-48:] *= 1e-6
    model.load(weights)
    return model


# --- Quantiser and matrix products


def _head_codes(x: Tensor, inverse: bool = False, floor: float = quant.AMAX_FLOOR) -> quant.Quantized:
    q = _quantized(x.reshape(-1, x.shape[-1]), floor, inverse)
    return quant.Quantized(q.codes.view(x.shape), q.scales.view(x.shape[:-1]))


def _quantized(
    x: Tensor, floor: float = quant.AMAX_FLOOR, inverse: bool = False, power_of_two: bool = False
) -> quant.Quantized:
    blocks = quant._blocks_of_columns(x)
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=floor) / quant.E4M3_MAX
    if power_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    values = blocks * (1.0 / scales) if inverse else blocks / scales
    codes = values.clamp(-quant.E4M3_MAX, quant.E4M3_MAX).to(quant.E4M3).view(x.shape[0], -1)
    return quant.Quantized(codes[:, : x.shape[1]].contiguous(), scales.squeeze(-1))


def _terms(codes: Tensor, scales: Tensor, weight: gemm.Fp8Weight) -> list[Tensor]:
    columns = [slice(128 * b, 128 * (b + 1)) for b in range(scales.shape[1])]
    return [codes[:, c] @ weight.decoded[:, c].t() * scales[:, b : b + 1] * weight.row_scales[b] for b, c in enumerate(columns)]


def _unquantized_product(x: Tensor, weight: gemm.Weight) -> Tensor:
    return (x.double() @ weight.dequantized().t()).to(torch.bfloat16)


def _bias_before_rounding(original: Any, self: Any, x: Any, weight: Any, bias: Any) -> Tensor:
    if bias is None:
        return original(self, x, weight, bias)
    q = quant.quantize_rows(x.value)
    product = gemm._block_sum(quant.decode(q.codes), q.scales.double(), weight)
    return (product + bias.double()).to(torch.bfloat16)


def tiny_activations() -> Transformer:
    """silu_mul of layer 0 leaves values around 1e-6."""

    def change(weights: dict[str, Tensor]) -> None:
        weights["layers.0.gate_up"][300:] *= 1e-6

    return crafted(change, "mistral")


def cancelling_blocks() -> Transformer:
    """In layer 0's `down` the second block of 128 cancels the first exactly, and the third is 2^60 times smaller."""

    def change(weights: dict[str, Tensor]) -> None:
        gate, up, down = *weights["layers.0.gate_up"].chunk(2), weights["layers.0.down"]
        for part in (gate, up):
            part[128:256] = part[:128]
        down[:, 128:256] = -down[:, :128]
        up[256:] *= 2.0**-30
        down[:, 256:] *= 2.0**-30

    return crafted(change, "mistral", intermediate_size=384)


# --- Norm, rotary, activation


def _float32_mean(original: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean = x.float().pow(2).mean(-1, keepdim=True).double()
    return (x.double() / torch.sqrt(mean + eps) * weight.double()).to(torch.bfloat16)


def rounding_in(leaf: str) -> Callable[..., Tensor]:
    """In the norm with this leaf: rounded to BF16 before the weight as well, as Hugging Face models do."""

    def change(original: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if any(leaf in m.leaves and weight is m.leaves[leaf].value for m in (model_of(), model_of("qwen3"))):
            return original(x, torch.ones_like(weight), eps) * weight
        return original(x, weight, eps)

    return change


def sensitive_embeddings() -> Transformer:
    """Embedding rows, out of 60,000 random ones, in which a float32 mean changes a bit of layer 0's input norm."""

    def change(weights: dict[str, Tensor]) -> None:
        rows = torch.randn(60_000, 160, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        weight, eps = weights["layers.0.input_norm"], tiny_config("qwen2").rms_norm_eps
        differs = (_float32_mean(None, rows, weight, eps) != norm.rms_norm(rows, weight, eps)).any(1)
        found = rows[differs][: weights["embed"].shape[0]]
        assert len(found) > 10
        weights["embed"][: len(found)] = found

    return crafted(change)


def _swapped_rounding(original: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Products are rounded to BF16 before they are added."""
    (a, b), cos, sin = x.float().chunk(2, -1), cos.unsqueeze(1), sin.unsqueeze(1)
    terms = [t.to(torch.bfloat16) for t in (a * cos, b * sin, b * cos, a * sin)]
    return torch.cat((terms[0] - terms[1], terms[2] + terms[3]), -1)


def _bf16_silu(original: Any, gate_up: Tensor) -> Tensor:
    """Rounded to BF16 before the product. (In float32 torch's silu differs for some gates, but for no BF16 pair after
    rounding: that is no change. Counted over all gates and all 128 significands of `up`.)"""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def _truncated_add(original: Any, x: Tensor, y: Tensor) -> Tensor:
    return ((x.float() + y.float()).view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


# --- Attention


def _grid(key_bits: int, value_bits: int) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda original, keys, values: (
        to_grid(keys.double(), key_bits).to(torch.bfloat16),
        to_grid(values.double(), value_bits).to(torch.bfloat16),
    )


def small_keys() -> Transformer:
    """Queries of layer 0 look only at the key element whose last bit lies on the grid's last one, 2^-24 of the largest."""

    def change(weights: dict[str, Tensor]) -> None:
        weights["layers.0.qkv"][: 6 * 24] = 0.0
        q, k = weights["layers.0.qkv_bias"][: 6 * 24].zero_().view(6, 24).split((4, 2))
        q[:, 5], k[:, 5], k[:, 0] = 10 * 2.0**17, 1.5 * 2.0**-17, 1.0

    return crafted(change)


def _softmax(x: Any, scale: float, float32: bool = False) -> Tensor:
    scores = (exact_product(x.q, x.k) * scale).masked_fill(x.hidden, -torch.inf)
    scores = scores - scores.amax(-1, keepdim=True).clamp(min=-1e300)
    return scores.float().exp().double() if float32 else scores.exp()


def _float32_scale(original: Any, x: Any) -> Tensor:
    return _softmax(x, float(torch.tensor(1 / math.sqrt(x.q.shape[-1]), dtype=torch.float32)))


def _normalised_first(original: Any, x: Any) -> Tensor:
    weights = attention._weights(x)
    bound = power_above(x.v.abs().amax(-1)).unsqueeze(-2)
    weights = to_grid(weights / order_free_sum(weights, attention._SUM_BITS) * bound, attention._WEIGHT_BITS)
    return weights @ (x.v / bound.transpose(-1, -2))


def _rounded_cache(original: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    k, v = original(keys, values)
    return k.to(quant.E4M3).to(torch.bfloat16), v.to(quant.E4M3).to(torch.bfloat16)


# --- Head


def _float32_logits(original: Any, hidden: Tensor, head: gemm.Bf16Weight, temperature: float) -> Distribution:
    return _from_logits((hidden.float() @ head.value.float().t()) / temperature)


def _from_logits(logits: Tensor, log_dtype: torch.dtype = torch.float64) -> Distribution:
    shift = logits.double().amax(1, keepdim=True)
    weights = torch.exp(logits.double() - shift)
    total = order_free_sum(weights, logprob._GRID_BITS)
    return Distribution(logits, weights, shift, torch.log(total.to(log_dtype)).double())


def _temperature_after(original: Any, hidden: Tensor, head: gemm.Bf16Weight, temperature: float) -> Distribution:
    d = original(hidden, head, 1.0)
    return replace(d, logits=d.logits / temperature, shift=d.shift / temperature, log_sum=d.log_sum / temperature)


def _float32_log(original: Any, hidden: Tensor, head: gemm.Bf16Weight, temperature: float) -> Distribution:
    logits = exact_product(left_operand(hidden), head.gridded).float().div_(temperature)
    return _from_logits(logits, torch.float32)


@dataclass(frozen=True)
class Mutation:
    """`change` takes the original function, then its arguments, and stands in for it on the engine's side."""

    module: Any
    attribute: str
    change: Callable[..., Any]
    operator: str  # a regular expression for the whole name of the operator that must be named
    model: Callable[[], Transformer] = model_of
    prompt: int = 64  # tokens
    completion: int = 12
    decode_only: bool = False


def _in_float32(original: Any, *operands: Any) -> Tensor:
    return sum(t.float() for t in _terms(*operands))  # type: ignore[return-value]


ANY_LAYER = r"layers\.\d\."
PROJECTION = ANY_LAYER + "(qkv|o|gate_up|down)"
MUTATIONS: dict[str, Mutation] = {
    "scale: product with the inverse": Mutation(
        quant, "quantize_rows", lambda o, x: _quantized(x, inverse=True), "layers.0.qkv"
    ),
    "scale: power of two": Mutation(quant, "quantize_rows", lambda o, x: _quantized(x, power_of_two=True), "layers.0.qkv"),
    "scale: floor 1e-4": Mutation(
        quant, "quantize_rows", lambda o, x: _quantized(x, floor=1e-4), "layers.0.down", tiny_activations
    ),
    "gemm: blocks in reverse order": Mutation(
        gemm, "_block_sum", lambda o, *operands: sum(reversed(_terms(*operands))), "layers.0.down", cancelling_blocks
    ),
    "gemm: blocks added in float32": Mutation(gemm, "_block_sum", _in_float32, PROJECTION, prompt=400),
    "gemm: another kernel for one row": Mutation(
        gemm, "forward", lambda o, x, w: o(x, w) if len(x) > 1 else _unquantized_product(x, w), "layers.0.qkv", decode_only=True
    ),
    "gemm: BF16 product in flow bf16": Mutation(
        gemm, "forward", lambda o, x, w: x @ w.value.t(), PROJECTION, lambda: model_of(flow="bf16"), prompt=160
    ),
    "bias dropped": Mutation(cpu, "add_bias", lambda o, y, b: y, "layers.0.query"),
    "bias added before the rounding": Mutation(
        cpu.CpuOps, "linear", _bias_before_rounding, "layers.0.o", lambda: model_of("llama")
    ),
    "rms_norm: float32 mean": Mutation(norm, "rms_norm", _float32_mean, "layers.0.input_norm", sensitive_embeddings),
    "input_norm: two roundings": Mutation(norm, "rms_norm", rounding_in("layers.1.input_norm"), "layers.1.input_norm"),
    "post_norm: two roundings": Mutation(norm, "rms_norm", rounding_in("layers.1.post_norm"), "layers.1.post_norm"),
    "q_norm: two roundings": Mutation(
        norm, "rms_norm", rounding_in("layers.1.q_norm"), "layers.1.query", lambda: model_of("qwen3")
    ),
    "k_norm: two roundings": Mutation(
        norm, "rms_norm", rounding_in("layers.0.k_norm"), "layers.0.keys", lambda: model_of("qwen3")
    ),
    "final norm: two roundings": Mutation(norm, "rms_norm", rounding_in("final_norm"), "final_norm"),
    "rotary: BF16 tables": Mutation(
        norm, "rotary", lambda o, x, cos, sin: o(x, cos.bfloat16().float(), sin.bfloat16().float()), "layers.0.query"
    ),
    "rotary: rounded before the sum": Mutation(norm, "rotary", _swapped_rounding, "layers.0.query"),
    "silu_mul: torch silu in BF16": Mutation(norm, "silu_mul", _bf16_silu, "layers.0.silu_mul"),
    "residual: truncated": Mutation(norm, "add", _truncated_add, "layers.0.residual"),
    "prepare: keys on 23 bits": Mutation(attention, "prepare", _grid(23, 16), "layers.0.keys", small_keys),
    "prepare: values on 15 bits": Mutation(attention, "prepare", _grid(24, 15), ANY_LAYER + "values", prompt=300),
    "cache: keys and values in E4M3": Mutation(attention, "prepare", _rounded_cache, "layers.0.keys"),
    "attention: exp in float32": Mutation(
        attention,
        "_weights",
        lambda o, x: _softmax(x, 1 / math.sqrt(x.q.shape[-1]), float32=True),
        ANY_LAYER + "attention",
        prompt=160,
    ),
    "attention: scale in float32": Mutation(attention, "_weights", _float32_scale, ANY_LAYER + "attention", prompt=160),
    "attention: normalised first": Mutation(attention, "_attend", _normalised_first, "layers.0.attention"),
    "FP8 queries: product with the inverse": Mutation(
        cpu, "quantize_heads", lambda o, x: _head_codes(x, True), "layers.0.query", fp8_cache
    ),
    "FP8 values: the floor of another quantiser": Mutation(
        cpu, "quantize_heads", lambda o, x: _head_codes(x, floor=1e-4), "layers.0.values", small_values
    ),
    "FP8 probabilities: not rounded": Mutation(
        attention, "_probability_codes", lambda o, p, factor: p * factor, "layers.0.attention", fp8_cache
    ),
    "FP8 probabilities: rounded without the values' scales": Mutation(
        attention, "_probability_codes", lambda o, p, f: o(p, f * 0 + 448.0) * f / 448.0, "layers.0.attention", fp8_cache
    ),
    "FP8 attention: sum of rounded probabilities": Mutation(
        attention, "order_free_sum", lambda o, p, bits: o(p.bfloat16().double(), bits), "layers.0.attention", fp8_cache
    ),
    "head: float32 product": Mutation(logprob, "distribution", _float32_logits, "logprob", prompt=8, completion=60),
    "head: temperature afterwards": Mutation(logprob, "distribution", _temperature_after, "logprob", prompt=8),
    "head: float32 log": Mutation(logprob, "distribution", _float32_log, "logprob", prompt=8, completion=60),
}


def engine_only(monkeypatch: pytest.MonkeyPatch, module: Any, attribute: str, change: Callable[..., Any]) -> None:
    original = getattr(module, attribute)

    def patched(*arguments: Any) -> Any:
        return change(original, *arguments) if torch.is_inference_mode_enabled() else original(*arguments)

    monkeypatch.setattr(module, attribute, patched)


def rollout_of(model: Transformer, prompt: int, completion: int = 4) -> Rollout:
    rng = random.Random(1)
    tokens = [rng.randrange(model.config.vocab_size) for _ in range(prompt + completion)]
    forced = Completion(tokens[prompt:], [0.0] * completion, "length", 0)
    return Rollout(Prompt(Problem("p", ""), "", tokens[:prompt]), forced, "", Grade(0.0, False), 0)


def found(text: str) -> tuple[str, int]:
    """Operator and token position that a diagnosis names."""
    match = re.search(
        r"first difference, trainer against engine: (\S+), sequence 0, token position (\d+), element \d+: \S+ \(0x", text
    )
    assert match, text
    return match[1], int(match[2])


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_change_of_one_operator_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation = MUTATIONS[name]
    model = mutation.model()
    rollout = rollout_of(model, mutation.prompt, mutation.completion)
    assert AGREES in diagnose(model, model, rollout, 0, 0.7)
    engine_only(monkeypatch, mutation.module, mutation.attribute, mutation.change)
    operator, position = found(diagnose(model, model, rollout, 0, 0.7))
    assert re.fullmatch(mutation.operator, operator), operator
    assert position < rollout.length
    if mutation.decode_only or operator == "logprob":
        assert position >= mutation.prompt


@pytest.mark.parametrize("layer", ["layers.0.qkv", "layers.0.o", "layers.1.gate_up", "layers.1.down"])
def test_a_layer_in_bf16_on_the_engine_side_is_named(layer: str) -> None:
    model = model_of("llama")
    others = [name for name in linear_names(model.config) if name != layer]
    engine_model = tiny_model("llama", fp8_layers=others, **SIZES)
    rollout = rollout_of(model, 8)
    assert found(diagnose(engine_model, model, rollout, 0, 1.0)) == (layer, 0)
    assert found(diagnose(model, engine_model, rollout, 0, 1.0)) == (layer, 0)


@pytest.mark.parametrize("leaf", ["layers.0.qkv_bias", "layers.0.o_bias", "layers.1.gate_up_bias", "layers.1.down_bias"])
def test_a_bias_dropped_on_the_engine_side_is_named(leaf: str) -> None:
    model, engine_model = model_of("llama"), tiny_model("llama", **SIZES)
    engine_model.leaves[leaf].value.zero_()
    operator = "layers.0.query" if leaf == "layers.0.qkv_bias" else leaf.removesuffix("_bias")  # qkv's is added with rotary
    assert found(diagnose(engine_model, model, rollout_of(model, 8), 0, 1.0)) == (operator, 0)


@pytest.mark.parametrize("name", ["scale: product with the inverse", "rotary: BF16 tables", "head: float32 log"])
def test_check_model_fails_in_every_claim_about_the_engine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutation, model = MUTATIONS[name], model_of()
    engine_only(monkeypatch, mutation.module, mutation.attribute, mutation.change)
    for result in check_model(model, 128):
        about_engine = not result.name.startswith("batch invariance")
        hidden_states_agree = mutation.operator == "logprob" and "logprob" not in result.name
        if "prefill = trainer logprob" in result.name and mutation.operator == "logprob":
            continue  # one token a sequence: too few for a change in the last bit of some
        assert (result.differing > 0) == (about_engine and not hidden_states_agree), result
        if about_engine and result.differing:
            assert result.first is not None
            assert result.first.operator == ("logprob" if "logprob" in result.name else mutation.operator)


def test_check_model_sees_a_wrong_copy_of_a_shared_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(original: Any, self: KVCache, source: int, target: int) -> None:
        original(self, source, target)
        for tensor in self.tensors:
            tensor[:, target * self.block_size] = 0  # the block's first token

    engine_only(monkeypatch, KVCache, "copy_block", short)
    results = {r.name: r for r in check_model(model_of(), 128)}
    decode = results["decode = trainer forward"]
    assert decode.first is not None
    assert decode.first.operator == "layers.0.attention"
    assert results["sampled logprob = trainer logprob"].differing > 0
    assert results["engine prefill = trainer forward"].differing == 0  # no group shares a prompt there


def test_check_model_sees_a_batch_dependent_product(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gemm.forward

    def forward(x: Tensor, weight: gemm.Weight) -> Tensor:
        return original(x, weight) if x.shape[0] >= 32 else _unquantized_product(x, weight)

    monkeypatch.setattr(gemm, "forward", forward)  # on both sides
    results = {r.name: r for r in check_model(model_of(), 128)}
    alone = results["batch invariance: packed = alone"]
    assert alone.first is not None
    assert alone.first.operator == "layers.0.qkv"
    assert results["batch invariance: any order"].differing == 0  # as many rows
    assert results["decode = trainer forward"].differing > 0
