"""Small SVG charts made of text: lines (linear, or logarithmic with a place for exact zeros), stacked bars, shares.

Colours come from the page's CSS variables --c0, --c1, ... so one SVG serves light and dark. Each chart carries its
numbers as JSON for the page's hover script. Long series are thinned to the extremes of each stretch, so spikes stay.
A value of None is "not finite": the line breaks there and a cross at the top edge says so.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from jetrl.report.read import number

WIDTH, HEIGHT = 520, 228
LEFT, RIGHT, TOP, BOTTOM = 60, 508, 14, 204
_ZERO_BAND = 26
_LONGEST = 400

Point = tuple[float, float | None]


@dataclass
class Series:
    """A line. `group` is what the legend switches on and off; faint lines stand behind a mean and have no tooltip."""

    label: str
    color: int
    points: list[Point]
    group: int = 0
    faint: bool = False


def thin(points: list[Point], longest: int = _LONGEST) -> list[Point]:
    """At most about `longest` points: of each stretch the smallest, the largest and one that is not finite."""
    if len(points) <= longest:
        return points
    kept: list[Point] = []
    stretches = longest // 2
    for i in range(stretches):
        stretch = points[i * len(points) // stretches : (i + 1) * len(points) // stretches]
        finite = [(p[1], p) for p in stretch if p[1] is not None]
        ends = {min(finite)[1], max(finite)[1]} if finite else set()
        kept += sorted(ends | set([p for p in stretch if p[1] is None][:1]), key=lambda p: p[0])
    return kept


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that span low..high; integers if `whole`."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal, or nearly: steps that small would round to nothing
        pad = abs(low) * 0.1 or (1.0 if whole else 0.1)
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m for m in (1, 2, 5, 10) if m * power >= raw * 0.999) * power
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]  # 3 * 0.1 is 0.3, and a step of 1e-18 stays one


def tick_label(value: float) -> str:
    """A short number for an axis: 1.5k, 2M, 0.25."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:.6g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.0e}"


class _Axis:
    """Value to pixel along y, with ticks. Linear."""

    def __init__(self, values: list[float], from_zero: bool):
        low, high = min(values, default=0.0), max(values, default=1.0)
        self.ticks = [(v, tick_label(v)) for v in ticks(min(low, 0.0) if from_zero else low, high)]
        self._low, self._high = self.ticks[0][0], self.ticks[-1][0]

    def y(self, value: float, color: int = 0) -> float:
        return BOTTOM - (value - self._low) / (self._high - self._low) * (BOTTOM - TOP)

    def marks(self) -> str:
        return ""


class _LogAxis:
    """Decades of the magnitude, and below them a band of its own for values that are exactly zero."""

    def __init__(self, values: list[float], colors: list[int]):
        self._colors = colors
        positive = [abs(v) for v in values if v]  # rounding can make a KL of nearly 0 negative; it is not an exact 0
        self._low = math.floor(math.log10(min(positive))) if positive else -8
        self._high = math.ceil(math.log10(max(positive))) if positive else 0
        self._high = max(self._high, self._low + 1)
        every = math.ceil((self._high - self._low) / 5)
        digits = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
        exponents = range(self._low, self._high + 1, every)
        self.ticks = [(10.0**e, "10" + str(e).translate(digits)) for e in exponents]
        self._bottom = BOTTOM - _ZERO_BAND - 8

    def y(self, value: float, color: int = 0) -> float:
        if value == 0:  # several lines at zero lie side by side, else only the last would be seen
            rank = self._colors.index(color) - (len(self._colors) - 1) / 2
            return BOTTOM - _ZERO_BAND / 2 + rank * min(4.5, 16 / len(self._colors))
        return self._bottom - (math.log10(abs(value)) - self._low) / (self._high - self._low) * (self._bottom - TOP)

    def marks(self) -> str:
        y = BOTTOM - _ZERO_BAND / 2
        return (
            f'<rect class="zero" x="{LEFT}" y="{BOTTOM - _ZERO_BAND}" width="{RIGHT - LEFT}" height="{_ZERO_BAND}"/>'
            f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5}" text-anchor="end">exactly 0</text>'
        )


def _x_axis(low: float, high: float) -> str:
    parts = []
    for value in ticks(low, high, 6, whole=True):
        if low <= value <= high:
            x = LEFT + (value - low) / ((high - low) or 1.0) * (RIGHT - LEFT) if high > low else (LEFT + RIGHT) / 2
            parts.append(f'<text class="tick" x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    return "".join(parts)


def _y_axis(axis: _Axis | _LogAxis) -> str:
    parts = []
    for value, label in axis.ticks:
        y = axis.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>')
    return "".join(parts) + axis.marks()


def _frame(body: str, label: str, low: float, high: float, data: list[dict]) -> str:
    """The SVG around a chart. `<` is written as an escape in the JSON, so no label can end the script element."""
    content = {"box": [LEFT, RIGHT, WIDTH], "low": low, "high": high, "series": data}
    numbers = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{body}'
        f'<line class="cross" y1="{TOP}" y2="{BOTTOM}" hidden=""/>'
        f'<text class="tick" x="{LEFT - 14}" y="{BOTTOM + 16}" text-anchor="end">step</text></svg>'
        f'<script type="application/json">{numbers}</script></div>'
    )


def _rounded(points: list[Point]) -> list[list[float | None]]:
    return [[x, None if y is None else float(f"{y:.4g}")] for x, y in points]


