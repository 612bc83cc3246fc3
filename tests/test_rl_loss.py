"""The policy loss: weights, hand-computed values, numerical gradients, extremes, and independence of the split."""

import math
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from jetrl.rl.loss import (
    LOG_RATIO_BOUND,
    LossStats,
    TokenInputs,
    policy_loss,
    policy_slope,
    token_weights,
    truncated_importance,
)

Kind = Literal["token_mean", "sequence_mean", "dr_grpo"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def test_weights_by_hand():
    lengths, include = [2, 6, 4, 0], [True, True, False, True]
    assert token_weights("token_mean", lengths, include, 10) == [1 / 8, 1 / 8, 0.0, 0.0]
    assert token_weights("sequence_mean", lengths, include, 10) == [1 / 4, 1 / 12, 0.0, 0.0]
    assert token_weights("dr_grpo", lengths, include, 10) == [1 / 40, 1 / 40, 0.0, 0.0]
    for kind in KINDS[:2]:  # the averages are averages: weights of all tokens sum to 1
        weights = token_weights(kind, lengths, include, 10)
        assert math.isclose(sum(w * n for w, n in zip(weights, lengths, strict=True)), 1.0)


def test_bad_weights_input():
    with pytest.raises(ValueError, match="include"):
        token_weights("token_mean", [1, 2], [True], 4)
    with pytest.raises(ValueError, match="negative"):
        token_weights("token_mean", [1, -2], [True, True], 4)
    with pytest.raises(ValueError, match="kind"):
        token_weights("mean", [1], [True], 4)  # pyright: ignore[reportArgumentType]


def grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def inputs(n, seed=0, spread=0.3):
    g = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(n, generator=g) * 3
    trainer = behavior + spread * torch.randn(n, generator=g)
    advantages = torch.randn(n, generator=g)
    weights = torch.rand(n, generator=g, dtype=torch.float64) / n
    reference = behavior + spread * torch.randn(n, generator=g)
    return trainer.requires_grad_(), behavior, advantages, weights, reference


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_all_masked_is_zero_and_finite(kind, kl_coef):
    trainer, behavior, advantages, _, reference = inputs(5)
    (weight, other) = token_weights(kind, [3, 2], [False, False], 8)
    weights = torch.tensor([weight] * 3 + [other] * 2)
    extreme = behavior + torch.tensor([0.0, 1e4, -1e4, math.inf, 0.0])
    loss, stats = policy_loss(trainer, extreme, advantages, weights, 0.2, 0.28, None, reference, kl_coef)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(grad(trainer), torch.zeros(5))
    assert (stats.tokens, stats.masked) == (0, 5)
    assert stats.finish()["loss/all_masked"] == 1.0
    assert all(math.isfinite(v) for v in stats.finish().values())


def test_no_tokens_at_all():
    empty = torch.zeros(0, requires_grad=True)
    loss, stats = policy_loss(empty, empty, empty, empty, 0.2, 0.2)
    loss.backward()
    assert loss.item() == 0.0
    assert stats.tokens == 0
    assert grad(empty).shape == (0,)


def test_clip_by_hand():
    log_ratio = torch.tensor([0.5, 0.5, 2.0, 2.0, 1.2, 1.1, 0.85]).log()  # ratios, with clip [0.8, 1.28]
    trainer = log_ratio.clone().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0, -2.0])
    loss, stats = policy_loss(trainer, torch.zeros(7), advantages, torch.ones(7), 0.2, 0.28)
    loss.backward()
    #   kept 0.5, clipped -0.8, clipped 1.28, kept -2, kept 1.2, zero advantage, kept -1.7
    assert loss.item() == pytest.approx(-(0.5 - 0.8 + 1.28 - 2.0 + 1.2 + 0.0 - 1.7), rel=1e-6)
    torch.testing.assert_close(grad(trainer), torch.tensor([-0.5, 0.0, 0.0, 2.0, -1.2, 0.0, 1.7]))
    assert (stats.clipped_low, stats.clipped_high, stats.tokens) == (1, 1, 7)
    assert stats.ratio == pytest.approx(8.15, rel=1e-6)


