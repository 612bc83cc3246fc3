"""The `jetrl` command. Heavy imports live inside the commands, so `jetrl --help` and bad input answer at once."""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from jetrl.config import DeviceName, FlowName, KVCacheName, RunConfig, load_config
from jetrl.kernels.memory import keep_freed_memory
from jetrl.rl.types import MismatchError

app = typer.Typer(
    name="jetrl",
    help="Reinforcement learning of language models in one FP8 precision flow, exact to the bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Piped output has no width of its own; 80 columns would fold the tables beyond reading.
console = Console() if Console().is_terminal else Console(width=128)

ConfigFile = Annotated[Path, typer.Argument(help="a YAML file, for instance configs/quickstart.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, dotted keys: flow=bf16 optimizer.lr=1e-5")]
ModelName = Annotated[str, typer.Argument(help="`demo`, `smollm2`, a Hugging Face model folder, or a hub id")]
FlowOption = Annotated[FlowName, typer.Option(help="precision flow")]
CacheOption = Annotated[KVCacheName, typer.Option(help="keys, values and attention's products")]
DeviceOption = Annotated[DeviceName, typer.Option(help="auto: a Hopper GPU if there is one, else the CPU")]

GpuOption = Annotated[str | None, typer.Option(help="plan for a GPU that need not be here: h200, h100 or its GB")]

OUT_HELP = (
    "write JSONL with tokens and log-probabilities here, a line a completion, as soon as all of a prompt have ended, so in no "
    "order: `index` is the prompt's number, from 0; what is written stays if the command is interrupted"
)

bench = typer.Typer(help="Measure our kernels on a Hopper GPU: FP8 beside BF16, and beside the roofline.", no_args_is_help=True)
app.add_typer(bench, name="bench")
ShapeOption = Annotated[str, typer.Option(help="qwen3-8b, llama3.1-8b, qwen2.5-7b, smollm2, or a model folder")]
TokensOption = Annotated[int, typer.Option(help="tokens of a training microbatch; targets are for 8192")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="write every row into this file")]


def _table(title: str, rows: list[tuple[str, Any]]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(str(value)))  # jetrl[data] is no markup
    console.print(table)


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="go on from the last checkpoint in `folder`")] = False,
    dry_run: Annotated[bool, typer.Option(help="check everything and print the derived numbers, then stop")] = False,
    gpu: GpuOption = None,
) -> None:
    """Train a model as a configuration says. Ctrl-C finishes the step, saves, and ends with exit status 130."""
    settings = load_config(config, overrides)
    if resume and settings.folder is None:
        raise ValueError("--resume needs to know the run: add folder=RUN_FOLDER, the folder to go on in")
    if gpu and not dry_run:
        raise ValueError(
            f"--gpu {gpu} plans for a GPU that need not be here: add --dry-run. A run takes the GPU of this machine."
        )
    if dry_run:
        _show_plan(settings, gpu)
        return
    from jetrl.run import run_training

    if not run_training(settings, resume):
        raise typer.Exit(130)  # so that a script does not go on as if the run were done


def _show_plan(config: RunConfig, gpu: str | None) -> None:
    from jetrl.footprint import Place, parameter_count
    from jetrl.plan import describe_cache
    from jetrl.run import dry_run

    s = dry_run(config, Place.of(config.device, gpu))
    b, prompts = s.batches, f"{len(s.prompts)} prompts, {len(s.held_out)} held out"
    _table(
        "What will run",
        [
            ("model", f"{config.model} ({s.model.family}, {parameter_count(s.model):,} parameters)"),
            (
                "flow",
                f"{s.flow.name}: " + ("exact" if s.flow.exact else "a known mismatch between rollout and training"),
            ),
            ("task", f"{config.task.name}: {prompts if s.prompts else 'prompts not known, see the notes'}"),
            ("steps", f"{config.steps}, with {b.updates} optimizer steps"),
            (
                "completions of a step",
                f"{config.rollout.prompts_per_step} x {config.rollout.group_size} = {b.completions}",
            ),
            ("completions of an optimizer step", f"{b.per_update} in at most {b.microbatches} microbatches"),
            ("longest sequence", f"{b.longest} tokens"),
            ("running together", b.limits.max_sequences),
            ("KV cache", describe_cache(config, b)),
            ("layers computed anew in the backward", f"{b.recompute_layers} of {s.model.num_layers}"),
            *[("note", note) for note in s.notes],
        ],
    )
    plan = s.footprint
    sums = [("all of a rollout", plan.rollout_gb), ("all of training", plan.training_gb)]
    rows = [(name, f"{gb:8.3f} GB") for name, gb in plan.stays + plan.rollout + plan.training + sums if gb]
    of = f"GPU of {plan.place.gb:.1f} GB" if plan.place.gb else "GPU" if plan.place.kind == "cuda" else "CPU"
    _table(f"Memory on a {of}", rows)


