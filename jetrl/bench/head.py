"""From hidden states to log-probabilities of chosen tokens, against BF16 torch, with the memory that each takes.

    sampling    64 and 256 rows; `with drawing` also draws the token
    training    forward alone, and with both gradients as a training step makes them: logits once, the head's added in FP32

Baseline: BF16 logits by cuBLAS, log_softmax and gather in FP32, cut into chunks of rows as ours are; its gradient of the logits
comes from autograd, and it multiplies as ours does. Ours keeps FP32 logits and sums in a fixed order.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from jetrl.bench.table import Row, Table
from jetrl.bench.timing import Call, Ceilings, measure, noise, peak_bytes, rotation
from jetrl.kernels.ops import Ops
from jetrl.model.config import ModelConfig

SAMPLING = (64, 256)


def head_bound(config: ModelConfig, rows: int, ceilings: Ceilings, backward: bool) -> float:
    """Roofline, us: the head read once, hidden states once; with gradients three products and an FP32 accumulator."""
    product = 2.0 * rows * config.vocab_size * config.hidden_size
    weights, states = config.vocab_size * config.hidden_size, rows * config.hidden_size
    size = 10 * weights + 4 * states if backward else 2 * weights + 2 * states
    return ceilings.roofline(size, bf16=product * (3 if backward else 1))


def head_row(
    config: ModelConfig,
    case: str,
    rows: int,
    times: dict[str, float],
    peaks: dict[str, int],
    ceilings: Ceilings,
    backward: bool,
) -> Row:
    """times, peaks: `ours`, `torch`; times may hold `drawing` too."""
    extra: dict[str, float | str] = {"peak, MB": peaks["ours"] / 1e6, "torch peak, MB": peaks["torch"] / 1e6}
    if "drawing" in times:
        extra["with drawing"] = times["drawing"]
    bound = head_bound(config, rows, ceilings, backward)
    return Row(case, times["ours"], times["torch"], bound, extra=extra)


def plain_logprobs(hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [R] in plain torch."""
    from jetrl.kernels.hopper.logprob import row_slices

    return torch.cat([
        torch.log_softmax(torch.mm(hidden[part], head.t()), -1, dtype=torch.float32).gather(1, tokens[part, None])[:, 0]
        for part in row_slices(hidden.shape[0])
    ])  # fmt: skip


def plain_logprobs_grad(dlogprobs: Tensor, hidden: Tensor, head: Tensor, tokens: Tensor, accumulator: Tensor) -> Tensor:
    """Gradient towards hidden in plain torch; the head's is added to `accumulator`."""
    from jetrl.kernels.hopper.logprob import add_product, row_slices

    dhidden = torch.empty_like(hidden)
    for part in row_slices(hidden.shape[0]):
        logits = torch.mm(hidden[part], head.t()).requires_grad_()
        logprobs = torch.log_softmax(logits, -1, dtype=torch.float32).gather(1, tokens[part, None])[:, 0]
        (dlogits,) = torch.autograd.grad(logprobs, logits, dlogprobs[part])
        torch.mm(dlogits, head, out=dhidden[part])
        add_product(accumulator, dlogits.t(), hidden[part])
        del logits, logprobs, dlogits  # before the next chunk's
    return dhidden


def _sampling(ops: Ops, config: ModelConfig, rows: int, ceilings: Ceilings) -> Row:
    sides: dict[str, list[Call]] = {"ours": [], "torch": [], "drawing": []}
    for _ in range(rotation(2 * config.vocab_size * config.hidden_size)):
        hidden, w = _hidden(config, rows), _head(config)
        head = ops.weight(w, (config.vocab_size,), False, None)
        tokens = torch.randint(config.vocab_size, (rows,), device=w.device)
        uniforms = torch.rand(rows, dtype=torch.float64, device=w.device)
        sides["ours"].append(partial(ops.chosen_logprobs, hidden, head, tokens, 1.0))
        sides["torch"].append(partial(plain_logprobs, hidden, w, tokens))
        sides["drawing"].append(partial(ops.next_tokens, hidden, head, uniforms, torch.full_like(tokens, -1), 1.0))
    times = measure(sides, graph=True)
    peaks = {side: peak_bytes(calls[0]) for side, calls in sides.items()}
    return head_row(config, f"sampling, {rows} rows", rows, times, peaks, ceilings, backward=False)


def _hidden(config: ModelConfig, rows: int) -> Tensor:
    return noise(rows, config.hidden_size)


def _head(config: ModelConfig) -> Tensor:
    return noise(config.vocab_size, config.hidden_size, scale=config.hidden_size**-0.5)


def _training(ops: Ops, config: ModelConfig, rows: int, ceilings: Ceilings) -> list[Row]:
    hidden, w = _hidden(config, rows), _head(config)
    head = ops.weight(w, (config.vocab_size,), False, None)
    tokens, dlogprobs = torch.randint(config.vocab_size, (rows,), device=w.device), torch.randn(rows, device=w.device)
    accumulator = torch.zeros(w.shape, device=w.device)
    both: dict[str, dict[str, Call]] = {
        "forward": {
            "ours": partial(ops.chosen_logprobs, hidden, head, tokens, 1.0),
            "torch": partial(plain_logprobs, hidden, w, tokens),
        },
        "forward and gradients": {
            "ours": partial(
                ops.chosen_logprobs_with_grad, lambda _, part: dlogprobs[part], hidden, head, tokens, 1.0, accumulator
            ),
            "torch": partial(plain_logprobs_grad, dlogprobs, hidden, w, tokens, accumulator),
        },
    }
    out = []
    for name, sides in both.items():
        times = measure({side: [call] for side, call in sides.items()}, graph=False)
        peaks = {side: peak_bytes(call) for side, call in sides.items()}
        out.append(head_row(config, f"training {name}, {rows} rows", rows, times, peaks, ceilings, name != "forward"))
    return out


def bench(config: ModelConfig, tokens: int, ceilings: Ceilings, judged: bool) -> list[Table]:
    """Measure. There is no target for the head, judged or not."""
    from jetrl.kernels.hopper.ops import HopperOps

    ops = HopperOps(torch.device("cuda"))
    rows = [_sampling(ops, config, r, ceilings) for r in SAMPLING]
    rows += _training(ops, config, tokens, ceilings)
    return [Table(f"head: vocabulary {config.vocab_size}", rows, "ours", "BF16 torch")]
