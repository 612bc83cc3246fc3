"""A sweep over how the Hopper attention kernels are launched; what the package launches is measured by `jetrl bench attention`.

    python benchmarks/gpu_attention.py                   every variant, and whether its bits are the same
    python benchmarks/gpu_attention.py --only decode     one of: prefill decode grad

Causal operations are counted: a query at position t has t + 1 keys; 4 dim operations a pair forward, 10 backward (5 products,
although the kernels do 7). Decode is bound by memory: keys and values read once, against the bandwidth of a copy, which is
measured first. Times are the median of CUDA events over repeats; nothing is flushed between them, as all cases but one
prefill are larger than the L2 cache. The package's prefill is the kernel of `prefill.py`, which has one form; the variants
beside it are those of the kernel that serves pages and decode too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from jetrl.kernels.hopper import attention as kernel
from jetrl.kernels.hopper.attention import Launch

HEADS, KV_HEADS, DIM = 32, 8, 128
PREFILL = {"8 x 1024": [1024] * 8, "1 x 8192": [8192], "mixed 64": [64 + 61 * i for i in range(64)]}
DECODE = {"256 x 768": (256, 768), "256 x 800": (256, 800), "64 x 4096": (64, 4096)}


@dataclass(slots=True)
class Line:
    case: str
    variant: str
    seconds: float
    rate: str
    same: str = ""


def seconds(work: Callable[[], object], repeats: int = 15) -> float:
    """Median time of one call, s, after three that compile and warm up."""
    for _ in range(3):
        work()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 2 GB."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    there = torch.empty_like(source)
    return 4 * source.numel() / seconds(lambda: there.copy_(source))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def pairs(lengths: list[int]) -> int:
    """Visible (query, key) pairs of all heads."""
    return HEADS * sum(n * (n + 1) // 2 for n in lengths)


def tera(operations: float, time: float) -> str:
    return f"{operations / time / 1e12:.0f} TFLOP/s"


def packed(lengths: list[int], rows: int | None = None, key_tile: int = kernel.GRAD_KEY_TILE) -> kernel.Tiles:
    starts = [sum(lengths[:s]) for s in range(len(lengths))]
    return kernel.make_tiles(lengths, lengths, HEADS, KV_HEADS, starts, None, 0, "cuda", rows, key_tile)


def label(launch: Launch, extra: str = "") -> str:
    return f"rows {launch.rows} warps {launch.warps} stages {launch.stages}{extra}"


def attempt(case: str, variant: str, work: Callable[[], Tensor], rate: Callable[[float], str], right: Tensor | None) -> Line:
    """Time one variant and compare its output's bits; what does not fit on the chip is reported, not raised."""
    try:
        time = seconds(work)
    except OutOfResources as problem:
        return Line(case, variant, float("inf"), type(problem).__name__)
    same = "" if right is None else ("same bits" if torch.equal(work(), right) else "OTHER BITS")
    return Line(case, variant, time, rate(time), same)


def prefill() -> Iterable[Line]:
    choices = [Launch(r, w, s) for (r, w), s in product([(64, 4), (128, 8), (128, 4)], [2, 3, 4])]
    for case, lengths in PREFILL.items():
        tokens = sum(lengths)
        q, k, v = noise(tokens, HEADS, DIM), noise(tokens, KV_HEADS, DIM), noise(tokens, KV_HEADS, DIM)
        tiles = packed(lengths)
        right = kernel.attention(q, k, v, tiles, True)[0]

        def rate(time: float, operations: int = 4 * DIM * pairs(lengths)) -> str:
            return tera(operations, time)

        def run(launch: Launch, skip: bool, mine: kernel.Tiles, operands: tuple[Tensor, ...] = (q, k, v)) -> Tensor:
            return kernel.forward(*operands, mine, True, launch, skip)[0]

        yield attempt(f"prefill {case}", "package", lambda t=tiles, o=(q, k, v): kernel.attention(*o, t, True)[0], rate, None)
        for launch in choices:
            mine = packed(lengths, launch.rows)
            skips = (True, False) if launch.stages == 3 else (True,)
            for skip in skips:
                variant = label(launch, "" if skip else " mask always")
                yield attempt(f"prefill {case}", variant, lambda a=launch, b=skip, c=mine, r=run: r(a, b, c), rate, right)


