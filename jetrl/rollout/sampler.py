"""Tokens drawn from hidden states, with uniform numbers that belong to the sample and not to the batch (`rl.seeds`)."""

from __future__ import annotations

import torch
from torch import Tensor

from jetrl.kernels.logprob import greedy, logit_chunks, sample
from jetrl.model.transformer import Transformer


def next_tokens(
    model: Transformer, hidden: Tensor, uniforms: list[float], temperature: float, forced: list[int | None]
) -> tuple[list[int], list[float]]:
    """Tokens after hidden states [R, H] and their log-probabilities, each exactly a float32.

    Temperature 0 takes the most likely token, with its log-probability at temperature 1. Where `forced` holds a token, that
    one is taken. Raises ValueError for logits that are not finite.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    for part in logit_chunks(hidden.shape[0], model.config.vocab_size):
        rows = model.distribution(hidden[part], temperature or 1.0)
        if not torch.isfinite(rows.log_sum).all():
            raise ValueError(
                "the model's logits are not finite, so nothing can be sampled from them. Its weights hold a NaN, an infinity "
                "or values beyond BF16; load another checkpoint."
            )
        drawn = sample(rows, torch.tensor(uniforms[part], dtype=torch.float64)) if temperature else greedy(rows)
        wanted = [drawn_token if f is None else f for drawn_token, f in zip(drawn.tolist(), forced[part], strict=True)]
        tokens += wanted
        logprobs += rows.logprobs(torch.tensor(wanted)).tolist()
    return tokens, logprobs
