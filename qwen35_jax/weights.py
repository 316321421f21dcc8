"""Parameters from Hugging Face safetensors, or at random, straight to the device.

Loading is in two steps. :func:`plan_load` reads only headers and settles everything that can be wrong: every parameter
gets every tensor that it is made of exactly once, with the right shape, from files as long as they claim. Only then
does :func:`load_params` read, a parameter at a time; the next one is read from disk while the device fuses the current
one, so host memory holds the tensors of two parameters, however large the model.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qwen35_jax import name_table
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.hf_config import check_model_dir
from qwen35_jax.name_table import Recipe
from qwen35_jax.params import ArrayLike, FlatParams, ParamPack
from qwen35_jax.progress import ProgressFn, silent
from qwen35_jax.safetensors_files import READABLE_DTYPES, ShardFile, TensorEntry, TensorReader, open_shards

_log = logging.getLogger(__name__)

_READ_THREADS = 4  # one thread copies slower out of the page cache than local disks and the device take
_COMPARE_BYTES = 16 << 20


class ByteProgress:
    """Tells a :data:`~qwen35_jax.progress.ProgressFn` of bytes done, in MiB.

    Args:
        progress: whom to tell.
        stage: the stage's name.
        total: bytes in all.
    """

    def __init__(self, progress: ProgressFn, stage: str, total: int):
        self._progress, self._stage, self._total = progress, stage, total
        self._done, self._told = 0, -1

    def add(self, num_bytes: int) -> None:
        """Counts bytes, and reports whenever another MiB is full."""
        self._done += num_bytes
        total = max(1, round(self._total / 2**20))
        done = total if self._done >= self._total else min(int(self._done / 2**20), total - 1)
        if done != self._told:
            self._told = done
            self._progress(self._stage, done, total)


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """A checked checkpoint: what every parameter is read from.

    Attributes:
        model_dir: the directory.
        config: the model's numbers.
        recipes: how every parameter is made, by path.
        entries: where every tensor that is used lies, by the parameter's path, in the order of its recipe.
        shards: the files.
        layout: "full" (prefix ``model.language_model.``) or "text-only" (``model.``).
        skipped: tensors that text generation does not use.
    """

    model_dir: pathlib.Path
    config: ModelConfig
    recipes: dict[str, Recipe]
    entries: dict[str, tuple[TensorEntry, ...]]
    shards: tuple[ShardFile, ...]
    layout: str
    skipped: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that will be read."""
        return sum(entry.num_bytes for entries in self.entries.values() for entry in entries)


