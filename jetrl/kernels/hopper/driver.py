"""Calls of cuda-bindings, which return a status and then their results."""

from __future__ import annotations

from typing import Any


def checked(result: tuple[Any, ...]) -> Any:
    """What a call returned besides its status, which must be success."""
    assert not int(result[0]), f"CUDA: {result[0]!r}"
    return result[1] if len(result) > 1 else None
