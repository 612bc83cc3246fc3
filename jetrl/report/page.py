"""One run, or several laid over each other, as one HTML page that needs nothing but itself.

No fetch, no library: the charts are SVG made by charts.py, the style and the few lines of script (tooltips, switching
groups on and off) are in the page. Runs whose configurations differ only in the seed are one group: one colour, thin
lines for the runs, a thick one for their mean over the steps that all of them have. Every text from a run is escaped;
a completion may hold HTML. What the page gives up: runs are compared by step, not by time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import yaml

from jetrl.report.charts import Point, Series, line_chart, share_bars, stacked_bars
from jetrl.report.read import MISMATCH, Row, RunData, Summary, duration, flatten, mean, number, read_run, summarize
from jetrl.report.template import PAGE

_NOT_A_DIFFERENCE = {"seed", "folder", "loggers"}
_PHASES = ("rollout", "grade", "train", "publish", "other")
_COLORS = 6  # for runs and metrics; the phases of a step have the next five, so that no phase looks like a run
_MOST_TOKENS = 400
_MOST_EVENTS = 40


@dataclass
class _Panel:
    """A chart: of one run it shows all its metrics, of several runs it becomes one chart a metric."""

    title: str
    metrics: dict[str, str]  # key in metrics.jsonl -> name
    note: str = ""
    log: bool = False
    from_zero: bool = False


_SECTIONS = {
    "Learning": [
        _Panel("Reward and training accuracy", {"reward/mean": "reward", "accuracy/train": "training accuracy"}),
        _Panel(
            "Held-out accuracy",
            {"eval/avg@k": "held-out avg@k", "eval/pass@k": "held-out pass@k"},
            "step 0 is before training",
        ),
    ],
    "Rollout against trainer": [
        _Panel(
            "Log-probability mismatch",
            {MISMATCH: "max difference", "logprob_diff/mean": "mean difference", "mismatch_kl": "mismatch KL"},
            "between the sampler's log-probabilities and the trainer's, on the same tokens",
            log=True,
        ),
        _Panel("Differing tokens", {"token_diff/share": "share"}, "share of log-probabilities that differ", log=True),
    ],
    "Speed": [
        _Panel(
            "Throughput",
            {"throughput/rollout": "rollout tokens/s", "throughput/train": "training tokens/s"},
            "rollout: completion tokens; training: prompt and completion tokens",
            from_zero=True,
        ),
    ],
    "Training health": [
        _Panel("Completion length", {"length/mean": "mean length", "length/max": "longest"}, "tokens", from_zero=True),
        _Panel(
            "Truncated and unparsed",
            {"length/truncated": "truncated", "accuracy/unparsed": "unparsed", "eval/unparsed": "unparsed in eval"},
            "share of completions",
            from_zero=True,
        ),
        _Panel("Gradient norm", {"grad_norm": "gradient norm"}, "before clipping", from_zero=True),
        _Panel("Policy loss", {"loss/policy": "policy loss"}),
        _Panel("KL to the initial model", {"loss/kl": "KL"}),
        _Panel("Entropy", {"entropy": "entropy"}, "nats a token", from_zero=True),
        _Panel("Groups without signal", {"advantage/zero_groups": "groups"}, "all rewards of a group equal", from_zero=True),
        _Panel(
            "Clipped ratios",
            {"ratio/clipped_low": "clipped below", "ratio/clipped_high": "clipped above"},
            "share of tokens",
            from_zero=True,
        ),
        _Panel("Peak memory", {"memory/peak_gb": "peak memory"}, "GB", from_zero=True),
    ],
}


@dataclass
class _Group:
    """Runs that differ only in their seed."""

    label: str
    color: int
    runs: list[RunData]


def group_runs(runs: list[RunData]) -> list[_Group]:
    """Runs by configuration without the seed, in order of appearance, named by what tells the groups apart."""
    flats = [{k: v for k, v in flatten(run.config).items() if k not in _NOT_A_DIFFERENCE} for run in runs]
    groups: dict[str, list[int]] = {}
    for i, flat in enumerate(flats):
        groups.setdefault(repr(sorted(flat.items())), []).append(i)
    different = [k for k in _different(flats) if k != "flow"]
    named = []
    for color, members in enumerate(groups.values()):
        first = flats[members[0]]
        parts = [str(first.get("flow", runs[members[0]].name))]
        parts += [f"{key.split('.')[-1]}={first.get(key, '(unset)')}" for key in different]
        named.append(_Group(" · ".join(parts), color % _COLORS, [runs[i] for i in members]))
    return named


def _different(flats: list[dict[str, Any]]) -> list[str]:
    """Keys whose values are not the same everywhere."""
    keys = dict.fromkeys(key for flat in flats for key in flat)
    return [key for key in keys if len({repr(flat.get(key, "(unset)")) for flat in flats}) > 1]


def write_report(run_folders: list[Path], out: Path) -> Path:
    """Write the page of one or more run folders to `out` and return its path.

    Raises ValueError for no folder, and for a folder that is missing, empty or broken (naming what).
    """
    if not run_folders:
        raise ValueError("no run folder was given; a report needs at least one, e.g. jetrl report runs/demo")
    runs = [read_run(folder) for folder in run_folders]
    groups = group_runs(runs)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_page(groups), encoding="utf-8", errors="replace")
    return out


def _page(groups: list[_Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    alone = len(runs) == 1
    sections = [_key_figures(runs[0]) if alone else _comparison(groups)]
    for title, panels in _SECTIONS.items():
        charts = [_phases(groups)] if title == "Speed" else []
        zero = [panel.title for panel in panels if not panel.log and _all_zero(panel, runs)]
        for panel in panels:
            if panel.title not in zero:
                charts += _alone(panel, runs[0]) if alone else _overlaid(panel, groups)
        if any(charts):
            note = f'<p class="note">0 at every step and not drawn: {", ".join(zero)}.</p>' if zero else ""
            sections.append(f'<h2>{title}</h2><div class="grid">{"".join(charts)}</div>{note}')
    sections += [_samples(groups), _events(runs), _config(groups)]
    title = runs[0].name if alone else f"{len(runs)} runs compared"
    return Template(PAGE).substitute(
        title=escape(title),
        about=escape(_about(runs)),
        legend="" if alone else _legend(groups),
        body="\n".join(sections),
    )


def _about(runs: list[RunData]) -> str:
    """Model, task, flow and steps: the values that all runs share."""
    parts = []
    for name, key in (("model", "model"), ("task", "task.name"), ("flow", "flow"), ("seed", "seed")):
        values = {str(flatten(run.config).get(key, "")) for run in runs}
        parts += [f"{name} {values.pop()}"] if len(values) == 1 and values != {""} else []
    return " · ".join([*parts, f"{max(len(run.train) for run in runs)} steps"])


def _legend(groups: list[_Group]) -> str:
    chips = ""
    for i, group in enumerate(groups):
        seeds = f" ({len(group.runs)} runs)" if len(group.runs) > 1 else ""
        chips += f'<button data-g="{i}" aria-pressed="true">{_dot(group.color)}{escape(group.label)}{seeds}</button>'
    hint = "thin: one run, thick: mean of the group" if any(len(g.runs) > 1 for g in groups) else ""
    return f'<nav>{chips}<span class="note">{hint}</span></nav>'


def _dot(color: int) -> str:
    return f'<i class="dot" style="--c:var(--c{color})"></i>'


# Key figures


def _key_figures(run: RunData) -> str:
    s = summarize(run)
    look = "good" if s.exact else "bad" if s.mismatch or s.mismatch_broken else ""
    tiles = [
        _tile(s.accuracy_name, _before_after(s), _gain(s), "good" if _gain(s).startswith("+") else ""),
        _tile("max logprob difference", s.mismatch_text(), _proof(s), look),
        _tile("rollout", f"{number(s.rollout_speed)}<small> tokens/s</small>", "completion tokens"),
        _tile("training", f"{number(s.train_speed)}<small> tokens/s</small>", "prompt and completion tokens"),
        _tile("time", duration(s.seconds), f"{s.steps} step{'s' * (s.steps != 1)}"
              + (f", {s.skipped} update{'s' * (s.skipped != 1)} skipped" if s.skipped else "")),
    ]  # fmt: skip
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(name: str, value: str, note: str, look: str = "") -> str:
    return f'<div class="tile {look}"><span>{escape(name)}</span><b>{value}</b><em>{escape(note)}</em></div>'


def _before_after(s: Summary) -> str:
    if s.accuracy_after is None:
        return _percent(s.accuracy_before)
    return f"{_percent(s.accuracy_before)}<small> → </small>{_percent(s.accuracy_after)}"


def _gain(s: Summary) -> str:
    if s.accuracy_before is None or s.accuracy_after is None:
        return ""
    return f"{(s.accuracy_after - s.accuracy_before) * 100:+.1f} points"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value * 100:.1f}%"


def _proof(s: Summary) -> str:
    if s.exact:
        return f"the same 32 bits at {'all ' * (s.steps > 1)}{s.steps} step{'s' * (s.steps != 1)}"
    if s.mismatch_steps < s.steps:
        return f"recorded at {s.mismatch_steps} of {s.steps} steps"
    return "rollout and trainer differ"


def _comparison(groups: list[_Group]) -> str:
    """A table with a row a group (means over its runs) and, under it, a row a run."""
    names = [
        "steps",
        "accuracy before",
        "after",
        "gain",
        "max logprob difference",
        "rollout tok/s",
        "train tok/s",
        "time",
    ]
    body = ""
    kinds = set()
    for i, group in enumerate(groups):
        name = _dot(group.color) + escape(group.label)
        rows = [summarize(run) for run in group.runs]
        kinds |= {s.accuracy_name for s in rows}
        if len(rows) > 1:
            body += _table_row(f"{name} <small>mean of {len(rows)}</small>", rows, f"mean g{i}")
        for run, s in zip(group.runs, rows, strict=True):
            label = escape(run.name) if len(rows) > 1 else f"{name} <small>{escape(run.name)}</small>"
            body += _table_row(label, [s], f"g{i}" + " seed" * (len(rows) > 1))
    head = "".join(f"<th>{name}</th>" for name in names)
    note = f'<p class="note">accuracy: {escape(", ".join(sorted(kinds)))}</p>'
    return f'<div class="wide"><table class="runs"><tr><th>run</th>{head}</tr>{body}</table></div>{note}'


def _table_row(label: str, rows: list[Summary], look: str) -> str:
    def over(get: Callable[[Summary], float | None]) -> float | None:
        values = [get(s) for s in rows]
        return None if None in values else mean(values)

    before, after = over(lambda s: s.accuracy_before), over(lambda s: s.accuracy_after)
    gain = "–" if before is None or after is None else f"{(after - before) * 100:+.1f}"
    worst = max(rows, key=lambda s: (s.mismatch_broken, s.mismatch_steps == 0, s.mismatch or 0.0))
    exact = all(s.exact for s in rows)
    cells = [
        number(over(lambda s: s.steps)),
        _percent(before),
        _percent(after),
        gain,
        f'<span class="{"good" if exact else "bad"}">{worst.mismatch_text()}</span>',
        number(over(lambda s: s.rollout_speed)),
        number(over(lambda s: s.train_speed)),
        duration(over(lambda s: s.seconds)),
    ]
    return f'<tr class="{look}"><td>{label}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


# Charts


def _figure(title: str, note: str, chart: str, legend: str = "") -> str:
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    legend = f"<span>{legend}</span>" if legend else ""
    return f"<figure><figcaption>{escape(title)}{legend}</figcaption>{note}{chart}</figure>"


def _all_zero(panel: _Panel, runs: list[RunData]) -> bool:
    values = [value for run in runs for key in panel.metrics for _, value in run.points(key)]
    return bool(values) and all(value == 0 for value in values)


def _names(panel: _Panel, runs: list[RunData]) -> dict[str, str]:
    """The metrics' names, with the k of avg@k filled in where all runs agree on it."""
    ks = {row["eval/k"] for run in runs for row in run.evals if row.get("eval/k") is not None}
    k = str(ks.pop()) if len(ks) == 1 else "k"
    return {key: name.replace("@k", f"@{k}") for key, name in panel.metrics.items()}


