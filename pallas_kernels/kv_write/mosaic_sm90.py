"""``kv_write`` on Hopper, Pallas Mosaic GPU: tiles of one head that stream through shared memory.

The work is a list of tiles, some tokens of one head each, heads of the same tokens after one another: queries, keys,
values. A block of one warpgroup owns a span of the list. The copy engine brings its tiles several stages ahead and
takes the results back out of the same memory, queries to their array and keys and values to their pages: how much is
under way does not depend on what the threads do. What the heads of some tokens have in common (sines and cosines, their
places in the pool) is made once for those of a span.

A row lies in eight lanes and both numbers that rotate into one another in one of them, so a row is normalised with
three shuffles and rotated with none. Values are not looked at: they go from shared memory to the pool.

Eight tokens in a row of one page are one copy. Where a page or a request ends inside of eight, or pads begin, they are
stored row by row from registers. Pads write nothing into the pool, and zeros to their queries.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuned
from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.mosaic_layouts import ROW_LANES, ROWS, adjacent, in_every_column, in_every_row, rows_of

FEWEST_TOKENS = 512
"""Fewer go to another kernel if nobody names one: they are a matter of latency, and blocks of a tile would be few."""

HALF_VECTOR = 4  # numbers of a lane in each half that rotates
RUN = 8  # tokens of one copy to a page
MAX_WIDTH = 256  # numbers that the copy engine moves in one row
ACCESS_BYTES = 16  # of a lane


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        rows: tokens of a tile, a multiple of 16.
        stages: tiles in shared memory.
        blocks: blocks of the grid, at most; all should be resident at once.
    """

    rows: int = 32
    stages: int = 5
    blocks: int = 264

    def __post_init__(self):
        if not (0 < self.rows <= 64 and self.rows % ROWS == 0 and self.stages >= 2 and self.blocks >= 1):
            raise ValueError(f"no tiling of this kernel: {self}")


def tuning_key(arguments) -> tuned.Key:
    """Shapes that tuned tilings are found by."""
    heads, kv_heads = arguments["heads"], arguments["kv_pool"].shape[3]
    exact = {"dtype": jnp.dtype(heads.dtype).name, "head_dim": heads.shape[2]}
    return exact, {"tokens": heads.shape[0], "heads": arguments["num_heads"] + 2 * kv_heads}


def supports(target, arguments) -> None:
    """Hopper or newer, 16 tokens at least, heads and rotations whose parts fill the lanes of a row."""
    require_nvidia(target, at_least=(9, 0))
    heads, pool, rotary_dim = arguments["heads"], arguments["kv_pool"], arguments["rotary_dim"]
    num_tokens, _, head_dim = heads.shape
    require(num_tokens >= ROWS, f"takes at least {ROWS} tokens, not {num_tokens}")
    halves, rest = 2 * ROW_LANES * HALF_VECTOR, ROW_LANES * _vector(heads.dtype)
    require(
        head_dim in (128, MAX_WIDTH) and rotary_dim % halves == 0 and (head_dim - rotary_dim) % rest == 0,
        f"takes heads of 128 or {MAX_WIDTH} with rotated dims in {halves}s and others in {rest}s, "
        f"not {head_dim} with {rotary_dim} rotated",
    )
    require(pool.shape[4] >= RUN, f"takes pages of at least {RUN} tokens, not {pool.shape[4]}")
    rows = pool.size // (pool.shape[4] * head_dim)
    require(rows < 2**31, f"{rows} pages of heads are past int32")


def auto_supports(target, arguments) -> None:
    """Declines the few tokens of a decode step, which it takes if it is named."""
    del target
    num_tokens = arguments["heads"].shape[0]
    require(num_tokens >= FEWEST_TOKENS, f"is for {FEWEST_TOKENS} tokens and more, not {num_tokens}")


