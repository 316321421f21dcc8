"""``gated_rms_norm`` on Hopper, Pallas Mosaic GPU: a block takes some tokens of one head, all of it in registers.

A head of a token lies in eight lanes, so its sum is three shuffles and every access is 16 bytes a lane. The gates are
read where they lie, in the layer's projection.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuned
from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.mosaic_layouts import ROW_LANES, ROWS, in_every_column, in_every_row, rows_of
from pallas_kernels.numerics import silu_by_root

ACCESS_BYTES = 16  # of a lane


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        rows: tokens of a block, a multiple of 16.
    """

    rows: int = 16

    def __post_init__(self):
        if self.rows < ROWS or self.rows % ROWS:
            raise ValueError(f"no tiling of this kernel: {self}")


def tuning_key(arguments) -> tuned.Key:
    """Shapes that tuned tilings are found by."""
    x = arguments["x"]
    return {"dtype": jnp.dtype(x.dtype).name, "head_dim": x.shape[2]}, {"tokens": x.shape[0], "heads": x.shape[1]}


def supports(target, arguments) -> None:
    """Hopper or newer, 16 tokens at least, rows that can be read 16 bytes at a time."""
    require_nvidia(target, at_least=(9, 0))
    x, projected = arguments["x"], arguments["projected"]
    numbers = ACCESS_BYTES // jnp.dtype(x.dtype).itemsize
    require(x.shape[0] >= ROWS, f"takes at least {ROWS} tokens, not {x.shape[0]}")
    unit = ROW_LANES * numbers
    require(x.shape[2] % unit == 0 and x.shape[2] <= 256, f"takes heads of up to 256 in {unit}s, not {x.shape[2]}")
    most = ROWS * (2**16 - 1)  # blocks of the second axis of a grid, the last of them with a part of its tokens
    require(x.shape[0] <= most, f"takes at most {most} tokens, not {x.shape[0]}")
    for name, number in (("columns", projected.shape[1]), ("first column of the gates", arguments["first"])):
        require(number % numbers == 0, f"takes {name} in multiples of {ACCESS_BYTES} bytes, not {number} numbers")


def gated_rms_norm(x, projected, weight, *, first, eps, tiling: Tiling | None = None, interpret=False) -> jax.Array:
    """See :func:`pallas_kernels.gated_rms_norm`."""
    if tiling is None:
        tiling = tuned.settings(Tiling(), "gated_rms_norm", "mosaic_sm90", tuning_key({"x": x}))
    num_tokens, num_heads, head_dim = x.shape
    rows = min(tiling.rows, num_tokens // ROWS * ROWS)
    layout = rows_of(ACCESS_BYTES // jnp.dtype(x.dtype).itemsize)

    def body(x_ref, projected_ref, weight_ref, y_ref):
        head = lax.axis_index("head")
        # The last tile may begin before the one before it ends: both blocks write the same.
        token = jnp.minimum(lax.axis_index("tile") * rows, num_tokens - rows)
        parts = [pl.ds(token + part * ROWS, ROWS) for part in range(rows // ROWS)]

        def load(ref):
            return plgpu.load(ref, layout=layout, optimized=False)

        heads = [load(x_ref.at[part, head]) for part in parts]
        gates = [load(projected_ref.at[part, pl.ds(first + head * head_dim, head_dim)]) for part in parts]
        scale = plgpu.load(weight_ref, layout=layout.reduce(0), optimized=False)
        scale = in_every_row(scale, ROWS, layout)
        for part, one, gate in zip(parts, heads, gates, strict=True):
            wide = one.astype(jnp.float32)
            factor = lax.rsqrt(jnp.sum(wide * wide, axis=1) * (1 / head_dim) + eps)
            normed = wide * in_every_column(factor, head_dim, layout) * scale
            y_ref[part, head] = (normed * silu_by_root(gate.astype(jnp.float32))).astype(y_ref.dtype)

    kernel = pl.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        # Heads side by side run together: the last axis of the grid is the one that counts first.
        mesh=plgpu.Mesh(grid=(pl.cdiv(num_tokens, rows), num_heads), grid_names=("tile", "head")),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
        ),
        interpret=interpret,
        name="gated_norm",  # as profiles call this part of a step
    )
    [y] = kernel(x, projected, weight)
    return y
