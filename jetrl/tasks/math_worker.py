"""The script of a math worker, run in a process of its own: does one mathematical expression equal another?

Problem: `math-verify` (over sympy) may hang, crash or fill the memory on model output. Method: this process expects to
be killed. It limits its own memory, ends itself when a verdict takes twice the time allowed (so that nothing stays
behind if the parent is gone), and ends with its standard input. It imports nothing of jetrl and no torch, so it starts
quickly.

Request: {"gold": text, "answer": text, "loose": bool}; with `loose`, `answer` is running text whose last expression
counts. Reply: {"correct": bool, "gold_parsed": bool, "parsed": bool}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import sys
from typing import Any

MEMORY_BYTES = 4 << 30


def judge(gold: str, answer: str, loose: bool) -> dict[str, Any]:
    from math_verify import parse, verify

    # The library's own timeouts are signal alarms; this process is killed instead. No fallback: two texts that are both
    # no mathematics must not be compared as texts.
    options: dict[str, Any] = {"fallback_mode": "no_fallback", "parsing_timeout": None}
    wanted = parse(f"${gold}$", **options)
    got = parse(answer if loose else f"\\boxed{{{answer}}}", **options)
    correct = bool(wanted and got and verify(wanted, got, timeout_seconds=None))
    return {"correct": correct, "gold_parsed": bool(wanted), "parsed": bool(got)}


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system, and a lower limit may stand
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    timeout = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not look like a reply
    logging.disable(logging.CRITICAL)
    _limit_memory()
    judge("1", "1", False)  # imports and builds the grammars before anyone waits
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(2 * timeout + 1, exit=True)
        reply = judge(**json.loads(line))
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
