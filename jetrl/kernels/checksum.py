"""A checksum of tensors' bytes, computed where they are.

Problem: whether two sides hold the same weights should be a question that costs milliseconds, not a copy of eight gigabytes.
Method: each 32-bit word is mixed with its place and the mixes are added modulo 2^64: integers, so in any order the same.
Given up: cryptographic strength. It finds faults, not forgers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from jetrl.kernels.lanes import mix64

_CHUNK = 1 << 24  # words at a time: 256 MB of temporaries


def checksum(tensors: Iterable[Tensor]) -> str:
    """16 hexadecimal digits that depend on every byte of the tensors and on their order."""
    total = torch.tensor(0)
    for tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        words = pad(data, (0, -data.numel() % 4)).view(torch.int32)
        found = torch.tensor(data.numel())
        for start in range(0, words.numel(), _CHUNK):
            part = words[start : start + _CHUNK].long()
            place = torch.arange(start, start + part.numel(), device=part.device)
            found = found + mix64(part ^ (place << 32)).sum().cpu()
        total = mix64(total ^ mix64(found))
    return f"{int(total) % (1 << 64):016x}"
