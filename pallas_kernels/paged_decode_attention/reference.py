"""Definition of ``paged_decode_attention`` in plain jnp: all rows at once, a few pages at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import HIGHEST

PAGES_PER_BLOCK = 4
MAX_FETCHED_PAGES = 64
"""Pages fetched at once over all rows (one a row at least): bounds the scratch memory."""


def paged_decode_attention(q, gate, kv_pool, layer, page_table, kv_lens) -> jax.Array:
    """See :func:`pallas_kernels.paged_decode_attention`.

    Online softmax over blocks of pages up to the longest live row, so the width of the page table costs nothing. Keys
    and values past a row's length are selected away, never multiplied by 0.
    """
    rows, num_heads, head_dim = q.shape
    _, _, _, num_kv_heads, page_size, _ = kv_pool.shape
    group = num_heads // num_kv_heads
    width = page_table.shape[1]
    block_pages = max(1, min(PAGES_PER_BLOCK, width, MAX_FETCHED_PAGES // rows))
    block = block_pages * page_size
    query = (q.astype(jnp.float32) * head_dim**-0.5).reshape(rows, num_kv_heads, group, head_dim)

    def one_block(number, carry):
        top, norm, acc = carry
        slots = number * block_pages + jnp.arange(block_pages, dtype=jnp.int32)
        entries = jnp.where(slots < width, page_table[:, jnp.minimum(slots, width - 1)], 0)  # [B, pages]
        fetched = kv_pool[layer, entries]  # [B, pages, 2, K, Z, H]
        fetched = jnp.transpose(fetched, (2, 0, 3, 1, 4, 5)).reshape(2, rows, num_kv_heads, block, head_dim)
        where = number * block + jnp.arange(block, dtype=jnp.int32)
        seen = where[None, :] < kv_lens[:, None]  # [B, block]
        key = fetched[0].astype(jnp.float32)
        value = jnp.where(seen[:, None, :, None], fetched[1], 0).astype(jnp.float32)
        seen = seen[:, None, None, :]
        scores = jnp.where(seen, jnp.einsum("bkgh,bksh->bkgs", query, key, precision=HIGHEST), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0)
        shrink = jnp.exp(top - new_top)
        norm = norm * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        acc = acc * shrink + jnp.einsum("bkgs,bksh->bkgh", weights, value, precision=HIGHEST)
        return new_top, norm, acc

    shape = (rows, num_kv_heads, group)
    # The running maximum starts at the lowest finite number: with -inf a row that sees nothing would be NaN.
    empty = jnp.full((*shape, 1), jnp.finfo(jnp.float32).min), jnp.zeros((*shape, 1)), jnp.zeros((*shape, head_dim))
    _, norm, acc = lax.fori_loop(0, (jnp.max(kv_lens) + block - 1) // block, one_block, empty)
    attended = (acc / norm).reshape(rows, num_heads, head_dim) * lax.logistic(gate.astype(jnp.float32))
    return jnp.where((kv_lens > 0)[:, None, None], attended, 0).astype(q.dtype)
