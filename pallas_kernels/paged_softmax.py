"""Online-softmax attention of a few queries of one sequence over its pages: the maths both paged references share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import HIGHEST


def attend_pages(
    query: jax.Array, positions: jax.Array, kv_len: jax.Array, kv_pool: jax.Array, layer: jax.Array, pages: jax.Array
) -> jax.Array:
    """Attention of M queries a key/value head, each seeing the keys up to its own position.

    A page at a time, up to the last one that is live, so the width of the page table costs nothing and scratch memory
    does not grow with the context. A page is sliced, not gathered: on a CPU slices move at memory speed and
    gathers do not; blocks of two and four pages measured slower. Keys and values that are not to be seen are selected
    away, never multiplied by 0: pages may hold NaN past the length.

    Args:
        query: f32[K, M, H], already scaled.
        positions: i32[M], last position each query sees; outside 0 .. kv_len - 1 the result is unspecified.
        kv_len: i32 scalar, number of positions that may be read.
        kv_pool: [L, P, 2, K, Z, H].
        layer: i32 scalar.
        pages: i32[W].

    Returns:
        f32[K, M, H].
    """
    num_kv_heads, num_queries, head_dim = query.shape
    page_size = kv_pool.shape[4]

    def one_page(number, carry):
        top, norm, acc = carry
        start = (layer, pages[number], 0, 0, 0, 0)
        page = lax.dynamic_slice(kv_pool, start, (1, 1, *kv_pool.shape[2:])).reshape(kv_pool.shape[2:])
        where = number * page_size + jnp.arange(page_size, dtype=jnp.int32)
        key = page[0].astype(jnp.float32)  # [K, Z, H]
        value = jnp.where((where < kv_len)[:, None], page[1], 0).astype(jnp.float32)
        seen = where <= positions[:, None]  # [M, Z]
        scores = jnp.where(seen, jnp.einsum("kmh,kzh->kmz", query, key, precision=HIGHEST), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0)
        shrink = jnp.exp(top - new_top)
        norm = norm * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        acc = acc * shrink + jnp.einsum("kmz,kzh->kmh", weights, value, precision=HIGHEST)
        return new_top, norm, acc

    # The running maximum starts at the lowest finite number: from -inf the first difference could be NaN.
    top = jnp.full((num_kv_heads, num_queries, 1), jnp.finfo(jnp.float32).min)
    start = top, jnp.zeros_like(top), jnp.zeros((num_kv_heads, num_queries, head_dim), jnp.float32)
    _, norm, acc = lax.fori_loop(0, (kv_len + page_size - 1) // page_size, one_page, start)
    return acc / norm
