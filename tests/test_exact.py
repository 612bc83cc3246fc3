"""Exact sums: against rational numbers, and unmoved by order, by rows in the batch and by threads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from jetrl.kernels.exact import (
    exact_product,
    left_operand,
    operand_bits,
    order_free_sum,
    power_above,
    right_operand,
    to_grid,
)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as float64 bits; unlike torch.equal, 0.0 is not -0.0."""
    return torch.equal(a.contiguous().view(torch.int64), b.contiguous().view(torch.int64))


def on_grid(value: float, largest: float, bits: int) -> float:
    """`value` rounded to a multiple of 2^(e - bits), half to even, where 2^e is the power of two above `largest`."""
    quantum = Fraction(2) ** (math.frexp(largest)[1] - bits)
    return float(round(Fraction(value) / quantum) * quantum)


@pytest.mark.parametrize("bits", [1, 16, 19, 23, 24, 50])
def test_to_grid_rounds_half_to_even_on_the_rows_own_grid(bits: int) -> None:
    x = noise(6, 37).double() * torch.tensor([1.0, 1e-30, 1e30, 1.0, 2.0**-126, 1.0]).double().unsqueeze(1)
    x[3] *= 10.0 ** torch.arange(-18, 19)  # 37 decades in one row
    x[5] = (torch.arange(37).double() - 18) * 2.0 ** (-bits - 1)  # ties of the row's grid
    x[5, 0] = 0.75
    wanted = [[on_grid(v, max(map(abs, row)), bits) for v in row] for row in x.tolist()]
    assert torch.equal(to_grid(x, bits), torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("bits", [8, 16, 23])
def test_bf16_rows_put_on_their_grid_stay_bf16_and_stay_there(bits: int) -> None:
    x = noise(50, 40).bfloat16()
    x[3, 1] = torch.finfo(torch.bfloat16).max
    seen = to_grid(x.double(), bits)
    assert torch.equal(seen.bfloat16().double(), seen)
    assert torch.equal(to_grid(seen, bits), seen)


def test_to_grid_of_zeros_nan_and_infinity() -> None:
    assert torch.equal(to_grid(torch.zeros(2, 3).double(), 20), torch.zeros(2, 3).double())
    x = noise(3, 8).double()
    x[0, 2], x[1, 3] = torch.nan, -torch.inf
    seen = to_grid(x, 20)
    assert seen[0, 2].isnan() and seen[1, 3] == -torch.inf
    assert torch.equal(seen[2], to_grid(x[2:], 20)[0])


def test_power_above() -> None:
    values = [1.0, 0.99, 1.01, 2.0, 3e-39, 1e30, 2.0**-1022]
    wanted = [2.0 ** math.frexp(v)[1] for v in values]
    assert power_above(torch.tensor(values, dtype=torch.float64)).tolist() == wanted
    assert power_above(torch.zeros(1).double()).item() == 2.0**-1022


@pytest.mark.parametrize("contracted", [1, 2, 3, 31, 32, 33, 64, 128, 129, 576, 4096, 4097, 1 << 17])
def test_operand_bits_fill_float64_and_no_more(contracted: int) -> None:
    left, right = operand_bits(contracted)
    assert contracted * 2 ** (left + right) <= 2**53
    assert left + right == 48 or 2 * contracted * 2 ** (left + right) > 2**52  # nothing is wasted
    assert left - right in (0, 1)


def rational_dot(a: list[float], b: list[float]) -> float:
    return float(sum(Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)))


@pytest.mark.parametrize("contracted", [1, 3, 40, 129, 576, 1024])
def test_product_is_exact_on_the_operands_grids(contracted: int) -> None:
    left, right = left_operand(noise(4, contracted)), right_operand(noise(5, contracted, seed=1).bfloat16())
    wanted = [[rational_dot(row, column) for column in right.tolist()] for row in left.tolist()]
    assert same_bits(exact_product(left, right), torch.tensor(wanted, dtype=torch.float64))


def test_product_is_exact_where_every_bit_is_used() -> None:
    """Odd multiples of the quantum close to the largest value, all of one sign: one bit more and partial sums round."""
    contracted = 2048
    bits = operand_bits(contracted)
    step = 2 * torch.randint(0, 50, (2, contracted), generator=torch.Generator().manual_seed(0)).double() + 1
    left, right = ((2.0**b - s) * 2.0**-b for b, s in zip(bits, step, strict=True))
    assert torch.equal(to_grid(left, bits[0]), left) and torch.equal(to_grid(right, bits[1]), right)
    wanted = sum(Fraction(a) * Fraction(b) for a, b in zip(left.tolist(), right.tolist(), strict=True))
    assert Fraction(exact_product(left.unsqueeze(0), right.unsqueeze(0)).item()) == wanted
    assert Fraction(exact_product(left.expand(65, -1), right.expand(33, -1))[64, 32].item()) == wanted