@app.command("eval")
def evaluate(
    model: ModelName,
    config: Annotated[Path, typer.Option(help="the configuration whose task, limits and eval settings are used")],
    overrides: Overrides = None,
) -> None:
    """Measure avg@k and pass@k of a model on the held-out prompts of a configuration's task."""
    settings = load_config(config, overrides).model_copy(update={"model": model})
    from jetrl.evaluate import evaluate_model

    values, failed = evaluate_model(settings)
    k = settings.eval.samples
    _table(
        f"{model} on {settings.task.name}, flow {settings.flow}",
        [
            (f"avg@{k}", f"{values['eval/avg@k']:.4f}"),
            (f"pass@{k}", f"{values['eval/pass@k']:.4f}"),
            ("held-out prompts", f"{values['eval/prompts']:.0f}, {k} completions each"),
            ("without a readable answer", f"{values['eval/unparsed']:.1%}"),
            ("mean length", f"{values['eval/length']:.1f} tokens"),
            ("time", f"{values['time/eval']:.1f} s"),
        ],
    )
    if failed:
        console.print(f"grading failed on {len(failed)} completions, counted wrong: {failed[0]}", style="red", markup=False)


@app.command()
def generate(
    model: ModelName,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="a prompt; may be given several times")] = None,
    file: Annotated[Path | None, typer.Option(help="prompts: one a line, or JSONL with a `prompt`")] = None,
    out: Annotated[Path | None, typer.Option(help=OUT_HELP)] = None,
    flow: FlowOption = "fp8",
    kv_cache: CacheOption = "bf16",
    chat: Annotated[bool, typer.Option(help="put each prompt into the chat template")] = False,
    samples: Annotated[int, typer.Option(min=1, help="completions of each prompt")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: DeviceOption = "auto",
) -> None:
    """Complete prompts, with the log-probability of each token."""
    from jetrl.evaluate import generate_texts, read_prompts

    prompts = [*(prompt or []), *(read_prompts(file) if file else [])]
    if not prompts:
        raise ValueError("no prompts: give --prompt TEXT or --file FILE")
    if out:  # a path that cannot be written is found out before the work
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    found = generate_texts(model, flow, kv_cache, prompts, chat, samples, max_tokens, temperature, seed, device, console)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    with out.open("w", encoding="utf-8") if out else nullcontext() as lines:
        for ended in found:
            rows += ended
            if lines:
                lines.write("".join(json.dumps(row) + "\n" for row in ended))
                lines.flush()
    speed = sum(len(row["token_ids"]) for row in rows) / max(time.perf_counter() - start, 1e-9)
    if out:
        console.print(f"{len(rows)} completions in {out}, {speed:,.0f} tokens/s")
        return
    for row in sorted(rows, key=lambda row: row["index"]):
        console.print(row["prompt"], style="dim", end="", markup=False, highlight=False)
        console.print(row["completion"], markup=False, highlight=False)
    console.print(f"{speed:,.0f} tokens/s", style="dim")


