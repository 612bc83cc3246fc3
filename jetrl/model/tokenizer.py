"""The tokenizer of a model folder, and the ids that end a completion.

Thin on purpose: `transformers` does the work, code inside the folder is never run, and tokens are decided once, here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jetrl.model.config import ModelConfig, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of these must be there


def load_tokenizer(folder: str | Path, config: ModelConfig | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer (and chat template) of a model folder; with `config`, check that its ids fit the embedding.

    Raises ValueError when the files are missing or broken, or when the tokenizer makes ids that the model lacks.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no tokenizer; one of {', '.join(TOKENIZER_FILES)} is wanted beside config.json")
    if (folder / "tokenizer.json").is_file():
        read_json(folder / "tokenizer.json")  # names the file when it is cut short; the library does not
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ValueError(f"the tokenizer in {folder} does not load: {error}") from error
    if config is not None and len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} makes {len(tokenizer)} ids, but the model has vocab_size {config.vocab_size}; "
            "tokenizer and weights are of different models"
        )
    return tokenizer


def stop_token_ids(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a completion: those of generation_config.json or config.json, then the tokenizer's own EOS.

    Raises ValueError when there is none, for then each completion would run to its length limit.
    """
    own = tokenizer.eos_token_id
    ids = config.eos_token_ids
    if isinstance(own, int) and own not in ids:
        ids = (*ids, own)
    if not ids:
        raise ValueError(
            "neither config.json, generation_config.json nor the tokenizer names an EOS token; "
            'add "eos_token_id" to generation_config.json'
        )
    return ids
