"""Definition of ``gdn_decode`` in plain jnp: one step of the recurrence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import HIGHEST, delta_gates, l2_normalize, rms_normalize, round_to, silu
from pallas_kernels.packing import live_rows


def split_projected(projected: jax.Array, conv_dim: int, num_v_heads: int) -> tuple[jax.Array, ...]:
    """The parts of a projection that holds them side by side: qkv [B, C], z [B, Hv Dv], b [B, Hv] and a [B, Hv]."""
    width = projected.shape[1]
    return tuple(jnp.split(projected, [conv_dim, width - 2 * num_v_heads, width - num_v_heads], axis=1))


def gdn_decode(
    projected,
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
    """See :func:`pallas_kernels.gdn_decode`.

    The state is updated row by row in a loop over the live rows: the same formulas vectorised over gathered states
    measured far slower on a CPU, where batched matrix-vector products and gathers of whole states are slow.
    """
    rows = projected.shape[0]
    _, _, num_v_heads, head_v_dim, _ = state_pool.shape
    group = num_v_heads // num_k_heads
    key_dim = num_k_heads * head_k_dim
    qkv, z, b, a = split_projected(projected, conv_weight.shape[1], num_v_heads)

    # The barrier keeps this read before the write below: fused into its uses, it would outlive the old pool and make
    # XLA copy the pool (seen with one row).
    tails, conv_pool = lax.optimization_barrier((conv_pool[layer, slot_ids], conv_pool))  # [B, 3, C]
    window = jnp.concatenate([tails, qkv[:, None]], axis=1)  # [B, 4, C]
    conv = window[:, 0].astype(jnp.float32) * conv_weight[0].astype(jnp.float32)
    for tap in range(1, 4):
        conv += window[:, tap].astype(jnp.float32) * conv_weight[tap].astype(jnp.float32)
    mixed = round_to(silu(round_to(conv, qkv.dtype)), qkv.dtype)
    conv_pool = conv_pool.at[layer, slot_ids].set(window[:, 1:])

    query = l2_normalize(mixed[:, :key_dim].reshape(rows, num_k_heads, head_k_dim)) * head_k_dim**-0.5
    key = l2_normalize(mixed[:, key_dim : 2 * key_dim].reshape(rows, num_k_heads, head_k_dim))
    value = mixed[:, 2 * key_dim :].reshape(rows, num_k_heads, group, head_v_dim)
    beta, decay = delta_gates(b, a, A_log[:num_v_heads], dt_bias[:num_v_heads])
    beta = beta.reshape(rows, num_k_heads, group, 1)
    kept = jnp.exp(decay).reshape(rows, num_k_heads, group, 1)
    key_query = jnp.stack([key, query], axis=-1)  # [B, K, Dk, 2]
    overlap = jnp.sum(key * query, axis=-1)[:, :, None, None]  # [B, K, 1, 1]
    order, count = live_rows(slot_ids != 0)

    def one_row(index, carry):
        out, pool = carry
        row = order[index]
        slot = slot_ids[row]
        start = (layer, slot, 0, 0, 0)
        state = lax.dynamic_slice(pool, start, (1, 1, *pool.shape[2:])).astype(jnp.float32)
        state = state.reshape(num_k_heads, group * head_v_dim, head_k_dim)
        # S k and S q of the old state in one pass over it; the new state's S' q = exp(g) S q + (k . q) d.
        reads = jnp.einsum("kvd,kdj->kvj", state, key_query[row], precision=HIGHEST)
        reads = kept[row][..., None] * reads.reshape(num_k_heads, group, head_v_dim, 2)
        delta = beta[row] * (value[row] - reads[..., 0])  # [K, G, Dv]
        row_out = reads[..., 1] + overlap[row] * delta
        state = kept[row][..., None] * state.reshape(num_k_heads, group, head_v_dim, head_k_dim)
        state = state + delta[..., None] * key[row][:, None, None, :]
        pool = lax.dynamic_update_slice(pool, state.reshape(1, 1, *pool.shape[2:]).astype(pool.dtype), start)
        return lax.dynamic_update_index_in_dim(out, row_out.astype(out.dtype), row, 0), pool

    out = jnp.zeros((rows, num_k_heads, group, head_v_dim), qkv.dtype)
    out, state_pool = lax.fori_loop(0, count, one_row, (out, state_pool))

    out = out.reshape(rows, num_v_heads, head_v_dim)
    gate = silu(z.astype(jnp.float32)).reshape(rows, num_v_heads, head_v_dim)
    y = (norm_weight * rms_normalize(out, eps) * gate).astype(qkv.dtype).reshape(z.shape)
    return jnp.where((slot_ids != 0)[:, None], y, 0), conv_pool, state_pool
