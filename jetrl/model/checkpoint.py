"""Weights of a Hugging Face folder, in and out: safetensors, BF16, bit-exact round trip.

Our parameters are fused (q, k, v in one matrix; gate and up in one), theirs are not. One table, `hf_tensors`, says
which rows of which of our parameters each of their tensors is. Loading and saving both walk that table and nothing
else, so a bias cannot be dropped, a tied head cannot be saved twice, and what loads is what was saved.

Given up: pickled checkpoints (`*.bin`, `*.pt`) are never opened, since opening one runs code. FP32 and FP16 files are
rounded to BF16 once, here. All weights are copied out of the memory map, so a file may be replaced while a run goes on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetrl.model.config import ARCHITECTURES, ModelConfig, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 4 * 10**9
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
_DTYPES = ("BF16", "F16", "F32")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_IGNORED = (".rotary_emb.inv_freq",)  # buffers that old exports wrote: recomputed from the config
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "NOTICE",
)


@dataclass(slots=True, frozen=True)
class Entry:
    """One tensor of a Hugging Face file: rows [start, stop) of our parameter `name`, with all its columns."""

    hf_name: str
    name: str
    start: int
    stop: int
    columns: int | None  # None for a vector

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the Hugging Face tensor."""
        rows = self.stop - self.start
        return (rows,) if self.columns is None else (rows, self.columns)


def hf_tensors(config: ModelConfig) -> list[Entry]:
    """Every tensor of the model's files, in layer order. A tied head has no entry: it is the embedding."""
    hidden, q, kv, ffn = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    entries = [Entry(EMBED, "embed", 0, config.vocab_size, hidden)]
    for i in range(config.num_layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        norms = [("input_layernorm", "input_norm", hidden), ("post_attention_layernorm", "post_norm", hidden)]
        if config.qk_norm:
            norms += [("self_attn.q_norm", "q_norm", config.head_dim), ("self_attn.k_norm", "k_norm", config.head_dim)]
        entries += [Entry(f"{hf}{theirs}.weight", ours + name, 0, size, None) for theirs, name, size in norms]
        # (our fused parameter, its parts from the top row down, columns, bias)
        attention = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
        linears = [
            ("qkv", attention, hidden, config.attention_bias),
            ("o", [("self_attn.o_proj", hidden)], q, config.output_bias),
            ("gate_up", [("mlp.gate_proj", ffn), ("mlp.up_proj", ffn)], hidden, config.mlp_bias),
            ("down", [("mlp.down_proj", hidden)], ffn, config.mlp_bias),
        ]
        for name, parts, columns, bias in linears:
            start = 0
            for theirs, rows in parts:
                entries.append(Entry(f"{hf}{theirs}.weight", ours + name, start, start + rows, columns))
                if bias:
                    entries.append(Entry(f"{hf}{theirs}.bias", f"{ours}{name}_bias", start, start + rows, None))
                start += rows
    entries.append(Entry("model.norm.weight", "final_norm", 0, hidden, None))
    if not config.tie_word_embeddings:
        entries.append(Entry(HEAD, "head", 0, config.vocab_size, hidden))
    return entries


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each of our parameters."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in hf_tensors(config):
        rows = max(entry.stop, shapes.get(entry.name, (0,))[0])
        shapes[entry.name] = (rows,) if entry.columns is None else (rows, entry.columns)
    return shapes


def load_weights(folder: str | Path, config: ModelConfig) -> dict[str, Tensor]:
    """Our parameters by name, BF16 on the CPU, each owning its memory.

    Raises ValueError for missing or truncated files, and for a tensor that is missing, not known, of a wrong shape or
    of an unsupported dtype; each message names the file, the tensor, what was seen and what is wanted.
    """
    folder = Path(folder)
    files = _weight_files(folder)
    entries = hf_tensors(config)
    handles = {file: _open(file) for file in files}
    places = _places(handles, folder)
    head_too = config.tie_word_embeddings and HEAD in places
    if head_too and EMBED not in places:  # some writers keep only one name of shared memory, and it may be this one
        entries[0], head_too = replace(entries[0], hf_name=HEAD), False
    _check_names(places, entries, head_too, folder)
    weights = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in parameter_shapes(config).items()}
    for entry in entries:
        file = places[entry.hf_name]
        weights[entry.name][entry.start : entry.stop].copy_(_read(handles[file], entry.hf_name, entry.shape, file))
    if head_too:
        head = _read(handles[places[HEAD]], HEAD, entries[0].shape, places[HEAD]).to(torch.bfloat16)
        if not torch.equal(head, weights["embed"]):
            raise ValueError(
                f"{places[HEAD]}: {HEAD} differs from {EMBED}, but config.json has tie_word_embeddings true. "
                "Set it to false if the head is its own, or remove the head from the file."
            )
    return weights


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():  # the order in which `transformers` looks
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        seen = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX} (weight files seen: {', '.join(seen) or 'none'}). Pickles "
            "(*.bin, *.pt) are never loaded. Convert once, where you trust the file: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{folder / INDEX}: weight_map must map tensor names to file names")
    files = [folder / name for name in sorted(set(names.values()))]
    for file in files:
        if file.parent != folder or file.suffix != ".safetensors":
            raise ValueError(f"{folder / INDEX} names {str(file)!r}; *.safetensors in the same folder are wanted")
        if not file.is_file():
            raise ValueError(f"{file} is missing, but {INDEX} lists it. Was the download cut short? Fetch it again.")
    return files