def line_chart(series: list[Series], label: str, *, log: bool = False, from_zero: bool = False) -> str:
    """An SVG line chart over steps; `log` gives exact zeros a band of their own. Empty series are left out."""
    drawn = [Series(s.label, s.color, thin(s.points), s.group, s.faint) for s in series if s.points]
    xs = [x for s in drawn for x, _ in s.points]
    low, high = min(xs, default=0), max(xs, default=1)
    values = [y for s in drawn for _, y in s.points if y is not None]
    axis = _LogAxis(values, sorted({s.color for s in drawn})) if log else _Axis(values, from_zero)
    body = _y_axis(axis) + _x_axis(low, high)
    for s in drawn:
        body += _line(s, axis, low, high)
    if log and values and not any(values) and len(values) == len(xs):
        x, y = (LEFT + RIGHT) / 2, (TOP + BOTTOM - _ZERO_BAND) / 2
        body += f'<text class="proof" x="{x}" y="{y}" text-anchor="middle">exactly 0 at every step</text>'
    data = [{"l": s.label, "c": s.color, "g": s.group, "p": _rounded(s.points)} for s in drawn if not s.faint]
    return _frame(body, label, low, high, data)


def _line(series: Series, axis: _Axis | _LogAxis, low: float, high: float) -> str:
    """Line pieces between gaps. A piece of one point and each point of a short series is a dot, not finite a cross."""
    width = RIGHT - LEFT
    pieces: list[list[str]] = [[]]
    extra = ""
    dots = len(series.points) <= 24 and not series.faint
    for x, y in series.points:
        px = LEFT + (x - low) / (high - low) * width if high > low else (LEFT + RIGHT) / 2
        if y is None:
            pieces.append([])
            cross = f"M{px - 3:.1f} {TOP - 3}l6 6m0 -6l-6 6"
            extra += f'<path class="cut" d="{cross}"><title>step {x:g}: not finite</title></path>'
        else:
            pieces[-1].append(f"{px:.1f} {axis.y(y, series.color):.1f}")
    for piece in pieces:
        if dots or len(piece) == 1:
            extra += "".join('<circle r="3" cx="{}" cy="{}"/>'.format(*point.split()) for point in piece)
    path = "".join("M" + "L".join(piece) for piece in pieces if len(piece) > 1)
    look = "line faint" if series.faint else "line"
    return f'<g class="{look} g{series.group}" style="--c:var(--c{series.color})"><path d="{path}"/>{extra}</g>'


def stacked_bars(layers: list[Series], label: str, bars: int = 72) -> str:
    """Stacked bars over steps, of layers that share their steps; neighbouring steps are averaged to at most `bars`."""
    steps = [x for x, _ in layers[0].points]
    low, high = steps[0], steps[-1]
    count = min(bars, len(steps))
    cuts = [i * len(steps) // count for i in range(count + 1)]
    table = [[_average(layer.points[a:b]) for a, b in pairwise(cuts)] for layer in layers]
    axis = _Axis([sum(column) for column in zip(*table, strict=True)], from_zero=True)
    slot = (RIGHT - LEFT) / count
    body = _y_axis(axis) + _x_axis(low, high)
    base = [0.0] * count
    for layer, heights in zip(layers, table, strict=True):
        rects = ""
        for i, height in enumerate(heights):
            top, bottom = axis.y(base[i] + height), axis.y(base[i])
            x = LEFT + i * slot + slot * 0.08
            rects += f'<rect x="{x:.1f}" y="{top:.1f}" width="{slot * 0.84:.1f}" height="{max(bottom - top, 0):.1f}"/>'
            base[i] += height
        body += f'<g class="bar" style="--c:var(--c{layer.color})">{rects}</g>'
    middles = [steps[(a + b - 1) // 2] for a, b in pairwise(cuts)]
    data = [
        {"l": layer.label, "c": layer.color, "g": -1, "p": _rounded(list(zip(middles, heights, strict=True)))}
        for layer, heights in zip(layers, table, strict=True)
    ]
    return _frame(body, label, low, high, data)


def _average(points: list[Point]) -> float:
    present = [y for _, y in points if y is not None]
    return sum(present) / len(present) if present else 0.0


def share_bars(rows: list[tuple[str, int, list[float]]], names: list[str], unit: str, label: str, first_color: int) -> str:
    """One horizontal bar a row (its label, its legend group, its parts), stacked by part, with the total at its end."""
    longest = max((sum(parts) for _, _, parts in rows), default=0.0) or 1.0
    left, right = 130, WIDTH - 64
    height = max(28, min(52, (HEIGHT - 20) // max(len(rows), 1)))
    thick = height * 0.56
    body = ""
    for i, (name, group, parts) in enumerate(rows):
        x, y = float(left), 10 + i * height
        bars = ""
        for color, (part, value) in enumerate(zip(names, parts, strict=True), first_color):
            width = value / longest * (right - left)
            box = f'x="{x:.1f}" y="{y}" width="{max(width - 1, 0):.1f}" height="{thick:.0f}"'
            title = f"<title>{escape(part)}: {number(value)} {unit}</title>"
            bars += f'<rect {box} style="--c:var(--c{color})">{title}</rect>'
            x += width
        middle = f'y="{y + thick / 2 + 4:.0f}"'
        bars += f'<text class="tick name" x="{left - 8}" {middle} text-anchor="end">{escape(name)}</text>'
        bars += f'<text class="tick" x="{x + 6:.1f}" {middle}>{number(sum(parts))} {unit}</text>'
        body += f'<g class="bar g{group}">{bars}</g>'
    box = f'viewBox="0 0 {WIDTH} {20 + len(rows) * height}" role="img" aria-label="{escape(label)}"'
    return f'<div class="plot bars"><svg {box}>{body}</svg></div>'
