# See [tool.pyright] in pyproject.toml.
from typing import Any

def __getattr__(name: str) -> Any: ...
