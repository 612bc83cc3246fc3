"""Indexing, masks and formulas of the Hopper log-probability kernels in Triton's interpreter, on a CPU.

The interpreter is chosen when triton is imported, so the checks run in a pytest of their own. It truncates FP32 to BF16:
bounds on BF16 results are twice those of rounding.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreter import run_checks

TILE = 4096
VOCABULARIES = [1, 50, TILE, TILE + 16, 2 * TILE + 77]


def gradient(dlogprobs: Tensor, *arguments: Any) -> Tensor:
    """The gradient towards hidden; rows are asked about once each, with their own log-probabilities."""
    asked: list[Tensor] = []

    def slope(logprobs: Tensor, part: slice) -> Tensor:
        asked.append(logprobs.clone())
        return dlogprobs[part]

    logprobs, _, found = kernels().chosen_logprobs_with_grad(slope, *arguments)
    assert torch.equal(torch.cat(asked), logprobs)
    return found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_in_the_interpreter() -> None:
    run_checks(__file__)


def kernels() -> ModuleType:
    from jetrl.kernels.hopper import logprob  # imports triton: only in the pytest with the interpreter

    return logprob


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_tokens(rows: int, vocabulary: int, seed: int = 1) -> Tensor:
    return torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(seed))


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """z in FP32, then wide: both sides start from it."""
    return (logits / torch.tensor(temperature)).double()


def product(hidden: Tensor, head: Tensor) -> Tensor:
    return hidden.float() @ head.float().t()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def check_logprobs_and_statistics(vocabulary: int, temperature: float) -> None:
    logits, tokens = noise(5, vocabulary) * 4, some_tokens(5, vocabulary)
    logits[1] = 0.0
    z = scaled(logits, temperature)
    wanted = torch.log_softmax(z, 1)
    seen, statistics = kernels().chosen_logprobs(logits, tokens, temperature)
    assert torch.allclose(seen.double(), wanted.gather(1, tokens[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    assert torch.equal(statistics.largest.double(), z.amax(1))
    assert torch.allclose(statistics.log_sum.double(), (z - z.amax(1, keepdim=True)).logsumexp(1), rtol=1e-6, atol=1e-6)
    assert torch.allclose(statistics.entropy.double(), -(wanted.exp() * wanted).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def check_boundaries_of_sampling(vocabulary: int) -> None:
    """u just inside a token's share draws that token; u = 0 and the last u stay within the vocabulary."""
    logits = noise(1, vocabulary)
    upper = torch.softmax(scaled(logits, 0.7)[0], 0).cumsum(0)
    places = torch.tensor([0, vocabulary // 3, vocabulary // 2, vocabulary - 1])
    middle = upper[places] - torch.softmax(scaled(logits, 0.7)[0], 0)[places] / 2
    uniform = torch.cat((middle, torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)))
    tokens, logprobs = kernels().sample(logits.expand(6, -1).contiguous(), uniform, 0.7)
    assert tokens.tolist() == [*places.tolist(), 0, vocabulary - 1]
    assert torch.equal(logprobs, kernels().chosen_logprobs(logits.expand(6, -1).contiguous(), tokens, 0.7)[0])


def check_counts_of_sampling() -> None:
    logits, count = noise(1, 40) * 2, 96
    uniform = (torch.arange(count).double() + 0.5) / count
    tokens, _ = kernels().sample(logits.expand(count, -1).contiguous(), uniform, 0.5)
    assert (tokens.diff() >= 0).all()
    share = torch.softmax(scaled(logits, 0.5)[0], 0)
    assert ((torch.bincount(tokens, minlength=40) - count * share).abs() <= 1.01).all()


def check_weightless_tokens_are_never_drawn() -> None:
    logits = torch.full((3, 2 * TILE + 5), -1e4)
    logits[0, TILE + 3] = logits[1, 2 * TILE + 4] = logits[2, 0] = 3.0
    for u in (0.0, 0.5, 1.0 - 2.0**-53):
        tokens, logprobs = kernels().sample(logits, torch.full((3,), u, dtype=torch.float64), 1.0)
        assert tokens.tolist() == [TILE + 3, 2 * TILE + 4, 0]
        assert torch.equal(logprobs, torch.zeros(3))
    banned = torch.full((1, 2 * TILE + 5), -torch.inf)  # whole tiles of -Inf
    banned[0, TILE + 1 : TILE + 3] = 1.0
    tokens, logprobs = kernels().sample(banned.expand(2, -1).contiguous(), torch.tensor([0.49, 0.51]), 1.0)
    assert tokens.tolist() == [TILE + 1, TILE + 2]
    assert torch.allclose(logprobs, torch.tensor(0.5).log())
    assert kernels().chosen_logprobs(banned, torch.tensor([0]), 1.0)[0].item() == -torch.inf


def check_greedy_takes_the_first_of_equals() -> None:
    logits = noise(4, 2 * TILE + 77)
    logits[0, [5, 9, TILE + 1]] = 50.0
    logits[1, [TILE + 7, TILE + 8, 2 * TILE + 76]] = 50.0
    logits[2, 2 * TILE + 76] = 50.0
    tokens, logprobs = kernels().greedy(logits)
    assert tokens.tolist() == [5, TILE + 7, 2 * TILE + 76, logits[3].argmax().item()]
    assert torch.equal(logprobs, kernels().chosen_logprobs(logits, tokens, 1.0)[0])


def check_forced_tokens_replace_drawn_ones() -> None:
    logits, forced = noise(3, 50), torch.tensor([-1, 7, -1])
    uniform = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    free, _ = kernels().sample(logits, uniform, 0.7)
    tokens, logprobs = kernels().sample(logits, uniform, 0.7, forced)
    assert tokens.tolist() == [free[0].item(), 7, free[2].item()]
    assert torch.equal(logprobs, kernels().chosen_logprobs(logits, tokens, 0.7)[0])
    assert kernels().greedy(logits, forced)[0].tolist() == [logits[0].argmax().item(), 7, logits[2].argmax().item()]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero", "ignore:overflow")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def check_broken_logits_show_and_tokens_stay_inside(bad: float) -> None:
    logits = noise(3, TILE + 20)
    logits[0, TILE + 3] = bad
    logits[1] = bad
    uniform = torch.full((3,), 1.0 - 2.0**-53, dtype=torch.float64)
    for tokens, logprobs in (kernels().sample(logits, uniform, 1.0), kernels().greedy(logits)):
        assert ((tokens >= 0) & (tokens < logits.shape[1])).all()
        assert not logprobs[1].isfinite() and logprobs[2].isfinite()
    _, statistics = kernels().chosen_logprobs(logits, torch.zeros(3, dtype=torch.int64), 1.0)
    assert statistics.log_sum.isfinite().tolist() == [bad == -torch.inf, False, True]


def check_tokens_outside_of_the_vocabulary_give_nan() -> None:
    seen, _ = kernels().chosen_logprobs(noise(3, 50), torch.tensor([-1, 50, 49]), 1.0)
    assert seen.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def check_gradient_of_logits(vocabulary: int) -> None:
    logits, tokens, dlogprobs = noise(4, vocabulary) * 3, some_tokens(4, vocabulary), noise(4, seed=2)
    dlogprobs[2] = 0.0
    wide = logits.double().requires_grad_()
    (torch.log_softmax(wide / 0.7, 1).gather(1, tokens[:, None])[:, 0] * dlogprobs).sum().backward()
    _, statistics = kernels().chosen_logprobs(logits, tokens, 0.7)
    seen = kernels().logits_grad(logits, tokens, dlogprobs, statistics, 0.7)
    assert seen.dtype == torch.bfloat16 and not seen[2].any()
    assert wide.grad is not None
    assert ((seen.double() - wide.grad).abs() <= 2.0**-7 * wide.grad.abs() + 1e-6).all()


def check_chunks_cover_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels(), "CHUNK_ROWS", 3)
    hidden, head, tokens, dlogprobs = (
        noise(8, 24).bfloat16(),
        noise(50, 24, seed=3).bfloat16(),
        some_tokens(8, 50),
        noise(8, seed=2),
    )
    wide, wide_head = hidden.double().requires_grad_(), head.double().requires_grad_()
    everything = torch.log_softmax(wide @ wide_head.t() / 0.7, 1)
    wanted = everything.gather(1, tokens[:, None])[:, 0]
    (wanted * dlogprobs).sum().backward()
    assert wide.grad is not None and wide_head.grad is not None
    seen, entropy = kernels().chosen_logprobs_of_hidden(hidden, head, tokens, 0.7, product)
    assert torch.allclose(seen.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    assert torch.allclose(entropy.double(), -(everything.exp() * everything).sum(1).detach(), rtol=1e-5, atol=1e-5)
    accumulator = torch.ones(50, 24)
    dhidden = gradient(dlogprobs, hidden, head, tokens, 0.7, product, accumulator)
    scale, head_scale = wide.grad.abs().max(), wide_head.grad.abs().max()
    assert dhidden.dtype == torch.bfloat16 and ((dhidden.double() - wide.grad).abs() <= 0.02 * scale).all()
    assert ((accumulator.double() - 1 - wide_head.grad).abs() <= 0.02 * head_scale).all()
    assert torch.equal(gradient(dlogprobs, hidden, head, tokens, 0.7, product, None), dhidden)


@pytest.mark.parametrize("hidden_size", [24, 520])
def check_gradient_of_the_embedding(hidden_size: int) -> None:
    tokens = torch.tensor([3, 0, 3, 49, 3, 0, *[7] * 21])
    grad = torch.randint(-8, 9, (27, hidden_size), generator=torch.Generator().manual_seed(0)).bfloat16()
    accumulator = torch.ones(50, hidden_size)
    wanted = accumulator.index_add(0, tokens, grad.float())
    kernels().embedding_grad(accumulator, tokens, grad)
    assert torch.equal(accumulator, wanted)  # small integers: exact in any order


def check_no_rows() -> None:
    logits, none = torch.empty(0, 50), torch.empty(0, dtype=torch.int64)
    seen, statistics = kernels().chosen_logprobs(logits, none, 1.0)
    assert seen.shape == statistics.entropy.shape == kernels().sample(logits, torch.empty(0), 1.0)[0].shape == (0,)
    assert kernels().greedy(logits)[0].shape == (0,)
    accumulator = torch.zeros(50, 8)
    kernels().embedding_grad(accumulator, none, torch.empty(0, 8, dtype=torch.bfloat16))
    assert not accumulator.any()


def check_wrong_logits_are_refused() -> None:
    for logits, complaint in (
        (torch.zeros(2, 50).bfloat16(), "float32"),
        (torch.zeros(50, 2).t(), "contiguous"),
        (torch.zeros(2, 0), "vocabulary"),
        (torch.zeros(1, (1 << 19) + 1), "vocabulary"),
        (torch.zeros(2 * 16 + 1)[1:].view(2, 16), "16 bytes"),
    ):
        with pytest.raises(ValueError, match=complaint):
            kernels().tile_statistics(logits, 1.0)
