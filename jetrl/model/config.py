"""The shape of a dense decoder, read from a Hugging Face `config.json`.

Four families share one forward, so everything that tells them apart becomes a plain field here. What the forward
cannot compute (mixtures of experts, other rotary scalings, quantised weights) is refused with the value seen and the
values supported; nothing is approximated, and code inside the folder (`auto_map`) is never run. A sliding window is met
half-way: sequences no longer than the window give the same result with and without it, so the usable context is cut to
it and a note is kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# What `transformers` assumes for a key that config.json leaves out. An explicit null is not a key left out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}


@dataclass(slots=True, frozen=True)
class RopeScaling:
    """Llama 3.x rotary scaling (`rope_type: llama3`): frequencies below a cut are divided by `factor`, with a ramp."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(slots=True, frozen=True)
class ModelConfig:
    """Sizes and options of one dense decoder: Llama, Mistral, Qwen2/2.5 or Qwen3."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # bias on q, k, v (Qwen2)
    output_bias: bool  # bias on o (Llama configs with attention_bias)
    mlp_bias: bool  # bias on gate, up, down
    qk_norm: bool  # RMSNorm on each query and key head (Qwen3)
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    notes: tuple[str, ...] = ()  # what the user should know, e.g. a context cut to the sliding window

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


LINEARS = ("qkv", "o", "gate_up", "down")  # the matrix products of a layer, q k v and gate up fused


def linear_names(config: ModelConfig, linears: tuple[str, ...] = LINEARS) -> tuple[str, ...]:
    """Names of the projections of every layer: those that a flow may run in FP8, or of them `linears`. Never the head.

    The one list of them; the flow, the model and every checkpoint use it.
    """
    return tuple(f"layers.{i}.{name}" for i in range(config.num_layers) for name in linears)


def training_flops(config: ModelConfig, lengths: Sequence[int], rows: int) -> float:
    """Operations that a forward and its backward over whole sequences must do, `rows` of them through the head.

    Matrix products and causal attention alone, two operations a multiplication, the backward twice the forward, nothing
    recomputed: what model FLOPs utilisation counts.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    weights = hidden * (2 * config.q_size + 2 * config.kv_size + 3 * wide)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    layer = 2.0 * weights * sum(lengths) + 4.0 * config.q_size * pairs
    return 3.0 * (config.num_layers * layer + 2.0 * config.vocab_size * hidden * rows)


