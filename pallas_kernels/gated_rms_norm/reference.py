"""Definition of ``gated_rms_norm`` in plain jnp."""

from __future__ import annotations

import jax

from pallas_kernels.numerics import gated_rms_normalize


def gated_rms_norm(x, projected, weight, *, first, eps) -> jax.Array:
    """See :func:`pallas_kernels.gated_rms_norm`."""
    z = projected[:, first : first + x.shape[1] * x.shape[2]].reshape(x.shape)
    return gated_rms_normalize(x, z, weight, eps).astype(x.dtype)
