"""Prompts for the engine, and the order in which a run meets them.

Problem: an overlong prompt must not crash step 300 or be cut in silence; and a resumed run must meet the same problems
as the unbroken one. Method: all prompts are tokenized when the run starts, the overlong ones left out and counted; the
order is a pure function of seed and step, so there is no position to save. Given up: tokenizing takes a second or so
for 10,000 prompts.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jetrl.config import TaskConfig
from jetrl.rl.types import Problem, Prompt
from jetrl.tasks.base import Task


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool) -> Any: ...


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """What became of the problems given to `build_prompts`."""

    kept: int
    overlong: int  # longer than task.max_prompt_tokens, left out
    longest: int  # tokens of the longest prompt seen, left out or not


def build_prompts(
    task: Task, problems: Sequence[Problem], tokenizer: Tokenizer, config: TaskConfig
) -> tuple[list[Prompt], PromptCounts]:
    """Tokenize problems, in their order; prompts of more than `config.max_prompt_tokens` tokens are left out.

    Raises ValueError when no prompt remains, when a chat prompt is wanted of a tokenizer without a chat template, when
    a chat template drops worked examples, and when the tokenizer puts EOS behind a raw prompt or makes no tokens of
    one.
    """
    if task.template == "chat" and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "task.template is 'chat', but the model's tokenizer has no chat template. Use task.template=raw, or a "
            "model folder with chat_template.jinja or a chat_template in tokenizer_config.json."
        )
    prompts: list[Prompt] = []
    longest = 0
    for number, problem in enumerate(problems):
        text, ids = _encode(task, problem, tokenizer, check=number == 0)
        longest = max(longest, len(ids))
        if len(ids) <= config.max_prompt_tokens:
            prompts.append(Prompt(problem, text, ids))
    if not prompts:
        raise ValueError(
            f"task {task.name}: no prompt is left of {len(problems)}. task.max_prompt_tokens is "
            f"{config.max_prompt_tokens}, the longest prompt has {longest} tokens. Raise max_prompt_tokens, lower "
            f"task.shots ({len(task.examples)}), or give other data."
        )
    return prompts, PromptCounts(len(prompts), len(problems) - len(prompts), longest)


def _encode(task: Task, problem: Problem, tokenizer: Tokenizer, check: bool) -> tuple[str, list[int]]:
    content = task.prompt_text(problem)
    if isinstance(content, str):
        text, ids = content, list(tokenizer.encode(content, add_special_tokens=True))
        if ids and ids[-1] == getattr(tokenizer, "eos_token_id", None):
            raise ValueError(
                f"the tokenizer ends the prompt {content[-40:]!r} with its EOS token {ids[-1]}, so the model "
                "would begin a new text. Set add_eos_token to false in tokenizer_config.json."
            )
    else:
        text = tokenizer.apply_chat_template(content, add_generation_prompt=True, tokenize=False)
        missing = [m["content"] for m in content if m["content"].strip() not in text] if check else []
        if missing:
            raise ValueError(
                f"the chat template drops or changes a message of the prompt: {missing[0][:80]!r} is not in "
                "its text. Use task.shots=0, task.template=raw, or another chat template."
            )
        # The template writes BOS itself where the model wants one; special tokens here would make two.
        ids = list(tokenizer.encode(text, add_special_tokens=False))
    if not ids:
        raise ValueError(f"task {task.name}: the prompt {text!r} has no tokens, and the model cannot start from nothing")
    return text, ids


def order(seed: int, step: int, prompts_per_step: int, n: int) -> list[int]:
    """The indices (0 to n - 1) of step `step` (from 0): `prompts_per_step` of them.

    The run reads one endless row of permutations of 0..n-1, each shuffled by (seed, epoch), and step s takes the places
    s * prompts_per_step onwards. So each epoch holds each index once, also where a step spans two epochs or more (it
    may then hold an index twice), and a resumed run goes on where the unbroken one would.
    """
    if n < 1:
        raise ValueError(f"there are {n} prompts to order; at least 1 is wanted")
    assert step >= 0, step
    assert prompts_per_step > 0, prompts_per_step
    places = range(step * prompts_per_step, (step + 1) * prompts_per_step)
    return [_permutation(seed, place // n, n)[place % n] for place in places]


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, n: int) -> tuple[int, ...]:
    indices = list(range(n))
    random.Random(f"order/{seed}/{epoch}").shuffle(indices)
    return tuple(indices)
