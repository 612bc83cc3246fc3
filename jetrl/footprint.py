"""What a run holds in memory, worked out from sizes before anything is allocated, and where it must give way.

Problem: a model of 8B fits a single GPU only because rollout and training take turns in the same memory. What does not fit must
be refused before the weights are read, with the numbers and the knob to turn, not after the first long completion.

Method: a list for each phase. Tensors that have a name are counted to the byte: published weights, masters, moments,
gradients, cache, and what layers keep for their backward. Temporaries are counted by the widest moment of the phase; what CUDA
and the libraries hold is a measured constant. On a GPU the sums decide two things: how many tokens the cache gets, and how many
layers the backward computes anew. A run logs what it measured beside them.

    stays       weights as the kernels read them, masters, moments
    rollout     stays + KV cache + a prefill step
    training    stays + gradients + what the layers of one microbatch keep + the head's chunk of logits

Given up: fragmentation is a constant, too. The plan of a CPU has no limit.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod

import torch

from jetrl.config import OptimizerConfig, RunConfig
from jetrl.flow import build_flow
from jetrl.kernels.select import device_of
from jetrl.model.checkpoint import parameter_shapes
from jetrl.model.config import ModelConfig, linear_names
from jetrl.model.context import CacheKind, bytes_per_token
from jetrl.train.optim import MOMENT_BLOCK

GB = 1e9
Rows = list[tuple[str, float]]  # name, GB
GPUS = {"h200": 150.1, "h100": 85.0}  # GB that torch sees of a whole one
_ANY = 1 << 60  # tokens
_LIBRARIES = 1.9  # GB on a GPU: the CUDA context, compiled kernels, captured graphs, workspaces of libraries
_SPARE = 2.0  # GB on a GPU: what the allocator cannot use
_HEAD_ROWS = 1024  # rows whose logits exist at once, see kernels/hopper/logprob.py
_CPU_WEIGHT = {True: 1 + 8, False: 2 + 8}  # bytes: codes or values, and the float64 operand


@dataclass(slots=True, frozen=True)
class Place:
    """Where a run is planned for."""

    kind: str  # cpu or cuda
    gb: float | None = None  # of a GPU; None: no limit is known

    @staticmethod
    def of(device: str, gpu: str | None = None) -> Place:
        """This machine's `device`, or a GPU that need not be here, by name or GB. Raises ValueError for another name."""
        if gpu is None:
            kind = device_of(device).type
            seen = kind == "cuda" and torch.cuda.is_available()
            return Place(kind, torch.cuda.get_device_properties(0).total_memory / GB if seen else None)
        if gpu.lower() in GPUS:
            return Place("cuda", GPUS[gpu.lower()])
        if gpu.replace(".", "", 1).isdigit() and float(gpu) > 0:
            return Place("cuda", float(gpu))
        raise ValueError(f"--gpu is {gpu!r}; wanted one of {', '.join(GPUS)}, or a number of GB")


@dataclass(slots=True, frozen=True)
class Footprint:
    """GB by name: what is always there, and what each phase adds."""

    place: Place
    stays: Rows
    rollout: Rows
    training: Rows

    @property
    def rollout_gb(self) -> float:
        return sum(gb for _, gb in self.stays + self.rollout)

    @property
    def training_gb(self) -> float:
        return sum(gb for _, gb in self.stays + self.training)

    @property
    def peak_gb(self) -> float:
        """Of the larger phase: training takes the memory that the cache had."""
        return max(self.rollout_gb, self.training_gb)


