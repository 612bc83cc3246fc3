"""Leaves of the model: weights in the form that kernels read, with their gradient accumulators.

Problem: trainer and engine must read the same bytes, and weight gradients must accumulate in a wide type, across
microbatches, without an extra pass.

Method: a `Leaf` holds what kernels read (`value`) and, while training, the accumulator `grad`. Masters are not here; the
trainer owns them and publishes their BF16 values through `assign`. The backward adds into `grad` itself, so autograd never
holds a weight's gradient.

Given up: `torch.nn.Parameter`, hence optimizers that look for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from jetrl.kernels.ops import Ops

Kind = Literal["fp8", "bf16", "plain"]  # FP8 or BF16 weight of a matrix product; a BF16 tensor that is read as it is


@dataclass(slots=True)
class Leaf:
    """One tensor of the model: a vector or an embedding in BF16, or the weight of a matrix product."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = "plain"
    parts: tuple[int, ...] = ()  # rows of each fused projection, for matrix products
    value: Any = None  # BF16 tensor, or what `Ops.weight` makes; None until the first publish
    grad: Tensor | None = None  # accumulator, set while training

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError unless `tensor` is what `assign` takes."""
        if tuple(tensor.shape) != self.shape or tensor.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{self.name}: got {tensor.dtype} {tuple(tensor.shape)}, wanted BF16 or FP32 {self.shape}")

    def assign(self, tensor: Tensor, ops: Ops) -> None:
        """Publish a tensor of this leaf's shape, BF16 or FP32, as its BF16 values: quantise those if the leaf is FP8."""
        self.check(tensor)
        tensor = tensor.detach().to(ops.device).contiguous()
        if self.kind != "plain":
            self.value = ops.weight(tensor, self.parts, self.kind == "fp8", self.value)
        elif self.value is None:
            self.value = tensor.to(torch.bfloat16, copy=True)
        else:
            self.value.copy_(tensor)  # in place: captured graphs read it where it is

    def table(self) -> Tensor:
        """The BF16 tensor [rows, cols] of a plain leaf or of a BF16 weight."""
        return self.value if self.kind == "plain" else self.value.value

    def published(self) -> list[Tensor]:
        """The tensors that the last publish wrote."""
        return self.value.published() if self.kind == "fp8" else [self.table()]

    def accumulate(self, gradient: Tensor) -> None:
        """Add a gradient of this leaf's shape, if the leaf is being trained."""
        if self.grad is not None:
            self.grad.add_(gradient.to(self.grad.dtype))


def tensor_of(leaf: Leaf | None) -> Tensor | None:
    """The BF16 tensor of a leaf that a family may lack."""
    return None if leaf is None else leaf.table()
