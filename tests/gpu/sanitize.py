"""Each GPU kernel once, on small odd shapes, for a memory checker; it is not a test itself.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \\
        python -m tests.gpu.sanitize

Without the caching allocator each tensor has its own allocation, so an access one element beyond its end is seen. Errors of API
calls are left out: cuda-bindings ask the driver for functions that it may not have.
"""

from __future__ import annotations

import torch

from jetrl.check import engine_recording, trainer_recording
from jetrl.kernels.lanes import DONE, LENGTH, LIMIT, Lanes
from jetrl.model.transformer import Transformer
from jetrl.rollout.engine import EngineLimits
from tests.tiny_models import tiny_model

SMALL = {"hidden_size": 144, "intermediate_size": 200, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "num_layers": 1}


def run(model: Transformer) -> None:
    """Training forward and backward, prefill in chunks, decode, sampling, lanes.

    No graph: without the caching allocator none can be captured.
    """
    for leaf in model.leaves.values():
        leaf.grad = torch.zeros(leaf.shape, device=model.device)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(model.config.vocab_size, (n,), generator=generator).tolist() for n in (129, 2, 37)]
    tokens = torch.tensor([t for s in sequences for t in s])
    hidden = model.forward(tokens, model.packed([len(s) for s in sequences]))
    logprobs, _ = model.chosen_logprobs(hidden, tokens, 0.7)
    logprobs.sum().backward()
    reference, _ = trainer_recording(model, sequences)
    for prompts, block in (([126, 1, 30], 64 if model.kv_fp8 else 3), ([100, 1, 20], 64)):
        recording, _, _ = engine_recording(model, sequences, prompts, EngineLimits(3, 50, 6 * 64, block), 0.7)
        result = reference.compare(recording, "decode")
        assert result.differing == 0, result.first
    with torch.inference_mode():
        uniforms, forced = torch.rand(3, dtype=torch.float64), torch.tensor([-1, 5, -1])
        for temperature in (0.0, 0.7):
            model.next_tokens(hidden[:3].detach(), uniforms, forced, temperature)
        lanes = Lanes.empty(4, 2, [3, 5], 64, 8 * 64, model.device)
        lanes.state[:3, LIMIT], lanes.state[:3, LENGTH], lanes.state[:3, DONE] = 9, 65, 0
        step = torch.tensor([[0, 2, 1, 4, 4], [-1] * 5, [-1, 7, -1, -1, -1]], dtype=torch.int32, device=model.device)
        inputs = model.ops.begin(lanes, step)
        model.ops.end(lanes, step[0], inputs.tokens, torch.zeros(5, device=model.device))


if __name__ == "__main__":
    for family, flow, kv_fp8 in (("llama", "fp8", False), ("qwen3", "fp8", True), ("qwen2", "bf16", False)):
        run(tiny_model(family, flow, device="cuda", kv_fp8=kv_fp8, **SMALL))
        torch.cuda.synchronize()
        print(f"{family} {flow}{', FP8 cache' if kv_fp8 else ''}: each kernel ran")
