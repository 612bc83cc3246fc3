"""The checksum of tensors' bytes: equal for equal bytes wherever they lie, another one for any change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetrl.kernels import checksum as module
from jetrl.kernels.checksum import checksum
from jetrl.rl.seeds import mix64
from tests.tiny_models import random_weights, tiny_model


def tensors() -> list[Tensor]:
    """Several dtypes; sizes that four bytes divide, or do not."""
    noise = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    codes = noise.flatten()[:13].clamp(-400, 400).to(torch.float8_e4m3fn)
    return [noise, noise.bfloat16(), codes, torch.arange(6), noise[:1, :1].bfloat16(), torch.empty(0)]


def test_equal_bytes_have_one_checksum_and_the_layout_in_memory_does_not_matter() -> None:
    first = checksum(tensors())
    assert len(first) == 16 and int(first, 16) >= 0
    assert checksum(x.clone() for x in tensors()) == first
    noise = tensors()[0]
    assert checksum([noise.t().contiguous().t()]) == checksum([noise])


def test_any_byte_any_place_and_the_order_count() -> None:
    seen = {checksum(tensors())}
    count = 1
    for number, tensor in enumerate(tensors()):
        for byte in range(tensor.numel() * tensor.element_size()):
            changed = tensors()
            changed[number].view(-1).view(torch.uint8)[byte] ^= 1 << byte % 8
            seen.add(checksum(changed))
            count += 1
    for changed in (
        tensors()[::-1],
        tensors()[:-2],
        [*tensors(), torch.zeros(1)],
        [torch.zeros(2)],
        [torch.zeros(3)],
        [torch.zeros(1), torch.zeros(1)],
        [torch.zeros(1, dtype=torch.uint8)],
        [],
    ):
        seen.add(checksum(changed))
        count += 1
    swapped = tensors()
    swapped[0].view(-1)[:2] = tensors()[0].view(-1)[:2].flip(0)
    seen.add(checksum(swapped))
    assert len(seen) == count + 1


def test_large_tensors_are_read_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checksum(tensors())
    for chunk in (1, 5, 16):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        assert checksum(tensors()) == whole


def test_it_is_the_sum_of_mixed_words_in_plain_integers() -> None:
    total, most = 0, 1 << 64
    for tensor in tensors():
        data = tensor.contiguous().view(-1).view(torch.uint8).tolist()
        found = len(data)
        for place in range(0, len(data), 4):
            word = int.from_bytes(bytes(data[place : place + 4]), "little", signed=False)
            found += mix64(((word - (word >> 31 << 32)) ^ (place // 4 << 32)) % most)
        total = mix64(total ^ mix64(found % most))
    assert checksum(tensors()) == f"{total:016x}"


@pytest.mark.parametrize("flow", ["fp8", "bf16"])
def test_a_models_checksum_is_that_of_its_published_weights(flow: str) -> None:
    model, other = tiny_model("qwen3", flow, seed=1), tiny_model("qwen3", flow, seed=2)  # type: ignore[arg-type]
    first = model.checksum()
    assert first == tiny_model("qwen3", flow, seed=1).checksum() != other.checksum()  # type: ignore[arg-type]
    other.load(random_weights(model.config, 1))
    assert other.checksum() == first
    for name in model.leaves:
        weights = random_weights(model.config, 1)
        weights[name].view(-1)[-1:].neg_()
        other.load(weights)
        assert other.checksum() != first
    other.load(random_weights(model.config, 1))
    assert other.checksum() == first


def test_flows_have_different_checksums() -> None:
    assert tiny_model(flow="fp8").checksum() != tiny_model(flow="bf16").checksum()
