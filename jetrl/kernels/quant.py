"""The one quantiser: the only code that makes E4M3 codes and scales (design contract 3.1).

Problem: two quantisers that implement "the same recipe" do not make the same bytes. A division by the scale or a product
with its inverse, another floor, another rounding: each changes codes, and then the sampler's policy is not the trainer's.
So trainer, engine, exporter and reference all call the functions below, and a test compares bytes.

Method, for each group of values x:

    amax  = max(max |x|, 1e-12)                                   in FP32
    scale = amax / 448                                            FP32, IEEE division; the dequantising multiplier
    code  = round_to_nearest_even(clamp(x / scale, -448, 448))    float8_e4m3fn, IEEE division

Groups (a last partial group is a group of its own, so no size has to be divisible by 128):

    1x128     activations and output gradients, along the contracted dimension     scales [rows, ceil(cols / 128)]
    128x128   weights; the row blocks of each fused part (q, k, v) start anew      scales [row blocks, ceil(cols / 128)]
    128x1     the same activations and gradients along tokens, for grad_weight     scales [token groups, cols]
    1xhead    queries, keys and values: one head of one token                      scales [tokens, heads]

Token groups start anew with each sequence, so what is quantised together never depends on how sequences were packed into
microbatches: the weight gradient is the same for every split of a batch.

Given up: a NaN or an infinity poisons its whole group (it stays visible as NaN, it never becomes 448).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from jetrl.kernels.memory import row_chunks

GROUP = 128
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-12


@dataclass(slots=True, frozen=True)
class Quantized:
    """E4M3 codes with the FP32 scales of their groups; shapes as in the table above."""

    codes: Tensor  # float8_e4m3fn [rows, cols]
    scales: Tensor  # float32; code * scale is the value

    def tensors(self) -> dict[str, Tensor]:
        """Both by suffix: for recordings."""
        return {"": self.codes.view(torch.uint8), ".scales": self.scales}


@dataclass(frozen=True)
class TokenGroups:
    """Groups of at most 128 tokens of one sequence; they cover all tokens, in order."""

    starts: Tensor  # int32 [G], first token of each group
    sizes: Tensor  # int32 [G]
    count: int  # G

    @cached_property
    def group_of_token(self) -> Tensor:
        """Group of each token, int64 [T], ascending."""
        return torch.repeat_interleave(torch.arange(self.count, device=self.sizes.device), self.sizes)


def token_groups(lengths: list[int], device: torch.device | str = "cpu") -> TokenGroups:
    """Cut each sequence, lengths in tokens, into groups of 128; the last group of a sequence may be shorter."""
    sizes = torch.tensor([min(GROUP, n - start) for n in lengths for start in range(0, n, GROUP)], dtype=torch.int32)
    starts = (sizes.cumsum(0) - sizes).int()
    return TokenGroups(starts.to(device), sizes.to(device), len(sizes))


def _scale(amax: Tensor) -> Tensor:
    # A tensor, not a number: on a GPU torch divides by a number through its reciprocal, which is not IEEE division.
    return amax.clamp(min=AMAX_FLOOR) / amax.new_full((), E4M3_MAX)


def _encode(x: Tensor, scale: Tensor) -> Tensor:
    """Codes of x (FP32) under `scale`, which broadcasts. Clamped first: torch 2.11 casts 465 and more to NaN."""
    return (x / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _blocks_of_columns(x: Tensor) -> Tensor:
    """[rows, cols] to [rows, ceil(cols / 128), 128] in FP32, zeros in the last block's missing columns."""
    rows, cols = x.shape
    missing = -cols % GROUP
    x = x.float()
    return (pad(x, (0, missing)) if missing else x).view(rows, -1, GROUP)


