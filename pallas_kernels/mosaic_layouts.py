"""Layouts of rows in the registers of a warpgroup, for Mosaic GPU kernels."""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 16
"""Rows of a base tile: four a warp."""
ROW_LANES = 8
"""Lanes that share a row: its sum is three shuffles, and their 16-byte accesses lie in 128 adjacent bytes."""
THREADS = 128
"""Of a warpgroup."""


def adjacent(width: int):
    """A layout of one row: its share of adjacent numbers a thread, which travel together.

    WG_STRIDED says the same, but its loads and stores promise no alignment and are cut into single numbers wherever the
    compiler cannot prove one.
    """
    vector = width // THREADS
    tiles = ((width,), (32 * vector,), (vector,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def rows_of(vector: int):
    """A layout of ``[16 n, 8 m vector]`` arrays: a row lies in eight lanes, in pieces of ``vector`` numbers.

    Two such layouts with different vectors give the same rows to the same lanes, so that what they are reduced to over
    columns (``layout.reduce(1)``) can be added; ``layout.reduce(0)`` is that of a vector over columns.
    """
    tiles = ((ROWS, ROW_LANES * vector), (4, ROW_LANES * vector), (vector,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def in_every_row(vector: jax.Array, rows: int, layout) -> jax.Array:
    """A vector over columns (``layout.reduce(0)``) as an array of rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (rows, *vector.shape), [1]), layout)


def in_every_column(vector: jax.Array, columns: int, layout) -> jax.Array:
    """A vector over rows (``layout.reduce(1)``) as an array of columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (*vector.shape, columns), [0]), layout)