def plan_load(model_dir: str | os.PathLike[str], config: ModelConfig) -> LoadPlan:
    """Checks a Hugging Face directory against the model, reading headers only.

    Raises:
        UserInputError: files are absent, cut short or malformed, or tensors are missing, unmatched, of another shape
            or quantised; names the files and tensors.
    """
    path = check_model_dir(model_dir)
    tensors, shards = open_shards(path)
    full = any(name.startswith(name_table.FULL_PREFIX) for name in tensors)
    prefix = name_table.FULL_PREFIX if full else name_table.TEXT_ONLY_PREFIX
    recipes = name_table.parameter_table(config)
    wanted = {source.full_name(prefix): source.shape for recipe in recipes.values() for source in recipe.sources}

    skipped = [name for name in tensors if name.startswith(name_table.SKIPPED_PREFIXES)]
    unmatched = [name for name in tensors if name not in wanted and not name.startswith(name_table.SKIPPED_PREFIXES)]
    if config.tie_word_embeddings and name_table.LM_HEAD in unmatched:
        _check_tied_head(tensors, prefix)
        unmatched.remove(name_table.LM_HEAD)
        skipped.append(name_table.LM_HEAD)

    missing = [name for name in wanted if name not in tensors]
    problems = []
    if missing == [name_table.LM_HEAD]:
        problems.append(f"tensor '{name_table.LM_HEAD}' is missing, and the config says that embeddings are not tied")
    elif missing:
        problems.append(f"missing tensors: {_listed(missing)}")
    if unmatched:
        problems.append(f"tensors that the model does not have: {_listed(unmatched)}{_quantised_hint(unmatched)}")
    present = [tensors[name] for name in wanted if name in tensors]
    shapes = [
        f"{entry.name} {list(entry.shape)} instead of {list(wanted[entry.name])}"
        for entry in present
        if entry.shape != wanted[entry.name]
    ]
    if shapes:
        problems.append(f"tensors of the wrong shape: {_listed(shapes)}")
    dtypes = [f"{entry.name} {entry.dtype}" for entry in present if entry.dtype not in READABLE_DTYPES]
    if dtypes:
        problems.append(
            f"tensors of a dtype that is not supported (quantised checkpoints are not yet): {_listed(dtypes)}"
        )
    if problems:
        raise UserInputError(f"the weights of {str(path)!r} do not fit its config: {'; '.join(problems)}")

    if skipped:
        groups = collections.Counter(_skipped_group(name) for name in skipped)
        counts = ", ".join(f"{count} {group}" for group, count in groups.items())
        _log.info("%s: skipped tensors that text generation does not use: %s", path, counts)
        _log.debug("%s: skipped %s", path, ", ".join(skipped))
    entries = {
        recipe.path: tuple(tensors[source.full_name(prefix)] for source in recipe.sources)
        for recipe in recipes.values()
    }
    return LoadPlan(path, config, recipes, entries, tuple(shards), "full" if full else "text-only", tuple(skipped))


def _skipped_group(name: str) -> str:
    return next((f"{prefix}*" for prefix in name_table.SKIPPED_PREFIXES if name.startswith(prefix)), name)


