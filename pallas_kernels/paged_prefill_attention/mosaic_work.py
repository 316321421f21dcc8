"""Tiles of the Mosaic prefill attention: windows of 64 tokens that begin where the copy engine can begin."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 64  # tokens of a tile: the rows of one wgmma
PAGE = 64
ALIGNMENT = 8  # rows that the copy engine cannot split


class Work(NamedTuple):
    """Tiles, the longest first: i32[M] each. Dead entries have no rows and no pages.

    Attributes:
        request: request of the tile (R - 1 for pads).
        start: first packed token of the window of 64, a multiple of 8.
        first: first row of the window that belongs to the tile.
        end: row behind the last one of the tile.
        position: position of row 0; rows before ``first`` may have positions that do not exist.
        pages: pages that some row of the tile sees; 0 for pads, which become zeros.
        whole: pages that every row of the tile sees whole, the first ones.
    """

    request: jax.Array
    start: jax.Array
    first: jax.Array
    end: jax.Array
    position: jax.Array
    pages: jax.Array
    whole: jax.Array


def work_list(cu_seqlens: jax.Array, kv_lens: jax.Array, num_tokens: int) -> tuple[Work, jax.Array]:
    """Tiles of a pack and of the pads behind it, and how many of them are live.

    Args:
        cu_seqlens: i32[R + 1], non-decreasing.
        kv_lens: i32[R].
        num_tokens: T.
    """
    num_requests = kv_lens.shape[0]
    ends = jnp.append(cu_seqlens, jnp.int32(num_tokens))  # the pads: request R, without keys
    begins, ends = ends[:-1], ends[1:]
    totals = jnp.append(kv_lens, jnp.int32(0))
    bases = begins // ALIGNMENT * ALIGNMENT
    counts = jnp.where(ends > begins, (ends - bases + TILE - 1) // TILE, 0)
    entries = jnp.arange(num_requests + 1)
    sums = jnp.sum(jnp.where(entries <= entries[:, None], counts, 0), axis=1, dtype=jnp.int32)
    # A request of n tokens that starts s past a multiple of 8 has at most (n + s) / 64 + 1 tiles.
    most = (num_tokens + (ALIGNMENT - 1) * (num_requests + 1)) // TILE + num_requests + 1
    index = jnp.arange(most, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(sums <= index[:, None], axis=1, dtype=jnp.int32), num_requests)
    live = index < sums[-1]
    start = bases[owner] + TILE * (index - (sums[owner] - counts[owner]))
    first = jnp.maximum(begins[owner] - start, 0)
    end = jnp.where(live, jnp.minimum(ends[owner] - start, TILE), first)
    position = totals[owner] - ends[owner] + start
    pages = jnp.where(live & (owner < num_requests), (position + end + PAGE - 1) // PAGE, 0)
    whole = jnp.where(pages > 0, jnp.minimum((position + first + 1) // PAGE, pages), 0)
    tiles = Work(jnp.minimum(owner, num_requests - 1), start, first, end, position, pages, whole)
    # Longest first: long blocks leave short ones to fill the gaps at the end. Ranks by comparison of all pairs: small
    # arrays, and a sort is several kernels.
    keys = 2 * pages + live
    before = (keys > keys[:, None]) | ((keys == keys[:, None]) & (index < index[:, None]))
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    ordered = (jnp.sum(jnp.where(rank == index[:, None], field, 0), axis=1, dtype=jnp.int32) for field in tiles)
    return Work(*ordered), sums[-1]
