"""Sums of products on Hopper's tensor cores, and the same as the interpreter can run it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Sum:
    """A float32 matrix in the registers of a warpgroup, to which products are added while the program goes on."""

    def __init__(self, ref):
        self._ref = ref

    def start(self, value: jax.Array) -> None:
        """Start from a value instead of zeros."""
        self._ref[...] = value

    def add(self, left, right_ref) -> None:
        """Add a product of a matrix in registers or shared memory, [64, K], with one in shared memory, [K, N]."""
        plgpu.wgmma(self._ref, left, right_ref)

    def read(self, running: int) -> jax.Array:
        """The sum, once all products that were started are done but the last ``running``."""
        return plgpu.wgmma_accumulator_load(self._ref, wait_n=running)


class Emulated:
    """The same for the interpreter, which has no sums that start from a value."""

    def __init__(self, shape):
        self._value = jnp.zeros(shape, jnp.float32)

    def start(self, value: jax.Array) -> None:
        """See :meth:`Sum.start`."""
        self._value = value

    def add(self, left, right_ref) -> None:
        """See :meth:`Sum.add`."""
        self._value = self._value + jnp.dot(left[...], right_ref[...], preferred_element_type=jnp.float32)

    def read(self, running: int) -> jax.Array:
        """See :meth:`Sum.read`."""
        del running
        return self._value


def with_sums(body: Callable, shapes: tuple[tuple[int, int], ...], *, emulate: bool):
    """What ``body`` returns, called with a sum of each shape."""
    if emulate:
        return body(*(Emulated(shape) for shape in shapes))
    return pl.run_scoped(lambda *refs: body(*map(Sum, refs)), *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 matrix as a sum of two bfloat16 ones, the larger first: 16 bits of mantissa."""
    # The first barrier keeps the compiler from rounding once more, number by number and much slower, for the
    # difference; the second from splitting only when the products that run meanwhile are done.
    high = lax.optimization_barrier(x.astype(jnp.bfloat16))
    return high, lax.optimization_barrier((x - high.astype(jnp.float32)).astype(jnp.bfloat16))
