"""Ragged packing: owners, tiles, live rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.packing import live_rows, max_tiles, tile_work_list, token_owners

TOKENS, REQUESTS = 400, 6
tiles_of = jax.jit(lambda offsets: tile_work_list(offsets, TOKENS))
owners_of = jax.jit(lambda offsets: token_owners(offsets, TOKENS))
live_of = jax.jit(live_rows)

packs = st.lists(st.integers(0, 200), min_size=REQUESTS, max_size=REQUESTS).filter(lambda n: sum(n) <= TOKENS)


@settings(max_examples=60, deadline=None)
@given(packs)
@example([0] * REQUESTS)
@example([64] * 6)
@example([65, 65, 65, 65, 65, 65])
@example([0, 0, 1, 0, 399, 0])
@example([400, 0, 0, 0, 0, 0])
def test_tiles_cover_every_token_once_and_never_two_requests(lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tiles = jax.tree.map(np.asarray, tiles_of(offsets))
    live = [
        (request, start, length, first)
        for request, start, length, first, _ in zip(*tiles[:4], range(int(tiles.count)), strict=False)
    ]
    want = [
        (request, offsets[request] + done, min(64, length - done), done == 0)
        for request, length in enumerate(lengths)
        for done in range(0, length, 64)
    ]
    assert live == want
    assert tiles.count <= max_tiles(TOKENS, REQUESTS) == len(tiles.start)


@settings(max_examples=40, deadline=None)
@given(packs)
@example([0] * REQUESTS)
@example([0, 0, 1, 0, 399, 0])
def test_owners(lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    owners = jax.tree.map(np.asarray, owners_of(offsets))
    np.testing.assert_array_equal(owners.real, np.arange(TOKENS) < sum(lengths))
    np.testing.assert_array_equal(owners.request[: sum(lengths)], np.repeat(np.arange(REQUESTS), lengths))
    np.testing.assert_array_equal(owners.offset[: sum(lengths)], np.concatenate([np.arange(n) for n in lengths]))
    assert owners.request.max(initial=0) < REQUESTS


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=9, max_size=9))
def test_live_rows(live):
    order, count = live_of(jnp.asarray(live))
    assert list(np.asarray(order)[: int(count)]) == [row for row, is_live in enumerate(live) if is_live]
