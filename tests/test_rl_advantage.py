"""Group advantages: hand-computed values, and groups that must not blow up."""

import math

import pytest
import torch

from jetrl.rl.advantage import group_advantages, zero_advantage_groups


def test_hand_computed():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    root = math.sqrt(3)  # mean 1/4, std sqrt(3)/4
    expected = torch.tensor([[1.0, -1.0, -1.0, 1.0], [root, -1 / root, -1 / root, -1 / root]])
    assert group_advantages(rewards, "grpo").dtype == torch.float32
    torch.testing.assert_close(group_advantages(rewards, "grpo"), expected)
    torch.testing.assert_close(group_advantages(rewards, "dr_grpo")[1], torch.tensor([0.75, -0.25, -0.25, -0.25]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_seven_to_one_does_not_cancel(dtype):
    rewards = torch.tensor([[0.35] * 7 + [0.4]], dtype=dtype)
    expected = torch.tensor([[-1 / math.sqrt(7)] * 7 + [math.sqrt(7)]])
    torch.testing.assert_close(group_advantages(rewards, "grpo"), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
@pytest.mark.parametrize(
    "group",
    [
        [0.3] * 4,
        [0.0] * 4,
        [0.1 + 0.2, 0.3, 0.3, 0.3],
        [1.0, 1.0 + 1e-8, 1.0, 1.0],
        [0.0, 1e-8, 0.0, 0.0],
        [1e9, 1e9 + 1e-3],
    ],
)
def test_equal_but_for_rounding_is_exactly_zero(group, kind):
    advantages = group_advantages(torch.tensor([group], dtype=torch.float64), kind)
    assert torch.equal(advantages, torch.zeros(1, len(group)))


def test_group_of_one_and_integer_rewards():
    assert torch.equal(group_advantages(torch.tensor([[5.0], [-1.0]]), "grpo"), torch.zeros(2, 1))
    assert torch.equal(group_advantages(torch.tensor([[1, 3]]), "grpo"), torch.tensor([[-1.0, 1.0]]))
    assert group_advantages(torch.zeros(0, 4), "grpo").shape == (0, 4)


def test_a_small_but_real_spread_is_kept():
    expected = torch.tensor([[-1.0, 1.0]])
    torch.testing.assert_close(group_advantages(torch.tensor([[0.5, 0.5001]]).double(), "grpo"), expected)


def test_zero_groups_are_counted():
    advantages = group_advantages(torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]), "grpo")
    assert zero_advantage_groups(advantages) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38])
def test_bad_rewards_are_refused_with_their_place(bad):
    with pytest.raises(ValueError, match="completion 1 in group 1"):
        group_advantages(torch.tensor([[0.0, 1.0], [0.0, bad]]), "grpo")


def test_bad_shape_and_kind_are_refused():
    with pytest.raises(ValueError, match="shape"):
        group_advantages(torch.zeros(4), "grpo")
    with pytest.raises(ValueError, match="kind"):
        group_advantages(torch.zeros(1, 2), "ppo")  # pyright: ignore[reportArgumentType]
