"""Small random Hugging Face model folders of each family, for everybody's tests.

No size is divisible by 128, norms are not one and biases are not zero, so a dropped or swapped tensor changes the
logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCAB = 263  # 256 bytes and 7 special tokens

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 144,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": [257, 258],
    "pad_token_id": 257,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"rope_parameters": _LLAMA3}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 40}),
}


def hf_config(family: str, **changes: Any) -> Any:
    """A `transformers` config: llama with llama3 rope, mistral without a window, qwen2, qwen3 with its own head_dim."""
    kind, own = _KINDS[family]
    return kind(**{**_SIZES, **own, **changes})


def random_model(family: str, *, tied: bool = False, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A BF16 model with weights that depend on `seed` alone; `changes` go to its config."""
    config = hf_config(family, tie_word_embeddings=tied, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            value = 1.0 + 0.2 * noise if "norm" in name else (0.3 if name.endswith("bias") else 0.08) * noise
            parameter.copy_(value)
    return model.eval()


def save_random_model(
    folder: str | Path, family: str, *, tied: bool = False, seed: int = 0, tokenizer: bool = True, **changes: Any
) -> Path:
    """Write `random_model` and, if wanted, a byte tokenizer with a chat template into `folder`; returns the folder."""
    random_model(family, tied=tied, seed=seed, **changes).save_pretrained(str(folder))
    if tokenizer:
        save_byte_tokenizer(folder)
    return Path(folder)


def save_byte_tokenizer(folder: str | Path) -> None:
    """A tokenizer of 256 bytes, <s> 256, </s> 257, <end> 258, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = ["<s>", "</s>", "<end>"]
    core = Tokenizer(models.BPE(vocab=vocab | {token: 256 + i for i, token in enumerate(special)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    tokenizer.save_pretrained(str(folder))


def logits(folder: str | Path, tokens: int = 24, seed: int = 1) -> torch.Tensor:
    """Logits [1, tokens, vocab] of `transformers` for random ids."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).eval()
    ids = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(ids).logits
