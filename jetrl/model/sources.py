"""Where models come from: a name on the command line becomes a folder on this machine.

Imports no torch. Of a hub repository only safetensors, JSON and tokenizer files are fetched: no pickles, no code. Who asks for
sizes and tokenizer alone gets no weights.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import jetrl

WEIGHTS = "*.safetensors"
HUB_FILES = ["*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
HUB_SKIPPED = ["*/*", "consolidated*"]  # copies in other layouts
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cache_folder() -> Path:
    """Where fetched models are kept: $JETRL_CACHE, else $XDG_CACHE_HOME/jetrl, else ~/.cache/jetrl."""
    if own := os.environ.get("JETRL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jetrl"


def smollm2_folder() -> Path:
    """Where `jetrl fetch smollm2` puts the converted model."""
    return cache_folder() / "SmolLM2-135M-Instruct"


def resolve_model(name: str | Path, weights: bool = True) -> Path:
    """The model folder for `demo`, `smollm2`, a folder path, or a hub id `organisation/name` (fetched on first use).

    A folder that exists wins over a hub id, whose weights are fetched only with `weights`. Raises ValueError that says what was
    looked for and what to do.
    """
    text = str(name)
    if text == "demo":
        return _existing(Path(jetrl.__file__).parent / "assets" / "demo", "the demo model", "Install jetrl again.")
    if text == "smollm2":
        return _existing(smollm2_folder(), "SmolLM2-135M-Instruct", "Fetch it once (93 MB): jetrl fetch smollm2")
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(text):
        raise ValueError(f"no model folder at {text!r}; give a folder, `demo`, `smollm2`, or a hub id (Qwen/Qwen3-0.6B)")
    return _from_hub(text, [*HUB_FILES, WEIGHTS] if weights else HUB_FILES)


def _existing(folder: Path, what: str, otherwise: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{what} is not in {folder}. {otherwise}")
    return folder


def _from_hub(name: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:  # every error of the hub client (not found, gated, offline) is an OSError or a ValueError
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=HUB_SKIPPED))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{name!r} is no folder here, and fetching it as a hub id failed ({type(error).__name__}: {reason}). "
            "Check the name and the network, or give the path of a folder."
        ) from error
