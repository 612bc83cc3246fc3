"""Each benchmark runs on a tiny random model, prints its table and writes its file."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch

from jetrl.config import parse_config
from jetrl.report.record import RunFolder
from tests.random_models import save_random_model

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules, imported as the scripts import each other: from their own folder. Timing groups are one call long."""
    import torch

    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("machine", "cases", "cpu", "operators")
    modules = {name: __import__(name) for name in names}
    monkeypatch.setattr(modules["machine"].best_seconds, "__defaults__", (1, 0.0))
    monkeypatch.setattr(modules["cases"], "keep_freed_memory", lambda: True)
    monkeypatch.setattr(modules["operators"], "keep_freed_memory", lambda: True)
    yield modules  # type: ignore[misc]
    torch.set_num_threads(threads)
    for name in (*names, "compare", "study", "moves"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True, tokenizer=False)


def test_cpu_benchmark(
    benchmarks: dict[str, ModuleType],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cpu, file = benchmarks["cpu"], tmp_path / "results" / "cpu.json"
    monkeypatch.setattr(cpu, "in_own_process", benchmarks["cases"].measure)
    absent = str(tmp_path / "absent")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{cpu.MARKERS[0]}\nold\n{cpu.MARKERS[1]}\nafter\n")
    options = ["--demo", str(model), "--smollm2", absent, "--quick", "--repeats", "1", "--threads", "1"]
    results = cpu.main([*options, "--json", str(file), "--readme", str(readme)])
    out = capsys.readouterr().out
    assert "SmolLM2-135M left out" in out and "rollout, tokens/s" in out and "GFLOP/s" in out
    kinds = [(r["kind"], r["flow"]) for r in results]
    assert kinds[2:] == [
        ("rollout", "fp8"), ("rollout", "bf16"), ("training", "fp8"), ("training", "bf16"),
        ("transformers", "bfloat16"), ("transformers", "float32"),
    ]  # fmt: skip
    assert all(r["tokens_per_s"] > 0 and r["peak_memory_gb"] > 0 for r in results[2:])
    written = json.loads(file.read_text())
    assert [r["kind"] for r in written["results"]] == [kind for kind, _ in kinds]
    assert {"date", "cpu", "cores", "versions", "command"} <= written.keys()
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| demo | rollout, tokens/s |" in text
    assert str(tmp_path) not in file.read_text().replace(json.dumps(str(model)), "")


def test_a_case_runs_in_its_own_process(benchmarks: dict[str, ModuleType], model: Path) -> None:
    case = benchmarks["cases"].Case("limits", str(model), "training", 1, 4, 4, threads=1, repeats=1)
    result = benchmarks["cpu"].in_own_process(case)
    assert asdict(case).items() <= result.items()
    assert result["gemm"]["tokens_per_s"] > 0
    broken = benchmarks["cases"].Case("rollout", str(model / "absent"), "fp8", 1, 4, 4, threads=1, repeats=1)
    with pytest.raises(RuntimeError, match="absent"):
        benchmarks["cpu"].in_own_process(broken)


def test_operators_benchmark(
    benchmarks: dict[str, ModuleType], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "operators.json"
    options = ["--model", str(model), "--sequences", "2", "--length", "5", "--threads", "1", "--json", str(file)]
    rows = benchmarks["operators"].main(options)
    assert all(row.seconds > 0 and row.work > 0 for row in rows)
    names = {(row.phase, row.operator) for row in rows}
    assert {("decode", "attention"), ("training", "gate_up grad_weight fp8"), ("training", "head gradients")} <= names
    assert "share of GEMM" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["rows"]) == len(rows)


def test_limits_follow_from_the_shapes(benchmarks: dict[str, ModuleType], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl.model.config import read_config

    machine, config = benchmarks["machine"], read_config(model)
    weights = sum(n * k for n, k in machine.matrices(config).values())
    monkeypatch.setattr(machine, "best_seconds", lambda work: 0.5)
    products = len(machine.matrices(config))
    assert products == 2 * 4 + 1  # qkv, o, gate_up, down of two layers, and the head
    limit = machine.gemm_limit(config, rows=8, head_rows=8, backward=True)
    assert limit["tokens_per_s"] == pytest.approx(8 / (products * 3 * 0.5))
    assert limit["gflops"] == pytest.approx(3 * 2 * 8 * weights / (products * 3 * 0.5) / 1e9)
    bandwidth = machine.bandwidth_limit(config, rows=8)
    assert bandwidth["tokens_per_s"] == pytest.approx(8 / 0.5)


def test_compare_sums_up_runs_by_flow(
    benchmarks: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [("fp8", 0, 0.25, 0.75, 0.0), ("fp8", 1, 0.35, 0.95, 0.0), ("fp8_rollout", 0, 0.3, 0.5, 0.5)]
    for flow, seed, before, after, diff in seen:
        config = parse_config({"flow": flow, "seed": seed, "loggers": []})
        differences = {"logprob_diff/max": diff, "logprob_diff/mean": diff / 2, "mismatch_kl": diff / 4}
        times = {"time/rollout": 1.0, "time/train": 2.0, "time/step": 3.0}
        speed = {"throughput/rollout": 100.0, "throughput/train": 50.0}
        with RunFolder(tmp_path / f"{flow}-{seed}", config) as run:
            run.evaluation(0, {"eval/avg@k": before, "eval/k": 1})
            run.train(1, {"reward/mean": 0.5, "token_diff/share": float(diff > 0), **differences, **times, **speed})
            run.evaluation(1, {"eval/avg@k": after, "eval/k": 1})
    out = tmp_path / "out.json"
    compare = __import__("compare")
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, sorted(tmp_path.iterdir())), "--json", str(out)])
    compare.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| `fp8` | 0.300 | 0.850 (0.141) | 0.500 | 0 | 0 | 0 | 0% | 100 | 50 |"
    assert lines[3] == "| `fp8_rollout` | 0.300 | 0.500 | 0.500 | 0.5 | 0.25 | 0.12 | 100% | 100 | 50 |"
    runs = json.loads(out.read_text())["runs"]
    assert [(r["flow"], r["seed"], r["held_out"][-1]) for r in runs][1] == ("fp8", 1, [1, 0.95])


