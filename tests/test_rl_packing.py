"""Packing: each sequence once, few and even microbatches, and the layout of the worked example."""

import random
from math import ceil

import pytest
import torch

from jetrl.rl.packing import build, input_length, pack
from jetrl.rl.types import Completion, Grade, Problem, Prompt, Rollout


def rollout(prompt, completion, advantage=0.0, logprobs=None, version=0, group=0):
    logprobs = [-0.5 - i for i in range(len(completion))] if logprobs is None else logprobs
    return Rollout(
        Prompt(Problem("p", "q"), "q", prompt),
        Completion(completion, logprobs, "stop", version),
        "text",
        Grade(1.0, True),
        group,
        advantage,
    )


def test_pack_by_hand():
    assert pack([4, 3, 2, 1], 5) == [[0, 3], [1, 2]]
    assert pack([9, 2, 2], 5) == [[0], [1, 2]]  # longer than the budget: alone
    assert pack([5, 5], 5) == [[0], [1]]
    assert pack([3, 3, 2, 2, 2], 6) == [[0, 1], [2, 3, 4]]  # dealing evenly would not fit: the tight packing stays
    assert pack([1, 1, 1, 1, 1, 1], 5) == [[0, 2, 4], [1, 3, 5]]  # 3 + 3, not 5 + 1
    assert pack([], 5) == []
    assert pack([0, 0], 5) == [[0, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_pack_properties(seed):
    rng = random.Random(seed)
    budget = rng.choice([64, 300, 1000])
    lengths = [rng.randint(1, rng.choice([20, 250, 400])) for _ in range(rng.randint(1, 200))]
    batches = pack(lengths, budget)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    assert batches == sorted(batches)
    assert all(b == sorted(b) for b in batches)
    assert all(len(b) == 1 or sum(lengths[i] for i in b) <= budget for b in batches)
    assert batches == pack(tuple(lengths), budget)
    short = [n for n in lengths if n <= budget]
    fewest = max(ceil(sum(short) / budget), sum(2 * n > budget for n in short))
    assert len(batches) - (len(lengths) - len(short)) <= fewest * 11 / 9 + 1


def test_pack_is_even():
    rng = random.Random(0)
    lengths = [rng.randint(10, 60) for _ in range(128)]
    loads = [sum(lengths[i] for i in b) for b in pack(lengths, 1000)]
    assert len(loads) == ceil(sum(lengths) / 1000)
    assert max(loads) - min(loads) < 30


def test_pack_bad_input():
    with pytest.raises(ValueError, match="budget"):
        pack([1], 0)
    with pytest.raises(ValueError, match="negative"):
        pack([-1], 4)


def test_build_worked_example():
    rollouts = [rollout([5, 6, 7], [8, 9], 1.5, version=3), rollout([1], [2], 9.0), rollout([4], [3, 2, 1], -0.5)]
    packed = build(rollouts, [0, 2], [0.25, 9.0, 0.125])
    expected = {
        "token_ids": torch.tensor([5, 6, 7, 8, 4, 3, 2]),
        "positions": torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        "cu_seqlens": torch.tensor([0, 4, 7], dtype=torch.int32),
        "loss_mask": torch.tensor([False, False, True, True, True, True, True]),
        "rows": torch.tensor([2, 3, 4, 5, 6]),
        "targets": torch.tensor([8, 9, 3, 2, 1]),
        "behavior_logprobs": torch.tensor([-0.5, -1.5, -0.5, -1.5, -2.5]),
        "advantages": torch.tensor([1.5, 1.5, -0.5, -0.5, -0.5]),
        "weights": torch.tensor([0.25, 0.25, 0.125, 0.125, 0.125], dtype=torch.float64),
        "sequence": torch.tensor([0, 0, 1, 1, 1]),
        "policy_versions": torch.tensor([3, 0]),
    }
    for name, value in expected.items():
        actual = getattr(packed, name)
        assert actual.dtype == value.dtype, name
        assert torch.equal(actual, value), name
    assert (packed.rollouts, packed.longest, packed.empty) == ([0, 2], 4, 0)
    assert [input_length(r) for r in rollouts] == [4, 1, 3]
    moved = packed.to("meta")
    assert moved.rollouts == [0, 2]
    assert all(getattr(moved, name).device.type == "meta" for name in expected)


def test_row_predicts_its_target():
    rng = random.Random(1)
    rollouts = [
        rollout(rng.choices(range(99), k=rng.randint(1, 9)), rng.choices(range(99), k=rng.randint(0, 9))) for _ in range(30)
    ]
    packed = build(rollouts, range(30), [1.0] * 30)
    assert torch.equal(packed.loss_mask.nonzero()[:, 0], packed.rows)
    for s, i in enumerate(packed.rollouts):
        whole = rollouts[i].prompt.token_ids + rollouts[i].completion.token_ids
        start, end = packed.cu_seqlens[s : s + 2].tolist()
        assert packed.token_ids[start:end].tolist() == whole[:-1]
        mine = packed.sequence == s
        assert packed.targets[mine].tolist() == [whole[r - start + 1] for r in packed.rows[mine].tolist()]
        assert packed.targets[mine].tolist() == rollouts[i].completion.token_ids
    assert packed.empty == sum(not r.completion.token_ids for r in rollouts) > 0
    assert len(packed.token_ids) == sum(map(input_length, rollouts))


def test_behavior_logprobs_keep_their_bits():
    exact = torch.randn(100)
    packed = build([rollout([1], [2] * 100, logprobs=exact.tolist())], [0], [1.0])
    assert torch.equal(packed.behavior_logprobs.view(torch.int32), exact.view(torch.int32))


def test_only_empty_completions():
    packed = build([rollout([1, 2], [])], [0], [1.0])
    assert packed.empty == 1
    assert packed.longest == 0
    assert packed.cu_seqlens.tolist() == [0]
    assert len(packed.token_ids) == len(packed.rows) == len(packed.weights) == len(packed.policy_versions) == 0


def test_build_bad_input():
    with pytest.raises(ValueError, match="rollout 0 has an empty prompt"):
        build([rollout([], [1])], [0], [1.0])
    with pytest.raises(ValueError, match="2 completion tokens, 1 logprobs"):
        build([rollout([1], [1, 2], logprobs=[-1.0])], [0], [1.0])
    with pytest.raises(ValueError, match="1 weights for 2 rollouts"):
        build([rollout([1], [1])] * 2, [0], [1.0])
