"""Orbax checkpoints of a training run: parameters, optimiser state and step, with where they came from.

``DIR/checkpoints/step_00001234/`` holds ``state`` (Orbax) and ``provenance.json``; it appears whole or not at all, and
older ones go once it is there.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import orbax.checkpoint as ocp

from qwen35_jax.errors import UserInputError
from qwen35_jax.hf_config import read_json_object

CHECKPOINTS = "checkpoints"
STATE = "state"
PROVENANCE = "provenance.json"


def latest(run_dir: pathlib.Path) -> pathlib.Path | None:
    """The newest checkpoint of a run, or None."""
    found = sorted((run_dir / CHECKPOINTS).glob("step_[0-9]*"))
    return found[-1] if found else None


def read_provenance(checkpoint: pathlib.Path) -> dict[str, Any]:
    """What a checkpoint says about itself.

    Raises:
        UserInputError: it is not a checkpoint.
    """
    return read_json_object(checkpoint / PROVENANCE)


def save(run_dir: pathlib.Path, step: int, state: Any, provenance: dict[str, Any]) -> pathlib.Path:
    """Writes a checkpoint and removes older ones.

    Args:
        run_dir: directory of the run.
        step: steps done.
        state: a pytree of arrays.
        provenance: JSON values.

    Returns:
        The checkpoint's directory.
    """
    root = run_dir.absolute() / CHECKPOINTS
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"step_{step:08d}"
    partial = pathlib.Path(tempfile.mkdtemp(prefix=".partial-", dir=root))
    try:
        partial.chmod(0o755)
        with _checkpointer() as checkpointer:
            checkpointer.save(partial / STATE, args=ocp.args.PyTreeSave(_named_leaves(state)))
        (partial / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n")
        if target.exists():
            shutil.rmtree(target)
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in root.glob("step_[0-9]*"):
        if old.name < target.name:
            shutil.rmtree(old)
    return target


def restore(checkpoint: pathlib.Path, like: Any, *, partial: bool = False) -> Any:
    """Reads a checkpoint's state.

    Args:
        checkpoint: its directory.
        like: a pytree of ``jax.ShapeDtypeStruct`` of the same structure.
        partial: whether ``like`` may be a part of what was saved.

    Raises:
        UserInputError: it holds something else.
    """
    wanted = _named_leaves(like)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    item = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in wanted.items()}
    args = {
        name: ocp.ArrayRestoreArgs(sharding=sharding, global_shape=x.shape, dtype=x.dtype) for name, x in wanted.items()
    }
    options = {"partial_restore": True} if partial else {}
    with _checkpointer() as checkpointer:
        try:
            restored = checkpointer.restore(
                checkpoint.absolute() / STATE, args=ocp.args.PyTreeRestore(item=item, restore_args=args, **options)
            )
        except (OSError, ValueError, KeyError) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserInputError(f"cannot restore {checkpoint}: {first_line}") from error
    return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in wanted])


def file_digest(path: pathlib.Path) -> str:
    """SHA-256 of a file.

    Raises:
        UserInputError: it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserInputError(f"{path}: {error.strerror}") from error


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by readable names: what the optimiser's containers are called may change, an array's path seldom does."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="|"): leaf for path, leaf in leaves}


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
