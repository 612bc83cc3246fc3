"""Checkpoints: everything that a continued run needs to be the unbroken one, and a model that others can load.

    <run>/checkpoints/step-000040/
        state.json              step, policy version, counters, flow, names of the FP8 layers, kind of the KV cache
        masters.safetensors     masters, FP32 or BF16
        optimizer.safetensors   AdamW moments; of quantised ones codes and scales
        model/                  Hugging Face folder in BF16, for `transformers`, vLLM and `jetrl eval`

Prompts, seeds and schedule are functions of the step, so there is no loader or generator state to lose. A checkpoint is
written beside its place and renamed, so one that exists is whole. Safetensors and JSON only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetrl.model.checkpoint import save_model
from jetrl.model.config import ModelConfig, read_json
from jetrl.train.publish import bf16_weights, publish
from jetrl.train.trainer import Trainer

_PREFIX, _STATE = "step-", "state.json"


@dataclass(slots=True, frozen=True)
class State:
    """The numbers of a checkpoint."""

    step: int
    policy_version: int
    optimizer_steps: int
    skipped_steps: int
    flow: str
    fp8_layers: list[str]
    kv_cache: str = "bf16"


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / "checkpoints" / f"{_PREFIX}{step:06d}"


def checkpoint_step(folder: Path) -> int:
    """The step whose checkpoint a folder of `checkpoint_folder` is; -1 for any other folder and for one that is not whole."""
    named = re.fullmatch(rf"{_PREFIX}(\d+)", folder.name)
    return int(named[1]) if named and (folder / _STATE).is_file() else -1


def latest_checkpoint(run: Path) -> Path | None:
    """The whole checkpoint of the latest step, if there is one."""
    found = [p for p in (run / "checkpoints").glob(f"{_PREFIX}*") if checkpoint_step(p) >= 0]
    return max(found, key=checkpoint_step, default=None)


def save_state(run: Path, trainer: Trainer, state: State, config: ModelConfig, source: Path) -> Path:
    """Write a checkpoint; a whole one of the same step is kept as it is. `source`: the folder the model came from."""
    folder = checkpoint_folder(run, state.step)
    if checkpoint_step(folder) == state.step:
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # cut short by someone's copying: this module's own renames leave no such thing
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # From the CPU, one file after the other: the GPU may have no room for a second copy.
    save_file(_on_cpu(trainer.masters), partial / "masters.safetensors")
    save_file(_on_cpu(trainer.optimizer.moments()), partial / "optimizer.safetensors")
    save_model(partial / "model", config, bf16_weights(trainer.masters), source)
    (partial / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")
    os.replace(partial, folder)
    return folder


def load_state(folder: Path, trainer: Trainer, flow: str, fp8_layers: list[str], kv_cache: str = "bf16") -> State:
    """Put a checkpoint into the trainer and publish it.

    Raises ValueError when the checkpoint is of another flow, another KV cache, another set of FP8 layers or another model.
    """
    state = State(**read_json(folder / _STATE))
    if (state.flow, state.fp8_layers, state.kv_cache) != (flow, fp8_layers, kv_cache):
        raise ValueError(
            f"{folder} was made in flow {state.flow!r} with {len(state.fp8_layers)} FP8 layers and kv_cache "
            f"{state.kv_cache!r}, but the run has flow {flow!r} with {len(fp8_layers)} and kv_cache {kv_cache!r}. Resume with "
            f"the run's own config, or start a new run from {folder / 'model'}."
        )
    masters, moments = (_read(folder / f"{name}.safetensors") for name in ("masters", "optimizer"))
    shapes = {name: tuple(p.shape) for name, p in masters.items()}
    wanted = {name: tuple(p.shape) for name, p in trainer.masters.items()}
    if shapes != wanted:
        raise ValueError(f"{folder} holds another model: its {len(shapes)} masters do not fit the {len(wanted)} of this one")
    trainer.optimizer.restore(moments, state.optimizer_steps, state.skipped_steps)
    for name, tensor in masters.items():
        trainer.masters[name].data.copy_(tensor)
    trainer.policy_version = state.policy_version
    publish(trainer.masters, trainer.published_models)
    return state


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file} is missing or broken ({error}). Remove {file.parent} to resume from the checkpoint before it."
        ) from None
