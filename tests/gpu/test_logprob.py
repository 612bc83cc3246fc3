"""The Hopper log-probability kernels against float64: accuracy, row-independence, sampling, gradients, graphs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.rl.loss import TokenInputs, policy_slope

pytestmark = pytest.mark.gpu

# Tiny, one tile to the element, rows that do not start at multiples of 16 bytes, and three real ones.
VOCABULARIES = [50, 4096, 50257, 49152, 151936, 152064]


def kernels() -> ModuleType:
    from jetrl.kernels.hopper import logprob  # imports triton, which a machine without a GPU may not have

    return logprob


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def some_tokens(rows: int, vocabulary: int, seed: int = 1) -> Tensor:
    return torch.randint(0, vocabulary, (rows,), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def uniforms(rows: int, seed: int = 2) -> Tensor:
    return torch.rand(rows, device="cuda", dtype=torch.float64, generator=torch.Generator("cuda").manual_seed(seed))


def varied_logits(rows: int, vocabulary: int) -> Tensor:
    """Rows from flat to peaked; one of zeros, one with an outlier."""
    logits = noise(rows, vocabulary) * torch.linspace(0.1, 6.0, rows, device="cuda").unsqueeze(1)
    logits[1 % rows] = 0.0
    logits[2 % rows, vocabulary // 2] = 40.0
    return logits


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """z in FP32 by IEEE division, then wide: both sides start from it."""
    return (logits / torch.tensor(temperature, device="cuda")).double()


def exact_case(rows: int, vocabulary: int = 5000, width: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden, head, tokens, dlogprobs. Products are multiples of 1/4, which FP32 adds exactly in any order, in any GEMM."""
    hidden = (torch.round(noise(rows, width)) / 2).bfloat16()
    head = (torch.round(noise(vocabulary, width, seed=3)) / 2).bfloat16()
    return hidden, head, some_tokens(rows, vocabulary), noise(rows, seed=4)


def product(hidden: Tensor, head: Tensor) -> Tensor:
    return hidden.float() @ head.float().t()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