def kv_write(
    heads,
    q_norm,
    k_norm,
    kv_pool,
    layer,
    page_ids,
    page_offsets,
    positions,
    *,
    num_heads,
    rotary_dim,
    rope_theta,
    eps,
    tiling: Tiling | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.kv_write`. The pool is a reference to the kernel: updated in place."""
    num_tokens, _, head_dim = heads.shape
    num_kv_heads = kv_pool.shape[3]
    if tiling is None:
        key = tuning_key({"heads": heads, "kv_pool": kv_pool, "num_heads": num_heads})
        tiling = tuned.settings(Tiling(), "kv_write", "mosaic_sm90", key)
    rows = min(tiling.rows, num_tokens // ROWS * ROWS)
    tiles = pl.cdiv(num_tokens, rows) * (num_heads + 2 * num_kv_heads)
    span = pl.cdiv(tiles, tiling.blocks)  # and no more blocks than need it: spans then often are whole groups of heads
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    inverse_frequencies = jnp.asarray((1.0 / rope_theta**exponents).astype(np.float32))

    pool_ref = jax.new_ref(kv_pool)
    queries = jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), heads.dtype)
    kernel = pl.kernel(
        functools.partial(
            _kernel,
            rows=rows,
            stages=tiling.stages,
            span=span,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            eps=eps,
        ),
        out_type=[queries] if num_heads else [],
        mesh=plgpu.Mesh(grid=(pl.cdiv(tiles, span),), grid_names=("block",)),
        # Barriers are placed by hand, with commit_smem: what a thread reads and writes itself needs none.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        name="kv_write",
    )
    norms = (norm.reshape(-1, head_dim) for norm in (q_norm, k_norm))
    q_out = kernel(heads, *norms, inverse_frequencies, layer[None], page_ids, page_offsets, positions, pool_ref)
    return q_out[0] if num_heads else jnp.zeros(queries.shape, queries.dtype), jax.freeze(pool_ref)


def _vector(dtype) -> int:
    """Numbers of a lane in one access of the dims that do not rotate."""
    return ACCESS_BYTES // jnp.dtype(dtype).itemsize


class _Parts(NamedTuple):
    """The columns of a head: two halves that rotate into one another, and the rest, if any; with their layouts."""

    columns: tuple[Any, ...]
    layouts: tuple[Any, ...]

    @classmethod
    def of(cls, head_dim: int, half: int, dtype) -> _Parts:
        turning, resting = rows_of(HALF_VECTOR), rows_of(_vector(dtype))
        parts = [(pl.ds(0, half), turning), (pl.ds(half, half), turning)]
        if head_dim > 2 * half:
            parts.append((pl.ds(2 * half, head_dim - 2 * half), resting))
        return cls(*zip(*parts, strict=True))


class _Tokens(NamedTuple):
    """What the heads of a tile's tokens have in common.

    Attributes:
        first: the first token.
        turns: cosines and sines, f32[16, half] each, of each 16 tokens.
        real: bool[16] of each 16 tokens, False for pads.
        runs: i32, bit i says that the i-th eight tokens follow one another in a page.
        padded: bool, there are pads.
    """

    first: Any
    turns: list[tuple[jax.Array, jax.Array]]
    real: list[jax.Array]
    runs: Any
    padded: Any


def _kernel(
    heads_ref,  # [T, 2 N + 2 K, H]
    q_norm_ref,  # [1 or L, H]
    k_norm_ref,
    inverse_frequencies_ref,  # [half]
    layer_ref,  # [1]
    page_ids_ref,  # [T]
    page_offsets_ref,
    positions_ref,
    pool_ref,  # [L, P, 2, K, Z, H]
    q_out_ref=None,  # [T, N, H] if there are queries
    *,
    rows: int,
    stages: int,
    span: int,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
):
    num_tokens, _, head_dim = heads_ref.shape
    half = inverse_frequencies_ref.shape[0]
    layer = layer_ref[0]
    parts = _Parts.of(head_dim, half, heads_ref.dtype)
    whole_row = adjacent(head_dim)
    a_token = num_heads + 2 * num_kv_heads  # tiles of the same tokens
    tiles = pl.cdiv(num_tokens, rows) * a_token
    begin = lax.axis_index("block") * span
    end = jnp.minimum(begin + span, tiles)

    def first_token(group):
        """Of a group of tokens: the last one may begin before the one before it ends, and both write the same."""
        return jnp.minimum(group * rows, num_tokens - rows)

    def body(tiles_ref, loaded, scales_ref, places_ref):
        def fetch(tile):
            stage = lax.rem(tile - begin, stages)
            head = lax.rem(tile, a_token)
            column = jnp.where(head < num_heads, head, head + num_heads)  # behind the queries come the gates
            source = heads_ref.at[pl.ds(first_token(lax.div(tile, a_token)), rows), column]
            plgpu.copy_gmem_to_smem(source, tiles_ref.at[stage], loaded.at[stage])

        for index in range(stages):
            pl.when(begin + index < end)(functools.partial(fetch, begin + index))

        for index, norm_ref in enumerate((q_norm_ref, k_norm_ref)):
            row = layer if norm_ref.shape[0] > 1 else 0
            scales_ref[index] = 1.0 + plgpu.load(norm_ref.at[row], layout=whole_row, optimized=False)

        def tokens_of(group) -> _Tokens:
            first = first_token(group)
            return _tokens(
                first,
                rows,
                parts.layouts[0],
                inverse_frequencies_ref,
                page_ids_ref,
                page_offsets_ref,
                positions_ref,
                places_ref,
            )

        def normalise(stage, kind, tokens: _Tokens):
            """A tile of queries (kind 0) or keys (1), in place."""
            scales = [
                plgpu.load(scales_ref.at[kind, columns], layout=layout.reduce(0), optimized=False)
                for columns, layout in zip(*parts, strict=True)
            ]
            for number, (cos, sin) in enumerate(tokens.turns):
                tile_ref = tiles_ref.at[stage, pl.ds(number * ROWS, ROWS)]
                for columns, part in zip(
                    parts.columns, _normed_and_rotated(tile_ref, parts, scales, cos, sin, eps), strict=True
                ):
                    tile_ref[:, columns] = part.astype(tiles_ref.dtype)

        def clear_pads(stage, tokens: _Tokens):
            for number, real in enumerate(tokens.real):
                tile_ref = tiles_ref.at[stage, pl.ds(number * ROWS, ROWS)]
                for columns, layout in zip(*parts, strict=True):
                    part = plgpu.load(tile_ref.at[:, columns], layout=layout, optimized=False)
                    keep = in_every_column(real, part.shape[1], layout)
                    tile_ref[:, columns] = jnp.where(keep, part, plgpu.layout_cast(jnp.zeros_like(part), layout))

        def to_pool(stage, kind, head, tokens: _Tokens):
            """A tile of keys (kind 0) or values (1): runs of tokens as copies, others row by row."""

            @pl.loop(0, rows // RUN)
            def _(run):
                start = run * RUN
                in_a_run = lax.bitwise_and(lax.shift_right_logical(tokens.runs, run), 1) != 0

                @pl.when(in_a_run)
                def _():
                    target = pool_ref.at[layer, places_ref[0, start], kind, head, pl.ds(places_ref[1, start], RUN)]
                    plgpu.copy_smem_to_gmem(tiles_ref.at[stage, pl.ds(start, RUN)], target, commit_group=False)

                @pl.when(jnp.logical_not(in_a_run))
                def _():
                    numbers = [start + number for number in range(RUN)]
                    loaded = [
                        plgpu.load(tiles_ref.at[stage, number], layout=whole_row, optimized=False) for number in numbers
                    ]
                    for number, row in zip(numbers, loaded, strict=True):
                        page, offset = places_ref[0, number], places_ref[1, number]

                        @pl.when(page != 0)
                        def _(page=page, offset=offset, row=row):
                            pool_ref[layer, page, kind, head, offset] = row

            plgpu.commit_smem_to_gmem_group()

        def one_tile(tile, tokens: _Tokens):
            head, stage = lax.rem(tile, a_token), lax.rem(tile - begin, stages)
            is_query = head < num_heads
            plgpu.barrier_wait(loaded.at[stage])

            @pl.when(head < num_heads + num_kv_heads)
            def _():
                normalise(stage, (head >= num_heads).astype(jnp.int32), tokens)

            if num_heads:

                @pl.when(is_query & tokens.padded)
                def _():
                    clear_pads(stage, tokens)

            plgpu.commit_smem()

            if num_heads:

                @pl.when(is_query)
                def _():
                    plgpu.copy_smem_to_gmem(tiles_ref.at[stage], q_out_ref.at[pl.ds(tokens.first, rows), head])

            @pl.when(jnp.logical_not(is_query))
            def _():
                kv_head = head - num_heads
                is_value = (kv_head >= num_kv_heads).astype(jnp.int32)
                to_pool(stage, is_value, kv_head - is_value * num_kv_heads, tokens)

            # The stage of the tile before this one is free once the copy engine has read it.
            following = tile - 1 + stages
            refill = (tile > begin) & (following < end)
            copied = is_query | (tokens.runs != 0)

            @pl.when(refill & copied)
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                fetch(following)

            @pl.when(refill & jnp.logical_not(copied))
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                fetch(following)

        @pl.loop(lax.div(begin, a_token), lax.div(end + a_token - 1, a_token))
        def _(group):
            tokens = tokens_of(group)

            @pl.loop(jnp.maximum(begin, group * a_token), jnp.minimum(end, (group + 1) * a_token))
            def _(tile):
                one_tile(tile, tokens)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory must outlive the copies

    pl.run_scoped(
        body,
        plgpu.SMEM((stages, rows, head_dim), heads_ref.dtype),
        plgpu.Barrier(num_barriers=stages),
        plgpu.SMEM((2, head_dim), jnp.float32),
        plgpu.SMEM((2, rows), jnp.int32),
    )


def _tokens(
    first, rows: int, layout, inverse_frequencies_ref, page_ids_ref, page_offsets_ref, positions_ref, places_ref
) -> _Tokens:
    """Computes what heads have in common; leaves pages and offsets in ``places_ref`` [2, rows]."""
    half = inverse_frequencies_ref.shape[0]
    frequencies = plgpu.load(inverse_frequencies_ref, layout=layout.reduce(0), optimized=False)
    frequencies = in_every_row(frequencies, ROWS, layout)
    turns, real, places = [], [], []
    for start in range(0, rows, ROWS):
        some = pl.ds(first + start, ROWS)
        pages, offsets, positions = (
            plgpu.load(ref.at[some], layout=layout.reduce(1), optimized=False)
            for ref in (page_ids_ref, page_offsets_ref, positions_ref)
        )
        places.append((pages, offsets))
        real.append(pages != 0)
        angles = in_every_column(positions.astype(jnp.float32), half, layout) * frequencies
        turns.append((jnp.cos(angles), jnp.sin(angles)))
    plgpu.commit_smem()  # nobody reads the places of other tokens any more
    for number, (pages, offsets) in enumerate(places):
        some = pl.ds(number * ROWS, ROWS)
        places_ref[0, some], places_ref[1, some] = pages, offsets
    plgpu.commit_smem()

    def look_at(run, found):
        runs, padded = found
        start = run * RUN
        page, offset = places_ref[0, start], places_ref[1, start]
        in_a_run, has_pads = page != 0, page == 0
        for number in range(1, RUN):
            this = places_ref[0, start + number]
            has_pads |= this == 0
            in_a_run &= (this == page) & (places_ref[1, start + number] == offset + number)
        return runs | lax.shift_left(in_a_run.astype(jnp.int32), run), padded | has_pads.astype(jnp.int32)

    runs, padded = lax.fori_loop(0, rows // RUN, look_at, (jnp.int32(0), jnp.int32(0)))
    return _Tokens(first, turns, real, runs, padded != 0)


def _normed_and_rotated(tile_ref, parts: _Parts, scales, cos, sin, eps: float) -> list[jax.Array]:
    """The parts of 16 rows of a head, float32."""
    loaded = [
        plgpu.load(tile_ref.at[:, columns], layout=layout, optimized=False).astype(jnp.float32)
        for columns, layout in zip(*parts, strict=True)
    ]
    squares = [loaded[0] * loaded[0] + loaded[1] * loaded[1], *(part * part for part in loaded[2:])]
    total = sum(jnp.sum(part, axis=1) for part in squares)
    inverse_rms = lax.rsqrt(total * (1 / tile_ref.shape[1]) + eps)
    first, second, *rest = (
        part * in_every_column(inverse_rms, part.shape[1], layout) * in_every_row(scale, ROWS, layout)
        for part, scale, layout in zip(loaded, scales, parts.layouts, strict=True)
    )
    return [first * cos - second * sin, second * cos + first * sin, *rest]
