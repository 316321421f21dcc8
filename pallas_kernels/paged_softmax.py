"""Online-softmax attention of a few queries of one sequence over its pages: the maths both paged references share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import HIGHEST

PAGES_PER_BLOCK = 4


def attend_pages(
    query: jax.Array, positions: jax.Array, kv_len: jax.Array, kv_pool: jax.Array, layer: jax.Array, pages: jax.Array
) -> jax.Array:
    """Attention of M queries a key/value head, each seeing the keys up to its own position.

    A few pages at a time, up to the last one that is live, so the width of the page table costs nothing and scratch
    memory does not grow with the context. Keys and values that are not to be seen are selected away, never multiplied
    by 0: pages may hold NaN past the length.

    Args:
        query: f32[K, M, H], already scaled.
        positions: i32[M], last position each query sees; below 0 it sees nothing and the result is NaN.
        kv_len: i32 scalar, number of written positions; at least ``max(positions) + 1``.
        kv_pool: [L, P, 2, K, Z, H].
        layer: i32 scalar.
        pages: i32[W].

    Returns:
        f32[K, M, H].
    """
    num_kv_heads, num_queries, head_dim = query.shape
    page_size = kv_pool.shape[4]
    width = pages.shape[0]
    block_pages = min(PAGES_PER_BLOCK, width)
    block = block_pages * page_size

    def fetch(entry):
        """[2, K, Z, H] of one page-table entry; a slice copies on a CPU at memory speed, a gather at a tenth of it."""
        page = jnp.where(entry < width, pages[jnp.minimum(entry, width - 1)], 0)
        start = (layer, page, 0, 0, 0, 0)
        return lax.dynamic_slice(kv_pool, start, (1, 1, *kv_pool.shape[2:])).reshape(kv_pool.shape[2:])

    def one_block(number, carry):
        top, norm, acc = carry
        fetched = jnp.concatenate([fetch(number * block_pages + i) for i in range(block_pages)], axis=2)
        where = number * block + jnp.arange(block, dtype=jnp.int32)
        key = fetched[0].astype(jnp.float32)  # [K, S, H]
        value = jnp.where((where < kv_len)[:, None], fetched[1], 0).astype(jnp.float32)
        seen = where <= positions[:, None]  # [M, S]
        scores = jnp.where(seen, jnp.einsum("kmh,ksh->kms", query, key, precision=HIGHEST), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0)
        shrink = jnp.exp(top - new_top)
        norm = norm * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        acc = acc * shrink + jnp.einsum("kms,ksh->kmh", weights, value, precision=HIGHEST)
        return new_top, norm, acc

    # The running maximum starts at the lowest finite number: from -inf the first difference could be NaN.
    top = jnp.full((num_kv_heads, num_queries, 1), jnp.finfo(jnp.float32).min)
    start = top, jnp.zeros_like(top), jnp.zeros((num_kv_heads, num_queries, head_dim), jnp.float32)
    _, norm, acc = lax.fori_loop(0, (kv_len + block - 1) // block, one_block, start)
    return acc / norm