def test_first_exact_update_is_reinforce_to_the_bit():
    trainer, _, advantages, weights, _ = inputs(500)
    loss, stats = policy_loss(trainer, trainer.detach().clone(), advantages, weights, 0.0, 0.0)
    loss.backward()
    plain = trainer.detach().clone().requires_grad_()
    (-(weights * advantages.double() * plain.double()).sum()).backward()
    assert torch.equal(grad(trainer), grad(plain))
    assert stats.ratio == 500.0
    assert stats.clipped_low == stats.clipped_high == 0


def test_kl_by_hand():
    trainer = torch.tensor([-1.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.5, -2.0])
    weights = torch.tensor([0.5, 0.5])
    loss, stats = policy_loss(
        trainer, trainer.detach(), torch.zeros(2), weights, 0.2, 0.2, reference_logprobs=reference, kl_coef=0.1
    )
    loss.backward()
    k3 = math.exp(-0.5) - 1 + 0.5
    assert stats.kl == pytest.approx(k3)
    assert loss.item() == pytest.approx(0.05 * k3)
    assert stats.policy == 0.0
    torch.testing.assert_close(grad(trainer), torch.tensor([0.05 * (1 - math.exp(-0.5)), 0.0]))
    assert stats.finish()["loss/kl"] == pytest.approx(k3 / 2)


def test_numerical_gradient():
    trainer, behavior, advantages, weights, reference = inputs(40, seed=3)
    importance = truncated_importance(reference, behavior, 1.1)

    def f(x):
        return policy_loss(x, behavior, advantages, weights, 0.2, 0.28, importance, reference, 0.05)[0]

    assert torch.autograd.gradcheck(f, trainer.detach().double().requires_grad_(), eps=1e-7, atol=1e-7)


@pytest.mark.parametrize("shift", [1e4, -1e4, 100.0, -100.0, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite(shift, advantage):
    trainer = torch.tensor([-1.0, -1.0], requires_grad=True)
    behavior = torch.tensor([-1.0 - shift, -1.0])
    reference = torch.tensor([-1.0 + (shift if math.isfinite(shift) else 1e4), -1.0])
    loss, stats = policy_loss(trainer, behavior, torch.full((2,), advantage), torch.ones(2), 0.2, 0.28, None, reference, 0.1)
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(grad(trainer).isfinite().all())
    assert stats.bounded == 1
    assert grad(trainer)[1].item() == -advantage  # the neighbour is untouched
    if shift < 0 and math.isfinite(shift):  # far more likely than under the reference: the linear pull back remains
        assert grad(trainer)[0].item() == pytest.approx(0.1)


def test_nan_stays_visible():
    trainer = torch.tensor([math.nan, -1.0], requires_grad=True)
    loss, stats = policy_loss(trainer, torch.tensor([-1.0, -1.0]), torch.ones(2), torch.ones(2), 0.2, 0.28)
    assert math.isnan(loss.item())
    assert math.isnan(stats.loss)


@pytest.mark.parametrize("kind", KINDS)
def test_independent_of_the_split(kind):
    lengths = [3, 17, 1, 9, 30, 4, 12, 24]
    per_sequence = token_weights(kind, lengths, [i != 3 for i in range(8)], 30)
    weights = torch.cat([torch.full((n,), w, dtype=torch.float64) for n, w in zip(lengths, per_sequence, strict=True)])
    _, behavior, advantages, _, reference = inputs(sum(lengths), seed=1)
    features = torch.randn(sum(lengths), 6, generator=torch.Generator().manual_seed(2))
    owner = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))

    def run(split):
        parameter = torch.full((6,), 0.1, dtype=torch.float64, requires_grad=True)
        token_grads, total = torch.zeros(sum(lengths)), LossStats()
        for batch in split:
            t = torch.isin(owner, torch.tensor(batch)).nonzero()[:, 0]
            logprobs = (behavior[t] + 1.5 * (features[t].double() * parameter).sum(1)).float()
            logprobs.retain_grad()
            loss, stats = policy_loss(logprobs, behavior[t], advantages[t], weights[t], 0.2, 0.28, None, reference[t], 0.1)
            loss.backward()
            token_grads[t], total = logprobs.grad, total + stats
        return total, token_grads, parameter.grad

    whole, grads, parameter_grad = run([list(range(8))])
    for split in ([[i] for i in range(8)], [[0, 7, 3], [1, 2], [4, 5, 6]], [[3], [6, 5, 4, 2, 1, 0, 7]]):
        stats, other, other_parameter = run(split)
        assert torch.equal(other, grads)  # each token's gradient is the same bits
        torch.testing.assert_close(other_parameter, parameter_grad, rtol=1e-12, atol=1e-15)
        assert stats.loss == pytest.approx(whole.loss, rel=1e-12)
        assert stats.kl == pytest.approx(whole.kl, rel=1e-12)
        assert (stats.tokens, stats.masked, stats.clipped_low) == (whole.tokens, whole.masked, whole.clipped_low)
    assert whole.tokens == 91
    assert whole.masked == 9
    assert whole.clipped_low > 0
    assert whole.clipped_high > 0


