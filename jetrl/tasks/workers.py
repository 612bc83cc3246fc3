"""Worker processes that can be killed.

Problem: a symbolic parser fed with model output can run for ever or eat all memory. A signal alarm works in the main
thread only and does not interrupt C code; a thread cannot be stopped at all. Method: each worker is a plain child
process that runs one script and talks in lines of JSON: one request in, one reply out, no pickles and no re-import of
the caller's main module. The parent watches all of them from one loop; a worker that is late is killed and replaced,
and only its request fails. Given up: requests wait while a replaced worker starts (a second or two).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

START_SECONDS = 120.0  # from the start of a worker to its ready line: imports on a busy machine
Reply = dict[str, Any]


class WorkerPool:
    """Up to `workers` processes running `script`, started when needed. Thread-safe: calls of `map` queue up.

    The script writes one line when it is ready, then one line of JSON for each line of JSON it reads.
    """

    def __init__(self, script: Path, workers: int, timeout: float) -> None:
        self.restarts = 0  # workers killed or lost so far
        self._script, self._timeout = script, timeout
        self._workers: list[_Worker | None] = [None] * workers
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def map(self, requests: Sequence[dict[str, Any]]) -> list[Reply | str]:
        """The reply to each request, or a text that says why there is none: it took over `timeout` seconds, or the
        worker died. Raises RuntimeError when workers do not even start.
        """
        replies: list[Reply | str] = ["not reached"] * len(requests)
        todo = deque(enumerate(requests))
        with self._lock:
            try:
                while todo or any(worker is not None and worker.job is not None for worker in self._workers):
                    for slot, worker in enumerate(self._workers):
                        if todo and (worker is None or worker.job is None):
                            self._give(slot, *todo.popleft())
                    self._collect(replies)
            finally:
                # After an exception (Ctrl-C) a busy worker would answer the next call with this call's reply.
                for slot, worker in enumerate(self._workers):
                    if worker is not None and worker.job is not None:
                        self._lose(slot)
        return replies

    def close(self) -> None:
        """Kill all workers. The pool can be used again."""
        with self._lock:
            _kill_all(self._workers)

    def _give(self, slot: int, job: int, request: dict[str, Any]) -> None:
        worker = self._workers[slot]
        if worker is None or not worker.send(job, request, self._timeout):
            if worker is not None:
                self._lose(slot)
            worker = self._workers[slot] = _Worker(self._script, self._timeout)
            if not worker.send(job, request, self._timeout):
                raise RuntimeError(f"the worker process {self._script.name} ended at once")

    def _collect(self, replies: list[Reply | str]) -> None:
        busy = {w.output.fileno(): (n, w) for n, w in enumerate(self._workers) if w is not None and w.job is not None}
        patience = min(w.deadline for _, w in busy.values()) - time.monotonic()
        for output in wait(list(busy), max(0.0, patience)):
            slot, worker = busy[cast(int, output)]
            line = worker.read_line(self._timeout)
            assert worker.job is not None
            if line is None:
                if not worker.ready:
                    raise RuntimeError(
                        f"the worker process {self._script.name} ended while starting. Run it by hand to see why: "
                        f"{sys.executable} -P {self._script}"
                    )
                replies[worker.job] = "the worker process died (out of memory, or a crash in the parser)"
                self._lose(slot)
            elif line:
                replies[worker.job], worker.job = json.loads(line), None
        for slot, worker in busy.values():
            if worker.job is not None and time.monotonic() > worker.deadline and self._workers[slot] is worker:
                if not worker.ready:
                    raise RuntimeError(f"the worker process {self._script.name} was not ready after {START_SECONDS:.0f} s")
                replies[worker.job] = f"timeout: no verdict within {self._timeout:g} s"
                self._lose(slot)

    def _lose(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            worker.kill()
            self.restarts += 1


class _Worker:
    """One child process; `job` is the index of the request it works on, `deadline` a time of the monotonic clock."""

    def __init__(self, script: Path, timeout: float) -> None:
        # -P: the script's folder must not shadow standard modules. Own session: Ctrl-C is for the parent to handle.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        self._buffer = b""
        self.ready = False
        self.job: int | None = None
        self.deadline = 0.0

    def send(self, job: int, request: dict[str, Any], timeout: float) -> bool:
        """False if the process is gone. Requests are far smaller than the pipe (64 KiB), so writing does not block."""
        try:
            self._input.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            return False
        self.job, self.deadline = job, time.monotonic() + (timeout if self.ready else START_SECONDS)
        return True

    def read_line(self, timeout: float) -> bytes | None:
        """A complete line, b"" if there is none yet, None if the process ended. The ready line is swallowed."""
        data = os.read(self.output.fileno(), 65536)
        if not data:
            return None
        self._buffer += data
        if not self.ready and b"\n" in self._buffer:
            _, _, self._buffer = self._buffer.partition(b"\n")
            self.ready, self.deadline = True, time.monotonic() + timeout
        if b"\n" not in self._buffer:
            return b""
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._input, self.output):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _kill_all(workers: list[_Worker | None]) -> None:
    for slot, worker in enumerate(workers):
        if worker is not None:
            worker.kill()
            workers[slot] = None