def test_small_moves_are_published_late_but_for_stochastic_rounding(benchmarks: dict[str, ModuleType]) -> None:
    moves = __import__("moves")
    start = torch.full((256, 128), 0.1).bfloat16().float()  # a BF16 step here is 4.9e-4
    start[0] = 0.25
    for publish in (moves.in_bf16, moves.in_fp8):
        late = moves.shares(start, 1e-5, publish, rounded=False)
        right = moves.shares(start, 1e-5, publish, rounded=True)
        assert late[:2] == [0.0, 0.0]
        if publish is moves.in_bf16:
            assert late[-1] == pytest.approx(1.0, abs=0.2) and right[1:] == pytest.approx([1.0] * 5, abs=0.1)
    exact = moves.stochastic(start, torch.Generator().manual_seed(0))
    assert torch.equal(exact, start)  # values of BF16 stay


@pytest.fixture
def study(benchmarks: dict[str, ModuleType]) -> ModuleType:
    return __import__("study")


def test_study_data_is_right_distinct_and_has_short_examples(study: ModuleType, tmp_path: Path) -> None:
    from jetrl.config import TaskConfig
    from jetrl.tasks import load_task

    study.write_data(tmp_path)
    for name, longest in (("sums", 5), ("long", 64)):
        train, held_out = (tmp_path / f"{name}-{split}.jsonl" for split in ("train", "test"))
        task = load_task(
            TaskConfig(name="math", data=str(train), eval_data=str(held_out), template="chat", shots=study.SHOTS), seed=0
        )
        terms = [1 + p.question.count("+") for p in task.train]
        assert min(terms) == 2 and max(terms) == longest and not task.dropped
        assert all(3 <= 1 + p.question.count("+") <= 5 for p in task.examples)
        for problem in [*task.train[:50], *task.held_out[:50]]:
            assert int(problem.answer) == sum(map(int, problem.question.split(" + ")))
            steps = problem.metadata["solution"].splitlines()[:-1]
            assert all(int(line.split(" = ")[1]) == sum(map(int, line.split(" = ")[0].split(" + "))) for line in steps)
        task.close()


