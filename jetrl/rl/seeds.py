"""Seeds that belong to a sample: a function of run, step, prompt and sample, so equal within no group.

A completion then does not depend on the batch it was sampled in, on the schedule, or on a resume.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    """The finaliser of splitmix64: a bijection of 64 bits in which each input bit reaches each output bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sample_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """The 64-bit seed of sample number `sample` of prompt number `prompt` in `step`."""
    seed = 0
    for part in (run_seed, step, prompt, sample):
        seed = mix64(seed ^ mix64(part & _MASK))
    return seed


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) for the token at `position` of the completion, a multiple of 2^-53."""
    return (mix64(seed ^ mix64(position)) >> 11) * 2.0**-53
