"""The shape of the package, read from its syntax trees: who imports whom, what is never used, how long things are.

Each rule is a function from the sources to a list of complaints. `CAUGHT` proves that it complains about a small wrong
source, `INNOCENT` that it lets the nearest right one pass.
"""

from __future__ import annotations

import ast
import io
import math
import os
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A room (folder) or top-level module, and what of ours it may import besides itself. Top-level modules that are not
# named here put the rooms together (cli, ...): they may import anything, and nothing named here may import them.
MAY_IMPORT: dict[str, set[str]] = {
    "": set(),  # jetrl/__init__.py, which is why anyone may import it
    "config": set(),
    "kernels": set(),
    "rl": set(),
    "model": {"kernels"},
    "bench": {"config", "flow", "footprint", "kernels", "loop", "model", "plan", "rl", "rollout", "train"},
    "tasks": {"config", "rl.types"},
    "report": {"config", "flow", "rl.types"},
    "flow": {"config", "model.config"},
    "rollout": {"config", "flow", "kernels", "model", "rl"},
    "train": {"config", "flow", "kernels", "model", "rl"},
    "loop": {"config", "flow", "report", "rl", "tasks"},  # rollout and train: through protocols only
    "footprint": {"config", "flow", "kernels", "model", "train"},
    "plan": {"config", "footprint", "kernels", "model", "rollout"},
    "cluster": {"config", "flow", "kernels", "loop", "model", "rl", "rollout", "train"},
}
GPU_PACKAGES = {"triton", "deep_gemm", "flash_attn", "cuda"}
ONLY_IN = {"ray": "cluster"} | dict.fromkeys(GPU_PACKAGES, "kernels")
GPU_MODULES = ("jetrl.kernels.hopper", "jetrl.bench.baseline")  # need triton to be imported; who needs them imports them late
THIRD_PARTY = {"kernels": {"torch"} | GPU_PACKAGES}
TORCH_FREE = {"config", "flow", "report"}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_BUILTINS = {"eval", "exec", "__import__"}
FORBIDDEN_NAMES = {"torch.load", "torch.save", "yaml.load", "yaml.full_load", "yaml.unsafe_load"}
BROAD_EXCEPTIONS = {"Exception", "BaseException"}
FOREIGN_CALLS = {"jetrl.tasks.user": 1}  # handlers around a user's own function, which may raise anything
# Lines of code: of the package, and apart from it of the GPU kernels, each of whose pointers has a line of its own.
GPU_KERNELS = "jetrl.kernels.hopper"
BENCH = "jetrl.bench"
MAX_LINES, MAX_GPU_LINES, MAX_BENCH_LINES = 8000, 3500, 1500
MAX_FUNCTION, MAX_FUNCTION_P90, MAX_KEYS = 80, 30, 50


@dataclass(frozen=True)
class Source:
    name: str  # dotted, "jetrl.rl.types"; a package has the name of its folder
    is_package: bool
    lines: int
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.partition(".")[2].split(".")[0]  # "" for jetrl/__init__.py


@dataclass(frozen=True)
class Import:
    target: str
    line: int


Sources = dict[str, Source]


def code_lines(text: str) -> int:
    """Lines that hold code. Blank lines, comments and docstrings are free: nobody should save on those."""
    before_statement = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    skipped = before_statement | {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}
    lines: set[int] = set()
    starts_statement = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in skipped:
            starts_statement = starts_statement or token.type in before_statement
            continue
        if not (token.type == tokenize.STRING and starts_statement):
            lines |= set(range(token.start[0], token.end[0] + 1))
        starts_statement = False
    return len(lines)


def parse(name: str, text: str, is_package: bool = False) -> Source:
    return Source(name, is_package, code_lines(text), ast.parse(text))


