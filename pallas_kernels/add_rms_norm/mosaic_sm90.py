"""``add_rms_norm`` on Hopper, Pallas Mosaic GPU: one warpgroup a row, the row in registers from the sum to the norm.

XLA makes two kernels of it, one that adds and one that norms, since both results are wanted. A delta in parts is summed
here, in their order: the product that left them needs no kernel for that.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu_support import require, require_nvidia

THREADS = 128
MAX_WIDTH = 8192  # 64 numbers a thread
THREAD_BYTES = 16  # of one load at most


def supports(target, arguments) -> None:
    """Hopper or newer, rows of a multiple of 128 numbers."""
    require_nvidia(target, at_least=(9, 0))
    rows, width = arguments["x"].shape
    require(width % THREADS == 0 and width <= MAX_WIDTH, f"takes up to {MAX_WIDTH} columns in 128s, not {width}")
    require(0 < rows < 2**31, f"takes 1 to 2^31 - 1 rows, not {rows}")


def add_rms_norm(x, delta, weight, *, eps, interpret=False) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.add_rms_norm`."""
    rows, width = x.shape
    numbers = THREAD_BYTES // jnp.dtype(delta.dtype).itemsize  # float32 if it is in parts
    while (width // THREADS) % numbers:
        numbers //= 2
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=numbers)

    def body(x_ref, delta_ref, weight_ref, total_ref, normed_ref):
        row = lax.axis_index("row")
        places = [(row,)] if delta.ndim == 2 else [(part, row) for part in range(delta.shape[0])]
        before = plgpu.load(x_ref.at[row], layout=layout)
        parts = [plgpu.load(delta_ref.at[place], layout=layout) for place in places]
        scale = 1.0 + plgpu.load(weight_ref, layout=layout)
        added = functools.reduce(jnp.add, parts).astype(x.dtype)
        total = (before.astype(jnp.float32) + added.astype(jnp.float32)).astype(x.dtype)
        total_ref[row] = total
        wide = total.astype(jnp.float32)
        factor = lax.rsqrt(jnp.sum(wide * wide) * (1 / width) + eps)
        normed_ref[row] = (wide * factor * scale).astype(x.dtype)

    kernel = pl.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2,
        mesh=plgpu.Mesh(grid=(rows,), grid_names=("row",)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        name="add_rms_norm",
    )
    total, normed = kernel(x, delta, weight)
    return total, normed