@app.command()
def check(
    model: ModelName,
    flow: FlowOption = "fp8",
    kv_cache: CacheOption = "bf16",
    tokens: Annotated[int, typer.Option(min=8, help="about so many random tokens in all")] = 512,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: DeviceOption = "auto",
    random_layers: Annotated[
        int | None, typer.Option(min=1, help="random weights in so many layers; MODEL may then be a size such as qwen3-8b")
    ] = None,
) -> None:
    """Prove that engine and trainer agree to the bit, operator by operator; exit status 1 if they do not."""
    from jetrl.check import check_model, model_to_check

    transformer = model_to_check(model, flow, device, random_layers, seed, kv_cache)
    results = check_model(transformer, tokens, seed)
    weights = "" if random_layers is None else f", {random_layers} random layers"
    table = Table(title=f"{model}{weights}, flow {flow}, kv_cache {kv_cache}, {transformer.device}", title_justify="left")
    table.add_column("claim")
    for column in ("rows", "tensors", "differing rows"):
        table.add_column(column, justify="right")
    for r in results:
        style = "green" if r.differing == 0 else "bold red"
        table.add_row(r.name, str(r.rows), str(r.tensors), f"[{style}]{r.differing}[/]")
    console.print(table)
    for r in results:
        if r.first is not None:
            console.print(f"{r.name}: first difference in {r.first}", style="red")
    if any(r.differing for r in results):
        raise typer.Exit(1)
    console.print("zero differing bits", style="green")


@app.command()
def flow(
    name: Annotated[FlowName, typer.Argument(help="fp8, bf16 or fp8_rollout")] = "fp8",
    model: Annotated[str | None, typer.Option(help="a model, for its biases and head norms")] = None,
    kv_cache: CacheOption = "bf16",
    svg: Annotated[Path | None, typer.Option(help="draw the flow into this file")] = None,
) -> None:
    """Print a precision flow as a table, and draw it."""
    from jetrl.flow import build_flow, describe_flow, differences, flow_table
    from jetrl.model.config import read_config
    from jetrl.model.sources import resolve_model

    graph = build_flow(name, read_config(resolve_model(model, weights=False)) if model else None, kv_cache)
    table = Table(title=f"flow {name}, kv_cache {kv_cache}", title_justify="left")
    for column in ("operator", "reads", "weight", "writes", "inside", "where"):
        table.add_column(column, no_wrap=column in ("operator", "where"), overflow="fold")
    for row in flow_table(graph):
        sides = {"rollout": row.rollout, "training": row.training, "backward": row.backward}
        where = " + ".join(side for side, there in sides.items() if there)
        cells = (row.operator, row.input, row.weight, row.output, row.inside, where)
        table.add_row(*cells, style="red" if row.differs else None)
    console.print(table)
    for difference in differences(graph):
        console.print(f"  {difference}", style="yellow", markup=False)
    console.print(describe_flow(graph), style="bold")
    if svg:
        from jetrl.report.flowchart import draw_flow

        svg.write_text(draw_flow(graph), encoding="utf-8")
        console.print(f"drawn in {svg}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders; several are overlaid")],
    out: Annotated[Path | None, typer.Option(help="the page; default: report.html in the first run folder")] = None,
) -> None:
    """Write one self-contained HTML page about one or several runs."""
    from jetrl.report.page import write_report

    path = write_report(runs, out or runs[0] / "report.html")
    console.print(f"report: {path}")


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="a configuration, for its plan of batches and memory")] = None,
    overrides: Overrides = None,
    gpu: GpuOption = None,
) -> None:
    """Say what this machine has, what will run where, and what a configuration needs."""
    from jetrl.doctor import machine, packages, where_things_run

    if gpu and not config:
        raise ValueError(f"--gpu {gpu} plans a configuration for that GPU: give one, as in jetrl doctor CONFIG --gpu {gpu}")
    _table("Machine", machine())
    _table("Packages", packages())
    _table("What runs where", where_things_run())
    if config:
        _show_plan(load_config(config, overrides), gpu)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2")],
    out: Annotated[Path | None, typer.Option(help="folder; default: the cache, where `model: smollm2` finds it")] = None,
) -> None:
    """Fetch and convert a small real model: SmolLM2-135M-Instruct, 93 MB."""
    if name != "smollm2":
        raise ValueError(f"{name!r} cannot be fetched; known: smollm2. For others give a folder or a hub id as the model.")
    from jetrl.model.smollm2 import fetch_smollm2

    fetch_smollm2(out, console.print)


