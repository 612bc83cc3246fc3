"""Environment variables that choose between kernels which do the same work."""

from __future__ import annotations

import os
from collections.abc import Collection


def chosen(variable: str, names: Collection[str]) -> str | None:
    """What the environment variable asks for; None if it is not set. Raises ValueError for what is none of `names`."""
    name = os.environ.get(variable)
    if name is not None and name not in names:
        raise ValueError(f"{variable} is {name!r}; wanted one of {', '.join(names)}")
    return name
