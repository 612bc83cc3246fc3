"""What a model's sizes mean for a bench; no weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jetrl.model.config import ModelConfig, read_config
from jetrl.model.shapes import SHAPES

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Product:
    """A linear layer y [M, N] = x [M, K] W [N, K]^T; `parts` are the rows of each fused projection."""

    name: str
    n: int
    k: int
    parts: tuple[int, ...]


def shape_of(name: str) -> ModelConfig:
    """The sizes that a name or a model folder stands for; nothing is fetched. Raises ValueError for neither."""
    if name in SHAPES:
        return SHAPES[name]
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(f"shape is {name!r}; wanted one of {', '.join(SHAPES)}, or a model folder")
    return read_config(folder)


def named(option: str, text: str, known: Mapping[str, T]) -> list[T]:
    """What a list with commas names, each once. Raises ValueError for an unknown name."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{option} has {unknown[0]!r}; wanted some of {', '.join(known)}, with commas between them")
    return [known[name] for name in dict.fromkeys(names)]


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
