"""``swiglu_product`` on Hopper, Pallas Mosaic GPU: a warp-specialised product whose accumulators never leave registers.

A block computes a tile of tokens and of hidden columns, then its next tile. A tile's gate and up columns come from the
two halves of the weight by copies of their own and meet in one accumulator, so each thread has gate and up of the same
numbers and the activation is a matter of registers. Two warpgroups multiply, half of the rows each; a third brings
tokens and weight by the copy engine, several steps of the inner dimension ahead, and does not stop where a tile ends:
the first steps of the next tile arrive while the activation of this one is computed.

Tiles are taken in groups of row blocks, down the rows of a group first, so that what all blocks read at one time is few
distinct rows and columns. With clusters, two blocks have the same columns and neighbouring rows, and each brings half
of the weight for both. Tiles that fill the last wave by half or less are cut in two, left and right half of their
columns, and that wave takes half the time.

Learned from CUTLASS's persistent cooperative kernels for Hopper and JAX's ``pallas.ops.gpu.hopper_matmul_mgpu``. See
NOTES.md beside this.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuned
from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.numerics import silu_by_root
from pallas_kernels.swiglu_product.mosaic_products import DEPTH, STRIP, SWIZZLED, Emulated, One, Two

WARPGROUPS = 2  # that multiply
COLUMNS = 128  # hidden columns of a tile at the most
ALIGNMENT = 8  # rows, which the copy engine moves in eights
SHARED_BYTES = 226 * 1024  # for stages and results: what a block can have on Hopper, less a kilobyte for barriers


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        wide: of a tile: 1: 128 rows and 128 hidden columns, 2: 256 rows and 64 columns; a hidden column is a gate and
            an up column of the weight.
        stages: steps of the inner dimension in shared memory.
        products: of a step: 1 for gate and up together, or 2.
        start: step of the first warpgroup with which the second begins a tile: one has the tensor cores while the other
            computes its activation. At 1 they begin together.
        pairs: numbers that share a reciprocal, 1 or 2.
        cluster: blocks that share each step's weight.
        group: row blocks, of all blocks of a cluster, that are taken together before the columns move on.
        blocks: blocks of the grid; more than the GPU has multiprocessors wait.
        tail: 2: tiles of the last wave are cut in two if they fill the grid by half or less, for which their weight
            must lie in strips (``products`` and ``wide`` at 1); 1: never.
    """

    wide: int = 1
    stages: int = 4
    products: int = 1
    start: int = 1
    pairs: int = 2
    cluster: int = 2
    group: int = 8
    blocks: int = 132
    tail: int = 2

    def __post_init__(self):
        known = all(value in (1, 2) for value in (self.wide, self.products, self.pairs, self.cluster, self.tail))
        if not (known and 1 <= self.start <= self.stages and self.stages >= 2 and self.group >= 1):
            raise ValueError(f"no tiling of this kernel: {self}")
        if self.blocks < self.cluster:
            raise ValueError(f"{self.blocks} blocks are no cluster of {self.cluster}")

    @property
    def rows(self) -> int:
        """Tokens of a tile."""
        return 128 * self.wide

    @property
    def columns(self) -> int:
        """Hidden columns of a tile."""
        return 128 // self.wide

    @property
    def whole(self) -> bool:
        """Whether what becomes of a tile's halves, in ``pairs`` or in the last wave, is whole strips."""
        return self.wide * max(self.pairs, self.tail) <= 2 and self.products * self.tail <= 2

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of a block, less its barriers."""
        stage = (self.rows + 2 * self.columns) * DEPTH
        return (self.stages * stage + self.rows * self.columns) * itemsize


class Waves(NamedTuple):
    """Who takes how many of the tiles.

    Attributes:
        row_blocks: of all blocks of a cluster.
        column_blocks: of a tile each.
        whole: tiles that are taken as they are, the first ones.
        cut: tiles that are cut in two, the rest; there is a cluster for every half.
        clusters: of the grid.
    """

    row_blocks: int
    column_blocks: int
    whole: int
    cut: int
    clusters: int


def waves_of(tiling: Tiling, num_tokens: int, hidden: int) -> Waves:
    """How results [``num_tokens``, ``hidden``] are taken; tiles are cut only where the last wave gets shorter."""
    row_blocks, column_blocks = pl.cdiv(num_tokens, tiling.rows * tiling.cluster), hidden // tiling.columns
    tiles, clusters = row_blocks * column_blocks, tiling.blocks // tiling.cluster
    left = tiles % clusters
    if tiling.tail == 2 and 0 < 2 * left <= clusters:
        return Waves(row_blocks, column_blocks, tiles - left, left, clusters if tiles > left else 2 * left)
    return Waves(row_blocks, column_blocks, tiles, 0, min(clusters, tiles))


def tuning_key(arguments) -> tuned.Key:
    """Shapes that tuned tilings are found by."""
    (tokens, width), doubled = arguments["x"].shape, arguments["weight"].shape[1]
    exact = {"dtype": jnp.dtype(arguments["x"].dtype).name}
    return exact, {"tokens": tokens, "width": width, "hidden": doubled // 2}


def supports(target, arguments) -> None:
    """Hopper, 16-bit activations, a width of whole steps, hidden columns of whole tiles."""
    require_nvidia(target, at_least=(9, 0), before=(10, 0))  # wgmma is Hopper's alone
    (tokens, width), doubled = arguments["x"].shape, arguments["weight"].shape[1]
    dtype = arguments["x"].dtype
    require(dtype.itemsize == 2, f"takes 16-bit activations, not {dtype}")
    require(width % DEPTH == 0 and width > 0, f"takes widths in multiples of {DEPTH}, not {width}")
    whole = doubled % (2 * COLUMNS) == 0 and doubled > 0
    require(whole, f"takes hidden sizes in multiples of {COLUMNS}, not {doubled / 2:g}")
    require(tokens > 0, "takes at least one token")
    largest = max(tokens * width, tokens * doubled // 2, width * doubled)
    require(largest < 2**31, f"an array of {largest} numbers is past int32")


def swiglu_product(x, weight, *, tiling: Tiling | None = None, interpret=False) -> jax.Array:
    """See :func:`pallas_kernels.swiglu_product`."""
    if tiling is None:
        key = tuning_key({"x": x, "weight": weight})
        tiling = tuned.settings(Tiling(), "swiglu_product", "mosaic_sm90", key)
    num_tokens, hidden = x.shape[0], weight.shape[1] // 2
    padding = -num_tokens % ALIGNMENT  # none in a bucket of the engine
    if padding:
        x = jnp.pad(x, ((0, padding), (0, 0)))
    if not tiling.whole:
        raise ValueError(f"no tiling of this kernel: halves of a tile are no whole strips: {tiling}")
    cluster, waves = tiling.cluster, waves_of(tiling, x.shape[0], hidden)
    kernel = pl.kernel(
        functools.partial(_kernel, tiling=tiling, waves=waves, emulate=bool(interpret)),
        out_type=[jax.ShapeDtypeStruct((x.shape[0], hidden), x.dtype)],
        mesh=plgpu.Mesh(
            grid=(waves.clusters,),
            grid_names=("cluster",),
            cluster=(cluster,) if cluster > 1 else (),
            cluster_names=("block",) if cluster > 1 else (),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        interpret=interpret,
        name="gate_up_swiglu",  # profiles know a kernel without a scope by its name
    )
    [out] = kernel(x, weight)
    return out[:num_tokens] if padding else out


class _Memory(NamedTuple):
    """Shared memory and barriers of a block."""

    tokens: Any  # [stages, rows, DEPTH]
    weights: Any  # [stages, pieces, DEPTH, columns of a piece]: pieces of the gate, then of the up columns
    results: Any  # [WARPGROUPS, parts, rows of one, columns of a part]: parts are what tiles may be cut in
    full: Any  # a barrier a stage
    free: Any
    turn: Any  # the second warpgroup may begin its tile


class _Tile(NamedTuple):
    """What a block has to do at one time.

    Attributes:
        row: first row.
        column: first column.
        used: steps of this block before it.
        share: 1, or 2 for half a tile.
    """

    row: Any
    column: Any
    used: Any
    share: int


def _kernel(x_ref, weight_ref, out_ref, *, tiling: Tiling, waves: Waves, emulate: bool):
    """See :func:`swiglu_product`; x [M, D], weight [D, 2F], out [M, F]."""
    dtype, hidden = x_ref.dtype, out_ref.shape[1]
    rows, columns, stages, cluster = tiling.rows, tiling.columns, tiling.stages, tiling.cluster
    shared = "block" if cluster > 1 else None
    steps = x_ref.shape[1] // DEPTH
    # With fewer steps than stages the first warpgroup could be a whole tile ahead, and give two turns for one.
    lag = tiling.start - 1 if steps >= stages else 0
    piece = columns if tiling.products == 2 else STRIP
    pieces, parts = 2 * columns // piece, 2 if waves.cut else 1
    products = Emulated if emulate else Two if tiling.products == 2 else One

    def body(*memory):
        memory = _Memory(*memory)
        warpgroup, own = lax.axis_index("warpgroup"), lax.axis_index("cluster")
        block = lax.axis_index("block") if shared else 0
        clusters = jnp.int32(waves.clusters)

        def at(tile, half, used, share):
            row_block, column_block = _place(tile, waves.row_blocks, waves.column_blocks, tiling.group)
            column = column_block * columns + half * (columns // 2)
            return _Tile((row_block * cluster + block) * rows, column, used, share)

        def every_tile(of_tile):
            """``of_tile(_Tile)`` for what this block has to do, first what is whole; how many steps that are."""
            mine = lax.div(waves.whole - own + (clusters - 1), clusters)

            @pl.loop(0, mine)
            def _(number):
                of_tile(at(own + number * clusters, 0, number * steps, 1))

            used = mine * steps  # with tiles that are cut, as many for every block
            if not waves.cut:
                return used
            with_half = own < 2 * waves.cut

            @pl.when(with_half)
            def _():
                tile = lax.div(own, jnp.int32(2))
                of_tile(at(waves.whole + tile, own - 2 * tile, used, 2))

            return used + jnp.where(with_half, steps, 0)

        @pl.when(warpgroup < WARPGROUPS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            every_tile(lambda tile: _compute(out_ref, memory, tile, warpgroup, steps, products, lag, tiling.pairs))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory must outlive the copies

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            used = every_tile(lambda tile: _bring(x_ref, weight_ref, memory, tile, steps, hidden, shared))

            # No block leaves while its cluster still arrives at its barriers.
            for behind in range(stages, 0, -1):
                barrier = memory.free.at[lax.rem(used - behind + stages, jnp.int32(stages))]
                pl.when(used >= behind)(functools.partial(plgpu.barrier_wait, barrier))

    free = {"num_arrivals": WARPGROUPS, "num_barriers": stages}
    pl.run_scoped(
        body,
        plgpu.SMEM((stages, rows, DEPTH), dtype, transforms=SWIZZLED),
        plgpu.SMEM((stages, pieces, DEPTH, piece), dtype, transforms=SWIZZLED),
        plgpu.SMEM((WARPGROUPS, parts, rows // WARPGROUPS, columns // parts), dtype, transforms=SWIZZLED),
        plgpu.Barrier(num_arrivals=1 + pieces, num_barriers=stages),
        plgpu.ClusterBarrier(collective_axes=(shared,), **free) if shared else plgpu.Barrier(**free),
        plgpu.Barrier(),
        collective_axes="warpgroup",
    )


def _place(tile, row_blocks: int, column_blocks: int, group: int):
    """Row block and column block of a tile: groups of row blocks, in each the rows first."""
    whole = jnp.int32(group * column_blocks)
    number = lax.div(tile, whole)
    within = tile - number * whole
    height = jnp.minimum(group, row_blocks - number * group)
    column = lax.div(within, height)
    return number * group + within - column * height, column


def _weights(memory: _Memory, stage, share: int):
    """The weight in a stage; of half a tile, the first half of the strips."""
    if share == 1:
        return memory.weights.at[stage]
    return memory.weights.at[stage, pl.ds(0, memory.weights.shape[1] // share)]


def _bring(x_ref, weight_ref, memory: _Memory, tile: _Tile, steps, hidden, shared):
    """The third warpgroup: tokens and weight of every step of a tile.

    The weight of half a tile is as many copies, which barriers count: strips come in two pieces of the inner dimension.
    """
    stages, rows, _ = memory.tokens.shape
    _, pieces, _, columns = memory.weights.shape
    pieces, depth = pieces // tile.share, DEPTH // tile.share

    @pl.loop(0, steps)
    def _(step):
        number = tile.used + step
        stage, first = lax.rem(number, jnp.int32(stages)), step * DEPTH
        full, weights = memory.full.at[stage], _weights(memory, stage, tile.share)
        pl.when(number >= stages)(functools.partial(plgpu.barrier_wait, memory.free.at[stage]))
        tokens = x_ref.at[pl.ds(tile.row, rows), pl.ds(first, DEPTH)]
        plgpu.copy_gmem_to_smem(tokens, memory.tokens.at[stage], full)
        for piece in range(pieces):
            half, strip = divmod(piece, pieces // 2)
            source_columns = pl.ds(half * hidden + strip * columns + tile.column, columns)
            for inner in range(0, DEPTH, depth):
                source = weight_ref.at[pl.ds(first + inner, depth), source_columns]
                target = weights.at[piece] if depth == DEPTH else weights.at[piece, pl.ds(inner, depth)]
                plgpu.copy_gmem_to_smem(source, target, full, collective_axes=shared)


def _compute(out_ref, memory: _Memory, tile: _Tile, warpgroup, steps, products, lag, pairs):
    """One of the first two warpgroups: its rows of a tile."""
    stages = memory.tokens.shape[0]
    _, parts, height, width = memory.results.shape
    own, parts = pl.ds(warpgroup * height, height), parts // tile.share

    def stage_of(step):
        return lax.rem(tile.used + step, jnp.int32(stages))

    def before(step):
        plgpu.barrier_wait(memory.full.at[stage_of(step)])

    def after(step):
        plgpu.barrier_arrive(memory.free.at[stage_of(step)])
        if isinstance(step, int) and step == lag - 1:  # in front of the loop, which so stays free of branches
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_arrive(memory.turn))

    if lag:
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_wait(memory.turn))
    gate, up = products.sums(
        height,
        parts * width,
        steps,
        1 + lag,
        lambda step: memory.tokens.at[stage_of(step), own],
        lambda step: _weights(memory, stage_of(step), tile.share),
        before,
        after,
    )
    after(steps - 1)
    results = _activation(products, gate, up, pairs=pairs if tile.share == 1 else 1)  # no strip is cut
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the result of the tile before has left
    if len(results) < parts:
        results = products.halves(*results)
    for number, result in enumerate(results):
        part, inside = (number, 0) if parts == 2 else (0, number * result.shape[1])
        memory.results[warpgroup, part, :, pl.ds(inside, result.shape[1])] = result.astype(out_ref.dtype)
    plgpu.commit_smem()
    rows = pl.ds(tile.row + warpgroup * height, height)
    for part in range(parts):
        destination = out_ref.at[rows, pl.ds(tile.column + part * width, width)]
        plgpu.copy_smem_to_gmem(memory.results.at[warpgroup, part], destination)


def _activation(products, gate, up, *, pairs: int) -> list:
    """Results of all columns, or of the left and of the right ones."""
    if pairs == 1:
        return [silu_by_root(gate) * up]
    gates, ups = products.halves(gate), products.halves(up)
    return [silu * up for silu, up in zip(_two_silus(*gates), ups, strict=True)]


def _two_silus(x, y):
    """One reciprocal for two: the unit for special functions is what the activation waits for.

    Exponents are held at 2^60, so that the product of two stays a number: a SiLU below 1e-17 in size is too large then.
    """
    one, other = (1.0 + jnp.exp2(jnp.minimum(number * -math.log2(math.e), 60.0)) for number in (x, y))
    root = lax.rsqrt(one * other)
    both = root * root
    return x * (both * other), y * (both * one)
