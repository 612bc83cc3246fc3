"""A reward of one's own: right answers, and of two right answers the shorter one is worth a little more.

    jetrl train configs/own_reward.yaml

`jetrl` calls `reward(question, completion, answer, **other keys of the row)` for each completion and wants one finite number.
Whatever else comes back, and any exception, is counted, shown with its message, and worth 0: it never ends a run.
The rows are in own_reward.jsonl; the option `correct_at` of the config says from which reward on a completion counts as right.
"""

import re


def reward(question: str, completion: str, answer: str, brief: int) -> float:
    """1.0 for a right answer of at most `brief` characters, 0.8 for a longer one, 0.1 for any other number, else 0.0.

    `brief` is a key of the row: the characters that a right answer needs at least.
    """
    numbers = re.findall(r"-?\d+", completion)
    if not numbers:
        return 0.0
    if numbers[-1] != answer:
        return 0.1
    return 1.0 if len(completion.strip()) <= brief else 0.8
