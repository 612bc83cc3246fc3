"""Pre-train the small base model that ships with jetrl, on arithmetic text, from nothing, on a CPU.

    python examples/pretrain_demo.py --out DIR --minutes 15

Problem: a first run of reinforcement learning needs a base model that is small enough for a laptop, is often wrong, and could
be right. Models of a few million parameters on the web are neither: zero-shot arithmetic is at zero.

Method: a Qwen3 model of 1.6 M parameters (hidden 192, which 128 does not divide; FFN 512, which it does) learns lines like
those one finds in text, each one document `<|bos|>question completion<|eos|>`. The question is always f"{a}{op}{b}=". The
completion comes in two styles, and its LAST integer (with an optional leading minus) is the answer:

    DIRECT   47+38=85                    the answer at once; a share are hasty, with a digit off by a little
    WORKED   47+38=7+8=15;4+3+1=8;85     column by column, least significant first, with carries; a few columns carry a slip,
                                         and the error then runs through to the answer
             52-37=12-7=5;5-3-1=1;15     a borrowed ten is added to the upper digit and taken off in the next column
             37-52=12-7=5;5-3-1=1;-15    a negative difference: the columns of the larger minus the smaller
             7*46=7*6=42;7*4+4=32;322    products have one one-digit factor

At temperature 1 the model repeats those habits: it is right about half of the time. Reinforcement learning can raise that by
choosing the worked style and by dropping the slips; nothing new has to be learned, so some dozens of steps suffice.
(Steps are parted by `;`, for with `,` a grader may read `8,385` as one number.) A few documents are pages of several lines:
right DIRECT lines before the question, as in few-shot prompts.

Held out: a question whose SHA-256, read as an integer, is divisible by 10 never occurs in the corpus (see `is_held_out`).

Deterministic: the corpus, its order and the initial weights follow from --seed and the number of steps. With --minutes that
number is set from the speed of the first steps and printed; give it back as --steps for the same run again (same bits on the
same torch build with the same number of threads).

Gives up: other text. The loss covers completions only, so the model cannot make up questions, and it knows no words.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS, UNK = "<|pad|>", "<|bos|>", "<|eos|>", "<|unk|>"
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
# One line a turn, exactly like a document of the corpus: a user asks `47+38=`, the assistant's text ends with EOS.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Habits:
    """How the text of the corpus is written; every share is a probability."""

    worked: float = 0.42  # lines in WORKED style; the others are DIRECT
    hasty: float = 0.5  # DIRECT lines with a wrong digit
    slip: float = 0.08  # columns of a WORKED line with a wrong result
    pages: float = 0.04  # documents in which one to three other lines come first


# --- the corpus ---------------------------------------------------------------------------------------------------------------


def is_held_out(question: str) -> bool:
    """Whether a question such as '47+38=' is kept out of the corpus: SHA-256 of its text, as an integer, mod 10 is 0."""
    return int(hashlib.sha256(question.encode()).hexdigest(), 16) % 10 == 0


def answer_of(completion: str) -> int | None:
    """The grader's rule: the last integer of the text, with its leading minus if there is one; None without an integer."""
    found = re.findall(r"-?\d+", completion)
    return int(found[-1]) if found else None


