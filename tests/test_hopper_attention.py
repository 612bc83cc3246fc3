"""Addressing, masks and the work list of the Hopper attention kernels, in Triton's interpreter and in FP32.

The interpreter multiplies BF16 wrongly, so numerics proper are proved in tests/gpu. It must be switched on before the
kernels are imported, so they run in a process of their own: this very file as a script. What runs no kernel does without.

Triton has no interpreter for the kernel of whole sequences, which is written in Gluon. `StandIn` below runs its functions as
Python, the three parties as threads, with memory that is read as late and written as early as the kernel's barriers allow.
"""

from __future__ import annotations

import importlib.util
import math
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreter import run_python

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

LENGTHS = [70, 1, 30, 5]


def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and LSE of one sequence whose last queries are q, float64: q [Q, heads, D], k and v [K, kv_heads, D]."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    hidden = torch.arange(k.shape[0]) > torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def operands(heads: int, kv_heads: int, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads)
    shapes = [(sum(LENGTHS), n, dim) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, generator=generator) for s in shapes)
    return q, k, v


def starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:s]) for s in range(len(lengths))]


def expected(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    parts = [plain(*x) for x in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def close(seen: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(seen.double(), wanted.double(), rtol=1e-4, atol=1e-5)


def paged(k: Tensor, v: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The packed keys and values in a cache with shuffled blocks, NaN where nothing was written, and its table."""
    blocks = [math.ceil(n / block_size) for n in LENGTHS]
    order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.full((len(LENGTHS), max(blocks)), -(10**6), dtype=torch.int32)
    caches = [torch.full(((sum(blocks) + 2) * block_size, *k.shape[1:]), torch.nan) for _ in range(2)]
    for s, (start, length) in enumerate(zip(starts(LENGTHS), LENGTHS, strict=True)):
        table[s, : blocks[s]] = torch.tensor([order.pop() for _ in range(blocks[s])])
        position = torch.arange(length)
        slots = table[s, position // block_size].long() * block_size + position % block_size
        for cache, x in zip(caches, (k, v), strict=True):
            cache[slots] = x[start : start + length]
    return *caches, table


def run_packed() -> None:
    from jetrl.kernels.hopper import attention as kernel

    for heads, kv_heads, rows, skip in [(4, 4, 64, True), (9, 3, 128, True), (7, 1, 64, False), (16, 1, 64, True)]:
        q, k, v = operands(heads, kv_heads)
        tiles = kernel.make_tiles(LENGTHS, LENGTHS, heads, kv_heads, starts(LENGTHS), None, 0, "cpu", rows)
        out, lse = kernel.forward(q, k, v, tiles, True, kernel.Launch(rows, rows // 16, 2), skip)
        wanted_out, wanted_lse = expected(q, k, v)
        close(out, wanted_out)
        close(lse, wanted_lse)
        assert kernel.attention(q, k, v, tiles, False)[1] is None


def run_paged() -> None:
    from jetrl.kernels.hopper import attention as kernel

    q, k, v = operands(9, 3)
    wanted, _ = expected(q, k, v)
    for block_size, new in [(3, [9, 1, 30, 0]), (16, [33, 0, 2, 2]), (64, [70, 1, 30, 5]), (128, [9, 1, 30, 0])]:
        keys, values, table = paged(k, v, block_size)
        at = torch.cat([s + torch.arange(n - m, n) for s, n, m in zip(starts(LENGTHS), LENGTHS, new, strict=True)])
        tiles = kernel.make_tiles(new, LENGTHS, 9, 3, None, table, block_size, "cpu")
        close(kernel.attention(q[at].contiguous(), keys, values, tiles, False)[0], wanted[at])


def run_decode() -> None:
    from jetrl.kernels.hopper import attention as kernel

    q, k, v = operands(9, 3)
    wanted, wanted_lse = expected(q, k, v)
    for block_size in (3, 64):
        keys, values, table = paged(k, v, block_size)
        last = torch.tensor([s + n - 1 for s, n in zip(starts(LENGTHS), LENGTHS, strict=True)])
        tiles = kernel.make_tiles([1] * 4, LENGTHS, 9, 3, None, table, block_size, "cpu")
        assert tiles.decode and tiles.rows == 64 and tiles.sequence.numel() == 4
        out, lse = kernel.attention(q[last].contiguous(), keys, values, tiles, True)
        close(out, wanted[last])
        close(lse, wanted_lse[:, last])
        # A captured graph's padding: the last sequence has no token and must touch nothing.
        tiles = kernel.make_tiles([1, 1, 1, 0], [*LENGTHS[:3], 0], 9, 3, None, table, block_size, "cpu")
        assert tiles.sequence.tolist() == [0, 2, 1, 3]
        close(kernel.attention(q[last].contiguous(), keys, values, tiles, False)[0][:3], wanted[last[:3]])


def test_the_work_list() -> None:
    from jetrl.kernels.hopper import attention as kernel

    tiles = kernel.make_tiles([20, 1, 50], [20, 90, 50], 28, 4, [0, 20, 110], None, 0, "cpu", rows=64)
    assert list(zip(tiles.sequence.tolist(), tiles.token.tolist(), strict=True)) == [
        (1, 0), (2, 45), (2, 36), (2, 27), (2, 18), (2, 9), (2, 0), (0, 18), (0, 9), (0, 0),
    ]  # fmt: skip
    assert tiles.query_start.tolist() == [0, 20, 21] and tiles.context.tolist() == [20, 90, 50]
    assert tiles.key_start is not None and tiles.key_start.tolist() == [0, 20, 110] and tiles.key_start.dtype == torch.int64
    assert tiles.key_sequence is None, "keys ahead of the queries have no backward"
    assert {x.data_ptr() % 16 for x in (tiles.token, tiles.query_start, tiles.query_length, tiles.context)} == {0}
    whole = kernel.make_tiles([300, 0, 40], [300, 0, 40], 4, 4, [0, 300, 300], None, 0, "cpu")
    assert whole.key_sequence is not None and whole.key_token is not None
    first_keys = list(range(0, 300, kernel.GRAD_KEY_TILE))
    assert whole.key_sequence.tolist() == [0] * len(first_keys) + [2] and whole.key_token.tolist() == [*first_keys, 0]
    empty = kernel.make_tiles([], [], 4, 4, [], None, 0, "cpu")
    nothing = torch.zeros(0, 4, 16)
    assert kernel.attention(nothing, nothing, nothing, empty, True)[0].shape == (0, 4, 16)


def test_the_work_list_of_prefill() -> None:
    """Each token in one tile, the tiles with most keys first; and the programs that walk the list take each tile once."""
    from jetrl.kernels.hopper import attention as kernel
    from jetrl.kernels.hopper import prefill

    new, contexts, key_starts = [20, 0, 1, 50], [20, 7, 90, 300], [0, 20, 27, 117]
    tiles = kernel.make_tiles(new, contexts, 28, 4, key_starts, None, 0, "cpu")
    assert tiles.work is not None and tiles.work.dtype == torch.int32
    records = tiles.work.view(-1, prefill.RECORD.value).tolist()
    assert records == [  # 18 tokens a tile
        [57, 14, 286, 117, 300], [39, 18, 268, 117, 300], [21, 18, 250, 117, 300], [20, 1, 89, 27, 90], [18, 2, 18, 0, 20],
        [0, 18, 0, 0, 20],
    ]  # fmt: skip
    assert prefill.work_list([], [], [], 4, 4).numel() == 0
    paged = kernel.make_tiles([2], [2], 4, 4, None, torch.zeros(1, 1, dtype=torch.int32), 16, "cpu")
    assert paged.work is None, "paged keys have no use for it"


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all announced bytes have."""

    def __init__(self) -> None:
        self.phase = self.bytes = self.count = self.missing = 0
        self.changed = threading.Condition()

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, arrivals: int = 1, announced: int = 0) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += announced
            assert self.missing >= 0, "more arrivals than the phase has"
            if not self.missing and not self.bytes:
                self.phase, self.missing = self.phase ^ 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        if random.random() < 0.1:
            time.sleep(2e-4)
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != parity, timeout=20), "deadlock"


@dataclass
class Shared:
    """Shared memory: NaN until it is written."""

    data: Tensor

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, layout: object) -> Tensor:
        return self.data.clone()

    def store(self, x: Tensor) -> None:
        self.data.copy_(x)


@dataclass
class Pointer:
    memory: Tensor  # flat
    offset: Any = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)