def _open(file: Path) -> safe_open:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or not a safetensors file ({error}). Fetch it again.") from None


def _places(handles: Mapping[Path, safe_open], folder: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    places: dict[str, Path] = {}
    for file, handle in handles.items():
        for name in handle.keys():  # noqa: SIM118 - a safe_open is no mapping
            if name in places:
                raise ValueError(f"tensor {name} is in both {places[name]} and {file}; one is wanted")
            places[name] = file
    if not places:
        raise ValueError(f"the safetensors files in {folder} hold no tensors")
    return places


def _check_names(places: Mapping[str, Path], entries: list[Entry], head_too: bool, folder: Path) -> None:
    wanted = {entry.hf_name for entry in entries}
    missing = [entry.hf_name for entry in entries if entry.hf_name not in places]
    known = wanted | {HEAD} if head_too else wanted
    extra = [name for name in places if name not in known and not name.endswith(_IGNORED)]
    if missing:
        hint = ". If head and embedding are one, set tie_word_embeddings to true" if missing == [HEAD] else ""
        raise ValueError(
            f"{folder}: {len(missing)} tensors that config.json asks for are missing: {_some(missing)}{hint}. "
            f"Seen: {_some(list(places))}"
        )
    if extra:
        where = places[extra[0]]
        raise ValueError(
            f"{where}: {len(extra)} tensors that config.json gives no place: {_some(extra)}. Without them this would "
            "be another model; correct config.json (biases? tied head? number of layers?) or the file."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _read(handle: safe_open, name: str, shape: tuple[int, ...], file: Path) -> Tensor:
    header = handle.get_slice(name)
    dtype, seen = header.get_dtype(), tuple(header.get_shape())
    if dtype not in _DTYPES:
        raise ValueError(f"{file}: tensor {name} has dtype {dtype}; supported: {', '.join(_DTYPES)}")
    if seen != shape:
        raise ValueError(f"{file}: tensor {name} has shape {list(seen)}; config.json wants {list(shape)}")
    return handle.get_tensor(name)


def save_model(
    folder: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    source_folder: str | Path,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a Hugging Face folder that `transformers` loads; config and tokenizer come from `source_folder`.

    `weights` holds our parameters by name, BF16, on any device. The folder appears whole or not at all: it is written
    under another name beside its place and then renamed. Raises ValueError when `folder` is in use, when the source has
    no config.json, and when `weights` are not exactly the parameters of `config`.
    """
    folder, source = Path(folder), Path(source_folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; nothing is ever written over. Choose a new folder.")
    tree = read_json(source / "config.json")
    _check_weights(config, weights)
    partial = folder.absolute().parent / f".{folder.absolute().name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_shards(partial, config, weights, shard_bytes)
        (partial / "config.json").write_text(json.dumps(_config_json(tree, config), indent=2) + "\n")
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, partial / name)
        for file in partial.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _config_json(source: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The source's config.json with what saving changes: BF16 weights, and no pointer at code that is not copied."""
    architecture = next(name for name, family in ARCHITECTURES.items() if family == config.family)
    kept = {key: value for key, value in source.items() if key not in ("auto_map", "torch_dtype")}
    return kept | {
        "architectures": [architecture],
        "dtype": "bfloat16",
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _check_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    shapes = parameter_shapes(config)
    if shapes.keys() != weights.keys():
        missing, extra = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
        raise ValueError(f"weights do not fit the config: missing [{_some(missing)}], not known [{_some(extra)}]")
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape or weights[name].dtype != torch.bfloat16:
            seen = f"{weights[name].dtype} {list(weights[name].shape)}"
            raise ValueError(f"parameter {name} is {seen}; torch.bfloat16 {list(shape)} is wanted")


def _write_shards(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], shard_bytes: int) -> None:
    shards: list[list[Entry]] = [[]]
    room = shard_bytes
    for entry in hf_tensors(config):
        size = 2 * (entry.stop - entry.start) * (entry.columns or 1)
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(entry)
        room -= size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # A shard at a time: rows are views on the CPU and copies of one shard on a GPU.
        tensors = {e.hf_name: weights[e.name].detach()[e.start : e.stop].cpu().contiguous() for e in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # save_file leaves it readable by its owner alone
        weight_map |= {entry.hf_name: file for entry in shard}
    if len(shards) > 1:
        total = sum(tensor.numel() * 2 for tensor in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
