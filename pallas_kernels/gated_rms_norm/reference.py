"""Definition of ``gated_rms_norm`` in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def gated_rms_norm(x, projected, weight, *, first, eps) -> jax.Array:
    """See :func:`pallas_kernels.gated_rms_norm`."""
    z = projected[:, first : first + x.shape[1] * x.shape[2]]
    x32, z32 = x.astype(jnp.float32), z.reshape(x.shape).astype(jnp.float32)
    x_hat = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x_hat * weight * (z32 * lax.logistic(z32))).astype(x.dtype)
