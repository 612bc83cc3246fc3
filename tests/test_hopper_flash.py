"""Who makes attention's gradients on a GPU, and what FlashAttention's backward is called with: a stand-in takes its place."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from jetrl.kernels.attention import Sequences

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
from jetrl.kernels.hopper import flash


@pytest.fixture(autouse=True)
def unchosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No choice is left from another test, nor left to one."""
    monkeypatch.delenv("JETRL_ATTENTION_GRAD", raising=False)
    forget()
    yield
    forget()


def forget() -> None:
    flash._library.cache_clear()
    flash.takes.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, version: str | None, backward: Any = None) -> None:
    """A flash-attn-4 of that version, or none; without a backward it cannot be imported."""

    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    if backward is None:
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    else:
        sys.modules["flash_attn.cute.interface"]._flash_attn_bwd = backward  # type: ignore[attr-defined]


def test_the_library_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    install(monkeypatch, flash.VERSION, lambda: None)
    assert not flash.missing() and flash.takes(32, 8, 128) and flash.takes(9, 3, 64)
    assert not caplog.messages
    for _ in "again":
        assert not flash.takes(4, 2, 32)
    assert [message for message in caplog.messages if "dimension 32 runs in Triton" in message] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("version", "backward", "why"),
    [
        (None, None, "flash-attn-4 is not installed"),
        ("4.0.0b37", lambda: None, "flash-attn-4 is 4.0.0b37, and jetrl calls a private function of 4.0.0b36"),
        ("4.0.0b36", None, "flash-attn-4 cannot be loaded"),
    ],
)
def test_triton_is_the_fallback_and_the_reason_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str | None, backward: Any, why: str
) -> None:
    install(monkeypatch, version, backward)
    caplog.set_level(logging.WARNING, "jetrl")
    for _ in "again":
        assert not flash.takes(32, 8, 128) and not flash.takes(9, 3, 64)
    assert why in flash.missing()
    assert len(caplog.messages) == 1 and f"attention's backward runs in Triton: {why}" in caplog.messages[0]

    monkeypatch.setenv("JETRL_ATTENTION_GRAD", "flash")
    forget()
    with pytest.raises(ValueError, match=r"JETRL_ATTENTION_GRAD is flash, but flash-attn-4.*JETRL_ATTENTION_GRAD=triton"):
        flash.takes(32, 8, 128)


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    install(monkeypatch, flash.VERSION, lambda: None)
    for name, taken in (("flash", True), ("triton", False)):
        monkeypatch.setenv("JETRL_ATTENTION_GRAD", name)
        forget()
        assert flash.takes(32, 8, 128) is taken
    assert not caplog.messages
    monkeypatch.setenv("JETRL_ATTENTION_GRAD", "cudnn")
    forget()
    with pytest.raises(ValueError, match="JETRL_ATTENTION_GRAD is 'cudnn'; wanted one of flash, triton"):
        flash.takes(32, 8, 128)


def packed(lengths: list[int]) -> Sequences:
    return Sequences(lengths, lengths, [sum(lengths[:s]) for s in range(len(lengths))], None, 0, torch.device("cpu"))


def operands(tokens: int) -> tuple[Tensor, ...]:
    """dout (broadcast), q, keys, values, out and lse of 4 and 2 heads of dimension 64."""
    q, kv = torch.zeros(tokens, 4, 64), torch.zeros(tokens, 2, 64)
    return torch.ones(1, 4, 1).expand(tokens, 4, 64), q, kv, kv, q, torch.zeros(4, tokens)


def test_what_the_library_is_called_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The starts are made once a layout; no packing asks for another compiled kernel."""
    calls: list[dict[str, Any]] = []

    def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **options: Any) -> tuple[Tensor, ...]:
        assert dout.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
        calls.append(options)
        return q, k, v

    install(monkeypatch, flash.VERSION, backward)
    for lengths, longest in (([1, 3, 60], 129), ([1], 129), ([5, 300], 300)):
        layout = packed(lengths)
        for _ in "layers":
            flash.grad(*operands(sum(lengths)), layout)  # type: ignore[arg-type]
        first, last = calls[-2:]
        assert last["causal"] is last["deterministic"] is True and last["softmax_scale"] == 0.125
        assert last["cu_seqlens_q"] is last["cu_seqlens_k"] is first["cu_seqlens_q"]
        assert last["cu_seqlens_q"].dtype == torch.int32
        assert last["cu_seqlens_q"].tolist() == [*layout.key_starts, sum(lengths)]  # type: ignore[misc]
        assert last["max_seqlen_q"] == last["max_seqlen_k"] == longest


def test_layouts_without_a_gradient_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flash.VERSION, lambda *_, **__: None)
    cpu = torch.device("cpu")
    wrong = [
        Sequences([2, 3], [2, 3], None, torch.zeros(2, 1, dtype=torch.int32), 64, cpu),  # paged
        Sequences([2, 3], [2, 4], [0, 2], None, 0, cpu),  # a key ahead of the queries
        Sequences([2, 3], [2, 3], [2, 0], None, 0, cpu),  # keys in another order
        packed([2, 2]),  # a row too many
    ]
    for layout in wrong:
        with pytest.raises(ValueError, match="packed keys, all of them new, 5 in all"):
            flash.grad(*operands(5), layout)  # type: ignore[arg-type]


def test_the_operators_follow_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """`HopperOps` asks by the heads; what Triton makes is another test's matter."""
    from jetrl.kernels.hopper import attention
    from jetrl.kernels.hopper.ops import HopperOps

    install(monkeypatch, flash.VERSION, lambda *_, **__: "flash")
    monkeypatch.setattr(attention, "attention_grad", lambda *_: "triton")
    ops, layout = object.__new__(HopperOps), packed([2, 3])
    assert ops.attention_grad(*operands(5), layout) == "flash"  # type: ignore[comparison-overlap, arg-type]
    small = [x[..., :32] for x in operands(5)[:-1]]
    assert ops.attention_grad(*small, operands(5)[-1], layout) == "triton"  # type: ignore[comparison-overlap, arg-type]
