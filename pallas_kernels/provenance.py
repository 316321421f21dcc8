"""Which commit a figure was measured at, for every results file of the project."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

COMMIT_VARIABLE = "QWEN35_COMMIT"
"""Environment variable that names the commit where the tree was copied without its repository."""

DIRTY = "+dirty"
UNKNOWN_COMMIT = "unknown"

_CHECKOUT = Path(__file__).resolve().parent.parent


def current_commit(checkout: Path = _CHECKOUT) -> str:
    """The commit of the code in use, with "+dirty" when tracked files differ from it, "unknown" where none can be told.

    ``QWEN35_COMMIT`` in the environment wins: it serves a tree that was copied without its repository. What lies in
    ``benchmarks/`` does not count as a difference, or the first record of a run would mark the next.
    """
    if named := os.environ.get(COMMIT_VARIABLE):
        return named

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    try:
        # An installed package may lie inside some repository: it is this one only if git tracks the code itself.
        git("ls-files", "--error-unmatch", "pallas_kernels/__init__.py")
        head = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks")
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN_COMMIT
    return head + (DIRTY if changed else "")
