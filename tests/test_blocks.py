"""The block pool: who holds which block, counted."""

from __future__ import annotations

import pytest

from jetrl.rollout.blocks import BlockPool


def test_blocks_are_taken_once_and_come_back() -> None:
    pool = BlockPool(3, 4)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    assert pool.free == 0
    with pytest.raises(AssertionError, match="no free block"):
        pool.take()
    pool.release(taken)
    assert taken == []
    assert pool.free == 3


def test_a_shared_block_is_free_when_its_last_holder_gives_it_up() -> None:
    pool = BlockPool(2, 4)
    mine = [pool.take(), pool.take()]
    theirs = pool.share(mine[:1])
    again = pool.share(theirs)
    assert theirs == again == mine[:1]
    assert pool.free == 0
    pool.release(mine)
    assert pool.free == 1  # only the block that nobody shared
    pool.release(theirs)
    assert pool.free == 1
    pool.release(again)
    assert pool.free == 2


def test_a_returned_list_is_a_copy() -> None:
    pool = BlockPool(2, 4)
    mine = [pool.take()]
    shared = pool.share(mine)
    shared.append(pool.take())
    assert len(mine) == 1
    pool.release(mine)
    assert len(shared) == 2
    pool.release(shared)
    assert pool.free == 2


def test_a_block_given_up_too_often_is_noticed() -> None:
    pool = BlockPool(2, 4)
    block = pool.take()
    pool.release([block])
    with pytest.raises(AssertionError):
        pool.release([block])
    with pytest.raises(AssertionError):
        pool.share([block])


def test_needed_and_peak() -> None:
    pool = BlockPool(8, 4)
    assert [pool.needed(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    taken = [pool.take() for _ in range(5)]
    pool.release(taken[2:])  # a slice is a list of its own
    pool.take()
    assert pool.peak == 5
    assert pool.free == 5
