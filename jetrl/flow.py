"""Precision flows as data: which operator reads, accumulates and writes which format, on each side of a run.

Problem: "rollout and training use the same precision" is easy to say and easy to break; one layer left in BF16, one other
granularity or one dropped bias on one side, and the sampler's policy is not the trainer's.

Method: a flow is three small directed graphs for a template decoder layer with embedding and head around it: the rollout
(prefill and decode, one graph), the training forward and the backward. An operator is a node: what it is, what it reads,
the type it accumulates in and the `Format` it writes. The layers that run in FP8 are read off these graphs, so they decide
what happens. A flow is exact if the rollout is a subgraph of the training forward: every operator of the rollout exists in
training with the same operator, formats and inputs, up to two operators that only a rollout has. The KV cache hands on
the bytes it was given, and sampling writes nothing that another operator reads. With an FP8 cache attention itself is in
FP8: queries, keys, values and probabilities are codes on whichever side has it, which is both in an exact flow.

Given up: a graph says nothing of reduction orders; those are kept by the kernels and proved by `logprob_diff`. FP32 is
the contract's word for what happens inside an operator; the CPU reference uses float64 there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from jetrl.config import FlowName, KVCacheName
from jetrl.model.config import LINEARS, ModelConfig, linear_names

Dtype = Literal["E4M3", "BF16", "FP32", "INT64"]

HANDS_ON = "kv_cache"  # the branch on the phase that the contract allows: where keys and values come from
ENDS = "sample"
OUTCOME = "logprobs"
KNOWN_MISMATCHED = frozenset({"fp8_rollout"})


@dataclass(slots=True, frozen=True)
class Format:
    """How a tensor is written: its type and, for E4M3, the group that shares a scale and the type of that scale."""

    dtype: Dtype
    granularity: str = ""
    scale: Dtype | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {self.granularity}".strip()


BF16, FP32, INT64 = Format("BF16"), Format("FP32"), Format("INT64")
ROWS, TOKENS, BLOCKS = (Format("E4M3", group, "FP32") for group in ("1x128", "128x1", "128x128"))
HEADS = Format("E4M3", "1xhead", "FP32")  # one head of one token
TILES = Format("E4M3", "1x64", "FP32")  # a row's probabilities of a tile of keys


@dataclass(slots=True, frozen=True)
class Node:
    """One operator. `inputs` are names of nodes, in the order of the operands; `inside` is the type that it sums in."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    output: Format
    inside: Dtype | None = None


@dataclass(slots=True, frozen=True)
class Edge:
    """What one operator hands to another."""

    source: str
    target: str
    format: Format


@dataclass(slots=True, frozen=True)
class Graph:
    """Operators in an order in which they can run. `before` is the graph whose outputs this one may read as well."""

    nodes: tuple[Node, ...]
    before: Graph | None = None

    def __post_init__(self) -> None:
        known = set() if self.before is None else {node.name for node in self.before.nodes}
        for node in self.nodes:
            assert node.name not in known, f"two nodes are called {node.name}"
            assert known.issuperset(node.inputs), f"{node.name} reads {set(node.inputs) - known}, not made before it"
            known.add(node.name)

    def find(self, name: str) -> Node | None:
        """The node of that name here or in the graph before, or None."""
        own = next((node for node in self.nodes if node.name == name), None)
        return self.before.find(name) if own is None and self.before is not None else own

    def get(self, name: str) -> Node:
        """The node of that name, which must exist."""
        node = self.find(name)
        assert node is not None, name
        return node

    def edges_into(self, node: Node, through: str = "") -> tuple[Edge, ...]:
        """The edges into a node. A source whose operator is `through` gives its place, not its format, to what it reads."""
        edges = []
        for source in map(self.get, node.inputs):
            start = source
            while start.operator == through and start.inputs:
                start = self.get(start.inputs[0])
            edges.append(Edge(start.name, node.name, source.output))
        return tuple(edges)

    def is_weight(self, node: Node) -> bool:
        """Whether a node follows from the masters alone, so that it changes at a publish only."""
        return node.operator == "masters" or (bool(node.inputs) and all(self.is_weight(self.get(name)) for name in node.inputs))


