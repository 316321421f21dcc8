"""Ragged packing: which request a packed token belongs to, and the work list of 64-token tiles.

Tokens of several requests lie end to end on one axis; ``cu_seqlens[r] .. cu_seqlens[r + 1]`` are those of request r,
and everything from ``cu_seqlens[R]`` on is padding. Tiles are counted from each request's own start, so a tile never
holds tokens of two requests and results do not depend on where in the pack a request lies.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 64
"""Tokens of a tile: the chunk of the delta rule, the page of the KV pool, the query tile of attention."""


class TokenOwners(NamedTuple):
    """Where each packed token belongs.

    Attributes:
        request: i32[T], request of the token (clipped to R - 1 for pads).
        offset: i32[T], index of the token in its request's piece.
        real: bool[T], False for pads.
    """

    request: jax.Array
    offset: jax.Array
    real: jax.Array


class Tiles(NamedTuple):
    """Work list of tiles in packing order; entries from ``count`` on are dead.

    Attributes:
        request: i32[M], request of the tile.
        start: i32[M], first packed token of the tile.
        length: i32[M], number of tokens, 1..64 (live entries).
        first: bool[M], whether it is the first tile of its request in this call.
        count: i32[], number of live tiles.
    """

    request: jax.Array
    start: jax.Array
    length: jax.Array
    first: jax.Array
    count: jax.Array


def token_owners(cu_seqlens: jax.Array, num_tokens: int) -> TokenOwners:
    """Owner of every packed token.

    Args:
        cu_seqlens: i32[R + 1], non-decreasing.
        num_tokens: T.
    """
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    request = _find(cu_seqlens[1:], tokens)
    return TokenOwners(request, tokens - cu_seqlens[request], tokens < cu_seqlens[-1])


def max_tiles(num_tokens: int, num_requests: int, tile: int = TILE) -> int:
    """Most tiles that any packing can need: every request may end in one partial tile."""
    return num_tokens // tile + num_requests


def tile_work_list(cu_seqlens: jax.Array, num_tokens: int, tile: int = TILE) -> Tiles:
    """Split a pack into tiles.

    Args:
        cu_seqlens: i32[R + 1], non-decreasing; empty requests get no tile.
        num_tokens: T.
        tile: tokens of a full tile.
    """
    num_requests = cu_seqlens.shape[0] - 1
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    tiles_of = (lengths + tile - 1) // tile
    ends = _running_sum(tiles_of)
    index = jnp.arange(max_tiles(num_tokens, num_requests, tile), dtype=jnp.int32)
    request = _find(ends, index)
    ordinal = index - (ends[request] - tiles_of[request])
    start = cu_seqlens[request] + tile * ordinal
    length = jnp.minimum(tile, cu_seqlens[request + 1] - start)
    return Tiles(request, start, length, ordinal == 0, ends[-1])


def live_rows(live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices of the live rows first, in order, and their number: a loop over them skips padding rows.

    Args:
        live: bool[B].

    Returns:
        i32[B] (zeros past the number) and i32[].
    """
    rank = _running_sum(live.astype(jnp.int32)) - 1  # of a live row among the live ones
    index = jnp.arange(live.shape[0], dtype=jnp.int32)
    holds = live & (rank == index[:, None])  # [place, row]
    return jnp.sum(jnp.where(holds, index, 0), axis=1, dtype=jnp.int32), jnp.sum(live, dtype=jnp.int32)


# Two small helpers by comparison of all pairs. The arrays have at most a few hundred entries; searchsorted, cumsum and
# nonzero cost 0.2 to 0.4 s each to compile on a CPU, in every program again.


def _running_sum(values: jax.Array) -> jax.Array:
    """Inclusive cumulative sum of i32[N]."""
    index = jnp.arange(values.shape[0])
    return jnp.sum(jnp.where(index <= index[:, None], values, 0), axis=1, dtype=jnp.int32)


def _find(ends: jax.Array, queries: jax.Array) -> jax.Array:
    """Index of the first of the non-decreasing ends that lies above each query, at most the last index."""
    passed = jnp.sum(ends <= queries[:, None], axis=1, dtype=jnp.int32)  # steps over empty spans
    return jnp.minimum(passed, ends.shape[0] - 1)
