"""The one forward against `transformers`, its phases against each other to the bit, its gradients against float64 autograd."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from jetrl.kernels import gemm
from jetrl.kernels.gemm import Bf16Weight, Fp8Weight
from jetrl.kernels.logprob import distribution
from jetrl.model import layer as layers
from jetrl.model.checkpoint import hf_tensors, load_weights
from jetrl.model.config import ModelConfig, read_config
from jetrl.model.context import KVCache, PackedContext, PagedContext
from jetrl.model.transformer import Transformer, linear_names, rotary_frequencies
from tests.random_models import FAMILIES, VOCAB, save_random_model
from tests.test_quant import cuts, reference_rows, reference_values, reference_weight
from tests.tiny_models import tiny_model

# name -> (family, what is changed in its config)
CASES: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES}
CASES |= {f"{family}-tied": (family, {"tied": True}) for family in ("llama", "qwen2", "qwen3")}
CASES |= {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "mistral-one-key-head": ("mistral", {"num_key_value_heads": 1, "head_dim": 22}),
}
LENGTHS = [37, 1, 130, 20, 2]


@dataclass(slots=True, frozen=True)
class Case:
    folder: Path
    config: ModelConfig
    weights: dict[str, Tensor]

    def ours(self, fp8: bool, training: bool = False) -> Transformer:
        model = Transformer(self.config, linear_names(self.config) if fp8 else ())
        model.load(self.weights)
        if training:
            for leaf in model.leaves.values():
                leaf.grad = torch.zeros(leaf.shape, dtype=torch.float64)
        return model

    def theirs(self, dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(str(self.folder), dtype=dtype).eval()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            family, changes = CASES[name]
            folder = save_random_model(tmp_path_factory.mktemp(name), family, tokenizer=False, **changes)
            config = read_config(folder)
            made[name] = Case(folder, config, load_weights(folder, config))
        return made[name]

    return make


def tokens(count: int = sum(LENGTHS), seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bits; unlike torch.equal, 0.0 is not -0.0."""
    kind = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[a.dtype]
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def packed(model: Transformer, ids: Tensor, lengths: Collection[int]) -> Tensor:
    with torch.no_grad():
        return model.forward(ids, PackedContext.of(list(lengths)))


def logits(model: Transformer, ids: Tensor, lengths: Collection[int]) -> Tensor:
    return distribution(packed(model, ids, lengths), model.head.value, 1.0).logits.double()