@dataclass(slots=True, frozen=True)
class Difference:
    """One way in which the rollout is not a subgraph of training, at the node `node` of the rollout."""

    node: str
    what: str  # operator, inside, output, inputs: the part that differs
    rollout: str
    training: str

    def __str__(self) -> str:
        return f"{self.node}: {self.what} is {self.rollout} in the rollout, {self.training} in training"


@dataclass(slots=True, frozen=True)
class Flow:
    """The graphs of one flow. `layers` is the number of decoder layers that `layer.*` stands for, if known."""

    name: FlowName
    training: Graph
    backward: Graph
    rollout: Graph
    layers: int | None = None

    @property
    def exact(self) -> bool:
        """Whether rollout and training must agree to the bit."""
        return not differences(self)

    @property
    def trainer_fp8(self) -> bool:
        """Whether any projection of the trainer runs in FP8."""
        return bool(_fp8_linears(self.training))

    @property
    def rollout_fp8(self) -> bool:
        """Whether any projection of the rollout runs in FP8."""
        return bool(_fp8_linears(self.rollout))

    @property
    def trainer_kv_fp8(self) -> bool:
        """Whether the trainer's attention reads quantised queries, keys and values."""
        return _fp8_attention(self.training)

    @property
    def rollout_kv_fp8(self) -> bool:
        """Whether the rollout's does, and its cache holds codes."""
        return _fp8_attention(self.rollout)

    def trainer_layers(self, config: ModelConfig) -> tuple[str, ...]:
        """Names of the projections that the trainer runs in FP8, e.g. `layers.3.qkv`."""
        return linear_names(config, _fp8_linears(self.training))

    def rollout_layers(self, config: ModelConfig) -> tuple[str, ...]:
        """Names of the projections that the rollout runs in FP8."""
        return linear_names(config, _fp8_linears(self.rollout))


def _fp8_linears(graph: Graph) -> tuple[str, ...]:
    """The projections of the template layer whose operands are all E4M3."""
    operands = {name: graph.get(f"layer.{name}.gemm").inputs if graph.find(f"layer.{name}.gemm") else () for name in LINEARS}
    return tuple(n for n, read in operands.items() if read and all(graph.get(x).output.dtype == "E4M3" for x in read))


def _fp8_attention(graph: Graph) -> bool:
    return all(graph.get(name).output.dtype == "E4M3" for name in graph.get("layer.attention").inputs)


# Building


