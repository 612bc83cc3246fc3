"""The base model that ships with the package: its size and format, its tokenizer, its corpus rule, and that it can do sums."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "jetrl" / "assets" / "demo"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pretrain_demo", ROOT / "examples" / "pretrain_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_size_and_format(model) -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8 * 2**20
    assert {file.suffix for file in FOLDER.iterdir()} <= {".json", ".safetensors", ".md"}  # no pickles, no code
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 4_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert (config["hidden_size"] % 128, config["intermediate_size"] % 128) == (64, 0)
    assert "auto_map" not in config


def test_weights_are_bfloat16_and_tied_once() -> None:
    from safetensors import safe_open

    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_tokenizer_round_trip(tokenizer) -> None:
    text = "\n" + "".join(map(chr, range(32, 127))) + "  12-47=-35 \n\n x"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == len(text) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 4
    assert tokenizer("é", add_special_tokens=False)["input_ids"] == [tokenizer.unk_token_id]


def test_chat_template_is_a_document(tokenizer) -> None:
    asked = [{"role": "user", "content": "47+38="}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer("47+38=")["input_ids"]
    answered = [*asked, {"role": "assistant", "content": "85"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == "<|bos|>47+38=85<|eos|>"


def test_shipped_tokenizer_is_the_scripts(script: ModuleType, tokenizer) -> None:
    assert script.build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_worked_lines_end_with_the_answer(script: ModuleType) -> None:
    rng = random.Random(3)
    assert script.worked(47, "+", 38, 0.0, rng) == "7+8=15;4+3+1=8;85"
    assert script.worked(37, "-", 52, 0.0, rng) == "12-7=5;5-3-1=1;-15"
    for _ in range(2000):
        a, op, b = script.draw_problem(rng)
        assert script.answer_of(script.worked(a, op, b, 0.0, rng)) == script.result_of(a, op, b)
        assert script.answer_of(script.direct(a, op, b, 1.0, rng)) != script.result_of(a, op, b)


def test_corpus_is_deterministic_and_holds_out_a_tenth(script: ModuleType) -> None:
    corpus = list(islice(script.documents(0, script.Habits()), 5000))
    assert corpus == list(islice(script.documents(0, script.Habits()), 5000))
    lines = [line for text, _ in corpus for line in text.split("\n")]
    assert not any(script.is_held_out(line.split("=")[0] + "=") for line in lines)
    every = [f"{a}+{b}=" for a in range(100) for b in range(100)]
    assert 0.08 < sum(map(script.is_held_out, every)) / len(every) < 0.12


def test_greedy_answers(script: ModuleType, model, tokenizer) -> None:
    """Without sampling noise most of 64 held-out two-digit problems are right (0.92 of 512 when the model was made)."""
    problems = [p for op in "+-" for p in script.held_out_questions(op, (2, 2), 32)]
    texts = script.complete(model, tokenizer, [question for question, _ in problems], 0.0)
    right = [script.answer_of(text) == answer for text, (_, answer) in zip(texts, problems, strict=True)]
    assert sum(right) / len(right) >= 0.8
