"""Sizes of well-known models, for checks and benches that need no weights."""

from __future__ import annotations

from jetrl.model.config import Family, ModelConfig, read_config
from jetrl.model.sources import resolve_model


def _shape(
    family: Family, vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, dim: int
) -> ModelConfig:
    return ModelConfig(
        family, vocabulary, hidden, intermediate, layers, heads, kv_heads, dim, 1e-6, 1e6, None, 32768,
        tie_word_embeddings=False, attention_bias=family == "qwen2", output_bias=False, mlp_bias=False,
        qk_norm=family == "qwen3", eos_token_ids=(), pad_token_id=None, bos_token_id=None,
    )  # fmt: skip


DEFAULT = "qwen3-8b"
SHAPES = {
    DEFAULT: _shape("qwen3", 151936, 4096, 12288, 36, 32, 8, 128),
    "llama3.1-8b": _shape("llama", 128256, 4096, 14336, 32, 32, 8, 128),
    "qwen2.5-7b": _shape("qwen2", 152064, 3584, 18944, 28, 28, 4, 128),
    "smollm2": _shape("llama", 49152, 576, 1536, 30, 9, 3, 64),
}


def shape_of(name: str) -> ModelConfig:
    """The sizes that one of `SHAPES`, or a model, stands for. Errors: see `resolve_model`."""
    return SHAPES[name] if name in SHAPES else read_config(resolve_model(name))
