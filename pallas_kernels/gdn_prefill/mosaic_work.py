"""Work of the Mosaic prefill of the delta rule: windows of 64 tokens that begin where the copy engine can begin."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.packing import TILE

ALIGNMENT = 8  # rows that the copy engine cannot split


class Requests(NamedTuple):
    """Requests, the longest first, and behind them the pads as one more: i32[R + 1] each.

    Attributes:
        base: where the first window begins, a multiple of 8.
        first: row of that window that is the first token of the request, below 8.
        end: rows from ``base`` to the end of the request; ``first`` if it has no tokens.
        tile: number of its first window in the list of tiles.
        slot: of the state; -1 for the pads.
        has_state: whether the slot holds one.
    """

    base: jax.Array
    first: jax.Array
    end: jax.Array
    tile: jax.Array
    slot: jax.Array
    has_state: jax.Array


def most_windows(num_tokens: int, num_requests: int) -> int:
    """Most windows that any packing can need: one more a request than its tokens and 7 of its neighbour's fill."""
    return (num_tokens + (ALIGNMENT - 1) * num_requests) // TILE + num_requests


def work_lists(cu_seqlens, slot_ids, has_state, num_tokens: int) -> tuple[jax.Array, Requests]:
    """Windows and requests of a pack.

    A request is cut every 64 tokens from the multiple of 8 at or below its first token on. Rows of its first window
    before that token, and of its last window behind its last one, count as tokens that change nothing.

    Args:
        cu_seqlens: i32[R + 1], non-decreasing.
        slot_ids: i32[R].
        has_state: bool[R].
        num_tokens: T.

    Returns:
        i32[3, M], (first token, first row, row behind the last) of every window, dead ones without rows; the requests.
    """
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    bases = begins // ALIGNMENT * ALIGNMENT
    counts = jnp.where(ends > begins, (ends - bases + TILE - 1) // TILE, 0)
    index = jnp.arange(slot_ids.shape[0], dtype=jnp.int32)
    before = jnp.sum(jnp.where(index < index[:, None], counts, 0), axis=1, dtype=jnp.int32)

    window = jnp.arange(most_windows(num_tokens, slot_ids.shape[0]), dtype=jnp.int32)
    owner = jnp.sum(before + counts <= window[:, None], axis=1, dtype=jnp.int32)
    live = owner < slot_ids.shape[0]
    owner = jnp.minimum(owner, slot_ids.shape[0] - 1)
    start = jnp.where(live, bases[owner] + TILE * (window - before[owner]), 0)
    first = jnp.where(live, jnp.maximum(begins[owner] - start, 0), 0)
    end = jnp.where(live, jnp.minimum(ends[owner] - start, TILE), 0)

    lengths = ends - begins
    longer = (lengths > lengths[:, None]) | ((lengths == lengths[:, None]) & (index < index[:, None]))
    place = jnp.sum(longer, axis=1, dtype=jnp.int32)  # of each request in the order
    fields = jnp.stack([bases, begins - bases, ends - bases, before, slot_ids, has_state.astype(jnp.int32)])
    fields = jnp.sum(jnp.where(place == index[:, None], fields[:, None], 0), axis=2, dtype=jnp.int32)
    base = cu_seqlens[-1] // ALIGNMENT * ALIGNMENT
    pads = jnp.stack([base, cu_seqlens[-1] - base, num_tokens - base, 0, -1, 0]).astype(jnp.int32)
    return jnp.stack([start, first, end]), Requests(*jnp.concatenate([fields, pads[:, None]], axis=1))
