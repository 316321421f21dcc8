"""Argument checks of the public ops: shapes, dtypes and options, with messages that name the argument."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

ACTIVATION_DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = ("float32", "bfloat16")


class ArgumentChecker:
    """Checks the arguments of one call; dimension letters keep the size they were first seen with.

    Args:
        op: name of the op, the start of every message.
    """

    def __init__(self, op: str):
        self._op = op
        self._sizes: dict[str, tuple[int, str]] = {}

    def __getitem__(self, letter: str) -> int:
        return self._sizes[letter][0]

    def shape(self, name: str, array, dims: tuple[str | int, ...]) -> ArgumentChecker:
        """Check the rank and sizes of an array; unknown letters are bound to what is found.

        Args:
            name: the argument's name.
            array: anything with a ``shape``.
            dims: a letter or a fixed size for each axis.

        Raises:
            ValueError: rank or a size differs.
        """
        shape = np.shape(array)
        pattern = "[" + ", ".join(str(dim) for dim in dims) + "]"
        if len(shape) != len(dims):
            raise ValueError(f"{self._op}: {name} must be {pattern}, got shape {shape}")
        for axis, (size, dim) in enumerate(zip(shape, dims, strict=True)):
            if isinstance(dim, int):
                expected, source = dim, ""
            elif dim in self._sizes:
                expected, origin = self._sizes[dim]
                source = f" ({dim} = {expected} comes from {origin})"
            else:
                self._sizes[dim] = (size, f"{name}, shape {shape}")
                continue
            if size != expected:
                raise ValueError(
                    f"{self._op}: {name} must be {pattern}, got shape {shape}: axis {axis} is {size}, "
                    f"expected {expected}{source}"
                )
        return self

    def at_least(self, name: str, array, letter: str) -> ArgumentChecker:
        """Check that an array is a vector of at least a dimension's size.

        Raises:
            ValueError: another rank, or a shorter one.
        """
        shape, (size, origin) = np.shape(array), self._sizes[letter]
        if len(shape) != 1 or shape[0] < size:
            raise ValueError(
                f"{self._op}: {name} must be [{letter} or more], got shape {shape} ({letter} = {size} comes from {origin})"
            )
        return self

    def bind(self, letter: str, size: int, origin: str) -> ArgumentChecker:
        """Give a letter its size from an option."""
        self._sizes[letter] = (size, origin)
        return self

    def dtype(self, name: str, array, allowed: tuple[str, ...]) -> ArgumentChecker:
        """Check a dtype against a list of names.

        Raises:
            TypeError: another dtype.
        """
        found = jnp.dtype(array.dtype).name
        if found not in allowed:
            raise TypeError(f"{self._op}: {name} must have dtype {' or '.join(allowed)}, got {found}")
        return self

    def same_dtype(self, **arrays) -> ArgumentChecker:
        """Check that all arrays share one dtype.

        Raises:
            TypeError: they do not.
        """
        found = {name: jnp.dtype(array.dtype).name for name, array in arrays.items()}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
            raise TypeError(f"{self._op}: these arguments must share one dtype: {listed}")
        return self

    def require(self, condition: bool, message: str) -> ArgumentChecker:
        """Raise ``ValueError(message)`` unless the condition holds."""
        if not condition:
            raise ValueError(f"{self._op}: {message}")
        return self


def layer_index(op: str, layer):
    """The layer argument as a strongly typed int32 scalar, so that an int and an array share one compilation.

    Raises:
        ValueError: not a scalar.
        TypeError: not an integer.
    """
    if np.ndim(layer) != 0:
        raise ValueError(f"{op}: layer must be a scalar, got shape {np.shape(layer)}")
    dtype = getattr(layer, "dtype", None)
    if isinstance(layer, bool) or (dtype is None and not isinstance(layer, int)):
        raise TypeError(f"{op}: layer must be an integer, got {type(layer).__name__}")
    if dtype is not None and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{op}: layer must be an integer, got dtype {dtype}")
    return jnp.asarray(layer, jnp.int32)