def _listed(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


def _quantised_hint(names: Iterable[str]) -> str:
    marks = ("weight_scale_inv", "weight_scale", "input_scale", "qweight", "qzeros", "scales", "g_idx", "weight_packed")
    found = any(name.endswith(marks) for name in names)
    return "; this looks like a quantised checkpoint, which is not supported yet" if found else ""


def _check_tied_head(tensors: dict[str, TensorEntry], prefix: str) -> None:
    """A tied model may store its head again; one that differs from the embedding means that the flag is wrong.

    Raises:
        UserInputError: the stored head is not the embedding.
    """
    head, embed = tensors[name_table.LM_HEAD], tensors.get(f"{prefix}embed_tokens.weight")
    if embed is None:
        return  # reported as missing
    same = head.shape == embed.shape and head.dtype == embed.dtype
    with TensorReader() as reader:
        for start in range(0, head.num_bytes if same else 0, _COMPARE_BYTES):
            size = min(_COMPARE_BYTES, head.num_bytes - start)
            ours, theirs = np.empty(size, np.uint8), np.empty(size, np.uint8)
            reader.read_bytes(head, start, ours)
            reader.read_bytes(embed, start, theirs)
            if not np.array_equal(ours, theirs):
                same = False
                break
    if not same:
        raise UserInputError(
            f"{head.file}: tensor '{name_table.LM_HEAD}' differs from '{embed.name}', but the config says "
            "tie_word_embeddings = true"
        )


def load_params(
    model_dir: str | os.PathLike[str] | LoadPlan,
    config: ModelConfig,
    dtype: jax.typing.DTypeLike | None = None,
    device: jax.Device | None = None,
    progress: ProgressFn = silent,
) -> FlatParams:
    """Reads a Hugging Face checkpoint into the packed tuple of :class:`~qwen35_jax.params.ParamPack`.

    Args:
        model_dir: the directory, or the plan made from it.
        config: the model's numbers.
        dtype: dtype of matrices; None takes ``config.dtype``. The dtypes of the files may be mixed and different.
            Norms, ``A_log`` and ``dt_bias`` are fp32 whatever the files say.
        device: where the parameters go; None takes JAX's default.
        progress: told of the MiB read.

    Raises:
        UserInputError: as :func:`plan_load`, before anything is allocated; or a file that changed since.
    """
    plan = model_dir if isinstance(model_dir, LoadPlan) else plan_load(model_dir, config)
    pack = ParamPack(config, dtype=dtype)
    with read_parameters(plan, pack, list(pack.specs), device=device, progress=progress) as parameters:
        return pack.assemble(functools.partial(_next_of, parameters), device=device)


def _next_of(parameters: Iterator[tuple[str, ArrayLike]], path: str) -> ArrayLike:
    read, value = next(parameters)
    if read != path:
        raise RuntimeError(f"parameters are read in another order than they are asked for: {read} for {path}")
    return value


@contextlib.contextmanager
def read_parameters(
    plan: LoadPlan,
    pack: ParamPack,
    paths: Sequence[str],
    *,
    device: jax.Device | None = None,
    progress: ProgressFn = silent,
    stage: str = "loading weights (MiB)",
) -> Iterator[Iterator[tuple[str, ArrayLike]]]:
    """Opens the files; the block gets an iterator of (path, parameter) in the order of ``paths``.

    Matrices are fused on the device into arrays of the model's dtype; small parameters are host arrays.

    Args:
        plan: the checked checkpoint.
        pack: the layout, for dtypes.
        paths: the parameters, in order.
        device: where matrices go; None takes JAX's default.
        progress: told of the MiB read so far, out of those of all ``paths``, after every parameter.
        stage: what the progress is called.
    """

    def place(reader: TensorReader, pool: ThreadPoolExecutor) -> Iterator[tuple[str, ArrayLike]]:
        sizes = {path: sum(entry.num_bytes for entry in plan.entries[path]) for path in paths}
        report = ByteProgress(progress, stage, sum(sizes.values()))
        for path, tensors in _read_ahead(plan, paths, reader, pool):
            value = _join(plan, path, tensors, pack.specs[path].dtype, device)
            del tensors  # not to be held while the next ones are read
            report.add(sizes[path])
            yield path, value
            del value

    with TensorReader() as reader, ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="read-weights") as pool:
        try:
            yield place(reader, pool)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _read_ahead(
    plan: LoadPlan, paths: Sequence[str], reader: TensorReader, pool: ThreadPoolExecutor
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Tensors of each parameter, while those of the next one are being read."""
    pending: collections.deque[tuple[str, list[Future[np.ndarray]]]] = collections.deque()
    for path in paths:
        pending.append((path, [pool.submit(reader.read, entry) for entry in plan.entries[path]]))
        if len(pending) == 2:
            yield _results(*pending.popleft())
    while pending:
        yield _results(*pending.popleft())


def _results(path: str, futures: list[Future[np.ndarray]]) -> tuple[str, list[np.ndarray]]:
    return path, [future.result() for future in futures]


def _join(
    plan: LoadPlan, path: str, tensors: list[np.ndarray], dtype: np.dtype, device: jax.Device | None
) -> ArrayLike:
    """Makes a parameter of its tensors, as its recipe says."""
    # float64 does not exist on the device unless JAX is told so
    tensors = [x.astype(np.float32) if x.dtype == np.float64 else x for x in tensors]
    assembly = plan.recipes[path].assembly
    if assembly == "vector":
        return tensors[0].astype(dtype)
    if assembly == "taps":
        return np.ascontiguousarray(tensors[0][:, 0, :].T).astype(dtype)
    on_device = tuple(jax.device_put(x, device) for x in tensors)
    if assembly == "rows":
        return on_device[0].astype(dtype)
    heads = plan.config.attention.num_heads if assembly == "gated_attention" else None
    return _join_columns(on_device, dtype=dtype, gated_heads=heads)


@functools.partial(jax.jit, static_argnames=("dtype", "gated_heads"))
def _join_columns(tensors: tuple[jax.Array, ...], *, dtype: np.dtype, gated_heads: int | None) -> jax.Array:
    """Matrices ``[out_i, in]`` to one ``[in, sum out_i]``; with ``gated_heads`` the first alternates q and gate."""
    if gated_heads is not None:
        first, *others = tensors
        by_head = first.reshape(gated_heads, 2, -1, first.shape[-1])  # [N, 2, H, D]
        halves = [by_head[:, half].reshape(-1, first.shape[-1]) for half in range(2)]  # [N*H, D] each
        tensors = (*halves, *others)
    return jnp.concatenate([x.T.astype(dtype) for x in tensors], axis=1)


def random_params(
    config: ModelConfig,
    dtype: jax.typing.DTypeLike | None = None,
    seed: int = 0,
    device: jax.Device | None = None,
) -> FlatParams:
    """Random parameters whose activations stay near one; matrices are made on the device.

    A parameter depends on the seed and its own path and shape alone.

    Args:
        config: the model's numbers.
        dtype: dtype of matrices; None takes ``config.dtype``.
        seed: seed of the weights.
        device: where the parameters go; None takes JAX's default.

    Returns:
        The packed tuple of :class:`~qwen35_jax.params.ParamPack`.
    """
    pack, recipes = ParamPack(config, dtype=dtype), name_table.parameter_table(config)

    def draw(path: str) -> ArrayLike:
        spec, recipe = pack.specs[path], recipes[path]
        if recipe.init not in ("matrix", "embedding"):
            return draw_small(recipe, spec.shape, seed)
        scale = matrix_scale(recipe.init, recipe.sources[0].shape[1])
        words = jax.device_put(_seed_of(seed, path).generate_state(2), device)
        return _random_matrix(words, np.float32(scale), shape=spec.shape, dtype=spec.dtype)

    return pack.assemble(draw, device=device)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _random_matrix(words: jax.Array, scale: jax.Array, *, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Uniform numbers of the given standard deviation: a 32-bit hash of each element's index under two key words.

    Much faster than ``jax.random.uniform`` on a CPU, and weights need
    no better generator. Drawn in fp32: the few values of a bf16 draw are not centred on zero.
    """
    x = lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(0x9E3779B9) + words[0]
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15) ^ words[1]) * jnp.uint32(0x846CA68B)
    x = x ^ (x >> 16)
    unit = lax.bitcast_convert_type(x, jnp.int32).astype(jnp.float32) * np.float32(2.0**-31)  # [-1, 1)
    return (unit * (scale * math.sqrt(3.0))).astype(dtype).reshape(shape)


def _seed_of(seed: int, path: str) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed % (1 << 64), zlib.crc32(path.encode())])


def matrix_scale(init: str, fan_in: int) -> float:
    """Standard deviation of a random matrix: products keep the scale of what they are given.

    Embeddings and heads are twice as large, so that logits spread over a few units as those of a trained model do.
    """
    return (2.0 if init == "embedding" else 1.0) / math.sqrt(fan_in)


def draw_small(recipe: Recipe, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A random small parameter (norm, taps, decay), float32 of the given shape."""
    rng = np.random.default_rng(_seed_of(seed, recipe.path))
    match recipe.init:
        case "near_zero":
            value = 0.1 * rng.standard_normal(shape)
        case "near_one":
            value = 1.0 + 0.1 * rng.standard_normal(shape)
        case "taps":
            value = 0.5 * rng.standard_normal(shape)
        case "decay":
            value = np.log(rng.uniform(1.0, 16.0, shape))
        case "step_bias":  # softplus(bias) is a time step, spread evenly in its logarithm over two decades
            step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))
            value = step + np.log(-np.expm1(-step))
        case _:
            raise ValueError(f"{recipe.path}: {recipe.init} is not the init of a small parameter")
    return value.astype(np.float32)