@dataclass
class Descriptor:
    matrix: Tensor
    width: int  # of a box of 64 rows

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=2 * 64 * self.width)

    def copy(self, at: list[Any], barrier: Barrier, there: Shared) -> None:
        row, column = map(int, at)
        assert 0 <= row < len(self.matrix) and 0 <= column <= self.matrix.shape[1] - self.width
        box = torch.zeros(64, self.width)
        real = self.matrix[row : row + 64, column : column + self.width]
        box[: len(real)] = real
        there.store(box)
        barrier.arrive(0, -self.block_type.nbytes)


def tensors(operation: Any) -> Any:
    return lambda *x: operation(*map(torch.as_tensor, x))


def load(at: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    if mask is None:
        return at.memory[int(at.offset)].long()
    mask = mask.expand(at.offset.shape)
    return torch.where(mask, at.memory[torch.where(mask, at.offset, 0)], other)


def store(at: Pointer, x: Tensor, mask: Tensor) -> None:
    mask = mask.expand(x.shape)
    at.memory[at.offset[mask]] = x[mask]


class StandIn:
    """The language of the kernel, for one program of `programs`."""

    int64, int32, float32, bfloat16 = torch.int64, torch.int32, torch.float32, torch.float32
    zeros = full = staticmethod(lambda shape, *rest: torch.full(shape, rest[0] if len(rest) == 3 else 0.0))
    arange = staticmethod(lambda low, high, layout: torch.arange(low, high))
    where, minimum, maximum = map(staticmethod, map(tensors, (torch.where, torch.minimum, torch.maximum)))
    exp2, log2, sum, max = map(staticmethod, (torch.exp2, torch.log2, torch.sum, torch.amax))
    fma = staticmethod(lambda a, b, c: a * b + c)
    load, store, static_range = staticmethod(load), staticmethod(store), range
    convert_layout = staticmethod(lambda x, layout: x)
    SliceLayout = DotOperandLayout = SwizzledSharedLayout = staticmethod(lambda *x: None)
    NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *x: None)

    def __init__(self, program: int, programs: int) -> None:
        self.num_programs, self.program_id = lambda axis: programs, lambda axis: program
        barriers = SimpleNamespace(
            MBarrierLayout=lambda: "barrier", init=lambda b, count: b.init(count), wait=Barrier.wait, arrive=Barrier.arrive,
            expect=lambda b, announced: b.arrive(1, announced),
        )  # fmt: skip
        copies = SimpleNamespace(async_copy_global_to_shared=Descriptor.copy)
        # A product is formed when it is waited for: until then its operands in shared memory must stay.
        self.hopper = SimpleNamespace(
            mbarrier=barriers, tma=copies, fence_async_shared=lambda: None,
            warpgroup_mma=lambda a, b, c, use_acc=True, is_async=True: lambda: a @ b.data + c,
            warpgroup_mma_wait=lambda left, products: products[0](),
        )  # fmt: skip

    def allocate_shared_memory(self, dtype: object, shape: list[int], layout: object) -> Any:
        if layout == "barrier":
            barriers = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=lambda i: barriers[i])
        return Shared(torch.full(shape, torch.nan))

    def warp_specialize(self, parties: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        with ThreadPoolExecutor(len(parties)) as pool:
            for work in [pool.submit(function, *arguments) for function, arguments in parties]:
                work.result()

    def run(self, *arguments: object) -> None:
        from jetrl.kernels.hopper import prefill

        names = {**vars(prefill), "gl": self, "hopper": self.hopper, "_barrier": lambda: None, "_S": None, "_ROW": None}
        names |= {"_wide": lambda dim: None, "_out": lambda dim: None}
        names |= {name: getattr(prefill, name).value for name in ("KEYS", "STAGES", "RECORD")}
        for name in ("_place", "_record", "_key_tiles", "_copy_step", "_produce", "_rows", "_softmax", "_hide_values",
                     "_attend", "_consume", "prefill_kernel"):  # fmt: skip
            names[name] = FunctionType(getattr(prefill, name).fn.__code__, names, name)
        names["prefill_kernel"](*arguments)


@pytest.mark.parametrize(("heads", "kv_heads", "gap", "programs"), [(4, 4, 0, 3), (9, 3, 2, 2), (7, 1, 70, 1), (16, 1, 0, 4)])
def test_prefill_as_python(heads: int, kv_heads: int, gap: int, programs: int) -> None:
    """`gap` rows of NaN behind each sequence; without, the last tiles run over the end of the tensors."""
    from jetrl.kernels.hopper import prefill

    lengths, dim = [270, 1, 64, 30], 16
    random.seed(heads)
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(sum(lengths), n, dim, generator=generator) for n in (heads, kv_heads, kv_heads))
    parts = [plain(*x) for x in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    nothing = torch.full((gap, kv_heads, dim), torch.nan)
    keys, values = (torch.cat([y for rows in x.split(lengths) for y in (rows, nothing)]) for x in (k, v))
    first = [start + gap * s for s, start in enumerate(starts(lengths))]
    work = prefill.work_list(lengths, lengths, first, heads, kv_heads)
    last = work.numel() // prefill.RECORD.value * kv_heads - 1
    out, lse = torch.full((q.numel(),), torch.nan), torch.full((heads * len(q),), torch.nan)
    boxes = [Descriptor(x.view(len(x), -1), dim) for x in (keys, values)]
    for program in range(programs):
        StandIn(program, programs).run(
            Pointer(q.flatten()), *boxes, Pointer(out), Pointer(lse), Pointer(work), last, len(q),
            math.log2(math.e) / math.sqrt(dim), kv_heads, heads // kv_heads, dim,
        )  # fmt: skip
    close(out.view(q.shape), torch.cat([part for part, _ in parts]))
    close(lse.view(heads, -1), torch.cat([part for _, part in parts], 1))


def run_gradients() -> None:
    from jetrl.kernels.hopper import attention as kernel

    for heads, kv_heads, rows in [(4, 4, 128), (9, 3, 64), (7, 1, 128)]:
        q, k, v = (x.requires_grad_() for x in operands(heads, kv_heads))
        wanted_out, _ = expected(q, k, v)
        dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
        wanted = torch.autograd.grad(wanted_out, (q, k, v), dout.double())
        tiles = kernel.make_tiles(LENGTHS, LENGTHS, heads, kv_heads, starts(LENGTHS), None, 0, "cpu", rows)
        with torch.no_grad():
            out, lse = kernel.attention(q, k, v, tiles, True)
            for seen, right in zip(kernel.attention_grad(dout, q, k, v, out, lse, tiles), wanted, strict=True):
                close(seen, right)


def test_what_does_not_fit_is_refused() -> None:
    from jetrl.kernels.hopper import attention as kernel

    q, k, v = operands(4, 4)
    tiles = kernel.make_tiles(LENGTHS, LENGTHS, 4, 4, starts(LENGTHS), None, 0, "cpu")
    table = torch.zeros(1, 1, dtype=torch.int32)
    wide = torch.zeros(4, 4, 80)
    calls = {
        "pad q, keys and values": lambda: kernel.attention(wide, wide, wide, tiles, False),
        "cast them": lambda: kernel.attention(q.half(), k, v, tiles, False),
        "call .contiguous": lambda: kernel.attention(q.transpose(0, 1), k, v, tiles, False),
        "do not fit": lambda: kernel.attention(q, k[:, :3].contiguous(), v, tiles, False),
        "a row must stay in one warp": lambda: kernel.forward(q, k, v, tiles, False, kernel.Launch(64, 8, 3), True),
        "must include them": lambda: kernel.make_tiles([2], [1], 4, 4, [0], None, 0, "cpu"),
        "one each": lambda: kernel.make_tiles([2], [2, 2], 4, 4, [0], None, 0, "cpu"),
        "one of the two": lambda: kernel.make_tiles([2], [2], 4, 4, None, None, 0, "cpu"),
        "need a whole number": lambda: kernel.make_tiles([2], [2], 17, 1, [0], None, 0, "cpu"),
        "table must be int32": lambda: kernel.make_tiles([1], [1], 4, 4, None, table.long(), 16, "cpu"),
        "needs packed keys": lambda: kernel.attention_grad(
            q, q, k, v, q, q, kernel.make_tiles([1], [1], 4, 4, None, table, 16, "cpu")
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("cases", [("packed", "gradients"), ("paged", "decode")])
def test_in_the_interpreter(cases: tuple[str, ...]) -> None:
    run_python(__file__, *cases)


def repair_interpreter() -> None:
    """Triton 3.6 makes a loop's bound an int with int(array of one element), which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_repair(tensor: type, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_repair


if __name__ == "__main__":
    repair_interpreter()
    for name in sys.argv[1:]:
        globals()[f"run_{name}"]()
