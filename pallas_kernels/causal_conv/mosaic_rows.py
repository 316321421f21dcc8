"""What the Mosaic kernels of ``causal_conv`` share: rows of channels in the registers of a warpgroup."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.mosaic_layouts import THREADS
from pallas_kernels.numerics import silu_by_root


def supports(target, arguments) -> None:
    """Hopper or newer, channels a multiple of the threads of a warpgroup."""
    require_nvidia(target, at_least=(9, 0))
    channels = arguments["weight"].shape[1]
    require(channels % THREADS == 0, f"takes channels in multiples of {THREADS}, not {channels}")
    require(arguments["x"].shape[0] > 0, "takes at least one token")


def silu_twice_rounded(total, dtype, *, packed: bool = True):
    """``silu`` of float32 numbers rounded to a dtype, rounded again.

    Args:
        total: f32, in registers.
        dtype: of the results.
        packed: round two numbers of 16 bits in one instruction. The barrier makes the compiler do it: left alone, it
            rounds one by one, since each is widened again, on the unit that also has the exponential.
    """
    rounded = total.astype(dtype)
    if packed and jnp.dtype(dtype).itemsize == 2:
        rounded = lax.optimization_barrier(rounded)
    return silu_by_root(rounded.astype(jnp.float32)).astype(dtype)


def pick(tail, place):
    """Row ``place`` (0, 1 or 2, a traced scalar) of a tail held in registers."""
    return jnp.where(place == 0, tail[0], jnp.where(place == 1, tail[1], tail[2]))