def result_of(a: int, op: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def digits_of(number: int, columns: int) -> list[int]:
    """Decimal digits, least significant first, filled with zeros to `columns`."""
    return [number // 10**place % 10 for place in range(columns)]


def worked(a: int, op: str, b: int, slip: float, rng: random.Random) -> str:
    """The WORKED completion. Each column's result is wrong with probability `slip`; what follows builds on what was written."""
    sign = ""
    if op == "-" and a < b:
        a, b, sign = b, a, "-"
    if op == "*" and a > 9:
        a, b = b, a
    columns = len(str(max(a, b)))
    upper = [a] * columns if op == "*" else digits_of(a, columns)
    steps, written, carry = [], 0, 0
    for place, (x, y) in enumerate(zip(upper, digits_of(b, columns), strict=True)):
        borrow = 10 if op == "-" and x - y - carry < 0 else 0
        value = result_of(x + borrow, op, y) + (-carry if op == "-" else carry)
        if rng.random() < slip:
            value = abs(value + rng.choice((-2, -1, 1, 2)))
            value = min(value, 9) if op == "-" else value
        carried = f"{'-' if op == '-' else '+'}{carry}" if carry else ""
        steps.append(f"{x + borrow}{op}{y}{carried}={value}")
        last = place == columns - 1
        written += (value if last else value % 10) * 10**place
        carry = borrow // 10 if op == "-" else value // 10
    return ";".join([*steps, f"{sign if written else ''}{written}"])


def direct(a: int, op: str, b: int, hasty: float, rng: random.Random) -> str:
    """The DIRECT completion; with probability `hasty` one or both of the last two digits are off by 1 to 3."""
    result = result_of(a, op, b)
    if rng.random() >= hasty:
        return str(result)
    shift = rng.choice((-3, -2, -1, 1, 2, 3))
    return str(result + shift * rng.choice((1, 10)) + rng.choice((0, 0, shift)))


def draw_problem(rng: random.Random) -> tuple[int, str, int]:
    """Operands of 1 to 3 digits, mostly 2 and mostly of equal length; one problem in ten is a small product."""
    op = rng.choices("+-*", (45, 45, 10))[0]
    lengths = rng.choices((1, 2, 3), (22, 63, 15), k=2)
    if rng.random() < 0.6:
        lengths[1] = lengths[0]
    if op == "*":
        lengths = rng.choice(([1, 1], [1, 2], [2, 1]))
    a, b = (rng.randrange(0 if n == 1 else 10 ** (n - 1), 10**n) for n in lengths)
    return a, op, b


def allowed_problem(rng: random.Random) -> tuple[str, int, str, int]:
    """A question that is not held out, and its parts."""
    while True:
        a, op, b = draw_problem(rng)
        if not is_held_out(question := f"{a}{op}{b}="):
            return question, a, op, b


def documents(seed: int, habits: Habits) -> Iterator[tuple[str, str]]:
    """Endless (what comes first, completion) pairs without held-out questions, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        question, a, op, b = allowed_problem(rng)
        if rng.random() < habits.pages:
            shots = [allowed_problem(rng) for _ in range(rng.randint(1, 3))]
            question = "".join(f"{shot}{result_of(x, sign, y)}\n" for shot, x, sign, y in shots) + question
        if rng.random() < habits.worked:
            yield question, worked(a, op, b, habits.slip, rng)
        else:
            yield question, direct(a, op, b, habits.hasty, rng)


# --- tokenizer and model ------------------------------------------------------------------------------------------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: 4 specials, newline and printable ASCII (100 in all). Other characters become <|unk|>."""
    specials = [PAD, BOS, EOS, UNK]
    vocabulary = {token: index for index, token in enumerate([*specials, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, model_max_length=512,
        clean_up_tokenization_spaces=False, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A fresh Qwen3 in float32: 1.6 M parameters, tied embeddings, q/k norms, 6 query and 2 KV heads of 32."""
    torch.manual_seed(seed)
    index = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True, initializer_range=0.04,
        pad_token_id=index[PAD], bos_token_id=index[BOS], eos_token_id=index[EOS],
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float()


# --- training -----------------------------------------------------------------------------------------------------------------


def batches(
    seed: int, habits: Habits, tokenizer: PreTrainedTokenizerFast, tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids [B, L] int64, labels [B, L] int64); documents of about equal length share a batch of about `tokens`.

    Right padding needs no attention mask: attention is causal and the labels of questions and padding are -100.
    """
    index = tokenizer.get_vocab()
    pad, bos, eos = index[PAD], index[BOS], index[EOS]
    stream, order = documents(seed, habits), random.Random(seed + 1)
    while True:
        pool = sorted((next(stream) for _ in range(4096)), key=lambda pair: len(pair[0]) + len(pair[1]))
        cuts: list[list[tuple[str, str]]] = []
        while pool:
            size = max(1, tokens // (len(pool[-1][0]) + len(pool[-1][1]) + 2))
            cuts.append(pool[-size:])
            del pool[-size:]
        order.shuffle(cuts)
        for cut in cuts:
            rows = [[bos, *(index[c] for c in q + w), eos] for q, w in cut]
            width = max(map(len, rows))
            ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
            starts = torch.tensor([1 + len(q) for q, _ in cut])[:, None]
            ends = torch.tensor([len(row) for row in rows])[:, None]
            place = torch.arange(width)[None]
            yield ids, torch.where((place >= starts) & (place < ends), ids, -100)


def rate_factor(step: int, steps: int) -> float:
    """The learning rate as a share of its peak: linear warmup over the first 4% of the steps, then a cosine to 0.01."""
    warmup = max(1, steps // 25)
    if step < warmup:
        return (step + 1) / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def build_optimizers(model: Qwen3ForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the embedding and the head, AdamW for the rest.

    After 500 steps the loss was 0.82, with AdamW alone (rate 3e-3) 1.29; one run and one rate each, neither tuned.
    """
    named = list(model.named_parameters())
    inner = [p for name, p in named if p.ndim == 2 and "embed_tokens" not in name]
    outer = [p for name, p in named if p.ndim != 2 or "embed_tokens" in name]
    return [
        torch.optim.Muon(inner, lr=lr, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(outer, lr=0.15 * lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: Qwen3ForCausalLM, data: Iterator[tuple[torch.Tensor, torch.Tensor]], args: argparse.Namespace) -> None:
    """--steps optimizer steps in float32, or as many as fit into --minutes."""
    optimizers = build_optimizers(model, args.lr)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    timed, steps, step, seen, average = 20, args.steps or 10**9, 0, 0, 0.0
    begin = time.monotonic()
    while step < steps:
        if step == timed and not args.steps:
            steps = max(timed + 1, round(args.minutes * 60 / (time.monotonic() - begin) * timed))
            print(f"{steps} steps fit into {args.minutes} minutes; repeat this run with --steps {steps}", flush=True)
        # The first steps come before the number of steps is known, so their rate must not depend on it.
        factor = 0.05 if step < timed else rate_factor(step, steps)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.zero_grad(set_to_none=True)
        ids, labels = next(data)
        logits = model(input_ids=ids, use_cache=False).logits
        # A sum over a fixed number, not a mean over the batch's labels: batches of short lines have fewer of them, and a mean
        # would make the model write the short style more often than the corpus does.
        loss_sum = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
        (loss_sum / args.batch_tokens).backward()
        loss = loss_sum.detach() / (labels != -100).sum()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step, seen = step + 1, seen + ids.numel()
        average = loss.item() if step == 1 else 0.98 * average + 0.02 * loss.item()
        if step % 100 == 0 or step == steps:
            spent = time.monotonic() - begin
            print(f"step {step}  loss {average:.4f}  {seen / spent:.0f} tokens/s  {spent:.0f} s", flush=True)


# --- what it can do, and saving -----------------------------------------------------------------------------------------------


@torch.no_grad()
def complete(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[str], temperature: float
) -> list[str]:
    """Completions of questions of equal length, up to 40 tokens; temperature 0 is greedy."""
    ids = tokenizer(questions, return_tensors="pt")["input_ids"]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    generate = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    out = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, **sampling)
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def held_out_questions(op: str, digits: tuple[int, int], count: int, seed: int = 7) -> list[tuple[str, int]]:
    """Up to `count` different held-out (question, answer) with operands of exactly these numbers of digits."""
    spans = [range(0 if n == 1 else 10 ** (n - 1), 10**n) for n in digits]
    rng, found = random.Random(seed), {}
    for _ in range(200 * count):
        a, b = rng.choice(spans[0]), rng.choice(spans[1])
        if is_held_out(question := f"{a}{op}{b}="):
            found[question] = result_of(a, op, b)
        if len(found) == count:
            break
    return list(found.items())


def report(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int = 256) -> list[dict[str, str | float]]:
    """Held-out accuracy, share of worked style and mean length, by operator and digits, at temperature 1 and greedy."""
    model.eval()
    rows: list[dict[str, str | float]] = []
    for op, digits in [("+", (1, 1)), ("+", (2, 2)), ("+", (3, 3)), ("-", (1, 1)), ("-", (2, 2)), ("-", (3, 3)), ("*", (1, 2))]:
        problems = held_out_questions(op, digits, count)
        for temperature in (1.0, 0.0):
            torch.manual_seed(0)
            texts = complete(model, tokenizer, [q for q, _ in problems], temperature)
            right = [answer_of(text) == answer for text, (_, answer) in zip(texts, problems, strict=True)]
            styles = ["=" in text for text in texts]
            both = [r for r, s in zip(right, styles, strict=True) if s]
            row = {
                "task": f"{digits[0]}{op}{digits[1]} digits",
                "temperature": temperature,
                "accuracy": sum(right) / len(right),
                "worked": sum(styles) / len(styles),
                "worked_accuracy": sum(both) / max(1, len(both)),
                "direct_accuracy": (sum(right) - sum(both)) / max(1, len(right) - len(both)),
                "tokens": sum(len(text) + 1 for text in texts) / len(texts),
            }
            rows.append(row)
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    return rows


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Qwen3ForCausalLM:
    """Write a Hugging Face folder with BF16 weights; returns the model with its weights rounded as saved."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        do_sample=True, temperature=1.0,
    )  # fmt: skip
    model = model.bfloat16()
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    # The template lives in tokenizer_config.json, and the class has the name that every version of transformers knows.
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    file.write_text(json.dumps(settings, indent=2) + "\n")
    return model.float()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--minutes", type=float, default=15.0, help="training time; sets the number of steps")
    parser.add_argument("--steps", type=int, help="number of steps, instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's peak learning rate")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    for name, share in vars(Habits()).items():
        parser.add_argument(f"--{name}", type=float, default=share)
    args = parser.parse_args()
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps is {args.steps}; give 1 or more")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    habits = Habits(args.worked, args.hasty, args.slip, args.pages)
    train(model, batches(args.seed, habits, tokenizer, args.batch_tokens), args)
    report(save(model, tokenizer, args.out), tokenizer)


if __name__ == "__main__":
    main()