def error(seen: Tensor, wanted: Tensor) -> float:
    """Relative error of a tensor as a whole."""
    return float((seen.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", list(CASES))
def test_bf16_logits_are_those_of_transformers(name: str, case: Callable[[str], Case]) -> None:
    """Our BF16 flow rounds where `transformers` in BF16 does, so it may be no further from float64 than that is."""
    it, ids = case(name), tokens(90)
    with torch.no_grad():
        exact, rounded = (it.theirs(t)(ids.unsqueeze(0)).logits[0].double() for t in (torch.float64, torch.bfloat16))
    assert error(logits(it.ours(False), ids, [90]), exact) < min(1.1 * error(rounded, exact), 0.015)


@pytest.mark.parametrize("name", list(CASES))
def test_fp8_logits_are_fp8_noise_away(name: str, case: Callable[[str], Case]) -> None:
    """E4M3 has 4 significant bits: some 3% for each operand of each product, which adds up to 7 to 14% over two layers."""
    it, ids = case(name), tokens(90)
    bf16, fp8 = (logits(it.ours(flag), ids, [90]) for flag in (False, True))
    assert 0.05 < error(fp8, bf16) < 0.17
    assert torch.cosine_similarity(fp8.flatten(), bf16.flatten(), dim=0) > 0.985


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-tied", "llama-biases"])
def test_every_projection_is_the_fp8_product_of_its_parts(
    name: str, case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call against the slow quantiser on the projections as they are in the file, each alone, bias last."""
    it, calls, plain = case(name), [], gemm.forward

    def watched(x: Tensor, weight: gemm.Weight) -> Tensor:
        calls.append((x, plain(x, weight)))
        return calls[-1][1]

    monkeypatch.setattr(gemm, "forward", watched)
    packed(it.ours(True), tokens(20), [20])
    files = dict(it.theirs(torch.bfloat16).named_parameters())
    matrices = [entry for entry in hf_tensors(it.config) if entry.hf_name.endswith("_proj.weight")]
    assert len(calls) == 4 * it.config.num_layers and len(matrices) == 7 * it.config.num_layers
    for call, leaf in zip(calls, linear_names(it.config), strict=True):
        rows = reference_values(*reference_rows(call[0]), cuts([20], 1), 128)
        for entry in (entry for entry in matrices if entry.name == leaf):
            w, size = files[entry.hf_name].detach(), entry.stop - entry.start
            wanted = rows @ reference_values(*reference_weight(w, [size]), cuts([size], 128), 128).t()
            seen = call[1][:, entry.start : entry.stop].double()
            assert ((seen - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-12).all(), entry.hf_name


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_frequencies_are_those_of_transformers(family: str, case: Callable[[str], Case]) -> None:
    it = case(family)
    theirs = it.theirs(torch.float32).model.rotary_emb.inv_freq
    assert torch.allclose(rotary_frequencies(it.config).float(), theirs, rtol=1e-6, atol=0.0)
    if family == "llama":  # long waves are slower, short ones as they were, some in between
        kept = rotary_frequencies(replace(it.config, rope_scaling=None))
        ratio = kept / rotary_frequencies(it.config)
        assert ratio[0] == 1.0 and ratio[-1] == 8.0 and ((ratio > 1.0) & (ratio < 8.0)).any()


def loss_weights(ids: Tensor) -> Tensor:
    weights = torch.randn(len(ids), generator=torch.Generator().manual_seed(3))
    weights[5:20] = 0.0  # a prompt
    return weights


def our_gradients(model: Transformer, ids: Tensor, lengths: list[int], recompute: int = 0) -> dict[str, Tensor]:
    """Gradients of a weighted sum of log-probabilities at temperature 0.8, by parameter."""
    hidden = model.forward(ids, model.packed(lengths), recompute=recompute)
    model.chosen_logprobs(hidden, ids.roll(-1), 0.8)[0].backward(loss_weights(ids))
    return {name: leaf.grad for name, leaf in model.leaves.items() if leaf.grad is not None}


def their_gradients(it: Case, dtype: torch.dtype, ids: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """The same through `transformers` and autograd, one sequence at a time, in our fused layout."""
    model, columns = it.theirs(dtype), (ids, ids.roll(-1), loss_weights(ids))
    for part, target, weight in zip(*(column.split(lengths) for column in columns), strict=True):
        rows = torch.log_softmax(model(part.unsqueeze(0)).logits[0].double() / 0.8, -1)
        (rows.gather(1, target.unsqueeze(1)).squeeze(1) * weight).sum().backward()
    theirs = dict(model.named_parameters())
    fused = {name: torch.zeros(tuple(w.shape), dtype=torch.float64) for name, w in it.weights.items()}
    for entry in hf_tensors(it.config):
        fused[entry.name][entry.start : entry.stop] = theirs[entry.hf_name].grad
    return fused


@pytest.mark.parametrize(("flow", "kv_fp8"), [("fp8", False), ("bf16", False), ("fp8", True)])
def test_layers_computed_anew_change_no_bit(
    flow: Literal["fp8", "bf16"], kv_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, found, forwards = torch.arange(70) * 7 % 200, [], []
    once = layers.forward
    monkeypatch.setattr(
        layers, "forward", lambda layer, *rest, **more: forwards.append(layer.index) or once(layer, *rest, **more)
    )
    for recompute in (0, 1, 2):
        model = tiny_model("qwen3", flow, kv_fp8=kv_fp8, vocab_size=200)
        for leaf in model.leaves.values():
            leaf.grad = torch.zeros(leaf.shape, dtype=torch.float64)
        found.append(our_gradients(model, ids, [40, 30], recompute))
    assert forwards == [0, 1, 0, 1, 0, 0, 1, 1, 0]  # the backward meets the last layer first
    assert all(torch.equal(other[name], g) for other in found[1:] for name, g in found[0].items())
    assert all(g.any() for g in found[0].values())


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_of_every_weight(name: str, case: Callable[[str], Case]) -> None:
    """BF16: 2% from float64, or what BF16 autograd of `transformers` errs by where sums cancel. FP8: the same direction."""
    it, ids = case(name), tokens()
    exact, rounded = (their_gradients(it, dtype, ids, LENGTHS) for dtype in (torch.float64, torch.bfloat16))
    bf16, fp8 = (our_gradients(it.ours(flag, training=True), ids, LENGTHS) for flag in (False, True))
    assert bf16.keys() == fp8.keys() == exact.keys()
    for leaf, wanted in exact.items():
        assert error(bf16[leaf], wanted) < max(0.02, 1.1 * error(rounded[leaf], wanted)), leaf
        assert torch.cosine_similarity(fp8[leaf].flatten(), wanted.flatten(), dim=0) > 0.95, leaf
        assert 0.8 < fp8[leaf].norm() / wanted.norm() < 1.25, leaf


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied"])
def test_gradients_do_not_depend_on_the_split_into_microbatches(name: str, fp8: bool, case: Callable[[str], Case]) -> None:
    """One forward of all sequences against three, in another order, that add to the same accumulators."""
    it, ids = case(name), tokens()
    columns = [column.split(LENGTHS) for column in (ids, ids.roll(-1), loss_weights(ids))]
    totals = []
    for split in ([[0, 1, 2, 3, 4]], [[4, 2], [0], [3, 1]]):
        model = it.ours(fp8, training=True)
        for members in split:
            part, target, weight = (torch.cat([column[i] for i in members]) for column in columns)
            hidden = model.forward(part, PackedContext.of([LENGTHS[i] for i in members]))
            model.chosen_logprobs(hidden, target, 0.8)[0].backward(weight)
        totals.append({name: leaf.grad for name, leaf in model.leaves.items()})
    for leaf, whole in totals[0].items():
        assert torch.allclose(totals[1][leaf], whole, rtol=1e-9, atol=1e-9 * float(whole.abs().max())), leaf


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_packed_equals_alone(name: str, fp8: bool, case: Callable[[str], Case]) -> None:
    model, ids = case(name).ours(fp8), tokens()
    wanted = packed(model, ids, LENGTHS)
    parts = ids.split(LENGTHS)
    assert same_bits(torch.cat([packed(model, part, [len(part)]) for part in parts]), wanted)
    order = [2, 4, 0, 1, 3]
    shuffled = packed(model, torch.cat([parts[i] for i in order]), [LENGTHS[i] for i in order])
    assert same_bits(shuffled, torch.cat([wanted.split(LENGTHS)[i] for i in order]))
    for end in (1, 7, 64, 129):  # and what comes later changes nothing
        assert same_bits(packed(model, parts[2][:end], [end]), wanted.split(LENGTHS)[2][:end])


@pytest.mark.parametrize("fp8", [False, True])
def test_the_training_forward_is_the_forward(fp8: bool, case: Callable[[str], Case]) -> None:
    model, ids = case("qwen3-tied").ours(fp8, training=True), tokens()
    hidden = model.forward(ids, PackedContext.of(LENGTHS))
    assert hidden.requires_grad and same_bits(hidden.detach(), packed(model, ids, LENGTHS))
    logprobs, entropy = model.chosen_logprobs(hidden, ids, 0.7)
    assert logprobs.requires_grad and not entropy.requires_grad
    with torch.no_grad():
        rows = distribution(hidden, model.head.value, 0.7)
    assert same_bits(logprobs.detach(), rows.logprobs(ids))


def paged_traces(model: Transformer, ids: Tensor, prefix: list[int]) -> dict[str, list[Tensor]]:
    """Every operator's rows of each sequence: a prefill of `prefix` tokens in two chunks, then decode one by one."""
    size, parts, config = 4, ids.split(LENGTHS), model.config
    needed = [-(-n // size) for n in LENGTHS]
    cache = KVCache.allocate(config.num_layers, sum(needed), size, config.num_kv_heads, config.head_dim)
    for tensor in (cache.keys, cache.values):
        tensor.fill_(torch.nan)
    tables = torch.zeros(len(LENGTHS), max(needed), dtype=torch.int64)
    for row, blocks in enumerate(torch.randperm(sum(needed), generator=torch.Generator().manual_seed(5)).split(needed)):
        tables[row, : len(blocks)] = blocks
    rows: list[dict[str, list[Tensor]]] = [{} for _ in LENGTHS]
    done = [0] * len(LENGTHS)
    while any(d < n for d, n in zip(done, LENGTHS, strict=True)):
        # Of a prompt a third, then the rest, then single tokens; sequences are out of step with each other.
        ends = [p // 3 if d < p // 3 else p if d < p else min(d + 1, n) for d, p, n in zip(done, prefix, LENGTHS, strict=True)]
        active = [i for i, end in enumerate(ends) if end > done[i]]
        counts = [ends[i] - done[i] for i in active]
        context = PagedContext.of(cache, counts, [ends[i] for i in active], tables[active])

        def record(name: str, tensor: Tensor, active: list[int] = active, counts: list[int] = counts) -> None:
            for i, part in zip(active, tensor.split(counts), strict=True):
                rows[i].setdefault(name, []).append(part)

        with torch.no_grad():
            model.forward(torch.cat([parts[i][done[i] : ends[i]] for i in active]), context, record)
        done = ends
    return {name: [torch.cat(sequence[name]) for sequence in rows] for name in rows[0]}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3", "llama-biases", "mistral-one-key-head"])
def test_decode_equals_the_packed_forward_in_every_operator(name: str, fp8: bool, case: Callable[[str], Case]) -> None:
    model, ids = case(name).ours(fp8), tokens()
    wanted: dict[str, Tensor] = {}
    with torch.no_grad():
        model.forward(ids, PackedContext.of(LENGTHS), wanted.__setitem__)
    seen = paged_traces(model, ids, [20, 1, 96, 20, 1])
    assert list(seen) == list(wanted)
    assert {f"layers.{i}.{op}" for i in range(2) for op in ("qkv", "attention", "o", "gate_up", "down")} < set(wanted)
    for operator, tensor in wanted.items():
        assert same_bits(torch.cat(seen[operator]), tensor), operator


def test_fp8_layers_are_those_named_and_never_the_head(case: Callable[[str], Case]) -> None:
    it = case("qwen2-tied")
    model = Transformer(it.config, ["layers.0.o", "layers.1.gate_up"])
    model.load(it.weights)
    kinds = {name: type(leaf.value) for name, leaf in model.leaves.items()}
    assert {name for name, kind in kinds.items() if kind is Fp8Weight} == {"layers.0.o", "layers.1.gate_up"}
    others = set(linear_names(it.config)) - model.fp8_layers
    assert {name for name, kind in kinds.items() if kind is Bf16Weight} == others | {"embed"}
    assert model.head is model.leaves["embed"] and "head" not in model.leaves
    mixed, bf16, fp8 = (packed(m, tokens(40), [40]) for m in (model, it.ours(False), it.ours(True)))
    assert not torch.equal(mixed, bf16) and not torch.equal(mixed, fp8)
    with pytest.raises(AssertionError):
        Transformer(it.config, ["embed"])


def without(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in weights.items() if key != name}


# What is wrong in the last tensors to be assigned, so that a check made too late shows.
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (lambda w: without(w, "final_norm"), r"missing \['final_norm'\]"),
    "extra": (lambda w: w | {"layers.9.o": w["layers.0.o"]}, r"unexpected \['layers.9.o'\]"),
    "shape": (lambda w: w | {"final_norm": w["final_norm"][:-1]}, r"final_norm: .*\(143,\).*\(144,\)"),
    "transposed": (lambda w: w | {"head": w["head"].t()}, r"head: .*\(144, 263\).*\(263, 144\)"),
    "dtype": (lambda w: w | {"head": w["head"].double()}, r"head: .*torch.float64.*BF16 or FP32"),
}


@pytest.mark.parametrize("broken", list(BROKEN))
def test_load_refuses_wrong_weights_and_assigns_none(broken: str, case: Callable[[str], Case]) -> None:
    it = case("llama-biases")
    change, message = BROKEN[broken]
    other = {name: tensor + 1 for name, tensor in it.weights.items()}
    fresh, used = Transformer(it.config, linear_names(it.config)), it.ours(True)
    before = used.checksum()
    for model in (fresh, used):
        with pytest.raises(ValueError, match=message):
            model.load(change(other))
    assert all(leaf.value is None for leaf in fresh.leaves.values())
    assert used.checksum() == before
    used.load(other)
    assert used.checksum() != before


@pytest.mark.parametrize("fp8", [False, True])
def test_a_second_load_leaves_nothing_of_the_first(fp8: bool, case: Callable[[str], Case]) -> None:
    it, ids = case("qwen3-biases"), tokens(40)
    model, wanted = it.ours(fp8), packed(it.ours(fp8), ids, [40])
    model.load({name: tensor * 1.5 for name, tensor in it.weights.items()})
    assert not torch.equal(packed(model, ids, [40]), wanted)
    model.load(it.weights)
    assert same_bits(packed(model, ids, [40]), wanted)
