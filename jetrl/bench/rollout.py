"""The rollout engine on one GPU: output tokens/s of a whole model with random weights, log-probabilities checked again.

    wide, middle, narrow    one random prompt a sequence, all completions equally long
    tail                    groups of 8 to a prompt, completion lengths from a fixed log-normal, as reasoning models have them

A case is one generation at temperature 1 without EOS: prompts in, tokens and log-probabilities in Python lists out, all time in
between counted. The last completion of a tail runs nearly alone, and that counts too. A group is one request, so its prompt is
prefilled once; its sequences get limits of their own before the first step, since a request has one for all.
Before it the same case runs short, so that all is compiled and captured; the prompts that the engine keeps are forgotten.

Roofline: what the lengths alone make necessary. Prefill: each prompt once, products at their type's peak. Decode: in each
step that really ran the weights and the BF16 head once, and for each token the keys and values before it, at the rate of a
copy; arithmetic takes less time than that. Recomputation after preemption counts as time, not as work.

Exactness: sampled tokens are scored again by the trainer's forward over whole packed sequences, and differing bits are counted.
Without gradients, as the activations of 36 layers do not fit: the same kernels, but for those that only a backward needs.

vLLM's numbers were recorded earlier, on the same type of GPU. They are no baseline of the run; that is our own flow `bf16`.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from jetrl.bench.profiling import Profile, gap_rows, kernel_rows, profiled
from jetrl.bench.shapes import named, products, visible_pairs
from jetrl.bench.table import Row, Table, at_least
from jetrl.bench.timing import Ceilings
from jetrl.model.config import ModelConfig, linear_names
from jetrl.model.context import bytes_per_token
from jetrl.model.transformer import Transformer
from jetrl.rl.seeds import sample_seed
from jetrl.rl.types import Completion, Request
from jetrl.rollout.decoder import ladder
from jetrl.rollout.engine import Engine, EngineLimits
from jetrl.rollout.generation import Generation, Stats

BLOCK, BATCH_TOKENS, LANES = 64, 8192, 256
FREE_SHARE = 0.85  # of the memory beside the model, for a cache that cannot hold everything
TEMPERATURE = 1.0
PACK = 16384  # tokens of a packed forward
PROFILED = 8  # decode steps
RECORDED = ("vLLM BF16, recorded", "vLLM FP8, recorded")  # 0.22.1; block FP8, batch-invariant
_STRIDE = 4  # steps between two sizes of the warm-up


@dataclass(slots=True, frozen=True)
class Flow:
    """A precision flow and what keys and values are."""

    name: str
    fp8: bool
    kv_fp8: bool


@dataclass(slots=True, frozen=True)
class Case:
    """One generation."""

    name: str
    prompts: int
    group: int  # completions of a prompt
    prompt: int  # tokens
    limits: tuple[int, ...]  # tokens of each completion, group by group
    recorded: tuple[float, float] | None = None  # see `RECORDED`
    targets: tuple[tuple[str, float], ...] = ()  # flow, tokens/s
    share: float | None = None  # % of the roofline that the FP8 flows must reach

    @property
    def text(self) -> str:
        """Name and sizes."""
        sequences = f"{self.prompts}" if self.group == 1 else f"{self.prompts} x {self.group}"
        longest = max(self.limits)
        return f"{self.name} {sequences} x ({self.prompt}, {'' if min(self.limits) == longest else 'up to '}{longest})"

    def requests(self, vocabulary: int) -> list[Request]:
        """Random prompts, one seed a completion."""
        generator, longest = torch.Generator().manual_seed(0), max(self.limits)
        tokens = torch.randint(vocabulary, (self.prompts, self.prompt), generator=generator).tolist()
        return [Request(p, [sample_seed(0, 0, i, j) for j in range(self.group)], longest) for i, p in enumerate(tokens)]


def tail_lengths(count: int, median: float = 1000.0, least: int = 16, most: int = 8192) -> tuple[int, ...]:
    """Log-normal lengths with sigma 1, always the same."""
    rng = random.Random(0)
    return tuple(min(most, max(least, round(rng.lognormvariate(math.log(median), 1.0)))) for _ in range(count))


def _plain(name: str, sequences: int, completion: int, recorded: tuple[float, float], fp8: float, kv: float) -> Case:
    return Case(name, sequences, 1, 256, (completion,) * sequences, recorded, (("fp8", fp8), ("fp8+kv8", kv)))


FLOWS = {f.name: f for f in (Flow("fp8", True, False), Flow("fp8+kv8", True, True), Flow("bf16", False, False))}
BASELINE = "bf16"
CASES = {
    c.name: c
    for c in (
        _plain("wide", 256, 1024, (14_130, 15_837), 19_000, 23_500),
        _plain("middle", 64, 512, (8_254, 9_557), 11_000, 11_000),
        _plain("narrow", 16, 256, (2_652, 3_141), 3_600, 3_600),
        Case("tail", 64, 8, 256, tail_lengths(512), share=70.0),
    )
}


# Rooflines


def weight_bytes(config: ModelConfig, fp8: bool) -> int:
    """What a decode step reads of the model: projections in FP8 with a scale for 128 x 128, or in BF16, and the BF16 head."""
    linear = sum(p.n * p.k + 4 * -(-p.n // 128) * -(-p.k // 128) if fp8 else 2 * p.n * p.k for p in products(config))
    return config.num_layers * linear + 2 * config.vocab_size * config.hidden_size


def _token_bytes(config: ModelConfig, kv_fp8: bool) -> int:
    return bytes_per_token("fp8" if kv_fp8 else "bf16", config.num_layers, config.num_kv_heads, config.head_dim)


def prefill_bound(config: ModelConfig, case: Case, flow: Flow, ceilings: Ceilings) -> float:
    """Least time of the prompts, each computed once, us."""
    linear = 2.0 * case.prompts * case.prompt * config.num_layers * sum(p.n * p.k for p in products(config))
    attention = 4.0 * config.head_dim * config.num_layers * visible_pairs(config, [case.prompt] * case.prompts)
    head = 2.0 * len(case.limits) * config.vocab_size * config.hidden_size
    fp8 = (linear if flow.fp8 else 0.0) + (attention if flow.kv_fp8 else 0.0)
    return ceilings.roofline(weight_bytes(config, flow.fp8), bf16=linear + attention + head - fp8, fp8=fp8)


def decode_bound(config: ModelConfig, case: Case, flow: Flow, steps: int, ceilings: Ceilings) -> float:
    """Least time of `steps` decode steps in which every token but the first of each completion is sampled, us."""
    keys = sum((n - 1) * case.prompt + n * (n - 1) // 2 for n in case.limits)
    return ceilings.roofline(steps * weight_bytes(config, flow.fp8) + keys * _token_bytes(config, flow.kv_fp8))


# Rows


@dataclass(slots=True, frozen=True)
class Measured:
    """A case in a flow."""

    case: Case
    flow: Flow
    seconds: float
    warm_up: float  # seconds
    stats: Stats
    scored: int  # tokens scored again
    differing: int  # of them, those whose log-probability differs in any bit
    profile: Profile | None = None

    @property
    def label(self) -> str:
        return f"{self.case.name}, {self.flow.name}"

    @property
    def rate(self) -> float:
        """Output tokens/s."""
        return sum(self.case.limits) / self.seconds


def rate_row(config: ModelConfig, m: Measured, baseline: Measured | None, ceilings: Ceilings, judged: bool) -> Row:
    """Tokens/s of the whole run."""
    case, flow = m.case, m.flow
    bound = prefill_bound(config, case, flow, ceilings) + decode_bound(config, case, flow, m.stats.decode_steps, ceilings)
    target = at_least(m.rate, dict(case.targets).get(flow.name) if judged else None, "")
    if judged and case.share is not None and flow.name != BASELINE:
        target = at_least(1e-4 * bound / m.seconds, case.share, "%")
    extra: dict[str, float | str] = dict(zip(RECORDED, case.recorded or (), strict=False))
    extra["bits differ"] = f"{m.differing:,} of {m.scored:,}"
    roofline = 1e6 * sum(case.limits) / bound
    return Row(m.label, m.rate, None if baseline is None else baseline.rate, roofline, target, extra, rate=True)


def step_row(config: ModelConfig, m: Measured, ceilings: Ceilings) -> Row:
    """The mean decode step, us, and where the time goes."""
    s = m.stats
    bound = decode_bound(config, m.case, m.flow, s.decode_steps, ceilings) / max(1, s.decode_steps)
    extra: dict[str, float | str] = {
        "tokens": s.decode_tokens / max(1, s.decode_steps),
        "steps": f"{s.decode_steps:,}",
        "decode, s": f"{s.decode_seconds:.2f}",
        "prefill, s": f"{s.prefill_seconds:.2f}",
        "all, s": f"{m.seconds:.2f}",
        "warm-up, s": m.warm_up,
        "peak, blocks": f"{s.peak_blocks:,}",
    }
    if s.preemptions:
        extra["preempted"] = f"{s.preemptions:,}"
    return Row(m.label, 1e6 * s.decode_seconds / max(1, s.decode_steps), None, bound, None, extra)


def tables(config: ModelConfig, measured: Sequence[Measured], ceilings: Ceilings, judged: bool) -> list[Table]:
    """All rows, case by case. `judged`: the targets, which are for the 8B model, apply."""
    names = list(dict.fromkeys(m.case.name for m in measured))
    ordered = sorted(measured, key=lambda m: names.index(m.case.name))
    plain = {m.case.name: m for m in measured if m.flow.name == BASELINE}
    rates = [
        rate_row(config, m, None if m.flow.name == BASELINE else plain.get(m.case.name), ceilings, judged) for m in ordered
    ]
    sizes = dict.fromkeys(m.case.text for m in ordered)
    title = f"rollout: output tokens/s, with log-probabilities. sequences x (prompt, completion): {'; '.join(sizes)}"
    found = [
        Table(title, rates, "ours", "our bf16"),
        Table(
            "rollout: the mean decode step, and where the time goes", [step_row(config, m, ceilings) for m in ordered], "step"
        ),
    ]
    for m in ordered:
        if m.profile:
            rows = kernel_rows(m.profile.kernels, m.profile.runs) + gap_rows(m.profile)
            found.append(
                Table(f"rollout: kernels of a decode step, {m.label}; the GPU is busy {m.profile.busy:.1%}", rows, "time")
            )
    return found


# Measuring


def limits_for(case: Case, model: Transformer, lanes: int) -> EngineLimits:
    """A cache for all sequences at full length or, on a GPU, what fits beside the model."""
    blocks = sum(-(-(case.prompt + n) // BLOCK) for n in case.limits)
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        blocks = min(blocks, int(FREE_SHARE * free) // (BLOCK * _token_bytes(model.config, model.kv_fp8)))
    return EngineLimits(min(lanes, len(case.limits)), BATCH_TOKENS, blocks * BLOCK, BLOCK)


def warm_limits(case: Case, lanes: int) -> list[int]:
    """Completion lengths of a short run whose decode steps have all the sizes of the case's; as many as the case has, or fewer.

    Equal lengths: all are in before the first ends, and they end as they came. Others: any number may be left at some time, so
    they end such that each size of the engine's ladder gets steps of its own. One group more than fits joins running ones.
    """
    longest, all_in = max(case.limits), -(-case.prompts * case.prompt // BATCH_TOKENS) + 4
    if min(case.limits) == longest:
        return [min(all_in, longest)] * len(case.limits)
    sizes, count = ladder(lanes), min(len(case.limits), lanes + case.group)
    running = [all_in + _STRIDE * (len(sizes) - bisect_left(sizes, i + 1)) for i in range(min(lanes, count))]
    return [min(n, longest) for n in running] + [1] * (count - len(running))


def _begin(engine: Engine, case: Case, limits: Sequence[int]) -> Generation:
    requests = case.requests(engine.model.config.vocab_size)[: -(-len(limits) // case.group)]
    generation = engine.start(requests, TEMPERATURE)
    sequences = [s for request in generation.requests for s in request]
    for sequence, limit in zip(sequences, [*limits, *[1] * (len(sequences) - len(limits))], strict=True):
        sequence.max_tokens = limit
    return generation


def _run(engine: Engine, case: Case, limits: Sequence[int]) -> tuple[Generation, float]:
    start = time.perf_counter()
    generation = _begin(engine, case, limits)
    while not generation.done:
        engine.step(generation)
    seconds = time.perf_counter() - start
    engine.published(engine.policy_version + 1)  # the next run finds no prompt of this one
    return generation, seconds


def _profile(engine: Engine, case: Case) -> Profile:
    """Decode steps in the middle of the case."""
    generation = _begin(engine, case, case.limits)
    for _ in range(-(-case.prompts * case.prompt // BATCH_TOKENS) + int(statistics.median(case.limits)) // 2):
        engine.step(generation)
    profile = profiled(lambda: engine.step(generation), PROFILED)
    generation.close()
    return profile


def score_again(
    model: Transformer, prompts: Sequence[list[int]], completions: Sequence[Completion], tokens: int
) -> tuple[int, int]:
    """Score about `tokens` sampled tokens, the longest completion and others at random, by the trainer's forward.

    Returns how many were scored, and how many log-probabilities differ in any bit.
    """
    order = list(range(len(completions)))
    random.Random(0).shuffle(order)
    longest = max(order, key=lambda i: len(completions[i].token_ids))
    order.remove(longest)
    order.insert(0, longest)
    packs: list[list[int]] = [[]]
    scored = size = 0
    for i in order:
        if scored >= tokens:
            break
        length = len(prompts[i]) + len(completions[i].token_ids)
        if packs[-1] and size + length > PACK:
            packs.append([])
            size = 0
        packs[-1].append(i)
        scored, size = scored + len(completions[i].token_ids), size + length
    return scored, sum(_differing(model, [prompts[i] for i in pack], [completions[i] for i in pack]) for pack in packs if pack)


def _differing(model: Transformer, prompts: Sequence[list[int]], completions: Sequence[Completion]) -> int:
    """Log-probabilities that differ from those of one packed forward."""
    flat, rows, chosen, sampled = [], [], [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        first = len(flat) + len(prompt) - 1
        rows += range(first, first + len(completion.token_ids))
        flat += prompt + completion.token_ids
        chosen += completion.token_ids
        sampled += completion.logprobs
    lengths = [len(p) + len(c.token_ids) for p, c in zip(prompts, completions, strict=True)]
    with torch.no_grad():
        hidden = model.forward(torch.tensor(flat), model.packed(lengths))
        ours, _ = model.chosen_logprobs(hidden[torch.tensor(rows, device=hidden.device)], torch.tensor(chosen), TEMPERATURE)
    theirs = torch.tensor(sampled, dtype=torch.float32)
    return int((ours.cpu().view(torch.int32) != theirs.view(torch.int32)).sum())


def measure_case(model: Transformer, case: Case, flow: Flow, lanes: int, tokens: int, profile: bool) -> Measured:
    """Warm up, run, and score `tokens` sampled tokens again. Works on any device."""
    engine = Engine(model, limits_for(case, model, lanes), ())
    _, warm_up = _run(engine, case, warm_limits(case, engine.limits.max_sequences))
    generation, seconds = _run(engine, case, case.limits)
    profiled_steps = _profile(engine, case) if profile else None
    completions = [c for request in engine.results(generation) for c in request]
    prompts = [s.group.prompt for request in generation.requests for s in request]
    engine.sleep()  # the cache's memory is needed now
    scored, differing = score_again(model, prompts, completions, tokens)
    return Measured(case, flow, seconds, warm_up, generation.stats, scored, differing, profiled_steps)


def chosen(cases: str, flows: str) -> tuple[list[Case], list[Flow]]:
    """What lists with commas name. Raises ValueError for an unknown name."""
    return named("--cases", cases, CASES), named("--flows", flows, FLOWS)


def bench(
    config: ModelConfig, cases: Sequence[Case], flows: Sequence[Flow], tail_lanes: int, tokens: int, profile: bool
) -> Iterator[Measured]:
    """Measure on the GPU, one model after the other."""
    positions = max(case.prompt + max(case.limits) for case in cases)
    config = replace(config, max_position_embeddings=positions)
    for flow in flows:
        model = Transformer.random(config, linear_names(config) if flow.fp8 else (), "cuda", kv_fp8=flow.kv_fp8)
        for case in cases:
            yield measure_case(model, case, flow, LANES if case.group == 1 else tail_lanes, tokens, profile)
            collect()
        del model
        collect()


def collect() -> None:
    """Free what nobody holds any more: engines with their graphs, models."""
    gc.collect()
    torch.cuda.empty_cache()
