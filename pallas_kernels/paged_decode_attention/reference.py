"""Definition of ``paged_decode_attention`` in plain jnp: a row at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.packing import live_rows
from pallas_kernels.paged_softmax import attend_pages


def paged_decode_attention(q, gates, kv_pool, layer, page_table, kv_lens, *, first_gate) -> jax.Array:
    """See :func:`pallas_kernels.paged_decode_attention`.

    A loop over the live rows, each up to its own length: neither padding rows nor the longest row cost the others
    anything, and a row's result does not depend on its company to the last bit.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = kv_pool.shape[3]
    group = num_heads // num_kv_heads
    order, count = live_rows(kv_lens > 0)

    def one_row(index, out):
        row = order[index]
        kv_len = kv_lens[row]
        query = q[row].reshape(num_kv_heads, group, head_dim).astype(jnp.float32) * head_dim**-0.5
        last = jnp.full((group,), kv_len - 1)
        attended = attend_pages(query, last, kv_len, kv_pool, layer, page_table[row])
        gate = lax.dynamic_slice(gates, (row, first_gate, 0), (1, num_heads, head_dim)).astype(jnp.float32)
        gated = attended.reshape(gate.shape) * lax.logistic(gate)
        return lax.dynamic_update_slice_in_dim(out, gated.astype(out.dtype), row, 0)

    return lax.fori_loop(0, count, one_row, jnp.zeros_like(q))
