"""Prompts and rewards: what is asked, how it reads, and how an answer is judged.

`load_task` gives a `Task` (problems, wording, judge), `build_prompts` makes engine-ready prompts of its problems, and
`order` says which of them a step takes. Imports `jetrl.rl.types` and `jetrl.config` only, and no torch.
"""

from __future__ import annotations

import difflib

from jetrl.config import TaskConfig
from jetrl.tasks.base import Task
from jetrl.tasks.countdown import load_countdown
from jetrl.tasks.data import MissingData
from jetrl.tasks.generated import GENERATORS, load_generated
from jetrl.tasks.mathematics import load_math
from jetrl.tasks.prompts import PromptCounts, build_prompts, order
from jetrl.tasks.user import load_reasoning_gym, load_user

__all__ = ["MissingData", "PromptCounts", "Task", "build_prompts", "load_task", "order"]


def load_task(config: TaskConfig, *, seed: int) -> Task:
    """The task that `config` names. `seed` chooses generated training problems; held-out ones do not depend on it.

    Raises ValueError for an unknown name or option, missing libraries, and data that cannot be read or is empty, of it
    MissingData for data that are not here.
    """
    name = config.name
    if name in GENERATORS:
        return load_generated(config, seed)
    if name == "countdown":
        return load_countdown(config, seed)
    if name == "math":
        return load_math(config)
    if name.startswith("reasoning_gym:"):
        return load_reasoning_gym(config, seed)
    if ".py:" in name:
        return load_user(config)
    known = [*GENERATORS, "countdown", "math", "reasoning_gym:NAME", "path.py:function"]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise ValueError(f"there is no task {name!r}; did you mean {near!r}? Known: {', '.join(known)}")
