"""From fused projections to heads and back: the bits of the single operators, and float64 within BF16 rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from jetrl.kernels import norm as reference
from jetrl.kernels.hopper.heads import split_heads, split_heads_grad
from jetrl.kernels.ops import Heads, HeadWeights, Target
from tests.gpu.tensors import noise, same, vector

pytestmark = pytest.mark.gpu

EPS = 1e-6
POSITIONS = 5000
# Qwen3-8B, Qwen2.5-7B (biases), SmolLM2, and a dimension that nothing divides
CASES = [
    ((32, 8, 128), False, True),
    ((28, 4, 128), True, False),
    ((9, 3, 64), False, False),
    ((5, 1, 40), True, True),
]
Shape = tuple[int, int, int]  # heads, key heads, dimension


class Inputs(NamedTuple):
    """What `split_heads` takes ahead of its target."""

    fused: Tensor
    weights: HeadWeights
    heads: Heads
    positions: Tensor


def inputs(tokens: int, shape: Shape, has_bias: bool, has_norm: bool) -> Inputs:
    frequencies = 1e4 ** -(torch.arange(0, shape[2], 2).double() / shape[2])
    angles = torch.arange(POSITIONS).double().unsqueeze(1) * frequencies
    heads = Heads(*shape, EPS, angles.cos().float().cuda(), angles.sin().float().cuda())
    positions = torch.randint(0, POSITIONS, (tokens,), generator=torch.Generator().manual_seed(1))
    norms = (vector(heads.dim, 3), vector(heads.dim, 4)) if has_norm else (None, None)
    weights = HeadWeights(vector(heads.width, 2) if has_bias else None, *norms)
    return Inputs(noise(tokens, heads.width), weights, heads, positions.cuda())


def cache(rows: int, heads: Heads, places: Tensor | None = None) -> Target:
    keys, values = (torch.zeros(rows, heads.kv_heads, heads.dim, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    return Target(keys, values, places)


def run(given: Inputs, rows: Tensor | None = None, room: int = 0) -> list[Tensor]:
    """q, keys and values."""
    target = cache(room or given.fused.shape[0], given.heads, rows)
    return [split_heads(*given, target), target.keys, target.values]


def cut(given: Inputs, part: slice | Tensor) -> Inputs:
    return given._replace(fused=given.fused[part], positions=given.positions[part])


def plain(
    fused: Tensor, bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, turn: Tensor, heads: Heads
) -> list[Tensor]:
    """q, k, v in float64, differentiable, without any rounding. turn: cos and sin of each token, [2, T, dim / 2]."""
    fused = fused if bias is None else fused + bias
    q, k, v = fused.view(len(fused), -1, heads.dim).split((heads.heads, heads.kv_heads, heads.kv_heads), 1)
    if q_norm is not None and k_norm is not None:
        q, k = ((x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w) for x, w in ((q, q_norm), (k, k_norm)))
    cos, sin = turn.unsqueeze(2)
    q, k = (torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in (x.chunk(2, -1) for x in (q, k)))
    return [q, k, v]


@pytest.mark.parametrize(("shape", "has_bias", "has_norm"), CASES)
def test_values(shape: Shape, has_bias: bool, has_norm: bool) -> None:
    given = inputs(69, shape, has_bias, has_norm)
    fused, weights, heads, positions = given
    fused = fused if weights.bias is None else fused + weights.bias
    q, k, v = fused.view(69, -1, heads.dim).split((heads.heads, heads.kv_heads, heads.kv_heads), 1)
    turn = heads.cos[positions], heads.sin[positions]
    seen = run(given)
    assert same(seen[2], v)
    for x, weight, out in ((q, weights.q_norm, seen[0]), (k, weights.k_norm, seen[1])):
        if weight is None:
            assert same(out, reference.rotary(x, *turn))  # one by one the same FP32 steps
            continue
        normed = plain_norm64(x, weight)
        wanted = rotary64(normed, *turn)
        size = torch.hypot(*normed.chunk(2, -1)).repeat(1, 1, 2)
        assert ((out.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-7 * size + 1e-37).all()
        # BF16 between norm and rotation: nearly all elements are those of the single operators on a CPU, in float64.
        exact = reference.rotary(normed.to(torch.bfloat16), *turn)
        assert (out != exact).float().mean() < 1e-3


def plain_norm64(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def rotary64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.mark.parametrize(("shape", "has_bias", "has_norm"), CASES)
def test_rows_depend_on_themselves(shape: Shape, has_bias: bool, has_norm: bool) -> None:
    """Whatever the number of tokens, their places, the cache rows they go to, and the view that holds them."""
    given = inputs(4200, shape, has_bias, has_norm)
    wanted = run(given)
    for tokens in (1, 2, 3, 7, 64, 129, 4097):
        part = slice(4200 - tokens, 4200)
        for seen, x in zip(run(cut(given, part)), wanted, strict=True):
            assert same(seen, x[part]), tokens
    order = torch.randperm(4200, generator=torch.Generator().manual_seed(5)).cuda()
    rows = torch.randperm(4500, generator=torch.Generator().manual_seed(6))[:4200].cuda()
    q, keys, values = run(cut(given, order), rows, 4500)
    assert same(q, wanted[0][order]) and same(keys[rows], wanted[1][order]) and same(values[rows], wanted[2][order])
    left = torch.ones(4500, dtype=torch.bool, device="cuda")
    left[rows] = False
    assert not keys[left].any() and not values[left].any()

    few, width = cut(given, slice(0, 7)), given.heads.width
    for gap in (16, 3):
        wide = torch.zeros(7, width + gap, dtype=torch.bfloat16, device="cuda")
        wide[:, :width] = few.fused
        view = few._replace(fused=wide[:, :width], positions=few.positions.int())
        for seen, x in zip(run(view), wanted, strict=True):
            assert same(seen, x[:7])


@pytest.mark.parametrize(("shape", "has_bias", "has_norm"), CASES)
def test_gradients(shape: Shape, has_bias: bool, has_norm: bool) -> None:
    for tokens in (1, 69, 1300):
        given = inputs(tokens, shape, has_bias, has_norm)
        fused, weights, heads, positions = given
        fused.copy_(torch.randn(fused.shape, generator=torch.Generator().manual_seed(7)))
        leaves = [None if x is None else x.double().requires_grad_() for x in (fused, weights.q_norm, weights.k_norm)]
        turn, bias = torch.stack((heads.cos, heads.sin))[:, positions].double(), weights.bias
        biased = leaves[0] if bias is None else leaves[0] + ((fused + bias).double() - fused.double())  # rounded as it is
        outputs = plain(biased, None, *leaves[1:], turn, heads)
        dy = [noise(tokens, x.shape[1] + 1, heads.dim, seed=8 + i)[:, 1:] for i, x in enumerate(outputs)]
        torch.autograd.backward(outputs, [x.double() for x in dy])

        dfused, dq_norm, dk_norm = split_heads_grad(*dy, *given)
        wanted = leaves[0].grad.view(tokens, -1, heads.dim)
        head = wanted.abs().amax(-1, keepdim=True)  # BF16 between rotation and norm: errors are of the head's size
        assert ((dfused.view(wanted.shape).double() - wanted).abs() <= 2.0**-6 * head + 1e-30).all()
        assert same(dfused[:, -heads.kv_heads * heads.dim :], dy[2].reshape(tokens, -1))
        for seen, leaf in ((dq_norm, leaves[1]), (dk_norm, leaves[2])):
            assert (seen is None) == (leaf is None)
            if leaf is not None:
                assert (seen.double() - leaf.grad).abs().max() <= 2.0**-8 * leaf.grad.abs().max()
        again = split_heads_grad(*(x.contiguous() for x in dy), *given)
        assert all(a is b is None or same(a, b) for a, b in zip((dfused, dq_norm, dk_norm), again, strict=True))
        part = slice(tokens // 2, tokens)
        assert same(split_heads_grad(*(x[part] for x in dy), *cut(given, part))[0], dfused[part])


def test_without_norms_the_gradient_is_the_turn_back() -> None:
    tokens = 69
    given = inputs(tokens, (9, 3, 64), False, False)
    dq, dk, dv = (noise(tokens, n, 64, seed=n) for n in (9, 3, 3))
    turn = given.heads.cos[given.positions], -given.heads.sin[given.positions]
    wanted = torch.cat([reference.rotary(dq, *turn), reference.rotary(dk, *turn), dv], 1)
    assert same(split_heads_grad(dq, dk, dv, *given)[0].view(wanted.shape), wanted)


def test_a_graph_captures() -> None:
    given = inputs(16, *CASES[0])
    target = cache(40, given.heads, torch.randperm(40, generator=torch.Generator().manual_seed(5))[:16].cuda())
    wanted = split_heads(*given, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = split_heads(*given, target)
    first = target.keys.clone()
    target.keys.zero_()
    graph.replay()
    assert same(q, wanted) and same(target.keys, first)


def test_what_is_refused() -> None:
    given = inputs(2, (2, 2, 64), False, False)
    target = cache(2, given.heads)
    wide = torch.zeros(2, 2, 128, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(AssertionError, match="gaps"):
        split_heads(*given, replace(target, keys=wide[..., :64]))
    with pytest.raises(AssertionError, match="even"):
        split_heads(*given._replace(heads=replace(given.heads, dim=63)), target)
