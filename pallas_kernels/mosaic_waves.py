"""The frame of Mosaic kernels that multiply whole matrices on Hopper: a persistent grid that takes tiles in waves.

A block computes a tile of rows and columns, then its next tile. Two warpgroups multiply, half of the rows each; a third
brings rows and weight by the copy engine, several steps of the inner dimension ahead, and does not stop where a tile
ends: the first steps of the next tile arrive while this one is finished. Accumulators never leave registers before the
kernel has made results of them; those go through shared memory and leave by the copy engine, which clips what is past
the edges.

Tiles are taken in groups of row blocks, down the rows of a group first, so that what all blocks read at one time is few
distinct rows and columns. With clusters, two blocks have the same columns and neighbouring rows, and each brings half
of the weight for both. Tiles that fill the last wave by half or less may be cut in two, left and right half of their
columns: then that wave takes half the time.

Learned from CUTLASS's persistent cooperative kernels for Hopper and JAX's ``pallas.ops.gpu.hopper_matmul_mgpu``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_products import DEPTH, Apart, Emulated, Joined, swizzled

WARPGROUPS = 2  # that multiply
ALIGNMENT = 8  # rows, which the copy engine moves in eights
SHARED_BYTES = 226 * 1024  # for stages and results: what a block can have on Hopper, less a kilobyte for barriers


@dataclasses.dataclass(frozen=True)
class Frame:
    """Tiles of a kernel and who takes them.

    Attributes:
        rows: of a tile, 128 or 256.
        columns: of a tile's results.
        halves: of the weight, side by side: results come of the same columns of each; 1 or 2.
        joined: the weight lies in shared memory strip by strip (``mosaic_products.Joined``).
        strip: columns side by side in shared memory, 32 or 64.
        stages: steps of the inner dimension in shared memory.
        start: step of the first warpgroup with which the second begins a tile; at 1 they begin together.
        cluster: blocks that share each step's weight, 1 or 2.
        group: row blocks, of all blocks of a cluster, that are taken together before the columns move on.
        blocks: blocks of the grid at the most.
        tail: pieces that a tile of the last wave is cut in if that makes the wave shorter, 1 or 2; 1 if not joined.
    """

    rows: int
    columns: int
    halves: int
    joined: bool
    strip: int
    stages: int
    start: int
    cluster: int
    group: int
    blocks: int
    tail: int

    def __post_init__(self):
        if self.columns % (self.strip * self.tail) or (self.tail > 1 and not self.joined):
            raise ValueError(f"no tiling of this kernel: tiles, or what they are cut in, are no whole strips: {self}")

    @property
    def pieces(self) -> int:
        """Copies of a step's weight."""
        return self.halves * self.columns // self.strip if self.joined else self.halves

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of a block, less its barriers."""
        stage = (self.rows + self.halves * self.columns) * DEPTH
        return (self.stages * stage + self.rows * self.columns) * itemsize


class Waves(NamedTuple):
    """Who takes how many of the tiles.

    Attributes:
        row_blocks: of all blocks of a cluster.
        column_blocks: of a tile each.
        whole: tiles that are taken as they are, the first ones.
        clusters: of the grid.
    """

    row_blocks: int
    column_blocks: int
    whole: int
    clusters: int

    @property
    def cut(self) -> int:
        """Tiles that are cut into pieces; there is a cluster for every piece."""
        return self.row_blocks * self.column_blocks - self.whole


def waves_of(frame: Frame, num_rows: int, columns: int) -> Waves:
    """How a result of ``num_rows`` and ``columns`` is taken; cutting tiles up only where the last wave gets shorter."""
    row_blocks, column_blocks = pl.cdiv(num_rows, frame.rows * frame.cluster), pl.cdiv(columns, frame.columns)
    tiles, clusters = row_blocks * column_blocks, frame.blocks // frame.cluster
    left = tiles % clusters
    if left and 1 < frame.tail and frame.tail * left <= clusters:
        return Waves(row_blocks, column_blocks, tiles - left, clusters if tiles > left else frame.tail * left)
    return Waves(row_blocks, column_blocks, tiles, min(clusters, tiles))


def multiply(x, weight, frame: Frame, finish: Callable[..., list], *, name: str, interpret=False) -> jax.Array:
    """Results of ``x @ weight`` tile by tile.

    Args:
        x: [M, D], 16 bits, D in multiples of 64.
        weight: [D, halves * N], dtype of x; N in multiples of 8.
        frame: see there.
        finish: called with the class of products and f32[height, width] of each half of the weight; gives results
            f32 whose columns lie side by side: one result, or two of half the width.
        name: of the kernel.
        interpret: False, or parameters of the interpreter.

    Returns:
        [M, N], dtype of x.
    """
    num_rows, columns = x.shape[0], weight.shape[1] // frame.halves
    padding = -num_rows % ALIGNMENT  # none in a bucket of the engine
    if padding:
        x = jnp.pad(x, ((0, padding), (0, 0)))
    waves = waves_of(frame, x.shape[0], columns)
    products = Emulated if interpret else Joined if frame.joined else Apart
    kernel = pl.kernel(
        functools.partial(_kernel, frame=frame, waves=waves, products=products, finish=finish),
        out_type=[jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype)],
        mesh=plgpu.Mesh(
            grid=(waves.clusters,),
            grid_names=("cluster",),
            cluster=(frame.cluster,) if frame.cluster > 1 else (),
            cluster_names=("block",) if frame.cluster > 1 else (),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        interpret=interpret,
        name=name,
    )
    [out] = kernel(x, weight)
    return out[:num_rows] if padding else out


class _Memory(NamedTuple):
    """Shared memory and barriers of a block."""

    rows: Any  # [stages, rows, DEPTH]
    weights: Any  # [stages, pieces, DEPTH, columns of a piece]: pieces of the first half, then of the second
    results: Any  # [WARPGROUPS, tail, rows of one, columns / tail]
    full: Any  # a barrier a stage
    free: Any
    turn: Any  # the second warpgroup may begin its tile


class _Tile(NamedTuple):
    """What a block has to do at one time.

    Attributes:
        row: first row.
        column: first column.
        used: steps of this block before it.
        share: 1, or pieces that a tile is cut in, of which this is one.
    """

    row: Any
    column: Any
    used: Any
    share: int


def _kernel(x_ref, weight_ref, out_ref, *, frame: Frame, waves: Waves, products, finish):
    """See :func:`multiply`; x [M, D], weight [D, halves * N], out [M, N]."""
    dtype, rows, columns, stages, cluster = x_ref.dtype, frame.rows, frame.columns, frame.stages, frame.cluster
    shared = "block" if cluster > 1 else None
    steps = x_ref.shape[1] // DEPTH
    # With fewer steps than stages the first warpgroup could be a whole tile ahead, and give two turns for one.
    lag = frame.start - 1 if steps >= stages else 0

    def body(*memory):
        memory = _Memory(*memory)
        warpgroup, own = lax.axis_index("warpgroup"), lax.axis_index("cluster")
        block = lax.axis_index("block") if shared else 0
        clusters = jnp.int32(waves.clusters)

        def at(tile, piece, used, share):
            row_block, column_block = place(tile, waves.row_blocks, waves.column_blocks, frame.group)
            column = column_block * columns + piece * (columns // share)
            return _Tile((row_block * cluster + block) * rows, column, used, share)

        def every_tile(of_tile):
            """``of_tile(_Tile)`` for what this block has to do, first what is whole; how many steps that are."""
            used = 0
            if waves.whole:
                mine = lax.div(waves.whole - own + (clusters - 1), clusters)

                @pl.loop(0, mine)
                def _(number):
                    of_tile(at(own + number * clusters, 0, number * steps, 1))

                used = mine * steps
            if waves.cut:
                there = own < waves.cut * frame.tail
                before = waves.whole // waves.clusters * steps  # as many for every block

                @pl.when(there)
                def _():
                    tile = lax.div(own, jnp.int32(frame.tail))
                    of_tile(at(waves.whole + tile, own - tile * frame.tail, before, frame.tail))

                used = used + jnp.where(there, steps, 0)
            return used

        @pl.when(warpgroup < WARPGROUPS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            every_tile(lambda tile: _compute(out_ref, memory, frame, tile, warpgroup, steps, products, lag, finish))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory must outlive the copies

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            used = every_tile(lambda tile: _bring(x_ref, weight_ref, memory, frame, tile, steps, out_ref.shape[1]))

            # No block leaves while its cluster still arrives at its barriers.
            for behind in range(stages, 0, -1):
                barrier = memory.free.at[lax.rem(used - behind + stages, jnp.int32(stages))]
                pl.when(used >= behind)(functools.partial(plgpu.barrier_wait, barrier))

    width = frame.strip if frame.joined else columns
    free = {"num_arrivals": WARPGROUPS, "num_barriers": stages}
    transforms = swizzled(frame.strip)
    pl.run_scoped(
        body,
        plgpu.SMEM((stages, rows, DEPTH), dtype, transforms=transforms),
        plgpu.SMEM((stages, frame.pieces, DEPTH, width), dtype, transforms=transforms),
        plgpu.SMEM((WARPGROUPS, frame.tail, rows // WARPGROUPS, columns // frame.tail), dtype, transforms=transforms),
        plgpu.Barrier(num_arrivals=1 + frame.pieces, num_barriers=stages),
        plgpu.ClusterBarrier(collective_axes=(shared,), **free) if shared else plgpu.Barrier(**free),
        plgpu.Barrier(),
        collective_axes="warpgroup",
    )


def place(tile, row_blocks: int, column_blocks: int, group: int):
    """Row block and column block of a tile: groups of row blocks, in each the rows first."""
    whole = jnp.int32(group * column_blocks)
    number = lax.div(tile, whole)
    within = tile - number * whole
    height = jnp.minimum(group, row_blocks - number * group)
    column = lax.div(within, height)
    return number * group + within - column * height, column


def _stage(number, stages: int):
    """The stage of a step of a block; a plain number where the step is one."""
    return number % stages if isinstance(number, int) else lax.rem(number, jnp.int32(stages))


def _weights(memory: _Memory, stage, share: int):
    """The weight in a stage; of a tile that was cut, fewer strips."""
    if share == 1:
        return memory.weights.at[stage]
    return memory.weights.at[stage, pl.ds(0, memory.weights.shape[1] // share)]


def _bring(x_ref, weight_ref, memory: _Memory, frame: Frame, tile: _Tile, steps: int, half_columns: int):
    """The third warpgroup: rows and weight of every step of a tile.

    Whatever a tile is, its weight is the same number of copies, which barriers count: strips of a tile that was cut
    come in pieces of the inner dimension.
    """
    shared, share = ("block" if frame.cluster > 1 else None), tile.share
    _, pieces, _, width = memory.weights.shape
    pieces, depth = pieces // share, DEPTH // share

    @pl.loop(0, steps)
    def _(step):
        number = tile.used + step
        stage, first = _stage(number, frame.stages), step * DEPTH
        full, weights = memory.full.at[stage], _weights(memory, stage, share)
        pl.when(number >= frame.stages)(functools.partial(plgpu.barrier_wait, memory.free.at[stage]))
        rows = x_ref.at[pl.ds(tile.row, frame.rows), pl.ds(first, DEPTH)]
        plgpu.copy_gmem_to_smem(rows, memory.rows.at[stage], full)
        for piece in range(pieces):
            half, strip = divmod(piece, pieces // frame.halves)
            columns = pl.ds(half * half_columns + strip * width + tile.column, width)
            for inner in range(0, DEPTH, depth):
                source = weight_ref.at[pl.ds(first + inner, depth), columns]
                target = weights.at[piece] if depth == DEPTH else weights.at[piece, pl.ds(inner, depth)]
                plgpu.copy_gmem_to_smem(source, target, full, collective_axes=shared)


def _compute(out_ref, memory: _Memory, frame: Frame, tile: _Tile, warpgroup, steps, products, lag, finish):
    """One of the first two warpgroups: its rows of a tile."""
    height, columns = frame.rows // WARPGROUPS, frame.columns // tile.share
    own = pl.ds(warpgroup * height, height)

    def stage_of(step):
        return _stage(tile.used + step, frame.stages)

    def before(step):
        plgpu.barrier_wait(memory.full.at[stage_of(step)])

    def after(step):
        plgpu.barrier_arrive(memory.free.at[stage_of(step)])
        if isinstance(step, int) and step == lag - 1:  # in front of the loop, which so stays free of branches
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_arrive(memory.turn))

    if lag:
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_wait(memory.turn))
    sums = products.sums(
        height,
        columns,
        frame.halves,
        steps,
        1 + lag,
        lambda step: memory.rows.at[stage_of(step), own],
        lambda step: _weights(memory, stage_of(step), tile.share),
        before,
        after,
    )
    after(steps - 1)
    results = finish(products, *sums)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the result of the tile before has left
    if frame.tail > tile.share and len(results) == 1:  # stored in the parts that a tile can be cut in
        results = products.halves(*results)
    width = results[0].shape[1]
    for number, result in enumerate(results):
        part, first = (number, 0) if frame.tail > 1 else (0, number * width)
        memory.results[warpgroup, part, :, pl.ds(first, width)] = result.astype(out_ref.dtype)
    plgpu.commit_smem()
    rows, width = pl.ds(tile.row + warpgroup * height, height), frame.columns // frame.tail
    for part in range(frame.tail // tile.share):
        destination = out_ref.at[rows, pl.ds(tile.column + part * width, width)]
        plgpu.copy_smem_to_gmem(memory.results.at[warpgroup, part], destination)
