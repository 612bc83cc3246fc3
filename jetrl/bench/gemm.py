"""The four linear layers of a block, FP8 against BF16 cuBLAS, quantisation included.

    forward      BF16 x to codes, y = x W^T                                    against torch.mm
    all three    forward; dy to codes; dx = dy W; FP32 accumulator += dy^T x   against the same job in BF16

A second baseline of `all three` overwrites a BF16 weight gradient instead of adding to an FP32 one. The roofline reads and
writes each BF16 tensor and each weight once, and counts no codes of activations.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from jetrl.bench.shapes import Product, products
from jetrl.bench.table import Row, Table, total
from jetrl.bench.timing import Call, Ceilings, measure, noise, rotation
from jetrl.kernels.ops import Ops, Spec
from jetrl.kernels.quant import TokenGroups, token_groups
from jetrl.model.config import ModelConfig

ROWS = (64, 256, 1024)
BACKEND_ROWS = (64, 256)
GRAPH_ROWS = 1024  # up to here launches would count
FORWARD_TARGETS = {64: 1.35, 256: 1.35, 8192: 1.65}
BACKWARD_TARGET = 1.45
OVERWRITING = "BF16 overwriting"


def forward_row(p: Product, m: int, times: dict[str, float], ceilings: Ceilings) -> Row:
    """times: `ours`, of which `product` is the product alone, and `bf16`."""
    bound = ceilings.roofline(p.n * p.k + 2 * m * (p.k + p.n), fp8=2.0 * m * p.n * p.k)
    extra: dict[str, float | str] = {
        "product alone": times["product"],
        "TFLOP/s": 2e-6 * m * p.n * p.k / times["ours"],
    }
    return Row(f"{p.name} {p.n}x{p.k}, M={m}", times["ours"], times["bf16"], bound, extra=extra)


def all_three_row(p: Product, m: int, times: dict[str, float], ceilings: Ceilings) -> Row:
    """times: `ours`, `bf16` that adds to an FP32 accumulator, `overwriting`."""
    size = 2 * p.n * p.k + 8 * p.n * p.k + 4 * m * (p.k + p.n)  # W both ways, accumulator; x, dx, y, dy
    bound = ceilings.roofline(size, fp8=6.0 * m * p.n * p.k)
    extra: dict[str, float | str] = {
        OVERWRITING: times["overwriting"],
        "ratio to it": f"{times['overwriting'] / times['ours']:.2f}x",
    }
    return Row(f"{p.name} {p.n}x{p.k}, M={m}", times["ours"], times["bf16"], bound, extra=extra)


def sum_of_all_three(rows: list[Row], m: int, target: float | None) -> Row:
    """The sum, with the ratio to the second baseline besides."""
    row = total(f"sum, M={m}", rows, target, (OVERWRITING,))
    row.extra["ratio to it"] = f"{float(row.extra[OVERWRITING]) / row.ours:.2f}x"
    return row


def _quantised_linear(ops: Ops, x: Tensor, weight: Any) -> Tensor:
    return ops.linear(ops.activation(x, Spec(fp8=True)), weight, None)


def _forward_sides(ops: Ops, p: Product, m: int) -> dict[str, list[Call]]:
    sides: dict[str, list[Call]] = {"ours": [], "product": [], "bf16": []}
    for _ in range(rotation(p.n * p.k + 2 * m * p.k)):
        x, w = noise(m, p.k), noise(p.n, p.k, scale=p.k**-0.5)
        weight, ready = ops.weight(w, p.parts, True, None), ops.activation(x, Spec(fp8=True))
        sides["ours"].append(partial(_quantised_linear, ops, x, weight))
        sides["product"].append(partial(ops.linear, ready, weight, None))
        sides["bf16"].append(partial(torch.mm, x, w.t()))
    return sides


def _all_three(
    ops: Ops, x: Tensor, dy: Tensor, weight: Any, parts: tuple[int, ...], groups: TokenGroups, accumulator: Tensor
) -> None:
    left = ops.activation(x, Spec(fp8=True, groups=groups))
    ops.linear(left, weight, None)
    right = ops.activation(dy, Spec(fp8=True, groups=groups, parts=parts))
    ops.grad_input(right, weight)
    ops.grad_weight(right, left, groups, accumulator)


def _all_three_bf16(x: Tensor, dy: Tensor, w: Tensor, accumulator: Tensor) -> None:
    from jetrl.kernels.hopper.logprob import add_product

    torch.mm(x, w.t())
    torch.mm(dy, w)
    if accumulator.dtype == torch.float32:
        add_product(accumulator, dy.t(), x)
    else:
        torch.mm(dy.t(), x, out=accumulator)


def _all_three_sides(ops: Ops, p: Product, m: int) -> dict[str, list[Call]]:
    """One input set: it is larger than the cache."""
    x, w, dy = noise(m, p.k), noise(p.n, p.k, scale=p.k**-0.5), noise(m, p.n)
    weight, groups = ops.weight(w, p.parts, True, None), token_groups([m], x.device)
    mine, theirs = torch.zeros(2, p.n, p.k, device=x.device)
    return {
        "ours": [partial(_all_three, ops, x, dy, weight, p.parts, groups, mine)],
        "bf16": [partial(_all_three_bf16, x, dy, w, theirs)],
        "overwriting": [partial(_all_three_bf16, x, dy, w, torch.empty_like(w))],
    }


def _forward(ops: Ops, config: ModelConfig, tokens: int, ceilings: Ceilings, judged: bool) -> Table:
    rows: list[Row] = []
    for m in dict.fromkeys((*ROWS, tokens)):
        each = [forward_row(p, m, measure(_forward_sides(ops, p, m), m <= GRAPH_ROWS), ceilings) for p in products(config)]
        target = FORWARD_TARGETS.get(m) if judged else None
        rows += [*each, total(f"sum, M={m}", each, target, ("product alone",))]
    return Table("gemm: forward, quantisation included", rows, "FP8", "BF16 cuBLAS")


def _backward(ops: Ops, config: ModelConfig, tokens: int, ceilings: Ceilings, judged: bool) -> Table:
    each = [
        all_three_row(p, tokens, measure(_all_three_sides(ops, p, tokens), graph=False), ceilings) for p in products(config)
    ]
    rows = [*each, sum_of_all_three(each, tokens, BACKWARD_TARGET if judged else None)]
    return Table("gemm: forward + grad_input + grad_weight, quantisation included", rows, "FP8", "BF16, FP32 sums")


def _backends(config: ModelConfig, tokens: int, ceilings: Ceilings) -> Table:
    """The product alone in each backend; no time where one cannot run it with rows that are independent of M."""
    from jetrl.kernels.hopper import gemm, quant

    known = {b.name: b for b in (gemm.preferred(), gemm.ScaledMm(), gemm.TritonGemm())}
    usable = {p: {name: b for name, b in known.items() if b.fits(p.n, p.k)} for p in products(config)}
    rows = []
    for m in dict.fromkeys((*BACKEND_ROWS, tokens)):
        for p, backends in usable.items():
            sides: dict[str, list[Call]] = {name: [] for name in backends}
            for _ in range(rotation(p.n * p.k + m * p.k)):
                x, w = quant.quantize_rows(noise(m, p.k)), quant.quantize_weight(noise(p.n, p.k), p.parts)
                for name, backend in backends.items():
                    sides[name].append(partial(backend.fp8, x, w.codes, w.scales))
            times = measure(sides, m <= GRAPH_ROWS)
            bound = ceilings.roofline(p.n * p.k + m * (p.k + 2 * p.n), fp8=2.0 * m * p.n * p.k)
            in_use = times[gemm.backend_for(p.n, p.k).name]
            rows.append(Row(f"{p.name} {p.n}x{p.k}, M={m}", in_use, None, bound, extra={**times}))
    return Table("gemm: FP8 product alone, by backend", rows, "in use")


def bench(config: ModelConfig, tokens: int, ceilings: Ceilings, judged: bool, backends: bool = False) -> list[Table]:
    """Measure. `judged`: the targets, which are for an 8B model and 8192 tokens, apply."""
    from jetrl.kernels.hopper.ops import HopperOps

    ops = HopperOps(torch.device("cuda"))
    tables = [_forward(ops, config, tokens, ceilings, judged), _backward(ops, config, tokens, ceilings, judged)]
    return [*tables, _backends(config, tokens, ceilings)] if backends else tables
