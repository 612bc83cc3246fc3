"""How much of the optimizer's move reaches the policy: masters, and what is published of them.

    python benchmarks/moves.py --model smollm2 --lr 1e-5 1e-6

A publish rounds masters to BF16 and, where they are projections of an FP8 flow, on to E4M3. Weights begin on BF16's grid, so
a move of less than half a BF16 step is not published until enough of them have added up. Here each weight moves by the
learning rate in one direction, its own random one, as AdamW moves a weight whose gradient keeps its sign. The table has the
mean published move along that direction over the masters' move: 1 is right. Masters of BF16 with stochastic rounding are
rounded at each step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from jetrl.kernels.quant import dequantize_weight, quantize_weight
from jetrl.model.checkpoint import load_weights
from jetrl.model.config import linear_names, read_config
from jetrl.model.sources import resolve_model

STEPS = (1, 4, 15, 30, 60, 120)
ROWS = 128  # of each tensor


def in_bf16(w: Tensor) -> Tensor:
    return w.to(torch.bfloat16).float()


def in_fp8(w: Tensor) -> Tensor:
    """Published as an FP8 projection: through BF16, then E4M3 in blocks."""
    return dequantize_weight(quantize_weight(w.to(torch.bfloat16))).float()


def stochastic(w: Tensor, generator: torch.Generator) -> Tensor:
    """FP32 values rounded to one of the two BF16 neighbours, with the probabilities that keep the mean."""
    bits = w.view(torch.int32)
    up = torch.randint(0, 1 << 16, w.shape, generator=generator, dtype=torch.int32) < (bits & 0xFFFF)
    return ((bits & ~0xFFFF) + (up.int() << 16)).view(torch.float32)


def shares(start: Tensor, lr: float, publish: Callable[[Tensor], Tensor], rounded: bool) -> list[float]:
    """Published over wanted move after each of STEPS. `rounded`: masters are BF16, stochastically rounded at each step."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randint(0, 2, start.shape, generator=generator).float() * 2 - 1
    before, master, found = publish(start), start, []
    for step in range(1, max(STEPS) + 1):
        master = stochastic(master + lr * direction, generator) if rounded else master + lr * direction
        if step in STEPS:
            found.append((((publish(master) - before) * direction).mean() / (lr * step)).item())
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-5, 1e-6])
    parser.add_argument("--every", type=int, default=8, help="of the projections, each so-many-th is measured")
    options = parser.parse_args(arguments)
    config = read_config(folder := resolve_model(options.model))
    weights = load_weights(folder, config)
    projections = [weights[name][:ROWS].float() for name in linear_names(config)[:: options.every]]
    kinds = {
        "projections, FP8": (projections, in_fp8),
        "projections, BF16": (projections, in_bf16),
        "embedding, BF16": ([weights["embed"][:ROWS].float()], in_bf16),
    }
    print("| learning rate | masters | published | " + " | ".join(f"{s} steps" for s in STEPS) + " |")
    print("|---|---|---|" + "---|" * len(STEPS))
    for lr in options.lr:
        for masters in ("FP32", "BF16, stochastic"):
            for kind, (tensors, publish) in kinds.items():
                each = [shares(w, lr, publish, masters != "FP32") for w in tensors]
                means = [sum(column) / len(column) for column in zip(*each, strict=True)]
                print(f"| {lr:g} | {masters} | {kind} | " + " | ".join(f"{m:.2f}" for m in means) + " |")


if __name__ == "__main__":
    main()