@dataclass(slots=True)
class _Builder:
    """Collects nodes; each method returns the name of the node whose output goes on."""

    fp8: bool
    kv_fp8: bool
    options: frozenset[str]  # biases, q_norm, k_norm and head, where the model has them
    saves: bool = False  # keep activations for the weight gradient
    nodes: list[Node] = field(default_factory=list)

    def add(self, name: str, operator: str, inputs: Iterable[str], output: Format = BF16, inside: Dtype | None = None) -> str:
        self.nodes.append(Node(name, operator, tuple(inputs), output, inside))
        return name

    def weight(self, name: str) -> str:
        return self.add(f"{name}.weight", "publish", ("masters",))

    def norm(self, name: str, x: str) -> str:
        return self.add(name, "rms_norm", (x, self.weight(name)), BF16, "FP32")

    def linear(self, name: str, x: str) -> str:
        w = self.weight(name)
        if self.fp8:
            w = self.add(f"{name}.codes", "quantize", (w,), BLOCKS)
            source, x = x, self.add(f"{name}.quantize", "quantize", (x,), ROWS)
            if self.saves:
                self.add(f"{name}.saved", "quantize", (source,), TOKENS)
        y = self.add(f"{name}.gemm", "gemm", (x, w), BF16, "FP32")
        if name.removeprefix("layer.") + "_bias" in self.options:
            y = self.add(f"{name}_bias", "add", (y, self.weight(f"{name}_bias")))
        return y

    def attention(self, q: str, k: str, v: str, rollout: bool) -> str:
        """Attention over the keys and values of a cache, which only a rollout keeps."""
        if self.kv_fp8:
            q = self.add("layer.q_codes", "quantize", (q,), HEADS)
            cached = self.add("layer.keys_values", "quantize", (k, v), HEADS)
        else:
            cached = self.add("layer.keys_values", "prepare_keys_values", (k, v))
        if rollout:
            cached = self.add("layer.kv_cache", HANDS_ON, (cached,), HEADS if self.kv_fp8 else BF16)
        if self.kv_fp8:
            q = self.add("layer.probabilities", "softmax", (q, cached), TILES, "FP32")
        return self.add("layer.attention", "attention", (q, cached), BF16, "FP32")

    def grad_norm(self, name: str, dy: str, x: str) -> str:
        self.add(f"{name}.grad_weight", "rms_norm_grad_weight", (dy, x), FP32, "FP32")
        return self.add(f"{name}.grad", "rms_norm_grad", (dy, x, f"{name}.weight"), BF16, "FP32")

    def grad_linear(self, name: str, dy: str, x: str) -> str:
        if name.removeprefix("layer.") + "_bias" in self.options:
            self.add(f"{name}_bias.grad_weight", "sum_tokens", (dy,), FP32, "FP32")
        left = right = dy
        saved, w = x, f"{name}.weight"
        if self.fp8:
            left = self.add(f"{name}.dy_rows", "quantize", (dy,), ROWS)
            right = self.add(f"{name}.dy_tokens", "quantize", (dy,), TOKENS)
            saved, w = f"{name}.saved", f"{name}.codes"
        self.add(f"{name}.grad_weight", "gemm", (right, saved), FP32, "FP32")
        return self.add(f"{name}.grad_input", "gemm", (left, w), BF16, "FP32")


def _head_weight(options: frozenset[str]) -> str:
    return "head.weight" if "head" in options else "embed.weight"


def _forward(fp8: bool, kv_fp8: bool, options: frozenset[str], rollout: bool) -> Graph:
    b = _Builder(fp8, kv_fp8, options, saves=not rollout)
    b.add("masters", "masters", (), FP32)
    b.add("tokens", "tokens", (), INT64)
    stream = b.add("embed", "embed", ("tokens", b.weight("embed")))
    q = k = v = b.add("layer.heads", "split", (b.linear("layer.qkv", b.norm("layer.input_norm", stream)),))
    if "q_norm" in options:
        q, k = b.norm("layer.q_norm", q), b.norm("layer.k_norm", k)
    q, k = (b.add(f"layer.{n}_rotary", "rotary", (x,), BF16, "FP32") for n, x in (("q", q), ("k", k)))
    attended = b.linear("layer.o", b.attention(q, k, v, rollout))
    stream = b.add("layer.residual", "add", (stream, attended))
    gate_up = b.linear("layer.gate_up", b.norm("layer.post_norm", stream))
    down = b.linear("layer.down", b.add("layer.silu_mul", "silu_mul", (gate_up,), BF16, "FP32"))
    hidden = b.norm("final_norm", b.add("layer.output", "add", (stream, down)))
    head = b.weight("head") if "head" in options else _head_weight(options)
    logits = b.add("head", "gemm", (hidden, head), FP32, "FP32")
    b.add(OUTCOME, "log_softmax", (logits,), FP32, "FP32")
    if rollout:
        b.add("sample", ENDS, (logits,), INT64, "FP32")
    return Graph(tuple(b.nodes))


