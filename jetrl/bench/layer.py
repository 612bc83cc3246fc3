"""One whole block, forward and backward, and one step of decode, against a BF16 block of the fastest kernels.

    training     8192 tokens, weight gradients added to an FP32 accumulator; ours in FP8 and in exact BF16
    exactness    our FP8 forward against the same with cuDNN attention
    decode       one token of each sequence, paged cache, in a CUDA graph
    kernels      where the time of the FP8 block goes

Baseline: cuBLAS products and cuDNN attention (`bench/baseline.py`), all else our fused BF16 kernels. Weights are random.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from jetrl.bench.attention import BLOCK, cache_bytes, packings
from jetrl.bench.profiling import kernel_rows, profiled
from jetrl.bench.shapes import products, visible_pairs
from jetrl.bench.table import Row, Table, Target, at_least
from jetrl.bench.timing import Call, Ceilings, measure, noise, rotation
from jetrl.kernels.ops import Ops
from jetrl.model import layer as block
from jetrl.model.config import ModelConfig, linear_names
from jetrl.model.context import Context, KVCache, PagedContext
from jetrl.model.transformer import Transformer

DECODE, CONTEXT = (64, 256), 1024
TRAINING_TARGETS = (1.41, 1.3)  # of the short sequences, of the long one
EXACTNESS_TARGET = 10.0  # %
PROFILED = 3  # runs under the profiler


def weight_count(config: ModelConfig) -> int:
    """Weights of a block's matrix products."""
    return sum(p.n * p.k for p in products(config))


def training_bound(config: ModelConfig, lengths: list[int], fp8: bool, ceilings: Ceilings, backward: bool = True) -> float:
    """Roofline, us: products at their type's peak, attention at BF16's; weights, accumulators, x, delta, their gradients."""
    tokens, weights = sum(lengths), weight_count(config)
    products_of, attention = 2.0 * tokens * weights, 4.0 * config.head_dim * visible_pairs(config, lengths)
    size = weights * (1 if fp8 else 2) + 8 * tokens * config.hidden_size
    if backward:
        products_of, attention, size = 3 * products_of, 3.5 * attention, 2 * size + 8 * weights
    return ceilings.roofline(size, bf16=attention + (0 if fp8 else products_of), fp8=products_of if fp8 else 0)


def training_rows(
    config: ModelConfig, name: str, lengths: list[int], times: dict[str, float], ceilings: Ceilings, target: float | None
) -> list[Row]:
    """times: `fp8`, `bf16` (ours, exact), `fast`, `overwriting`. The target is FP8's."""
    rows = []
    for flow, label in (("fp8", "FP8"), ("bf16", "exact BF16")):
        ours = times[flow]
        extra: dict[str, float | str] = {
            "BF16 overwriting": times["overwriting"],
            "ratio to it": f"{times['overwriting'] / ours:.2f}x",
        }
        goal = at_least(times["fast"] / ours, target if flow == "fp8" else None, "x")
        bound = training_bound(config, lengths, flow == "fp8", ceilings)
        rows.append(Row(f"{label}, {name}", ours, times["fast"], bound, goal, extra))
    return rows


def exactness_row(
    config: ModelConfig, name: str, lengths: list[int], times: dict[str, float], ceilings: Ceilings, judged: bool
) -> Row:
    """times: `ours`, `cudnn`."""
    cost = 100 * (times["ours"] / times["cudnn"] - 1)
    target = Target(f"≤ {EXACTNESS_TARGET:g}% cost", cost, EXACTNESS_TARGET, at_most=True) if judged else None
    bound = training_bound(config, lengths, True, ceilings, backward=False)
    return Row(f"FP8 forward, {name}", times["ours"], times["cudnn"], bound, target, {"cost of exactness, %": cost})


def decode_row(config: ModelConfig, sequences: int, times: dict[str, float], ceilings: Ceilings) -> Row:
    """times: `fp8`, `fast`."""
    weights = weight_count(config)
    attention = 4.0 * config.num_heads * config.head_dim * sequences * CONTEXT
    size = weights + cache_bytes(config, sequences, CONTEXT)
    bound = ceilings.roofline(size, bf16=attention, fp8=2.0 * sequences * weights)
    return Row(f"{sequences} sequences, context {CONTEXT}", times["fp8"], times["fast"], bound)


def _model(config: ModelConfig, flow: str, layers: int, positions: int) -> Transformer:
    """Random blocks; of the vocabulary a stub."""
    cut = replace(config, num_layers=layers, vocab_size=128, max_position_embeddings=positions)
    return Transformer.random(cut, linear_names(cut) if flow == "fp8" else (), "cuda")


