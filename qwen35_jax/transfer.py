"""Programs that move or overwrite one sequence: out of a pool, into a pool, and with zeros or NaN."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from qwen35_jax import sampling
from qwen35_jax.cache import Cache
from qwen35_jax.steps import DeviceState


def transfer_widths(max_width: int) -> tuple[int, ...]:
    """Page counts with a transfer program: powers of two and the largest, so no transfer is twice its need."""
    return (*(1 << i for i in range((max_width - 1).bit_length())), max_width)


def in_transit_bytes(slots: int, pages: int) -> int:
    """Most bytes of extracted requests between the pools, from the bytes of all slots and pages they may hold."""
    return slots + 2 * pages


def transfer_bytes(shapes: DeviceState, width: int) -> int:
    """Bytes of an extracted request with ``width`` pages."""
    return sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in _row_structs(shapes, width))


def _row_structs(shapes: DeviceState, width: int) -> list[jax.ShapeDtypeStruct]:
    kv = shapes.cache.kv
    leaves = [((kv.shape[0], width, *kv.shape[2:]), kv.dtype)]
    leaves += [((x.shape[0], *x.shape[2:]), x.dtype) for x in (shapes.cache.conv, shapes.cache.state)]
    leaves += [(x.shape[1:], x.dtype) for x in (*shapes.sampler, shapes.last_token)]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in leaves]


def _to_bytes(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def _from_bytes(data: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    itemsize = jnp.dtype(like.dtype).itemsize
    shape = like.shape if itemsize == 1 else (*like.shape, itemsize)
    return jax.lax.bitcast_convert_type(data.reshape(shape), like.dtype)


def make_extract(shapes: DeviceState, width: int) -> Callable[[DeviceState, jax.Array], jax.Array]:
    """``(state, int32[1 + width]) -> uint8[n]``: a slot, its records and its pages as ONE array.

    One array because the host pays for each array that it moves, however small.
    """

    def extract(state: DeviceState, places: jax.Array) -> jax.Array:
        slot, pages = places[0], places[1:]
        parts = [state.cache.kv[:, pages], state.cache.conv[:, slot], state.cache.state[:, slot]]
        parts += [x[slot] for x in (*state.sampler, state.last_token)]
        return jnp.concatenate([_to_bytes(part) for part in parts])

    return extract


def make_merge(shapes: DeviceState, width: int) -> Callable[[DeviceState, jax.Array, jax.Array], DeviceState]:
    """``(state, uint8[n], int32[1 + width]) -> state``: write an extracted request into a slot and pages.

    Entries of ``places`` past the request's pages are 0: they land in the null page.
    """
    structs = _row_structs(shapes, width)

    def merge(state: DeviceState, data: jax.Array, places: jax.Array) -> DeviceState:
        slot, pages = places[0], places[1:]
        parts, offset = [], 0
        for struct in structs:
            count = math.prod(struct.shape) * jnp.dtype(struct.dtype).itemsize
            parts.append(_from_bytes(data[offset : offset + count], struct))
            offset += count
        kv, conv, recurrent, *records = parts
        cache = Cache(
            kv=state.cache.kv.at[:, pages].set(kv),
            conv=state.cache.conv.at[:, slot].set(conv),
            state=state.cache.state.at[:, slot].set(recurrent),
        )
        *sampler, last_token = (
            x.at[slot].set(value) for x, value in zip((*state.sampler, state.last_token), records, strict=True)
        )
        return DeviceState(cache, sampling.SamplerState(*sampler), last_token)

    return merge


def make_fill() -> Callable[[DeviceState, jax.Array, jax.Array], DeviceState]:
    """``(state, float32 value, int32[1 + width]) -> state``: overwrite a slot and pages with one value.

    Zero scrubs what a failed row left behind; NaN poisons freed memory in debug mode.
    """

    def fill(state: DeviceState, value: jax.Array, places: jax.Array) -> DeviceState:
        slot, pages = places[0], places[1:]
        kv, conv, recurrent = state.cache
        return state._replace(
            cache=Cache(
                kv=kv.at[:, pages].set(value.astype(kv.dtype)),
                conv=conv.at[:, slot].set(value.astype(conv.dtype)),
                state=recurrent.at[:, slot].set(value.astype(recurrent.dtype)),
            )
        )

    return fill