def read_package() -> Sources:
    sources: Sources = {}
    for path in sorted((ROOT / "jetrl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        sources[name] = parse(name, path.read_text(encoding="utf-8"), is_package)
    for path in (ROOT / "jetrl").rglob("*.cu"):
        name = ".".join(path.relative_to(ROOT).parts)
        sources[name] = Source(name, False, cuda_lines(path.read_text(encoding="utf-8")), ast.parse(""))
    return sources


def cuda_lines(text: str) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith("//") for line in text.splitlines())


def module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no function bodies, nothing under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and dotted(child.test, {}).endswith("TYPE_CHECKING"):
            for statement in child.orelse:
                yield statement
                yield from module_level(statement)
            continue
        yield child
        yield from module_level(child)


def dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """`a.b.c` of a name or attribute chain, its first part resolved through the imports; "" for anything else."""
    if isinstance(node, ast.Attribute):
        value = dotted(node.value, aliases)
        return f"{value}.{node.attr}" if value else ""
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def base_of(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = source.name.split(".") if source.is_package else source.name.split(".")[:-1]
    kept = package[: len(package) - node.level + 1]
    return ".".join([*kept, node.module] if node.module else kept)


def import_aliases(source: Source) -> dict[str, str]:
    """Local name to the full dotted name that it stands for."""
    aliases: dict[str, str] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {a.asname or a.name: f"{base_of(source, node)}.{a.name}" for a in node.names}
    return aliases


def imports(source: Source, known: Sources, only_module_level: bool = False) -> list[Import]:
    """Every imported module; `importlib.import_module("literal")` and modules used as `jetrl.a.b` count too."""
    found: list[Import] = []
    aliases = import_aliases(source)
    roots = {name: full for name, full in aliases.items() if full == "jetrl"}
    for node in module_level(source.tree) if only_module_level else ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = base_of(source, node)
            names = [f"{base}.{alias.name}" for alias in node.names]
            found += [Import(name if name in known else base, node.lineno) for name in names]
        elif isinstance(node, ast.Call) and dotted(node.func, aliases) == "importlib.import_module" and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append(Import(first.value, node.lineno))
        elif isinstance(node, ast.Attribute) and within(name := dotted(node, roots), "jetrl") and name in known:
            found.append(Import(name, node.lineno))
    return found


def within(target: str, allowed: str) -> bool:
    return target == allowed or target.startswith(allowed + ".")


# The rules


def check_direction(sources: Sources) -> list[str]:
    complaints = []
    for source in sources.values():
        if source.room not in MAY_IMPORT:
            continue
        allowed = {source.room} | MAY_IMPORT[source.room]
        for item in imports(source, sources):
            if item.target.startswith("jetrl.") and not any(within(item.target, f"jetrl.{name}") for name in allowed):
                complaints.append(
                    f"{source.name}:{item.line} imports {item.target}; {source.room} may import of ours only "
                    f"{', '.join(sorted(allowed))}"
                )
    return complaints


def check_third_party(sources: Sources) -> list[str]:
    complaints = []
    for source in sources.values():
        for item in imports(source, sources):
            root = item.target.split(".")[0]
            if ONLY_IN.get(root, source.room) != source.room:
                complaints.append(f"{source.name}:{item.line} imports {root}, which belongs in {ONLY_IN[root]}/ only")
            allowed = THIRD_PARTY.get(source.room)
            if allowed is not None and root not in allowed | {"jetrl"} | sys.stdlib_module_names:
                complaints.append(f"{source.name}:{item.line} imports {root}; {source.room} may use {sorted(allowed)}")
    return complaints


def loaded_with(name: str, sources: Sources) -> list[str]:
    """The module and the packages around it, whose __init__ runs first."""
    parts = name.split(".")
    return [p for p in (".".join(parts[:i]) for i in range(1, len(parts) + 1)) if p in sources]


def check_torch_free(sources: Sources) -> list[str]:
    """No import of torch anywhere in these rooms, and none reached through what they import at module level."""
    complaints = []
    for source in sources.values():
        if source.room not in TORCH_FREE:
            continue
        for item in imports(source, sources):
            if within(item.target, "torch"):
                complaints.append(f"{source.name}:{item.line} imports torch")
        seen: set[str] = set()
        paths = [[name] for name in loaded_with(source.name, sources)]
        while paths:
            path = paths.pop()
            if path[-1] in seen:
                continue
            seen.add(path[-1])
            targets = [item.target for item in imports(sources[path[-1]], sources, only_module_level=True)]
            if path != [source.name] and any(within(target, "torch") for target in targets):
                complaints.append(f"{source.name} reaches torch through {' -> '.join(path)}")
            paths += [[*path, name] for target in targets for name in loaded_with(target, sources)]
    return complaints


def check_unsafe(sources: Sources) -> list[str]:
    complaints = []
    for source in sources.values():
        for item in imports(source, sources):
            if item.target.split(".")[0] in PICKLES:
                complaints.append(f"{source.name}:{item.line} imports {item.target}; save and load safetensors or JSON")
        aliases = import_aliases(source)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute | ast.Name) and dotted(node, aliases) in FORBIDDEN_NAMES:
                complaints.append(f"{source.name}:{node.lineno} uses {dotted(node, aliases)}")
            if isinstance(node, ast.Call) and dotted(node.func, aliases) in FORBIDDEN_BUILTINS:
                complaints.append(f"{source.name}:{node.lineno} calls {dotted(node.func, aliases)}()")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", 1):
                complaints.append(f"{source.name}:{node.value.lineno} allows pickles")
    return complaints


def broad_excepts(source: Source) -> Iterator[str]:
    aliases = import_aliases(source)
    for node in ast.walk(source.tree):
        caught: list[ast.expr] = []
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{source.name}:{node.lineno} has a bare except; name what can be handled"
            else:
                caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and dotted(node.func, aliases) == "contextlib.suppress":
            caught = node.args
        for item in caught:
            if dotted(item, aliases).split(".")[-1] in BROAD_EXCEPTIONS:
                yield f"{source.name}:{item.lineno} catches {dotted(item, aliases)}; name what can be handled"


def check_broad_except(sources: Sources) -> list[str]:
    complaints = []
    for source in sources.values():
        found = list(broad_excepts(source))
        if len(found) > FOREIGN_CALLS.get(source.name, 0):
            complaints += found
    return complaints


def check_names(sources: Sources) -> list[str]:
    return [
        f"{name}: a thing is named after what it is about, never utils"
        for name in sources
        if {"util", "utils"} & set(name.split("."))
    ]


def check_lines(sources: Sources) -> list[str]:
    gpu, bench = (sum(s.lines for s in sources.values() if within(s.name, room)) for room in (GPU_KERNELS, BENCH))
    rest = sum(source.lines for source in sources.values()) - gpu - bench
    budgets = [("jetrl, but for GPU kernels and bench,", rest, MAX_LINES), (GPU_KERNELS, gpu, MAX_GPU_LINES)]
    budgets.append((BENCH, bench, MAX_BENCH_LINES))
    return [f"{what} has {lines} lines of code, more than {most}" for what, lines, most in budgets if lines > most]


def check_lazy(sources: Sources) -> list[str]:
    """Machines without a GPU have no triton: other modules than the GPU's import neither it nor them when they are loaded."""

    def gpu_only(name: str) -> bool:
        return any(within(name, module) for module in GPU_MODULES)

    complaints = []
    for source in sources.values():
        for item in imports(source, sources, only_module_level=True):
            wanted = item.target.split(".")[0] in GPU_PACKAGES or gpu_only(item.target)
            if wanted and not gpu_only(source.name):
                complaints.append(f"{source.name}:{item.line} imports {item.target} at once; import it where it is used")
    return complaints


def check_functions(sources: Sources) -> list[str]:
    lengths: list[tuple[int, str]] = []
    for source in sources.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lengths.append((node.end_lineno - node.lineno + 1, f"{source.name}:{node.lineno} {node.name}"))
    lengths.sort()
    complaints = [f"{where} has {n} lines, more than {MAX_FUNCTION}" for n, where in lengths if n > MAX_FUNCTION]
    if lengths:
        p90 = lengths[math.ceil(0.9 * len(lengths)) - 1][0]
        if p90 > MAX_FUNCTION_P90:
            over = [where for n, where in lengths if n > MAX_FUNCTION_P90]
            complaints.append(f"90th percentile of function lengths is {p90}, wanted {MAX_FUNCTION_P90}: {over}")
    return complaints


Rule = Callable[[Sources], list[str]]
RULES: list[Rule] = [
    check_direction,
    check_third_party,
    check_torch_free,
    check_unsafe,
    check_broad_except,
    check_names,
    check_lazy,
    check_lines,
    check_functions,
]


@pytest.fixture(scope="module")
def package() -> Sources:
    return read_package()


@pytest.mark.parametrize("rule", RULES)
def test_package_keeps_the_rule(package: Sources, rule: Rule) -> None:
    assert {"jetrl", "jetrl.config", "jetrl.rl.types", "jetrl.cluster"} <= package.keys()
    complaints = rule(package)
    assert not complaints, "\n" + "\n".join(complaints)


# Small sources, each wrong in one way, and a part of the complaint that it must draw.

LONG = "def f():\n" + "    x = 1\n" * MAX_FUNCTION
FAIRLY_LONG = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_P90
SHORT = "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_P90 - 1)

CAUGHT: list[tuple[Rule, dict[str, str], str]] = [
    (check_direction, {"jetrl.kernels.gemm": "from jetrl.model import linear"}, "kernels may import of ours only"),
    (check_direction, {"jetrl.model.linear": "import jetrl.config"}, "imports jetrl.config"),
    (check_direction, {"jetrl.rollout.engine": "def f():\n    from jetrl.train.trainer import Trainer"}, "engine:2"),
    (check_direction, {"jetrl.train.trainer": "import jetrl.rollout.engine as e"}, "imports jetrl.rollout.engine"),
    (check_direction, {"jetrl.train.trainer": "from ..rollout import engine"}, "imports jetrl.rollout"),
    (check_direction, {"jetrl.train": "from .. import rollout", "jetrl.rollout": ""}, "imports jetrl.rollout"),
    (check_direction, {"jetrl.rl.loss": "from jetrl.kernels.logprob import logprob"}, "rl may import of ours only rl"),
    (
        check_direction,
        {"jetrl.rl.loss": "import importlib as i\ni.import_module('jetrl.model')"},
        "imports jetrl.model",
    ),
    (check_direction, {"jetrl.tasks.math": "from jetrl.rl import loss", "jetrl.rl.loss": ""}, "imports jetrl.rl.loss"),
    (check_direction, {"jetrl.tasks.math": "from jetrl.rl.types_more import x"}, "imports jetrl.rl.types_more"),
    (
        check_direction,
        {"jetrl.loop": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jetrl.rollout.engine"},
        "loop:3",
    ),
    (check_direction, {"jetrl.loop": "from jetrl.cli import main"}, "imports jetrl.cli"),
    (check_direction, {"jetrl.model.linear": "from jetrl import config", "jetrl.config": ""}, "imports jetrl.config"),
    (
        check_direction,
        {"jetrl.train.trainer": "import jetrl as j\nj.rollout.Engine", "jetrl.rollout": ""},
        "trainer:2 imports jetrl.rollout",
    ),
    (check_direction, {"jetrl": "from jetrl.rollout import Engine"}, "jetrl:1 imports jetrl.rollout"),
    (check_third_party, {"jetrl.loop": "import ray.util"}, "ray, which belongs in cluster/"),
    (
        check_third_party,
        {"jetrl.model.linear": "def f():\n    from triton import jit"},
        "triton, which belongs in kernels/",
    ),
    (check_third_party, {"jetrl.kernels.quant": "import transformers"}, "kernels may use"),
    (check_torch_free, {"jetrl.config": "def f():\n    import torch.nn"}, "config:2 imports torch"),
    (
        check_torch_free,
        {"jetrl.report.page": "from jetrl.rl.types import Rollout", "jetrl.rl": "import torch", "jetrl.rl.types": ""},
        "reaches torch through jetrl.report.page -> jetrl.rl",
    ),
    (
        check_torch_free,
        {
            "jetrl.config": "import jetrl.a",
            "jetrl.a": "try:\n    import jetrl.b\nfinally:\n    0",
            "jetrl.b": "import torch",
        },
        "jetrl.config -> jetrl.a -> jetrl.b",
    ),
    (check_torch_free, {"jetrl": "import torch", "jetrl.config": ""}, "reaches torch through jetrl"),
    (check_unsafe, {"jetrl.train.state": "from pickle import loads"}, "imports pickle"),
    (check_unsafe, {"jetrl.train.state": "import torch as th\nth.load('x')"}, "uses torch.load"),
    (check_unsafe, {"jetrl.train.state": "from torch import load as read\nf = read"}, "uses torch.load"),
    (check_unsafe, {"jetrl.train.state": "import torch\ntorch.save(1, 'x')"}, "uses torch.save"),
    (check_unsafe, {"jetrl.tasks.countdown": "eval('1 + 1')"}, "calls eval()"),
    (check_unsafe, {"jetrl.tasks.countdown": "def f():\n    exec('x = 1')"}, "calls exec()"),
    (
        check_unsafe,
        {"jetrl.tasks.data": "import numpy as np\nnp.load('x', allow_pickle=True)"},
        "data:2 allows pickles",
    ),
    (check_unsafe, {"jetrl.config": "import yaml\nyaml.load('x', None)"}, "uses yaml.load"),
    (check_broad_except, {"jetrl.loop": "try:\n    f()\nexcept:\n    0"}, "loop:3 has a bare except"),
    (check_broad_except, {"jetrl.loop": "try:\n    f()\nexcept Exception as e:\n    0"}, "catches Exception"),
    (
        check_broad_except,
        {"jetrl.loop": "try:\n    f()\nexcept (OSError, BaseException):\n    0"},
        "catches BaseException",
    ),
    (
        check_broad_except,
        {"jetrl.loop": "from contextlib import suppress\nwith suppress(Exception):\n    f()"},
        "catches Exception",
    ),
    (check_broad_except, {"jetrl.tasks.user": "try:\n    f()\nexcept Exception:\n    0\n" * 2}, "user:7 catches"),
    (check_names, {"jetrl.utils": ""}, "never utils"),
    (check_names, {"jetrl.rl.utils.text": ""}, "never utils"),
    (check_lazy, {"jetrl.kernels.gemm": "import triton.language as tl"}, "gemm:1 imports triton.language at once"),
    (check_lazy, {"jetrl.model.linear": "from jetrl.kernels.hopper.ops import HopperOps"}, "imports jetrl.kernels.hopper.ops"),
    (check_lines, {"jetrl.a": "x\n" * MAX_LINES, "jetrl.b": "x\n"}, f"{MAX_LINES + 1} lines"),
    (check_lines, {f"{GPU_KERNELS}.a": "x\n" * (MAX_GPU_LINES + 1)}, f"{GPU_KERNELS} has {MAX_GPU_LINES + 1} lines"),
    (check_lines, {"jetrl.kernels.hopper_more": "x\n" * (MAX_LINES + 1)}, f"{MAX_LINES + 1} lines"),
    (check_functions, {"jetrl.a": LONG + SHORT * 20}, f"jetrl.a:1 f has {MAX_FUNCTION + 1} lines"),
    (check_functions, {"jetrl.a": FAIRLY_LONG * 2 + SHORT * 8}, "90th percentile of function lengths is 31"),
    (check_functions, {"jetrl.a": "class A:\n    async " + LONG.replace("\n", "\n    ")}, "has 81 lines"),
]

INNOCENT: list[tuple[Rule, dict[str, str]]] = [
    (check_direction, {"jetrl.model.linear": "import torch\nfrom jetrl.kernels import gemm\nfrom . import config"}),
    (check_direction, {"jetrl.train.trainer": "from jetrl.rl.loss import x\nfrom jetrl.model.transformer import y"}),
    (check_direction, {"jetrl.tasks.math": "from jetrl.rl import types", "jetrl.rl.types": ""}),
    (check_direction, {"jetrl.model.sources": "import jetrl\njetrl.__file__\njetrl.model.sources", "jetrl": ""}),
    (check_direction, {"jetrl.cli": "import jetrl.loop, jetrl.rollout.engine, jetrl.train.trainer"}),
    (check_third_party, {"jetrl.cluster.group": "import ray", "jetrl.kernels.gemm": "import math, torch, triton"}),
    (
        check_torch_free,
        {"jetrl.config": "import yaml", "jetrl.report.page": "import jetrl.config", "jetrl.loop": "import torch"},
    ),
    (
        check_torch_free,
        {
            "jetrl.report.page": "import jetrl.rl",
            "jetrl.rl": "import typing\nif typing.TYPE_CHECKING:\n    import torch\ndef f():\n    import torch",
        },
    ),
    (check_unsafe, {"jetrl.cli": "model.eval()\nconfig.eval.samples\ndef eval(): ...\nimport torch\ntorch.compile(f)"}),
    (check_unsafe, {"jetrl.tasks.data": "import yaml, json\nyaml.safe_load('x')\njson.load(f)"}),
    (check_unsafe, {"jetrl.tasks.data": "import numpy as np\nnp.load('x', allow_pickle=False)"}),
    (check_broad_except, {"jetrl.loop": "try:\n    f()\nexcept (OSError, ValueError):\n    raise Exception"}),
    (check_broad_except, {"jetrl.tasks.user": "try:\n    f()\nexcept Exception:\n    0"}),
    (check_names, {"jetrl.rl.metrics": ""}),
    (
        check_lazy,
        {
            "jetrl.kernels.select": "def f():\n    import triton\n    from jetrl.kernels.hopper import gemm",
            "jetrl.kernels.hopper.gemm": "import triton, deep_gemm\nfrom jetrl.kernels.hopper import quant",
        },
    ),
    (check_lines, {"jetrl.a": '"""Doc\nstring."""\n' + "# why\n\n" * MAX_LINES + "x = '''s\\n'''\n" * (MAX_LINES // 2)}),
    (check_functions, {"jetrl.a": FAIRLY_LONG + SHORT * 9}),
]


def synthetic(texts: dict[str, str]) -> Sources:
    return {name: parse(name, text, is_package=name.count(".") < 2) for name, text in texts.items()}


@pytest.mark.parametrize(("rule", "texts", "complaint"), CAUGHT)
def test_rule_catches(rule: Rule, texts: dict[str, str], complaint: str) -> None:
    assert complaint in "\n".join(rule(synthetic(texts)))


@pytest.mark.parametrize(("rule", "texts"), INNOCENT)
def test_rule_lets_pass(rule: Rule, texts: dict[str, str]) -> None:
    assert rule(synthetic(texts)) == []


def test_every_rule_has_a_case_of_each_kind() -> None:
    assert {case[0] for case in CAUGHT} == set(RULES) == {case[0] for case in INNOCENT}


def test_directions_have_no_cycle_and_keep_rollout_and_train_apart() -> None:
    def reach(room: str) -> set[str]:
        direct = {name.split(".")[0] for name in MAY_IMPORT[room]}
        return direct.union(*(reach(name) for name in direct)) if direct else set()  # a cycle ends in RecursionError

    reached = {room: reach(room) for room in MAY_IMPORT}
    assert "train" not in reached["rollout"]
    assert "rollout" not in reached["train"]
    assert not {"rollout", "train"} & reached["loop"]


# What the trees cannot show: imports of imports


IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
    importlib.import_module(module.name)
print("torch" in sys.modules)
"""


def loads_torch(name: str, folder: Path = ROOT) -> bool:
    """Whether importing the module, and every module in it if it is a package, brings in torch."""
    command = [sys.executable, "-c", IMPORT_ALL, name]
    inherited = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *inherited])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
    return done.stdout.strip() == "True"


@pytest.mark.parametrize("name", ["jetrl.config", "jetrl.report"])
def test_import_leaves_torch_out(name: str) -> None:
    assert not loads_torch(name)


def test_import_of_torch_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()  # stands in for the real one, which takes seconds
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").touch()
    assert not loads_torch("room", tmp_path)
    (tmp_path / "room" / "inner.py").write_text("import torch")
    assert loads_torch("room", tmp_path)


IMPORT_WITHOUT = """
import importlib, sys
sys.modules |= dict.fromkeys(sys.argv[1].split(","))  # None: ModuleNotFoundError, as where a package is not installed
for name in sys.argv[2:]:
    importlib.import_module(name)
from jetrl.kernels.select import device_of, ops_for
print(type(ops_for(device_of("auto"))).__name__)
"""


def test_all_but_the_gpu_modules_load_where_the_gpu_packages_are_not_installed(package: Sources) -> None:
    names = [name for name in package if not any(within(name, module) for module in GPU_MODULES)]
    command = [sys.executable, "-c", IMPORT_WITHOUT, ",".join(sorted(GPU_PACKAGES)), *names]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "CpuOps"


def test_config_has_few_keys_and_each_is_known_once() -> None:
    from jetrl.config import known_keys

    keys = known_keys()
    assert {"flow", "rollout.group_size", "eval.samples"} <= set(keys)
    assert len(keys) == len(set(keys))
    assert len(keys) <= MAX_KEYS, f"{len(keys)} keys; a new knob must replace an old one"
