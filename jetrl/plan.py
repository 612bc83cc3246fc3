"""Numbers that follow from a configuration: batches, cache and memory, worked out and checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jetrl.config import RunConfig
from jetrl.footprint import (
    GB,
    Footprint,
    Place,
    cache_that_fits,
    gradient_row,
    layers_to_recompute,
    rollout_bytes,
    stays,
    training_bytes,
)
from jetrl.model.config import ModelConfig
from jetrl.model.context import bytes_per_token, check_block_size
from jetrl.rollout.engine import EngineLimits, plan_cache

BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}  # of an engine step: large products for a GPU, small temporaries on a CPU


@dataclass(slots=True, frozen=True)
class BatchPlan:
    """Derived numbers of a run."""

    longest: int  # tokens of the longest prompt with a full completion
    limits: EngineLimits
    wanted_cache: int  # tokens of a cache that holds all running sequences at full length; the limits may have less
    completions: int  # a step
    per_update: int  # completions of one optimizer step
    microbatches: int  # of one optimizer step, at most
    updates: int  # optimizer steps of the run
    recompute_layers: int  # computed anew by the backward


def plan_batches(config: RunConfig, model: ModelConfig, longest_prompt: int, place: Place) -> BatchPlan:
    """Derive the batch numbers. Raises ValueError when a prompt with a full completion fits neither the model nor the cache,
    for a block size that the device cannot read, and for what does not fit the GPU's memory, with the numbers.

    The cache holds all running sequences at full length, or on a GPU what fits beside all that stays there.
    """
    rollout = config.rollout
    check_block_size(config.kv_cache, rollout.block_size, torch.device(place.kind))
    longest = longest_prompt + rollout.max_completion_tokens
    if longest > model.max_position_embeddings:
        raise ValueError(
            f"the longest prompt ({longest_prompt} tokens) with rollout.max_completion_tokens="
            f"{rollout.max_completion_tokens} makes {longest} tokens, but the model has {model.max_position_embeddings} "
            "positions. Lower max_completion_tokens, or "
            f"set task.max_prompt_tokens to {max(1, model.max_position_embeddings - rollout.max_completion_tokens)}."
        )
    completions = rollout.prompts_per_step * rollout.group_size
    per_update = completions // config.algorithm.updates_per_step
    recompute = layers_to_recompute(config, model, longest, per_update, place)
    running = min(rollout.max_sequences, max(completions, config.eval.prompts * config.eval.samples))
    wanted = full_cache(running, longest, rollout.block_size)
    batch = rollout.max_batch_tokens or BATCH_TOKENS[place.kind]
    taken = stays(config, model, place.kind) + rollout_bytes(config, model, running, batch, place.kind)
    fits = cache_that_fits(model, config.kv_cache, place, sum(gb for _, gb in taken))
    limits = EngineLimits(running, batch, rollout.cache_tokens or min(wanted, fits), rollout.block_size)
    plan_cache(limits, longest)
    if limits.cache_tokens > fits:
        raise ValueError(
            f"rollout.cache_tokens is {limits.cache_tokens}, but beside {sum(gb for _, gb in taken):.1f} GB that are taken "
            f"only {fits} tokens fit. Give {fits} or less, or leave it out."
        )
    microbatch = max(1, config.optimizer.microbatch_tokens // longest)
    updates = config.steps * config.algorithm.updates_per_step
    return BatchPlan(longest, limits, wanted, completions, per_update, -(-per_update // microbatch), updates, recompute)


def full_cache(sequences: int, longest: int, block_size: int) -> int:
    """Tokens of a cache that holds so many sequences at full length, and for each a prompt block kept for its group."""
    return sequences * (-(-longest // block_size) + 1) * block_size


def memory_plan(config: RunConfig, model: ModelConfig, batches: BatchPlan, place: Place) -> Footprint:
    """What a run holds on its device. The cache is there during rollouts, gradients and activations in training."""
    limits, kind = batches.limits, place.kind
    cache = limits.cache_tokens * bytes_per_token(config.kv_cache, model.num_layers, model.num_kv_heads, model.head_dim)
    engine = rollout_bytes(config, model, limits.max_sequences, limits.max_batch_tokens, kind)
    microbatch = training_bytes(config, model, batches.longest, batches.per_update, batches.recompute_layers, kind)
    rollout = [("KV cache, in rollouts", cache / GB), *engine]
    return Footprint(place, stays(config, model, kind), rollout, [gradient_row(model, kind), *microbatch])


def describe_cache(config: RunConfig, batches: BatchPlan) -> str:
    """The KV cache in words."""
    limits = batches.limits
    text = f"{limits.cache_tokens:,} tokens in blocks of {limits.block_size}, {config.kv_cache}"
    if limits.cache_tokens >= batches.wanted_cache:
        return f"{text}: {limits.max_sequences} sequences at full length"
    reason = "rollout.cache_tokens" if config.rollout.cache_tokens else "what fits"
    wanted = f"{batches.wanted_cache:,} would hold {limits.max_sequences} sequences at full length"
    return f"{text}: {reason}; {wanted}, with less some wait or are preempted"
