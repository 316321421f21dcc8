"""What ``pallas_kernels.tune`` may try."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.gpu_support import HOPPER_SHARED_BYTES
from pallas_kernels.kv_write import mosaic_sm90
from pallas_kernels.tuned import Tunable


def _fits(tiling: mosaic_sm90.Tiling, arguments) -> bool:
    """Whether the stages fit into shared memory."""
    heads = arguments["heads"]
    stage = tiling.rows * heads.shape[2] * jnp.dtype(heads.dtype).itemsize
    return tiling.stages * stage <= HOPPER_SHARED_BYTES


TUNABLES = (
    Tunable(
        "kv_write",
        "mosaic_sm90",
        default=lambda arguments: mosaic_sm90.Tiling(),
        key=mosaic_sm90.tuning_key,
        steps=({"rows": (16, 32), "blocks": (132, 264, 396)}, {"stages": (3, 4, 5, 6, 8, 12)}),
        possible=_fits,
    ),
)
