"""Our attention: prefill and backward against cuDNN, decode from a paged cache against the memory.

Operations are causal: a query at position t has t + 1 keys; 4 dim a pair forward, 10 backward (5 products; where
FlashAttention 4 is not installed, ours do 7). cuDNN's backward is not deterministic. Decode counts keys and values, read once.
"""

from __future__ import annotations

from functools import partial

import torch

from jetrl.bench.shapes import visible_pairs
from jetrl.bench.table import Row, Table, at_least
from jetrl.bench.timing import Call, Ceilings, measure, noise, rotation
from jetrl.kernels.attention import Sequences
from jetrl.model.config import ModelConfig
from jetrl.model.context import PackedContext

DECODE = ((256, 768), (64, 4096), (16, 8192))
BLOCK = 64
PREFILL_TARGET = 420.0  # TFLOP/s
DECODE_TARGET = 90.0  # % of the copy's rate
DECODE_JUDGED = ((256, 768), (64, 4096))


def packings(tokens: int) -> dict[str, list[int]]:
    """Eight short sequences, and a long one."""
    return {f"8 x {tokens // 8}": [tokens // 8] * 8, f"1 x {tokens}": [tokens]}


def prefill_row(
    config: ModelConfig, name: str, lengths: list[int], times: dict[str, float], ceilings: Ceilings, judged: bool
) -> Row:
    """times: `ours`, `cudnn`."""
    operations = 4.0 * config.head_dim * visible_pairs(config, lengths)
    size = 4 * sum(lengths) * (config.q_size + config.kv_size)  # q, out, keys, values
    rate = {name: 1e-6 * operations / time for name, time in times.items()}
    extra: dict[str, float | str] = {"TFLOP/s": rate["ours"], "cuDNN TFLOP/s": rate["cudnn"]}
    target = at_least(rate["ours"], PREFILL_TARGET if judged else None, " TFLOP/s")
    bound = ceilings.roofline(size, bf16=operations)
    return Row(f"prefill {name}", times["ours"], times["cudnn"], bound, target, extra)


def backward_row(config: ModelConfig, name: str, lengths: list[int], times: dict[str, float], ceilings: Ceilings) -> Row:
    """times: `ours`, `cudnn`."""
    operations = 10.0 * config.head_dim * visible_pairs(config, lengths)
    size = 8 * sum(lengths) * (config.q_size + config.kv_size)  # q, out, dout, dq; keys, values and their gradients
    extra: dict[str, float | str] = {
        "TFLOP/s": 1e-6 * operations / times["ours"],
        "cuDNN TFLOP/s": 1e-6 * operations / times["cudnn"],
    }
    bound = ceilings.roofline(size, bf16=operations)
    return Row(f"backward {name}", times["ours"], times["cudnn"], bound, extra=extra)


def cache_bytes(config: ModelConfig, sequences: int, context: int) -> int:
    """Keys and values of a layer."""
    return 4 * sequences * context * config.kv_size


def decode_row(config: ModelConfig, case: tuple[int, int], time: float, ceilings: Ceilings, judged: bool) -> Row:
    """time: us of one step of one layer."""
    size = cache_bytes(config, *case)
    share = 100 * size / (1e-6 * time) / ceilings.copy
    extra: dict[str, float | str] = {"TB/s": f"{1e-6 * size / time:.2f}", "% of a copy": share}
    target = at_least(share, DECODE_TARGET if judged and case in DECODE_JUDGED else None, "% of a copy")
    return Row(f"decode {case[0]} x {case[1]}, blocks of {BLOCK}", time, None, ceilings.roofline(size), target, extra)


def _packed_sides(config: ModelConfig, lengths: list[int]) -> tuple[dict[str, list[Call]], dict[str, list[Call]]]:
    """Forward and backward, ours and cuDNN's."""
    from jetrl.bench.baseline import FastFp8Ops
    from jetrl.kernels.hopper.ops import HopperOps

    tokens, heads, kv_heads, dim = sum(lengths), config.num_heads, config.num_kv_heads, config.head_dim
    q, dout = noise(tokens, heads, dim), noise(tokens, heads, dim)
    k, v = noise(tokens, kv_heads, dim), noise(tokens, kv_heads, dim)
    layout = PackedContext.of(lengths, q.device).layout
    assert isinstance(layout, Sequences)
    forward: dict[str, list[Call]] = {}
    backward: dict[str, list[Call]] = {}
    for side, ops in (("ours", HopperOps(q.device)), ("cudnn", FastFp8Ops(q.device))):
        out, lse = ops.attention(q, k, v, layout, True)
        forward[side] = [partial(ops.attention, q, k, v, layout, True)]
        backward[side] = [partial(ops.attention_grad, dout, q, k, v, out, lse, layout)]
    return forward, backward


def _decode_sides(config: ModelConfig, sequences: int, context: int) -> dict[str, list[Call]]:
    from jetrl.kernels.hopper import attention as kernel

    blocks, heads, kv_heads, dim = -(-context // BLOCK), config.num_heads, config.num_kv_heads, config.head_dim
    calls: list[Call] = []
    for _ in range(rotation(cache_bytes(config, sequences, context))):
        q = noise(sequences, heads, dim)
        table = torch.randperm(sequences * blocks, device=q.device).int().view(sequences, blocks)
        k, v = (noise(sequences * blocks * BLOCK, kv_heads, dim) for _ in "kv")
        ones, contexts = [1] * sequences, [context] * sequences
        tiles = kernel.make_tiles(ones, contexts, heads, kv_heads, None, table, BLOCK, q.device)
        calls.append(partial(kernel.attention, q, k, v, tiles, False))
    return {"ours": calls}


def bench(config: ModelConfig, tokens: int, ceilings: Ceilings, judged: bool) -> list[Table]:
    """Measure. `judged`: the targets, which are for an 8B model and 8192 tokens, apply."""
    prefill, backward = [], []
    for name, lengths in packings(tokens).items():
        there, back = (measure(sides, graph=False) for sides in _packed_sides(config, lengths))
        prefill.append(prefill_row(config, name, lengths, there, ceilings, judged))
        backward.append(backward_row(config, name, lengths, back, ceilings))
    decode = []
    for case in DECODE:
        times = measure(_decode_sides(config, *case), graph=True)
        decode.append(decode_row(config, case, times["ours"], ceilings, judged))
    return [
        Table("attention: packed sequences", prefill + backward, "ours", "cuDNN"),
        Table("attention: one token a sequence, paged cache, blocks shuffled", decode, "ours"),
    ]