def _alone(panel: _Panel, run: RunData) -> list[str]:
    """The metrics of one run in one chart. Metrics with the same values share one line, which bears all their names."""
    lines: dict[str, tuple[list[Point], list[str]]] = {}
    for key, name in _names(panel, [run]).items():
        points: list[Point] = list(run.points(key))
        if points:
            lines.setdefault(repr(points), (points, []))[1].append(name)
    if not lines:
        return []
    series = [Series(" = ".join(names), i, points) for i, (points, names) in enumerate(lines.values())]
    legend = "".join(f"<span>{_dot(s.color)}{escape(s.label)}</span>" for s in series if len(panel.metrics) > 1)
    chart = line_chart(series, panel.title, log=panel.log, from_zero=panel.from_zero)
    return [_figure(panel.title, panel.note, chart, legend)]


def _overlaid(panel: _Panel, groups: list[_Group]) -> list[str]:
    """One chart a metric: of each group its runs and, where it has several, their mean."""
    figures = []
    for key, name in _names(panel, [run for group in groups for run in group.runs]).items():
        series = []
        for i, group in enumerate(groups):
            lines: list[list[Point]] = [list(run.points(key)) for run in group.runs]
            several = len(lines) > 1
            series += [Series(group.label, group.color, points, i, faint=several) for points in lines if points]
            if several:
                series.append(Series(f"{group.label} (mean)", group.color, mean_line(lines), i))
        if series:
            title = panel.title if len(panel.metrics) == 1 else name[0].upper() + name[1:]
            chart = line_chart(series, title, log=panel.log, from_zero=panel.from_zero)
            figures.append(_figure(title, panel.note, chart))
    return figures


