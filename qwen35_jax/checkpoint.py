"""Model directories of both kinds, and converted (Orbax) checkpoints.

A converted directory holds the fused parameters as Orbax checkpoints, the model's config and tokenizer files, and a
manifest with provenance: where the weights came from, the dtype and format they were written in, every parameter with
its shape and dtype, and the size and a sampled digest of every file. Restoring trusts none of it blindly: the manifest
is compared with the model's config, the Orbax metadata with the manifest, and the files with their sizes and digests,
before anything is allocated.

The parameters are cut into parts of about a GiB, an Orbax checkpoint each, so that converting a model needs the memory
of one part rather than of the model, and so that progress can be told.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.hf_config import CONFIG_FILE, check_model_dir, read_json_object
from qwen35_jax.params import ArrayLike, FlatParams, ParamPack
from qwen35_jax.progress import ProgressFn, silent
from qwen35_jax.safetensors_files import INDEX_FILE
from qwen35_jax.sharding import parameter_sharding
from qwen35_jax.weights import ByteProgress, LoadPlan, load_params, plan_load, read_parameters

_log = logging.getLogger(__name__)

MANIFEST_FILE = "qwen35_checkpoint.json"
PARAMS_DIR = "params"
FORMAT = "qwen35-jax parameters"
FORMAT_VERSION = 1
_PART_BYTES = 1 << 30
# Blocks of a file that its digest reads: enough to notice a copy that broke off and was padded with zeros, at a small
# share of the time that reading a model takes.
_DIGEST_BLOCKS, _DIGEST_BLOCK_BYTES = 32, 1 << 16
_RESTORE_GB = 8  # most bytes in flight from disk; Orbax's default would hold a whole model in host memory
# Copied beside the parameters: configs, tokenizer, chat template. Weights and their index stay behind.
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")

ModelDirKind = Literal["hf", "orbax"]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a converted directory says about itself.

    Attributes:
        project_version: version of this project that wrote it.
        dtype: dtype of the matrices.
        model_config: the model at conversion.
        source: provenance: ``directory`` (name of the source), ``layout``, ``files`` (name, size and digest of the
            header of every shard), ``skipped_tensors`` (their number).
        parts: paths of the parameters in every part, in order.
        parameters: (shape, dtype name) of every parameter.
        files: size and sampled digest of every file of the parts, by path relative to the directory.
    """

    project_version: str
    dtype: str
    model_config: ModelConfig
    source: dict[str, Any]
    parts: tuple[tuple[str, ...], ...]
    parameters: dict[str, tuple[tuple[int, ...], str]]
    files: dict[str, tuple[int, str]]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "project_version": self.project_version,
            "dtype": self.dtype,
            "model_config": self.model_config.to_dict(),
            "source": self.source,
            "parts": [list(paths) for paths in self.parts],
            "parameters": {path: [list(shape), dtype] for path, (shape, dtype) in self.parameters.items()},
            "files": {name: list(entry) for name, entry in self.files.items()},
        }

    @classmethod
    def read(cls, model_dir: pathlib.Path) -> Manifest:
        """Reads the manifest of a converted directory.

        Raises:
            UserInputError: it is malformed, or of another format or version.
        """
        path = model_dir / MANIFEST_FILE
        values = read_json_object(path)
        if values.get("format") != FORMAT:
            raise UserInputError(f"{path}: format is {values.get('format')!r}, not {FORMAT!r}")
        if values.get("format_version") != FORMAT_VERSION:
            raise UserInputError(
                f"{path}: format_version {values.get('format_version')!r} is not supported (only {FORMAT_VERSION}): "
                "convert the model again"
            )
        try:
            return cls(
                project_version=str(values["project_version"]),
                dtype=jnp.dtype(values["dtype"]).name,
                model_config=ModelConfig.from_dict(values["model_config"]),
                source=dict(values["source"]),
                parts=tuple(tuple(paths) for paths in values["parts"]),
                parameters={path: (tuple(shape), dtype) for path, (shape, dtype) in values["parameters"].items()},
                files={name: (int(size), str(digest)) for name, (size, digest) in values["files"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserInputError(f"{path} is malformed: {error!r}") from error


# ---- directories of either kind ------------------------------------------------------------------------------------


def open_model_dir(model_dir: str | os.PathLike[str]) -> ModelDirKind:
    """Says what a model directory holds: "hf" (Hugging Face files) or "orbax" (converted).

    Raises:
        UserInputError: it is neither, or both, or does not exist.
    """
    path = check_model_dir(model_dir)
    if not (path / MANIFEST_FILE).is_file():
        if (path / PARAMS_DIR).is_dir():
            raise UserInputError(
                f"{str(path)!r} has a {PARAMS_DIR} directory but no {MANIFEST_FILE}: an incomplete conversion"
            )
        if not (path / CONFIG_FILE).is_file():
            raise UserInputError(f"{str(path)!r} has no {CONFIG_FILE}: not a model directory")
        return "hf"
    strays = sorted(file.name for file in path.iterdir() if file.suffix == ".safetensors")
    if strays:
        raise UserInputError(f"{str(path)!r} holds both a converted checkpoint ({MANIFEST_FILE}) and {strays[0]}")
    return "orbax"


def read_model_config(model_dir: str | os.PathLike[str]) -> ModelConfig:
    """The configuration of a model directory of either kind, from its ``config.json``.

    Raises:
        UserInputError: as :func:`open_model_dir` and :meth:`ModelConfig.from_hf`.
    """
    open_model_dir(model_dir)
    return ModelConfig.from_hf(model_dir)


def check_weights(model_dir: str | os.PathLike[str], config: ModelConfig) -> None:
    """Makes all checks of :func:`load_model_params` and reads no weights: for refusing early.

    Raises:
        UserInputError: the directory does not hold this model, whole.
    """
    if open_model_dir(model_dir) == "hf":
        plan_load(model_dir, config)
    else:
        ConvertedCheckpoint(model_dir, config)


def load_model_params(
    model_dir: str | os.PathLike[str],
    config: ModelConfig,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    device: jax.Device | None = None,
    progress: ProgressFn = silent,
) -> FlatParams:
    """Loads the parameters of a model directory of either kind.

    Args:
        model_dir: a Hugging Face or a converted directory.
        config: the model's numbers.
        dtype: dtype of matrices; None takes ``config.dtype``.
        device: where the parameters go; None takes JAX's default.
        progress: told of the MiB loaded.

    Returns:
        The packed tuple of :class:`~qwen35_jax.params.ParamPack`.

    Raises:
        UserInputError: the directory does not hold this model, whole; found before anything is allocated.
    """
    if open_model_dir(model_dir) == "hf":
        return load_params(model_dir, config, dtype=dtype, device=device, progress=progress)
    pack = ParamPack(config, dtype=dtype)
    sharding = jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
    checkpoint = ConvertedCheckpoint(model_dir, config)
    restored = checkpoint.reader(lambda path, shape: sharding, progress=progress)
    return pack.assemble(restored, device=device)


# ---- writing -------------------------------------------------------------------------------------------------------


def convert(
    model_dir: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: jax.typing.DTypeLike | None = None,
    progress: ProgressFn = silent,
) -> Manifest:
    """Converts a Hugging Face directory into a directory that loads without conversion.

    Args:
        model_dir: the Hugging Face directory.
        output: the directory to make; it appears complete or not at all.
        dtype: dtype of matrices; None takes the checkpoint's (bfloat16 for float16).
        progress: told of the MiB converted.

    Raises:
        UserInputError: the source is not a sound Hugging Face directory or is converted already, the output exists
            and is not empty, or the disk is too small.
    """
    source, output = check_model_dir(model_dir), pathlib.Path(output)
    if output.resolve() == source.resolve():
        raise UserInputError(f"output {str(output)!r} is the model directory itself")
    try:
        taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    except OSError as error:  # a name that is too long, a directory that cannot be read
        raise UserInputError(f"cannot write to {str(output)!r}: {error.strerror}") from error
    if taken:
        raise UserInputError(f"output {str(output)!r} exists and is not an empty directory")
    if open_model_dir(source) == "orbax":
        raise UserInputError(
            f"{str(source)!r} is converted already (from {Manifest.read(source).source['directory']!r})"
        )
    config = ModelConfig.from_hf(source)
    plan = plan_load(source, config)
    if dtype is None:
        dtype = "bfloat16" if config.dtype == "float16" else config.dtype
    pack = ParamPack(config, dtype=dtype)
    _check_disk(output, pack.num_bytes)

    place = output.resolve()  # a directory can take the place of another one, but not that of a symbolic link
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{place.name}.partial-", dir=place.parent))
    except OSError as error:
        raise UserInputError(f"cannot write to {str(place.parent)!r}: {error.strerror}") from error
    try:
        partial.chmod(0o777 & ~_umask())
        manifest = _write_converted(plan, pack, partial, progress)
        partial.replace(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_disk(output: pathlib.Path, num_bytes: int) -> None:
    parent = next((path for path in output.resolve().parents if path.exists()), pathlib.Path("/"))
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise UserInputError(
            f"output {str(output)!r} needs {num_bytes / 2**30:.1f} GiB, {parent} has {free / 2**30:.1f} GiB left"
        )


def _write_converted(plan: LoadPlan, pack: ParamPack, target: pathlib.Path, progress: ProgressFn) -> Manifest:
    parts = split_parts(pack)
    with read_parameters(
        plan, pack, [path for part in parts for path in part], progress=progress, stage="converting weights (MiB)"
    ) as parameters:
        for index, part in enumerate(parts):
            save_part(target, index, {path: next(parameters)[1] for path in part})
    for file in plan.model_dir.iterdir():
        if file.is_file() and file.suffix in _COPIED_SUFFIXES and file.name != INDEX_FILE:
            shutil.copyfile(file, target / file.name)
    files = [{"name": s.path.name, "bytes": s.num_bytes, "header_sha256": s.header_sha256} for s in plan.shards]
    source = {
        "directory": plan.model_dir.resolve().name,
        "layout": plan.layout,
        "files": files,
        "skipped_tensors": len(plan.skipped),
    }
    return write_manifest(target, pack, parts, source)


def split_parts(pack: ParamPack, part_bytes: int = _PART_BYTES) -> tuple[tuple[str, ...], ...]:
    """Cuts the parameters, in the order in which they are loaded, into parts of about the given size."""
    parts, size = [[]], 0
    for path, spec in pack.specs.items():
        num_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        if parts[-1] and size + num_bytes > part_bytes:
            parts.append([])
            size = 0
        parts[-1].append(path)
        size += num_bytes
    return tuple(tuple(part) for part in parts)


def save_part(target: pathlib.Path, index: int, parameters: dict[str, ArrayLike]) -> None:
    """Writes one part of a converted directory; arrays may lie on several devices."""
    with _checkpointer() as checkpointer:
        checkpointer.save(_part_dir(target, index), args=ocp.args.PyTreeSave(parameters))


def write_manifest(
    target: pathlib.Path, pack: ParamPack, parts: tuple[tuple[str, ...], ...], source: dict[str, Any]
) -> Manifest:
    """Describes the parts that have been written; the directory counts as converted from here on."""
    root = target / PARAMS_DIR
    manifest = Manifest(
        project_version=_project_version(),
        dtype=pack.dtype.name,
        model_config=pack.config,
        source=source,
        parts=parts,
        parameters={path: (spec.shape, spec.dtype.name) for path, spec in pack.specs.items()},
        files={
            str(f.relative_to(target)): (f.stat().st_size, sampled_digest(f))
            for f in sorted(root.rglob("*"))
            if f.is_file()
        },
    )
    (target / MANIFEST_FILE).write_text(json.dumps(manifest.to_dict(), indent=1) + "\n")
    return manifest


def sampled_digest(path: pathlib.Path) -> str:
    """Digest of up to 32 blocks of 64 KiB, spread evenly over the file, its first and its last among them."""
    digest, size = hashlib.blake2b(digest_size=16), path.stat().st_size
    last = max(0, size - _DIGEST_BLOCK_BYTES)
    with path.open("rb") as file:
        for start in sorted({last * i // (_DIGEST_BLOCKS - 1) for i in range(_DIGEST_BLOCKS)}):
            file.seek(start)
            digest.update(file.read(_DIGEST_BLOCK_BYTES))
    return digest.hexdigest()


def _project_version() -> str:
    try:
        return importlib.metadata.version("qwen35-jax")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def _part_dir(model_dir: pathlib.Path, index: int) -> pathlib.Path:
    return model_dir.resolve() / PARAMS_DIR / f"{index:04d}"


def _checkpointer() -> ocp.Checkpointer:
    # bf16 weights hardly compress, and decompressing them is slower than the disk
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_RESTORE_GB, use_compression=False))


# ---- reading -------------------------------------------------------------------------------------------------------


class ConvertedCheckpoint:
    """A converted directory that has been checked against a model; reading it cannot fail for what it lacks."""

    def __init__(self, model_dir: str | os.PathLike[str], config: ModelConfig):
        """Checks the directory; allocates nothing.

        Raises:
            UserInputError: manifest, config, Orbax metadata and files do not agree; names what differs.
        """
        self._dir = check_model_dir(model_dir)
        self.manifest = Manifest.read(self._dir)
        self._check_parameters(config)
        self._check_files()
        self._check_orbax()
        if config != self.manifest.model_config:
            then, now = self.manifest.model_config.to_dict(), config.to_dict()
            changed = [name for name in now if now[name] != then[name]]
            _log.warning("%s: %s changed since the conversion: %s", self._dir, CONFIG_FILE, ", ".join(changed))

    def _check_parameters(self, config: ModelConfig) -> None:
        wanted = {
            path: (spec.shape, spec.dtype.name)
            for path, spec in ParamPack(config, dtype=self.manifest.dtype).specs.items()
        }
        problem = _difference(wanted, self.manifest.parameters)
        if problem is None:
            in_parts = [path for part in self.manifest.parts for path in part]
            if sorted(in_parts) != sorted(wanted):
                problem = "its parts do not hold every parameter exactly once"
        if problem is not None:
            raise UserInputError(f"{self._dir / MANIFEST_FILE} does not fit {self._dir / CONFIG_FILE}: {problem}")

    def _check_files(self) -> None:
        for name, (size, digest) in self.manifest.files.items():
            file = self._dir / name
            if not file.is_file():
                raise UserInputError(f"{file} is missing: the converted checkpoint is incomplete")
            if file.stat().st_size != size:
                raise UserInputError(f"{file} has {file.stat().st_size} bytes, the manifest says {size}: truncated?")
            if sampled_digest(file) != digest:
                raise UserInputError(f"{file} is damaged: its contents are not those that the manifest describes")

    def _check_orbax(self) -> None:
        found = {}
        with _checkpointer() as checkpointer:
            for index, part in enumerate(self.manifest.parts):
                try:
                    metadata = checkpointer.metadata(_part_dir(self._dir, index)).item_metadata
                    if metadata is None:
                        raise ValueError("its Orbax metadata is damaged; convert the model again")
                    tree = metadata.tree
                    stored = {path: (tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in tree.items()}
                except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
                    raise UserInputError(f"cannot read {_part_dir(self._dir, index)}: {error}") from error
                if sorted(stored) != sorted(part):
                    problem = _difference(dict.fromkeys(part), dict.fromkeys(stored))
                    raise UserInputError(f"{_part_dir(self._dir, index)} does not fit {MANIFEST_FILE}: {problem}")
                found.update(stored)
        problem = _difference(self.manifest.parameters, found)
        if problem is not None:
            raise UserInputError(f"{self._dir / PARAMS_DIR} does not fit {MANIFEST_FILE}: {problem}")

    def reader(
        self,
        sharding: Callable[[str, tuple[int, ...]], jax.sharding.Sharding],
        *,
        progress: ProgressFn = silent,
    ) -> Callable[[str], jax.Array]:
        """A function from a parameter's path to its array, to be asked once for each.

        A part is read when its first parameter is asked for; arrays that have been handed out are not kept.

        Args:
            sharding: where each parameter goes, by path and shape; any number of devices, whatever it was saved from.
            progress: told of the MiB restored.
        """
        part_of = {path: index for index, part in enumerate(self.manifest.parts) for path in part}
        sizes = {
            path: math.prod(shape) * jnp.dtype(dtype).itemsize
            for path, (shape, dtype) in self.manifest.parameters.items()
        }
        report = ByteProgress(progress, "loading weights (MiB)", sum(sizes.values()))
        held: dict[str, jax.Array] = {}

        def get(path: str) -> jax.Array:
            if path not in held:
                index = part_of[path]
                held.update(self._restore_part(index, sharding))
                report.add(sum(sizes[name] for name in self.manifest.parts[index]))
            return held.pop(path)

        return get

    def _restore_part(
        self, index: int, sharding: Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
    ) -> dict[str, jax.Array]:
        abstract, args = {}, {}
        for path in self.manifest.parts[index]:
            shape, dtype = self.manifest.parameters[path]
            placed = sharding(path, shape)
            abstract[path] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=placed)
            args[path] = ocp.ArrayRestoreArgs(sharding=placed, global_shape=shape, dtype=jnp.dtype(dtype))
        with _checkpointer() as checkpointer:
            try:
                restore = ocp.args.PyTreeRestore(item=abstract, restore_args=args)
                return checkpointer.restore(_part_dir(self._dir, index), args=restore)
            except (OSError, ValueError, KeyError) as error:
                first_line = (str(error).splitlines() or [type(error).__name__])[0]
                raise UserInputError(f"cannot restore {_part_dir(self._dir, index)}: {first_line}") from error


def restore_on_mesh(
    model_dir: str | os.PathLike[str],
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    *,
    progress: ProgressFn = silent,
) -> dict[str, jax.Array]:
    """Restores a converted directory over the devices of a mesh, in the dtypes it was written in.

    Args:
        model_dir: a converted directory, written from any number of devices.
        config: the model's numbers.
        mesh: the devices; parameters are placed by :func:`~qwen35_jax.sharding.parameter_sharding`.
        progress: told of the MiB restored.

    Returns:
        Every parameter by its path.

    Raises:
        UserInputError: the directory does not hold this model, or a dimension does not divide over the mesh.
    """
    checkpoint = ConvertedCheckpoint(model_dir, config)
    placed = {
        path: parameter_sharding(path, shape, mesh) for path, (shape, _) in checkpoint.manifest.parameters.items()
    }
    get = checkpoint.reader(lambda path, shape: placed[path], progress=progress)
    return {path: get(path) for path in placed}


def _difference(wanted: dict[str, Any], found: dict[str, Any]) -> str | None:
    """One line about the first things that differ, or None."""
    for what, names in (
        ("missing parameters", [path for path in wanted if path not in found]),
        ("parameters that the model does not have", [path for path in found if path not in wanted]),
    ):
        if names:
            more = f", ... ({len(names)} in all)" if len(names) > 3 else ""
            return f"{what}: {', '.join(names[:3])}{more}"
    for path, value in wanted.items():
        if found[path] != value:
            (shape, dtype), (other_shape, other_dtype) = value, found[path]
            return f"{path} is {other_dtype} {list(other_shape)}, expected {dtype} {list(shape)}"
    return None
