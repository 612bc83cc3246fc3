"""Our attention: prefill and backward against cuDNN, decode from a paged cache against the memory.

Operations are causal: a query at position t has t + 1 keys; 4 dim a pair forward, 10 backward (5 products; where
FlashAttention 4 is not installed, ours do 7). cuDNN's backward is not deterministic. Decode counts keys and values, read once,
with an FP8 cache their codes and scales.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from jetrl.bench.shapes import visible_pairs
from jetrl.bench.table import Row, Table, at_least
from jetrl.bench.timing import Call, Ceilings, measure, noise, rotation
from jetrl.kernels.attention import Sequences
from jetrl.kernels.ops import Spec
from jetrl.kernels.quant import quantize_heads, token_groups
from jetrl.model.config import ModelConfig
from jetrl.model.context import PackedContext, bytes_per_token

if TYPE_CHECKING:
    from jetrl.kernels.hopper.attention import Tiles

DECODE = ((256, 768), (64, 4096), (16, 8192))
BLOCK = 64
PREFILL_TARGET = 420.0  # TFLOP/s
DECODE_TARGET = 90.0  # % of the copy's rate
DECODE_JUDGED = ((256, 768), (64, 4096))
FP8_TARGET, FP8_CONTEXT = 1.4, 2048  # times faster than with a BF16 cache, from so many keys on


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


def fp8_row(config: ModelConfig, case: tuple[int, int], times: dict[str, float], ceilings: Ceilings, judged: bool) -> Row:
    """times: us of one step of one layer, `fp8` and `bf16`."""
    size = case[0] * case[1] * bytes_per_token("fp8", 1, config.num_kv_heads, config.head_dim)
    row = Row(f"decode {case[0]} x {case[1]}, FP8 cache", times["fp8"], times["bf16"], ceilings.roofline(size))
    row.extra["TB/s"] = f"{1e-6 * size / times['fp8']:.2f}"
    row.target = at_least(row.ratio or 0.0, FP8_TARGET if judged and case[1] >= FP8_CONTEXT else None, "x")
    return row


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
    spec = Spec(fp8=False, groups=token_groups(lengths, q.device))  # for training; BF16 is handed on as it is
    for side, ops in (("ours", HopperOps(q.device)), ("cudnn", FastFp8Ops(q.device))):
        _, out, lse = ops.attention(q, k, v, layout, spec)
        assert out is not None
        forward[side] = [partial(ops.attention, q, k, v, layout, spec)]
        backward[side] = [partial(ops.attention_grad, dout, q, k, v, out, lse, layout)]
    return forward, backward


def _decode_tiles(config: ModelConfig, sequences: int, context: int) -> Tiles:
    """A token a sequence, over blocks of a cache in shuffled order."""
    from jetrl.kernels.hopper.attention import make_tiles

    blocks = -(-context // BLOCK)
    table = torch.randperm(sequences * blocks, device="cuda").int().view(sequences, blocks)
    ones, contexts = [1] * sequences, [context] * sequences
    return make_tiles(ones, contexts, config.num_heads, config.num_kv_heads, None, table, BLOCK, "cuda")


def _decode_side(config: ModelConfig, sequences: int, context: int) -> list[Call]:
    from jetrl.kernels.hopper.attention import attention

    slots, kv_heads, dim = sequences * -(-context // BLOCK) * BLOCK, config.num_kv_heads, config.head_dim
    calls: list[Call] = []
    for _ in range(rotation(cache_bytes(config, sequences, context))):
        q = noise(sequences, config.num_heads, dim)
        k, v = (noise(slots, kv_heads, dim) for _ in "kv")
        calls.append(partial(attention, q, k, v, _decode_tiles(config, sequences, context), False))
    return calls


def _fp8_side(config: ModelConfig, sequences: int, context: int) -> list[Call]:
    from jetrl.kernels.hopper.attention_fp8 import attention
    from jetrl.model.context import KVCache

    blocks, kv_heads, dim = sequences * -(-context // BLOCK), config.num_kv_heads, config.head_dim
    slots = torch.arange(blocks * BLOCK, device="cuda")
    calls: list[Call] = []
    for _ in range(rotation(cache_bytes(config, sequences, context) / 2)):
        q = quantize_heads(noise(sequences, config.num_heads, dim))
        target = KVCache.layer_of_codes(blocks, BLOCK, kv_heads, dim, "cuda").target(0, slots)
        for part in slots.split(1 << 18):
            codes = (quantize_heads(noise(len(part), kv_heads, dim)) for _ in "kv")
            replace(target, rows=part).store(*codes)
        calls.append(partial(attention, q, *target.codes, _decode_tiles(config, sequences, context), False))
    return calls


def bench(config: ModelConfig, tokens: int, ceilings: Ceilings, judged: bool) -> list[Table]:
    """Measure. `judged`: the targets, which are for an 8B model and 8192 tokens, apply."""
    prefill, backward = [], []
    for name, lengths in packings(tokens).items():
        there, back = (measure(sides, graph=False) for sides in _packed_sides(config, lengths))
        prefill.append(prefill_row(config, name, lengths, there, ceilings, judged))
        backward.append(backward_row(config, name, lengths, back, ceilings))
    decode, fp8 = [], []
    for case in DECODE:
        times = measure({"ours": _decode_side(config, *case), "fp8": _fp8_side(config, *case)}, graph=True)
        decode.append(decode_row(config, case, times["ours"], ceilings, judged))
        fp8.append(fp8_row(config, case, {"fp8": times["fp8"], "bf16": times["ours"]}, ceilings, judged))
    return [
        Table("attention: packed sequences", prefill + backward, "ours", "cuDNN"),
        Table("attention: one token a sequence, paged cache, blocks shuffled", decode, "ours"),
        Table("attention: the same with an FP8 cache", fp8, "FP8", "BF16"),
    ]
