"""The sizes of decode steps that get a graph."""

from __future__ import annotations

from itertools import pairwise

import pytest

from jetrl.rollout.decoder import ladder


@pytest.mark.parametrize("most", [*range(1, 140), 255, 256, 257, 1000, 4096])
def test_any_step_has_a_size_that_wastes_little(most: int) -> None:
    sizes = ladder(most)
    assert sizes[-1] == most and all(a < b for a, b in pairwise([0, *sizes]))
    for rows in range(1, most + 1):
        size = min(s for s in sizes if s >= rows)
        assert size - rows <= (size / 5 if rows > 8 else 3), (rows, size)
    assert len(sizes) <= 4 + 4 * max(0, (most - 1).bit_length() - 3)


def test_small_steps_and_doublings() -> None:
    assert ladder(1) == [1]
    assert ladder(3) == [1, 2, 3]
    assert ladder(8) == [1, 2, 4, 8]
    assert ladder(64) == [1, 2, 4, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