@bench.command("gemm")
def bench_gemm(
    shape: ShapeOption = "qwen3-8b",
    tokens: TokensOption = 8192,
    backends: Annotated[bool, typer.Option("--backends", help="the FP8 product in each backend too")] = False,
    file: JsonOption = None,
) -> None:
    """The four linear layers of a block, forward and backward, quantisation included."""
    from jetrl.bench.run import run_bench

    run_bench("gemm", shape, tokens, file, console, backends=backends)


@bench.command("attention")
def bench_attention(shape: ShapeOption = "qwen3-8b", tokens: TokensOption = 8192, file: JsonOption = None) -> None:
    """Prefill and backward beside cuDNN, decode from a paged cache beside the memory's rate."""
    from jetrl.bench.run import run_bench

    run_bench("attention", shape, tokens, file, console)


@bench.command("layer")
def bench_layer(shape: ShapeOption = "qwen3-8b", tokens: TokensOption = 8192, file: JsonOption = None) -> None:
    """A whole block: training, the cost of exactness, a step of decode, and where the time goes."""
    from jetrl.bench.run import run_bench

    run_bench("layer", shape, tokens, file, console)


@bench.command("head")
def bench_head(shape: ShapeOption = "qwen3-8b", tokens: TokensOption = 8192, file: JsonOption = None) -> None:
    """Log-probabilities of chosen tokens out of hidden states, beside plain torch; time and memory."""
    from jetrl.bench.run import run_bench

    run_bench("head", shape, tokens, file, console)


@bench.command("rollout")
def bench_rollout(
    shape: ShapeOption = "qwen3-8b",
    cases: Annotated[str, typer.Option(help="which, with commas between them")] = "wide,middle,narrow,tail",
    flows: Annotated[str, typer.Option(help="one model after the other; kv8: FP8 keys and values")] = "fp8,fp8+kv8,bf16",
    tail_sequences: Annotated[int, typer.Option(min=1, help="sequences of `tail` that run together")] = 256,
    check: Annotated[int, typer.Option(min=0, help="sampled tokens of a case that the trainer scores again")] = 200_000,
    profile: Annotated[bool, typer.Option("--profile", help="also the kernels of a decode step in mid-run")] = False,
    file: JsonOption = None,
) -> None:
    """Generation with a whole model of random weights: output tokens/s, the mean decode step, and differing bits."""
    from jetrl.bench.run import run_rollout

    run_rollout(shape, cases, flows, tail_sequences, check, profile, file, console)


@bench.command("step")
def bench_step(
    shape: ShapeOption = "qwen3-8b",
    cases: Annotated[str, typer.Option(help="which of 1k, 8k, tail, with commas between them")] = "1k,8k",
    flows: Annotated[str, typer.Option(help="one model after the other; of fp8, bf16, fp8+kv8 (FP8 KV cache)")] = "fp8,bf16",
    steps: Annotated[int, typer.Option(min=1, help="measured steps of a case, after a short one")] = 2,
    moments: Annotated[str, typer.Option(help="AdamW's moments: fp8, int8 or fp32")] = "fp8",
    tokens: TokensOption = 8192,
    weights: Annotated[bool, typer.Option("--weights", help="train the weights of the model folder, not random ones")] = False,
    file: JsonOption = None,
) -> None:
    """Whole steps of reinforcement learning: time by phase in FP8, BF16, and BF16 with old log-probabilities; memory."""
    from jetrl.bench.run import run_step

    run_step(shape, cases, flows, steps, moments, tokens, weights, file, console)


def main() -> None:
    """Entry point: a ValueError and a file that cannot be used are the user's to mend, and shown without a traceback."""
    errors = Console(stderr=True) if Console(stderr=True).is_terminal else Console(stderr=True, width=1000)  # never folded
    handler = RichHandler(console=errors, show_time=False, show_path=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    keep_freed_memory()
    # Rollout and training take turns in the same memory, in pieces of other sizes.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        app()
    except (ValueError, OSError, MismatchError) as error:
        # soft_wrap: a terminal breaks long lines itself, and a log can be searched
        Console(stderr=True).print(f"error: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(3 if isinstance(error, MismatchError) else 2) from None
