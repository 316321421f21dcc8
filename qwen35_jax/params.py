"""Parameters as a flat tuple of few arrays, and back to a Flax module inside a trace.

Every array argument of a compiled program costs the host time at each dispatch, and a Flax NNX state as an argument
costs several times a tuple. So a program takes the model as a flat tuple in which the small parameters that every
layer has (norms, convolution taps, decay rates) are stacked across layers; the module is put together again only
while the program is traced, out of static slices.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Sharding

from qwen35_jax.config import ModelConfig
from qwen35_jax.layers.parameters import HeadParam, LayerParam, SmallParam
from qwen35_jax.model import Qwen35

_ALIGNED_FLOATS = 64  # 256 bytes

type FlatParams = tuple[jax.Array, ...]
type ArrayLike = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the packed tuple.

    Attributes:
        name: the parameter's path, or the shared path with ``*`` for the layer number.
        paths: parameters inside: one, or one a layer in layer order.
        stacked: whether the array has a leading axis over ``paths``.
        spec: shape and dtype of the array.
    """

    name: str
    paths: tuple[str, ...]
    stacked: bool
    spec: jax.ShapeDtypeStruct


class ParamPack:
    """The packed layout of a model's parameters.

    Made from an abstract model: nothing is allocated. A parameter is named by its path in the module, for example
    ``embed``, ``layers.0.mixer.in_proj`` or ``layers.3.post_norm``.

    Attributes:
        config: the model's numbers.
        dtype: dtype of matrices and activations.
        kernels: kernel implementation that unpacked models use.
        specs: shape and dtype of every parameter by path, in the order of :meth:`assemble`.
        leaves: the arrays of the packed tuple, in order.
    """

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike | None = None, kernels: str = "auto"):
        """Lays out the parameters of ``Qwen35(config)``.

        Args:
            config: the model's numbers.
            dtype: dtype of matrices and activations; None takes ``config.dtype``.
            kernels: kernel implementation that unpacked models use.
        """
        model = nnx.eval_shape(lambda: Qwen35(config, kernels=kernels, param_dtype=dtype))
        self.config = config
        self.dtype = model.dtype
        self.kernels = kernels
        self._graphdef, state = nnx.split(model)
        self._variables = _flat_variables(state)  # abstract: they hold shapes, and the kinds of parameters
        specs = {path: variable.get_value() for path, variable in self._variables.items()}

        small = {path for path, variable in self._variables.items() if isinstance(variable, SmallParam)}
        groups: dict[str, list[str]] = {}
        for path in sorted(specs, key=_layer_order):
            groups.setdefault(_shared_name(path) if path in small else path, []).append(path)
        self.leaves = tuple(_make_leaf(name, paths, specs) for name, paths in groups.items())
        self.specs = {path: specs[path] for leaf in self.leaves for path in leaf.paths}

    @property
    def leaf_specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the packed tuple."""
        return tuple(leaf.spec for leaf in self.leaves)

    @property
    def num_parameters(self) -> int:
        """Number of scalars in the model."""
        return sum(math.prod(spec.shape) for spec in self.specs.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed tuple."""
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in self.leaf_specs)

    def pack(self, model: Qwen35 | nnx.State) -> FlatParams:
        """Flattens a model with real (or traced) parameters.

        Args:
            model: a model of this layout, or its state.

        Raises:
            ValueError: a parameter is missing, unexpected, or has another shape or dtype.
        """
        state = nnx.state(model) if isinstance(model, nnx.Module) else model
        values = {path: variable.get_value() for path, variable in _flat_variables(state).items()}
        if values.keys() != self.specs.keys():
            missing, extra = sorted(self.specs.keys() - values.keys()), sorted(values.keys() - self.specs.keys())
            raise ValueError(f"the model does not match the layout: missing {missing}, unexpected {extra}")
        for path, value in values.items():
            self._check_shape(path, value.shape)
            if value.dtype != self.specs[path].dtype:
                raise ValueError(f"{path}: dtype {value.dtype}, expected {self.specs[path].dtype}")
        return tuple(
            jnp.stack([values[path] for path in leaf.paths]) if leaf.stacked else values[leaf.paths[0]]
            for leaf in self.leaves
        )

    def unpack(self, flat: FlatParams, *, in_place: bool = False) -> Qwen35:
        """Puts the module together again; meant for the inside of a trace, where a slice costs nothing.

        On a GPU that is not true of custom kernels: a slice is copied for them, a launch each, unless the kernel is a
        Mosaic one and the slice begins and ends at a multiple of 256 bytes. ``in_place`` pads the stacked numbers of
        heads to such rows, a launch for all layers, and does not slice what a Triton kernel looks up by itself.

        Args:
            flat: the packed tuple.
            in_place: hand out the numbers of heads (:class:`HeadParam`) with zeros behind them, and of
                :class:`LayerParam` the vectors of all layers.

        Raises:
            ValueError: another number of arrays, or an array of another shape.
        """
        if len(flat) != len(self.leaves):
            raise ValueError(f"packed parameters: {len(flat)} arrays, expected {len(self.leaves)}")
        variables: dict[Any, nnx.Variable] = {}
        for leaf, array in zip(self.leaves, flat, strict=True):
            if array.shape != leaf.spec.shape:
                raise ValueError(f"{leaf.name}: shape {array.shape}, expected {leaf.spec.shape}")
            variable, whole = self._variables[leaf.paths[0]], not leaf.stacked
            if in_place and leaf.stacked and isinstance(variable, HeadParam):
                # Behind a barrier, or XLA would pad every slice by itself.
                array = lax.optimization_barrier(jnp.pad(array, ((0, 0), (0, -array.shape[1] % _ALIGNED_FLOATS))))
            if in_place and isinstance(variable, LayerParam):
                whole = True
            for index, path in enumerate(leaf.paths):
                value = array if whole else lax.index_in_dim(array, index, keepdims=False)
                variables[_keys(path)] = self._variables[path].replace(value)
        return nnx.merge(self._graphdef, nnx.from_flat_state(variables))

    def assemble(
        self,
        get: Callable[[str], ArrayLike],
        *,
        device: jax.Device | Sharding | None = None,
    ) -> FlatParams:
        """Builds the packed tuple from parameters that are read one at a time.

        At most one large parameter (or the small ones of one leaf) is held beside what has been placed already: each
        array is on the device before the next parameter is asked for.

        Args:
            get: returns the parameter of a path; called exactly once for each of ``specs``, in that order. Another
                floating dtype is cast to the parameter's own.
            device: where the arrays go; None takes JAX's default.

        Raises:
            ValueError: ``get`` returned another shape or a dtype that is not floating.
        """
        flat = []
        for leaf in self.leaves:
            values = [self._conform(path, get(path)) for path in leaf.paths]
            if leaf.stacked:
                value = np.stack([np.asarray(item) for item in values])
            else:
                value = values[0]
            flat.append(jax.block_until_ready(jax.device_put(value, device)))
            del values, value
        return tuple(flat)

    def _conform(self, path: str, value: ArrayLike) -> ArrayLike:
        self._check_shape(path, value.shape)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"{path}: dtype {value.dtype} is not a floating type")
        return value.astype(self.specs[path].dtype)

    def _check_shape(self, path: str, shape: tuple[int, ...]) -> None:
        if tuple(shape) != self.specs[path].shape:
            raise ValueError(f"{path}: shape {tuple(shape)}, expected {self.specs[path].shape}")


def _make_leaf(name: str, paths: list[str], specs: dict[str, jax.ShapeDtypeStruct]) -> Leaf:
    stacked = "*" in name
    first = specs[paths[0]]
    spec = jax.ShapeDtypeStruct((len(paths), *first.shape) if stacked else first.shape, first.dtype)
    return Leaf(name=name, paths=tuple(paths), stacked=stacked, spec=spec)


def _flat_variables(state: nnx.State) -> dict[str, nnx.Variable]:
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def _keys(path: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in path.split("."))


def _shared_name(path: str) -> str:
    return re.sub(r"^layers\.\d+\.", "layers.*.", path)


def _layer_order(path: str) -> tuple[int, int, str]:
    """Embedding first, layers by number, then the final norm and the head: the order of use."""
    parts = path.split(".")
    if parts[0] == "layers":
        return (1, int(parts[1]), path)
    return (0, 0, path) if path == "embed" else (2, 0, path)
