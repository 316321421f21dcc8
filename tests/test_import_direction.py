"""The direction of imports, read from the source: who may know whom.

``scripts, tests -> qwen35_jax -> {pallas_kernels, schedulers}``; inside qwen35_jax
``shapes, config <- layers <- model <- programs <- engine <- llm <- {batch, cli}``.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("qwen35_jax", "pallas_kernels", "schedulers")
OUTSIDE = ("tests", "scripts", "benchmarks")
# What each package may import beside the standard library and itself; None: anything but what FORBIDDEN names.
# jaxlib is the other half of jax: the instructions that a kernel inlines have their names there.
ALLOWED = {"schedulers": {"numpy"}, "pallas_kernels": {"jax", "jaxlib", "numpy", "jaxtyping"}, "qwen35_jax": None}
FORBIDDEN = {
    "schedulers": {"jax", "jaxlib", "flax", "pallas_kernels", "qwen35_jax", *OUTSIDE},
    "pallas_kernels": {"flax", "schedulers", "qwen35_jax", *OUTSIDE},
    "qwen35_jax": set(OUTSIDE),
}
# A room may import those before it, never one after it, not even through a module that is not named here.
ROOMS = (("shapes", "config"), ("layers",), ("model",), ("programs",), ("engine",), ("llm",), ("batch",), ("cli",))
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}


def modules(root: Path, package: str) -> dict[str, Path]:
    """Dotted name -> file of every module of a package."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Dotted names that a module imports, anywhere in it; ``from package import module`` gives the module."""
    found = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes(), filename=str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found.add(submodule if submodule in known else base)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            target = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(target, str) and not target.startswith("."):
                found.add(target)
    return found


def package_faults(root: Path, package: str) -> list[str]:
    """Imports that leave a package in a forbidden direction."""
    known = modules(root, package)
    faults = []
    for name, path in known.items():
        for target in sorted(imports(name, path, known)):
            top = target.partition(".")[0]
            if top == package or top in sys.stdlib_module_names:
                continue
            allowed = ALLOWED[package]
            if top in FORBIDDEN[package] or (allowed is not None and top not in allowed):
                faults.append(f"{name} imports {target}")
    return faults


def room(name: str) -> str | None:
    """The room of a module of qwen35_jax, None for a module without a place in the order."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else None


def room_faults(root: Path) -> list[str]:
    """Chains of imports inside qwen35_jax that lead from a room to a later one."""
    known = modules(root, "qwen35_jax")
    graph = {name: sorted(imports(name, path, known) & known.keys()) for name, path in known.items()}
    faults = []
    for start in graph:
        own = room(start)
        if own is None:
            continue
        chains = {start: [start]}
        queue = [start]
        while queue:
            name = queue.pop(0)
            for target in graph[name]:
                if target in chains:
                    continue
                chains[target] = [*chains[name], target]
                reached = room(target)
                if reached is None:
                    queue.append(target)  # look through it
                elif LEVEL[reached] > LEVEL[own]:
                    faults.append(" -> ".join(chains[target]))
    return faults


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_looks_only_where_it_may(package):
    assert modules(ROOT, package), f"no modules found in {package}"
    assert package_faults(ROOT, package) == []


def test_the_rooms_of_qwen35_jax_keep_their_order():
    assert room_faults(ROOT) == []


def test_the_scheduler_runs_without_jax():
    code = "import sys, schedulers; print(*(name for name in ('jax', 'jaxlib', 'flax') if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("package", "line", "fault"),
    [
        ("schedulers", "import jax.numpy as jnp", "jax.numpy"),
        ("schedulers", "from flax import nnx", "flax"),
        ("schedulers", "from qwen35_jax.config import EngineConfig", "qwen35_jax.config"),
        ("schedulers", "import pallas_kernels", "pallas_kernels"),
        ("schedulers", "def late():\n    import jax", "jax"),
        ("schedulers", "import importlib\nimportlib.import_module('jax')", "jax"),
        ("schedulers", "import scipy", "scipy"),
        ("pallas_kernels", "from schedulers import Plan", "schedulers"),
        ("pallas_kernels", "from qwen35_jax import LLM", "qwen35_jax"),
        ("pallas_kernels", "import flax", "flax"),
        ("qwen35_jax", "from tests.oracle import model", "tests.oracle"),
        ("qwen35_jax", "import scripts", "scripts"),
    ],
)
def test_the_check_sees_a_forbidden_import(tmp_path, package, line, fault):
    write(tmp_path, {f"{package}/__init__.py": "", f"{package}/inner/thing.py": line})
    assert package_faults(tmp_path, package) == [f"{package}.inner.thing imports {fault}"]


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("schedulers", "import numpy as np, heapq\nfrom schedulers.plan import Plan\nfrom . import plan"),
        ("pallas_kernels", "import jax\nfrom jax.experimental import pallas\nfrom jaxtyping import Float"),
        ("qwen35_jax", "import flax, pallas_kernels\nfrom schedulers import Plan"),
    ],
)
def test_the_check_lets_the_right_direction_pass(tmp_path, package, line):
    write(tmp_path, {f"{package}/__init__.py": "", f"{package}/thing.py": line})
    assert package_faults(tmp_path, package) == []


def test_the_check_sees_a_room_that_looks_up(tmp_path):
    write(
        tmp_path,
        {
            "qwen35_jax/__init__.py": "from qwen35_jax.llm import LLM",
            "qwen35_jax/config.py": "",
            "qwen35_jax/layers/mlp.py": "from ..model import Qwen35",
            "qwen35_jax/model.py": "from . import config\nfrom .cache import Cache",
            "qwen35_jax/cache.py": "def plan():\n    from qwen35_jax import engine",
            "qwen35_jax/engine.py": "import qwen35_jax.model",
            "qwen35_jax/programs.py": "from qwen35_jax import LLM",
            "qwen35_jax/llm.py": "from qwen35_jax import engine",
            "qwen35_jax/batch/job.py": "from qwen35_jax.cli import flags",
            "qwen35_jax/cli/__init__.py": "",
            "qwen35_jax/cli/flags.py": "from qwen35_jax.batch import job",
        },
    )
    assert room_faults(tmp_path) == [
        "qwen35_jax.batch.job -> qwen35_jax.cli.flags",
        "qwen35_jax.layers.mlp -> qwen35_jax.model",
        "qwen35_jax.model -> qwen35_jax.cache -> qwen35_jax.engine",
        "qwen35_jax.programs -> qwen35_jax -> qwen35_jax.llm",
    ]
