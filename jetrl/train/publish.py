"""From masters to what the kernels read: quantise once, for trainer and engine alike.

Masters are rounded to BF16 and the FP8 bytes are made from those BF16 values. So a saved Hugging Face checkpoint, which
holds BF16, gives back the very bytes that trained and sampled, in jetrl or elsewhere. On one device engine and trainer
share the model object, and a publish is the only copy there is: one leaf after the other, straight from the masters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jetrl.model.transformer import Transformer


def bf16_weights(masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The masters, by name, as the BF16 tensors that are published, on the CPU, to be saved."""
    return {name: master.detach().to(torch.bfloat16).cpu() for name, master in masters.items()}


def publish(masters: dict[str, Tensor], models: Sequence[Transformer]) -> None:
    """Load the masters' BF16 values into each model. Scales are made with their codes, so neither can arrive alone."""
    for model in models:
        model.load(masters)
