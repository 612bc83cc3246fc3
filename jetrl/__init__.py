"""Jet-RL: reinforcement learning of language models in one FP8 precision flow, exact to the bit.

Rollout and training share one quantiser, one transformer forward and row-independent kernels, so the log-probability
that the sampler reports for a token and the one that the trainer computes for it are the same 32 bits. This file has no
imports, so that `import jetrl.config` leaves torch alone.
"""

__version__ = "0.1.0"
