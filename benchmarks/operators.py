"""Each operator alone, forward and backward, on a model's own shapes: GFLOP/s against the float64 GEMM, or ns an element.

    python benchmarks/operators.py                         the demo model, 128 sequences
    python benchmarks/operators.py --model smollm2 --sequences 16

`decode` is one token of each sequence over a cached context; `training` is the same sequences, packed, at full length. The
share is of the rate that the BLAS reaches with plain float64 products of the same shape.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import best_seconds, cores, facts, product_seconds
from rich.console import Console
from rich.table import Table
from torch import Tensor

from jetrl.kernels import attention, gemm, logprob, norm, quant
from jetrl.kernels.memory import keep_freed_memory
from jetrl.model.checkpoint import parameter_shapes
from jetrl.model.config import LINEARS, ModelConfig, read_config
from jetrl.model.context import KVCache, PackedContext, PagedContext
from jetrl.model.sources import resolve_model


@dataclass(frozen=True)
class Row:
    """One operator's time. `work`: multiplications and additions of a matrix product, else elements of its input."""

    phase: str
    operator: str
    shape: str
    seconds: float
    work: int
    gemm_seconds: float | None = None  # of the plain float64 product


def _random(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def _elementwise(phase: str, operator: str, x: Tensor, work: Callable[[], object]) -> Row:
    return Row(phase, operator, str(tuple(x.shape)), best_seconds(work), x.numel())


def _linear(phase: str, name: str, tokens: int, n: int, k: int, backward: bool) -> Iterator[Row]:
    """Forward and, in training, both gradients of y [tokens, n] = x [tokens, k] W^T in FP8 and in BF16."""
    x, dy, w = _random(tokens, k), _random(tokens, n), _random(n, k)
    wide = [t.double() for t in (x, dy, w)]
    groups = quant.token_groups([tokens])
    plain = {
        "forward": (wide[0], wide[2].t()),
        "grad_input": (wide[1], wide[2]),
        "grad_weight": (wide[1].t(), wide[0]),
    }
    gemm_seconds = {what: product_seconds(*pair) for what, pair in plain.items() if backward or what == "forward"}
    accumulator = torch.zeros(n, k, dtype=torch.float64)
    for kind, label in ((gemm.Fp8Weight, "fp8"), (gemm.Bf16Weight, "bf16")):
        weight = kind.make(w, (n,))
        fp8 = kind is gemm.Fp8Weight
        saved = gemm.save_activation(x, groups, fp8)
        ours: dict[str, Callable[[], object]] = {
            "forward": lambda weight=weight: gemm.forward(x, weight),
            "grad_input": lambda weight=weight: gemm.grad_input(dy, weight),
            "grad_weight": lambda saved=saved, fp8=fp8: gemm.grad_weight(
                gemm.save_activation(dy, groups, fp8), saved, groups, accumulator
            ),
        }
        for what, seconds in gemm_seconds.items():
            shape = f"M {tokens} N {n} K {k}"
            yield Row(phase, f"{name} {what} {label}", shape, best_seconds(ours[what]), 2 * tokens * n * k, seconds)


def _rowwise(phase: str, config: ModelConfig, tokens: int, backward: bool) -> Iterator[Row]:
    x, gate_up = _random(tokens, config.hidden_size), _random(tokens, 2 * config.intermediate_size)
    weight, half = _random(config.hidden_size), config.head_dim // 2
    q, angles = _random(tokens, config.num_heads, config.head_dim), torch.rand(tokens, half)
    yield _elementwise(phase, "quantize_rows", x, lambda: quant.quantize_rows(x))
    yield _elementwise(phase, "rms_norm", x, lambda: norm.rms_norm(x, weight, config.rms_norm_eps))
    yield _elementwise(phase, "rotary", q, lambda: norm.rotary(q, angles, angles))
    yield _elementwise(phase, "silu_mul", gate_up, lambda: norm.silu_mul(gate_up))
    if backward:
        groups, dy = quant.token_groups([tokens]), _random(tokens, config.intermediate_size)
        yield _elementwise(phase, "quantize_tokens", x, lambda: quant.quantize_tokens(x, groups))
        yield _elementwise(phase, "rms_norm_grad", x, lambda: norm.rms_norm_grad(x, x, weight, config.rms_norm_eps))
        yield _elementwise(phase, "silu_mul_grad", gate_up, lambda: norm.silu_mul_grad(dy, gate_up))


def _attention(phase: str, config: ModelConfig, sequences: int, length: int) -> Iterator[Row]:
    """Decode reads a paged cache, one query a sequence; training has packed sequences. Elements: query-key pairs."""
    shape = (config.num_kv_heads, config.head_dim)
    pairs = sequences * config.num_heads * length
    if phase == "decode":
        blocks = -(-length // 16)
        cache = KVCache.allocate(1, sequences * blocks, 16, *shape)
        keys, values = attention.prepare(_random(sequences * blocks * 16, *shape), _random(sequences * blocks * 16, *shape))
        tables = torch.arange(sequences * blocks).view(sequences, blocks)

        def context() -> PagedContext:
            return PagedContext.of(cache, [1] * sequences, [length] * sequences, tables)

        yield Row(phase, "layout", f"S {sequences} K {length}", best_seconds(context), pairs)
        q, layout = _random(sequences, config.num_heads, config.head_dim), context().layout
    else:
        tokens, pairs = sequences * length, pairs * length
        keys, values = attention.prepare(_random(tokens, *shape), _random(tokens, *shape))
        q, layout = _random(tokens, config.num_heads, config.head_dim), PackedContext.of([length] * sequences).layout
        seconds = best_seconds(lambda: attention.attention_grad(q, q, keys, values, layout))
        yield Row(phase, "attention_grad", f"S {sequences} L {length}", seconds, pairs)
    new = _random(sequences if phase == "decode" else sequences * length, *shape)
    yield _elementwise(phase, "prepare keys and values", new, lambda: attention.prepare(new, new))
    seconds = best_seconds(lambda: attention.attention(q, keys, values, layout))
    yield Row(phase, "attention", f"S {sequences} L {length}", seconds, pairs)


def _head(phase: str, config: ModelConfig, rows: int) -> Iterator[Row]:
    vocabulary, hidden = config.vocab_size, config.hidden_size
    h, w, tokens = _random(rows, hidden), _random(vocabulary, hidden), torch.randint(vocabulary, (rows,))
    head, wide, wide_head, dlogprobs = gemm.Bf16Weight.make(w, (vocabulary,)), h.double(), w.double(), torch.ones(rows)
    plain, shape, work = product_seconds(wide, wide_head.t()), f"M {rows} V {vocabulary}", 2 * rows * vocabulary * hidden
    if phase == "decode":
        uniform, rows_of = torch.rand(rows, dtype=torch.float64), logprob.distribution(h, head, 1.0)
        seconds = best_seconds(lambda: logprob.distribution(h, head, 1.0))
        yield Row(phase, "head distribution", shape, seconds, work, plain)
        yield _elementwise(phase, "sample", rows_of.logits, lambda: logprob.sample(rows_of, uniform))
        return
    yield Row(phase, "head", shape, best_seconds(lambda: logprob.chosen_logprobs(h, head, tokens, 1.0)), work, plain)
    accumulator = torch.zeros(vocabulary, hidden, dtype=torch.float64)
    seconds = best_seconds(
        lambda: logprob.chosen_logprobs_with_grad(lambda _, part: dlogprobs[part], h, head, tokens, 1.0, accumulator)
    )
    yield Row(phase, "head gradients", shape, seconds, 2 * work, 2 * plain)


def measure(config: ModelConfig, sequences: int, length: int) -> Iterator[Row]:
    """All operators at decode and training sizes."""
    shapes = parameter_shapes(config)
    for phase, tokens in (("decode", sequences), ("training", sequences * length)):
        for name in LINEARS:
            n, k = shapes[f"layers.0.{name}"]
            yield from _linear(phase, name, tokens, n, k, backward=phase == "training")
        yield from _attention(phase, config, sequences, length)
        yield from _rowwise(phase, config, tokens, backward=phase == "training")
        yield from _head(phase, config, tokens if phase == "decode" else max(1, tokens // 2))


def table(rows: list[Row], title: str) -> Table:
    """A line an operator."""
    shown = Table(title=title, title_justify="left")
    for column in ("phase", "operator", "shape"):
        shown.add_column(column)
    for column in ("µs", "ns/element", "GFLOP/s", "share of GEMM"):
        shown.add_column(column, justify="right")
    for r in rows:
        micros = f"{r.seconds * 1e6:,.0f}"
        if r.gemm_seconds is None:
            shown.add_row(r.phase, r.operator, r.shape, micros, f"{r.seconds / r.work * 1e9:.2f}", "", "")
        else:
            share = f"{r.gemm_seconds / r.seconds:.0%}"
            shown.add_row(r.phase, r.operator, r.shape, micros, "", f"{r.work / r.seconds / 1e9:.1f}", share)
    return shown


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure, print the table, and write the JSON file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a model's name or folder; only its shapes are used")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=32, help="tokens of each sequence")
    parser.add_argument("--threads", type=int, default=cores(), help="torch threads; default: all cores")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    known, source = facts(options.threads), resolve_model(options.model)
    rows = list(measure(read_config(source), options.sequences, options.length))
    title = f"{source.name}: {options.sequences} sequences of {options.length} tokens, {options.threads} threads"
    Console(width=None if Console().is_terminal else 130).print(table(rows, title))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(known | {"title": title, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
