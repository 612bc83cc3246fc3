"""From hidden states to the log-probability of a chosen token, and to the token: one path for sampling and training.

Problem: the sampler's log-probability and the trainer's come from a sum over the vocabulary; two orders give two numbers.
Temperature applied on one side only gives two policies.

Method: logits are an exact product, rounded once to FP32 and divided by the temperature; both sides start there.

    z = fp32(h W^T) / T        m = max z        e = exp(z - m) on the grid 2^-34        S = sum e, exact
    logprob(token) = fp32((z[token] - m) - log S)

Sampling inverts the cumulative sum of the same e, which are integers on their grid: with u in [0, 1) from the sequence's
own counter-based generator, the token is the first one whose cumulative sum exceeds u * S. Exact, whatever the batch.

Training asks for the loss's derivative by a chunk's log-probabilities while its logits are there, so they are made once.

Layout: hidden [R, H] BF16, head [V, H]. Rows are processed in chunks, so [R, V] never exists at once in training.
Given up: probabilities below 2^-35 of the most likely token's are zero; the vocabulary is at most 2^19.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl.kernels.exact import exact_product, left_operand, order_free_sum
from jetrl.kernels.gemm import Bf16Weight
from jetrl.kernels.memory import row_chunks

Slope = Callable[[Tensor, slice], Tensor]  # log-probabilities float32 [n] of some rows, which: d loss / d each, float32 [n]

_GRID_BITS = 34
_CHUNK_LOGITS = 1 << 24  # logits of one chunk: 128 MB in float64


@dataclass(slots=True, frozen=True)
class Distribution:
    """Next-token distributions of R rows."""

    logits: Tensor  # float32 [R, V], divided by the temperature
    weights: Tensor  # float64 [R, V], exp(logits - max)
    shift: Tensor  # float64 [R, 1], the largest logit
    log_sum: Tensor  # float64 [R, 1], log of the sum of weights on the grid

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of one token a row. tokens: int64 [R]. Returns float32 [R]."""
        chosen = self.logits.gather(1, tokens.unsqueeze(1)).double()
        return ((chosen - self.shift) - self.log_sum).squeeze(1).float()

    def entropy(self) -> Tensor:
        """Entropy of each row in nats, float64 [R]."""
        mean = self.logits.double().sub_(self.shift).mul_(self.weights).sum(1) / self.log_sum.squeeze(1).exp()
        return self.log_sum.squeeze(1) - mean


def distribution(hidden: Tensor, head: Bf16Weight, temperature: float) -> Distribution:
    """Distributions of rows. hidden: BF16 [R, H]; head: [V, H]; temperature above 0."""
    logits = exact_product(left_operand(hidden), head.gridded).float()
    logits.div_(logits.new_full((), temperature))  # a tensor, for IEEE division on a GPU too
    wide = logits.double()
    shift = wide.amax(1, keepdim=True)
    weights = wide.sub_(shift).exp_()
    return Distribution(logits, weights, shift, torch.log(order_free_sum(weights, _GRID_BITS)))


def logit_chunks(rows: int, vocabulary: int) -> list[slice]:
    """Slices of rows whose logits are held at once, in sampling and in training."""
    return row_chunks(rows, vocabulary, _CHUNK_LOGITS, at_least=1)


def chosen_logprobs(hidden: Tensor, head: Bf16Weight, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of one token a row, and the entropy. Returns float32 [R], float64 [R]."""
    logprobs = torch.empty(hidden.shape[0], dtype=torch.float32)
    entropy = torch.empty(hidden.shape[0], dtype=torch.float64)
    for part in logit_chunks(hidden.shape[0], head.value.shape[0]):
        rows = distribution(hidden[part], head, temperature)
        logprobs[part] = rows.logprobs(tokens[part])
        entropy[part] = rows.entropy()
    return logprobs, entropy


def chosen_logprobs_with_grad(
    slope: Slope, hidden: Tensor, head: Bf16Weight, tokens: Tensor, temperature: float, accumulator: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`chosen_logprobs`, and the gradient towards hidden, BF16 [R, H], of a loss whose derivative by the log-probabilities
    `slope` knows; the head's is added to `accumulator` [V, H].

    dlogits = slope * (onehot(token) - softmax) / T, chunk by chunk, in float64. Rows with zero gradient cost no product.
    """
    logprobs = torch.empty(hidden.shape[0], dtype=torch.float32)
    entropy = torch.empty(hidden.shape[0], dtype=torch.float64)
    dhidden = torch.zeros_like(hidden)
    wide_head = head.value.double()
    for part in logit_chunks(hidden.shape[0], head.value.shape[0]):
        rows = distribution(hidden[part], head, temperature)
        logprobs[part], entropy[part] = rows.logprobs(tokens[part]), rows.entropy()
        dlogprobs = slope(logprobs[part], part)
        active = dlogprobs.nonzero().squeeze(1)
        index = active + part.start
        scale = (dlogprobs[active].double() / temperature).unsqueeze(1)
        dlogits = rows.weights[active].mul_(-scale / rows.log_sum[active].exp())
        dlogits.scatter_add_(1, tokens[index].unsqueeze(1), scale)
        dhidden[index] = (dlogits @ wide_head).to(torch.bfloat16)
        if accumulator is not None:
            accumulator.add_((dlogits.t() @ hidden[index].double()).to(accumulator.dtype))
    return logprobs, entropy, dhidden


def sample(rows: Distribution, uniform: Tensor) -> Tensor:
    """One token a row by inversion. uniform: float64 [R] in [0, 1), multiples of 2^-53. Returns int64 [R]."""
    integers = (rows.weights * 2.0**_GRID_BITS).round_().to(torch.int64)
    cumulative = integers.cumsum(1)
    total = cumulative[:, -1:]
    target = torch.minimum((uniform.unsqueeze(1) * total.double()).long(), total - 1)
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return drawn.clamp_(max=cumulative.shape[1] - 1)  # beyond the vocabulary only where logits are NaN


def greedy(rows: Distribution) -> Tensor:
    """The most likely token of each row, the first one of equals. Returns int64 [R]."""
    return rows.logits.argmax(1)