def gradient(dlogprobs: Tensor, *arguments: Any) -> Tensor:
    """The gradient towards hidden; rows are asked about once each, with their own log-probabilities."""
    asked: list[Tensor] = []

    def slope(logprobs: Tensor, part: slice) -> Tensor:
        asked.append(logprobs.clone())
        return dlogprobs[part]

    logprobs, _, found = kernels().chosen_logprobs_with_grad(slope, *arguments)
    assert torch.equal(torch.cat(asked), logprobs)
    return found


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_those_of_log_softmax(vocabulary: int, temperature: float) -> None:
    logits, tokens = varied_logits(33, vocabulary), some_tokens(33, vocabulary)
    tokens[::2] = logits[::2].argmax(1)
    z = scaled(logits, temperature)
    wanted = torch.log_softmax(z, 1)
    chosen = wanted.gather(1, tokens[:, None])[:, 0]
    seen, statistics = kernels().chosen_logprobs(logits, tokens, temperature)
    assert ((seen.double() - chosen).abs() <= 1e-6 * chosen.abs().clamp(min=1.0)).all()
    assert torch.equal(statistics.largest.double(), z.amax(1))
    log_sum = (z - z.amax(1, keepdim=True)).logsumexp(1)
    assert ((statistics.log_sum.double() - log_sum).abs() <= 1e-6 * log_sum.abs().clamp(min=1.0)).all()
    assert torch.allclose(statistics.entropy.double(), -(wanted.exp() * wanted).sum(1), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("vocabulary", [50, 50257, 151936])
def test_rows_depend_on_nothing_but_themselves(vocabulary: int) -> None:
    rows = 1024 if vocabulary < 151936 else 300
    logits, tokens, u = varied_logits(rows, vocabulary), some_tokens(rows, vocabulary), uniforms(rows)
    dlogprobs = noise(rows, seed=4)
    drawn, drawn_logprobs = kernels().sample(logits, u, 0.7)
    wanted, statistics = kernels().chosen_logprobs(logits, tokens, 0.7)
    grad = kernels().logits_grad(logits, tokens, dlogprobs, statistics, 0.7)
    order = torch.randperm(rows, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    parts = [slice(r, r + 1) for r in (0, 1, 2, 7, rows - 1)] + [slice(3, 20), slice(1, rows), slice(0, rows), order]
    for part in parts:
        seen, seen_statistics = kernels().chosen_logprobs(logits[part], tokens[part], 0.7)
        assert same_bits(seen, wanted[part])
        for name in ("largest", "log_sum", "entropy"):
            assert same_bits(getattr(seen_statistics, name), getattr(statistics, name)[part])
        again, again_logprobs = kernels().sample(logits[part], u[part], 0.7)
        assert torch.equal(again, drawn[part]) and same_bits(again_logprobs, drawn_logprobs[part])
        seen_grad = kernels().logits_grad(logits[part], tokens[part], dlogprobs[part], seen_statistics, 0.7)
        assert torch.equal(seen_grad, grad[part])


@pytest.mark.parametrize("vocabulary", [50, 50257, 151936])
def test_sampler_and_trainer_report_the_same_bits(vocabulary: int) -> None:
    logits, u = varied_logits(64, vocabulary), uniforms(64)
    tokens, logprobs = kernels().sample(logits, u, 0.7)
    assert len(tokens.unique()) > 20
    assert same_bits(logprobs, kernels().chosen_logprobs(logits, tokens, 0.7)[0])
    forced = torch.where(torch.arange(64, device="cuda") % 2 == 0, some_tokens(64, vocabulary), -1)
    mixed, mixed_logprobs = kernels().sample(logits, u, 0.7, forced)
    assert torch.equal(mixed, torch.where(forced >= 0, forced, tokens))
    assert same_bits(mixed_logprobs, kernels().chosen_logprobs(logits, mixed, 0.7)[0])
    likeliest, likeliest_logprobs = kernels().greedy(logits)
    assert torch.equal(likeliest, logits.argmax(1)) or torch.equal(logits.gather(1, likeliest[:, None])[:, 0], logits.amax(1))
    assert same_bits(likeliest_logprobs, kernels().chosen_logprobs(logits, likeliest, 1.0)[0])


def test_sampling_has_the_distribution_that_it_reports() -> None:
    """200,000 evenly spaced u: counts are n p to within one and the rounding of p."""
    count = 200_000
    logits = noise(1, 60) * 2
    share = torch.softmax(scaled(logits, 0.7)[0], 0)
    u = (torch.arange(count, device="cuda").double() + 0.5) / count
    tokens, logprobs = kernels().sample(logits.expand(count, -1).contiguous(), u, 0.7)
    assert (tokens.diff() >= 0).all()
    counts = torch.bincount(tokens, minlength=60)
    assert ((counts - count * share).abs() <= 1.2).all()
    assert torch.allclose(logprobs.double(), share.log()[tokens], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [50, 50257, 151936])
def test_boundaries_of_tokens_are_those_of_the_cumulative_sum(vocabulary: int) -> None:
    logits, rows = varied_logits(8, vocabulary), 8
    upper = torch.softmax(scaled(logits, 0.7), 1).cumsum(1)
    for trial in range(16):
        u = uniforms(rows, seed=10 + trial)
        tokens, _ = kernels().sample(logits, u, 0.7)
        above = upper.gather(1, tokens[:, None])[:, 0]
        below = torch.where(tokens > 0, upper.gather(1, (tokens - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        assert (below - 1e-5 <= u).all() and (u <= above + 1e-5).all()
        # Half a share inside of its token, u must give that token, where a share is more than the error.
        places = some_tokens(rows, vocabulary, seed=30 + trial)
        share = torch.softmax(scaled(logits, 0.7), 1).gather(1, places[:, None])[:, 0]
        seen, _ = kernels().sample(logits, (upper.gather(1, places[:, None])[:, 0] - share / 2).clamp(0.0, 1.0 - 2.0**-53), 0.7)
        assert torch.equal(seen[share > 1e-5], places[share > 1e-5])


def test_ends_of_the_unit_interval() -> None:
    vocabulary = 3 * 4096 + 5
    logits = torch.full((4, vocabulary), -1e4, device="cuda")
    logits[0, 4099] = logits[1, vocabulary - 1] = logits[2, 0] = 3.0
    logits[3] = -torch.inf
    logits[3, 8192:8194] = 1.0
    for u, last in ((0.0, 8192), (0.49, 8192), (0.51, 8193), (1.0 - 2.0**-53, 8193)):
        for kind in (torch.float64, torch.float32) if u < 0.9 else (torch.float64,):
            tokens, logprobs = kernels().sample(logits, torch.full((4,), u, device="cuda", dtype=kind), 1.0)
            assert tokens.tolist() == [4099, vocabulary - 1, 0, last]
            assert torch.allclose(logprobs, torch.tensor([1.0, 1.0, 1.0, 0.5], device="cuda").log())


def test_greedy_takes_the_first_of_equals() -> None:
    logits = noise(3, 50257)
    logits[0, [5, 9, 4097]] = 50.0
    logits[1, [4103, 4104, 50256]] = 50.0
    logits[2, 50256] = 50.0
    assert kernels().greedy(logits)[0].tolist() == [5, 4103, 50256]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_show_and_tokens_stay_inside(bad: float) -> None:
    logits = noise(3, 50257)
    logits[0, 4099] = bad
    logits[1] = bad
    for u in (0.0, 0.5, 1.0 - 2.0**-53):
        drawn = kernels().sample(logits, torch.full((3,), u, device="cuda", dtype=torch.float64), 1.0)
        for tokens, logprobs in (drawn, kernels().greedy(logits)):
            assert ((tokens >= 0) & (tokens < 50257)).all()
            assert not logprobs[1].isfinite() and logprobs[2].isfinite()
            assert logprobs[0].isfinite() == (bad == -torch.inf)
    _, statistics = kernels().chosen_logprobs(logits, some_tokens(3, 50257), 1.0)
    assert statistics.log_sum.isfinite().tolist() == [bad == -torch.inf, False, True]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_of_logits(vocabulary: int, temperature: float) -> None:
    logits, tokens, dlogprobs = varied_logits(9, vocabulary), some_tokens(9, vocabulary), noise(9, seed=4)
    dlogprobs[5] = 0.0
    _, statistics = kernels().chosen_logprobs(logits, tokens, temperature)
    seen = kernels().logits_grad(logits, tokens, dlogprobs, statistics, temperature).double()
    scale = (dlogprobs.double() / temperature).unsqueeze(1)
    wanted = -torch.softmax(scaled(logits, temperature), 1)
    wanted.scatter_add_(1, tokens[:, None], torch.ones_like(scale))
    wanted *= scale
    assert not seen[5].any()
    assert ((seen - wanted).abs() <= 2.0**-8 * wanted.abs() * 1.01 + 2e-6 * scale.abs()).all()


def test_offsets_beyond_32_bits() -> None:
    """Rows past 2^31 elements, in the logits and in their BF16 gradient."""
    vocabulary, rows = 151936, (1 << 31) // 151936 + 8
    logits = torch.zeros(rows, vocabulary, device="cuda")
    logits[-4:] = varied_logits(4, vocabulary)
    tokens, u, dlogprobs = some_tokens(rows, vocabulary), uniforms(rows), torch.zeros(rows, device="cuda")
    dlogprobs[-4:] = noise(4, seed=4)
    seen, statistics = kernels().chosen_logprobs(logits, tokens, 0.7)
    wanted, last = kernels().chosen_logprobs(logits[-4:].clone(), tokens[-4:], 0.7)
    assert same_bits(seen[-4:], wanted)
    assert torch.equal(kernels().sample(logits, u, 0.7)[0][-4:], kernels().sample(logits[-4:].clone(), u[-4:], 0.7)[0])
    grad = kernels().logits_grad(logits, tokens, dlogprobs, statistics, 0.7)
    assert torch.equal(grad[-4:], kernels().logits_grad(logits[-4:].clone(), tokens[-4:], dlogprobs[-4:], last, 0.7))
    assert not grad[:4].any() and grad[-4:].any()


def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, tokens, _ = exact_case(2100)
    wanted, entropy = kernels().chosen_logprobs_of_hidden(hidden, head, tokens, 0.7, product)
    direct, statistics = kernels().chosen_logprobs(product(hidden, head), tokens, 0.7)
    assert same_bits(wanted, direct) and same_bits(entropy, statistics.entropy)
    drawn = kernels().sample(product(hidden[:300], head), uniforms(300), 0.7)
    assert same_bits(drawn[1], kernels().chosen_logprobs_of_hidden(hidden[:300], head, drawn[0], 0.7, product)[0])
    monkeypatch.setattr(kernels(), "CHUNK_ROWS", 77)
    seen, seen_entropy = kernels().chosen_logprobs_of_hidden(hidden, head, tokens, 0.7, product)
    assert same_bits(seen, wanted) and same_bits(seen_entropy, entropy)


@pytest.mark.parametrize(("vocabulary", "width"), [(5000, 64), (263, 72)])
def test_gradient_of_hidden_and_head(vocabulary: int, width: int) -> None:
    hidden, head, tokens, dlogprobs = exact_case(1500, vocabulary, width)
    dlogprobs[::3] = 0.0  # prompt tokens
    wide, wide_head = hidden.double().requires_grad_(), head.double().requires_grad_()
    chosen = torch.log_softmax(wide @ wide_head.t() / 0.7, 1).gather(1, tokens[:, None])[:, 0]
    (chosen * dlogprobs).sum().backward()
    assert wide.grad is not None and wide_head.grad is not None
    accumulator = torch.ones(vocabulary, width, device="cuda")
    seen = gradient(dlogprobs, hidden, head, tokens, 0.7, product, accumulator)
    assert seen.dtype == torch.bfloat16 and not seen[::3].any()
    # Each dlogit is off by up to 2^-9 of itself: independent errors, a few tenths of a percent of the norm.
    assert (seen.double() - wide.grad).norm() <= 0.005 * wide.grad.norm()
    assert (accumulator.double() - 1.0 - wide_head.grad).norm() <= 0.005 * wide_head.grad.norm()
    again = torch.ones(vocabulary, width, device="cuda")
    assert torch.equal(gradient(dlogprobs, hidden, head, tokens, 0.7, product, again), seen)
    assert same_bits(again, accumulator)
    assert torch.equal(gradient(dlogprobs, hidden, head, tokens, 0.7, product, None), seen)


@pytest.mark.parametrize("width", [576, 1000])
def test_gradient_of_the_embedding(width: int) -> None:
    tokens = torch.cat((some_tokens(3000, 2000), torch.full((1500,), 7, device="cuda"), some_tokens(300, 3, seed=5)))
    grad, start = noise(4800, width).bfloat16(), noise(2000, width, seed=6)
    seen = start.clone()
    kernels().embedding_grad(seen, tokens, grad)
    wanted = start.double().index_add(0, tokens, grad.double())
    size = start.double().abs().index_add(0, tokens, grad.double().abs())
    assert ((seen.double() - wanted).abs() <= 1e-6 * size).all()
    for _ in range(3):
        again = start.clone()
        kernels().embedding_grad(again, tokens, grad)
        assert same_bits(again, seen)
    untouched = torch.ones(2000, dtype=torch.bool, device="cuda")
    untouched[tokens] = False
    assert same_bits(seen[untouched], start[untouched])


def test_nothing_waits_for_the_device() -> None:
    hidden, head, tokens, dlogprobs = exact_case(1100)
    accumulator, u = torch.zeros(5000, 64, device="cuda"), uniforms(1100)
    logits, noted = product(hidden, head), TokenInputs(-u.float(), dlogprobs, torch.rand_like(u))

    def slope(logprobs: Tensor, part: slice) -> Tensor:
        return policy_slope(logprobs, noted.part(part), 0.2, 0.28)

    calls: list[Callable[[], object]] = [
        lambda: kernels().sample(logits, u, 0.7, tokens),
        lambda: kernels().greedy(logits),
        lambda: kernels().chosen_logprobs_of_hidden(hidden, head, tokens, 0.7, product),
        lambda: kernels().chosen_logprobs_with_grad(slope, hidden, head, tokens, 0.7, product, accumulator),
        lambda: kernels().embedding_grad(accumulator, tokens, hidden),
    ]
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sampling_in_a_cuda_graph() -> None:
    logits, u = varied_logits(16, 50257), uniforms(16)
    kernels().sample(logits, u, 0.7)
    kernels().greedy(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs = kernels().sample(logits, u, 0.7)
        likeliest, likeliest_logprobs = kernels().greedy(logits)
    logits.copy_(varied_logits(16, 50257).flip(0))
    u.copy_(uniforms(16, seed=9))
    graph.replay()
    wanted, wanted_logprobs = kernels().sample(logits, u, 0.7)
    assert torch.equal(tokens, wanted) and same_bits(logprobs, wanted_logprobs)
    wanted, wanted_logprobs = kernels().greedy(logits)
    assert torch.equal(likeliest, wanted) and same_bits(likeliest_logprobs, wanted_logprobs)
