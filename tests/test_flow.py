"""Flows as graphs: the subgraph rule, what it catches, that the graphs say what the model does, and the drawing."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from jetrl.config import FlowName, KVCacheName
from jetrl.flow import (
    BF16,
    BLOCKS,
    HEADS,
    ROWS,
    TILES,
    TOKENS,
    Flow,
    Format,
    Graph,
    Node,
    build_flow,
    check_flow,
    describe_flow,
    differences,
    flow_table,
)
from jetrl.kernels import cpu, quant
from jetrl.kernels.gemm import Fp8Weight
from jetrl.model.checkpoint import parameter_shapes
from jetrl.model.config import ModelConfig, linear_names
from jetrl.model.transformer import Transformer
from jetrl.report.flowchart import draw_flow

ROOT = Path(__file__).resolve().parents[1]
FLOWS: tuple[FlowName, ...] = get_args(FlowName)
CACHES: tuple[KVCacheName, ...] = get_args(KVCacheName)
CODES = {"layer.q_codes", "layer.keys_values", "layer.probabilities", "layer.attention"}  # what an FP8 cache changes


def tiny(**changes: Any) -> ModelConfig:
    """Two layers, nothing divisible by 128, no options."""
    base = ModelConfig(
        "llama", 31, 20, 28, 2, 2, 1, 10, 1e-6, 1e4, None, 64, False, False, False, False, False, (1,), None, None
    )
    return replace(base, **changes)


EVERYTHING: dict[str, Any] = {"attention_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True}
CONFIGS = [tiny(), tiny(**EVERYTHING), tiny(tie_word_embeddings=True, attention_bias=True), tiny(qk_norm=True)]


def change_rollout(flow: Flow, name: str, change: Callable[[Node], Node]) -> Flow:
    nodes = tuple(change(node) if node.name == name else node for node in flow.rollout.nodes)
    assert nodes != flow.rollout.nodes
    return replace(flow, rollout=Graph(nodes))


@pytest.mark.parametrize("config", [None, *CONFIGS])
@pytest.mark.parametrize("kv_cache", CACHES)
def test_exact_flows_keep_the_rule_and_the_baseline_breaks_it(config: ModelConfig | None, kv_cache: KVCacheName) -> None:
    for name in ("fp8", "bf16"):
        assert build_flow(name, config, kv_cache).exact
        assert check_flow(build_flow(name, config, kv_cache)) == ()
        assert describe_flow(build_flow(name, config, kv_cache)).startswith("exact")
    flow = build_flow("fp8_rollout", config, kv_cache)
    found = check_flow(flow)
    assert not flow.exact
    linears = {f"layer.{n}.{kind}" for n in ("qkv", "o", "gate_up", "down") for kind in ("codes", "quantize", "gemm")}
    assert {d.node for d in found} == linears | (CODES if kv_cache == "fp8" else set())
    assert f"known-mismatched baseline: {16 if kv_cache == 'fp8' else 12} operators" in describe_flow(flow)
    assert "E4M3 1x128 with FP32 scales from layer.qkv.quantize" in "\n".join(map(str, found))


def test_fp8_layers_of_both_sides() -> None:
    config = tiny(num_layers=3)
    flows = [build_flow(name, config) for name in FLOWS]
    sides = {flow.name: (flow.trainer_layers(config), flow.rollout_layers(config)) for flow in flows}
    assert sides == {
        "fp8": (linear_names(config), linear_names(config)),
        "bf16": ((), ()),
        "fp8_rollout": ((), linear_names(config)),
    }
    assert [(f.trainer_fp8, f.rollout_fp8) for f in flows] == [(True, True), (False, False), (False, True)]


def test_an_fp8_cache_is_on_both_sides_or_in_the_rollout_of_the_baseline() -> None:
    sides = {(f.name, c): (f.trainer_kv_fp8, f.rollout_kv_fp8) for c in CACHES for f in (build_flow(n, None, c) for n in FLOWS)}
    assert sides == {(name, c): (c == "fp8" and name != "fp8_rollout", c == "fp8") for name in FLOWS for c in CACHES}
    flow = build_flow("bf16", None, "fp8")
    assert (flow.trainer_fp8, flow.rollout_fp8) == (False, False), "attention alone"
    operands = [edge.format for edge in flow.rollout.edges_into(flow.rollout.get("layer.attention"))]
    assert operands == [TILES, HEADS]
    gradient = flow.backward.edges_into(flow.backward.get("layer.attention.grad"))
    assert [edge.source for edge in gradient[1:]] == ["layer.q_codes", "layer.keys_values"]
    one_side = replace(flow, rollout=build_flow("bf16").rollout)
    with pytest.raises(
        ValueError, match=r"First: layer\.keys_values: operator is prepare_keys_values in the rollout, quantize"
    ):
        check_flow(one_side)
    with pytest.raises(ValueError, match="unknown kv_cache 'fp4'; use one of bf16, fp8"):
        build_flow("fp8", None, "fp4")  # type: ignore[arg-type]


def test_the_graph_decides_which_layers_run_in_fp8() -> None:
    config = tiny()
    flow = build_flow("fp8", config)
    inputs = flow.training.get("layer.down.quantize").inputs[0], "layer.down.weight"
    changed = change_rollout(flow, "layer.down.gemm", lambda node: replace(node, inputs=inputs))
    assert set(flow.rollout_layers(config)) - set(changed.rollout_layers(config)) == {"layers.0.down", "layers.1.down"}
    with pytest.raises(ValueError, match=r"First: layer\.down\.gemm: inputs is BF16 from layer\.silu_mul; BF16 from"):
        check_flow(changed)


MUTATIONS: dict[str, Callable[[Node], Node]] = {
    "dtype": lambda n: replace(n, output=Format("FP32") if n.output.dtype == "BF16" else BF16),
    "granularity": lambda n: replace(n, output=replace(n.output, granularity="1x64")),
    "scale": lambda n: replace(n, output=replace(n.output, scale="BF16")),
    "inside": lambda n: replace(n, inside="BF16"),
    "operator": lambda n: replace(n, operator="other"),
    "input missing": lambda n: replace(n, inputs=n.inputs[1:]),
    "inputs swapped": lambda n: replace(n, inputs=n.inputs[::-1]),
    "input twice": lambda n: replace(n, inputs=n.inputs + n.inputs[:1]),
}


@pytest.mark.parametrize(("name", "kv_cache"), [("fp8", "bf16"), ("bf16", "bf16"), ("fp8", "fp8")])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_one_change_of_any_operator_is_named_first(name: FlowName, kv_cache: KVCacheName, mutation: str) -> None:
    flow = build_flow(name, tiny(**EVERYTHING), kv_cache)
    tried = 0
    for node in flow.rollout.nodes:
        changed = MUTATIONS[mutation](node)
        if changed == node or node.operator in ("kv_cache", "sample"):
            continue
        tried += 1
        broken = change_rollout(flow, node.name, MUTATIONS[mutation])
        assert not broken.exact
        with pytest.raises(ValueError, match=f"First: {node.name}: "):
            check_flow(broken)
        assert "broken" in describe_flow(broken)
    assert tried > 10


def test_operators_of_the_rollout_alone_may_move_and_end_but_not_change_anything() -> None:
    flow = build_flow("fp8")
    cached = change_rollout(flow, "layer.kv_cache", lambda n: replace(n, output=ROWS))
    with pytest.raises(ValueError, match=r"First: layer\.kv_cache: output is E4M3 1x128 with FP32 scales .*, BF16"):
        check_flow(cached)
    assert "layer.attention" in {d.node for d in differences(cached)}  # it reads another format now
    from_sample = Node("echo", "add", ("sample",), BF16)
    assert [d.node for d in differences(replace(flow, rollout=Graph((*flow.rollout.nodes, from_sample))))] == ["sample", "echo"]
    disguised = change_rollout(flow, "layer.silu_mul", lambda n: replace(n, operator="sample"))
    assert differences(disguised)[0].node == "layer.silu_mul"


def test_a_bias_or_norm_on_one_side_and_an_empty_rollout_are_caught() -> None:
    full, bare = build_flow("fp8", tiny(**EVERYTHING)), build_flow("fp8", tiny())
    with pytest.raises(ValueError, match=r"First: layer\.heads: inputs is BF16 from layer\.qkv\.gemm in"):
        check_flow(replace(full, rollout=bare.rollout))
    with pytest.raises(ValueError, match=r"First: layer\.qkv_bias\.weight: operator is publish .* not there in training"):
        check_flow(replace(bare, rollout=full.rollout))
    with pytest.raises(ValueError, match="First: logprobs: operator is not there in the rollout"):
        check_flow(replace(full, rollout=Graph(())))


def test_a_baseline_that_agrees_and_an_unknown_name_are_refused() -> None:
    exact = build_flow("bf16")
    with pytest.raises(ValueError, match="known-mismatched baseline, but its rollout is a subgraph"):
        check_flow(replace(exact, name="fp8_rollout"))
    with pytest.raises(ValueError, match="unknown flow 'fp9'; use one of fp8, bf16, fp8_rollout"):
        build_flow("fp9")  # type: ignore[arg-type]


def test_graphs_that_cannot_run_are_refused() -> None:
    a = Node("a", "masters", (), BF16)
    with pytest.raises(AssertionError, match="two nodes are called a"):
        Graph((a, a))
    with pytest.raises(AssertionError, match="not made before it"):
        Graph((Node("b", "add", ("a",), BF16), a))


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("config", CONFIGS)
def test_backward_hands_gradients_over_in_bf16_and_reaches_every_weight(name: FlowName, config: ModelConfig) -> None:
    flow = build_flow(name, config)
    ends = Counter(node.name.rpartition(".")[0] for node in flow.backward.nodes if node.name.endswith(".grad_weight"))
    weights = {n.name.removesuffix(".weight") for n in flow.training.nodes if n.operator == "publish"}
    assert ends == Counter(weights | {"head"})  # a tied embedding gets a second gradient, as the head
    for node in flow.backward.nodes:
        kind = node.name.rpartition(".")[2]
        if kind == "grad_weight" or node.name == "logprobs.grad":
            assert node.output.dtype == "FP32"
        elif kind in ("grad", "grad_input"):
            assert node.output == BF16
        if node.operator == "gemm":
            formats = [edge.format for edge in flow.backward.edges_into(node)]
            wanted = [TOKENS, TOKENS] if kind == "grad_weight" else [ROWS, BLOCKS]
            assert formats == (wanted if flow.trainer_fp8 else [BF16, BF16])


def count_quantisations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()
    for module, function, group in (
        (quant, "quantize_rows", "1x128"),
        (quant, "quantize_tokens", "128x1"),
        (quant, "quantize_weight", "128x128"),
        (cpu, "quantize_heads", "1xhead"),
    ):
        original = getattr(module, function)

        def counted(*args: Any, _original: Any = original, _group: str = group) -> Any:
            calls[_group] += 1
            return _original(*args)

        monkeypatch.setattr(module, function, counted)
    return calls


def expected(graph: Graph, config: ModelConfig) -> Counter[str]:
    """Quantisations in one pass over a graph, of each input, by granularity; all of them are in the layer."""
    groups = [x.output.granularity for x in graph.nodes if x.operator == "quantize" for _ in x.inputs]
    return Counter({group: n * config.num_layers for group, n in Counter(groups).items()})


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("kv_cache", CACHES)
@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[2]])
def test_the_graphs_say_what_the_model_does(
    name: FlowName, kv_cache: KVCacheName, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow, calls = build_flow(name, config, kv_cache), count_quantisations(monkeypatch)
    tokens = torch.arange(8)

    def model(layers: tuple[str, ...], kv_fp8: bool) -> Transformer:
        made = Transformer(config, layers, kv_fp8=kv_fp8)
        made.load(
            {
                n: torch.randn(s, generator=torch.Generator().manual_seed(0)).bfloat16()
                for n, s in parameter_shapes(config).items()
            }
        )
        return made

    engine = model(flow.rollout_layers(config), flow.rollout_kv_fp8)
    with torch.no_grad():
        hidden = engine.forward(tokens, engine.packed([5, 3]))
    assert calls == expected(flow.rollout, config)
    calls.clear()

    trainer = model(flow.trainer_layers(config), flow.trainer_kv_fp8)
    for leaf in trainer.leaves.values():
        leaf.grad = torch.zeros(leaf.shape, dtype=torch.float64)
    again = trainer.forward(tokens, trainer.packed([5, 3]))
    assert calls == expected(flow.training, config)
    assert torch.equal(hidden, again.detach()) == flow.exact
    calls.clear()
    trainer.chosen_logprobs(again, tokens, 1.0)[0].sum().backward()
    assert calls == expected(flow.backward, config)

    in_graph = {n.name.removesuffix(".weight") for n in flow.training.nodes if n.operator == "publish"}
    assert {leaf.replace("layers.0.", "layer.") for leaf in trainer.leaves if "layers.1." not in leaf} == in_graph
    for leaf in trainer.leaves.values():
        fp8 = flow.training.find(leaf.name.replace("layers.0.", "layer.").replace("layers.1.", "layer.") + ".codes")
        assert isinstance(leaf.value, Fp8Weight) == (fp8 is not None)
        assert leaf.grad is not None
        assert leaf.grad.any(), leaf.name


def test_table() -> None:
    rows = flow_table(build_flow("fp8"))
    by_name = {row.operator: row for row in rows}
    assert len(by_name) == len(rows)
    gemm = by_name["layer.qkv.gemm"]
    assert (gemm.input, gemm.weight, gemm.output, gemm.inside) == ("E4M3 1x128", "E4M3 128x128", "BF16", "FP32")
    assert (gemm.rollout, gemm.training, gemm.backward, gemm.differs) == (True, True, False, False)
    assert {r.operator for r in rows if r.rollout and not r.training} == {"layer.kv_cache", "sample"}
    assert {r.operator for r in rows if r.training and not r.rollout} == {
        f"layer.{name}.saved" for name in ("qkv", "o", "gate_up", "down")
    }
    assert [r.operator for r in rows if r.backward] == [n.name for n in build_flow("fp8").backward.nodes]
    assert by_name["layer.qkv.grad_weight"].input == "E4M3 128x1"
    mixed = [row for row in flow_table(build_flow("fp8_rollout")) if row.operator == "layer.qkv.gemm"]
    assert [(r.input, r.rollout, r.training, r.differs) for r in mixed] == [
        ("BF16", False, True, True),
        ("E4M3 1x128", True, False, True),
    ]


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("kv_cache", CACHES)
@pytest.mark.parametrize("config", [None, CONFIGS[1]])
def test_drawing_shows_every_operator_and_marks_what_differs(
    name: FlowName, kv_cache: KVCacheName, config: ModelConfig | None
) -> None:
    flow = build_flow(name, config, kv_cache)
    differing = len({d.node for d in differences(flow)})
    text = draw_flow(flow)
    root = ET.fromstring(text)
    assert text == draw_flow(flow)
    space = "{http://www.w3.org/2000/svg}"
    boxes = [r for r in root.iter(f"{space}rect") if "b" in r.get("class", "").split()]
    red = [r for r in boxes if "red" in r.get("class", "").split()]
    assert len(red) == differing + 1  # and the one of the legend
    width = float(root.get("width", "0"))
    operators = sum(not g.is_weight(n) for g in (flow.rollout, flow.training, flow.backward) for n in g.nodes)
    assert len(boxes) > operators + 5
    for box in boxes:
        assert 0 < float(box.get("x", "0")) < float(box.get("x", "0")) + float(box.get("width", "0")) < width
    places = Counter((box.get("x"), box.get("y")) for box in boxes)
    assert max(places.values()) == 1, "two boxes lie on each other"
    weights = sum(name.endswith(".codes") for name in {d.node for d in differences(flow)})
    assert text.count("≠") == differing - weights
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("name", ["fp8", "fp8_rollout"])
def test_drawings_in_the_documentation_are_current(name: FlowName) -> None:
    drawn = (ROOT / "docs" / "img" / f"flow_{name}.svg").read_text(encoding="utf-8")
    assert drawn == draw_flow(build_flow(name)), f"write draw_flow(build_flow({name!r})) to that file again"


def test_import_leaves_torch_out() -> None:
    code = "import sys, jetrl.flow; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
