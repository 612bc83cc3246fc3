"""Python in a child process, with Triton's interpreter or without: which of the two is settled when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(*arguments: str, interpret: bool = True) -> str:
    """Standard output of `python ARGUMENTS`, which must end well; the repository is importable. One thread: it is faster."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done.stdout


def run_checks(file: str) -> None:
    """The functions `check_*` of a test file, as tests, in the interpreter."""
    run_python("-m", "pytest", "-o", "python_functions=check_*", "-p", "no:cacheprovider", file)