def test_nothing_broadcasts():
    trainer, behavior, advantages, weights, _ = inputs(4)
    with pytest.raises(ValueError, match="advantages has shape"):
        policy_loss(trainer, behavior, advantages[:1], weights, 0.2, 0.2)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(trainer, behavior, advantages, weights, 0.2, 0.2, kl_coef=0.1)
    with pytest.raises(ValueError, match="rollout has shape"):
        truncated_importance(trainer, behavior[:1], 2.0)
    with pytest.raises(ValueError, match="cap"):
        truncated_importance(trainer, behavior, 0.0)


def test_truncated_importance():
    rollout = torch.tensor([-1.0, -1.0, -1.0, -1e4, -1.0])
    trainer = torch.tensor([-1.0, -2.0, -0.5, -1.0, -1e4], requires_grad=True)
    factors = truncated_importance(trainer, rollout, 1.5)
    expected = torch.tensor([1.0, math.exp(-1), 1.5, 1.5, math.exp(-LOG_RATIO_BOUND)])
    torch.testing.assert_close(factors, expected)
    assert not factors.requires_grad
    ones = torch.ones(5)
    loss, _ = policy_loss(trainer, trainer.detach(), ones, ones, 0.2, 0.2, importance=factors)
    loss.backward()
    assert torch.equal(grad(trainer), -factors)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("corrected", [False, True])
def test_the_slope_of_any_part_is_the_gradient_of_the_whole(kl_coef, corrected):
    trainer, behavior, advantages, weights, reference = inputs(37, spread=1.0)
    with torch.no_grad():
        trainer[3], trainer[5] = behavior[3] + 2 * LOG_RATIO_BOUND, behavior[5] - 2 * LOG_RATIO_BOUND
    weights[7:9] = 0.0
    importance = torch.rand(37) * 2 if corrected else None
    loss, _ = policy_loss(trainer, behavior, advantages, weights, 0.2, 0.28, importance, reference, kl_coef)
    loss.backward()
    tokens = TokenInputs(behavior, advantages, weights, importance, reference)
    with torch.no_grad():  # as the trainer asks for it
        for part in (slice(0, 37), slice(0, 10), slice(10, 11), slice(11, 37)):
            slope = policy_slope(trainer[part], tokens.part(part), 0.2, 0.28, kl_coef)
            assert slope.dtype == torch.float32 and torch.equal(slope, grad(trainer)[part])
    assert not grad(trainer)[7:9].any() and bool(kl_coef) == bool(grad(trainer)[3])
