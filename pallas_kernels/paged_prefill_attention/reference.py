"""Definition of ``paged_prefill_attention`` in plain jnp: a tile of 64 queries at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.packing import TILE, tile_work_list
from pallas_kernels.paged_softmax import attend_pages


def paged_prefill_attention(q, gates, kv_pool, layer, page_table, cu_seqlens, kv_lens, *, first_gate) -> jax.Array:
    """See :func:`pallas_kernels.paged_prefill_attention`. Dead tiles of the work list cost nothing."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_pool.shape[3]
    group = num_heads // num_kv_heads
    tiles = tile_work_list(cu_seqlens, num_tokens)
    steps = jnp.arange(TILE, dtype=jnp.int32)
    # Room for the last tile to run past the end, so that tiles are plain slices.
    gate = gates[:, first_gate : first_gate + num_heads]
    q, gate = (jnp.pad(array, ((0, TILE), (0, 0), (0, 0))) for array in (q, gate))

    def one_tile(index, out):
        request, start, length = tiles.request[index], tiles.start[index], tiles.length[index]
        first_position = kv_lens[request] - cu_seqlens[request + 1] + start
        query = lax.dynamic_slice_in_dim(q, start, TILE).astype(jnp.float32) * head_dim**-0.5
        query = jnp.moveaxis(query.reshape(TILE, num_kv_heads, group, head_dim), 0, 2)  # [K, G, 64, H]
        attended = attend_pages(
            query.reshape(num_kv_heads, group * TILE, head_dim),
            jnp.tile(first_position + steps, group),
            first_position + length,
            kv_pool,
            layer,
            page_table[request],
        )
        attended = jnp.moveaxis(attended.reshape(num_kv_heads, group, TILE, head_dim), 2, 0)
        attended = attended.reshape(TILE, num_heads, head_dim)
        gated = attended * lax.logistic(lax.dynamic_slice_in_dim(gate, start, TILE).astype(jnp.float32))
        gated = jnp.where((steps < length)[:, None, None], gated, 0).astype(out.dtype)
        # Tiles come in packing order: zeros past a partial tile are overwritten by the next one, or are padding.
        return lax.dynamic_update_slice_in_dim(out, gated, start, 0)

    return lax.fori_loop(0, tiles.count, one_tile, jnp.zeros_like(q))[:num_tokens]
