"""What ``pallas_kernels.tune`` may try."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.mosaic_waves import SHARED_BYTES
from pallas_kernels.swiglu_product import mosaic_sm90
from pallas_kernels.tuned import Tunable


def _fits(tiling: mosaic_sm90.Tiling, arguments) -> bool:
    """Whether there is such a kernel, stages and results fit into shared memory, what a thread holds into registers."""
    itemsize = jnp.dtype(arguments["x"].dtype).itemsize
    spills = tiling.start > 1 and (tiling.products == 2 or tiling.wide == 2)
    whole = tiling.pairs * tiling.wide <= 2 and (tiling.tail == 1 or tiling.wide == tiling.products == 1)
    return whole and tiling.shared_bytes(itemsize) <= SHARED_BYTES and not spills


TUNABLES = (
    Tunable(
        "swiglu_product",
        "mosaic_sm90",
        default=lambda arguments: mosaic_sm90.Tiling(),
        key=mosaic_sm90.tuning_key,
        steps=(
            {"products": (1, 2), "start": (1, 2, 3), "cluster": (1, 2), "pairs": (1, 2)},
            {"group": (4, 8, 16, 32)},
            {"wide": (1, 2), "stages": (3, 4)},
            {"blocks": (132,), "tail": (1, 2)},
        ),
        possible=_fits,
    ),
)
