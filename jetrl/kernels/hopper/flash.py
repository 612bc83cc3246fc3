"""Attention's backward on Hopper in FlashAttention 4's kernels, where they are installed and take the model's heads.

Problem: in the Triton backward of hopper/attention.py a program owns what it sums, so s and dp are formed twice: seven products
where five would do. Five need sums to which several programs add, and additions in no order give other bits in each run.

Method: the kernels are FlashAttention 4's (flash-attn-4), compiled for the head dimension and the group when first needed. They
read our forward's out and lse, so the forward stays our own. A program owns 128 keys of one query head and walks the queries
behind them in order; five products a tile. Three sums are shared, each in FP32 and each in one order, which flags in memory
(semaphores) keep: a program waits until the flag counts those before it, adds, and counts itself.

    dq of a tile of queries      the last key tile it sees, then the one before, .., the first
    dk, dv of a tile of keys     the query heads of their key head, first to last; no sharing where each has its own

Tiles begin at each sequence's first token and no order looks beyond the sequence. So the bits are the same in each run, and a
sequence's gradients do not depend on what it is packed with. Who makes them depends on what is installed and on the heads.

Memory, for one call: the sums, FP32 [heads, T', dim] and twice [kv_heads, T', dim], where T' is T and up to a tile more a
sequence: 201 MB for 8,192 tokens of 32 and 8 heads of dimension 128.

Layout: q, keys and values as in hopper/attention.py, packed keys alone. Sequences' starts are made once, in `Sequences.made`.

Given up: head dimensions other than 64 and 128, which stay in Triton. The bits of Triton's gradients: both round differently.
Seconds of compiling at the first backward. A library's private function, of a beta: so one version is taken and no other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from importlib import metadata
from itertools import accumulate

import torch
from torch import Tensor

from jetrl.kernels.attention import Sequences
from jetrl.kernels.hopper.choice import chosen

log = logging.getLogger("jetrl")

VERSION = "4.0.0b36"
DIMS = (64, 128)
_VARIABLE = "JETRL_ATTENTION_GRAD"
_NAMES = ("flash", "triton")
# The library compiles another kernel for a longest sequence of one tile (128 at most); said to be longer, it is not asked to.
_LONGEST_AT_LEAST = 129

Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@cache
def _library() -> Backward | str:
    """The library's backward, or why Triton does its work.

    The environment variable JETRL_ATTENTION_GRAD chooses; without it the library is taken if it is there. Raises ValueError
    for an unknown name, or for a library that is asked for and cannot be had.
    """
    name = chosen(_VARIABLE, _NAMES)
    if name == "triton":
        return f"{_VARIABLE} is triton"
    found = _load()
    if isinstance(found, str) and name == "flash":
        raise ValueError(f"{_VARIABLE} is flash, but {found}; pip install 'jetrl[hopper]', or set {_VARIABLE}=triton")
    if isinstance(found, str):
        log.warning("attention's backward runs in Triton: %s", found)
    return found


def _load() -> Backward | str:
    """The library's backward, or what is wrong with the installation."""
    try:
        # Asked of the package and not of the module: FlashAttention 2 is imported by the same name.
        version = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed"
    if version != VERSION:
        return f"flash-attn-4 is {version}, and jetrl calls a private function of {VERSION}"
    try:
        from flash_attn.cute.interface import _flash_attn_bwd
    except (ImportError, OSError, AttributeError, RuntimeError) as error:  # RuntimeError: a compiler without its CUDA part
        return f"flash-attn-4 cannot be loaded ({error!r})"
    return _flash_attn_bwd


def missing() -> str:
    """Why the library does not make gradients here; empty where it does. Raises ValueError as JETRL_ATTENTION_GRAD asks."""
    found = _library()
    return found if isinstance(found, str) else ""


@cache
def takes(heads: int, kv_heads: int, dim: int) -> bool:
    """Whether `grad` can run for such heads, whatever is packed. Raises ValueError as JETRL_ATTENTION_GRAD asks."""
    if missing():
        return False
    if dim in DIMS and heads % kv_heads == 0:
        return True
    log.warning(
        "attention's backward for %d heads over %d of dimension %d runs in Triton: FlashAttention 4 is used for dimensions %s",
        heads, kv_heads, dim, " and ".join(map(str, DIMS)),
    )  # fmt: skip
    return False


def _starts(layout: Sequences, tokens: int) -> tuple[Tensor, int]:
    """Each sequence's first token and the end, int32 [S + 1] on the device, and the longest length; made at the first layer.

    Raises ValueError for a layout with paged or older keys, or with rows that belong to no sequence.
    """
    if "starts" not in layout.made:
        starts = list(accumulate(layout.query_lengths, initial=0))
        if layout.key_starts != starts[:-1] or layout.context_lengths != layout.query_lengths or starts[-1] != tokens:
            raise ValueError(f"the gradient needs packed keys, all of them new, {tokens} in all; not those of {layout}")
        # Pinned, so that nothing waits for the device.
        host = torch.tensor(starts, dtype=torch.int32, pin_memory=layout.device.type == "cuda")
        there = host.to(layout.device, non_blocking=True)
        layout.made["starts"] = there, max(_LONGEST_AT_LEAST, *layout.query_lengths)
    return layout.made["starts"]


def grad(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, layout: Sequences
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of hopper/attention.py's `attention`, BF16, deterministic; for heads that `takes` takes.

    dout, q, out: BF16 [T, heads, dim]; keys, values: BF16 [T, kv_heads, dim]; lse: FP32 [heads, T], natural log. All but
    dout contiguous. Raises ValueError for a layout whose keys are not packed, or not all new.
    """
    backward = _library()
    assert not isinstance(backward, str), backward
    starts, longest = _starts(layout, q.shape[0])
    return backward(
        # A broadcast dout would be compiled for.
        q, keys, values, out, dout.contiguous(), lse,
        softmax_scale=1.0 / math.sqrt(q.shape[2]), causal=True, deterministic=True,
        cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest,
    )  # fmt: skip
