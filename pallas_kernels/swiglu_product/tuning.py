"""What ``pallas_kernels.tune`` may try."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.swiglu_product import mosaic_sm90
from pallas_kernels.tuned import Tunable


def _fits(tiling: mosaic_sm90.Tiling, arguments) -> bool:
    """Whether stages and results fit into shared memory, and the accumulators into registers."""
    itemsize = jnp.dtype(arguments["x"].dtype).itemsize
    one_product = tiling.products == 1 or tiling.start == 1  # two products with a late start spill registers
    return tiling.shared_bytes(itemsize) <= mosaic_sm90.SHARED_BYTES and one_product


TUNABLES = (
    Tunable(
        "swiglu_product",
        "mosaic_sm90",
        default=lambda arguments: mosaic_sm90.Tiling(),
        key=mosaic_sm90.tuning_key,
        steps=(
            {"products": (1, 2), "start": (1, 2, 3), "cluster": (1, 2)},
            {"group": (4, 8, 16, 32)},
            {"wide": (1, 2), "stages": (3, 4)},
            {"blocks": (132,)},
        ),
        possible=_fits,
    ),
)
