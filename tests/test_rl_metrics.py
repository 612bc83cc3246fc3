"""Mismatch, pass@k and batch statistics against values worked out by hand."""

import math
from itertools import combinations

import pytest
import torch

from jetrl.rl.metrics import Mismatch, avg_at_k, mismatch, pass_at_k, rollout_metrics
from jetrl.rl.types import Completion, FinishReason, Grade, Problem, Prompt, Rollout


def test_agreement_is_exactly_zero():
    logprobs = -torch.rand(50)
    result = mismatch(logprobs, logprobs.clone())
    assert result == Mismatch(tokens=50)
    assert result.exact
    assert result.finish() == {
        "logprob_diff/max": 0.0,
        "logprob_diff/mean": 0.0,
        "token_diff/share": 0.0,
        "token_diff/tokens": 50.0,
        "mismatch_kl": 0.0,
    }


def test_hand_computed():
    rollout = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    trainer = torch.tensor([-1.0, -1.5, -3.25, -4.0])
    metrics = mismatch(rollout, trainer).finish()
    assert metrics["logprob_diff/max"] == 0.5
    assert metrics["logprob_diff/mean"] == 0.75 / 4
    assert metrics["token_diff/share"] == 0.5
    k3 = (math.exp(0.5) - 1.5) + (math.exp(-0.25) - 0.75)
    assert metrics["mismatch_kl"] == pytest.approx(k3 / 4)


def test_one_last_bit_is_seen():
    a = torch.full((9,), -0.7)
    b = a.clone()
    b[6] = torch.nextafter(b[6], torch.tensor(0.0))
    result = mismatch(a, b)
    assert (result.differing, result.first, result.exact) == (1, 6, False)
    assert 0 < result.max_diff < 1e-7
    assert result.sum_k3 > 0
    assert mismatch(torch.tensor([0.0]), torch.tensor([-0.0])).differing == 1


@pytest.mark.parametrize("side", [0, 1, 2])
def test_nan_is_a_mismatch(side):
    a, b = torch.full((3,), -1.0), torch.full((3,), -1.0)
    if side in (0, 2):
        a[1] = math.nan
    if side in (1, 2):
        b[1] = math.nan
    result = mismatch(a, b)
    assert result.max_diff == result.sum_diff == math.inf
    assert result.sum_k3 > 1e8
    assert (result.differing, result.first) == (1, 1)
    merged = Mismatch(max_diff=1.0, tokens=1) + result + Mismatch(tokens=2)
    assert merged.max_diff == math.inf
    assert merged.finish()["logprob_diff/mean"] == math.inf


def test_infinities():
    low = torch.tensor([-math.inf])
    assert mismatch(low, low.clone()).exact
    assert mismatch(low, low.clone()).max_diff == 0.0
    assert mismatch(low, torch.tensor([-1.0])).max_diff == math.inf


def test_microbatches_add_up():
    g = torch.Generator().manual_seed(0)
    a = -torch.rand(100, generator=g)
    b = a.clone()
    b[37:60] += 0.01 * torch.randn(23, generator=g)
    whole, parts = mismatch(a, b), Mismatch()
    for start, end in [(0, 10), (10, 10), (10, 35), (35, 80), (80, 100)]:
        parts += mismatch(a[start:end], b[start:end])
    assert (parts.max_diff, parts.differing, parts.tokens, parts.first) == (whole.max_diff, 23, 100, 37)
    assert parts.sum_diff == pytest.approx(whole.sum_diff)
    assert parts.sum_k3 == pytest.approx(whole.sum_k3)


def test_mismatch_bad_input():
    with pytest.raises(ValueError, match="float32"):
        mismatch(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="one shape"):
        mismatch(torch.zeros(2), torch.zeros(1))


def test_avg_and_pass_at_k():
    correct = [[True, False, False, False], [False] * 4, [True, True, False, False], [True] * 4]
    assert avg_at_k(correct) == (0.25 + 0 + 0.5 + 1) / 4
    for k in (1, 2, 3, 4):  # against all subsets of k samples
        brute = [sum(any(c) for c in combinations(s, k)) / math.comb(4, k) for s in correct]
        assert pass_at_k(correct, k) == pytest.approx(sum(brute) / 4)
    assert pass_at_k(correct, 1) == pytest.approx(avg_at_k(correct))
    assert pass_at_k([[False] * 4999 + [True]], 2500) == pytest.approx(0.5)  # binomials beyond float range
    with pytest.raises(ValueError, match="fewest samples"):
        pass_at_k(correct, 5)
    with pytest.raises(ValueError, match="0 prompts"):
        avg_at_k([])


def test_rollout_metrics():
    def rollout(group, tokens, grade, advantage, reason: FinishReason = "stop"):
        prompt = Prompt(Problem("p", "q"), "q", [1, 2])
        return Rollout(prompt, Completion([0] * tokens, [-1.0] * tokens, reason, 0), "", grade, group, advantage)

    metrics = rollout_metrics(
        [
            rollout(0, 4, Grade(1.0, True), 1.0),
            rollout(0, 2, Grade(0.0, False), -1.0),
            rollout(1, 8, Grade(0.0, False, parsed=False), 0.0, "length"),
            rollout(1, 2, Grade(0.0, False, error="timeout"), 0.0),
        ]
    )
    assert metrics.pop("reward/std") == pytest.approx(math.sqrt(3) / 4)
    assert metrics == {
        "reward/mean": 0.25,
        "accuracy/train": 0.25,
        "accuracy/unparsed": 0.25,
        "grade/errors": 1.0,
        "length/mean": 4.0,
        "length/max": 8.0,
        "length/truncated": 0.25,
        "advantage/zero_groups": 1.0,
    }
    with pytest.raises(ValueError, match="no rollouts"):
        rollout_metrics([])
