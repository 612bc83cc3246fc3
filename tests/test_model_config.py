"""Reading config.json: what `transformers` reads from the same file is the oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl.model.config import RopeScaling, read_config

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def write(folder: Path, family: str = "llama", generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A config.json with the keys that have no default, and `changes`."""
    tree = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": 263,
        "hidden_size": 128,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(tree))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def assert_as_transformers(folder: Path) -> None:
    from transformers import AutoConfig

    ours, theirs = read_config(folder), AutoConfig.from_pretrained(folder)
    assert ours.family == theirs.model_type
    assert (ours.vocab_size, ours.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (ours.intermediate_size, ours.num_layers) == (theirs.intermediate_size, theirs.num_hidden_layers)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours.rope_scaling is not None) == (theirs.rope_parameters["rope_type"] == "llama3")
    window = theirs.sliding_window if hasattr(theirs, "sliding_window") else None
    assert ours.max_position_embeddings == min(theirs.max_position_embeddings, window or 10**9)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    eos = theirs.eos_token_id
    assert list(ours.eos_token_ids) == (eos if isinstance(eos, list) else [] if eos is None else [eos])
    assert (ours.bos_token_id, ours.pad_token_id) == (theirs.bos_token_id, theirs.pad_token_id)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    assert_as_transformers(write(tmp_path, family))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_given(tmp_path: Path, family: str) -> None:
    keys = {
        "num_key_value_heads": 8,
        "head_dim": 24,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "max_position_embeddings": 777,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "eos_token_id": [3, 5],
        "bos_token_id": 4,
        "pad_token_id": 0,
    }
    assert_as_transformers(write(tmp_path, family, **keys))
    config = read_config(tmp_path)
    assert (config.q_size, config.kv_size) == (32 * 24, 8 * 24)
    assert config.qk_norm == (family == "qwen3")
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (family == "qwen2", False, False)


def test_null_heads_mean_one_for_each_query_head(tmp_path: Path) -> None:
    assert_as_transformers(write(tmp_path, "llama", num_key_value_heads=None, head_dim=None))
    assert read_config(tmp_path).num_kv_heads == 32


def test_biases(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, "llama", attention_bias=True, mlp_bias=True))
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, True, True)
    config = read_config(write(tmp_path, "qwen3", attention_bias=True))
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, True, False)
    config = read_config(write(tmp_path, "mistral", attention_bias=True))
    assert not config.attention_bias


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_llama3_rope_in_each_spelling(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert_as_transformers(write(tmp_path, **keys))
    config = read_config(tmp_path)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


def test_default_rope_in_each_spelling(tmp_path: Path) -> None:
    for keys in ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 1e6}}):
        config = read_config(write(tmp_path, "qwen2", **keys))
        assert (config.rope_theta, config.rope_scaling) == (1e6, None)


def test_eos_ids_come_from_generation_config_first(tmp_path: Path) -> None:
    folder = write(tmp_path, eos_token_id=7, generation={"eos_token_id": [9, 7, 9]})
    assert read_config(folder).eos_token_ids == (9, 7)
    write(tmp_path, eos_token_id=7, generation={"temperature": 0.6})
    assert read_config(folder).eos_token_ids == (7,)
    write(tmp_path, eos_token_id=None, pad_token_id=-1)
    assert (read_config(folder).eos_token_ids, read_config(folder).pad_token_id) == ((), None)


def test_sliding_window_limits_the_context_and_says_so(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, "mistral", max_position_embeddings=1000, sliding_window=300))
    assert config.max_position_embeddings == 300
    assert "300" in config.notes[0]
    assert "1000" in config.notes[0]
    config = read_config(write(tmp_path, "mistral", max_position_embeddings=1000, sliding_window=1000))
    assert (config.max_position_embeddings, config.notes) == (1000, ())
    window: dict[str, Any] = {"max_position_embeddings": 1000, "sliding_window": 300}
    assert read_config(write(tmp_path, "qwen2", **window)).max_position_embeddings == 1000
    assert read_config(write(tmp_path, "qwen2", use_sliding_window=True, **window)).max_position_embeddings == 300


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the model folder was run')")
    assert read_config(write(tmp_path, auto_map={"AutoConfig": "evil.Config"})).family == "llama"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None, "model_type": "gpt2"}, ["gpt2", "LlamaForCausalLM"]),
        ({"architectures": [["LlamaForCausalLM"]]}, ["supported"]),
        ({"num_local_experts": 8}, ["num_local_experts", "8", "dense"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq", "BF16"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["linear", "llama3"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ["yarn", "llama3"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor", "None"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"hidden_size": 100}, ["100", "32", "head_dim"]),
        ({"hidden_size": "128"}, ["hidden_size", "'128'", "positive integer"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"head_dim": 5}, ["head_dim", "5", "even"]),
        ({"num_key_value_heads": 5}, ["32", "5", "multiple"]),
        ({"rms_norm_eps": 0.0}, ["rms_norm_eps", "0.0"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ({"eos_token_id": 263}, ["eos_token_id", "263", "vocab_size"]),
    ],
)
def test_refusals_name_what_was_seen_and_what_is_supported(tmp_path: Path, changes: dict, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as error:
        read_config(write(tmp_path, **changes))
    assert [word for word in words if word not in str(error.value)] == []


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model folder"):
        read_config(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        read_config(tmp_path)
    for text, words in (("{", "not valid JSON"), ("[1]", "holds a list"), ("\x00", "not valid JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_config(tmp_path)
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON"):
        read_config(tmp_path)


def test_import_is_light() -> None:
    code = "import sys, jetrl.model.config, jetrl.model.sources;sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