def _with(layer: block.Layer, ops: Ops) -> block.Layer:
    """The layer over other operators, with accumulators of its own."""
    leaves = {}
    for name, leaf in layer.leaves.items():
        grad = torch.zeros(leaf.shape, dtype=ops.gradient_dtype, device=ops.device)
        leaves[name] = replace(leaf, grad=grad)
    return replace(layer, ops=ops, leaves=leaves)


@dataclass(slots=True)
class _Pass:
    """One microbatch through a layer: the residual pair, the gradients of the pair that leaves, the context."""

    x: Tensor
    delta: Tensor
    dx: Tensor
    ddelta: Tensor
    context: Context

    def forward(self, layer: block.Layer) -> block.Saved:
        return block.forward(layer, self.x, self.delta, self.context, self.context.groups)[2]

    def both(self, layer: block.Layer) -> None:
        block.backward(layer, self.forward(layer), self.context, self.dx, self.ddelta)


def _training(config: ModelConfig, tokens: int, ceilings: Ceilings, judged: bool) -> tuple[list[Table], Call]:
    """The tables of training and exactness, and the FP8 block's work for the profiler."""
    from jetrl.bench import baseline

    models = {flow: _model(config, flow, 1, tokens) for flow in ("fp8", "bf16")}
    device, (fp8, bf16) = models["fp8"].device, (m.layers[0] for m in models.values())
    sides = {
        "fp8": _with(fp8, fp8.ops),
        "bf16": _with(bf16, bf16.ops),
        "fast": _with(bf16, baseline.FastBf16Ops(device)),
        "overwriting": _with(bf16, baseline.OverwritingBf16Ops(device)),
    }
    cudnn = replace(sides["fp8"], ops=baseline.FastFp8Ops(device))
    data = tuple(noise(tokens, config.hidden_size) for _ in range(4))
    training, costs, works = [], [], []
    for (name, lengths), target in zip(packings(tokens).items(), TRAINING_TARGETS, strict=True):
        batch = _Pass(*data, context=models["fp8"].packed(lengths))
        works.append(partial(batch.both, sides["fp8"]))
        times = measure({side: [partial(batch.both, layer)] for side, layer in sides.items()}, graph=False)
        training += training_rows(config, name, lengths, times, ceilings, target if judged else None)
        halves: dict[str, list[Call]] = {
            "ours": [partial(batch.forward, sides["fp8"])],
            "cudnn": [partial(batch.forward, cudnn)],
        }
        costs.append(exactness_row(config, name, lengths, measure(halves, graph=False), ceilings, judged))
    tables = [
        Table("layer: forward + backward of a block", training, "ours", "fastest BF16"),
        Table("layer: the cost of exactness, forward for training", costs, "ours", "cuDNN attention"),
    ]
    return tables, works[0]


def _decode_calls(model: Transformer, ops: Ops, sequences: int) -> list[Call]:
    """One step through each of the model's layers alone, whose weights and caches differ."""
    config, blocks = model.config, -(-CONTEXT // BLOCK)
    cache = KVCache.allocate(config.num_layers, sequences * blocks, BLOCK, config.num_kv_heads, config.head_dim, model.device)
    cache.keys.normal_()
    cache.values.normal_()
    table = torch.randperm(sequences * blocks).view(sequences, blocks)
    context = PagedContext.of(cache, [1] * sequences, [CONTEXT] * sequences, table)
    x, delta = noise(sequences, config.hidden_size), noise(sequences, config.hidden_size)
    return [partial(block.forward, replace(layer, ops=ops), x, delta, context, None) for layer in model.layers]


def _decode(config: ModelConfig, ceilings: Ceilings) -> Table:
    from jetrl.bench.baseline import FastBf16Ops

    rows = []
    for sequences in DECODE:
        layers = rotation(weight_count(config) + cache_bytes(config, sequences, CONTEXT))
        fp8, bf16 = (_model(config, flow, layers, CONTEXT) for flow in ("fp8", "bf16"))
        sides = {
            "fp8": _decode_calls(fp8, fp8.ops, sequences),
            "fast": _decode_calls(bf16, FastBf16Ops(bf16.device), sequences),
        }
        rows.append(decode_row(config, sequences, measure(sides, graph=True), ceilings))
    return Table("layer: one step of decode, in a CUDA graph", rows, "FP8", "BF16 cuBLAS, our attention")


def bench(config: ModelConfig, tokens: int, ceilings: Ceilings, judged: bool) -> list[Table]:
    """Measure. `judged`: the targets, which are for an 8B model and 8192 tokens, apply."""
    tables, work = _training(config, tokens, ceilings, judged)
    kernels = kernel_rows(profiled(work, PROFILED).kernels, PROFILED)
    title = f"layer: kernels of the FP8 block, forward + backward, {next(iter(packings(tokens)))}"
    return [*tables, _decode(config, ceilings), Table(title, kernels, "time")]
