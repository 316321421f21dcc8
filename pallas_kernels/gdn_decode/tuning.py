"""What ``pallas_kernels.tune`` may try."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.gdn_decode import mosaic_sm90, triton
from pallas_kernels.gpu_support import HOPPER_SHARED_BYTES
from pallas_kernels.tuned import Tunable


def _fits(tiling: mosaic_sm90.Tiling, arguments) -> bool:
    """Whether the stages fit into shared memory, and each has a tile (more stages than tiles change nothing)."""
    pool = arguments["state_pool"]
    group = pool.shape[2] // arguments["num_k_heads"]
    if tiling.split and group == 1:  # the same kernel
        return False
    tiles = (1 if tiling.split else group) * (mosaic_sm90.DIM // tiling.values)
    stage = tiling.values * mosaic_sm90.DIM * jnp.dtype(pool.dtype).itemsize
    return tiling.stages <= max(tiles, 2) and tiling.stages * stage <= HOPPER_SHARED_BYTES


TUNABLES = (
    Tunable(
        "gdn_decode",
        "mosaic_sm90",
        default=lambda arguments: mosaic_sm90.Tiling(),
        key=mosaic_sm90.tuning_key,
        steps=({"values": (64, 128), "stages": (2, 3, 4), "split": (False, True), "plain": (False, True)},),
        possible=_fits,
    ),
    Tunable(
        "gdn_decode",
        "triton",
        default=lambda arguments: triton.default_tiling(arguments["state_pool"].shape[3]),
        key=triton.tuning_key,
        steps=({"values": (32, 64, 128), "warps": (4, 8)},),
        possible=lambda tiling, arguments: arguments["state_pool"].shape[3] % tiling.values == 0,
    ),
)
