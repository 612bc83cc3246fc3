"""Proof that sampler and trainer compute the same bits, and the search for the first place where they do not.

Every tensor that leaves an operator is recorded twice, once by the engine with forced tokens and once by the training
forward, and compared row by row as bytes. Names come in the order of the forward, so the first that differs is where a
mismatch arose. `jetrl check` runs this without training; a run that finds a mismatch runs it on the sequence concerned.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from jetrl.config import FlowName, KVCacheName
from jetrl.flow import build_flow
from jetrl.kernels.select import device_of
from jetrl.model.config import read_config
from jetrl.model.shapes import shape_of
from jetrl.model.sources import resolve_model
from jetrl.model.transformer import Trace, Transformer
from jetrl.rl.seeds import sample_seed
from jetrl.rl.types import Request, Rollout
from jetrl.rollout.engine import Engine, EngineLimits
from jetrl.rollout.generation import Stats


def model_to_check(
    name: str, flow: FlowName, device: str, random_layers: int | None, seed: int, kv_cache: KVCacheName = "bf16"
) -> Transformer:
    """The trainer's model of an exact flow, its weights loaded, or random in so many layers of the sizes that `name` has.

    Raises ValueError for a flow that promises no equal bits, and for a name that is no model and no size.
    """
    source = resolve_model(name) if random_layers is None else None
    config = replace(shape_of(name), num_layers=random_layers) if source is None else read_config(source)
    graph = build_flow(flow, config, kv_cache)
    if not graph.exact:
        raise ValueError(f"flow {flow!r} promises no equal bits, so there is nothing to prove; use fp8 or bf16")
    layers, kv_fp8 = graph.trainer_layers(config), graph.trainer_kv_fp8
    if source is not None:
        return Transformer.of_folder(source, config, layers, device_of(device), kv_fp8)
    return Transformer.random(config, layers, device_of(device), seed, kv_fp8)


@dataclass(slots=True, frozen=True)
class Difference:
    """The first row of the first operator that differs."""

    operator: str
    sequence: int
    position: int
    element: int
    first: str  # the element on each side, with its bytes
    second: str

    def __str__(self) -> str:
        return (
            f"{self.operator}, sequence {self.sequence}, token position {self.position}, element {self.element}: "
            f"{self.first} against {self.second}"
        )


@dataclass(slots=True, frozen=True)
class CheckResult:
    """One comparison."""

    name: str
    rows: int  # token rows compared
    tensors: int
    differing: int  # rows, over all tensors, that differ in any bit
    first: Difference | None


Device = torch.device | str | None


class Recording:
    """Rows of every operator's output, by sequence and position."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        """`device`: where the rows are kept; the model's own, for copies that wait for nothing."""
        self.lengths, self.device = list(lengths), device
        self._starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self._places = [(s, p) for s, n in enumerate(lengths) for p in range(n)]
        self.tensors: dict[str, Tensor] = {}
        self.seen = torch.zeros(sum(lengths), dtype=torch.bool, device=device)

    def rows(self, rows: list[tuple[int, int]]) -> Trace:
        """A recorder for a forward whose row r is (sequence, position) rows[r]."""
        index = torch.tensor([self._starts[s] + p for s, p in rows], device=self.device)
        self.seen[index] = True

        def record(name: str, tensor: Tensor) -> None:
            flat = tensor.detach().reshape(len(rows), -1).to(self.device)
            if name not in self.tensors:
                self.tensors[name] = torch.zeros(len(self.seen), flat.shape[1], dtype=flat.dtype, device=self.device)
            self.tensors[name][index] = flat

        return record

    def compare(self, other: Recording, name: str) -> CheckResult:
        """Compare the rows that both recorded, as bytes. Both must cover the same sequences."""
        assert self.lengths == other.lengths and self.tensors.keys() == other.tensors.keys()
        both = self.seen & other.seen
        assert both.any(), f"{name}: nothing to compare"
        differing, first = 0, None
        for operator, tensor in self.tensors.items():
            unequal = _bits(tensor) != _bits(other.tensors[operator])
            rows = unequal.any(1) & both
            differing += int(rows.sum())
            if first is None and rows.any():
                row = int(rows.nonzero()[0])
                element = int(unequal[row].nonzero()[0])
                sides = [_describe(t[row, element]) for t in (tensor, other.tensors[operator])]
                first = Difference(operator, *self._places[row], element, *sides)
        return CheckResult(name, int(both.sum()), len(self.tensors), differing, first)


def _bits(tensor: Tensor) -> Tensor:
    whole = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.uint8: torch.uint8}
    return tensor.view(whole[tensor.dtype])


def _describe(value: Tensor) -> str:
    width = 2 * value.element_size()
    return f"{float(value):.9g} (0x{int(_bits(value.reshape(1))) & (16**width - 1):0{width}x})"


def trainer_recording(
    model: Transformer, sequences: Sequence[Sequence[int]], device: Device = None
) -> tuple[Recording, Tensor]:
    """The training forward, gradients on, of packed token sequences; with it the hidden states [T, H].

    `device`, here and below: where the recording is kept, by default where the model is.
    """
    lengths = [len(s) for s in sequences]
    recording = Recording(lengths, device or model.device)
    tokens = torch.tensor([t for s in sequences for t in s])
    with torch.enable_grad():
        hidden = model.forward(tokens, model.packed(lengths), recording.rows(recording._places))
    return recording, hidden.detach()


def engine_recording(
    model: Transformer,
    sequences: Sequence[Sequence[int]],
    prompts: Sequence[int],
    limits: EngineLimits,
    temperature: float,
    device: Device = None,
) -> tuple[Recording, list[list[float]], Stats]:
    """The engine, forced to follow sequences from prompts of the given lengths; with it each completion's logprobs.

    Neighbours with the same prompt run as one group, so that they share its blocks.
    """
    recording = Recording([len(s) for s in sequences], device or model.device)
    engine = Engine(model, limits, ())
    completions = engine.generate(_forced(sequences, prompts), temperature, trace=recording.rows)
    return recording, [c.logprobs for group in completions for c in group], engine.stats


def _forced(sequences: Sequence[Sequence[int]], prompts: Sequence[int]) -> list[Request]:
    pairs = [(list(s[:p]), list(s[p:])) for s, p in zip(sequences, prompts, strict=True)]
    groups = [(prompt, [tail for _, tail in group]) for prompt, group in groupby(pairs, key=lambda pair: pair[0])]
    return [Request(prompt, [0] * len(tails), max(map(len, tails)), tails) for prompt, tails in groups]


def _limits(sequences: Sequence[Sequence[int]], batch_tokens: int, block_size: int, tight: bool = False) -> EngineLimits:
    """Room for all sequences or, `tight`, for the longest one alone, so that the others are preempted."""
    needed = [-(-len(s) // block_size) for s in sequences]
    blocks = max(needed) if tight else sum(needed)
    return EngineLimits(len(sequences), batch_tokens, blocks * block_size, block_size)


def _logprob_result(name: str, model: Transformer, hidden: Tensor, case: _Case, logprobs: list[list[float]]) -> CheckResult:
    """Compare the engine's log-probabilities with the trainer's on the same tokens."""
    parts = hidden.split([len(s) for s in case.sequences])
    rows = differing = 0
    first = None
    for i, (sequence, prompt) in enumerate(zip(case.sequences, case.prompts, strict=True)):
        mine, _ = model.chosen_logprobs(parts[i][prompt - 1 : -1], torch.tensor(sequence[prompt:]), case.temperature)
        theirs = torch.tensor(logprobs[i], dtype=torch.float32)
        mine = mine.detach().cpu()
        unequal = (_bits(mine) != _bits(theirs)).nonzero()
        rows, differing = rows + len(theirs), differing + len(unequal)
        if len(unequal) and first is None:
            at = int(unequal[0])
            first = Difference("logprob", i, prompt + at, 0, _describe(mine[at]), _describe(theirs[at]))
    return CheckResult(name, rows, 1, differing, first)


@dataclass(slots=True, frozen=True)
class _Case:
    sequences: list[list[int]]
    prompts: list[int]
    temperature: float


def _random_case(model: Transformer, tokens: int, seed: int, temperature: float) -> _Case:
    """Random sequences, the longest first, one of 64 tokens and one with a prompt of a single token; the longest, above
    128 for `tokens` of 450 or more, and one of 17 tokens occur twice, with a common prompt and different completions."""
    rng = random.Random(seed)
    positions, vocabulary = model.config.max_position_embeddings, model.config.vocab_size
    longest = min(positions, max(9, tokens * 2 // 7 | 1))
    sequences, prompts = [], []
    for length, copies in ((longest, 2), (min(64, longest), 1), (min(17, longest), 2), (2, 1)):
        prompts += [rng.randint(1, max(1, length // 2))] * copies
        prompt = [rng.randrange(vocabulary) for _ in range(prompts[-1])]
        sequences += [prompt + [rng.randrange(vocabulary) for _ in range(length - len(prompt))] for _ in range(copies)]
    return _Case(sequences, prompts, temperature)


def check_model(model: Transformer, tokens: int = 512, seed: int = 0, temperature: float = 0.7) -> list[CheckResult]:
    """Compare engine and trainer on random sequences of about `tokens` tokens in all; one result a claim.

    Batch invariance: packed, alone and in another order agree. Prefill (whole and in odd chunks) and decode, in groups that
    share a prompt, agree with training, also when sequences are preempted and computed anew. Log-probabilities of forced and
    of sampled tokens agree.
    """
    case = _random_case(model, tokens, seed, temperature)
    reference, hidden = trainer_recording(model, case.sequences)
    count = len(case.sequences)
    results = [
        _packed(model, case, reference, ([i] for i in range(count)), "batch invariance: packed = alone"),
        _packed(model, case, reference, [[*range(1, count, 2), *range(0, count, 2)]], "batch invariance: any order"),
    ]
    whole = [len(s) - 1 for s in case.sequences]
    for name, prompts, batch, block_size, tight in (
        ("engine prefill", whole, 1 << 20, 16, False),
        ("chunked prefill", whole, 37, 16, False),
        ("decode", case.prompts, 1 << 20, 16, False),
        ("decode, {} preemptions", case.prompts, 61, 3, True),
    ):
        limits = _limits(case.sequences, batch, max(block_size, model.least_block), tight)
        recording, logprobs, stats = engine_recording(model, case.sequences, prompts, limits, temperature)
        name = name.format(stats.preemptions)
        results.append(reference.compare(recording, f"{name} = trainer forward"))
        forced = _Case(case.sequences, prompts, temperature)
        results.append(_logprob_result(f"{name} = trainer logprob", model, hidden, forced, logprobs))
    results.append(_sampled(model, case))
    return results


def _packed(model: Transformer, case: _Case, reference: Recording, batches: Iterable[list[int]], name: str) -> CheckResult:
    """The training forward of batches of sequences, given by number, against all of them in one."""
    recording = Recording(reference.lengths, reference.device)
    for batch in batches:
        lengths = [len(case.sequences[i]) for i in batch]
        rows = [(i, p) for i, length in zip(batch, lengths, strict=True) for p in range(length)]
        with torch.no_grad():
            tokens = torch.tensor([case.sequences[i][p] for i, p in rows])
            model.forward(tokens, model.packed(lengths), recording.rows(rows))
    return reference.compare(recording, name)


def _sampled(model: Transformer, case: _Case) -> CheckResult:
    """Sample from the prompts in a group of two, and score what came out with the training forward."""
    length = max(1, min(32, model.config.max_position_embeddings - max(case.prompts)))
    prompts = dict.fromkeys(tuple(s[:p]) for s, p in zip(case.sequences, case.prompts, strict=True))
    requests = [Request(list(p), [sample_seed(0, 0, i, j) for j in range(2)], length) for i, p in enumerate(prompts)]
    block = max(16, model.least_block)
    limits = EngineLimits(len(requests) * 2, 64, (max(case.prompts) + length + block) * len(requests) * 2, block)
    completions = Engine(model, limits, model.config.eos_token_ids).generate(requests, case.temperature)
    pairs = [(r.prompt, c) for r, group in zip(requests, completions, strict=True) for c in group]
    sampled = _Case([p + c.token_ids for p, c in pairs], [len(p) for p, _ in pairs], case.temperature)
    _, hidden = trainer_recording(model, sampled.sequences)
    return _logprob_result("sampled logprob = trainer logprob", model, hidden, sampled, [c.logprobs for _, c in pairs])


def diagnose(engine_model: Transformer, model: Transformer, rollout: Rollout, token: int, temperature: float) -> str:
    """Where the mismatch of completion token `token` arose: replay the rollout on both sides and compare."""
    prompt, completion = rollout.prompt.token_ids, rollout.completion
    sequence = prompt + completion.token_ids
    case = _Case([sequence], [len(prompt)], temperature)
    # Kept on the CPU: a long rollout of a large model would not fit beside it.
    reference, hidden = trainer_recording(model, case.sequences, "cpu")
    limits = _limits(case.sequences, 1 << 20, max(16, engine_model.least_block))
    recording, logprobs, _ = engine_recording(engine_model, case.sequences, case.prompts, limits, temperature, "cpu")
    found = reference.compare(recording, "replay")
    head = f"problem {rollout.prompt.problem.id}, completion token {token} (position {len(prompt) + token}): "
    if found.first is not None:
        return head + f"first difference, trainer against engine: {found.first}"
    scored = _logprob_result("replay", model, hidden, case, logprobs)
    if scored.first is not None:
        return head + f"hidden states agree; first difference, trainer against engine: {scored.first}"
    return head + (
        "a replay of this rollout agrees to the bit, so engine and trainer compute the same now; the weights, the tokens "
        "or the recorded log-probabilities changed between rollout and training, or the batch mattered (`jetrl check` tells)."
    )
