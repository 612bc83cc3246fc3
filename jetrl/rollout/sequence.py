"""The sequences that run for a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from jetrl.rl.types import FinishReason


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one request. They share the prompt's blocks, and its last hidden state, once it is prefilled."""

    prompt: list[int]
    waiting: int  # sequences not admitted yet
    prefilling: bool = False  # one of them is computing the prompt; the others wait for it
    blocks: list[int] = field(default_factory=list)  # references held for the ones that wait
    hidden: Tensor | None = None  # BF16 [H], the prompt's last hidden state


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and completion so far, and what of them lies in the cache.

    Tokens that the device has sampled and the host has not seen yet are `pending`: they count in `length`.
    """

    group: Group
    seed: int
    max_tokens: int
    tokens: list[int]
    forced: list[int] | None = None
    logprobs: list[float] = field(default_factory=list)
    pending: int = 0
    computed: int = 0  # tokens whose keys and values are cached, or will be by what is under way
    blocks: list[int] = field(default_factory=list)
    lane: int = -1  # its row on the device while it runs
    tabled: int = 0  # blocks that the device knows of
    finish_reason: FinishReason | None = None
    preempted: int = 0

    @property
    def prompt_length(self) -> int:
        return len(self.group.prompt)

    @property
    def completion(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def limit(self) -> int:
        """Completion tokens at which it ends, if no EOS comes before."""
        return self.max_tokens if self.forced is None else len(self.forced)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion, the pending ones included."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 right after joining a prefilled group."""
        return self.length - self.computed

    @property
    def exhausted(self) -> bool:
        """Whether it needs no further step: it ended, or reaches its limit with what is under way."""
        return self.finish_reason is not None or self.length - self.prompt_length >= self.limit

    def forced_token(self) -> int:
        """The token to take next instead of a sampled one, or -1."""
        return -1 if self.forced is None else self.forced[self.length - self.prompt_length]

    def append(self, token: int, logprob: float, eos: frozenset[int]) -> None:
        """Take a sampled token; finish at an EOS id or at the length limit. A forced sequence ends with its tokens."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.forced is None and token in eos:
            self.finish_reason = "stop"
        elif len(self.tokens) - self.prompt_length == self.limit:
            self.finish_reason = "length"