def quantize_rows(x: Tensor) -> Quantized:
    """Quantise x [rows, cols] (BF16 or FP32) in 1x128 groups along the columns. A row's bytes depend on that row alone."""
    rows, cols = x.shape
    codes = torch.empty(rows, cols, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, -(-cols // GROUP), dtype=torch.float32, device=x.device)
    for part in row_chunks(rows, cols):
        blocks = _blocks_of_columns(x[part])
        scales[part] = _scale(blocks.abs().amax(-1))
        codes[part] = _encode(blocks, scales[part].unsqueeze(-1)).flatten(1)[:, :cols]
    return Quantized(codes, scales)


def quantize_heads(x: Tensor) -> Quantized:
    """Quantise x [T, heads, dim] (BF16), each head of each token a group: codes like x, scales [T, heads]."""
    wide = x.float()
    scales = _scale(wide.abs().amax(-1))
    return Quantized(_encode(wide, scales.unsqueeze(-1)), scales)


def dequantize_heads(q: Quantized) -> Tensor:
    """Values of `quantize_heads`, BF16: rounded from the FP32 product."""
    return (decode(q.codes).float() * q.scales.unsqueeze(-1)).to(torch.bfloat16)


def quantize_tokens(x: Tensor, groups: TokenGroups) -> Quantized:
    """Quantise x [T, cols] in 128x1 groups along tokens. Codes keep the layout [T, cols]; scales are [groups, cols]."""
    amax = torch.zeros(groups.count, x.shape[1], device=x.device)
    index = groups.group_of_token.to(x.device)
    expanded = index.unsqueeze(1).expand_as(x)
    scales = _scale(amax.scatter_reduce_(0, expanded, x.abs().float(), "amax"))
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    for part in row_chunks(*x.shape):
        codes[part] = _encode(x[part].float(), scales[index[part]])
    return Quantized(codes, scales)


def row_blocks(parts: tuple[int, ...]) -> Tensor:
    """Row of a fused weight to row of its scales, int64 [sum(parts)]: the blocks of each part start anew."""
    blocks, first = [], 0
    for rows in parts:
        blocks.append(torch.arange(rows) // GROUP + first)
        first += -(-rows // GROUP)
    return torch.cat(blocks)


def quantize_weight(w: Tensor, parts: tuple[int, ...] | None = None) -> Quantized:
    """Quantise a weight [rows, cols] in 128x128 blocks. `parts`: rows of each fused projection, by default one part.

    Scales are [sum of ceil(part / 128), ceil(cols / 128)], so a fused weight has the bytes of its parts quantised alone.
    """
    parts = parts or (w.shape[0],)
    assert sum(parts) == w.shape[0], (parts, w.shape)
    blocks = _blocks_of_columns(w)
    index = row_blocks(parts).to(w.device)
    count = int(index[-1]) + 1
    row_amax = blocks.abs().amax(-1)
    expanded = index.unsqueeze(1).expand_as(row_amax)
    amax = row_amax.new_zeros(count, row_amax.shape[1]).scatter_reduce_(0, expanded, row_amax, "amax")
    scales = _scale(amax)
    codes = _encode(blocks, scales[index].unsqueeze(-1)).view(w.shape[0], -1)
    return Quantized(codes[:, : w.shape[1]].contiguous(), scales)


_VALUES = torch.arange(256, dtype=torch.uint8).view(E4M3).to(torch.float64)  # of each code


def decode(codes: Tensor) -> Tensor:
    """E4M3 codes to float64, exactly. A table look-up: torch's own conversion is six times slower on a CPU."""
    return _VALUES.to(codes.device).index_select(0, codes.view(torch.uint8).reshape(-1).int()).view(codes.shape)


_ALL = slice(None)


def dequantize_rows(q: Quantized, part: slice = _ALL) -> Tensor:
    """Values of rows `part` of a 1x128 quantised tensor, float64, exact: a code has 4 significant bits, a scale 24."""
    cols = q.codes.shape[1]
    return decode(q.codes[part]).mul_(q.scales[part].double().repeat_interleave(GROUP, 1)[:, :cols])


def dequantize_tokens(q: Quantized, groups: TokenGroups, part: slice = _ALL) -> Tensor:
    """Values of tokens `part` of a 128x1 quantised tensor, float64 [tokens, cols], exact."""
    return decode(q.codes[part]).mul_(q.scales[groups.group_of_token[part]].double())


def dequantize_weight(q: Quantized, parts: tuple[int, ...] | None = None) -> Tensor:
    """Values of a 128x128 quantised weight, float64 [rows, cols], exact."""
    rows, cols = q.codes.shape
    scales = q.scales.double()[row_blocks(parts or (rows,)).to(q.codes.device)]
    return decode(q.codes) * scales.repeat_interleave(GROUP, 1)[:, :cols]
