"""FlashAttention 4's backward on our forward: against float64 and Triton's; the same bits in each run and in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
pytest.importorskip("flash_attn.cute", exc_type=ImportError)  # FlashAttention 2 has the name without `cute`
kernel = pytest.importorskip("jetrl.kernels.hopper.attention", exc_type=ImportError)

from jetrl.kernels.attention import Sequences  # noqa: E402
from jetrl.kernels.hopper import flash  # noqa: E402

SHAPES = [(8, 4, 128), (3, 3, 64), (28, 4, 128), (9, 3, 64), (4, 1, 128), (1, 1, 64)]  # heads, key heads, head dim
LENGTHS = [1, 64, 4097, 129, 777, 1]
NAMES = ("dq", "dk", "dv")
RUNS = 10


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is asked for, so that a broken installation fails and does not pass by Triton."""
    monkeypatch.setenv("JETRL_ATTENTION_GRAD", "flash")
    flash._library.cache_clear()
    flash.takes.cache_clear()


def noise(*shape: int, seed: int) -> Tensor:
    """BF16 noise; the last row is zero in its first head, the first is large."""
    x = torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    x[:1], x[-1:, 0] = x[:1] * 3.0, 0.0
    return x.bfloat16()


class Case:
    """Packed operands, our forward's results and both gradients."""

    def __init__(self, lengths: list[int], shape: tuple[int, int, int], operands: tuple[Tensor, ...] | None = None):
        heads, kv_heads, dim = shape
        assert flash.takes(*shape)
        sizes = (heads, heads, kv_heads, kv_heads)
        self.operands = operands or tuple(noise(sum(lengths), n, dim, seed=s) for s, n in enumerate(sizes))
        self.dout, self.q, self.k, self.v = self.operands
        starts = [sum(lengths[:s]) for s in range(len(lengths))]
        self.lengths, self.shape = lengths, shape
        self.layout = Sequences(lengths, lengths, starts, None, 0, torch.device("cuda"))
        self.tiles = kernel.make_tiles(lengths, lengths, heads, kv_heads, starts, None, 0, "cuda")
        self.out, self.lse = kernel.attention(self.q, self.k, self.v, self.tiles, True)

    def flash(self) -> tuple[Tensor, ...]:
        return flash.grad(self.dout, self.q, self.k, self.v, self.out, self.lse, self.layout)

    def triton(self) -> tuple[Tensor, ...]:
        return kernel.attention_grad(self.dout, self.q, self.k, self.v, self.out, self.lse, self.tiles)

    def alone(self, chosen: list[int]) -> Case:
        """Some of the sequences, packed in that order."""
        parts = [x.split(self.lengths) for x in self.operands]
        return Case([self.lengths[s] for s in chosen], self.shape, tuple(torch.cat([p[s] for s in chosen]) for p in parts))

    def exact(self) -> tuple[Tensor, ...]:
        """dq, dk, dv in float64, head by head."""
        results = tuple(torch.zeros(x.shape, dtype=torch.float64, device="cuda") for x in (self.q, self.k, self.v))
        group, scale = self.shape[0] // self.shape[1], self.shape[2] ** -0.5
        for start, n in zip(self.layout.key_starts or [], self.lengths, strict=True):
            rows = slice(start, start + n)
            hidden = torch.ones(n, n, dtype=torch.bool, device="cuda").triu(1)
            for h in range(self.shape[0]):
                q, dout, k, v = (x[rows, i].double() for x, i in zip(
                    (self.q, self.dout, self.k, self.v), (h, h, h // group, h // group), strict=True
                ))  # fmt: skip
                p = (q @ k.T).mul_(scale).masked_fill_(hidden, -torch.inf).softmax(1)
                dp = dout @ v.T
                ds = dp.sub_((p * dp).sum(1, keepdim=True)).mul_(p).mul_(scale)
                for result, i, part in zip(results, (h, h // group, h // group), (ds @ k, ds.T @ q, p.T @ dout), strict=True):
                    result[rows, i] += part
        return results


def same(seen: tuple[Tensor, ...], wanted: tuple[Tensor, ...], what: object) -> None:
    for name, a, b in zip(NAMES, seen, wanted, strict=True):
        assert torch.equal(a, b), (what, name)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_against_float64_and_triton(shape: tuple[int, int, int]) -> None:
    """The bounds are those of Triton's own test; against Triton's both errors may add."""
    case = Case(LENGTHS, shape)
    for name, seen, ours, right in zip(NAMES, case.flash(), case.triton(), case.exact(), strict=True):
        assert seen.dtype == torch.bfloat16 and seen.shape == ours.shape
        assert ((seen.double() - right).norm() / right.norm()).item() < 1e-2, name
        assert (seen.double() - right).norm() < 1.5 * (ours.double() - right).norm(), name
        assert ((seen.double() - ours.double()).norm() / right.norm()).item() < 2e-2, name
        for s, (a, b) in enumerate(zip(seen.split(LENGTHS), right.split(LENGTHS), strict=True)):
            assert (a.double() - b).norm() < 1e-2 * b.norm() + 1e-3 * right.norm(), (name, s)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_in_each_run_and_in_any_company(shape: tuple[int, int, int]) -> None:
    case = Case(LENGTHS, shape)
    whole = case.flash()
    for run in range(RUNS):
        same(case.flash(), whole, run)
    apart = list(zip(*(x.split(LENGTHS) for x in whole), strict=True))
    for chosen in ([2], [4, 0, 3], [5], [1, 1, 2], [3, 2, 1, 0, 5, 4]):
        part = case.alone(chosen)
        same(part.flash(), tuple(torch.cat(x) for x in zip(*(apart[s] for s in chosen), strict=True)), chosen)


def test_many_sequences_have_the_bits_of_few() -> None:
    """Beyond 256 sequences the library looks a tile's sequence up in another way, by kernels compiled for that."""
    lengths = [1 + s * 37 % 200 for s in range(300)]
    case = Case(lengths, SHAPES[0])
    whole = case.flash()
    same(case.flash(), whole, "run")
    first = case.alone(list(range(100)))
    same(first.flash(), tuple(x[: sum(lengths[:100])] for x in whole), "the first 100")


def test_nothing_is_compiled_for_a_packing() -> None:
    from flash_attn.cute import interface

    Case(LENGTHS, SHAPES[0]).flash()
    kept = interface._flash_attn_bwd.compile_cache.cache
    before = len(kept)
    for lengths in ([1], [64], [128], [129], [8192], [5] * 40, [3000, 1, 7]):
        case = Case(lengths, SHAPES[0])
        case.dout = case.dout[:1].expand_as(case.dout)  # as autograd hands on a sum's gradient
        case.flash()
    assert before and len(kept) == before
