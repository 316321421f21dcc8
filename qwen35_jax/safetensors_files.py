"""Safetensors files of a model directory: which tensor lies where, checked against the disk before anything is read.

Tensors are read one at a time into fresh host memory with plain reads, never mapped: a file that shrinks or was cut
short is an error with its name, not zeros.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import threading
from typing import Any

import ml_dtypes
import numpy as np

from qwen35_jax.errors import UserInputError
from qwen35_jax.hf_config import read_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# The format's own limit; a first word beyond it means that the file is something else.
_MAX_HEADER_BYTES = 100_000_000

# Every dtype of the format, for checking sizes; those with a numpy dtype here can be read.
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64},
    **{"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
READABLE_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies.

    Attributes:
        name: its name.
        file: path of the shard.
        dtype: the format's name of its dtype, such as "BF16".
        shape: its shape.
        offset: first byte in the file.
        num_bytes: its size.
    """

    name: str
    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """A checked safetensors file.

    Attributes:
        path: where it is.
        num_bytes: its size on disk.
        header_sha256: digest of its header: names, dtypes, shapes and offsets of its tensors.
        tensors: what it holds, by name.
    """

    path: pathlib.Path
    num_bytes: int
    header_sha256: str
    tensors: dict[str, TensorEntry]


def open_shards(model_dir: pathlib.Path) -> tuple[dict[str, TensorEntry], list[ShardFile]]:
    """Finds and checks the safetensors files of a directory.

    With an index, exactly the files and tensors that it names count: other files of the directory are stale. Headers
    are read, tensors are not.

    Args:
        model_dir: a Hugging Face directory.

    Returns:
        All tensors by name, and the files that hold them.

    Raises:
        UserInputError: no weights, a file that the index names and the disk lacks, a file that is cut short or is not
            safetensors, a tensor that the index places in a file without it; names the file and the tensor.
    """
    index_path, single_path = model_dir / INDEX_FILE, model_dir / SINGLE_FILE
    if not index_path.is_file():
        if not single_path.is_file():
            raise UserInputError(_nothing_found(model_dir))
        shard = read_shard(single_path)
        return dict(shard.tensors), [shard]

    weight_map = _read_index(index_path)
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (model_dir / file).is_file()]
    if absent:
        raise UserInputError(
            f"{index_path} names {absent[0]}, which is not in the directory "
            f"({len(absent)} of {len(files)} files missing)"
        )
    shards = {file: read_shard(model_dir / file) for file in files}
    tensors = {}
    for name, file in weight_map.items():
        entry = shards[file].tensors.get(name)
        if entry is None:
            raise UserInputError(f"{index_path} places tensor {name!r} in {file}, which does not hold it")
        tensors[name] = entry
    return tensors, list(shards.values())


def _nothing_found(model_dir: pathlib.Path) -> str:
    message = f"{str(model_dir)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    others = sorted(p.name for p in model_dir.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf"))
    return f"{message} (found {others[0]}, which cannot be loaded without an index)" if others else message


def _read_index(path: pathlib.Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserInputError(f"{path}: weight_map is missing or empty")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != pathlib.PurePath(file).name:
            raise UserInputError(f"{path}: weight_map[{name!r}] must be a file name, got {file!r}")
    return weight_map


def read_shard(path: pathlib.Path) -> ShardFile:
    """Reads the header of one file and checks that the file is as long as the header says.

    Raises:
        UserInputError: unreadable, not safetensors, cut short or too long, or inconsistent; names the file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if start.startswith(b"version "):
                raise UserInputError(f"{path} is a Git LFS pointer, not the file itself: fetch it with git lfs pull")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= _MAX_HEADER_BYTES:
                raise UserInputError(f"{path} is not a safetensors file (or is cut short: {size} bytes)")
            if size < 8 + length:
                raise UserInputError(f"{path} is truncated: the header needs {8 + length} bytes, the file has {size}")
            header = file.read(length)
    except OSError as error:
        raise UserInputError(f"cannot read {path}: {error.strerror or error}") from error

    tensors, end = {}, 0
    for entry in sorted(_parse_header(path, header), key=lambda e: (e.offset, e.num_bytes)):
        if entry.offset != end:
            raise UserInputError(f"{path}: the data of tensor {entry.name!r} overlaps or leaves a gap")
        end += entry.num_bytes
        tensors[entry.name] = dataclasses.replace(entry, offset=8 + length + entry.offset)
    if size < 8 + length + end:
        raise UserInputError(f"{path} is truncated: the header promises {8 + length + end} bytes, the file has {size}")
    if size > 8 + length + end:
        raise UserInputError(f"{path} has {size} bytes, {size - 8 - length - end} more than its header accounts for")
    return ShardFile(path, size, hashlib.sha256(header).hexdigest(), tensors)


def _parse_header(path: pathlib.Path, header: bytes) -> list[TensorEntry]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise UserInputError(f"{path}: {next(n for n in names if names.count(n) > 1)!r} is in the header twice")
        return found

    try:
        values = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except UserInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserInputError(f"{path} is not a safetensors file: its header is not JSON") from error
    if not isinstance(values, dict):
        raise UserInputError(f"{path} is not a safetensors file: its header is not an object")
    values.pop("__metadata__", None)
    entries = []
    for name, value in values.items():
        try:
            entries.append(_parse_entry(path, name, value))
        except (KeyError, TypeError, ValueError) as error:
            raise UserInputError(f"{path}: the header entry of tensor {name!r} is inconsistent: {value!r}") from error
    return entries


def _parse_entry(path: pathlib.Path, name: str, value: Any) -> TensorEntry:
    """Raises KeyError, TypeError or ValueError for an entry that is not what the format says."""
    dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if not all(type(number) is int for number in (*shape, begin, end)):
        raise ValueError("sizes are not integers")
    size_fits = (end - begin) * 8 == math.prod(shape) * _BITS[dtype]
    if not (size_fits and 0 <= begin <= end and all(dim >= 0 for dim in shape)):
        raise ValueError("sizes do not fit")
    return TensorEntry(name, path, dtype, shape, begin, end - begin)


class TensorReader:
    """Reads tensors from open files; safe to use from several threads. A context manager that closes the files."""

    def __init__(self):
        self._files: dict[pathlib.Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()

    def read(self, entry: TensorEntry) -> np.ndarray:
        """The tensor in fresh host memory, in the dtype of the file.

        Raises:
            UserInputError: the file cannot be read or ends early, or the dtype cannot be read; names them.
        """
        dtype = READABLE_DTYPES.get(entry.dtype)
        if dtype is None:
            raise UserInputError(f"{entry.file}: tensor {entry.name!r} has dtype {entry.dtype}, which cannot be read")
        out = np.empty(entry.num_bytes, np.uint8)
        self.read_bytes(entry, 0, out)
        return out.view(dtype).reshape(entry.shape)

    def read_bytes(self, entry: TensorEntry, start: int, out: np.ndarray) -> None:
        """Fills ``out`` (uint8) with the tensor's bytes from ``start`` on.

        Raises:
            UserInputError: the file cannot be read or ends early.
        """
        view, position = memoryview(out), entry.offset + start
        try:
            descriptor = self._descriptor(entry.file)
            while view:
                count = os.preadv(descriptor, [view], position)
                if count == 0:
                    raise UserInputError(f"{entry.file} ends inside tensor {entry.name!r}: it shrank while being read")
                view, position = view[count:], position + count
        except OSError as error:
            raise UserInputError(f"cannot read tensor {entry.name!r} of {entry.file}: {error.strerror}") from error

    def _descriptor(self, path: pathlib.Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            return self._files[path]
