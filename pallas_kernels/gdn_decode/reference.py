"""Definition of ``gdn_decode`` in plain jnp: one step of the recurrence."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import HIGHEST, delta_gates, l2_normalize, rms_normalize, silu


def gdn_decode(
    qkv,
    z,
    b,
    a,
    conv_weight,
    A_log,
    dt_bias,
    norm_weight,
    conv_pool,
    state_pool,
    layer,
    slot_ids,
    *,
    num_k_heads,
    head_k_dim,
    eps,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See :func:`pallas_kernels.gdn_decode`."""
    rows = qkv.shape[0]
    _, _, num_v_heads, head_v_dim, _ = state_pool.shape
    group = num_v_heads // num_k_heads
    key_dim = num_k_heads * head_k_dim

    tails = conv_pool[layer, slot_ids]  # [B, 3, C]
    window = jnp.concatenate([tails, qkv[:, None]], axis=1)  # [B, 4, C]
    conv = window[:, 0].astype(jnp.float32) * conv_weight[0].astype(jnp.float32)
    for tap in range(1, 4):
        conv += window[:, tap].astype(jnp.float32) * conv_weight[tap].astype(jnp.float32)
    mixed = silu(conv.astype(qkv.dtype).astype(jnp.float32)).astype(qkv.dtype)
    conv_pool = conv_pool.at[layer, slot_ids].set(window[:, 1:])

    mixed = mixed.astype(jnp.float32)
    query = l2_normalize(mixed[:, :key_dim].reshape(rows, num_k_heads, head_k_dim)) * head_k_dim**-0.5
    key = l2_normalize(mixed[:, key_dim : 2 * key_dim].reshape(rows, num_k_heads, head_k_dim))
    value = mixed[:, 2 * key_dim :].reshape(rows, num_k_heads, group, head_v_dim)
    beta, decay = delta_gates(b, a, A_log, dt_bias)
    beta = beta.reshape(rows, num_k_heads, group, 1)
    decay = decay.reshape(rows, num_k_heads, group, 1, 1)

    state = state_pool[layer, slot_ids].astype(jnp.float32)
    state = jnp.exp(decay) * state.reshape(rows, num_k_heads, group, head_v_dim, head_k_dim)
    delta = beta * (value - jnp.einsum("bkgvd,bkd->bkgv", state, key, precision=HIGHEST))
    state = state + delta[..., None] * key[:, :, None, None, :]
    out = jnp.einsum("bkgvd,bkd->bkgv", state, query, precision=HIGHEST)
    new_states = state.reshape(rows, *state_pool.shape[2:]).astype(state_pool.dtype)
    state_pool = state_pool.at[layer, slot_ids].set(new_states)

    out = out.reshape(rows, num_v_heads, head_v_dim).astype(qkv.dtype)
    gate = silu(z.astype(jnp.float32)).reshape(rows, num_v_heads, head_v_dim)
    y = (norm_weight * rms_normalize(out, eps) * gate).astype(qkv.dtype).reshape(z.shape)
    return jnp.where((slot_ids != 0)[:, None], y, 0), conv_pool, state_pool
