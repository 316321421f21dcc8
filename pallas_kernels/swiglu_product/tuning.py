"""What ``pallas_kernels.tune`` may try."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.swiglu_product import mosaic_sm90
from pallas_kernels.tuned import Tunable


def _fits(tiling: mosaic_sm90.Tiling, arguments) -> bool:
    """Whether there is such a kernel, stages and results fit into shared memory, what a thread holds into registers.

    Where no tile would be cut, ``tail=1`` is the same program as ``tail=2``, and not tried beside it.
    """
    (tokens, _), hidden = arguments["x"].shape, arguments["weight"].shape[1] // 2
    itemsize = jnp.dtype(arguments["x"].dtype).itemsize
    spills = tiling.start > 1 and (tiling.products == 2 or tiling.wide == 2)
    fits = tiling.whole and tiling.shared_bytes(itemsize) <= mosaic_sm90.SHARED_BYTES
    other = dataclasses.replace(tiling, tail=2)
    again = tiling.tail == 1 and other.whole and not mosaic_sm90.waves_of(other, tokens, hidden).cut
    return fits and not spills and not again


TUNABLES = (
    Tunable(
        "swiglu_product",
        "mosaic_sm90",
        default=lambda arguments: mosaic_sm90.Tiling(),
        key=mosaic_sm90.tuning_key,
        steps=(
            # fields that exclude one another are tried together
            {
                "wide": (1, 2),
                "products": (1, 2),
                "start": (1, 2, 3),
                "cluster": (1, 2),
                "pairs": (1, 2),
                "tail": (1, 2),
            },
            {"group": (4, 8, 16, 32)},
            {"stages": (3, 4)},
            {"blocks": (132,)},
        ),
        possible=_fits,
    ),
)
