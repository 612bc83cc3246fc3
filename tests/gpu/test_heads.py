"""From fused projections to heads and back: the bits of the single operators, and float64 within BF16 rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from jetrl.kernels import norm as reference
from jetrl.kernels.hopper.heads import Heads, split_heads, split_heads_grad
from tests.gpu.tensors import noise, same, vector

pytestmark = pytest.mark.gpu

EPS = 1e-6
POSITIONS = 5000
# Qwen3-8B, Qwen2.5-7B (biases), SmolLM2, and a dimension that nothing divides
CASES = [
    (Heads(32, 8, 128), False, True),
    (Heads(28, 4, 128), True, False),
    (Heads(9, 3, 64), False, False),
    (Heads(5, 1, 40), True, True),
]


def inputs(tokens: int, shape: Heads, has_bias: bool, has_norm: bool) -> tuple:
    """fused and the arguments that follow it, up to `shape`."""
    frequencies = 1e4 ** -(torch.arange(0, shape.dim, 2).double() / shape.dim)
    angles = torch.arange(POSITIONS).double().unsqueeze(1) * frequencies
    positions = torch.randint(0, POSITIONS, (tokens,), generator=torch.Generator().manual_seed(1))
    norms = (vector(shape.dim, 3), vector(shape.dim, 4)) if has_norm else (None, None)
    bias = vector(shape.width, 2) if has_bias else None
    tables = angles.cos().float().cuda(), angles.sin().float().cuda()
    return noise(tokens, shape.width), bias, *norms, EPS, *tables, positions.cuda(), shape


def caches(rows: int, shape: Heads) -> tuple[Tensor, Tensor]:
    return tuple(torch.zeros(rows, shape.kv_heads, shape.dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))


def run(arguments: tuple, rows: Tensor | None = None, room: int = 0) -> list[Tensor]:
    """q, keys and values."""
    keys, values = caches(room or arguments[0].shape[0], arguments[-1])
    return [split_heads(*arguments, keys, values, rows), keys, values]


def cut(arguments: tuple, part: slice | Tensor) -> tuple:
    fused, *middle, positions, shape = arguments
    return fused[part], *middle, positions[part], shape


def plain(
    fused: Tensor, bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, turn: Tensor, shape: Heads
) -> list[Tensor]:
    """q, k, v in float64, differentiable, without any rounding. turn: cos and sin of each token, [2, T, dim / 2]."""
    fused = fused if bias is None else fused + bias
    q, k, v = fused.view(len(fused), -1, shape.dim).split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    if q_norm is not None and k_norm is not None:
        q, k = ((x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w) for x, w in ((q, q_norm), (k, k_norm)))
    cos, sin = turn.unsqueeze(2)
    q, k = (torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in (x.chunk(2, -1) for x in (q, k)))
    return [q, k, v]


@pytest.mark.parametrize(("shape", "has_bias", "has_norm"), CASES)
def test_values(shape: Heads, has_bias: bool, has_norm: bool) -> None:
    arguments = inputs(69, shape, has_bias, has_norm)
    fused, bias, q_norm, k_norm, _, cos, sin, positions, _ = arguments
    fused = fused if bias is None else fused + bias
    q, k, v = fused.view(69, -1, shape.dim).split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    turn = cos[positions], sin[positions]
    seen = run(arguments)
    assert same(seen[2], v)
    for x, weight, out in ((q, q_norm, seen[0]), (k, k_norm, seen[1])):
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
def test_rows_depend_on_themselves(shape: Heads, has_bias: bool, has_norm: bool) -> None:
    """Whatever the number of tokens, their places, the cache rows they go to, and the view that holds them."""
    arguments = inputs(4200, shape, has_bias, has_norm)
    wanted = run(arguments)
    for tokens in (1, 2, 3, 7, 64, 129, 4097):
        part = slice(4200 - tokens, 4200)
        for seen, x in zip(run(cut(arguments, part)), wanted, strict=True):
            assert same(seen, x[part]), tokens
    order = torch.randperm(4200, generator=torch.Generator().manual_seed(5)).cuda()
    rows = torch.randperm(4500, generator=torch.Generator().manual_seed(6))[:4200].cuda()
    q, keys, values = run(cut(arguments, order), rows, 4500)
    assert same(q, wanted[0][order]) and same(keys[rows], wanted[1][order]) and same(values[rows], wanted[2][order])
    left = torch.ones(4500, dtype=torch.bool, device="cuda")
    left[rows] = False
    assert not keys[left].any() and not values[left].any()

    fused, *rest = cut(arguments, slice(0, 7))
    for gap in (16, 3):
        wide = torch.zeros(7, shape.width + gap, dtype=torch.bfloat16, device="cuda")
        wide[:, : shape.width] = fused
        rest[-2] = rest[-2].int()
        for seen, x in zip(run((wide[:, : shape.width], *rest)), wanted, strict=True):
            assert same(seen, x[:7])


@pytest.mark.parametrize(("shape", "has_bias", "has_norm"), CASES)
def test_gradients(shape: Heads, has_bias: bool, has_norm: bool) -> None:
    for tokens in (1, 69, 1300):
        arguments = inputs(tokens, shape, has_bias, has_norm)
        fused, bias, q_norm, k_norm, _, cos, sin, positions, _ = arguments
        fused = arguments[0].copy_(torch.randn(fused.shape, generator=torch.Generator().manual_seed(7)))
        leaves = [None if x is None else x.double().requires_grad_() for x in (fused, q_norm, k_norm)]
        turn = torch.stack((cos, sin))[:, positions].double()
        biased = leaves[0] if bias is None else leaves[0] + ((fused + bias).double() - fused.double())  # rounded as it is
        outputs = plain(biased, None, *leaves[1:], turn, shape)
        dy = [noise(tokens, x.shape[1] + 1, shape.dim, seed=8 + i)[:, 1:] for i, x in enumerate(outputs)]
        torch.autograd.backward(outputs, [x.double() for x in dy])

        dfused, dq_norm, dk_norm = split_heads_grad(*dy, *arguments)
        wanted = leaves[0].grad.view(tokens, -1, shape.dim)
        head = wanted.abs().amax(-1, keepdim=True)  # BF16 between rotation and norm: errors are of the head's size
        assert ((dfused.view(wanted.shape).double() - wanted).abs() <= 2.0**-6 * head + 1e-30).all()
        assert same(dfused[:, -shape.kv_heads * shape.dim :], dy[2].reshape(tokens, -1))
        for seen, leaf in ((dq_norm, leaves[1]), (dk_norm, leaves[2])):
            assert (seen is None) == (leaf is None)
            if leaf is not None:
                assert (seen.double() - leaf.grad).abs().max() <= 2.0**-8 * leaf.grad.abs().max()
        again = split_heads_grad(*(x.contiguous() for x in dy), *arguments)
        assert all(a is b is None or same(a, b) for a, b in zip((dfused, dq_norm, dk_norm), again, strict=True))
        part = slice(tokens // 2, tokens)
        assert same(split_heads_grad(*(x[part] for x in dy), *cut(arguments, part))[0], dfused[part])


def test_without_norms_the_gradient_is_the_turn_back() -> None:
    shape, tokens = Heads(9, 3, 64), 69
    arguments = inputs(tokens, shape, False, False)
    _, *_, cos, sin, positions, _ = arguments
    dq, dk, dv = (noise(tokens, n, 64, seed=n) for n in (9, 3, 3))
    turn = cos[positions], -sin[positions]
    wanted = torch.cat([reference.rotary(dq, *turn), reference.rotary(dk, *turn), dv], 1)
    assert same(split_heads_grad(dq, dk, dv, *arguments)[0].view(wanted.shape), wanted)


def test_a_graph_captures() -> None:
    arguments = inputs(16, *CASES[0])
    keys, values = caches(40, CASES[0][0])
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(5))[:16].cuda()
    wanted = split_heads(*arguments, keys, values, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = split_heads(*arguments, keys, values, rows)
    first = keys.clone()
    keys.zero_()
    graph.replay()
    assert same(q, wanted) and same(keys, first)


def test_what_is_refused() -> None:
    arguments = inputs(2, Heads(2, 2, 64), False, False)
    keys, values = caches(2, Heads(2, 2, 64))
    with pytest.raises(AssertionError, match="gaps"):
        split_heads(*arguments, torch.zeros(2, 2, 128, dtype=torch.bfloat16, device="cuda")[..., :64], values, None)
    with pytest.raises(AssertionError, match="even"):
        split_heads(*arguments[:-1], Heads(2, 2, 63), keys, values, None)
