"""Sizes of well-known models, for checks, benches and dry runs that need no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jetrl.model.config import Family, ModelConfig, RopeScaling, read_config
from jetrl.model.sources import WEIGHTS, resolve_model


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
    "llama3.1-8b": replace(
        _shape("llama", 128256, 4096, 14336, 32, 32, 8, 128),
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
        max_position_embeddings=131072,
    ),
    "qwen2.5-7b": replace(_shape("qwen2", 152064, 3584, 18944, 28, 28, 4, 128), max_position_embeddings=131072),
    "smollm2": _shape("llama", 49152, 576, 1536, 30, 9, 3, 64),
}
HUB_IDS = {  # of the base models whose config.json says just that; other versions differ, in positions at least
    "Qwen/Qwen3-8B-Base": DEFAULT,
    "meta-llama/Llama-3.1-8B": "llama3.1-8b",
    "Qwen/Qwen2.5-7B": "qwen2.5-7b",
}


def shape_of(name: str) -> ModelConfig:
    """The sizes that one of `SHAPES`, or a model, stands for. Errors: see `resolve_model`."""
    return SHAPES[name] if name in SHAPES else read_config(resolve_model(name, weights=False))


def model_to_plan(name: str) -> tuple[Path | None, ModelConfig, list[str]]:
    """Folder, sizes and notes of a model whose weights need not be here; no folder where a known hub model cannot be fetched.

    Errors: see `resolve_model` and `read_config`.
    """
    try:
        source = resolve_model(name, weights=False)
    except ValueError as error:
        if name not in HUB_IDS:
            raise
        return None, SHAPES[HUB_IDS[name]], [f"not checked: config.json and tokenizer (sizes are known), because {error}"]
    there = any(source.glob(WEIGHTS))
    return source, read_config(source), [] if there else [f"not checked: weights, because {source} has none yet"]
