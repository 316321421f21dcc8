"""``causal_conv`` on Hopper, Pallas Mosaic GPU: strips of channels that stream through shared memory.

A block of one warpgroup owns a strip of channels and a span of the pack, and goes down its tokens, two channels a
thread, the three inputs before them in registers: every input is read once. The copy engine brings tiles of tokens
several stages ahead and takes the results back out of the same memory, so how much is under way does not depend on what
the threads do.

Tiles lie on a grid of the pack. One that belongs to a single request goes the fast way; one with the end of a request
in it, or with pads, is computed row by row and stored from registers. The block that has the first token of a request
also replaces its tail, and no block begins within the first three tokens of a request (the block before takes them
over), so that nobody else needs the old tail: one kernel, in place, without a race.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuned
from pallas_kernels.causal_conv import mosaic_rows
from pallas_kernels.causal_conv.mosaic_rows import pick, silu_twice_rounded
from pallas_kernels.gpu_support import require
from pallas_kernels.mosaic_layouts import THREADS, adjacent

COPY_BYTES = 16  # what the copy engine needs rows of an array to be a multiple of
SLOW_ROWS = 4  # that are in flight together where rows are stored from registers
MAX_STRIP = 256  # rows of a tile that the copy engine moves in one piece


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        rows: tokens of a tile, two at least: what a span takes over of the next one's first request lies in one tile.
        stages: tiles in shared memory.
        blocks: blocks of the grid, about; all should be resident at once.
        unroll: rows whose loads are in flight together; divides ``rows``.
    """

    rows: int = 32
    stages: int = 5
    blocks: int = 264
    unroll: int = 8

    def __post_init__(self):
        if not (2 <= self.rows <= 256 and self.stages >= 2 and self.blocks >= 1 and self.rows % self.unroll == 0):
            raise ValueError(f"no tiling of this kernel: {self}")


def tuning_key(arguments) -> tuned.Key:
    """Shapes that tuned tilings are found by."""
    tokens, channels = arguments["x"].shape[0], arguments["weight"].shape[1]
    return {"dtype": jnp.dtype(arguments["x"].dtype).name}, {"tokens": tokens, "channels": channels}


def supports(target, arguments) -> None:
    """What :func:`mosaic_rows.supports` says, and rows that the copy engine can address."""
    mosaic_rows.supports(target, arguments)
    row = arguments["x"].shape[1] * jnp.dtype(arguments["x"].dtype).itemsize
    require(row % COPY_BYTES == 0, f"takes rows in multiples of {COPY_BYTES} bytes, not {row}")


