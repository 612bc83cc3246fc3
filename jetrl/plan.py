"""Numbers that follow from a configuration: batches, cache and memory, worked out and checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from jetrl.config import RunConfig
from jetrl.kernels.select import device_of
from jetrl.model.checkpoint import parameter_shapes
from jetrl.model.config import ModelConfig, linear_names
from jetrl.model.context import CacheKind, bytes_per_token, check_block_size
from jetrl.rollout.engine import EngineLimits, plan_cache

GB = 1e9
# Bytes a parameter, see kernels/ and train/: what each side keeps.
_PUBLISHED = {
    "cpu": {"fp8": 1 + 8, "bf16": 2 + 8},  # codes or values, and the float64 operand
    "cuda": {"fp8": 1 + 1, "bf16": 2},  # codes and their transpose
}
_CACHE, _ACTIVATIONS = "KV cache, in rollouts", "activations of one microbatch, in training"
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}  # of an engine step: large products for a GPU, small temporaries on a CPU
_ANY = 1 << 60  # tokens
_RESERVE_GB = 6.0  # of a GPU: libraries, captured graphs, logits, and what a prefill step holds
_TRAINING = {"cpu": 4 + 8 + 8, "cuda": 4 + 8 + 4}  # FP32 master, two FP32 moments, the gradient


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


def plan_batches(config: RunConfig, model: ModelConfig, longest_prompt: int) -> BatchPlan:
    """Derive the batch numbers. Raises ValueError when a prompt with a full completion fits neither the model nor the cache,
    and for a block size that the device cannot read.

    The cache holds all running sequences at full length, or on a GPU what fits beside all that stays there.
    """
    rollout = config.rollout
    device = device_of(config.device)
    check_block_size(config.kv_cache, rollout.block_size, device)
    longest = longest_prompt + rollout.max_completion_tokens
    if longest > model.max_position_embeddings:
        raise ValueError(
            f"the longest prompt ({longest_prompt} tokens) with rollout.max_completion_tokens="
            f"{rollout.max_completion_tokens} makes {longest} tokens, but the model has {model.max_position_embeddings} "
            "positions. Lower max_completion_tokens, or "
            f"set task.max_prompt_tokens to {max(1, model.max_position_embeddings - rollout.max_completion_tokens)}."
        )
    completions = rollout.prompts_per_step * rollout.group_size
    running = min(rollout.max_sequences, max(completions, config.eval.prompts * config.eval.samples))
    wanted = full_cache(running, longest, rollout.block_size)
    stays = sum(gb for _, gb in _standing(config, model))
    cache = rollout.cache_tokens or min(wanted, cache_that_fits(model, config.kv_cache, device, stays))
    batch = rollout.max_batch_tokens or BATCH_TOKENS[device.type]
    limits = EngineLimits(running, batch, cache, rollout.block_size)
    plan_cache(limits, longest)
    per_update = completions // config.algorithm.updates_per_step
    microbatch = max(1, config.optimizer.microbatch_tokens // longest)
    updates = config.steps * config.algorithm.updates_per_step
    return BatchPlan(longest, limits, wanted, completions, per_update, -(-per_update // microbatch), updates)


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the model, tied embeddings counted once."""
    return sum(prod(shape) for shape in parameter_shapes(model).values())


def full_cache(sequences: int, longest: int, block_size: int) -> int:
    """Tokens of a cache that holds so many sequences at full length, and for each a prompt block kept for its group."""
    return sequences * (-(-longest // block_size) + 1) * block_size


def cache_that_fits(model: ModelConfig, kind: CacheKind, device: torch.device, standing_gb: float) -> int:
    """Tokens of a KV cache beside `standing_gb` that stay on the GPU; without one no limit is known, and this is very large."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return _ANY
    left = torch.cuda.get_device_properties(device).total_memory - GB * (standing_gb + _RESERVE_GB)
    return max(0, int(left // bytes_per_token(kind, model.num_layers, model.num_kv_heads, model.head_dim)))


def _standing(config: RunConfig, model: ModelConfig) -> list[tuple[str, float]]:
    """What stays on the device during rollout and training, name and GB."""
    count = parameter_count(model)
    shapes = parameter_shapes(model)
    linear = sum(prod(shapes[name]) for name in linear_names(model))
    head = model.vocab_size * model.hidden_size
    layouts = {"fp8": ["fp8"], "bf16": ["bf16"], "fp8_rollout": ["bf16", "fp8"]}[config.flow]
    device = device_of(config.device).type
    per = _PUBLISHED[device]
    published = sum(linear * per[kind] + head * per["bf16"] for kind in layouts)
    reference = linear * per[layouts[0]] + head * per["bf16"] if config.algorithm.kl_coef else 0
    return [
        ("weights as the kernels read them", published / GB),
        ("reference model for the KL", reference / GB),
        ("masters, moments and gradients", count * _TRAINING[device] / GB),
        *([("Python and its libraries", 0.6)] if device == "cpu" else []),
    ]


def memory_plan(config: RunConfig, model: ModelConfig, batches: BatchPlan) -> list[tuple[str, float]]:
    """What a run holds on its device, name and GB. The cache is there during rollouts, the activations in training."""
    per_token = bytes_per_token(config.kv_cache, model.num_layers, model.num_kv_heads, model.head_dim)
    cache = batches.limits.cache_tokens * per_token
    # A layer keeps, per token: residual and norms, q k v, attention, gate and up, and the FP8 or BF16 inputs of four products.
    width = 8 * model.hidden_size + 4 * (model.q_size + 2 * model.kv_size) + 7 * model.intermediate_size
    tokens = max(config.optimizer.microbatch_tokens, batches.longest)
    tokens = min(tokens, batches.per_update * batches.longest)
    activations = tokens * model.num_layers * width
    return [
        *_standing(config, model),
        (_CACHE, cache / GB),
        (_ACTIVATIONS, activations / GB),
    ]


def peak(rows: list[tuple[str, float]]) -> float:
    """GB of the larger phase of `memory_plan`: training takes the memory that the cache had."""
    phases = [gb for name, gb in rows if name in (_CACHE, _ACTIVATIONS)]
    return sum(gb for _, gb in rows) - min(phases)


def describe_cache(config: RunConfig, batches: BatchPlan) -> str:
    """The KV cache in words."""
    limits = batches.limits
    text = f"{limits.cache_tokens:,} tokens in blocks of {limits.block_size}, {config.kv_cache}"
    if limits.cache_tokens >= batches.wanted_cache:
        return f"{text}: {limits.max_sequences} sequences at full length"
    reason = "rollout.cache_tokens" if config.rollout.cache_tokens else "what fits"
    wanted = f"{batches.wanted_cache:,} would hold {limits.max_sequences} sequences at full length"
    return f"{text}: {reason}; {wanted}, with less some wait or are preempted"