def decode(bandwidth: float) -> Iterable[Line]:
    for (case, (sequences, context)), block_size in product(DECODE.items(), (64, 128, 16)):
        blocks = -(-context // block_size)
        table = torch.randperm(sequences * blocks, device="cuda").int().view(sequences, blocks)
        q = noise(sequences, HEADS, DIM)
        k, v = (noise(sequences * blocks * block_size, KV_HEADS, DIM) for _ in "kv")
        tiles = kernel.make_tiles([1] * sequences, [context] * sequences, HEADS, KV_HEADS, None, table, block_size, "cuda")

        def rate(time: float, size: int = 4 * sequences * context * KV_HEADS * DIM) -> str:
            return f"{size / time / 1e12:.2f} TB/s = {size / time / bandwidth:.0%} of a copy"

        operands = (q, k, v, tiles)
        name = f"decode {case} blocks of {block_size}"
        yield attempt(name, "package", lambda o=operands: kernel.attention(*o, False)[0], rate, None)
        right = kernel.attention(*operands, False)[0]
        for stages, skip in product((2, 3, 4, 5), (False, True)):
            launch = Launch(64, 4, stages)
            variant = label(launch, " skip" if skip else "")
            yield attempt(name, variant, lambda a=launch, b=skip, o=operands: kernel.forward(*o, False, a, b)[0], rate, right)


def grad() -> Iterable[Line]:
    lengths = PREFILL["8 x 1024"]
    tokens, work = sum(lengths), 2 * DIM * pairs(lengths)  # operations of one product
    q, k, v = noise(tokens, HEADS, DIM), noise(tokens, KV_HEADS, DIM), noise(tokens, KV_HEADS, DIM)
    dout, tiles = noise(tokens, HEADS, DIM), packed(lengths)
    out, lse = kernel.attention(q, k, v, tiles, True)
    assert lse is not None
    delta, lse2 = kernel.row_terms(dout, out, lse)
    whole = "grad 8 x 1024"
    yield attempt(
        whole, "package", lambda: kernel.attention_grad(dout, q, k, v, out, lse, tiles)[0], lambda t: tera(5 * work, t), None
    )
    yield attempt(whole, "row terms", lambda: kernel.row_terms(dout, out, lse)[0], lambda t: f"{t * 1e6:.0f} us", None)
    terms = (dout, q, k, v, delta, lse2)
    for (key_tile, rows, warps), stages in product([(128, 64, 8), (128, 32, 8), (64, 64, 4), (64, 32, 4)], (1, 2, 3)):
        launch, mine = Launch(rows, warps, stages), packed(lengths, key_tile=key_tile)
        yield attempt(
            f"{whole} dk dv (4 products)",
            label(launch, f" keys {key_tile}"),
            lambda a=launch, b=mine: kernel.grad_keys(*terms, b, a)[0],
            lambda t: tera(4 * work, t),
            None,
        )
    for (rows, warps), stages in product([(128, 8), (64, 4)], (1, 2, 3)):
        launch, mine = Launch(rows, warps, stages), packed(lengths, rows)
        yield attempt(
            f"{whole} dq (3 products)",
            label(launch),
            lambda a=launch, b=mine: kernel.grad_queries(*terms, b, a),
            lambda t: tera(3 * work, t),
            None,
        )


def show(lines: list[Line]) -> None:
    for line in lines:
        print(f"{line.case:36s} {line.variant:34s} {line.seconds * 1e6:9.1f} us  {line.rate:34s} {line.same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("prefill", "decode", "grad"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s, {HEADS}/{KV_HEADS} heads"
    )
    parts = {
        "decode": lambda: decode(bandwidth),
        "prefill": prefill,
        "grad": grad,
    }
    lines: list[Line] = []
    for name, part in parts.items():
        if arguments.only in (None, name):
            lines += part()
            torch.cuda.empty_cache()
    show(lines)
    best: dict[str, Line] = {}
    for line in lines:
        if line.case not in best or line.seconds < best[line.case].seconds:
            best[line.case] = line
    print("\npackage:")
    show([line for line in lines if line.variant == "package"])
    print("best:")
    show(list(best.values()))
    if any(line.same == "OTHER BITS" for line in lines):
        raise SystemExit("some variants have other bits")


if __name__ == "__main__":
    main()
