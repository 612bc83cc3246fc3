"""Tiny random transformers of each family, built without a model folder and without `transformers`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from jetrl.model.checkpoint import parameter_shapes
from jetrl.model.config import ModelConfig, RopeScaling
from jetrl.model.transformer import Transformer, linear_names

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
EOS = (3, 5)

_BASE = ModelConfig(
    "mistral", 61, 48, 72, 2, 4, 2, 12, 1e-6, 1e4, None, 512, False, False, False, False, False, EOS, None, None
)
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64), "output_bias": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_kv_heads": 1},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 20, "tie_word_embeddings": True},
}


def tiny_config(family: str, **changes: Any) -> ModelConfig:
    """Two layers, vocabulary 61, EOS 3 and 5; with the options that tell the families apart, each of them on somewhere."""
    return replace(_BASE, **{"family": family, **_OWN[family], **changes})


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """BF16 weights that depend on `seed` alone: no norm is one, no bias is zero, activations stay near one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        width = 1.0 if name == "embed" and not config.tie_word_embeddings else shape[-1] ** -0.5
        value = 1.0 + 0.2 * noise if "norm" in name else (0.3 if "bias" in name else width) * noise
        weights[name] = value.to(torch.bfloat16)
    return weights


def tiny_model(
    family: str = "qwen2",
    flow: Literal["fp8", "bf16"] = "fp8",
    *,
    seed: int = 0,
    fp8_layers: Collection[str] | None = None,
    device: str = "cpu",
    kv_fp8: bool = False,
    **changes: Any,
) -> Transformer:
    """A loaded model with all projections, or `fp8_layers`, in FP8 (flow "fp8") or none of them (flow "bf16")."""
    config = tiny_config(family, **changes)
    layers = (linear_names(config) if flow == "fp8" else ()) if fp8_layers is None else fp8_layers
    model = Transformer(config, layers, device, kv_fp8)
    model.load(random_weights(config, seed))
    return model
