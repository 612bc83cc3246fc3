"""Log-probabilities against float64 log_softmax, sampling against the distribution, gradients against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.kernels import logprob
from jetrl.kernels.gemm import Bf16Weight
from jetrl.kernels.logprob import Distribution, chosen_logprobs, distribution, greedy, sample

HIDDEN, VOCAB = 72, 263


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def case(rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (one zero, one large), head, chosen tokens."""
    hidden, head = noise(rows, HIDDEN), noise(VOCAB, HIDDEN, seed=1) * 0.3
    hidden[1 % rows] = 0.0
    hidden[2 % rows] *= 20.0
    return hidden, head, torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(2))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal FP32 bits."""
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


def from_logits(logits: Tensor, temperature: float = 1.0) -> Distribution:
    """The distribution of BF16 logits [R, V]: an identity head passes them through."""
    return distribution(logits.bfloat16(), Bf16Weight.make(torch.eye(logits.shape[1]).bfloat16(), ()), temperature)


def gradient(dlogprobs: Tensor, *arguments: Any) -> Tensor:
    """The gradient towards hidden; rows are asked about once each, with their own log-probabilities."""
    asked: list[Tensor] = []

    def slope(logprobs: Tensor, part: slice) -> Tensor:
        asked.append(logprobs.clone())
        return dlogprobs[part]

    logprobs, _, found = logprob.chosen_logprobs_with_grad(slope, *arguments)
    assert torch.equal(torch.cat(asked), logprobs)
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.25, 3.0])
def test_logprobs_and_entropy_are_those_of_log_softmax(temperature: float) -> None:
    hidden, head, tokens = case()
    scaled = hidden.double() @ head.double().t() / temperature
    wanted = torch.log_softmax(scaled, -1)
    seen, entropy = chosen_logprobs(hidden, Bf16Weight.make(head, ()), tokens, temperature)
    # Logits are rounded once to FP32 and once when divided: 2^-23 of the largest, twice (the chosen one and the shift).
    bound = 2.0**-22 * scaled.abs().amax(1) + 2.0**-24 * wanted.gather(1, tokens[:, None])[:, 0].abs() + VOCAB * 2.0**-35
    assert ((seen.double() - wanted.gather(1, tokens.unsqueeze(1)).squeeze(1)).abs() <= bound).all()
    assert torch.allclose(entropy, -(wanted.exp() * wanted).sum(1), rtol=1e-5, atol=1e-6)
    assert seen[1].item() == pytest.approx(-torch.log(torch.tensor(float(VOCAB))).item(), rel=1e-6)


def test_temperature_divides_the_logits_before_the_softmax() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    wanted = torch.log_softmax(logits.double() / 0.5, -1)
    for token in range(3):
        seen = from_logits(logits, 0.5).logprobs(torch.tensor([token]))
        assert seen.item() == pytest.approx(wanted[0, token].item(), rel=1e-6)


def test_logprobs_do_not_depend_on_rows_order_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, tokens = case(70)
    weight = Bf16Weight.make(head, ())
    wanted, entropy = chosen_logprobs(hidden, weight, tokens, 0.7)
    assert same_bits(distribution(hidden, weight, 0.7).logprobs(tokens), wanted)
    for rows in range(1, 70):
        assert same_bits(chosen_logprobs(hidden[:rows], weight, tokens[:rows], 0.7)[0], wanted[:rows])
    for row in range(70):
        assert same_bits(chosen_logprobs(hidden[row : row + 1], weight, tokens[row : row + 1], 0.7)[0], wanted[row : row + 1])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    assert same_bits(chosen_logprobs(hidden[order], weight, tokens[order], 0.7)[0], wanted[order])
    for budget in (1, 7 * VOCAB):
        monkeypatch.setattr(logprob, "_CHUNK_LOGITS", budget)
        again, entropy_again = chosen_logprobs(hidden, weight, tokens, 0.7)
        assert same_bits(again, wanted)
        assert torch.allclose(entropy_again, entropy, rtol=1e-12)


def test_logprobs_do_not_depend_on_the_order_of_the_vocabulary() -> None:
    hidden, head, tokens = case()
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    place = order.argsort()[tokens]
    wanted = chosen_logprobs(hidden, Bf16Weight.make(head, ()), tokens, 1.0)[0]
    weight, shuffled = Bf16Weight.make(head, ()), Bf16Weight.make(head[order], ())
    assert same_bits(chosen_logprobs(hidden, shuffled, place, 1.0)[0], wanted)
    assert torch.equal(distribution(hidden, shuffled, 1.0).log_sum, distribution(hidden, weight, 1.0).log_sum)  # float64


def test_extreme_logits_stay_finite() -> None:
    rows = from_logits(torch.tensor([[3e4, -3e4, 0.0], [-1e4, 1.0, 0.0]]))
    assert rows.logprobs(torch.tensor([0, 1])).tolist() == pytest.approx([0.0, -0.3132617], abs=1e-6)
    assert rows.logprobs(torch.tensor([1, 2])).tolist() == pytest.approx([-59904.0, -1.3132617], rel=1e-2)
    assert rows.entropy().isfinite().all()


def test_nan_stays_visible_in_its_row() -> None:
    hidden, head, tokens = case()
    wanted = chosen_logprobs(hidden, Bf16Weight.make(head, ()), tokens, 1.0)[0]
    hidden[5, 3] = torch.nan
    seen = chosen_logprobs(hidden, Bf16Weight.make(head, ()), tokens, 1.0)[0]
    assert seen[5].isnan() and same_bits(torch.cat((seen[:5], seen[6:])), torch.cat((wanted[:5], wanted[6:])))


def repeat(rows: Distribution, count: int) -> Distribution:
    return Distribution(*(t.expand(count, -1) for t in (rows.logits, rows.weights, rows.shift, rows.log_sum)))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampling_inverts_the_cumulative_distribution(temperature: float) -> None:
    """With evenly spaced u, counts are n p to within one: no statistics needed."""
    logits, count = noise(1, 40) * 2, 1 << 14
    p = torch.softmax(logits.double()[0] / temperature, 0)
    uniform = (torch.arange(count).double() + 0.5) / count
    tokens = sample(repeat(from_logits(logits, temperature), count), uniform)
    assert (tokens.diff() >= 0).all()
    counts = torch.bincount(tokens, minlength=40).double()
    assert ((counts - count * p).abs() <= 1.01).all()


def test_sampling_is_a_function_of_the_row_and_u_alone() -> None:
    hidden, head, _ = case(50)
    weight = Bf16Weight.make(head, ())
    uniform = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = sample(distribution(hidden, weight, 1.0), uniform)
    assert torch.equal(sample(distribution(hidden, weight, 1.0), uniform), wanted)
    assert len(wanted.unique()) > 20
    for row in range(50):
        part = slice(row, row + 1)
        assert torch.equal(sample(distribution(hidden[part], weight, 1.0), uniform[part]), wanted[part])


def test_tokens_of_zero_weight_are_never_drawn() -> None:
    logits = torch.tensor([[-80.0, 0.0, -80.0, -80.0, 1.0, 0.0, -80.0]])
    last = 1.0 - 2.0**-53
    uniform = torch.cat((torch.tensor([0.0, last], dtype=torch.float64), torch.arange(4096).double() / 4096))
    tokens = sample(repeat(from_logits(logits), len(uniform)), uniform)
    assert tokens[0] == 1 and tokens[1] == 5
    assert set(tokens.tolist()) == {1, 4, 5}
    alone = torch.full((2, 9), -200.0)
    alone[0, 8] = alone[1, 0] = 3.0
    for u in (0.0, 0.5, last):
        assert sample(from_logits(alone), torch.full((2,), u, dtype=torch.float64)).tolist() == [8, 0]


def test_sampling_boundaries_belong_to_the_next_token() -> None:
    wanted = {0.0: 0, 0.25 - 2.0**-50: 0, 0.25: 1, 0.5: 2, 0.75: 3, 1.0 - 2.0**-53: 3}
    equal = repeat(from_logits(torch.zeros(1, 4)), len(wanted))
    assert sample(equal, torch.tensor(list(wanted), dtype=torch.float64)).tolist() == list(wanted.values())


def test_what_is_sampled_has_the_probability_that_is_reported() -> None:
    rows = from_logits(noise(1, 40) * 2, 0.8)
    integers = torch.round(rows.weights * 2.0**34)
    share = torch.log(integers / integers.sum())[0]
    assert torch.allclose(rows.logprobs(torch.tensor([int(share.argmax())])).double(), share.max().unsqueeze(0), atol=1e-7)
    assert torch.allclose(repeat(rows, 40).logprobs(torch.arange(40)).double(), share, atol=1e-6)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-9.0, -8.0, -9.0, -8.0]])
    assert greedy(from_logits(logits)).tolist() == [1, 0, 1]
    hidden, head, _ = case()
    rows = distribution(hidden, Bf16Weight.make(head, ()), 1.0)
    assert torch.equal(greedy(rows), (hidden.double() @ head.double().t()).argmax(1))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("budget", [1 << 24, 7 * VOCAB, 1])
def test_gradient(temperature: float, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "_CHUNK_LOGITS", budget)
    hidden, head, tokens = case()
    dlogprobs = noise(40, seed=4).float()
    dlogprobs[::3] = 0.0  # prompt tokens
    wide, wide_head = hidden.double().requires_grad_(), head.double().requires_grad_()
    chosen = torch.log_softmax(wide @ wide_head.t() / temperature, -1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    chosen.backward(dlogprobs.double())
    assert wide.grad is not None and wide_head.grad is not None
    accumulator = torch.ones(VOCAB, HIDDEN, dtype=torch.float64)
    weight = Bf16Weight.make(head, ())
    seen = gradient(dlogprobs, hidden, weight, tokens, temperature, accumulator)
    assert seen.dtype == torch.bfloat16 and not seen[::3].any()
    assert ((seen.double() - wide.grad).abs() <= 2.0**-8 * wide.grad.abs() + 1e-5).all()
    assert torch.allclose(accumulator - 1.0, wide_head.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(gradient(dlogprobs, hidden, weight, tokens, temperature, None), seen)


def test_a_batch_without_gradient_gives_zeros() -> None:
    hidden, head, tokens = case()
    accumulator = torch.zeros(VOCAB, HIDDEN, dtype=torch.float64)
    assert not gradient(torch.zeros(40), hidden, Bf16Weight.make(head, ()), tokens, 1.0, accumulator).any()
    assert not accumulator.any()
