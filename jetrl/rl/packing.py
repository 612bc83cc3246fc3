"""From rollouts to microbatches: sequences laid end to end, no padding.

A microbatch holds at most `budget` input tokens. Sequences are placed longest first, each where the least room remains
(best-fit decreasing, at most about 11/9 of the fewest microbatches possible); then they are dealt again to that many
microbatches, each to the lightest, which evens out the load and is kept if it stays within the budget. Only the
grouping is decided here: the loss weights come from the whole batch, so the gradient does not depend on it.

Worked example of `build`, one sequence: prompt p = [5, 6, 7] (P = 3), completion c = [8, 9] (C = 2).

    index              0    1    2    3
    token_ids          5    6    7    8        p + c[:-1], P + C - 1 tokens; 9 is predicted, never an input
    positions          0    1    2    3
    predicts           6    7    8    9
    loss_mask          -    -    x    x        the next token is a completion token
    rows                         2    3        P - 1 .. P + C - 2: where to take hidden states
    targets                      8    9        the completion, with its logprobs, advantage and weight

A second sequence starts at index 4 with position 0, and cu_seqlens is [0, 4, ...].
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from jetrl.rl.types import Rollout


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group sequence indices into microbatches of at most `budget` tokens.

    Each index occurs once, ascending within its microbatch; microbatches are ordered by their first index. A sequence
    longer than the budget has a microbatch of its own. The result depends on the arguments alone. Raises ValueError for
    a budget below 1 or a negative length.
    """
    if budget < 1 or min(lengths, default=0) < 0:
        raise ValueError(f"budget is {budget}, want 1 or more; lengths {list(lengths)}, want none negative")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    alone = [[i] for i in order if lengths[i] > budget]
    rest = order[len(alone) :]
    tight = _best_fit(lengths, rest, budget)
    even = _deal(lengths, rest, len(tight))
    fits = all(sum(lengths[i] for i in batch) <= budget for batch in even)
    return sorted(sorted(batch) for batch in alone + (even if fits else tight))


def _best_fit(lengths: Sequence[int], order: list[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens free, batch), sorted
    for i in order:
        at = bisect_left(room, (lengths[i], -1))
        if at == len(room):
            batches.append([])
            free, batch = budget, len(batches) - 1
        else:
            free, batch = room.pop(at)
        batches[batch].append(i)
        insort(room, (free - lengths[i], batch))
    return batches


def _deal(lengths: Sequence[int], order: list[int], count: int) -> list[list[int]]:
    batches: list[list[int]] = [[] for _ in range(count)]
    load = [(0, b) for b in range(count)]  # a heap already
    for i in order:
        tokens, batch = load[0]
        batches[batch].append(i)
        heapq.heapreplace(load, (tokens + lengths[i], batch))
    return [batch for batch in batches if batch]


def input_length(rollout: Rollout) -> int:
    """Tokens that the trainer's forward pass reads: P + C - 1, or 0 for an empty completion, which is left out."""
    completion = len(rollout.completion.token_ids)
    return len(rollout.prompt.token_ids) + completion - 1 if completion else 0


@dataclass(slots=True)
class Packed:
    """One microbatch: T input tokens, S sequences, N completion tokens. The module's docstring has a worked example."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each sequence
    cu_seqlens: Tensor  # [S + 1] int32: sequence s is token_ids[cu_seqlens[s] : cu_seqlens[s + 1]]
    loss_mask: Tensor  # [T] bool: the next token is a completion token
    rows: Tensor  # [N] int64, ascending: the indices where loss_mask is True
    targets: Tensor  # [N] int64: the completion token that each row predicts
    behavior_logprobs: Tensor  # [N] float32: the engine's, to the bit
    advantages: Tensor  # [N] float32
    weights: Tensor  # [N] float64: of each token in the batch loss
    sequence: Tensor  # [N] int64 in 0 .. S - 1
    policy_versions: Tensor  # [S] int64: of the rollout's weights
    rollouts: list[int]  # S indices into the rollouts given to `build`
    longest: int  # tokens of the longest sequence, 0 if there is none
    empty: int  # rollouts left out because their completion has no tokens

    def to(self, device: torch.device | str) -> Packed:
        """The same microbatch with all tensors on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)})


def build(rollouts: Sequence[Rollout], indices: Sequence[int], weights: Sequence[float]) -> Packed:
    """Lay rollouts[i] for i in `indices` end to end; weights[i], of `token_weights`, is for each token of rollouts[i].

    Empty completions are left out and counted; if all are empty, T = S = N = 0. Raises ValueError for an empty prompt,
    for a completion whose logprobs and tokens differ in number, and for a number of weights other than of rollouts.
    """
    if len(weights) != len(rollouts):
        raise ValueError(f"{len(weights)} weights for {len(rollouts)} rollouts; give one per rollout of the batch")
    kept = [i for i in indices if rollouts[i].completion.token_ids]
    tokens: list[int] = []
    positions: list[int] = []
    starts, rows, targets, logprobs = [0], [], [], []
    for i in kept:
        prompt, completion = rollouts[i].prompt.token_ids, rollouts[i].completion
        _check(i, prompt, completion.token_ids, completion.logprobs)
        first = len(tokens) + len(prompt) - 1
        rows += range(first, first + len(completion.token_ids))
        tokens += prompt + completion.token_ids[:-1]
        positions += range(len(tokens) - starts[-1])
        starts.append(len(tokens))
        targets += completion.token_ids
        logprobs += completion.logprobs
    counts = torch.tensor([len(rollouts[i].completion.token_ids) for i in kept], dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(kept)), counts)
    loss_mask = torch.zeros(len(tokens), dtype=torch.bool)
    row_index = torch.tensor(rows, dtype=torch.int64)
    loss_mask[row_index] = True
    return Packed(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        loss_mask=loss_mask,
        rows=row_index,
        targets=torch.tensor(targets, dtype=torch.int64),
        behavior_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor([rollouts[i].advantage for i in kept], dtype=torch.float32)[sequence],
        weights=torch.tensor([weights[i] for i in kept], dtype=torch.float64)[sequence],
        sequence=sequence,
        policy_versions=torch.tensor([rollouts[i].completion.policy_version for i in kept], dtype=torch.int64),
        rollouts=kept,
        longest=max((input_length(rollouts[i]) for i in kept), default=0),
        empty=len(indices) - len(kept),
    )


def _check(index: int, prompt: list[int], completion: list[int], logprobs: list[float]) -> None:
    if not prompt:
        raise ValueError(f"rollout {index} has an empty prompt; a token, BOS say, must precede the completion")
    if len(logprobs) != len(completion):
        raise ValueError(f"rollout {index} has {len(completion)} completion tokens, {len(logprobs)} logprobs; want equal")
