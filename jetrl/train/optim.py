"""AdamW on high-precision masters, with one gradient norm, a learning-rate schedule, and moments in FP32, FP8 or INT8.

Problem: updates as small as 1e-6 of a weight vanish in BF16 (2^-9 relative), so the optimizer's copy is FP32 and the model's
BF16 values are made from it at each publish. With FP32 moments that is 12 bytes a parameter, 98 GB of an 8B model.

Method: FP32 moments through `torch.optim.AdamW` (fused on a GPU: no temporaries). Quantised ones through torchao's AdamW: the
same arithmetic in FP32, but what is kept until the next step is rounded, 256 values to a scale. BF16 masters are rounded
stochastically, by random numbers that follow from seed and step, so that a resumed run is the unbroken one. Vectors (norms,
biases) get no weight decay. A step whose gradient is not finite is skipped and counted: clipping would spread one NaN over all
weights.

Given up: torchao's steps are compiled for each shape at first use, some seconds each; on a CPU they run uncompiled. A quantised
second moment far below its block's largest is kept as 0 where the first one is not. If the next gradient is 0 as well, the
weight moves by the first moment over eps: 23 times the rate in FP8 and 7 in INT8, at most, for gradients of 1e-4.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from jetrl.config import OptimizerConfig

MASTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOMENT_BLOCK = 256  # values that share a scale; tensors of another size, or below 4096 values, keep the masters' type
_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of `steps`: linear warmup, then constant, linear or cosine to 0."""
    warm = min(1.0, step / (config.warmup_steps + 1)) if config.warmup_steps else 1.0
    if config.schedule == "constant" or step <= config.warmup_steps:
        return config.lr * warm
    done = (step - 1 - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return config.lr * ((1.0 - done) if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))


def check_moments(config: OptimizerConfig) -> None:
    """Raise ValueError where the moments that a configuration asks for need a library that is not here."""
    if config.moments != "fp32":
        _torchao()


def gradient_norm(gradients: dict[str, Tensor]) -> float:
    """L2 norm of all gradients together; the one wait for the device in a step."""
    return float(torch.stack([torch.linalg.vector_norm(g).double() for g in gradients.values()]).square().sum().sqrt())


class Optimizer:
    """Owns the masters' moments. `masters`: by name, FP32 or as the configuration says."""

    def __init__(self, masters: dict[str, Tensor], config: OptimizerConfig, seed: int = 0) -> None:
        """`seed` decides stochastic rounding. Raises ValueError where torchao is wanted and missing."""
        self.masters, self.config, self._seed = masters, config, seed
        self._device = next(iter(masters.values())).device
        for master in masters.values():
            assert master.dtype == MASTER_DTYPES[config.masters], master.dtype
            master.grad_dtype = None  # gradients stay FP32 beside BF16 masters
        matrices = [p for p in masters.values() if p.dim() > 1]
        vectors = [p for p in masters.values() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = _adamw([g for g in groups if g["params"]], config, self._device.type == "cuda")
        self.steps = 0  # taken
        self.skipped = 0  # because the gradient was not finite

    def step(self, gradients: dict[str, Tensor], lr: float) -> float:
        """Clip and apply one step; returns the gradient's L2 norm before clipping. A norm that is not finite skips the step.

        The gradients are used up: clipping scales them where they are.
        """
        norm = gradient_norm(gradients)
        if not math.isfinite(norm):
            self.skipped += 1
            return norm
        factor = min(1.0, self.config.grad_clip / norm) if norm > 0.0 else 1.0
        for group in self._adamw.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's compiled step takes it as an input
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        for name, master in self.masters.items():
            scaled = gradients[name] if factor == 1.0 else gradients[name].mul_(factor)
            master.grad = scaled.to(torch.float32)
        with self._rounding(), _uncompiled(self._device.type == "cpu"):
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.steps += 1
        return norm

    def moments(self) -> dict[str, Tensor]:
        """The moments, by `moment/name`, of quantised ones the parts; empty before the first step."""
        state, found = self._adamw.state, dict[str, Tensor]()
        for name, master in self.masters.items():
            for moment in _MOMENTS if master in state else ():
                found |= {f"{moment}/{name}{suffix}": part for suffix, part in _parts(state[master][moment]).items()}
        return found

    def restore(self, moments: dict[str, Tensor], steps: int, skipped: int) -> None:
        """Put back what `moments` gave, and the counters. Raises ValueError for moments of another kind."""
        self.steps, self.skipped = steps, skipped
        for name, master in self.masters.items() if steps else ():
            state: dict[str, Tensor] = {"step": torch.tensor(float(steps), device=self._step_device())}
            for moment in _MOMENTS:
                state[moment] = self._empty(master, moment)
                for suffix, part in _parts(state[moment]).items():
                    saved = moments.get(f"{moment}/{name}{suffix}")
                    if saved is None or saved.dtype != part.dtype:
                        raise ValueError(
                            f"{moment} of {name} is not of the kind of optimizer.moments={self.config.moments}. Resume with "
                            "the optimizer's settings of before, or start a new run from the checkpoint's model."
                        )
                    part.copy_(saved)
            self._adamw.state[master] = state

    def _empty(self, master: Tensor, moment: str) -> Tensor:
        if self.config.moments == "fp32":
            return torch.empty_like(master, requires_grad=False)
        return self._adamw._new_buffer(master, moment == _MOMENTS[0])  # pyright: ignore - of torchao's, signed or not

    def _step_device(self) -> torch.device:
        fused = self.config.moments == "fp32" and self._device.type == "cuda"
        return self._device if fused else torch.device("cpu")

    @contextmanager
    def _rounding(self) -> Iterator[None]:
        """Within, random numbers are a function of seed and step; outside they go on as if nothing had happened."""
        if self.config.masters == "fp32":
            yield
            return
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.manual_seed((self._seed * 1_000_003 + self.steps) % 2**63)
            yield


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig, on_gpu: bool) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    if config.moments == "fp32":
        return torch.optim.AdamW(groups, config.lr, betas, config.eps, fused=on_gpu or None)
    library = _torchao()
    kind = {"fp8": library.AdamWFp8, "int8": library.AdamW8bit}[config.moments]
    stochastic = config.masters == "bf16"
    return kind(groups, config.lr, betas, config.eps, block_size=MOMENT_BLOCK, bf16_stochastic_round=stochastic)


def _torchao() -> Any:
    """torchao's optimizers, without its compiled extensions: no optimizer uses them, and they fit few builds of torch."""
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    logging.getLogger("torchao").setLevel(logging.ERROR)  # its import warns of what the line above asks for
    try:
        from torchao import optim
    except ImportError:
        raise ValueError(
            "optimizer.moments is fp8 or int8, which needs torchao, and it is not installed. pip install torchao, or use "
            "optimizer.moments=fp32."
        ) from None
    return optim


@contextmanager
def _uncompiled(wanted: bool) -> Iterator[None]:
    """On a CPU nothing is compiled: no compiler has to be there."""
    if wanted:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def _parts(moment: Tensor) -> dict[str, Tensor]:
    """The tensors that a moment consists of, by suffix."""
    if type(moment) is Tensor:
        return {"": moment}
    names, _ = moment.__tensor_flatten__()  # type: ignore[attr-defined]
    return {f".{name}": getattr(moment, name) for name in names}
