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
    """Prompt and completion so far, and what of them lies in the cache."""

    group: Group
    seed: int
    max_tokens: int
    tokens: list[int]
    forced: list[int] | None = None
    logprobs: list[float] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are cached
    blocks: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    preempted: int = 0

    @property
    def prompt_length(self) -> int:
        return len(self.group.prompt)

    @property
    def completion(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 right after joining a prefilled group."""
        return len(self.tokens) - self.computed

    def append(self, token: int, logprob: float, eos: frozenset[int]) -> None:
        """Take a sampled token; finish at an EOS id or at the length limit. A forced sequence ends with its tokens."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        length = len(self.tokens) - self.prompt_length
        if self.forced is not None:
            if length == len(self.forced):
                self.finish_reason = "length"
        elif token in eos:
            self.finish_reason = "stop"
        elif length == self.max_tokens:
            self.finish_reason = "length"