def _backward(training: Graph, fp8: bool, options: frozenset[str]) -> Graph:
    b = _Builder(fp8, False, options)
    loss = b.add(f"{OUTCOME}.grad", "loss_grad", (OUTCOME,), FP32, "FP32")
    b.add("head.grad_weight", "head_grad_weight", (loss, "final_norm", _head_weight(options)), FP32, "FP32")
    dy = b.add("head.grad", "head_grad", (loss, "final_norm", _head_weight(options)), BF16, "FP32")
    dy = b.grad_norm("final_norm", dy, "layer.output")
    inner = b.grad_linear("layer.down", dy, "layer.silu_mul")
    gate_up = training.get("layer.silu_mul").inputs[0]
    inner = b.add("layer.silu_mul.grad", "silu_mul_grad", (inner, gate_up), BF16, "FP32")
    inner = b.grad_norm("layer.post_norm", b.grad_linear("layer.gate_up", inner, "layer.post_norm"), "layer.residual")
    dy = b.add("layer.residual.grad", "add", (dy, inner))
    inner = b.grad_linear("layer.o", dy, "layer.attention")
    # Of codes the gradient recomputes the probabilities.
    operands = (training.find("layer.probabilities") or training.get("layer.attention")).inputs
    dv = b.add("layer.attention.grad", "attention_grad", (inner, *operands), BF16, "FP32")
    heads = []
    for n in ("q", "k"):
        grad = b.add(f"layer.{n}_rotary.grad", "rotary_grad", (dv,), BF16, "FP32")
        heads.append(b.grad_norm(f"layer.{n}_norm", grad, "layer.heads") if f"{n}_norm" in options else grad)
    inner = b.grad_linear("layer.qkv", b.add("layer.heads.grad", "concat", (*heads, dv)), "layer.input_norm")
    dy = b.add("embed.grad", "add", (dy, b.grad_norm("layer.input_norm", inner, "embed")))
    b.add("embed.grad_weight", "embed_grad", (dy, "tokens"), FP32, "FP32")
    return Graph(tuple(b.nodes), before=training)


def _options(config: ModelConfig | None) -> frozenset[str]:
    if config is None:
        return frozenset({"head"})
    has = {
        "head": not config.tie_word_embeddings,
        "qkv_bias": config.attention_bias,
        "o_bias": config.output_bias,
        "gate_up_bias": config.mlp_bias,
        "down_bias": config.mlp_bias,
        "q_norm": config.qk_norm,
        "k_norm": config.qk_norm,
    }
    return frozenset(name for name, present in has.items() if present)


def build_flow(name: FlowName, config: ModelConfig | None = None, kv_cache: KVCacheName = "bf16") -> Flow:
    """The graphs of a named flow, for a model with `config`'s options; without one: no biases, no q/k norms, a head.

    With an FP8 `kv_cache` an exact flow has FP8 attention on both sides, fp8_rollout in its rollout alone. Raises ValueError
    for an unknown name.
    """
    for kind, seen, known in (("flow", name, get_args(FlowName)), ("kv_cache", kv_cache, get_args(KVCacheName))):
        if seen not in known:
            raise ValueError(f"unknown {kind} {seen!r}; use one of {', '.join(known)}")
    options, trainer_fp8, kv_fp8 = _options(config), name == "fp8", kv_cache == "fp8"
    training = _forward(trainer_fp8, kv_fp8 and name not in KNOWN_MISMATCHED, options, rollout=False)
    return Flow(
        name,
        training,
        _backward(training, trainer_fp8, options),
        _forward(name != "bf16", kv_fp8, options, rollout=True),
        None if config is None else config.num_layers,
    )


# The subgraph rule


def differences(flow: Flow) -> tuple[Difference, ...]:
    """Where the rollout is not a subgraph of the training forward, in the order of the forward; empty if it is.

    Compared are operator, accumulation, output format and the edges in (source and format, in order, none missing).
    """
    found: list[Difference] = []
    read = {name for node in flow.rollout.nodes for name in node.inputs}
    for node in flow.rollout.nodes:
        if node.operator == ENDS:
            if node.name in read:
                found.append(Difference(node.name, "output", "read by another operator", "not there"))
        elif node.operator == HANDS_ON:
            taken = [flow.rollout.get(name).output for name in node.inputs]
            if taken != [node.output]:
                found.append(Difference(node.name, "output", _show(node.output), ", ".join(map(_show, taken))))
        else:
            found += _compare(flow, node)
    if flow.rollout.find(OUTCOME) is None:  # without it any graph, the empty one too, would do
        found.append(Difference(OUTCOME, "operator", "not there", flow.training.get(OUTCOME).operator))
    return tuple(found)


