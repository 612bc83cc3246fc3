"""AdamW on FP32 masters, with one gradient norm and a learning-rate schedule.

Updates as small as 1e-6 of a weight vanish in BF16 (2^-9 relative), so the optimizer's copy is FP32 and the model's BF16
values are made from it at each publish. A step whose gradient is not finite is skipped and counted: clipping would spread
one NaN over all weights. Vectors (norms, biases) get no weight decay. The arithmetic is `torch.optim.AdamW`'s.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jetrl.config import OptimizerConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of `steps`: linear warmup, then constant, linear or cosine to 0."""
    warm = min(1.0, step / (config.warmup_steps + 1)) if config.warmup_steps else 1.0
    if config.schedule == "constant" or step <= config.warmup_steps:
        return config.lr * warm
    done = (step - 1 - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return config.lr * ((1.0 - done) if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))


class Optimizer:
    """Owns the masters' moments. `masters`: FP32 tensors by name."""

    def __init__(self, masters: dict[str, Tensor], config: OptimizerConfig) -> None:
        self.masters, self.config = masters, config
        matrices = [p for p in masters.values() if p.dim() > 1]
        vectors = [p for p in masters.values() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        betas = (config.beta1, config.beta2)
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], config.lr, betas, config.eps)
        self.steps = 0  # taken
        self.skipped = 0  # because the gradient was not finite

    def step(self, gradients: dict[str, Tensor], lr: float) -> float:
        """Clip and apply one step; returns the gradient's L2 norm before clipping. A norm that is not finite skips the step."""
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        if not math.isfinite(norm):
            self.skipped += 1
            return norm
        factor = min(1.0, self.config.grad_clip / norm) if norm > 0.0 else 1.0
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for name, master in self.masters.items():
            master.grad = (gradients[name] * factor).to(master.dtype)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.steps += 1
        return norm

    def moments(self) -> dict[str, Tensor]:
        """The moments, by `moment/name`; empty before the first step."""
        state = self._adamw.state
        return {f"{m}/{name}": state[p][m] for name, p in self.masters.items() if p in state for m in _MOMENTS}

    def restore(self, moments: dict[str, Tensor], steps: int, skipped: int) -> None:
        """Put back what `moments` gave, and the counters."""
        self.steps, self.skipped = steps, skipped
        for name, master in self.masters.items():
            if steps:
                state: dict[str, Tensor] = {m: moments[f"{m}/{name}"].to(master.device, copy=True) for m in _MOMENTS}
                self._adamw.state[master] = {"step": torch.tensor(float(steps)), **state}
