"""Using a model without training it: held-out evaluation, and completions of prompts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jetrl.config import FlowName, RunConfig
from jetrl.flow import build_flow
from jetrl.kernels.select import device_of
from jetrl.loop import evaluate_rollouts
from jetrl.model.config import read_config
from jetrl.model.sources import resolve_model
from jetrl.model.tokenizer import load_tokenizer, stop_token_ids
from jetrl.model.transformer import Transformer
from jetrl.rl.seeds import sample_seed
from jetrl.rl.types import Request
from jetrl.rollout.engine import Engine, EngineLimits
from jetrl.run import setup


def evaluate_model(config: RunConfig) -> tuple[dict[str, float], list[str]]:
    """avg@k and pass@k of `config.model` on the held-out prompts, with the run's limits and seeds, and grading's errors."""
    if not config.eval.prompts:
        raise ValueError("eval.prompts is 0, so there is nothing to evaluate; give eval.prompts=64, for instance")
    s = setup(config)
    try:
        model = Transformer.of_folder(s.source, s.model, s.flow.rollout_layers(s.model), device_of(config.device))
        engine = Engine(model, s.batches.limits, s.eos)
        return evaluate_rollouts(config, s.held_out, engine, s.decode, s.task.grade_all)
    finally:
        s.task.close()


def read_prompts(file: Path) -> list[str]:
    """Prompts of a file: JSONL objects with `prompt`, or plain lines. Raises ValueError for a missing file or a bad line."""
    if not file.is_file():
        raise ValueError(f"no prompt file at {str(file)!r}; give a text file, or JSONL with a `prompt` in each line")
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    if file.suffix != ".jsonl":
        return lines
    prompts: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(str(json.loads(line)["prompt"]))
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{file}, line {number}: a JSON object with a `prompt` is wanted; seen {line[:80]!r}") from None
    return prompts


def generate_texts(
    name: str,
    flow: FlowName,
    prompts: list[str],
    chat: bool,
    samples: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    device: str,
    console: Console,
) -> tuple[list[dict[str, Any]], float]:
    """Complete prompts; returns one row a completion, and tokens/s."""
    source = resolve_model(name)
    config = read_config(source)
    tokenizer = load_tokenizer(source, config)
    if chat and not tokenizer.chat_template:
        raise ValueError(f"{name} has no chat template; leave --chat out")
    texts = prompts
    if chat:
        messages = [[{"role": "user", "content": p}] for p in prompts]
        texts = [str(tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False)) for m in messages]
    ids = [tokenizer.encode(t, add_special_tokens=not chat) for t in texts]
    requests = [Request(list(i), [sample_seed(seed, 0, p, k) for k in range(samples)], max_tokens) for p, i in enumerate(ids)]
    model = Transformer.of_folder(source, config, build_flow(flow, config).rollout_layers(config), device_of(device))
    running = min(len(prompts) * samples, 256)
    longest = max(map(len, ids)) + max_tokens + 32
    engine = Engine(model, EngineLimits(running, 2048, running * longest, 16), stop_token_ids(config, tokenizer))
    total = len(prompts) * samples
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    start = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("completions", total=total)
        groups = engine.generate(requests, temperature, lambda done, _: progress.update(task, completed=done))
    seconds = time.perf_counter() - start
    rows = [
        {
            "prompt": prompt,
            "completion": tokenizer.decode(c.token_ids, skip_special_tokens=True),
            "finish_reason": c.finish_reason,
            "token_ids": c.token_ids,
            "logprobs": c.logprobs,
        }
        for prompt, group in zip(prompts, groups, strict=True)
        for c in group
    ]
    return rows, engine.stats.sampled_tokens / max(seconds, 1e-9)