def _compare(flow: Flow, node: Node) -> list[Difference]:
    twin = flow.training.find(node.name)
    if twin is None:
        sources = ", ".join(node.inputs) or "nothing"
        return [Difference(node.name, "operator", f"{node.operator} to {node.output} of {sources}", "not there")]
    pairs = [
        ("operator", node.operator, twin.operator),
        ("inside", node.inside, twin.inside),
        ("output", node.output, twin.output),
        ("inputs", flow.rollout.edges_into(node, HANDS_ON), flow.training.edges_into(twin, HANDS_ON)),
    ]
    return [Difference(node.name, what, _show(ours), _show(theirs)) for what, ours, theirs in pairs if ours != theirs]


def _show(part: str | Format | tuple[Edge, ...] | None) -> str:
    if isinstance(part, Format):
        return f"{part} with {part.scale} scales" if part.scale else str(part)
    return "; ".join(f"{_show(e.format)} from {e.source}" for e in part) if isinstance(part, tuple) else str(part)


def check_flow(flow: Flow) -> tuple[Difference, ...]:
    """The check at the start of a run: an exact flow must keep the subgraph rule, a known-mismatched one must break it.

    Returns the differences: none, or those of a known-mismatched baseline, to be reported. Raises ValueError otherwise.
    """
    found = differences(flow)
    if flow.name in KNOWN_MISMATCHED:
        if not found:
            raise ValueError(
                f"flow {flow.name!r} is a known-mismatched baseline, but its rollout is a subgraph of its training: it "
                "compares nothing. Use an exact flow, fp8 or bf16, or put the difference back."
            )
    elif found:
        raise ValueError(
            f"flow {flow.name!r} must be exact, but its rollout is no subgraph of its training ({len(found)} "
            f"differences). First: {found[0]}. Make both sides equal there."
        )
    return found


def describe_flow(flow: Flow) -> str:
    """One sentence for the log and the head of the drawing: is the flow exact, and if not, how many operators differ."""
    count = len({difference.node for difference in differences(flow)})
    if not count:
        return "exact: the rollout is a subgraph of the training forward"
    kind = "this flow is a known-mismatched baseline" if flow.name in KNOWN_MISMATCHED else "this flow is broken"
    return f"{kind}: {count} operators of the rollout are not in the training forward"


# The table


@dataclass(slots=True, frozen=True)
class FlowRow:
    """One operator as text for a table. `differs`: it is one of the rollout's that training does not have."""

    operator: str
    input: str
    weight: str
    output: str
    inside: str
    rollout: bool
    training: bool
    backward: bool
    differs: bool


def flow_table(flow: Flow) -> list[FlowRow]:
    """A row for each operator in the order of the forward, then the backward. One that differs has a row for each side."""
    red = {difference.node for difference in differences(flow)}
    rows = []
    for name in merged_names(flow):
        sides = [(g, n) for g in (flow.training, flow.rollout) if (n := g.find(name)) is not None]
        if name in red or len(sides) == 1:
            rows += [_table_row(g, n, g is flow.rollout, g is flow.training, name in red) for g, n in sides]
        else:
            rows.append(_table_row(*sides[0], True, True, False))
    return rows + [_table_row(flow.backward, node, False, False, False) for node in flow.backward.nodes]


def merged_names(flow: Flow) -> list[str]:
    """Names of both forwards, weights and all, in an order that keeps each side's own."""
    names = [node.name for node in flow.training.nodes]
    at = 0
    for node in flow.rollout.nodes:
        if node.name in names:
            at = max(at, names.index(node.name) + 1)
        else:
            names.insert(at, node.name)
            at += 1
    return names


def _table_row(graph: Graph, node: Node, rollout: bool, training: bool, differs: bool) -> FlowRow:
    sources = [graph.get(name) for name in node.inputs]
    read, weight = (
        ", ".join(dict.fromkeys(str(s.output) for s in sources if graph.is_weight(s) == wanted)) for wanted in (False, True)
    )
    backward = not rollout and not training
    return FlowRow(node.name, read, weight, str(node.output), node.inside or "", rollout, training, backward, differs)
