"""The proof itself: it passes where it must, covers what it says, and names what was put wrong where it was put."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.check import CheckResult, Difference, Recording, _random_case, check_model, diagnose, engine_recording
from jetrl.model.context import PackedContext
from jetrl.model.transformer import Transformer
from jetrl.rl.types import Completion, Grade, Problem, Prompt, Request, Rollout
from jetrl.rollout.engine import Engine, EngineLimits
from tests.tiny_models import FAMILIES, tiny_model

CLAIMS = 11


@pytest.mark.parametrize("flow", ["fp8", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact_in_both_flows(family: str, flow: Any) -> None:
    results = check_model(
        tiny_model(family, flow), 512 if (family, flow) == ("qwen2", "fp8") else 64, temperature=1.3 if flow == "bf16" else 0.7
    )
    assert len(results) == len({r.name for r in results}) == CLAIMS
    for result in results:
        assert (result.differing, result.first) == (0, None), result
        assert result.rows > 0
    forward = [r for r in results if "logprob" not in r.name]
    assert len(forward) == 6
    assert {r.tensors for r in forward} == {2 + 2 * 13}  # embed and final norm; thirteen records a layer


@pytest.mark.parametrize(("family", "flow", "tokens"), [("qwen3", "fp8", 512), ("llama", "bf16", 64), ("mistral", "fp8", 64)])
def test_an_fp8_cache_is_exact(family: str, flow: Any, tokens: int) -> None:
    """The longest sequence has keys in three tiles, blocks are of 16 and of 3 tokens."""
    for result in check_model(tiny_model(family, flow, kv_fp8=True), tokens):
        assert (result.differing, result.first) == (0, None), result
        if "logprob" not in result.name:
            assert result.tensors == 2 + 2 * 16  # with the scales of queries, keys and values


@pytest.mark.parametrize(("tokens", "positions"), [(8, 512), (64, 512), (512, 512), (1024, 2048), (512, 32), (512, 9)])
def test_the_random_case_covers_what_the_claims_need(tokens: int, positions: int) -> None:
    model = tiny_model("mistral", "bf16", num_layers=1, hidden_size=8, intermediate_size=8, num_heads=1, head_dim=8,
                       max_position_embeddings=positions)  # fmt: skip
    case = _random_case(model, tokens, 0, 1.0)
    lengths = [len(s) for s in case.sequences]
    assert max(lengths) <= positions
    assert lengths[0] == max(lengths) > 128 or min(tokens, positions) < 450
    assert {n % 2 for n in lengths} == {0, 1} or positions < 64
    assert 1 in case.prompts
    heads = [tuple(s[:p]) for s, p in zip(case.sequences, case.prompts, strict=True)]
    assert heads[0] == heads[1]  # a group shares its prompt, and its members go on differently
    assert case.sequences[0] != case.sequences[1]
    assert all(0 < p < n for p, n in zip(case.prompts, lengths, strict=True))
    assert case.prompts[0] // 16 < (lengths[0] - 1) // 16 or positions < 32 or tokens < 64  # decodes over a block boundary
    name = check_model(model, tokens)[8].name
    assert name.startswith("decode, ")
    assert int(name.split()[1]) > 0, name  # it did preempt


def test_the_engine_side_decodes_shares_and_is_fully_recorded() -> None:
    model = tiny_model("qwen2")
    shared, tails = [4, 8, 15], [[16, 23, 42, 4], [8, 15]]
    sequences = [shared + tail for tail in tails] + [[9, 9]]
    recording, logprobs, stats = engine_recording(model, sequences, [3, 3, 1], EngineLimits(8, 64, 64, 4), 1.0)
    assert [len(x) for x in logprobs] == [4, 2, 1]
    assert stats.computed_tokens == 3 + 3 + 1 + 1
    # The last token of each is never an input; the second one joined, so its prompt was not computed.
    assert recording.seen.tolist() == [True] * 6 + [False] + [False] * 3 + [True, False] + [True, False]


# --- Recordings


def recorded(tensors: dict[str, Tensor], lengths: list[int], rows: list[tuple[int, int]]) -> Recording:
    recording = Recording(lengths)
    record = recording.rows(rows)
    for name, tensor in tensors.items():
        record(name, tensor)
    return recording


ALL = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_compare_counts_rows_of_all_tensors_and_names_the_first_in_the_order_of_the_forward() -> None:
    a, b = torch.arange(10.0).view(5, 2), torch.arange(15.0).view(5, 3).bfloat16()
    changed_a, changed_b = a.clone(), b.clone()
    changed_a[4, 1] += 1
    changed_b[0, 0] += 1
    changed_b[3] += 1
    reference, other = (recorded(t, [2, 3], ALL) for t in ({"a": a, "b": b}, {"a": changed_a, "b": changed_b}))
    result = reference.compare(other, "claim")
    expected = Difference("a", 1, 2, 1, "9 (0x41100000)", "10 (0x41200000)")
    assert result == CheckResult("claim", 5, 2, 3, expected)
    assert str(expected) == "a, sequence 1, token position 2, element 1: 9 (0x41100000) against 10 (0x41200000)"
    assert reference.compare(reference, "self") == CheckResult("self", 5, 2, 0, None)


def test_compare_leaves_out_rows_that_one_side_lacks_and_refuses_to_compare_nothing() -> None:
    x = torch.arange(5.0).view(5, 1)
    reference = recorded({"x": x}, [2, 3], ALL)
    part = recorded({"x": x[[3, 0]] + torch.tensor([[0.0], [1.0]])}, [2, 3], [(1, 1), (0, 0)])
    result = reference.compare(part, "part")
    assert (result.rows, result.differing) == (2, 1)
    assert result.first is not None
    assert (result.first.sequence, result.first.position) == (0, 0)
    with pytest.raises(AssertionError, match="nothing to compare"):
        recorded({"x": x[:1]}, [2, 3], [(0, 0)]).compare(recorded({"x": x[:1]}, [2, 3], [(0, 1)]), "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_compared_and_not_values(dtype: torch.dtype) -> None:
    nan = torch.full((5, 1), torch.nan, dtype=dtype)
    zeros = torch.zeros(5, 1, dtype=dtype)
    other_nan = (nan.view(torch.int32 if dtype == torch.float32 else torch.int16) + 1).view(dtype)

    def differing(a: Tensor, b: Tensor) -> int:
        return recorded({"x": a}, [2, 3], ALL).compare(recorded({"x": b}, [2, 3], ALL), "c").differing

    assert differing(nan, nan.clone()) == 0
    assert differing(nan, other_nan) == 5
    assert differing(nan, zeros) == 5
    assert differing(zeros, -zeros) == 5  # 0.0 == -0.0, but not as bytes


# --- Diagnosis


def rollout_of(model: Transformer, temperature: float) -> Rollout:
    rng = random.Random(2)
    prompt = [rng.randrange(model.config.vocab_size) for _ in range(20)]
    ((completion,),) = Engine(model, EngineLimits(1, 64, 64, 16), ()).generate([Request(prompt, [1], 6)], temperature)
    return Rollout(Prompt(Problem("sum-7", ""), "", prompt), completion, "", Grade(0.0, False), 0)


@pytest.mark.parametrize(
    ("operator", "position"), [("layers.1.o", 22), ("layers.0.query", 3), ("embed", 0), ("final_norm", 24)]
)
def test_diagnose_names_operator_and_position(monkeypatch: pytest.MonkeyPatch, operator: str, position: int) -> None:
    model = tiny_model("qwen3")
    rollout = rollout_of(model, 0.7)
    forward = Transformer.forward

    def injected(self: Transformer, tokens: Tensor, context: Any, trace: Any = None) -> Tensor:
        def record(name: str, tensor: Tensor) -> None:
            if name == operator and torch.is_inference_mode_enabled():  # on the engine's side, in the forward itself
                tensor[context.positions == position] *= 1.01
            trace(name, tensor)

        return forward(self, tokens, context, record)

    monkeypatch.setattr(Transformer, "forward", injected)
    text = diagnose(model, model, rollout, 2, 0.7)
    start = (
        f"problem sum-7, completion token 2 (position 22): first difference, trainer against engine: {operator}, sequence 0, "
    )
    assert text.startswith(start + f"token position {position}, element ")


def test_diagnose_names_the_logprob_when_hidden_states_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3")
    rollout = rollout_of(model, 0.7)
    drawn = Transformer.next_tokens
    monkeypatch.setattr(Transformer, "next_tokens", lambda self, *rest: drawn(self, *rest[:-1], 0.70001))
    text = diagnose(model, model, rollout, 0, 0.7)
    assert "hidden states agree; first difference, trainer against engine: logprob, sequence 0, token position 20" in text


def test_diagnose_says_so_when_only_what_was_recorded_is_wrong() -> None:
    model = tiny_model("qwen3")
    rollout = rollout_of(model, 0.7)
    recorded_wrongly = [x + 1e-6 for x in rollout.completion.logprobs]
    rollout.completion = Completion(rollout.completion.token_ids, recorded_wrongly, "length", 0)
    text = diagnose(model, model, rollout, 1, 0.7)
    assert text.startswith("problem sum-7, completion token 1 (position 21): a replay of this rollout agrees to the bit")
    assert "the recorded log-probabilities changed between rollout and training" in text
    assert "first difference" not in text


def test_diagnose_finds_weights_that_differ() -> None:
    model, stale = tiny_model("qwen2"), tiny_model("qwen2")
    norm = stale.leaves["layers.1.input_norm"]
    norm.value = norm.value.clone()
    norm.value[7] += 0.01
    text = diagnose(stale, model, rollout_of(model, 1.0), 0, 1.0)
    assert "trainer against engine: layers.1.input_norm, sequence 0, token position 0, element 7: " in text


def test_a_difference_in_the_reference_forward_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on take another path through autograd functions; a fault there must not hide either."""
    model = tiny_model("qwen2")
    forward = Transformer.forward

    def trainer_only(self: Transformer, tokens: Tensor, context: Any, trace: Any = None) -> Tensor:
        hidden = forward(self, tokens, context, trace)
        return hidden * 1.01 if isinstance(context, PackedContext) and torch.is_grad_enabled() else hidden

    monkeypatch.setattr(Transformer, "forward", trainer_only)
    results = {r.name: r for r in check_model(model, 64)}
    assert results["decode = trainer logprob"].differing == results["decode = trainer logprob"].rows
    assert results["sampled logprob = trainer logprob"].differing > 0
