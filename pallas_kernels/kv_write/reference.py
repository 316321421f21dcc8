"""Definition of ``kv_write`` in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import apply_rope, rms_normalize, rope_cos_sin


def kv_write(
    heads,
    q_norm,
    k_norm,
    kv_pool,
    layer,
    page_ids,
    page_offsets,
    positions,
    *,
    num_heads,
    rotary_dim,
    rope_theta,
    eps,
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.kv_write`. Norm and rotation in float32, rounded once at the end."""
    q, k, v = heads[:, :num_heads], *jnp.split(heads[:, 2 * num_heads :], 2, axis=1)
    q_norm, k_norm = (norm[layer] if norm.ndim == 2 else norm for norm in (q_norm, k_norm))
    cos, sin = rope_cos_sin(positions, rotary_dim, rope_theta)
    q_out = apply_rope(rms_normalize(q, eps) * (1.0 + q_norm), cos, sin).astype(q.dtype)
    k_out = apply_rope(rms_normalize(k, eps) * (1.0 + k_norm), cos, sin).astype(kv_pool.dtype)
    q_out = jnp.where((page_ids != 0)[:, None, None], q_out, 0)
    key_value = jnp.stack([k_out, v], axis=1)  # [T, 2, K, H]
    # One index per pool axis (no flattened axis): offsets past 2^31 elements stay out of int32 arithmetic.
    kv_pool = kv_pool.at[layer, page_ids, :, :, page_offsets, :].set(key_value)
    # Without the barrier XLA fuses the write of a single token into the loop that reads the pool next, and copies it
    # (seen with one row and several steps a dispatch).
    return lax.optimization_barrier((q_out, kv_pool))
