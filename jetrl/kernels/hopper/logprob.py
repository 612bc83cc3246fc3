"""Logits to log-probabilities, entropies and tokens on Hopper: the Triton twin of `jetrl.kernels.logprob`.

Problem: sampler and trainer sum over the vocabulary; the two sums must be one program, whatever the batch around a row.

Method, for FP32 logits of a row, cut into tiles of 4096 columns:

    z = div_rn(logit, T)                                              one rounding, in registers
    stage 1, a program a tile:   m_t = max z    s_t = sum e    q_t = sum e * (z - m_t)    with e = exp(z - m_t)
    stage 2, a program a row, in FP64:   m = max m_t    S = sum s_t * exp(m_t - m)
        logprob(token) = fp32((z[token] - m) - log S)
        entropy        = fp32(log S - sum exp(m_t - m) * (q_t + (m_t - m) * s_t) / S)

`chosen_logprobs`, `sample` and `greedy` launch the same two compiled kernels with the same constants, so a log-probability
is the same 32 bits from each. Sampling inverts the cumulative sum with a kernel in between: first over the tiles' weights
s_t * exp(m_t - m), then over the e of one tile, both rounded to integers, whose sums no order can change.

Layout: logits float32 [R, V], contiguous; hidden BF16 [R, H]; head BF16 [V, H]. V from 1 to 2^19. Offsets are int64. A head
goes through in chunks of 1024 rows, so [R, V] never exists at once. Nothing waits for the device; everything can be captured
in a CUDA graph (which then holds its temperature).
Traffic: stage 1 and the gradient read the logits once each, sampling one tile a row more.
Row-independence: the tile and the number of warps are constants, and no kernel is specialised on the address of the logits
(Triton would choose the order of a sum by it), only on V.
Given up: weights below 2^-35 of the largest of their tile, and tiles below 2^-41 of the row's weight, are never drawn.
Tokens drawn differ from the CPU reference's where u falls within about 1e-6 of a boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetrl.kernels.logprob import Slope
from jetrl.kernels.memory import row_chunks

Gemm = Callable[[Tensor, Tensor], Tensor]  # (hidden BF16 [R, H], head BF16 [V, H]) -> float32 [R, V], contiguous

CHUNK_ROWS = 1024
_TILE = 4096
_MOST_TILES = 128
_LARGEST_VOCABULARY = _TILE * _MOST_TILES
# Row-independence, see above; and a slice of the tokens must not make another program, least of all inside a graph's capture.
_ADDRESSES = ["logits", "tokens", "uniform", "dlogprobs", "largest", "total", "weighted", "row_largest", "log_sum"]
_ADDRESSES += ["logprobs", "entropy"]


@dataclass(slots=True, frozen=True)
class Tiles:
    """What stage 1 leaves of logits [R, V]: float32 [R, ceil(V / 4096)] each."""

    largest: Tensor  # m_t, the largest z of the tile
    total: Tensor  # s_t, sum of exp(z - m_t)
    weighted: Tensor  # q_t, sum of exp(z - m_t) * (z - m_t)


@dataclass(slots=True, frozen=True)
class Statistics:
    """What stage 2 knows of each row. Logits with a NaN or +Inf give log_sum NaN; rows of -Inf alone give -Inf."""

    largest: Tensor  # float32 [R], the largest z
    log_sum: Tensor  # float32 [R], log of the sum of exp(z - largest)
    entropy: Tensor  # float32 [R], nats


@triton.jit
def _scaled(logits, temperature):
    """logits / T, rounded once. Division by one changes no bit, so it is left out."""
    z = logits
    if temperature != 1.0:
        z = tl.div_rn(logits, temperature)
    return z


@triton.jit
def _finite_or_zero(largest):
    """What to subtract from the z of a tile: a tile of -Inf alone has weights of zero, not NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _row_start(logits, row, vocabulary, ALIGNED: tl.constexpr):
    """Address of a row (int64) of the logits. ALIGNED: rows start at multiples of 16 bytes, so loads can be that wide."""
    start = logits + row * vocabulary
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit(do_not_specialize=_ADDRESSES)
def _tile_kernel(
    logits,  # float32 [R, V]
    largest,  # out: float32 [R, tiles], m_t
    total,  # out: float32 [R, tiles], s_t
    weighted,  # out: float32 [R, tiles], q_t
    temperature,  # float32
    vocabulary,  # V
    tiles,  # ceil(V / TILE)
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    column = program % tiles * TILE + tl.arange(0, TILE)
    start = _row_start(logits, row, vocabulary, ALIGNED)
    z = _scaled(tl.load(start + column, mask=column < vocabulary, other=float("-inf")), temperature)
    peak = tl.max(z, 0)
    gap = z - _finite_or_zero(peak)
    weight = tl.exp(gap)
    tl.store(largest + program, peak)
    tl.store(total + program, tl.sum(weight, 0))
    tl.store(weighted + program, tl.sum(tl.where(weight > 0.0, weight * gap, 0.0), 0))  # 0 * -Inf is NaN


@triton.jit(do_not_specialize=_ADDRESSES)
def _row_kernel(
    logits,  # float32 [R, V]
    tokens,  # int64 [R]; outside of 0..V-1 the log-probability is NaN
    largest,  # float32 [R, tiles], m_t
    total,  # float32 [R, tiles], s_t
    weighted,  # float32 [R, tiles], q_t
    logprobs,  # out: float32 [R]
    row_largest,  # out: float32 [R], m
    log_sum,  # out: float32 [R], log S
    entropy,  # out: float32 [R]
    temperature,  # float32
    vocabulary,  # V
    tiles,
    MOST_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, MOST_TILES)
    inside = tile < tiles
    place = row * tiles + tile
    peaks = tl.load(largest + place, mask=inside, other=float("-inf")).to(tl.float64)
    totals = tl.load(total + place, mask=inside, other=0.0).to(tl.float64)
    moments = tl.load(weighted + place, mask=inside, other=0.0).to(tl.float64)
    peak = tl.max(peaks, 0)
    empty = peaks == float("-inf")
    gap = tl.where(empty, 0.0, peaks - peak)
    share = tl.where(empty, 0.0, tl.exp(gap))
    mass = tl.sum(share * totals, 0)
    log_mass = tl.log(mass)
    mean = tl.sum(share * (moments + gap * totals), 0) / mass
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < vocabulary)
    z = _scaled(tl.load(logits + row * vocabulary + token, mask=known, other=float("nan")), temperature).to(tl.float64)
    tl.store(logprobs + row, ((z - peak) - log_mass).to(tl.float32))
    tl.store(row_largest + row, peak.to(tl.float32))
    tl.store(log_sum + row, log_mass.to(tl.float32))
    tl.store(entropy + row, (log_mass - mean).to(tl.float32))


