"""Definition of ``add_rms_norm`` in plain jnp."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import rms_normalize, round_to


def add_rms_norm(x, delta, weight, *, eps) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.add_rms_norm`."""
    if delta.ndim == 3:
        delta = round_to(functools.reduce(jnp.add, list(delta)), x.dtype)
    total = round_to(x.astype(jnp.float32) + delta.astype(jnp.float32), x.dtype)
    return total.astype(x.dtype), (rms_normalize(total, eps) * (1.0 + weight)).astype(x.dtype)
