"""The three products of a linear layer against slow references, and their independence of batch, place and split."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jetrl.kernels import gemm, quant
from jetrl.kernels.cpu import CpuOps
from jetrl.kernels.gemm import Bf16Weight, Fp8Weight, Weight
from jetrl.kernels.ops import Activation, Spec
from jetrl.kernels.quant import TokenGroups, token_groups
from jetrl.model.layer import Layer, _product
from jetrl.model.leaf import Leaf
from tests.test_quant import cuts, e4m3, reference_rows, reference_tokens, reference_values, reference_weight

Kind = type[Fp8Weight] | type[Bf16Weight]
KINDS: list[Kind] = [Fp8Weight, Bf16Weight]
SIZES = [(192, 576, (192,)), (576, 192, (300, 138, 138)), (1, 300, (1,)), (130, 129, (65, 65)), (24, 1, (24,)), (3, 128, (3,))]


def noise(*shape: int, seed: int = 0) -> Tensor:
    """BF16 noise with outliers, a zero row and zero blocks."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[::5, ::7] *= 50.0
    x[2:3] = 0.0
    x[1 + shape[0] // 2 :, 128:256] = 0.0
    return x.bfloat16()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as BF16 bits; unlike torch.equal, 0.0 is not -0.0."""
    return a.dtype == b.dtype == torch.bfloat16 and torch.equal(a.view(torch.int16), b.view(torch.int16))


def within_one_rounding(seen: Tensor, wanted: Tensor, slack: float = 1e-12) -> bool:
    """BF16 `seen` is `wanted` (float64) rounded once, or the other neighbour when `wanted` is a tie but for `slack`."""
    half_ulp = torch.exp2(torch.floor(torch.log2(wanted.abs().clamp_min(1e-37))) - 8)
    return bool(((seen.double() - wanted).abs() <= half_ulp * (1 + 2.0**-15) + slack * wanted.abs().max()).all())


def dequantized_rows(x: Tensor) -> Tensor:
    return reference_values(*reference_rows(x), cuts([x.shape[0]], 1), 128)


def dequantized_weight(w: Tensor, parts: tuple[int, ...]) -> Tensor:
    return reference_values(*reference_weight(w, list(parts)), cuts(list(parts), 128), 128)


def dequantized_tokens(x: Tensor, lengths: list[int]) -> Tensor:
    return reference_values(*reference_tokens(x, lengths), cuts(lengths, 128), 1)


@pytest.mark.parametrize(("n", "k", "parts"), SIZES)
def test_fp8_forward_is_the_formula_to_the_bit(n: int, k: int, parts: tuple[int, ...]) -> None:
    """Block dot products as integers, then scaled and added in float64 in the documented order, one element at a time."""
    x, w = noise(5, k), noise(n, k, seed=1)
    integers = np.array([0 if code & 127 == 127 else round(e4m3(code) * 512) for code in range(256)], dtype=object)
    (x_codes, x_scales), (w_codes, w_scales) = reference_rows(x), reference_weight(w, list(parts))
    block_of_row = [i for i, part in enumerate(cuts(list(parts), 128)) for _ in range(part.stop - part.start)]
    wanted = torch.zeros(5, n, dtype=torch.float64)
    for m in range(5):
        for row in range(n):
            terms = []
            for block in range(x_scales.shape[1]):
                columns = slice(block * 128, block * 128 + 128)
                dot = int(np.dot(integers[x_codes[m, columns]], integers[w_codes[row, columns]])) * 2.0**-18
                terms.append(dot * float(x_scales[m, block]) * float(w_scales[block_of_row[row], block]))
            wanted[m, row] = reduce(add, terms)  # sum() of floats compensates from Python 3.12 on
    weight = Fp8Weight.make(w, parts)
    quantized = quant.quantize_rows(x)
    before_rounding = gemm._block_sum(quant.decode(quantized.codes), quantized.scales.double(), weight)
    assert torch.equal(before_rounding, wanted)
    assert torch.equal(gemm.forward(x, weight), wanted.to(torch.bfloat16))
    assert torch.equal(weight.dequantized(), dequantized_weight(w, parts))


def test_fp8_forward_is_the_exact_product_rounded_once() -> None:
    x, w = noise(4, 300), noise(6, 300, seed=1)
    left, right = dequantized_rows(x).tolist(), dequantized_weight(w, (6,)).tolist()
    exact = [[float(sum(Fraction(a) * Fraction(b) for a, b in zip(r, c, strict=True))) for c in right] for r in left]
    assert within_one_rounding(gemm.forward(x, Fp8Weight.make(w, (6,))), torch.tensor(exact, dtype=torch.float64))


@pytest.mark.parametrize(("n", "k", "parts"), SIZES)
def test_bf16_forward_is_the_float64_product_rounded_once(n: int, k: int, parts: tuple[int, ...]) -> None:
    x, w = noise(17, k), noise(n, k, seed=1)
    seen = gemm.forward(x, Bf16Weight.make(w, parts))
    assert within_one_rounding(seen, x.double() @ w.double().t(), slack=k * 2.0**-21)
    assert not torch.equal(seen, gemm.forward(x, Fp8Weight.make(w, parts)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "parts"), SIZES)
def test_rows_do_not_depend_on_their_number_or_place(
    kind: Kind, n: int, k: int, parts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = noise(129, k), kind.make(noise(n, k, seed=1), parts)
    wanted = gemm.forward(x, weight)
    for rows in range(1, 130):
        assert same_bits(gemm.forward(x[:rows], weight), wanted[:rows]), rows
    for first in range(1, 129, 9):
        assert same_bits(gemm.forward(x[first : first + 1], weight), wanted[first : first + 1]), first
        assert same_bits(gemm.forward(x[first : first + 4], weight), wanted[first : first + 4]), first
    order = torch.randperm(129, generator=torch.Generator().manual_seed(0))
    assert same_bits(gemm.forward(x[order], weight), wanted[order])
    monkeypatch.setattr(gemm, "_CHUNK_ELEMENTS", 1)  # chunks of 64 rows
    assert same_bits(gemm.forward(x, weight), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 2, 3, 5, 16, 127, 129])
def test_the_sign_of_zero_does_not_depend_on_the_batch(kind: Kind, k: int) -> None:
    x, w = torch.zeros(40, k).bfloat16(), -noise(30, k).abs()
    x[1::2], x[2] = -0.0, noise(1, k)[0]
    for columns in (30, 1):
        weight = kind.make(w[:columns], (columns,))
        for rows in (1, 2, 3, 4, 7, 8, 40):
            seen = gemm.forward(x[:rows], weight)
            assert not seen[seen == 0].signbit().any(), (rows, columns)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_threads(kind: Kind) -> None:
    x, weight, before = noise(129, 576), kind.make(noise(192, 576, seed=1), (192,)), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = gemm.forward(x, weight)
        torch.set_num_threads(2)
        assert same_bits(gemm.forward(x, weight), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_is_visible_and_touches_no_other(kind: Kind, bad: float) -> None:
    x, weight = noise(9, 300), kind.make(noise(20, 300, seed=1), (20,))
    wanted = gemm.forward(x, weight)
    x[4, 299] = bad
    seen = gemm.forward(x, weight)
    assert not seen[4].isfinite().any()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert same_bits(seen[others], wanted[others])


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_weight_is_visible(kind: Kind) -> None:
    w = noise(20, 300, seed=1)
    w[7, 3] = torch.nan
    assert gemm.forward(noise(9, 300) + 1, kind.make(w, (20,)))[:, 7].isnan().all()


def operand(kind: Kind, w: Tensor, parts: tuple[int, ...]) -> Tensor:
    return dequantized_weight(w, parts) if kind is Fp8Weight else w.double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "parts"), SIZES)
def test_grad_input(kind: Kind, n: int, k: int, parts: tuple[int, ...]) -> None:
    dy, w = noise(70, n, seed=2), noise(n, k, seed=1)
    left = dequantized_rows(dy) if kind is Fp8Weight else dy.double()
    assert within_one_rounding(gemm.grad_input(dy, kind.make(w, parts)), left @ operand(kind, w, parts))


LENGTHS = [130, 5, 257, 64, 1]  # no total is divisible by 32 or 128


def accumulate(dy: Tensor, x: Tensor, lengths: list[int], weight: Weight, accumulator: Tensor) -> Tensor:
    groups: TokenGroups = token_groups(lengths)
    left, right = (gemm.save_activation(t, groups, isinstance(weight, Fp8Weight)) for t in (dy, x))
    gemm.grad_weight(left, right, groups, accumulator)
    return accumulator


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "parts"), SIZES)
def test_grad_weight(kind: Kind, n: int, k: int, parts: tuple[int, ...]) -> None:
    dy, x = noise(sum(LENGTHS), n, seed=2), noise(sum(LENGTHS), k)
    if kind is Fp8Weight:
        wanted = dequantized_tokens(dy, LENGTHS).t() @ dequantized_tokens(x, LENGTHS)
    else:
        wanted = dy.double().t() @ x.double()
    weight = kind.make(noise(n, k, seed=1), parts)
    ones = torch.ones(n, k, dtype=torch.float64)
    seen = accumulate(dy, x, LENGTHS, weight, ones.clone()) - 1.0  # what was there before is kept
    assert torch.allclose(seen, wanted, rtol=1e-11, atol=1e-12 * float(wanted.abs().max()))
    narrow = accumulate(dy, x, LENGTHS, weight, torch.zeros(n, k))
    assert torch.allclose(narrow.double(), wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_grad_weight_does_not_depend_on_the_split(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 150, 140
    dy, x, weight = noise(sum(LENGTHS), n, seed=2), noise(sum(LENGTHS), k), kind.make(noise(n, k, seed=1), (n,))
    whole = accumulate(dy, x, LENGTHS, weight, torch.zeros(n, k).double())
    sequences = list(zip(dy.split(LENGTHS), x.split(LENGTHS), LENGTHS, strict=True))
    for split in ([[0], [1], [2], [3], [4]], [[4, 2], [1, 0, 3]], [[3, 1, 4], [0, 2]]):
        total = torch.zeros(n, k).double()
        for members in split:
            parts = [sequences[i] for i in members]
            accumulate(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), [p[2] for p in parts], weight, total)
        assert torch.allclose(total, whole, rtol=1e-12, atol=1e-12 * float(whole.abs().max()))
        assert torch.equal(total.float(), whole.float())
    monkeypatch.setattr(gemm, "_CHUNK_ELEMENTS", 1)
    assert torch.equal(accumulate(dy, x, LENGTHS, weight, torch.zeros(n, k).double()).float(), whole.float())


def test_the_split_would_matter_if_groups_crossed_sequences() -> None:
    """So the test above can fail."""
    dy, x = noise(sum(LENGTHS), 20, seed=2), noise(sum(LENGTHS), 30)
    weight = Fp8Weight.make(noise(20, 30, seed=1), (20,))
    right, wrong = (accumulate(dy, x, lengths, weight, torch.zeros(20, 30).double()) for lengths in (LENGTHS, [sum(LENGTHS)]))
    assert not torch.equal(right.float(), wrong.float())


OPS: Any = CpuOps()
NAMES: dict[Any, Any] = {Fp8Weight: "fp8", Bf16Weight: "bf16", None: "plain"}


def leaf(kind: Kind | None, tensor: Tensor, parts: tuple[int, ...] = ()) -> Leaf:
    made = Leaf("leaf", tuple(tensor.shape), NAMES[kind], parts, grad=torch.zeros(tensor.shape, dtype=torch.float64))
    made.assign(tensor, OPS)
    return made


def backward(weight: Leaf, bias: Leaf, x: Tensor, dy: Tensor, lengths: list[int]) -> Tensor:
    heads: Any = None
    layer, groups = Layer(0, {"down": weight, "down_bias": bias}, heads, 1e-6, OPS), token_groups(lengths)
    kept = OPS.activation(x, layer.spec("down", groups))
    return _product(layer, "down", OPS.activation(dy, layer.gradient_spec("down", groups)), kept, groups)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bias_is_added_and_trained(kind: Kind) -> None:
    x, w, b = noise(135, 140), noise(150, 140, seed=1), noise(1, 150, seed=3)[0]
    b[:] = torch.linspace(-3, 3, 150).bfloat16()
    weight, bias = leaf(kind, w, (100, 50)), leaf(None, b)
    y = OPS.linear(OPS.activation(x, Spec(kind is Fp8Weight)), weight.value, bias.value)
    plain = gemm.forward(x, weight.value)
    assert same_bits(y, (plain.float() + b.float()).bfloat16())
    assert not torch.equal(y, plain)
    assert same_bits(OPS.linear(Activation(x), weight.value, None), plain)
    dy = noise(135, 150, seed=2)
    dx = backward(weight, bias, x, dy, [130, 5])
    assert bias.grad is not None and weight.grad is not None
    assert torch.allclose(bias.grad, dy.double().sum(0), rtol=1e-12)
    assert same_bits(dx, gemm.grad_input(dy, weight.value))
    assert torch.equal(weight.grad, accumulate(dy, x, [130, 5], weight.value, torch.zeros(150, 140).double()))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_leaf_without_an_accumulator_is_not_trained(frozen: str) -> None:
    leaves = {"weight": leaf(Fp8Weight, noise(30, 40, seed=1), (30,)), "bias": leaf(None, noise(1, 30)[0])}
    leaves[frozen].grad = None
    backward(leaves["weight"], leaves["bias"], noise(9, 40), noise(9, 30, seed=2), [9])
    assert leaves[frozen].grad is None
    (other,) = (value for name, value in leaves.items() if name != frozen)
    assert other.grad is not None and other.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", [Fp8Weight, Bf16Weight, None])
def test_a_leaf_refuses_other_shapes_and_dtypes(kind: Kind | None) -> None:
    made = leaf(kind, noise(30, 40), (30,))
    before = made.value
    for wrong in (noise(30, 41), noise(30, 40).double(), noise(1200, 1)):
        with pytest.raises(ValueError, match=r"leaf: got .* wanted BF16 or FP32 \(30, 40\)"):
            made.assign(wrong, OPS)
    assert made.value is before
