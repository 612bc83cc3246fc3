"""The rollout engine: token ids in; token ids, log-probabilities and a finish reason out.

Problem: sampling wants large, ever-changing batches; exactness wants each number to be what training will compute.
Method: all sequences' new tokens, prefill chunks and single decode tokens alike, go through the forward that the trainer uses,
over a paged KV cache. The numerics are row-independent, so the scheduler is free to do what is fast.

    engine       what lasts: cache, lanes, captured graphs, prefixes of the present policy version; sleep and wake
    generation   what passes: one `generate`, step by step
    scheduler    who computes what next      decoder   a step as one CUDA graph      blocks   who uses which part of the cache

The engine reads the model's published weights in place. It holds no copy; `published` tells it that they changed.
Given up: speculative decoding and anything else that samples from another distribution than the model's. One generation at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from jetrl.kernels.lanes import Lanes
from jetrl.model.context import CacheKind, KVCache, bytes_per_token, check_block_size
from jetrl.model.transformer import Transformer
from jetrl.rl.types import Completion, Request
from jetrl.rollout.blocks import BlockPool, Prefixes
from jetrl.rollout.decoder import Decoder
from jetrl.rollout.generation import LAG, Generation, Machine, Stats, Tracer
from jetrl.rollout.scheduler import Scheduler
from jetrl.rollout.sequence import Group, Sequence

Progress = Callable[[int, int], None]  # finished sequences, sampled tokens


@dataclass(slots=True, frozen=True)
class EngineLimits:
    """What the engine may hold at once."""

    max_sequences: int
    max_batch_tokens: int
    cache_tokens: int
    block_size: int

    @property
    def blocks(self) -> int:
        """Whole blocks of the cache."""
        return self.cache_tokens // self.block_size


def plan_cache(limits: EngineLimits, longest: int) -> int:
    """Blocks of the cache. Raises ValueError if one sequence of `longest` tokens does not fit."""
    blocks = limits.blocks
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
        """Takes the cache's memory. Raises ValueError if there is not so much, or for blocks that the kernels cannot read."""
        self.model, self.limits = model, limits
        config, blocks, size = model.config, limits.blocks, limits.block_size
        kind: CacheKind = "fp8" if model.kv_fp8 else "bf16"
        check_block_size(kind, size, model.device)
        shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        # One block more than the pool has: rows that take no part in a step write their keys there.
        self._memory = model.ops.arena((blocks + 1) * size * bytes_per_token(kind, *shape))
        cache = KVCache.over(self._memory.bytes, kind, config.num_layers, blocks + 1, size, *shape[1:])
        most = min(limits.max_sequences, max(1, blocks * size))
        widest = min(blocks, -(-config.max_position_embeddings // size)) or 1
        lanes = Lanes.empty(most, widest, sorted(eos), size, blocks * size, model.device)
        self._machine = Machine(
            model, cache, lanes, Decoder(model, cache, lanes, most), torch.zeros(lanes.table.shape, dtype=torch.int32),
            frozenset(eos),
        )  # fmt: skip
        self._pool = BlockPool(blocks, size)
        self._prefixes = Prefixes(self._pool)
        self.lag = LAG if model.device.type == "cuda" else 0  # any gives the same completions
        self.policy_version = 0
        self.stats = Stats()

    def published(self, policy_version: int) -> None:
        """The model's weights changed. What is cached of older ones is forgotten; captured graphs read the new ones."""
        assert self._nothing_runs(), "published in the middle of a generation"
        self.policy_version = policy_version
        self._prefixes.clear()

    def sleep(self) -> None:
        """Give the cache's memory back, to training on the same device. Nothing happens if it is given back already."""
        assert self._nothing_runs(), "sent to sleep in the middle of a generation"
        self._prefixes.clear()
        self._memory.release()

    def wake(self) -> None:
        """Take the memory again, at the same place; nothing happens if it is there.

        Raises ValueError, saying what is free, if there is not enough.
        """
        self._memory.restore()

    def metrics(self) -> dict[str, float]:
        """Of the last generation, for a run's row: tokens/s and seconds by phase, preemptions."""
        return self.stats.metrics()

    def checksum(self) -> str:
        """Of the weights as this engine reads them; see `Transformer.checksum`."""
        return self.model.checksum()

    def generate(
        self, requests: Seq[Request], temperature: float, progress: Progress | None = None, trace: Tracer | None = None
    ) -> list[list[Completion]]:
        """Complete each request; one list of completions a request, in the order of its seeds.

        `progress(finished sequences, sampled tokens)` is called after each step. `trace`, for checks, gets the (sequence,
        position) of each row of a forward and gives the recorder for it. Raises ValueError before any work for a request that
        cannot be served.
        """
        generation = self.start(requests, temperature, trace)
        try:
            while not generation.done:
                self.step(generation)
                if progress:
                    progress(generation.finished, generation.stats.sampled_tokens)
        finally:
            generation.close()
        return self.results(generation)

    def start(self, requests: Seq[Request], temperature: float, trace: Tracer | None = None) -> Generation:
        """A generation to be carried on with `step`, and to be closed if it is not carried to its end. Errors: `generate`."""
        if not 0.0 <= temperature < float("inf"):
            raise ValueError(f"temperature is {temperature}; a finite number is wanted, 0 for greedy decoding or above")
        sequences = self._sequences(requests)
        assert self._nothing_runs(), "blocks leaked, or two generations at a time"
        self.wake()
        self._pool.peak = 0
        scheduler = Scheduler(self._pool, self._machine.lanes.state.shape[0] - 1, self.limits.max_batch_tokens, self._prefixes)
        generation = Generation(self._machine, scheduler, sequences, temperature, trace, self.lag, self.policy_version)
        self.stats = generation.stats
        return generation

    def _nothing_runs(self) -> bool:
        """Whether all blocks but kept prefixes are free."""
        return self._pool.free + len(self._prefixes) == self._pool.count

    def step(self, generation: Generation) -> None:
        """One step of the engine."""
        with torch.inference_mode():
            generation.step()

    def results(self, generation: Generation) -> list[list[Completion]]:
        """The completions of a generation that is done."""
        assert generation.done
        return [[_completion(s, generation.policy_version) for s in request] for request in generation.requests]

    def _sequences(self, requests: Seq[Request]) -> list[list[Sequence]]:
        for number, request in enumerate(requests):
            self._check(number, request)
        return [_sequences(request) for request in requests]

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


def _completion(sequence: Sequence, policy_version: int) -> Completion:
    assert sequence.finish_reason is not None
    return Completion(sequence.completion, sequence.logprobs, sequence.finish_reason, policy_version)


def _sequences(request: Request) -> list[Sequence]:
    group = Group(request.prompt, waiting=len(request.seeds))
    forced = request.forced or [None] * len(request.seeds)
    return [
        Sequence(group, seed, request.max_tokens, list(request.prompt), tokens)
        for seed, tokens in zip(request.seeds, forced, strict=True)
    ]