def flow_layers(config: RunConfig, model: ModelConfig) -> list[Collection[str]]:
    """FP8 layers of each model that is published: the trainer's first, the engine's if that is another."""
    flow = build_flow(config.flow, model, config.kv_cache)
    trainer, engine = flow.trainer_layers(model), flow.rollout_layers(model)
    return [trainer] if set(trainer) == set(engine) else [trainer, engine]


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the model, tied embeddings counted once."""
    return sum(prod(shape) for shape in parameter_shapes(model).values())


def published_bytes(model: ModelConfig, fp8_layers: Collection[str], kind: str) -> float:
    """Weights as the kernels read them. FP8 on a GPU: codes and their transpose, a scale for each 128 x 128 of either."""
    matrices, head = set(linear_names(model)), "embed" if model.tie_word_embeddings else "head"
    total = 0.0
    for name, shape in parameter_shapes(model).items():
        size = prod(shape)
        if name not in matrices and name != head:
            total += 2 * size
        elif kind == "cpu":
            total += _CPU_WEIGHT[name in fp8_layers] * size
        else:
            total += 2 * size + (8 * size / 128**2 if name in fp8_layers else 0)
    return total


def moment_bytes(model: ModelConfig, optimizer: OptimizerConfig) -> float:
    """AdamW's two moments."""
    wide = 4 if optimizer.masters == "fp32" else 2
    if optimizer.moments == "fp32":
        return 2 * 4 * parameter_count(model)
    sizes = [prod(shape) for shape in parameter_shapes(model).values()]
    return sum(2 * n * (1 + 4 / MOMENT_BLOCK if n >= 4096 and n % MOMENT_BLOCK == 0 else wide) for n in sizes)


def kept_bytes(model: ModelConfig, fp8: bool, kind: str) -> tuple[float, float]:
    """What a layer keeps of a token for its backward (`model.layer.Saved`), and what it keeps if it is recomputed."""
    hidden, wide, q = model.hidden_size, model.intermediate_size, model.q_size
    heads = q + 2 * model.kv_size
    if kind == "cpu":
        return 8 * hidden + 4 * heads + 7 * wide, 2 * hidden
    residuals = 2 * 2 * hidden + 2 * 4  # and the norms' statistics
    attention = 2 * heads * (2 if model.qk_norm else 1) + 2 * q + 4 * model.num_heads
    # In BF16 attention's output is kept once, as a result and as an input.
    inputs = (2 * hidden + q + wide) * (1 + 4 / 128) if fp8 else 2 * (2 * hidden + wide)
    return residuals + attention + 4 * wide + inputs, 2 * hidden


def training_bytes(config: RunConfig, model: ModelConfig, longest: int, per_update: int, recompute: int, kind: str) -> Rows:
    """What a microbatch holds besides the gradients, when it holds most: name and GB."""
    tokens = min(max(config.optimizer.microbatch_tokens, longest), per_update * longest)
    fp8 = config.flow == "fp8"
    kept, recomputed = kept_bytes(model, fp8, kind)
    layers = model.num_layers
    activations = tokens * max(kept * (layers - recompute) + recomputed * recompute, kept + recomputed * recompute)
    # The widest moment of a backward: gradients of SiLU-mul's output and input, the second in both layouts.
    backward = tokens * (6 * model.intermediate_size + 8 * model.hidden_size)
    rows = min(tokens, _HEAD_ROWS)
    logits = rows * (6 * model.vocab_size + 4 * model.hidden_size) + tokens * 6 * model.hidden_size
    return [
        ("activations of one microbatch, in training", activations / GB),
        ("temporaries of its backward, in training", max(backward, logits) / GB),
    ]


def rollout_bytes(config: RunConfig, model: ModelConfig, running: int, batch_tokens: int, kind: str) -> Rows:
    """What an engine step holds besides the cache, when it holds most: a prefill, or the logits of all sequences."""
    prefill = batch_tokens * (7 * model.intermediate_size + 10 * model.hidden_size + 2 * (model.q_size + 2 * model.kv_size))
    logits = running * 4 * model.vocab_size
    return [("a step of the engine, in rollouts", (max(prefill, logits) + (logits if kind == "cuda" else 0)) / GB)]


def stays(config: RunConfig, model: ModelConfig, kind: str) -> Rows:
    """What is there during rollout and training, name and GB."""
    published = [published_bytes(model, layers, kind) for layers in flow_layers(config, model)]
    return [
        ("weights as the kernels read them", sum(published) / GB),
        ("reference model for the KL", published[0] / GB if config.algorithm.kl_coef else 0.0),
        ("masters", parameter_count(model) * (4 if config.optimizer.masters == "fp32" else 2) / GB),
        ("moments", moment_bytes(model, config.optimizer) / GB),
        ("CUDA and libraries", _LIBRARIES) if kind == "cuda" else ("Python and its libraries", 0.6),
    ]


def gradient_row(model: ModelConfig, kind: str) -> tuple[str, float]:
    """Accumulators: FP32 on a GPU, float64 on a CPU."""
    return "gradients, in training", parameter_count(model) * (4 if kind == "cuda" else 8) / GB


