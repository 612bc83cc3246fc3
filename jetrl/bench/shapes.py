"""Sizes of models that are worth measuring; no weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jetrl.model.config import Family, ModelConfig, read_config


@dataclass(slots=True, frozen=True)
class Product:
    """A linear layer y [M, N] = x [M, K] W [N, K]^T; `parts` are the rows of each fused projection."""

    name: str
    n: int
    k: int
    parts: tuple[int, ...]


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
    """The sizes that a name or a model folder stands for. Raises ValueError for neither."""
    if name in SHAPES:
        return SHAPES[name]
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(f"shape is {name!r}; wanted one of {', '.join(SHAPES)}, or a model folder")
    return read_config(folder)


def products(config: ModelConfig) -> list[Product]:
    """The four linear layers of a block."""
    hidden, wide, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    return [
        Product("qkv", q + 2 * kv, hidden, (q, kv, kv)),
        Product("o", hidden, q, (hidden,)),
        Product("gate_up", 2 * wide, hidden, (wide, wide)),
        Product("down", hidden, wide, (hidden,)),
    ]


def visible_pairs(config: ModelConfig, lengths: list[int]) -> int:
    """(query, key) pairs that causal attention over whole sequences looks at, all heads."""
    return config.num_heads * sum(n * (n + 1) // 2 for n in lengths)