@pytest.mark.parametrize("contracted", [64, 200, 576])
def test_product_ignores_the_order_of_summation(contracted: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x, w = noise(9, contracted), noise(20, contracted, seed=3)
    x[:, 0] *= 1e4
    left, right = left_operand(x), right_operand(w)
    wanted = exact_product(left, right)
    for _ in range(20):
        order = torch.randperm(contracted, generator=generator)
        assert same_bits(exact_product(left[:, order], right[:, order]), wanted)
    halves = exact_product(left[:, ::2], right[:, ::2]) + exact_product(left[:, 1::2], right[:, 1::2])
    assert same_bits(halves, wanted)


def test_plain_products_depend_on_the_order_on_these_data() -> None:
    """So the tests around this one can fail."""
    x, w = noise(9, 576), noise(20, 576, seed=3)
    order = torch.randperm(576, generator=torch.Generator().manual_seed(2))
    assert not torch.equal(x @ w.t(), x[:, order] @ w[:, order].t())
    assert not torch.equal(x.double() @ w.double().t(), x.double()[:, order] @ w.double()[:, order].t())


@pytest.mark.parametrize("columns", [1, 33, 130])
def test_product_rows_ignore_the_number_of_rows_and_of_threads(columns: int, threads: None) -> None:
    x, right = noise(70, 300, seed=4).bfloat16(), right_operand(noise(columns, 300, seed=5).bfloat16())
    x[7] = 0.0
    wanted = exact_product(left_operand(x), right)
    for count in (1, 2):
        torch.set_num_threads(count)
        for rows in range(1, 71):
            assert same_bits(exact_product(left_operand(x[:rows]), right), wanted[:rows]), (count, rows)
        for row in range(0, 70, 7):
            assert same_bits(exact_product(left_operand(x[row : row + 1]), right), wanted[row : row + 1])


def test_batched_products_equal_single_ones() -> None:
    left, right = left_operand(noise(3, 2, 5, 40)), right_operand(noise(3, 2, 9, 40, seed=1))
    seen = exact_product(left, right)
    assert seen.shape == (3, 2, 5, 9)
    for s in range(3):
        for h in range(2):
            assert same_bits(seen[s, h], exact_product(left[s, h], right[s, h]))


def test_a_huge_dynamic_range_costs_low_bits_and_nothing_else() -> None:
    x = noise(4, 130).double() * 10.0 ** torch.linspace(-30, 30, 130).double()
    w = noise(3, 130, seed=1).double() * 10.0 ** torch.linspace(30, -30, 130).double()
    x, w = x.float(), w.float()
    seen = exact_product(left_operand(x), right_operand(w))
    wanted = x.double() @ w.double().t()
    bits = operand_bits(130)
    bound = 130 * x.abs().amax(1, keepdim=True).double() * w.abs().amax(1).double() * (2.0 ** -bits[0] + 2.0 ** -bits[1])
    assert ((seen - wanted).abs() <= bound).all()
    order = torch.randperm(130, generator=torch.Generator().manual_seed(0))
    assert same_bits(exact_product(left_operand(x)[:, order], right_operand(w)[:, order]), seen)


@pytest.mark.parametrize("bits", [20, 34, 36])
def test_order_free_sum_is_the_exact_sum_on_the_grid(bits: int) -> None:
    x = torch.rand(5, 3001, generator=torch.Generator().manual_seed(0)).double()
    x[1] = torch.exp(-60.0 * x[1])
    x[2], x[3, 100:] = 1.0, 0.0
    x[4, 1] = 1.5 * 2.0**-bits  # a tie: to the even multiple
    wanted = [float(sum(round(Fraction(v) * 2**bits) for v in row) / Fraction(2**bits)) for row in x.tolist()]
    seen = order_free_sum(x, bits)
    assert seen.shape == (5, 1) and seen.squeeze(1).tolist() == wanted
    for seed in range(10):
        order = torch.randperm(3001, generator=torch.Generator().manual_seed(seed))
        assert same_bits(order_free_sum(x[:, order], bits), seen)
    for rows in range(1, 6):
        assert same_bits(order_free_sum(x[:rows], bits), seen[:rows])
    padded = torch.cat((x, torch.zeros(5, 77).double()), 1)
    assert same_bits(order_free_sum(padded, bits), seen)


def test_order_free_sum_refuses_more_elements_than_are_exact() -> None:
    with pytest.raises(AssertionError):
        order_free_sum(torch.zeros(1, 33).double(), 48)
    assert order_free_sum(torch.ones(1, 32).double(), 48).item() == 32.0
