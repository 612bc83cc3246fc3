"""What an FP8 KV cache does to log-probabilities, on a real model and real text.

    python benchmarks/kv_cache.py --model smollm2 --data data/gsm8k-test.jsonl [--problems 64] [--json FILE]

Question and answer of each problem are read by the training forward (the engine's to the bit) under flows bf16 and fp8, each
with a BF16 and an FP8 cache; every answer token is scored. Against flow bf16 with a BF16 cache: mean and largest difference of
the log-probabilities, the mean of exp(d) - 1 - d (an estimate of the KL), and how often the most likely token changes. Negative
log-likelihoods in nats tell whether the model got worse. What FP8 weights alone do stands beside it as the measure.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from jetrl.flow import build_flow
from jetrl.kernels.select import device_of
from jetrl.model.config import read_config
from jetrl.model.sources import resolve_model
from jetrl.model.tokenizer import load_tokenizer
from jetrl.model.transformer import Transformer

SIDES = [("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "bf16"), ("fp8", "fp8")]  # flow, cache; the first is the measure
PACK = 4096  # tokens of one forward


def read(file: Path, count: int) -> list[tuple[str, str]]:
    """Question and answer of the first problems."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:count]]
    return [(f"Question: {row['question']}\nAnswer:", f" {row['answer']}") for row in rows]


def packs(sequences: list[tuple[list[int], list[int]]]) -> list[list[tuple[list[int], list[int]]]]:
    """Prompt and answer tokens, as many together as one forward takes."""
    result: list[list[tuple[list[int], list[int]]]] = [[]]
    for pair in sequences:
        if result[-1] and sum(len(p) + len(a) for p, a in [*result[-1], pair]) > PACK:
            result.append([])
        result[-1].append(pair)
    return result


def score(model: Transformer, sequences: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Log-probability of each answer token, float64, and the most likely token in its place."""
    logprobs, likeliest = [], []
    with torch.no_grad():
        for pack in packs(sequences):
            lengths = [len(p) + len(a) for p, a in pack]
            hidden = model.forward(torch.tensor([t for p, a in pack for t in p + a]), model.packed(lengths))
            rows = torch.cat([h[len(p) - 1 : -1] for (p, _), h in zip(pack, hidden.split(lengths), strict=True)])
            answers = torch.tensor([t for _, a in pack for t in a])
            logprobs.append(model.chosen_logprobs(rows, answers, 1.0)[0].double().cpu())
            none, draw = torch.zeros(len(answers), dtype=torch.float64), torch.full((len(answers),), -1)
            likeliest.append(model.next_tokens(rows, none, draw, 0.0)[0].cpu())
    return torch.cat(logprobs), torch.cat(likeliest)


def compare(scored: dict[tuple[str, str], tuple[Tensor, Tensor]]) -> list[dict[str, object]]:
    """A row a side."""
    base, likeliest = scored[SIDES[0]]
    rows: list[dict[str, object]] = []
    for (flow, cache), (logprobs, tokens) in scored.items():
        d = logprobs - base
        rows.append(
            {
                "flow": flow,
                "kv_cache": cache,
                "nll": float(-logprobs.mean()),
                "mean_difference": float(d.abs().mean()),
                "largest_difference": float(d.abs().max()),
                "kl": float((d.exp() - 1 - d).mean()),
                "other_likeliest": float((tokens != likeliest).double().mean()),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder, device = resolve_model(given.model), device_of(given.device)
    config = read_config(folder)
    tokenizer = load_tokenizer(folder, config)
    texts = read(given.data, given.problems)
    sequences = [(tokenizer.encode(q), tokenizer.encode(a, add_special_tokens=False)) for q, a in texts]
    scored = {}
    for flow, cache in SIDES:
        graph = build_flow(flow, config, cache)
        model = Transformer.of_folder(folder, config, graph.trainer_layers(config), device, graph.trainer_kv_fp8)
        scored[flow, cache] = score(model, sequences)
    rows = compare(scored)
    count = len(scored[SIDES[0]][0])
    print(f"{folder.name}, {given.problems} problems, {count} answer tokens, {device}")
    for row in rows:
        print("  ".join(f"{key} {value:.5f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    if given.json:
        meta = {"model": folder.name, "data": given.data.name, "problems": given.problems, "tokens": count}
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        meta |= {"device": where, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        given.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