def cache_that_fits(model: ModelConfig, kv_cache: CacheKind, place: Place, taken_gb: float) -> int:
    """Tokens of a KV cache beside what is taken; very many where no limit is known."""
    if place.gb is None:
        return _ANY
    left = GB * (place.gb - _SPARE - taken_gb)
    return max(0, int(left // bytes_per_token(kv_cache, model.num_layers, model.num_kv_heads, model.head_dim)))


def layers_to_recompute(config: RunConfig, model: ModelConfig, longest: int, per_update: int, place: Place) -> int:
    """The fewest layers that the backward must compute anew so that training fits, or what the configuration says.

    Raises ValueError, with the numbers and what to turn, if training does not fit; also for more layers than there are.
    """
    asked, layers = config.optimizer.recompute_layers, model.num_layers
    if asked is not None and asked > layers:
        raise ValueError(f"optimizer.recompute_layers is {asked}, but the model has {layers} layers; give {layers} or less")
    if place.gb is None:
        return asked or 0
    fixed = sum(gb for _, gb in stays(config, model, place.kind)) + gradient_row(model, place.kind)[1]
    room = place.gb - _SPARE
    needed = 0.0
    for count in range(layers + 1) if asked is None else (asked,):
        needed = fixed + sum(gb for _, gb in training_bytes(config, model, longest, per_update, count, place.kind))
        if needed <= room:
            return count
    anew = f"with {layers if asked is None else asked} of {layers} layers computed anew"
    raise ValueError(
        f"training needs {needed:.1f} GB {anew}, and the GPU has {room:.1f} GB to use ({place.gb:.1f}, {_SPARE:g} spare): "
        f"{_list([*stays(config, model, place.kind), gradient_row(model, place.kind)])}, and {needed - fixed:.1f} for one "
        f"microbatch. {_advice(config, longest, fixed > room)}"
    )


def _list(rows: Rows) -> str:
    return ", ".join(f"{name} {gb:.1f}" for name, gb in rows if gb >= 0.05)


def _advice(config: RunConfig, longest: int, fixed: bool) -> str:
    """The knobs that are left, the cheapest first."""
    optimizer, knobs = config.optimizer, []
    if not fixed and optimizer.recompute_layers is not None:
        knobs.append("leave optimizer.recompute_layers out")
    if optimizer.moments == "fp32":
        knobs.append("set optimizer.moments=fp8")
    elif optimizer.masters == "fp32":
        knobs.append("set optimizer.masters=bf16")
    if not fixed and optimizer.microbatch_tokens > longest:
        knobs.append(f"lower optimizer.microbatch_tokens ({optimizer.microbatch_tokens}), down to {longest}")
    if not fixed and optimizer.microbatch_tokens <= longest:
        knobs.append(f"lower rollout.max_completion_tokens ({config.rollout.max_completion_tokens})")
    if config.flow == "fp8_rollout":
        knobs.append("use flow=fp8, which has one copy of the weights")
    return f"To make it fit: {', or '.join(knobs) or 'use a smaller model'}."


@dataclass(slots=True)
class Meter:
    """What a run really held, GB, in each phase, to be read beside the plan.

    On a GPU: the most that torch's tensors took in the phase, and all else that is taken there: the KV cache, CUDA, libraries,
    other processes. On a CPU: the largest resident memory of the process so far.
    """

    plan: Footprint
    device: torch.device
    peaks: dict[str, float] = field(default_factory=dict)

    def measure(self, phase: str) -> None:
        """Book the peak since the last call as that of `phase`, while the KV cache is still as it was in the phase."""
        self.peaks[phase] = self._peak() / GB

    def _peak(self) -> float:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            others = total - free - torch.cuda.memory_reserved(self.device)
            peak = others + torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return peak
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def metrics(self) -> dict[str, float]:
        """`memory/...`: the peak of each phase and of both, and the planned ones."""
        planned = {"rollout": self.plan.rollout_gb, "training": self.plan.training_gb}
        return (
            {f"memory/{phase}_gb": gb for phase, gb in self.peaks.items()}
            | {f"memory/{phase}_planned_gb": gb for phase, gb in planned.items()}
            | {"memory/peak_gb": max(self.peaks.values(), default=0.0), "memory/planned_gb": self.plan.peak_gb}
        )
