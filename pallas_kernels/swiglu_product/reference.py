"""Definition of ``swiglu_product`` in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import precision_of, silu


def swiglu_product(x, weight) -> jax.Array:
    """See :func:`pallas_kernels.swiglu_product`; the product is an array, and so rounded to the dtype of x."""
    gate, up = jnp.split(jnp.dot(x, weight, precision=precision_of(x.dtype)), 2, axis=-1)  # [M, F] each
    with jax.named_scope("swiglu"):  # a kernel and a part of a step of its own
        return (silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(x.dtype)
