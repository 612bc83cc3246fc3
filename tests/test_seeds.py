"""Seeds: a function of run, step, prompt and sample, stable for ever, and uniform."""

from __future__ import annotations

import math
from itertools import pairwise, product

from jetrl.loop import EVAL_STREAM
from jetrl.rl.seeds import mix64, sample_seed, uniform


def test_mix64_is_splitmix64() -> None:
    step = 0x9E3779B97F4A7C15  # the published generator: state 0, step, 2 * step ...
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix64(i * step & (1 << 64) - 1) for i in range(3)] == published


def test_seeds_do_not_change_between_releases() -> None:
    assert sample_seed(0, 0, 0, 0) == 0x15CAA809CF794190
    assert sample_seed(7, 12, 3, 1) == 0xEC802091156B43A2
    assert uniform(0xEC802091156B43A2, 5) == 0.10188445866971829


def test_every_part_matters_and_none_collide() -> None:
    parts = list(product((0, 1, 2**40), (EVAL_STREAM, 0, 1, 2), range(16), range(16)))
    seeds = {sample_seed(*p) for p in parts}
    assert len(seeds) == len(parts)  # (1, 0, 0, 0), (0, 1, 0, 0) ... included: the order of the parts matters
    assert all(0 <= s < 1 << 64 for s in seeds)


def test_uniform_numbers_lie_on_their_grid_in_the_unit_interval() -> None:
    for seed in range(50):
        for position in range(50):
            u = uniform(mix64(seed), position)
            assert 0.0 <= u < 1.0
            assert (u * 2**53).is_integer()


def test_uniform_numbers_are_uniform_over_positions_and_over_samples() -> None:
    count, cells = 20_000, 64
    over_positions = [uniform(sample_seed(0, 1, 2, 3), p) for p in range(count)]
    over_samples = [uniform(sample_seed(0, 1, 2, s), 0) for s in range(count)]
    pairs = pairwise(over_positions)
    grid = [int(a * 8) * 8 + int(b * 8) for a, b in pairs]  # neighbours are independent
    for values in (over_positions, over_samples, [g / cells for g in grid]):
        counts = [0] * cells
        for value in values:
            counts[int(value * cells)] += 1
        expected = len(values) / cells
        chi2 = sum((c - expected) ** 2 / expected for c in counts)
        assert abs(chi2 - (cells - 1)) < 5 * math.sqrt(2 * (cells - 1)), chi2
