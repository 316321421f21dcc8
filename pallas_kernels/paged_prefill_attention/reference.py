"""Definition of ``paged_prefill_attention`` in plain jnp: a tile of 64 queries at a time, a few pages at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import HIGHEST
from pallas_kernels.packing import TILE, tile_work_list

PAGES_PER_BLOCK = 4


def paged_prefill_attention(q, gate, kv_pool, layer, page_table, cu_seqlens, kv_lens) -> jax.Array:
    """See :func:`pallas_kernels.paged_prefill_attention`.

    Online softmax; both loops stop at what is live, so neither dead tiles nor the width of the page table cost time,
    and memory is bounded by a tile. Keys and values past a query's position are selected away, never multiplied by 0.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, _, _, num_kv_heads, page_size, _ = kv_pool.shape
    group = num_heads // num_kv_heads
    width = page_table.shape[1]
    block_pages = min(PAGES_PER_BLOCK, width)
    block = block_pages * page_size
    tiles = tile_work_list(cu_seqlens, num_tokens)
    steps = jnp.arange(TILE, dtype=jnp.int32)

    def one_tile(index, out):
        request, start = tiles.request[index], tiles.start[index]
        length = tiles.length[index]
        real = steps < length
        rows = jnp.minimum(start + steps, num_tokens - 1)
        positions = kv_lens[request] - cu_seqlens[request + 1] + start + steps  # [64]
        query = jnp.where(real[:, None, None], q[rows], 0).astype(jnp.float32) * head_dim**-0.5
        query = jnp.moveaxis(query.reshape(TILE, num_kv_heads, group, head_dim), 0, 2)  # [K, G, 64, H]
        pages = page_table[request]
        live = positions[0] + length  # keys that the last real query of the tile sees

        def one_block(number, carry):
            top, norm, acc = carry
            slots = number * block_pages + jnp.arange(block_pages, dtype=jnp.int32)
            entries = jnp.where(slots < width, pages[jnp.minimum(slots, width - 1)], 0)
            fetched = jnp.moveaxis(kv_pool[layer, entries], 0, 2)  # [2, K, pages, Z, H]
            fetched = fetched.reshape(2, num_kv_heads, block, head_dim)
            where = number * block + jnp.arange(block, dtype=jnp.int32)
            key = fetched[0].astype(jnp.float32)
            value = jnp.where((where < live)[:, None], fetched[1], 0).astype(jnp.float32)
            seen = (where[None, :] <= positions[:, None]) & real[:, None]  # [64, block]
            scores = jnp.einsum("kgch,ksh->kgcs", query, key, precision=HIGHEST)
            scores = jnp.where(seen, scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new_top), 0)
            shrink = jnp.exp(top - new_top)
            norm = norm * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            acc = acc * shrink + jnp.einsum("kgcs,ksh->kgch", weights, value, precision=HIGHEST)
            return new_top, norm, acc

        shape = (num_kv_heads, group, TILE)
        # The running maximum starts at the lowest finite number: with -inf a row that sees nothing would be NaN.
        empty = jnp.full((*shape, 1), jnp.finfo(jnp.float32).min), jnp.zeros((*shape, 1)), jnp.zeros((*shape, head_dim))
        _, norm, acc = lax.fori_loop(0, (live + block - 1) // block, one_block, empty)
        attended = jnp.moveaxis(acc / norm, 2, 0).reshape(TILE, num_heads, head_dim)
        gated = attended * lax.logistic(gate[rows].astype(jnp.float32))
        gated = jnp.where(real[:, None, None], gated, 0).astype(out.dtype)
        # Tiles come in packing order: zeros past a partial tile are overwritten by the next, or are padding.
        return lax.dynamic_update_slice(out, gated, (start, 0, 0))

    out = jnp.zeros((num_tokens + TILE, num_heads, head_dim), q.dtype)
    return lax.fori_loop(0, tiles.count, one_tile, out)[:num_tokens]