def causal_conv(
    x, weight, conv_pool, layer, slot_ids, has_state, cu_seqlens, *, tiling: Tiling | None = None, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.causal_conv`. The pool is a reference to the kernel: updated in place."""
    if tiling is None:
        tiling = tuned.settings(Tiling(), "causal_conv", "mosaic_stream", tuning_key({"x": x, "weight": weight}))
    num_tokens, channels = x.shape[0], weight.shape[1]
    strip = MAX_STRIP if channels % MAX_STRIP == 0 else THREADS
    strips = channels // strip
    rows = min(tiling.rows, num_tokens)
    tiles = pl.cdiv(num_tokens, rows)
    spans = max(1, min(tiling.blocks // strips, tiles))

    conv_ref = jax.new_ref(conv_pool)
    kernel = pl.kernel(
        functools.partial(
            _kernel,
            strip=strip,
            rows=rows,
            stages=tiling.stages,
            unroll=tiling.unroll if rows % tiling.unroll == 0 else 1,
            spans=spans,
            num_requests=slot_ids.shape[0],
        ),
        out_type=[jax.ShapeDtypeStruct((num_tokens, channels), x.dtype)],
        mesh=plgpu.Mesh(grid=(strips, spans), grid_names=("strip", "span")),
        # Barriers are placed by hand, with commit_smem: what a thread reads and writes itself needs none.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
        ),
        interpret=interpret,
        name="causal_conv",
    )
    [y] = kernel(x, weight, layer[None], slot_ids, has_state.astype(jnp.int32), cu_seqlens, conv_ref)
    return y, jax.freeze(conv_ref)


class _Requests(NamedTuple):
    """The pack, as the kernel sees it; request R is the pads."""

    layer: Any  # [1]
    slot_ids: Any  # [R]
    has_state: Any  # [R]
    cu_seqlens: Any  # [R + 1]
    count: int
    num_tokens: int

    def begin(self, request):
        return self.cu_seqlens[request]

    def end(self, request):
        """Also where the next one begins."""
        following = self.cu_seqlens[jnp.minimum(request + 1, self.count)]
        return jnp.where(request == self.count, self.num_tokens, following)

    def of(self, token):
        """The request of a token: how many end at or before it, by bisection."""
        found = jnp.int32(0)
        for bit in reversed(range(self.count.bit_length())):
            probe = found + (1 << bit)
            passed = (probe <= self.count) & (self.cu_seqlens[jnp.minimum(probe, self.count)] <= token)
            found = jnp.where(passed, probe, found)
        return found

    def edge(self, token):
        """Where a span begins that should begin at a token: behind a request's second and third, never at them."""
        request = self.of(token)
        begin, end = self.begin(request), self.end(request)
        inside = (request < self.count) & (token > begin) & (token < begin + 3)
        return jnp.where(inside, jnp.minimum(begin + 3, end), token)


def _kernel(
    x_ref,  # [T, C or more]
    weight_ref,  # [4, C]
    layer_ref,  # [1]
    slot_ids_ref,  # [R]
    has_state_ref,  # [R]
    cu_seqlens_ref,  # [R + 1]
    pool_ref,  # [L, S, 3, C]
    y_ref,  # [T, C]
    *,
    strip: int,
    rows: int,
    stages: int,
    unroll: int,
    spans: int,
    num_requests: int,
):
    num_tokens = y_ref.shape[0]
    requests = _Requests(layer_ref, slot_ids_ref, has_state_ref, cu_seqlens_ref, num_requests, num_tokens)
    channels = pl.ds(lax.axis_index("strip") * strip, strip)
    layout = adjacent(strip)

    def body(tiles_ref, loaded):
        _span(
            x_ref,
            weight_ref,
            pool_ref,
            y_ref,
            tiles_ref,
            loaded,
            requests,
            channels,
            layout,
            unroll=unroll,
            spans=spans,
        )

    pl.run_scoped(body, plgpu.SMEM((stages, rows, strip), y_ref.dtype), plgpu.Barrier(num_barriers=stages))


def _span(
    x_ref, weight_ref, pool_ref, y_ref, tiles_ref, loaded, requests: _Requests, channels, layout, *, unroll, spans
):
    """A span of tiles of a strip."""
    num_tokens, dtype = requests.num_tokens, y_ref.dtype
    stages, rows, strip = tiles_ref.shape
    num_tiles = pl.cdiv(num_tokens, rows)
    span = lax.axis_index("span")
    first_tile, last_tile = lax.div(span * num_tiles, spans), lax.div((span + 1) * num_tiles, spans)
    own = last_tile - first_tile

    def base(index):
        """First token of the window of a tile: the last one of the pack may begin before its tile does."""
        return jnp.minimum((first_tile + index) * rows, num_tokens - rows)

    def fetch(index):
        stage = lax.rem(index, stages)
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(base(index), rows), channels], tiles_ref.at[stage], loaded.at[stage])

    for index in range(stages):
        pl.when(index < own)(functools.partial(fetch, jnp.int32(index)))

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False)

    def zeros():
        return plgpu.layout_cast(jnp.zeros((strip,), dtype), layout)

    taps = [load(weight_ref.at[tap, channels]).astype(jnp.float32) for tap in range(4)]
    start = requests.edge(first_tile * rows)
    whole_end = jnp.minimum(last_tile * rows, num_tokens)
    stop = requests.edge(whole_end)
    count = own + (stop > whole_end).astype(jnp.int32)  # the first tokens of a request may lie in one tile more
    pl.when((count > own) & (own < stages))(lambda: fetch(own))

    def convolve(window, row):
        """A row of results and the window of the next row."""
        wide = [*window, row.astype(jnp.float32)]
        total = wide[0] * taps[0]
        for tap in range(1, 4):
            total = total + wide[tap] * taps[tap]
        return silu_twice_rounded(total, dtype, packed=strip > THREADS), tuple(wide[1:])

    def enter(request):
        """The window before a request's first token; its tail is replaced."""
        begin, end = requests.begin(request), requests.end(request)
        tail_ref = pool_ref.at[requests.layer[0], requests.slot_ids[request]]
        old = [load(tail_ref.at[place, channels]) for place in range(3)]
        recent = [load(x_ref.at[jnp.maximum(end - 3 + place, begin), channels]) for place in range(3)]
        has_state = requests.has_state[request] != 0
        old = [jnp.where(has_state, row, zeros()) for row in old]
        for place in range(3):  # rows total - 3 .. total - 1 of [old tail; piece], total = 3 + tokens of the piece
            from_tail = pick(old, end - begin + place)
            tail_ref[place, channels] = jnp.where(end - 3 + place >= begin, recent[place], from_tail)
        return tuple(row.astype(jnp.float32) for row in old)

    def one_tile(index, carry):
        request, *window = carry
        stage = lax.rem(index, stages)
        grid = (first_tile + index) * rows
        low, high = jnp.maximum(grid, start), jnp.minimum(grid + rows, stop)
        last = lax.cond(requests.end(request) >= high, lambda: request, lambda: requests.of(high - 1))
        plgpu.barrier_wait(loaded.at[stage])

        def fast(window):
            def some_rows(step, window):
                places = [step * unroll + row for row in range(unroll)]
                for place, row in zip(places, [load(tiles_ref.at[stage, place]) for place in places], strict=True):
                    tiles_ref[stage, place], window = convolve(window, row)
                return window

            window = lax.fori_loop(0, rows // unroll, some_rows, window)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tiles_ref.at[stage], y_ref.at[pl.ds(low, rows), channels])
            return window

        def slow(window, begin, end):
            def some_rows(first, number, window):
                tokens = [first + row for row in range(number)]
                inputs = [load(tiles_ref.at[stage, token - base(index)]) for token in tokens]
                for token, row in zip(tokens, inputs, strict=True):
                    y_ref[token, channels], window = convolve(window, row)
                return window

            groups = lax.div(end - begin, SLOW_ROWS)
            window = lax.fori_loop(
                0, groups, lambda group, window: some_rows(begin + group * SLOW_ROWS, SLOW_ROWS, window), window
            )
            return lax.fori_loop(
                begin + groups * SLOW_ROWS, end, lambda token, window: some_rows(token, 1, window), window
            )

        def one_request(request, window):
            begin, end = jnp.maximum(requests.begin(request), low), jnp.minimum(requests.end(request), high)
            real = (begin < end) & (request < requests.count)
            window = lax.cond(
                real & (begin == requests.begin(request)), lambda window: enter(request), lambda window: window, window
            )

            @pl.when((begin < end) & (request == requests.count))
            def _():
                @pl.loop(begin, end)
                def _(token):
                    y_ref[token, channels] = zeros()

            rows_now = jnp.where(real & (end - begin < rows), end, begin)
            window = slow(window, begin, rows_now)
            return lax.cond(real & (end - begin == rows), fast, lambda window: window, window)

        window = lax.fori_loop(request, last + 1, one_request, tuple(window))

        # The stage of the tile before this one is free once the copy engine has read it.
        following = index - 1 + stages
        refill = (index > 0) & (following < count)
        whole = (high - low == rows) & (last < requests.count) & (requests.begin(last) <= low)

        @pl.when(refill & whole)
        def _():
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            fetch(following)

        @pl.when(refill & jnp.logical_not(whole))
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch(following)

        return (last, *window)

    before = tuple(load(x_ref.at[jnp.maximum(start - 3 + place, 0), channels]) for place in range(3))
    window = tuple(row.astype(jnp.float32) for row in before)
    lax.fori_loop(0, count, one_tile, (requests.of(start), *window))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory must outlive the copies
