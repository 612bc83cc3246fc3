"""Tokens drawn from hidden states, with uniform numbers that belong to the sample and not to the batch (`rl.seeds`)."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.model.transformer import Transformer


def next_tokens(
    model: Transformer, hidden: Tensor, uniforms: list[float], temperature: float, forced: list[int | None]
) -> tuple[list[int], list[float]]:
    """Tokens after hidden states [R, H] and their log-probabilities, each exactly a float32.

    Temperature 0 takes the most likely token, with its log-probability at temperature 1. Where `forced` holds a token, that
    one is taken. Raises ValueError for logits that are not finite.
    """
    drawn = torch.tensor(uniforms, dtype=torch.float64)
    wanted = torch.tensor([-1 if token is None else token for token in forced])
    tokens, logprobs = model.next_tokens(hidden, drawn, wanted, temperature)
    if not torch.isfinite(logprobs).all():
        raise ValueError(
            "the model's logits are not finite, so nothing can be sampled from them. Its weights hold a NaN, an infinity "
            "or values beyond BF16; load another checkpoint."
        )
    return tokens.tolist(), logprobs.tolist()