def mean_line(lines: list[list[Point]]) -> list[Point]:
    """The mean over the steps at which every line has a finite value: a line that ends early must not bend the mean."""
    tables = [{x: y for x, y in line if y is not None} for line in lines]
    shared = set.intersection(*(set(table) for table in tables))
    return [(x, math.fsum(table[x] for table in tables) / len(tables)) for x in sorted(shared)]


def _phase_times(row: Row) -> dict[str, float]:
    """Seconds by phase; what the step took beyond the named phases is `other`."""
    named = {phase: row.get(f"time/{phase}") or 0.0 for phase in _PHASES[:-1]}
    return named | {"other": max((row.get("time/step") or 0.0) - sum(named.values()), 0.0)}


def _phases(groups: list[_Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    times = {id(run): [_phase_times(row) for row in run.train] for run in runs}
    totals = {phase: sum(t[phase] for run in runs for t in times[id(run)]) for phase in _PHASES}
    everything = sum(totals.values())
    if not everything:
        return ""
    shares = {p: f" {totals[p] / everything:.0%}" if len(runs) == 1 else "" for p in _PHASES}
    legend = "".join(f"<span>{_dot(i)}{p}{shares[p]}</span>" for i, p in enumerate(_PHASES, _COLORS))
    if len(runs) == 1:
        steps = [row["step"] for row in runs[0].train]
        rows = times[id(runs[0])]
        layers = [
            Series(phase, color, [(x, t[phase]) for x, t in zip(steps, rows, strict=True)])
            for color, phase in enumerate(_PHASES, _COLORS)
        ]
        return _figure("Time by phase", "seconds a step", stacked_bars(layers, "Time by phase"), legend)
    bars = []
    for i, group in enumerate(groups):
        rows = [t for run in group.runs for t in times[id(run)]]
        name = group.label if len(group.label) < 22 else group.label[:20] + "…"
        bars.append((name, i, [sum(t[p] for t in rows) / len(rows) for p in _PHASES]))
    chart = share_bars(bars, list(_PHASES), "s", "Time by phase", _COLORS)
    return _figure("Time by phase", "mean seconds a step", chart, legend)


# Samples, events, configuration


def _samples(groups: list[_Group]) -> str:
    blocks = ""
    for color, run in [(group.color, run) for group in groups for run in group.runs]:
        steps = sorted({row["step"] for row in run.samples})
        chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
        cards = "".join(_step_samples(step, [row for row in run.samples if row["step"] == step]) for step in chosen)
        if cards:
            name = f"{_dot(color)}{escape(run.name)}: first, middle and last step"
            blocks += f"<details{'' if blocks else ' open'}><summary>{name}</summary>{cards}</details>"
    scale = '<span class="scale">sure<i></i>unlikely</span>'
    note = f'<p class="note">A token is shaded by its log-probability, {scale}. Hover over it for the number.</p>'
    return f"<h2>Sample completions</h2>{note}{blocks}" if blocks else ""


def _step_samples(step: int, rows: list[Row]) -> str:
    """The best and the worst completion of the group that tells most: the one whose rewards differ most."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get("group"), []).append(row)

    def reward(row: Row) -> float:
        return row.get("reward") or 0.0

    ranked = [sorted(group, key=reward, reverse=True) for group in groups.values()]
    ordered = max(ranked, key=lambda group: reward(group[0]) - reward(group[-1]))
    shown = ordered if len(ordered) == 1 else [ordered[0], ordered[-1]]
    prompt = str(shown[0].get("prompt", ""))
    cut = prompt if len(prompt) <= 240 else "… " + prompt[-240:]
    more = "" if cut == prompt else f"<details><summary>whole prompt</summary><pre>{escape(prompt)}</pre></details>"
    cards = "".join(_completion(row) for row in shown)
    answer = shown[0].get("answer")
    answer = f' <span class="note">answer: {escape(str(answer))}</span>' if answer else ""
    head = f'<h3>Step {step}{answer}</h3><pre class="prompt">{escape(cut)}</pre>{more}'
    return f'<section class="sample">{head}<div class="grid">{cards}</div></section>'


def _completion(row: Row) -> str:
    correct = row.get("correct")
    badge = f'<b class="{"good" if correct else "bad"}">{"correct" if correct else "wrong"}</b>'
    unparsed = "" if row.get("parsed", True) else " · no answer could be read"
    cut = " · cut at the length limit" if row.get("finish_reason") == "length" else ""
    figures = f"reward {number(row.get('reward'))} · advantage {number(row.get('advantage'))}"
    about = f"{badge} {figures} · {len(row.get('token_ids') or [])} tokens{cut}{unparsed}"
    return f'<div class="card"><p>{about}</p><pre>{_shaded(row)}</pre></div>'


def _shaded(row: Row) -> str:
    """The completion with each token on a ground: none at log-probability 0, the deepest from -5 down."""
    tokens, logprobs = row.get("tokens"), row.get("logprobs")
    if not tokens or not logprobs or len(tokens) != len(logprobs):
        text = str(row.get("completion", ""))
        return escape(text[: 6 * _MOST_TOKENS]) + ("…" if len(text) > 6 * _MOST_TOKENS else "")
    spans = []
    for token, logprob in list(zip(tokens, logprobs, strict=True))[:_MOST_TOKENS]:
        depth, title = 0.75, "not finite"
        if logprob is not None:
            depth = min(max(-logprob, 0.0), 5.0) * 0.15
            title = f"logprob {logprob:.4g}, p {math.exp(min(logprob, 0.0)):.2g}"
        spans.append(f'<span style="--a:{depth:.2g}" title="{title}">{escape(str(token))}</span>')
    rest = len(tokens) - _MOST_TOKENS
    return "".join(spans) + (f'<span class="note"> … {rest} more tokens</span>' if rest > 0 else "")


def _events(runs: list[RunData]) -> str:
    """The first events of each run, and how many of each kind there were."""
    rows = [(run.name, row) for run in runs for row in run.events]
    if not rows:
        return ""
    counts = Counter(str(row.get("event", "")) for _, row in rows)
    note = ", ".join(f"{name}: {count}" for name, count in counts.most_common())
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{row['step']}</td><td>{escape(str(row.get('event', '')))}</td>"
        f"<td>{escape(str(row.get('detail', '')))}</td></tr>"
        for name, row in rows[:_MOST_EVENTS]
    )
    rest = f'<p class="note">{len(rows) - _MOST_EVENTS} more in metrics.jsonl</p>' if len(rows) > _MOST_EVENTS else ""
    head = "<tr><th>run</th><th>step</th><th>event</th><th>detail</th></tr>"
    return f'<h2>Events</h2><p class="note">{escape(note)}</p><div class="wide"><table>{head}{body}</table></div>{rest}'


def _config(groups: list[_Group]) -> str:
    first = groups[0].runs[0]
    text = escape(yaml.safe_dump(first.config, sort_keys=False))
    whole = f"<details><summary>{escape(first.name)}: config.yaml</summary><pre>{text}</pre></details>"
    if sum(len(group.runs) for group in groups) == 1:
        return f"<h2>Configuration</h2>{whole}"
    flats = [flatten(group.runs[0].config) for group in groups]
    keys = [key for key in _different(flats) if key not in _NOT_A_DIFFERENCE]
    head = "".join(f"<th>{_dot(group.color)}{escape(group.label)}</th>" for group in groups)
    lines = [(key, [str(flat.get(key, "(unset)")) for flat in flats]) for key in keys]
    lines.append(("seed", [", ".join(str(run.config.get("seed", "")) for run in group.runs) for group in groups]))
    body = "".join(f"<tr><td>{escape(k)}</td>{''.join(f'<td>{escape(v)}</td>' for v in row)}</tr>" for k, row in lines)
    table = f'<div class="wide"><table><tr><th>key</th>{head}</tr>{body}</table></div>'
    return f'<h2>Configuration</h2><p class="note">Only the keys that differ.</p>{table}{whole}'
