"""``causal_conv`` on Hopper, Pallas Mosaic GPU: a sliding window in registers over the tokens of a tile.

A block of one warpgroup owns up to 64 tokens of one request and 512 channels (where they divide): several adjacent
ones a thread, so that a row of the block is one wide load. It walks down its tokens a few at a time with all their
loads in flight at once, and keeps the three inputs before them in registers. Tiles start at multiples of 64 from the
request's own start, so only the first one looks at the tail in the pool; the same block then replaces that tail, and no
other block of the grid touches it: one kernel, in place, without a race. Pads are one more piece of the pack, written
as zeros.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.packing import tile_work_list

THREADS = 128
UNROLL = 8  # tokens whose loads are in flight together
THREAD_BYTES = 8  # of one token in one load of a thread


def supports(target, arguments) -> None:
    """Hopper or newer, channels a multiple of the threads of a warpgroup."""
    require_nvidia(target, at_least=(9, 0))
    channels = arguments["weight"].shape[1]
    require(channels % THREADS == 0, f"takes channels in multiples of {THREADS}, not {channels}")
    require(arguments["x"].shape[0] > 0, "takes at least one token")


def causal_conv(
    x, weight, conv_pool, layer, slot_ids, has_state, cu_seqlens, *, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.causal_conv`. The pool is a reference to the kernel: updated in place."""
    num_tokens, channels = x.shape[0], weight.shape[1]
    num_requests = slot_ids.shape[0]
    ends = jnp.append(cu_seqlens, jnp.int32(num_tokens))  # the pads: request R
    tiles = tile_work_list(ends, num_tokens)
    block = _block_channels(channels, x.dtype)

    conv_ref = jax.new_ref(conv_pool)
    kernel = pl.kernel(
        functools.partial(_kernel, block=block, num_requests=num_requests),
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
):
    tile = lax.axis_index("tile")
    channels = pl.ds(lax.axis_index("block") * block, block)
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=block // THREADS)

    def zeros():
        return plgpu.layout_cast(jnp.zeros((block,), y_ref.dtype), layout)

    def load_token(token):
        return plgpu.load(x_ref.at[token, channels], layout=layout)

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
            return tuple(plgpu.load(pool_ref.at[layer, slot, place, channels], layout=layout) for place in range(3))

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

        taps = [plgpu.load(weight_ref.at[tap, channels], layout=layout).astype(jnp.float32) for tap in range(4)]
        last = start + length - 1

        @pl.loop(0, pl.cdiv(length, UNROLL), init_carry=window)
        def _(step, window):
            begin = start + step * UNROLL
            rows = [*window, *(load_token(jnp.minimum(begin + i, last)) for i in range(UNROLL))]
            wide = [row.astype(jnp.float32) for row in rows]
            for i in range(UNROLL):
                total = wide[i] * taps[0]
                for tap in range(1, 4):
                    total = total + wide[i + tap] * taps[tap]
                y = silu_twice_rounded(total, y_ref.dtype, packed=False)

                @pl.when(begin + i <= last)
                def _(token=begin + i, y=y):
                    y_ref[token, channels] = y

            return tuple(rows[-3:])


def silu_twice_rounded(total, dtype, *, packed: bool = True):
    """``silu`` of float32 numbers rounded to a dtype, rounded again.

    ``1 / d`` as ``rsqrt(d)^2`` is two instructions, as exact as float32, where a division takes a dozen.

    Args:
        total: f32, in registers.
        dtype: of the results.
        packed: round two numbers of 16 bits in one instruction. The barrier makes the compiler do it: left alone, it
            rounds one by one, since each is widened again, on the unit that also has the exponential.
    """
    rounded = total.astype(dtype)
    if packed and jnp.dtype(dtype).itemsize == 2:
        rounded = lax.optimization_barrier(rounded)
    x = rounded.astype(jnp.float32)
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return (x * (root * root)).astype(dtype)


def pick(tail, place):
    """Row ``place`` (0, 1 or 2, a traced scalar) of a tail held in registers."""
    return jnp.where(place == 0, tail[0], jnp.where(place == 1, tail[1], tail[2]))


def _block_channels(channels: int, dtype) -> int:
    """Channels of a block: as many a thread as one wide load brings, and a divisor of all."""
    block = THREADS * THREAD_BYTES // jnp.dtype(dtype).itemsize
    while channels % block:
        block //= 2
    return block
