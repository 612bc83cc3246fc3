"""Using a model without training it: held-out evaluation, and completions of prompts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from jetrl.config import FlowName, KVCacheName, RunConfig
from jetrl.flow import build_flow
from jetrl.footprint import GB, Place, cache_that_fits
from jetrl.kernels.select import device_of
from jetrl.loop import evaluate_rollouts
from jetrl.model.config import read_config
from jetrl.model.sources import resolve_model
from jetrl.model.tokenizer import load_tokenizer, stop_token_ids
from jetrl.model.transformer import Transformer
from jetrl.plan import BATCH_TOKENS, full_cache
from jetrl.rl.seeds import sample_seed
from jetrl.rl.types import Request
from jetrl.rollout.engine import Engine, EngineLimits, Progress
from jetrl.rollout.generation import Generation
from jetrl.run import setup

_BESIDE_GB = 4.0  # on a GPU: CUDA, libraries, logits, and what a prefill step holds
_RUNNING, _BLOCK = 256, 64  # sequences together; tokens of a cache's block
_SAID_EVERY = 10.0  # seconds


def evaluate_model(config: RunConfig) -> tuple[dict[str, float], list[str]]:
    """avg@k and pass@k of `config.model` on the held-out prompts, with the run's limits and seeds, and grading's errors."""
    if not config.eval.prompts:
        raise ValueError("eval.prompts is 0, so there is nothing to evaluate; give eval.prompts=64, for instance")
    s = setup(config)
    try:
        layers, kv_fp8 = s.flow.rollout_layers(s.model), s.flow.rollout_kv_fp8
        model = Transformer.of_folder(s.source, s.model, layers, device_of(config.device), kv_fp8)
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
    kv_cache: KVCacheName,
    prompts: list[str],
    chat: bool,
    samples: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    device: str,
    console: Console,
) -> Iterator[list[dict[str, Any]]]:
    """Complete prompts; yields the rows of a prompt, one a completion, as soon as all of them have ended.

    Raises ValueError for what cannot be served at once, not with the first row.
    """
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
    graph = build_flow(flow, config, kv_cache)
    model = Transformer.of_folder(source, config, graph.rollout_layers(config), device_of(device), graph.rollout_kv_fp8)
    limits = _limits(model, min(len(prompts) * samples, _RUNNING), max(map(len, ids)) + max_tokens)
    engine = Engine(model, limits, stop_token_ids(config, tokenizer))
    generation = engine.start(requests, temperature)

    def rows() -> Iterator[list[dict[str, Any]]]:
        with _progress(console, len(prompts) * samples) as show:
            for index in _as_they_end(engine, generation, show):
                yield [
                    {
                        "index": index,
                        "prompt": prompts[index],
                        "completion": tokenizer.decode(s.completion, skip_special_tokens=True),
                        "finish_reason": s.finish_reason,
                        "token_ids": s.completion,
                        "logprobs": s.logprobs,
                    }
                    for s in generation.requests[index]
                ]

    return rows()


def _limits(model: Transformer, sequences: int, longest: int) -> EngineLimits:
    """A cache for so many sequences of full length or, on a GPU, what fits beside the model."""
    wanted = full_cache(sequences, longest, _BLOCK)
    taken = torch.cuda.memory_allocated(model.device) / GB + _BESIDE_GB if model.device.type == "cuda" else 0.0
    fits = cache_that_fits(model.config, "fp8" if model.kv_fp8 else "bf16", Place.of(model.device.type), taken)
    return EngineLimits(sequences, BATCH_TOKENS[model.device.type], min(wanted, fits), _BLOCK)


def _as_they_end(engine: Engine, generation: Generation, show: Progress) -> Iterator[int]:
    """Carry a generation to its end; numbers of its requests, each when its last sequence has ended."""
    requests, under_way = generation.requests, list[int]()
    started = ended = 0
    try:
        while not generation.done:
            engine.step(generation)
            show(generation.finished, generation.stats.sampled_tokens)
            while started < len(requests) and requests[started][0].computed:  # they start in order
                under_way.append(started)
                started += 1
            if generation.finished > ended:
                ended = generation.finished
                over = [r for r in under_way if all(s.finish_reason for s in requests[r])]
                under_way = [r for r in under_way if r not in over]
                yield from over
    finally:
        generation.close()


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Progress]:
    """Completions done, tokens/s so far and time: a bar on a terminal, elsewhere a line on standard error now and then."""
    columns = (
        TextColumn("completions"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}, {task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    start = said = time.perf_counter()
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, speed="")

        def show(done: int, tokens: int) -> None:
            nonlocal said
            now = time.perf_counter()
            speed = f"{tokens / max(now - start, 1e-9):,.0f} tokens/s"
            bar.update(task, completed=done, speed=speed)
            if not console.is_terminal and now - said >= _SAID_EVERY:
                said = now
                print(f"{done}/{total} completions, {speed}, {now - start:.0f} s", file=sys.stderr, flush=True)

        yield show
