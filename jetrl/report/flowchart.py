"""A precision flow drawn as SVG: a row for each operator, the same on every side, so that equals stand side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import get_args

from jetrl.flow import ENDS, HANDS_ON, Dtype, Flow, Graph, Node, describe_flow, differences, merged_names

_ROW, _BOX, _TOP, _WIDTH, _GAP, _LONE = 35, 24, 112, 1004, 10, 40
_ROLLOUT, _TRAINING, _BACKWARD = (138, 200), (488, 200), (738, 222)  # left edge and width of a panel's boxes
_STYLE = """
.flow { --page:#fff; --ink:#1b222c; --soft:#66707e; --band:#f5f6f8; --bad:#d0212f; --good:#0b7a4b;
  --E4M3:#d9580d; --E4M3t:#fff0e4; --BF16:#2a6fd6; --BF16t:#edf4ff; --FP32:#55606e; --FP32t:#e9ebee;
  font-family:system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif }
@media (prefers-color-scheme: dark) { .flow { --page:#0e1116; --ink:#e8ebf0; --soft:#98a2b0; --band:#171c23;
  --bad:#ff6b6b; --good:#4cc38a; --E4M3:#f59149; --E4M3t:#3a2415; --BF16:#6aa5f8; --BF16t:#152840; --FP32:#a3adba;
  --FP32t:#2a303a } }
text { fill:var(--ink); font-size:11px } .soft { fill:var(--soft); font-size:9px } .h { font-size:14px; font-weight:600 }
path { fill:none; stroke:var(--c); stroke-width:1.6 } .E4M3 { --c:var(--E4M3); --t:var(--E4M3t) }
.BF16 { --c:var(--BF16); --t:var(--BF16t) } .FP32,.INT64 { --c:var(--FP32); --t:var(--FP32t) }
.b { stroke:var(--c); fill:var(--t) } path.E4M3 { stroke-width:2.6 } .tip { fill:var(--c) }
.only { stroke-dasharray:4 2.5 } .b.red { stroke:var(--bad); stroke-width:2.4 } .bad { fill:var(--bad) }
.good { fill:var(--good) } .mark { font-size:15px; font-weight:700 }"""


@dataclass(slots=True, frozen=True)
class _Box:
    """Where a node stands: its row, counted from above, and its left and right edges."""

    node: Node
    row: int
    left: float
    right: float

    @property
    def y(self) -> float:
        return _TOP + (self.row + 0.5) * _ROW


def _row_of(node: Node, graph: Graph) -> str:
    """The row, called after a node of the forward, in which a node stands."""
    base, _, kind = node.name.rpartition(".")
    fp8 = graph.find(f"{base}.dy_rows") is not None
    if kind == "saved" or (fp8 and kind in ("grad_weight", "grad_input")):
        return f"{base}.quantize"
    if kind in ("grad", "grad_weight", "grad_input", "dy_rows", "dy_tokens"):
        return (f"{base}.gemm" if graph.find(f"{base}.gemm") else base).replace(".k_", ".q_")
    return node.name.replace(".k_", ".q_")


def _place(graph: Graph, rows: list[str], left: float, width: float) -> dict[str, _Box]:
    """Boxes of a panel by name, weights left out; nodes of one row stand side by side."""
    shared: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if not graph.is_weight(node):
            shared.setdefault(_row_of(node, graph), []).append(node)
    boxes = {}
    for row, nodes in shared.items():
        nodes.sort(key=lambda node: (".q_" in node.name, node.name.endswith((".dy_rows", ".grad"))))
        step = (width + _GAP) / len(nodes)
        for i, node in enumerate(nodes):
            lone = len(nodes) == 1 and node.name.endswith("bias.grad_weight")  # narrow, so that dy can pass it
            end = left + (_LONE if lone else (i + 1) * step - _GAP)
            boxes[node.name] = _Box(node, rows.index(row), left + i * step, end)
    return boxes


def _rect(left: float, y: float, width: float, classes: str) -> str:
    return f'<rect class="b {classes}" x="{left:.1f}" y="{y - _BOX / 2:.1f}" width="{width:.1f}" height="{_BOX}" rx="5"/>'


def _text(x: float, y: float, text: str, classes: str = "", anchor: str = "start") -> str:
    shown = escape(re.sub(r"(\d)x(\d)", r"\1×\2", text))
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{shown}</text>'


def _title(node: Node, width: float) -> str:
    """What a box is called; short where its row already says which operator it belongs to."""
    last = node.name.rpartition(".")[2]
    if width < 70:
        return {"grad_weight": "dW", "grad": "dx"}.get(last, last)
    if last in ("grad_weight", "grad_input") or (last == "grad" and width < 150):
        return last.replace("_", " ")
    if last == "saved":
        return "save"
    return node.operator if node.operator == "quantize" else re.sub("[._]", " ", node.name.removeprefix("layer."))


def _draw_box(box: _Box, graph: Graph, red: bool) -> str:
    """A box that says what the node is and, where there is room, what it reads, sums in and writes."""
    node, width = box.node, box.right - box.left
    reads = [graph.get(name).output.dtype for name in node.inputs]
    steps = [*reads[:1], *([node.inside] if node.inside else []), str(node.output)]
    if width < 150:
        steps = [node.output.granularity or node.output.dtype] if width > 70 else []
    path = " → ".join(step for i, step in enumerate(steps) if i == 0 or step != steps[i - 1])
    only = node.operator in (HANDS_ON, ENDS) or node.name.endswith(".saved")
    classes = f"{'E4M3' if 'E4M3' in reads else node.output.dtype}{' only' if only else ''}{' red' if red else ''}"
    title, label = _title(node, width), _text(box.right - 6, box.y + 3, path, "soft", "end")
    return _rect(box.left, box.y, width, classes) + _text(box.left + 6, box.y + 4, title) + label


def _draw_edge(source: _Box, target: _Box, dtype: Dtype, lane: int) -> str:
    """An arrow; `lane` 0 goes straight, others go round on the right, further out the higher the lane."""
    right = target.left > source.left
    if source.row == target.row:
        line = f"M{source.right if right else source.left:.1f} {source.y:.1f}"
        line += f"H{target.left - 5 if right else target.right + 5:.1f}"
    elif lane:
        x, turn = max(source.right, target.right) + 2 + 9 * lane, 5 if target.row > source.row else -5
        line = f"M{source.right:.1f} {source.y:.1f}H{x - 5:.1f}q5 0 5 {turn}V{target.y - turn:.1f}q0 {turn} -5 {turn}"
        line += f"H{target.right + 5:.1f}"
    else:
        low, high = max(source.left, target.left), min(source.right, target.right)
        start = end = (low + high) / 2
        if low > high:  # side by side: from the corner of one to the corner of the other
            start, end = (high - 10, low + 10) if right else (low + 10, high - 10)
        down = 1 if target.row > source.row else -1
        line = f"M{start:.1f} {source.y + down * _BOX / 2:.1f}L{end:.1f} {target.y - down * (_BOX / 2 + 5):.1f}"
    return f'<path class="{dtype}" d="{line}" marker-end="url(#tip-{dtype})"/>'


def _lanes(pairs: list[tuple[_Box, _Box]], boxes: Iterable[_Box]) -> list[int]:
    """A lane for each edge: 0 where no box is in the way, else the first one that no shorter overlapping edge takes."""
    taken: list[tuple[int, int, int]] = []
    lanes = [0] * len(pairs)
    for i in sorted(range(len(pairs)), key=lambda i: abs(pairs[i][0].row - pairs[i][1].row)):
        (source, target), lane = pairs[i], 1
        top, bottom = sorted((source.row, target.row))
        x = (max(source.left, target.left) + min(source.right, target.right)) / 2
        if not any(top < b.row < bottom and b.left <= x <= b.right for b in boxes):
            continue
        while any(lane == other and top < low and high < bottom for other, high, low in taken):
            lane += 1
        taken.append((lane, top, bottom))
        lanes[i] = lane
    return lanes


def _draw_panel(graph: Graph, boxes: dict[str, _Box], red: set[str]) -> str:
    """The edges, the boxes and, at the left of a forward, the weights of one panel."""
    edges = [e for box in boxes.values() for e in dict.fromkeys(graph.edges_into(box.node))]
    inner = [e for e in edges if e.source in boxes]
    pairs = [(boxes[e.source], boxes[e.target]) for e in inner]
    lanes = _lanes(pairs, boxes.values())
    drawn = [_draw_edge(*pair, e.format.dtype, lane) for e, pair, lane in zip(inner, pairs, lanes, strict=True)]
    left = min(box.left for box in boxes.values())
    for edge in edges:
        weight, box = graph.get(edge.source), boxes[edge.target]
        if graph.before is None and graph.is_weight(weight) and box.left == left:
            chip = _Box(weight, box.row, left - 92, left - 14)
            drawn.append(_draw_edge(chip, box, edge.format.dtype, 0))
            drawn.append(_rect(chip.left, chip.y, 78, f"{edge.format.dtype}{' red' if weight.name in red else ''}"))
            drawn.append(_text(left - 53, chip.y + 3, str(weight.output), "soft", "middle"))
    return "\n".join(drawn + [_draw_box(box, graph, box.node.name in red) for box in boxes.values()])


def _draw_frame(flow: Flow, rows: list[str], height: int) -> str:
    """Background, headings, the band around the template layer and the legend."""
    inner = [i for i, row in enumerate(rows) if row.startswith("layer.")]
    top, size = _TOP + inner[0] * _ROW, len(inner) * _ROW
    times = "each layer" if flow.layers is None else f"each of {flow.layers} layers"
    tips = "".join(
        f'<marker id="tip-{dtype}" class="{dtype}" viewBox="0 0 6 6" refX="1" refY="3" markerWidth="7" markerHeight="7" '
        'markerUnits="userSpaceOnUse" orient="auto"><path class="tip" style="stroke:none" d="M0 0L6 3L0 6z"/></marker>'
        for dtype in get_args(Dtype)
    )
    parts = [
        f"<style>{_STYLE}</style><defs>{tips}</defs>",
        f'<rect width="{_WIDTH}" height="{height}" fill="var(--page)"/>',
        f'<rect x="12" y="{top}" width="{_WIDTH - 24}" height="{size}" rx="9" fill="var(--band)"/>',
        f'<g transform="translate(31 {top + size / 2}) rotate(-90)">{_text(0, 0, times, "soft", "middle")}</g>',
        _text(20, 32, f"Precision flow {flow.name}", "h"),
        _text(20, 52, describe_flow(flow), "good" if flow.exact else "bad"),
    ]
    heads = {"Rollout": "prefill and decode", "Training, forward": "the same tokens", "Training, backward": "read upwards"}
    for (left, _), (head, note) in zip((_ROLLOUT, _TRAINING, _BACKWARD), heads.items(), strict=True):
        parts += [_text(left, 88, head, "h"), _text(left, 103, note, "soft")]
    x, y = 20.0, height - 46.0
    legend = [("E4M3", "FP8 E4M3, FP32 scales"), ("BF16", "BF16"), ("FP32", "FP32"), ("BF16 only", "one side only, allowed")]
    for classes, label in [*legend, ("BF16 red", "not in training")]:
        parts += [_rect(x, y, 24, classes), _text(x + 31, y + 4, label)]
        x += 52 + 6.2 * len(label)
    note = "Box: operand → accumulation → result. Arrow: the format that is handed over. Weights: FP32 masters, rounded to BF16"
    parts.append(_text(20, height - 14, note + ", then to E4M3 128x128 for FP8 layers, at each publish.", "soft"))
    return "\n".join(parts)


def draw_flow(flow: Flow) -> str:
    """The three graphs of a flow as a self-contained SVG, legible on light and on dark pages."""
    weights = {n.name for g in (flow.training, flow.rollout) for n in g.nodes if g.is_weight(n)}
    merged = [flow.training.find(name) or flow.rollout.get(name) for name in merged_names(flow) if name not in weights]
    rows = list(dict.fromkeys(_row_of(node, flow.training) for node in merged))
    rollout, training, backward = (
        _place(graph, rows, *panel)
        for graph, panel in ((flow.rollout, _ROLLOUT), (flow.training, _TRAINING), (flow.backward, _BACKWARD))
    )
    red = {difference.node for difference in differences(flow)}
    height = _TOP + len(rows) * _ROW + 76
    across = [
        _draw_edge(training[edge.source], box, edge.format.dtype, 0)
        for box in backward.values()
        for edge in flow.backward.edges_into(box.node)
        if edge.source in training and training[edge.source].row == box.row
    ]
    marks = [
        _text(382, box.y + 5, "≠" if name in red else "=", f"mark {'bad' if name in red else 'good'}", "middle")
        for name, box in rollout.items()
        if name in red or name in training
    ]
    body = [
        _draw_frame(flow, rows, height),
        *across,
        _draw_panel(flow.rollout, rollout, red),
        _draw_panel(flow.training, training, set()),
        _draw_panel(flow.backward, backward, set()),
        *marks,
    ]
    title = f"<title>Precision flow {flow.name}: {describe_flow(flow)}</title>"
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="flow" role="img" {size}>{title}\n' + "\n".join(body) + "\n</svg>\n"
