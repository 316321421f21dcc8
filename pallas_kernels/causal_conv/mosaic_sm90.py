"""``causal_conv`` on Hopper, Pallas Mosaic GPU: a sliding window in registers over the tokens of a tile.

A block of one warpgroup owns up to 64 tokens of one request and 512 channels (where they divide): several adjacent
ones a thread, so that a row of the block is one wide load. It walks down its tokens a few at a time with all their
loads in flight at once, and keeps the three inputs before them in registers. Tiles start at multiples of 64 from the
request's own start, so only the first one looks at the tail in the pool; the same block then replaces that tail, and no
other block of the grid touches it: one kernel, in place, without a race. Pads are one more piece of the pack, written
as zeros.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.causal_conv.mosaic_rows import pick, silu_twice_rounded
from pallas_kernels.mosaic_layouts import THREADS, adjacent
from pallas_kernels.packing import tile_work_list

THREAD_BYTES = 8  # of one token in one load of a thread


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        unroll: tokens whose loads are in flight together.
        wide: 1 for loads, stores and roundings that take all channels of a thread at once, 0 for what the compiler
            makes of them if it is not told: one number at a time.
    """

    unroll: int = 8
    wide: int = 0

    def __post_init__(self):
        if self.unroll < 3 or self.wide not in (0, 1):
            raise ValueError(f"no tiling of this kernel: {self}")


def causal_conv(
    x, weight, conv_pool, layer, slot_ids, has_state, cu_seqlens, *, tiling: Tiling | None = None, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.causal_conv`. The pool is a reference to the kernel: updated in place."""
    tiling = tiling or Tiling()
    num_tokens, channels = x.shape[0], weight.shape[1]
    num_requests = slot_ids.shape[0]
    ends = jnp.append(cu_seqlens, jnp.int32(num_tokens))  # the pads: request R
    tiles = tile_work_list(ends, num_tokens)
    block = _block_channels(channels, x.dtype)

    conv_ref = jax.new_ref(conv_pool)
    kernel = pl.kernel(
        functools.partial(_kernel, block=block, num_requests=num_requests, tiling=tiling),
        out_type=[jax.ShapeDtypeStruct((num_tokens, channels), x.dtype)],
        mesh=plgpu.Mesh(grid=(channels // block, tiles.start.shape[0]), grid_names=("block", "tile")),
        # No barriers: a thread reads and writes its own channels only, and there is no shared memory.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
        ),
        interpret=interpret,
        name="causal_conv",
    )
    work = (tiles.request, tiles.start, tiles.length, tiles.first.astype(jnp.int32), tiles.count[None])
    requests = (layer[None], slot_ids, has_state.astype(jnp.int32), cu_seqlens)
    [y] = kernel(x, weight, *work, *requests, conv_ref)
    return y, jax.freeze(conv_ref)


def _kernel(
    x_ref,  # [T, C or more]
    weight_ref,  # [4, C]
    tile_request_ref,  # [M]
    tile_start_ref,
    tile_length_ref,
    tile_first_ref,
    tile_count_ref,  # [1]
    layer_ref,  # [1]
    slot_ids_ref,  # [R]
    has_state_ref,  # [R]
    cu_seqlens_ref,  # [R + 1]
    pool_ref,  # [L, S, 3, C]
    y_ref,  # [T, C]
    *,
    block: int,
    num_requests: int,
    tiling: Tiling,
):
    unroll = tiling.unroll
    tile = lax.axis_index("tile")
    channels = pl.ds(lax.axis_index("block") * block, block)
    vector = block // THREADS
    wide = tiling.wide == 1 and vector > 1 and x_ref.shape[1] % vector == 0  # a wide load must be aligned
    layout = adjacent(block) if wide else plgpu.Layout.WG_STRIDED((block,), vec_size=vector)

    def zeros():
        return plgpu.layout_cast(jnp.zeros((block,), y_ref.dtype), layout)

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False)

    def load_token(token):
        return load(x_ref.at[token, channels])

    request, start, length = tile_request_ref[tile], tile_start_ref[tile], tile_length_ref[tile]
    alive = tile < tile_count_ref[0]

    @pl.when(alive & (request == num_requests))
    def _():
        @pl.loop(start, start + length)
        def _(token):
            y_ref[token, channels] = zeros()

    @pl.when(alive & (request < num_requests))
    def _():
        layer, slot = layer_ref[0], slot_ids_ref[request]
        first = tile_first_ref[tile] != 0
        with_tail = first & (has_state_ref[request] != 0)

        def load_tail():
            return tuple(load(pool_ref.at[layer, slot, place, channels]) for place in range(3))

        def before_the_tile():
            return tuple(load_token(start - 3 + place) for place in range(3))

        old_tail = lax.cond(with_tail, load_tail, lambda: (zeros(),) * 3)
        window = lax.cond(first, lambda: old_tail, before_the_tile)

        @pl.when(first)
        def _():
            begin, end = cu_seqlens_ref[request], cu_seqlens_ref[request + 1]
            # Rows total - 3 .. total - 1 of [old tail; piece], total = 3 + tokens of the piece.
            for place in range(3):
                token = end - 3 + place
                of_tail = functools.partial(pick, old_tail, token - begin + 3)
                pool_ref[layer, slot, place, channels] = lax.cond(
                    token >= begin, functools.partial(load_token, token), of_tail
                )

        taps = [load(weight_ref.at[tap, channels]).astype(jnp.float32) for tap in range(4)]
        last = start + length - 1

        @pl.loop(0, pl.cdiv(length, unroll), init_carry=window)
        def _(step, window):
            begin = start + step * unroll
            rows = [*window, *(load_token(jnp.minimum(begin + i, last)) for i in range(unroll))]
            numbers = [row.astype(jnp.float32) for row in rows]
            for i in range(unroll):
                total = numbers[i] * taps[0]
                for tap in range(1, 4):
                    total = total + numbers[i + tap] * taps[tap]
                y = silu_twice_rounded(total, y_ref.dtype, packed=wide)

                @pl.when(begin + i <= last)
                def _(token=begin + i, y=y):
                    y_ref[token, channels] = y

            return tuple(rows[-3:])


def _block_channels(channels: int, dtype) -> int:
    """Channels of a block: as many a thread as one wide load brings, and a divisor of all."""
    block = THREADS * THREAD_BYTES // jnp.dtype(dtype).itemsize
    while channels % block:
        block //= 2
    return block