@triton.jit
def _integers(weights, LIMIT: tl.constexpr, GRID: tl.constexpr):
    """FP64 weights as integers on the grid 1 / GRID. What is not in 0..LIMIT (a NaN) counts as zero."""
    known = (weights >= 0.0) & (weights <= LIMIT)
    return (tl.where(known, weights, 0.0) * GRID + 0.5).to(tl.int64)


@triton.jit(do_not_specialize=_ADDRESSES)
def _draw_kernel(
    logits,  # float32 [R, V]
    uniform,  # float32 or float64 [R], in [0, 1)
    largest,  # float32 [R, tiles], m_t
    total,  # float32 [R, tiles], s_t
    tokens,  # out: int64 [R], always in 0..V-1
    temperature,  # float32
    vocabulary,  # V
    tiles,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    MOST_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # The tile: the first one whose cumulative weight exceeds u times the sum. 128 tiles of at most 2^12 * 2^40 fit int64.
    tile = tl.arange(0, MOST_TILES)
    place = row * tiles + tile
    peaks = tl.load(largest + place, mask=tile < tiles, other=float("-inf"))
    totals = tl.load(total + place, mask=tile < tiles, other=0.0).to(tl.float64)
    gap = peaks.to(tl.float64) - _finite_or_zero(tl.max(peaks, 0)).to(tl.float64)
    shares = _integers(totals * tl.exp(gap), 8192.0, 1099511627776.0)  # 2^40
    mass = tl.sum(shares, 0)
    target = tl.minimum((tl.load(uniform + row).to(tl.float64) * mass.to(tl.float64)).to(tl.int64), mass - 1)
    chosen = tl.min(tl.where(tl.cumsum(shares, 0) > target, tile, MOST_TILES - 1), 0)
    chosen = tl.minimum(chosen, tiles - 1)
    before = tl.sum(tl.where(tile < chosen, shares, 0), 0)
    width = tl.maximum(tl.sum(tl.where(tile == chosen, shares, 0), 0), 1)
    peak = tl.max(tl.where(tile == chosen, peaks, float("-inf")), 0)
    # The token: the same within the tile, for the share of the tile's weight that lies below the target.
    column = chosen * TILE + tl.arange(0, TILE)
    start = _row_start(logits, row, vocabulary, ALIGNED)
    z = _scaled(tl.load(start + column, mask=column < vocabulary, other=float("-inf")), temperature)
    weights = _integers(tl.exp(z - _finite_or_zero(peak)).to(tl.float64), 2.0, 17179869184.0)  # 2^34
    count = tl.sum(weights, 0)
    goal = (target - before).to(tl.float64) / width.to(tl.float64) * count.to(tl.float64)
    goal = tl.minimum(goal.to(tl.int64), count - 1)
    token = tl.min(tl.where(tl.cumsum(weights, 0) > goal, column, vocabulary - 1), 0)
    tl.store(tokens + row, tl.minimum(token, vocabulary - 1).to(tl.int64))


@triton.jit(do_not_specialize=_ADDRESSES)
def _greedy_kernel(
    logits,  # float32 [R, V]
    largest,  # float32 [R, tiles], m_t at temperature 1
    tokens,  # out: int64 [R], first place of the largest logit; always in 0..V-1
    vocabulary,  # V
    tiles,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    MOST_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, MOST_TILES)
    peaks = tl.load(largest + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    peak = tl.max(peaks, 0)
    chosen = tl.minimum(tl.min(tl.where(peaks == peak, tile, MOST_TILES - 1), 0), tiles - 1)
    column = chosen * TILE + tl.arange(0, TILE)
    start = _row_start(logits, row, vocabulary, ALIGNED)
    z = tl.load(start + column, mask=column < vocabulary, other=float("-inf"))
    token = tl.min(tl.where(z == peak, column, vocabulary - 1), 0)
    tl.store(tokens + row, tl.minimum(token, vocabulary - 1).to(tl.int64))


@triton.jit(do_not_specialize=_ADDRESSES)
def _grad_kernel(
    logits,  # float32 [R, V]
    tokens,  # int64 [R]
    dlogprobs,  # float32 [R]
    row_largest,  # float32 [R], m
    log_sum,  # float32 [R], log S
    dlogits,  # out: BF16 [R, V]
    temperature,  # float32
    vocabulary,  # V
    tiles,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    column = program % tiles * TILE + tl.arange(0, TILE)
    scale = tl.div_rn(tl.load(dlogprobs + row), temperature)
    start = _row_start(logits, row, vocabulary, ALIGNED)
    needed = tl.where(scale != 0.0, vocabulary, 0)  # prompt tokens have no gradient: their logits are not read
    z = _scaled(tl.load(start + column, mask=column < needed, other=0.0), temperature)
    probability = tl.exp(z - tl.load(row_largest + row) - tl.load(log_sum + row))
    one_hot = (column == tl.load(tokens + row)).to(tl.float32)
    gradient = tl.where(scale == 0.0, 0.0, scale * (one_hot - probability))
    tl.store(dlogits + row * vocabulary + column, gradient.to(tl.bfloat16), mask=column < vocabulary)


@triton.jit
def _embedding_kernel(
    order,  # int64 [T], positions sorted by token, equal tokens in their order
    tokens,  # int64 [T], tokens in that order
    ends,  # int64 [T], where the run of equal tokens ends
    grad,  # BF16 [T, H]
    accumulator,  # in and out: float32 [V, H]
    hidden_size,  # H
    blocks,  # ceil(H / COLUMNS)
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    first = (program // blocks).to(tl.int64)
    token = tl.load(tokens + first)
    previous = tl.load(tokens + first - 1, mask=first > 0, other=-1)
    if token != previous:  # one program a token and block of columns: nobody else writes here
        column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < hidden_size
        end = tl.load(ends + first)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        rows = first + tl.arange(0, ROWS)
        while first < end:
            position = tl.load(order + rows, mask=rows < end, other=0)
            mask = (rows < end)[:, None] & inside[None, :]
            sums += tl.load(grad + position[:, None] * hidden_size + column[None, :], mask=mask, other=0.0).to(tl.float32)
            first += ROWS
            rows += ROWS
        target = accumulator + token * hidden_size + column
        tl.store(target, tl.load(target, mask=inside, other=0.0) + tl.sum(sums, 0), mask=inside)


def _launch(kernel: Any, programs: int, *arguments: object, num_warps: int) -> None:
    """Runs so many programs of a kernel; none is fine. The number of warps is part of a kernel's order of sums: a constant."""
    if programs:
        kernel[(programs,)](*arguments, num_warps=num_warps)


def _aligned(logits: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes: by V alone, so that a row's bits depend on nothing else.

    Raises ValueError for logits that the kernels cannot read.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous float32 [rows, vocabulary], not {logits.dtype} {tuple(logits.shape)}.")
    if not 1 <= logits.shape[1] <= _LARGEST_VOCABULARY:
        raise ValueError(f"The vocabulary must have 1 to {_LARGEST_VOCABULARY} tokens, not {logits.shape[1]}.")
    aligned = logits.shape[1] % 16 == 0
    if aligned and logits.data_ptr() % 16:
        raise ValueError("logits must start at a multiple of 16 bytes, as every tensor of torch's own does.")
    return aligned


def tile_statistics(logits: Tensor, temperature: float) -> Tiles:
    """Stage 1. logits: float32 [R, V]; temperature above 0."""
    aligned, (rows, vocabulary) = _aligned(logits), logits.shape
    tiles = triton.cdiv(vocabulary, _TILE)
    largest, total, weighted = (logits.new_empty((rows, tiles)) for _ in range(3))
    arguments = (logits, largest, total, weighted, float(temperature), vocabulary, tiles, aligned, _TILE)
    _launch(_tile_kernel, rows * tiles, *arguments, num_warps=4)
    return Tiles(largest, total, weighted)


def row_statistics(logits: Tensor, parts: Tiles, tokens: Tensor, temperature: float) -> tuple[Tensor, Statistics]:
    """Stage 2: log-probability of one token a row, float32 [R], and the statistics. tokens: int64 [R]."""
    rows, vocabulary = logits.shape
    logprobs, largest, log_sum, entropy = (logits.new_empty(rows) for _ in range(4))
    inputs = (logits, tokens.contiguous(), parts.largest, parts.total, parts.weighted)
    sizes = (float(temperature), vocabulary, parts.largest.shape[1], _MOST_TILES)
    _launch(_row_kernel, rows, *inputs, logprobs, largest, log_sum, entropy, *sizes, num_warps=1)
    return logprobs, Statistics(largest, log_sum, entropy)


def chosen_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Statistics]:
    """Log-probability of one token a row (drawn or forced), float32 [R], and the rows' statistics, entropy included.

    logits: float32 [R, V]; tokens: int64 [R]; temperature above 0. The entropy is always there: leaving it out would save
    neither a pass nor memory worth a name, and would make a second program of stage 1.
    """
    return row_statistics(logits, tile_statistics(logits, temperature), tokens, temperature)


def sample(logits: Tensor, uniform: Tensor, temperature: float, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token a row by inversion, int64 [R], and its log-probability, float32 [R].

    uniform: float64 or float32 [R] in [0, 1). forced: int64 [R], a token to take instead, or -1. For logits with a NaN or
    +Inf the token is some token of the vocabulary, and its log-probability is NaN.
    """
    aligned, (rows, vocabulary) = _aligned(logits), logits.shape
    parts = tile_statistics(logits, temperature)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    sizes = (float(temperature), vocabulary, parts.largest.shape[1], aligned, _TILE, _MOST_TILES)
    _launch(_draw_kernel, rows, logits, uniform.contiguous(), parts.largest, parts.total, tokens, *sizes, num_warps=8)
    if forced is not None:
        tokens = torch.where(forced >= 0, forced, tokens)
    return tokens, row_statistics(logits, parts, tokens, temperature)[0]


def greedy(logits: Tensor, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The most likely token of each row, the first of equals, int64 [R], and its log-probability at temperature 1.

    forced: as of `sample`.
    """
    aligned, (rows, vocabulary) = _aligned(logits), logits.shape
    parts = tile_statistics(logits, 1.0)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    sizes = (vocabulary, parts.largest.shape[1], aligned, _TILE, _MOST_TILES)
    _launch(_greedy_kernel, rows, logits, parts.largest, tokens, *sizes, num_warps=8)
    if forced is not None:
        tokens = torch.where(forced >= 0, forced, tokens)
    return tokens, row_statistics(logits, parts, tokens, 1.0)[0]


def logits_grad(logits: Tensor, tokens: Tensor, dlogprobs: Tensor, statistics: Statistics, temperature: float) -> Tensor:
    """dlogprob * (onehot(token) - softmax) / T, BF16 [R, V]. Zero where dlogprob is, whatever the logits.

    logits: float32 [R, V]; tokens: int64 [R]; dlogprobs: float32 [R]; statistics and temperature of the forward.
    """
    aligned, (rows, vocabulary) = _aligned(logits), logits.shape
    dlogits = torch.empty_like(logits, dtype=torch.bfloat16)
    tiles = triton.cdiv(vocabulary, _TILE)
    inputs = (logits, tokens.contiguous(), dlogprobs.contiguous(), statistics.largest, statistics.log_sum)
    sizes = (float(temperature), vocabulary, tiles, aligned, _TILE)
    _launch(_grad_kernel, rows * tiles, *inputs, dlogits, *sizes, num_warps=8)
    return dlogits


def row_slices(rows: int) -> list[slice]:
    """Slices of rows whose logits exist at once: 1024 rows, 622 MB for a vocabulary of 151936."""
    return row_chunks(rows, 1, CHUNK_ROWS, at_least=1)


def chosen_logprobs_of_hidden(
    hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float, gemm: Gemm
) -> tuple[Tensor, Tensor]:
    """Log-probability of one token a row and the entropy, float32 [R] each. hidden: BF16 [R, H]; head: BF16 [V, H]."""
    logprobs, entropy = (torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device) for _ in range(2))
    for part in row_slices(hidden.shape[0]):
        # No name holds the logits: two chunks of them never exist at once.
        logprobs[part], statistics = chosen_logprobs(gemm(hidden[part], head), tokens[part], temperature)
        entropy[part] = statistics.entropy
    return logprobs, entropy


def chosen_logprobs_with_grad(
    slope: Slope,
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    temperature: float,
    gemm: Gemm,
    accumulator: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`chosen_logprobs_of_hidden`, and the gradient towards hidden of a loss whose derivative by the log-probabilities `slope`
    gives, BF16 [R, H]; the head's is added to accumulator, float32 [V, H].

    Chunk by chunk: logits, log-probabilities, slope, the logits' gradient in BF16, both products, which accumulate in FP32. The
    same bits each time, as cuBLAS promises for one stream; unlike the forward's, a row's bits may depend on the other rows.
    """
    logprobs, entropy = (torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device) for _ in range(2))
    dhidden = torch.empty_like(hidden)
    for part in row_slices(hidden.shape[0]):
        logits = gemm(hidden[part], head)
        logprobs[part], statistics = chosen_logprobs(logits, tokens[part], temperature)
        entropy[part] = statistics.entropy
        dlogits = logits_grad(logits, tokens[part], slope(logprobs[part], part), statistics, temperature)
        del logits  # before the products
        # FP32 out and a rounding here: with BF16 out cuBLAS may add the parts of a split sum over the vocabulary in BF16.
        dhidden[part] = _wide_product(dlogits, head)
        if accumulator is not None:
            add_product(accumulator, dlogits.t(), hidden[part])
        del dlogits  # before the next chunk's logits
    return logprobs, entropy, dhidden


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """BF16 left @ BF16 right in FP32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()  # torch has no such product on a CPU


def add_product(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    """float32 accumulator += BF16 left @ BF16 right, in the product itself on a GPU: no temporary of the head's size."""
    if left.is_cuda:
        torch.addmm(accumulator, left, right, out_dtype=torch.float32, out=accumulator)
    else:
        accumulator.addmm_(left.float(), right.float())


def embedding_grad(accumulator: Tensor, tokens: Tensor, grad: Tensor) -> None:
    """accumulator[tokens[i]] += grad[i] for each i. accumulator: float32 [V, H]; tokens: int64 [T]; grad: BF16 [T, H].

    Equal tokens are found by a stable sort and added by one program in a fixed order: no atomics, so the same bits each time.
    All three contiguous.
    """
    ordered, order = torch.sort(tokens, stable=True)
    ends = torch.searchsorted(ordered, ordered, right=True)
    hidden_size, columns = grad.shape[1], 512
    blocks = triton.cdiv(hidden_size, columns)
    arguments = (order, ordered, ends, grad, accumulator, hidden_size, blocks, 8, columns)
    _launch(_embedding_kernel, tokens.shape[0] * blocks, *arguments, num_warps=4)
