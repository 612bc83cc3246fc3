"""The rollout engine: token ids in; token ids, log-probabilities and a finish reason out.

Problem: sampling wants large, ever-changing batches; exactness wants each number to be what training will compute.
Method: all sequences' new tokens, prefill chunks and single decode tokens alike, form one flat forward of the model that
the trainer uses, over a paged KV cache. The numerics are row-independent, so the scheduler is free to do what is fast.

The engine reads the model's published weights in place. It holds no copy; `published` tells it that they changed.
Given up: speculative decoding and anything else that samples from another distribution than the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.model.context import KVCache, PagedContext
from jetrl.model.transformer import Trace, Transformer
from jetrl.rl.seeds import uniform
from jetrl.rl.types import Completion, Request
from jetrl.rollout.blocks import BlockPool
from jetrl.rollout.sampler import next_tokens
from jetrl.rollout.scheduler import Plan, Scheduler
from jetrl.rollout.sequence import Group, Sequence


@dataclass(slots=True, frozen=True)
class EngineLimits:
    """What the engine may hold at once."""

    max_sequences: int
    max_batch_tokens: int
    cache_tokens: int
    block_size: int


@dataclass(slots=True)
class EngineStats:
    """Totals of one `generate`."""

    steps: int = 0
    computed_tokens: int = 0  # through the model, recomputation after preemption included
    sampled_tokens: int = 0
    preemptions: int = 0
    peak_blocks: int = 0


def plan_cache(limits: EngineLimits, longest: int) -> int:
    """Blocks of the cache. Raises ValueError if one sequence of `longest` tokens does not fit."""
    blocks = limits.cache_tokens // limits.block_size
    needed = -(-longest // limits.block_size)
    if blocks < needed:
        raise ValueError(
            f"the KV cache holds {blocks} blocks of {limits.block_size} tokens, but one sequence of {longest} tokens needs "
            f"{needed} blocks. Set rollout.cache_tokens to {needed * limits.block_size} or more, or shorten prompts or "
            "completions."
        )
    return blocks


class Engine:
    """Generates completions from a model's published weights."""

    def __init__(self, model: Transformer, limits: EngineLimits, eos: Seq[int]) -> None:
        config = model.config
        self.model, self.limits, self.eos = model, limits, frozenset(eos)
        blocks = limits.cache_tokens // limits.block_size
        self.cache = KVCache.allocate(
            config.num_layers, blocks, limits.block_size, config.num_kv_heads, config.head_dim, model.device
        )
        self.policy_version = 0
        self.stats = EngineStats()

    def published(self, policy_version: int) -> None:
        """The model's weights changed. Nothing cached survives, since nothing is kept between calls of `generate`."""
        self.policy_version = policy_version

    def generate(
        self,
        requests: Seq[Request],
        temperature: float,
        progress: Callable[[int, int], None] | None = None,
        trace: Callable[[list[tuple[int, int]]], Trace] | None = None,
    ) -> list[list[Completion]]:
        """Complete each request; one list of completions a request, in the order of its seeds.

        `progress(finished sequences, sampled tokens)` is called after each step. `trace`, for checks, gets the (sequence,
        position) of each row of a forward and gives the recorder for it. Raises ValueError before any work for a request that
        cannot be served.
        """
        if not 0.0 <= temperature < float("inf"):
            raise ValueError(f"temperature is {temperature}; a finite number is wanted, 0 for greedy decoding or above")
        sequences = self._sequences(requests)
        pool = BlockPool(self.limits.cache_tokens // self.limits.block_size, self.limits.block_size)
        scheduler = Scheduler(pool, self.limits.max_sequences, self.limits.max_batch_tokens)
        scheduler.waiting.extend(sequences)
        number = {id(sequence): i for i, sequence in enumerate(sequences)} if trace else {}
        self.stats = stats = EngineStats()
        with torch.inference_mode():
            finished = 0
            while scheduler.waiting or scheduler.running:
                plan = scheduler.plan()
                recorder = trace(_rows(plan, number)) if trace and plan.work else None
                self._step(plan, scheduler, temperature, recorder)
                done = [s for s in scheduler.running if s.finish_reason is not None]
                for sequence in done:
                    scheduler.finish(sequence)
                finished += len(done)
                stats.steps += 1
                if progress:
                    progress(finished, stats.sampled_tokens)
        stats.preemptions, stats.peak_blocks = scheduler.preemptions, pool.peak
        assert pool.free == pool.count, "blocks leaked"
        return self._collect(requests, sequences)

    def _sequences(self, requests: Seq[Request]) -> list[Sequence]:
        sequences: list[Sequence] = []
        for number, request in enumerate(requests):
            self._check(number, request)
            group = Group(request.prompt, waiting=len(request.seeds))
            for i, seed in enumerate(request.seeds):
                forced = request.forced[i] if request.forced else None
                sequences.append(Sequence(group, seed, request.max_tokens, list(request.prompt), forced))
        return sequences

    def _check(self, number: int, request: Request) -> None:
        vocabulary, positions = self.model.config.vocab_size, self.model.config.max_position_embeddings
        if not request.prompt:
            raise ValueError(f"request {number} has an empty prompt; at least one token is wanted (a BOS token, for instance)")
        for token in (*request.prompt, *(t for tokens in request.forced or [] for t in tokens)):
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"request {number} has token id {token}, outside the vocabulary of {vocabulary}. Was the text encoded by "
                    "another model's tokenizer?"
                )
        if request.max_tokens < 1:
            raise ValueError(f"request {number} asks for {request.max_tokens} tokens; at least 1 is wanted")
        if request.forced is not None and len(request.forced) != len(request.seeds):
            raise ValueError(
                f"request {number} forces {len(request.forced)} completions for {len(request.seeds)} seeds; want one a seed"
            )
        if request.forced is not None and not all(request.forced):
            raise ValueError(f"request {number} forces an empty completion; at least one token is wanted")
        longest = len(request.prompt) + max([request.max_tokens, *map(len, request.forced or [])])
        if longest > positions:
            raise ValueError(
                f"request {number} can reach {longest} tokens (prompt {len(request.prompt)} + {request.max_tokens}), but "
                f"the model has {positions} positions. Shorten the prompt or lower the completion limit."
            )
        plan_cache(self.limits, longest)

    def _step(self, plan: Plan, scheduler: Scheduler, temperature: float, recorder: Trace | None) -> None:
        for copy in plan.copies:
            self.cache.copy_block(*copy)
        sampling = [(sequence, sequence.group.hidden) for sequence in plan.joined]
        if plan.work:
            hidden = self._forward(plan, recorder)
            sampling += self._advance(plan, hidden, scheduler)
        if not sampling:
            return
        rows = torch.stack([row for _, row in sampling if row is not None])
        assert rows.shape[0] == len(sampling)
        chosen = [sequence for sequence, _ in sampling]
        uniforms = [uniform(s.seed, len(s.tokens) - s.prompt_length) for s in chosen]
        forced = [None if s.forced is None else s.forced[len(s.tokens) - s.prompt_length] for s in chosen]
        tokens, logprobs = next_tokens(self.model, rows, uniforms, temperature, forced)
        for sequence, token, logprob in zip(chosen, tokens, logprobs, strict=True):
            sequence.append(token, logprob, self.eos)
        self.stats.sampled_tokens += len(chosen)

    def _forward(self, plan: Plan, recorder: Trace | None) -> Tensor:
        """Hidden states of the plan's new tokens, flat."""
        tokens = [t for s, n in plan.work for t in s.tokens[s.computed : s.computed + n]]
        widest = max(len(s.blocks) for s, _ in plan.work)
        tables = torch.tensor([s.blocks + [s.blocks[0]] * (widest - len(s.blocks)) for s, _ in plan.work])
        counts = [n for _, n in plan.work]
        context = PagedContext.of(self.cache, counts, [s.computed + n for s, n in plan.work], tables)
        self.stats.computed_tokens += len(tokens)
        return self.model.forward(torch.tensor(tokens), context, recorder)

    def _advance(self, plan: Plan, hidden: Tensor, scheduler: Scheduler) -> list[tuple[Sequence, Tensor | None]]:
        """Book the computed tokens; returns the sequences that sample now, with their last hidden state."""
        sampling: list[tuple[Sequence, Tensor | None]] = []
        first = 0
        for sequence, count in plan.work:
            before = sequence.computed
            sequence.computed += count
            last_of_prompt = sequence.prompt_length - 1
            if before <= last_of_prompt < sequence.computed and scheduler.prompt_ready(sequence):
                sequence.group.hidden = hidden[first + last_of_prompt - before].clone()
            if sequence.remaining == 0:
                sampling.append((sequence, hidden[first + count - 1]))
            first += count
        return sampling

    def _collect(self, requests: Seq[Request], sequences: list[Sequence]) -> list[list[Completion]]:
        results = iter(sequences)
        return [[self._completion(next(results)) for _ in request.seeds] for request in requests]

    def _completion(self, sequence: Sequence) -> Completion:
        assert sequence.finish_reason is not None
        return Completion(sequence.completion, sequence.logprobs, sequence.finish_reason, self.policy_version)


def _rows(plan: Plan, number: dict[int, int]) -> list[tuple[int, int]]:
    return [(number[id(s)], position) for s, n in plan.work for position in range(s.computed, s.computed + n)]