def read_config(folder: str | Path) -> ModelConfig:
    """Read `config.json` and, for the EOS ids, `generation_config.json`.

    Raises ValueError for a missing folder or file, broken JSON, an unsupported architecture or option, and sizes that
    cannot be; each message names the file, what was seen and what is supported.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no model folder at {str(folder)!r}. Give a folder that holds config.json and *.safetensors")
    file = folder / "config.json"
    raw = read_json(file)
    family = _family(raw, file)
    raw = {**_DEFAULTS[family], **raw}
    _refuse_unsupported(raw, file)
    sizes = _sizes(raw, file)
    window, notes = _window(raw, family, file), ()
    if window is not None and window < sizes["max_position_embeddings"]:
        notes = (f"context limited to the sliding window of {window} (of {sizes['max_position_embeddings']}) tokens",)
        sizes["max_position_embeddings"] = window
    theta, scaling = _rope(raw, file)
    bias = _flag(raw, "attention_bias", file) and family in ("llama", "qwen3")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    vocab = sizes["vocab_size"]
    return ModelConfig(
        family=family,
        **sizes,
        rms_norm_eps=_number(raw, "rms_norm_eps", file, default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=_flag(raw, "tie_word_embeddings", file),
        attention_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=_flag(raw, "mlp_bias", file) and family == "llama",
        qk_norm=family == "qwen3",
        eos_token_ids=_token_ids(eos if eos is not None else raw.get("eos_token_id"), vocab, "eos_token_id", file),
        pad_token_id=_token_id(raw.get("pad_token_id"), vocab, "pad_token_id", file),
        bos_token_id=_token_id(raw.get("bos_token_id"), vocab, "bos_token_id", file),
        notes=notes,
    )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError that names the file when it is missing, broken or not an object."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; a Hugging Face model folder holds it. Is this the right folder?")
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}). Was the download cut short? Fetch it again.") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{file} holds a {type(tree).__name__}; a JSON object is wanted")
    return tree


def _family(raw: dict[str, Any], file: Path) -> Family:
    supported = ", ".join(ARCHITECTURES)
    seen = raw.get("architectures")
    if not seen:  # some exports name only the model type
        for family in ARCHITECTURES.values():
            if raw.get("model_type") == family:
                return family
        raise ValueError(f"{file}: no architectures, model_type {raw.get('model_type')!r}; supported: {supported}")
    if not isinstance(seen, list) or len(seen) != 1 or str(seen[0]) not in ARCHITECTURES:
        raise ValueError(f"{file}: architectures is {seen!r}; supported: {supported} (dense text models)")
    return ARCHITECTURES[seen[0]]


def _refuse_unsupported(raw: dict[str, Any], file: Path) -> None:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raise ValueError(f"{file}: {key} is {raw[key]!r}, a mixture of experts; dense models are supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{file}: hidden_act is {raw['hidden_act']!r}; supported: 'silu'")
    quantization = raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"{file}: quantization_config is present (quant_method {method!r}); weights in BF16, FP16 or FP32 are "
            "wanted, for Jet-RL quantises by itself. Use the unquantised model."
        )


def _integer(raw: dict[str, Any], key: str, file: Path) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{file}: {key} is {value!r}; a positive integer is wanted")
    return value


def _number(raw: dict[str, Any], key: str, file: Path, default: float | None = None) -> float:
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < float("inf"):
        raise ValueError(f"{file}: {key} is {value!r}; a positive number is wanted")
    return float(value)


def _flag(raw: dict[str, Any], key: str, file: Path) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{file}: {key} is {value!r}; true or false is wanted")
    return value


def _sizes(raw: dict[str, Any], file: Path) -> dict[str, int]:
    heads, hidden = _integer(raw, "num_attention_heads", file), _integer(raw, "hidden_size", file)
    kv_heads = heads if raw.get("num_key_value_heads") is None else _integer(raw, "num_key_value_heads", file)
    if heads % kv_heads:
        raise ValueError(f"{file}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if raw.get("head_dim") is not None:
        head_dim = _integer(raw, "head_dim", file)
    elif hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise ValueError(f"{file}: no head_dim, and num_attention_heads {heads} does not divide hidden_size {hidden}")
    if head_dim % 2:
        raise ValueError(f"{file}: head_dim is {head_dim}; rotary embedding needs an even one")
    return {
        "vocab_size": _integer(raw, "vocab_size", file),
        "hidden_size": hidden,
        "intermediate_size": _integer(raw, "intermediate_size", file),
        "num_layers": _integer(raw, "num_hidden_layers", file),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": _integer(raw, "max_position_embeddings", file),
    }


def _window(raw: dict[str, Any], family: Family, file: Path) -> int | None:
    """Tokens that a query sees, itself included, in the layer that sees fewest; None without a sliding window."""
    used = family == "mistral" or (family != "llama" and _flag(raw, "use_sliding_window", file))
    if not used or raw.get("sliding_window") is None:
        return None
    return _integer(raw, "sliding_window", file)


def _rope(raw: dict[str, Any], file: Path) -> tuple[float, RopeScaling | None]:
    # `rope_parameters` (transformers 5) holds rope_theta too; before, `rope_scaling` stood beside a plain rope_theta.
    tree = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(tree, dict):
        raise ValueError(f"{file}: rope_scaling / rope_parameters is {tree!r}; an object is wanted")
    tree = {"rope_theta": raw.get("rope_theta", 10000.0), **tree}
    theta = _number(tree, "rope_theta", file)
    kind = tree.get("rope_type", tree.get("type", "default"))
    partial = tree.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"{file}: partial_rotary_factor is {partial!r}; rotation of whole heads (1.0) is supported")
    if any(isinstance(value, dict) for value in tree.values()):
        raise ValueError(f"{file}: rotary parameters by layer type ({sorted(tree)}); one set for all is supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{file}: rope_type is {kind!r}; supported: 'default', 'llama3'")
    original = {"original_max_position_embeddings": raw["max_position_embeddings"], **tree}
    if raw.get("original_max_position_embeddings") is not None:
        original["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    scaling = RopeScaling(
        factor=_number(tree, "factor", file),
        low_freq_factor=_number(tree, "low_freq_factor", file),
        high_freq_factor=_number(tree, "high_freq_factor", file),
        original_max_position_embeddings=_integer(original, "original_max_position_embeddings", file),
    )
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high <= low:
        raise ValueError(f"{file}: high_freq_factor {high} must be above low_freq_factor {low}")
    return theta, scaling


def _token_id(value: Any, vocab: int, key: str, file: Path) -> int | None:
    if value is None or value == -1:  # old Llama configs write -1 for "no padding token"
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab:
        raise ValueError(f"{file}: {key} is {value!r}; an id below vocab_size {vocab} is wanted")
    return value


def _token_ids(value: Any, vocab: int, key: str, file: Path) -> tuple[int, ...]:
    ids = [_token_id(item, vocab, key, file) for item in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(item for item in ids if item is not None))
