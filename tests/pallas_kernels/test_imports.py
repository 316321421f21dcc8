"""pallas_kernels is self-contained."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pallas_kernels

PACKAGE = pathlib.Path(pallas_kernels.__file__).parent
ALLOWED = {"jax", "jaxlib", "jaxtyping", "numpy", "pallas_kernels"}


def imported(path: pathlib.Path) -> set[str]:
    """Top-level names that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module.split(".")[0])
    return names


def test_imports_nothing_of_the_other_packages():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        foreign = imported(path) - ALLOWED - set(sys.stdlib_module_names)
        assert not foreign, f"{path.relative_to(PACKAGE.parent)} imports {foreign}"


def test_importing_it_loads_nothing_of_the_other_packages():
    code = (
        "import sys, pallas_kernels, pallas_kernels.bench;"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'qwen35_jax', 'schedulers', 'flax', 'transformers'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent, timeout=120
    )
    assert done.stdout.strip() == "[]"
