"""Settings of all tests: no network; GPU tests skipped, with the reason, where there is no CUDA device; others on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Set before anything imports transformers: a test that reaches for a hub fails at once instead of hanging.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # only now: the layout test alone should not pay for it

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} sees none here")
        for item in gpu_items:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where there is a GPU, `device: auto` still means the CPU in tests without the mark `gpu`: they know its figures."""
    if request.node.get_closest_marker("gpu") or request.node.path.name == "test_layout.py":
        return
    import torch

    if torch.cuda.is_available():
        from jetrl.kernels import select

        monkeypatch.setattr(select, "missing", lambda: "this test is one of the CPU")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny models: threads that share so small products take longer than one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
