"""One measurement, in a process of its own so that its peak memory is its own: `python benchmarks/cases.py CASE` (JSON).

The last line that is printed is the result, JSON again. Inputs are random tokens from a fixed seed, no completion ends early,
and times are the best of several repetitions.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
from machine import bandwidth_limit, gemm_limit

from jetrl.config import AlgorithmConfig, FlowName, OptimizerConfig
from jetrl.flow import build_flow
from jetrl.kernels.memory import keep_freed_memory
from jetrl.model.checkpoint import load_weights
from jetrl.model.config import ModelConfig, read_config
from jetrl.model.transformer import Transformer
from jetrl.rl.types import Completion, Grade, Problem, Prompt, Request, Rollout
from jetrl.rollout.engine import Engine, EngineLimits
from jetrl.train.trainer import Objective, Trainer

Kind = Literal["rollout", "training", "transformers", "limits"]


@dataclass(frozen=True)
class Case:
    """What is measured. `flow`: a flow of jetrl's, or the dtype in which `transformers` runs."""

    kind: Kind
    folder: str
    flow: str
    sequences: int
    prompt: int  # tokens
    completion: int  # tokens
    threads: int
    repeats: int


def _prompts(case: Case, config: ModelConfig) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(3, config.vocab_size) for _ in range(case.prompt)] for _ in range(case.sequences)]


def _model(case: Case) -> tuple[ModelConfig, Transformer]:
    config = read_config(case.folder)
    return config, Transformer(config, build_flow(cast(FlowName, case.flow), config).trainer_layers(config))


def rollout(case: Case) -> dict[str, Any]:
    """Sample completions of different prompts. `decode_tokens_per_s` leaves the prefill and the first token out."""
    config, model = _model(case)
    model.load(load_weights(case.folder, config))
    block = 16
    blocks = case.sequences * -(-(case.prompt + case.completion) // block)
    engine = Engine(model, EngineLimits(case.sequences, case.sequences * case.prompt, blocks * block, block), eos=[])
    requests = [Request(prompt, [i], case.completion) for i, prompt in enumerate(_prompts(case, config))]

    def stamps() -> list[float]:
        times = [time.perf_counter()]
        engine.generate(requests, 1.0, progress=lambda finished, sampled: times.append(time.perf_counter()))
        assert len(times) == 1 + case.completion, "one prefill, then one step a token"
        return times

    runs = [stamps() for _ in range(case.repeats)]
    return _rates(case, min(times[-1] - times[0] for times in runs), min(times[-1] - times[1] for times in runs))


def _rates(case: Case, whole: float, decode: float) -> dict[str, Any]:
    return {
        "tokens_per_s": case.sequences * case.completion / whole,
        "decode_tokens_per_s": case.sequences * (case.completion - 1) / decode,
        "seconds": whole,
    }


def transformers(case: Case) -> dict[str, Any]:
    """The same prompts through `transformers.generate`: the inexact way. Decode time: all steps less the first."""
    from transformers import AutoModelForCausalLM

    config = read_config(case.folder)
    model: Any = AutoModelForCausalLM.from_pretrained(
        case.folder, dtype=getattr(torch, case.flow), local_files_only=True
    ).eval()
    prompts = torch.tensor(_prompts(case, config))

    def seconds(tokens: int) -> float:
        best = float("inf")
        for repeat in range(case.repeats):
            torch.manual_seed(repeat)
            start = time.perf_counter()
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
            best = min(best, time.perf_counter() - start)
        return best

    seconds(1)  # warms up
    first, whole = seconds(1), seconds(case.completion)
    return _rates(case, whole, whole - first)


def training(case: Case) -> dict[str, Any]:
    """One optimizer step: forward and backward of all sequences, AdamW, publish. Counts all tokens that the forward reads."""
    config, model = _model(case)
    objective = Objective(AlgorithmConfig(), OptimizerConfig(), 1.0, case.completion, updates=100)
    trainer = Trainer(model, load_weights(case.folder, config), objective)
    draw = random.Random(1)
    rollouts = []
    for i, tokens in enumerate(_prompts(case, config)):
        answer = [draw.randrange(3, config.vocab_size) for _ in range(case.completion)]
        completion = Completion(answer, [-4.0] * case.completion, "length", policy_version=-1)
        prompt = Prompt(Problem(str(i), ""), "", tokens)
        rollouts.append(Rollout(prompt, completion, "", Grade(0.0, False), i // 8, draw.choice([-1.0, 1.0])))

    def step() -> float:
        start = time.perf_counter()
        trainer.accumulate(rollouts)
        trainer.apply()
        return time.perf_counter() - start

    seconds = min(step() for _ in range(case.repeats))
    return {"tokens_per_s": _input_tokens(case) / seconds, "seconds": seconds}


def _input_tokens(case: Case) -> int:
    return case.sequences * (case.prompt + case.completion - 1)


def limits(case: Case) -> dict[str, Any]:
    """What float64 products and reading float64 weights allow, for decode and for training at this case's sizes."""
    config = read_config(case.folder)
    if case.flow == "training":
        return {"gemm": gemm_limit(config, _input_tokens(case), case.sequences * case.completion, backward=True)}
    return {
        "gemm": gemm_limit(config, case.sequences, case.sequences, backward=False),
        "bandwidth": bandwidth_limit(config, case.sequences),
    }


_KINDS = {"rollout": rollout, "training": training, "transformers": transformers, "limits": limits}


def measure(case: Case) -> dict[str, Any]:
    """Run a case in this process; its result with the case itself and the process's peak memory so far, GB."""
    torch.set_num_threads(case.threads)
    keep_freed_memory()  # as the command line does
    values = _KINDS[case.kind](case)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
    return asdict(case) | values | {"peak_memory_gb": peak}


if __name__ == "__main__":
    print(json.dumps(measure(Case(**json.loads(sys.argv[1])))))
