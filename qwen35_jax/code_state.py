"""Which code this process runs: digests of files, taken before the files are imported.

Compiled programs are filed under the code that they were made of. What a process runs is what its files held when it
imported them, and a file may be edited while a process starts. So this module, which needs nothing but the standard
library, is the first that ``qwen35_jax`` imports; :func:`unchanged` looks again before anything is filed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

PACKAGES = ("pallas_kernels", "qwen35_jax", "schedulers")
"""The project's packages: all code that has part in a program, beside what is installed."""

_DISTRIBUTIONS = re.compile(r"(jax|flax|numpy|ml_dtypes|nvidia|triton).*\.dist-info", re.IGNORECASE)
# Variables that XLA and the kernels' compilers read. JAX itself sets those of its own libraries' places.
_FLAGS = re.compile(
    r"XLA_(?!(PYTHON_)?CLIENT_)|MOSAIC_(?!GPU_(RUNTIME_LIB|NVSHMEM))|TRITON_|NVIDIA_TF32|CUBLAS_|CUDNN_|TF_(?!CPP_)"
)
# Mosaic GPU sets it to the CUDA that JAX has found, whatever it was: only what it is afterwards counts. Before, it
# only tells whether a process was started by one that had imported Mosaic GPU.
_SET_BY_JAX = frozenset({"MOSAIC_GPU_CUDA_ROOT"})


@dataclasses.dataclass(frozen=True)
class CodeState:
    """Code and libraries on disk.

    Attributes:
        sources: digest of the packages' code and data files; None where no source file is to be found.
        installed: names and versions of the installed libraries that compile; those that XLA loads by itself are known
            as distributions only.
    """

    sources: str | None
    installed: tuple[str, ...]


def _package_folders() -> tuple[pathlib.Path, ...]:
    """Folders of the project's packages; asking for them imports none."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    return tuple(pathlib.Path(spec.origin).parent for spec in specs if spec is not None and spec.origin)


def source_digest(*folders: pathlib.Path) -> str | None:
    """Digest of the code and the data files (kernel settings) in folders, or None without any code.

    A file that cannot be read has no part: it is gone, or a link to nowhere (editors leave such), and no import gets
    more of it than this does.
    """
    total, code = hashlib.sha256(), 0
    for folder in folders:
        for path in sorted(_files(folder)):
            if not path.endswith((".py", ".json")):
                continue
            try:
                data = pathlib.Path(path).read_bytes()
            except OSError:
                continue
            name = f"{folder.name}/{pathlib.Path(path).relative_to(folder).as_posix()}"
            total.update(json.dumps([name, hashlib.sha256(data).hexdigest()]).encode())
            code += path.endswith(".py")
    return total.hexdigest() if code else None


def _files(folder: pathlib.Path) -> Iterator[str]:
    """Every file below a folder, through links to folders as well, which an import follows."""
    been: set[str] = set()
    for where, folders, names in os.walk(folder, followlinks=True):  # passes over folders that vanish under it
        real = os.path.realpath(where)
        if real in been:  # a link back, or a second one
            folders.clear()
            continue
        been.add(real)
        folders.sort()
        yield from (os.path.join(where, name) for name in names)


def installed(paths: Iterable[str]) -> tuple[str, ...]:
    """Distributions on a module search path that have part in compiling."""
    names: set[str] = set()
    for path in paths:
        try:
            names.update(name for name in os.listdir(path) if _DISTRIBUTIONS.fullmatch(name))
        except OSError:
            continue  # no folder: a zip archive, or an entry for what may come
    return tuple(sorted(names))


def compiler_flags() -> dict[str, str]:
    """Environment variables that have part in compiling, as they are now."""
    return {name: value for name, value in os.environ.items() if _FLAGS.match(name)}


def _take() -> CodeState:
    return CodeState(source_digest(*FOLDERS), installed(_PATHS))


FOLDERS = _package_folders()
"""Where the packages are."""

_PATHS = tuple(sys.path)

AT_IMPORT = _take()
"""The state before this process imported ``qwen35_jax``."""

FLAGS_AT_IMPORT = {name: value for name, value in compiler_flags().items() if name not in _SET_BY_JAX}
"""The environment's part then: XLA reads it once, at a time of its own."""

IMPORTED_BEFORE = tuple(name for name in PACKAGES if name != __package__ and name in sys.modules)
"""Packages that were imported earlier: nobody knows what their files held then."""


def unchanged() -> bool:
    """Whether code and libraries on disk are still those that this process has imported."""
    return _take() == AT_IMPORT
