"""What ``pallas_kernels.tune`` may try."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.linear import mosaic_sm90
from pallas_kernels.mosaic_waves import SHARED_BYTES
from pallas_kernels.tuned import Tunable


def _default(arguments) -> mosaic_sm90.Tiling:
    return mosaic_sm90.default_tiling(arguments["x"].shape[0], arguments["weight"].shape[1])


def _fits(tiling: mosaic_sm90.Tiling, arguments) -> bool:
    """Whether there is such a kernel and stages and results fit into shared memory."""
    itemsize = jnp.dtype(arguments["x"].dtype).itemsize
    return tiling.whole and tiling.shared_bytes(itemsize) <= SHARED_BYTES


TUNABLES = (
    Tunable(
        "linear",
        "mosaic_sm90",
        default=_default,
        key=mosaic_sm90.tuning_key,
        steps=(
            {"columns": (64, 96, 128, 160, 192, 256), "strip": (32, 64), "stages": (3, 4, 5, 6), "tail": (1, 2)},
            {"cluster": (1, 2), "start": (1, 2)},
            {"group": (4, 8, 16)},
            {"blocks": (132,)},
        ),
        possible=_fits,
    ),
)