def test_study_runs_go_on_past_a_failure_and_stop_at_the_deadline(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for jetrl: one fails, one ends, one goes on until its SIGINT, and one has no time left to start."""
    waits = "import signal, sys, time; signal.signal(2, lambda *_: sys.exit(130)); print('up', flush=True); time.sleep(60)"
    scripts = ["raise SystemExit('no such model')", "print('done')", waits, waits]
    monkeypatch.setattr(study.Job, "command", lambda job: [sys.executable, "-c", scripts[job.seed]])
    monkeypatch.setattr(study, "STARTS", 2.0)
    jobs = study.plan(["stress"], [0, 1, 2, 3], tmp_path, ["sums:steps=7", "stress:steps=9", "model=demo"], ["fp8"])
    assert [job.overrides for job in jobs] == [["steps=9", "model=demo"]] * 4
    study.run_all(jobs, gpus=0, at_once=1, seconds=4.0, stagger=0.0)
    assert [job.process and job.process.returncode for job in jobs] == [1, 0, 130, None]
    assert "no such model" in study.outcome(jobs[0]) and "not started" in study.outcome(jobs[3])


def test_study_collects_runs_of_an_archive(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [("sums", "fp8", 0, 0.4, 0.0), ("sums", "fp8", 1, 0.6, 0.0), ("sums", "fp8_rollout", 0, 0.3, None)]
    made += [("moments", "moments_fp8", 0, 0.5, 0.0)]
    jobs = study.plan(["sums", "moments"], [0, 1], tmp_path / "runs", [], ["fp8", "fp8_rollout", "moments_fp8"])
    for task, variant, seed, after, diff in made:
        job = next(j for j in jobs if (j.task, j.variant, j.seed) == (task, variant, seed))
        config = parse_config({"flow": "fp8_rollout" if variant == "fp8_rollout" else "fp8", "seed": seed, "loggers": []})
        with RunFolder(job.folder, config) as run:
            run.evaluation(0, {"eval/avg@k": 0.25, "eval/k": 1, "eval/length": 3.0})
            for step in (1, 2):
                values = {"reward/mean": 0.5, "logprob_diff/max": diff, "logprob_diff/mean": 0.0, "mismatch_kl": 0.0}
                run.train(step, values | {"token_diff/share": 0.0, "grad_norm": 2.0, "length/mean": 7.0})
            run.evaluation(2, {"eval/avg@k": after, "eval/k": 1, "eval/length": 3.0})
            run.samples([{"step": 1, "completion": "a"}, {"step": 1, "completion": "b"}, {"step": 2, "completion": "c"}])
        (job.folder / "checkpoints").mkdir()
        study.tidy(job.folder)
        assert not (job.folder / "checkpoints").exists() and len((job.folder / "samples.jsonl").read_text().splitlines()) == 2
    machine = tmp_path / "m.json"
    machine.write_text('{"gpu": "none"}')
    study.pack(jobs, machine, tmp_path / "part.tar.gz")
    out = ["--folder", str(tmp_path / "out"), "--json", str(tmp_path / "r.json"), "--figures", str(tmp_path / "img")]
    study.main(["collect", str(tmp_path / "part.tar.gz"), *out, "--report", "sums", "--browser", "no-such-browser"])
    seen = capsys.readouterr()
    assert "| `fp8` | 2 | 0.250 ± 0.000 | 0.500 ± 0.141 | 0.500 ± 0.141 | 0.500 | 0 | 0 | 0 | 2 | 7 |" in seen.out
    assert "| `fp8_rollout` | 1 | 0.250 | 0.300 | 0.300 | 0.500 | nan, not finite in 2 steps |" in seen.out
    assert "| FP32 moments, FP32 masters | 1 |" in seen.out and "| FP8 moments, FP32 masters | 1 |" in seen.out
    assert "no Chromium" in seen.err and 'class="plot"' in (tmp_path / "out" / "study_sums.html").read_text()
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["machines"] == [{"gpu": "none"}] and len(written["runs"]) == 4
    curves = {r["run"]: r["curves"] for r in written["runs"]}
    assert curves["sums-fp8_rollout-0"]["logprob_diff_max"] == [[1, None], [2, None]]
