"""What ``pallas_kernels.tune`` may try."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.causal_conv import mosaic_stream
from pallas_kernels.gpu_support import HOPPER_SHARED_BYTES
from pallas_kernels.tuned import Tunable


def _fits(tiling: mosaic_stream.Tiling, arguments) -> bool:
    """Whether the stages fit into shared memory."""
    stage = tiling.rows * mosaic_stream.MAX_STRIP * jnp.dtype(arguments["x"].dtype).itemsize
    return tiling.stages * stage <= HOPPER_SHARED_BYTES


TUNABLES = (
    Tunable(
        "causal_conv",
        "mosaic_stream",
        default=lambda arguments: mosaic_stream.Tiling(),
        key=mosaic_stream.tuning_key,
        steps=({"rows": (16, 32, 64), "blocks": (264, 396, 528)}, {"stages": (2, 3, 4, 6, 8)}, {"unroll": (4, 8, 16)}),
        possible=_fits,
    ),
)
