"""The block pool: who holds which block, counted; and kept prompts: found again by their tokens, never by mistake."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl.rollout.blocks import BlockPool, Prefixes


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


# --- Prefixes


def kept_prompt(prefixes: Prefixes, pool: BlockPool, prompt: list[int]) -> list[int]:
    """The blocks of a prompt that was prefilled and kept, and whose sequence has ended."""
    blocks = [pool.take() for _ in range(pool.needed(len(prompt)))]
    copy = list(blocks)
    prefixes.keep(prompt, blocks)
    pool.release(blocks)
    return copy


def test_a_prompt_is_found_as_far_as_its_full_blocks_reach_and_one_token_is_left() -> None:
    pool = BlockPool(8, 4)
    prefixes = Prefixes(pool)
    blocks = kept_prompt(prefixes, pool, list(range(10)))
    assert (len(prefixes), pool.free) == (2, 6)  # the partial block is not kept
    for length, found in ((1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (10, 2), (30, 2)):
        assert prefixes.find(list(range(length))) == blocks[:found], length
    assert prefixes.find([0, 1, 2, 9, 4, 5, 6, 7, 8]) == []
    assert prefixes.find([0, 1, 2, 3, 4, 5, 6, 9, 8]) == blocks[:1]
    assert prefixes.find([4, 5, 6, 7, 0]) == []  # the second block's tokens at the beginning are something else


def test_prompts_that_begin_alike_share_what_they_share() -> None:
    pool = BlockPool(8, 2)
    prefixes = Prefixes(pool)
    first = kept_prompt(prefixes, pool, [1, 1, 2, 2])
    second = kept_prompt(prefixes, pool, [1, 1, 3, 3])
    assert len(prefixes) == 3 and pool.free == 5
    assert prefixes.find([1, 1, 3, 3, 0]) == [first[0], second[1]]
    kept_prompt(prefixes, pool, [1, 1, 3, 3])  # nothing new: nothing is held
    assert len(prefixes) == 3 and pool.free == 5


@pytest.mark.parametrize(("wanted", "left"), [(1, (2, 1)), (2, (2, 0)), (3, (1, 0)), (4, (0, 0)), (9, (0, 0))])
def test_the_least_recently_used_is_given_up_first_and_ends_before_beginnings(wanted: int, left: tuple[int, int]) -> None:
    pool = BlockPool(8, 1)
    prefixes = Prefixes(pool)
    kept_prompt(prefixes, pool, [1, 2])
    kept_prompt(prefixes, pool, [7, 8])
    prefixes.find([1, 2, 0])
    assert prefixes.give_up(wanted) and len(prefixes) == sum(left) == 8 - pool.free
    assert (len(prefixes.find([1, 2, 0])), len(prefixes.find([7, 8, 0]))) == left


def test_what_somebody_uses_is_not_given_up() -> None:
    pool = BlockPool(4, 1)
    prefixes = Prefixes(pool)
    kept_prompt(prefixes, pool, [1, 2, 3])
    mine = pool.share(prefixes.find([1, 2, 0]))
    assert prefixes.give_up(9) and len(prefixes) == 2
    assert not prefixes.give_up(9)
    pool.release(mine)
    assert prefixes.give_up(9) and pool.free == 4


def test_what_followed_a_block_that_was_given_up_is_not_found_when_its_tokens_come_back() -> None:
    pool = BlockPool(8, 1)
    prefixes = Prefixes(pool)
    old = [pool.take() for _ in range(2)]
    prefixes.keep([1, 2], old)
    pool.release(old[:1])  # a copy: `old` still uses its second block, so that only the first is given up
    assert prefixes.give_up(9) and len(prefixes) == 1
    new = kept_prompt(prefixes, pool, [1])
    assert prefixes.find([1, 2, 0]) == new


def test_clear_forgets_all_and_keeps_what_others_use() -> None:
    pool = BlockPool(4, 1)
    prefixes = Prefixes(pool)
    kept_prompt(prefixes, pool, [1, 2, 3])
    mine = pool.share(prefixes.find([1, 2, 3]))
    prefixes.clear()
    assert (len(prefixes), pool.free, prefixes.find([1, 2, 3])) == (0, 2, [])
    pool.release(mine)
    assert pool.free == 4


@dataclass(eq=False)
class Entry:
    """A kept block of the model below; `parent` is the entry of the block before."""

    tokens: tuple[int, ...]
    block: int
    parent: Entry | None
    kept: bool = True

    @property
    def reachable(self) -> bool:
        return self.kept and (self.parent is None or self.parent.reachable)


@dataclass
class Model:
    """Prefixes by brute force: entries with all their tokens, least recently used first, searched from end to end."""

    size: int
    entries: list[Entry] = field(default_factory=list)

    def chain(self, prompt: list[int]) -> list[Entry]:
        chain: list[Entry] = []
        for end in range(self.size, len(prompt) + 1, self.size):
            last = chain[-1] if chain else None
            found = [e for e in self.entries if e.tokens == tuple(prompt[:end]) and e.parent is last and e.reachable]
            assert len(found) <= 1
            if not found:
                break
            chain += found
        return chain

    def touch(self, chain: list[Entry]) -> None:
        for entry in reversed(chain):
            self.entries.remove(entry)
            self.entries.append(entry)

    def keep(self, prompt: list[int], blocks: list[int]) -> None:
        chain = self.chain(prompt)
        for number in range(len(chain), len(prompt) // self.size):
            parent = chain[-1] if chain else None
            chain.append(Entry(tuple(prompt[: (number + 1) * self.size]), blocks[number], parent))
            self.entries.append(chain[-1])
        self.touch(chain)

    def give_up(self, wanted: int, references: list[int]) -> list[int]:
        gone = [e for e in self.entries if references[e.block] == 1][:wanted]
        for entry in gone:
            entry.kept = False
            self.entries.remove(entry)
        return [e.block for e in gone]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
ACTIONS = st.one_of(
    st.tuples(st.just("run"), PROMPTS, st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("give up"), st.integers(1, 4)),
    st.tuples(st.just("clear")),
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(size=st.sampled_from([1, 2, 3]), actions=st.lists(ACTIONS, max_size=40))
def test_prefixes_do_what_a_search_through_all_of_them_does(size: int, actions: list[tuple]) -> None:
    """Blocks remember the tokens that they were filled with, so a block found by mistake shows; references are counted."""
    pool = BlockPool(16, size)
    prefixes, model = Prefixes(pool), Model(size)
    content: dict[int, tuple[int, ...]] = {}
    running: list[list[int]] = []

    def run(prompt: list[int], goes_on: bool) -> None:
        found = prefixes.find(prompt)
        chain = model.chain(prompt[:-1])
        model.touch(chain)
        assert found == [e.block for e in chain]
        blocks = pool.share(found)
        assert [content[b] for b in blocks] == [tuple(prompt[: (i + 1) * size]) for i in range(len(blocks))]
        missing = pool.needed(len(prompt)) - len(blocks)
        if missing > pool.free:
            give_up(missing - pool.free)
        if missing > pool.free:
            pool.release(blocks)
            return
        for number in range(len(blocks), len(blocks) + missing):
            blocks.append(pool.take())
            content[blocks[-1]] = tuple(prompt[: (number + 1) * size])
        prefixes.keep(prompt, blocks)
        model.keep(prompt, blocks)
        running.append(blocks)
        if not goes_on:
            pool.release(running.pop())

    def give_up(wanted: int) -> None:
        free, gone = pool.free, model.give_up(wanted, pool._references)
        assert prefixes.give_up(wanted) == bool(gone)
        assert sorted(pool._free[free:]) == sorted(gone)

    for name, *arguments in actions:
        if name == "run":
            run(*arguments)
        elif name == "end" and running:
            pool.release(running.pop(arguments[0] % len(running)))
        elif name == "give up":
            give_up(*arguments)
        elif name == "clear":
            prefixes.clear()
            model.entries.clear()
        counted = Counter([*(b for blocks in running for b in blocks), *(e.block for e in model.entries)])
        assert [counted[b] for b in range(16)] == pool._references and len(prefixes) == len(model.entries)
