"""What of a chunk does not depend on the state, for all chunks at once: the first kernel of the Mosaic prefill.

In the terms of :mod:`triton`: T, P and the factors of the rows. A block, one warpgroup, has a window of 64 tokens and a
key head; the products of its keys and queries serve all its value heads, one after the other.

The inverse of I + L is found as there, by substitution inside of diagonal blocks of 16 tokens and by products that join
blocks. The substitution is laid out so that a warp has a block, a thread a column of its inverse, and a row costs a
multiply-add for each row before it, with the coupling read from shared memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gdn_prefill.mosaic_products import split, with_sums
from pallas_kernels.gdn_prefill.reference import STRONGEST_LOG_DECAY
from pallas_kernels.gdn_prefill.triton import _KEPT, _QUERY, _READ, _WRITE, DIM
from pallas_kernels.numerics import L2_EPSILON, delta_gates
from pallas_kernels.packing import TILE

PARTS = 2  # bfloat16 numbers that carry a float32 operand
BLOCK = 16  # tokens of a diagonal block: the rows of a warp
BLOCKS = TILE // BLOCK

_BETA, _COARSE, _FINE = range(3)  # what is known of a token and value head: see gates

_MATRIX = plgpu.Layout.WGMMA
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
_INVERSES = plgpu.Layout.TILED(  # [block, column]: a warp, and a thread (twice)
    plgpu.Tiling(((BLOCKS, BLOCK), (1,))), warp_dims=(-3,), lane_dims=(plgpu.Replicated(2), -2), vector_dim=-1
)


def gates(b, a, A_log, dt_bias, num_tokens: int) -> jax.Array:
    """f32[Hv, 3, T]: beta, and the log decay to base 2 as the sum of two numbers.

    The first is a multiple of 1 / 64, the second below that: differences of large sums stay good.
    """
    num_heads = b.shape[1]
    # Both are slices of a wide projection. Left free, XLA lays all of that out by columns for the sake of the
    # transposes below, and copies it back for whoever reads rows.
    b, a = (with_layout_constraint(x, Layout(major_to_minor=(0, 1))) for x in (b, a))
    beta, decay = delta_gates(b, a, A_log[:num_heads], dt_bias[:num_heads])
    decay = jnp.maximum(decay, STRONGEST_LOG_DECAY) * math.log2(math.e)
    coarse = jnp.floor(decay * 64.0) * (1.0 / 64.0)
    found = jnp.stack([beta.T, coarse.T, (decay - coarse).T], axis=1)
    return jnp.pad(found, ((0, 0), (0, 0), (0, num_tokens - found.shape[2])))


def solve(tiles, qkv, gates, *, num_k_heads: int, interpret=False):
    """The first kernel.

    Args:
        tiles: i32[3, M], see :func:`mosaic_work.work_lists`.
        qkv: bf16[T, C].
        gates: f32[Hv, 3, T], see :func:`gates`.
        num_k_heads: Hk.
        interpret: whether and how the kernel is interpreted.

    Returns:
        T and P, bf16[M, Hv, 2, 64, 64] each, and the rows' factors, f32[M, Hv, 4, 64]; dead windows stay unwritten.
    """
    num_heads, num_tiles = gates.shape[0], tiles.shape[1]
    matrices = jax.ShapeDtypeStruct((num_tiles, num_heads, PARTS, TILE, TILE), jnp.bfloat16)
    sizes = {"num_k_heads": num_k_heads, "group": num_heads // num_k_heads}
    kernel = pl.kernel(
        functools.partial(_kernel, **sizes, emulate=bool(interpret)),
        out_type=[matrices, matrices, jax.ShapeDtypeStruct((num_tiles, num_heads, 4, TILE), jnp.float32)],
        mesh=plgpu.Mesh(grid=(num_tiles * num_k_heads,), grid_names=("block",)),
        # Barriers are placed by hand, with commit_smem.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
        ),
        interpret=interpret,
        name="gdn_prefill_solve",
    )
    return kernel(tiles, qkv, gates)


class _Memory(NamedTuple):
    """Shared memory and barrier of a block."""

    keys: Any  # [64, 128]
    queries: Any  # [64, 128]
    gates: Any  # [G, 3, 64]
    scores: Any  # [2, 64, 64]
    inverse: Any  # [2, 64, 64]
    crossing: Any  # [2, 64, 64]
    coupling: Any  # [64, 16], of the diagonal blocks
    diagonal: Any  # [64, 16], their inverses
    sums: Any  # [2, 64], inclusive sums of the decays
    factors: Any  # [4, 64]
    full: Any


def _kernel(tiles_ref, qkv_ref, gates_ref, solved_ref, scores_ref, factors_ref, *, num_k_heads, group, emulate):
    block = lax.axis_index("block")
    tile, key_head = lax.div(block, num_k_heads), lax.rem(block, num_k_heads)
    start, first, end = (tiles_ref[field, tile] for field in range(3))

    def live(*memory):
        memory = _Memory(*memory)
        window = pl.ds(start, TILE)
        plgpu.copy_gmem_to_smem(
            qkv_ref.at[window, pl.ds((num_k_heads + key_head) * DIM, DIM)], memory.keys, memory.full
        )
        plgpu.copy_gmem_to_smem(qkv_ref.at[window, pl.ds(key_head * DIM, DIM)], memory.queries, memory.full)
        plgpu.copy_gmem_to_smem(gates_ref.at[pl.ds(key_head * group, group), :, window], memory.gates, memory.full)
        plgpu.barrier_wait(memory.full)

        @pl.when((first > 0) | (end < TILE))  # a neighbour's may be NaN
        def _():
            row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=_MATRIX)
            for ref in (memory.keys, memory.queries):
                for column in range(0, DIM, TILE):
                    columns = pl.ds(column, TILE)
                    piece = plgpu.load(ref.at[:, columns], layout=_MATRIX)
                    ref[:, columns] = jnp.where((row >= first) & (row < end), piece, jnp.zeros_like(piece))
            plgpu.commit_smem()

        def products(of_keys, of_queries):
            of_keys.add(memory.keys, memory.keys.transpose((1, 0)))
            of_queries.add(memory.queries, memory.keys.transpose((1, 0)))
            squares = jnp.zeros((TILE,), jnp.float32)
            for column in range(0, DIM, TILE):
                piece = plgpu.load(memory.queries.at[:, pl.ds(column, TILE)], layout=_MATRIX).astype(jnp.float32)
                squares = squares + jnp.sum(piece * piece, axis=1)
            return of_keys.read(0), of_queries.read(0), squares

        square = (TILE, TILE)
        of_keys, of_queries, squares = with_sums(products, (square, square), emulate=emulate)
        norm_query = lax.rsqrt(squares + L2_EPSILON) * DIM**-0.5

        @pl.loop(0, group)
        def _(member):
            place = (tile, key_head * group + member)
            _one_head(memory, member, first, end, of_keys, of_queries, norm_query, emulate)
            plgpu.copy_smem_to_gmem(memory.scores, scores_ref.at[place])
            plgpu.copy_smem_to_gmem(memory.inverse, solved_ref.at[place])
            plgpu.copy_smem_to_gmem(memory.factors, factors_ref.at[place])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(end > 0)
    def _():
        swizzled = {"transforms": (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))}
        pl.run_scoped(
            live,
            *[plgpu.SMEM((TILE, DIM), qkv_ref.dtype, **swizzled)] * 2,
            plgpu.SMEM((group, 3, TILE), jnp.float32),
            *[plgpu.SMEM((PARTS, TILE, TILE), jnp.bfloat16, **swizzled)] * 3,
            *[plgpu.SMEM((TILE, BLOCK), jnp.float32)] * 2,
            plgpu.SMEM((2, TILE), jnp.float32),
            plgpu.SMEM((4, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=3),
        )


def _wide(vector: jax.Array, axis: int) -> jax.Array:
    """A number a row (axis 0) or a column (axis 1) as a matrix."""
    return lax.broadcast_in_dim(vector, (TILE, TILE), [axis])


def _one_head(memory: _Memory, member, first, end, of_keys, of_queries, norm_query, emulate: bool) -> None:
    """T, P and the factors of one value head, into shared memory and committed."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=_MATRIX) for axis in range(2))

    def gate(kind, layout):
        """Of every token, 0 (no write, no decay) where it does not count."""
        token = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout)
        found = plgpu.load(memory.gates.at[member, kind], layout=layout)
        return jnp.where((token >= first) & (token < end), found, jnp.zeros_like(found))

    def kept(mask, matrix):
        return jnp.where(mask, matrix, jnp.zeros_like(matrix))

    since_start = [jnp.sum(kept(column <= row, _wide(gate(kind, _COLUMNS), 1)), axis=1) for kind in (_COARSE, _FINE)]
    norm_key = lax.rsqrt(jnp.sum(kept(column == row, of_keys), axis=1) + L2_EPSILON)
    for number, vector in enumerate(since_start):
        memory.sums[number] = vector
    memory.factors[_READ] = norm_key  # until it is multiplied
    plgpu.commit_smem()
    since = [
        _wide(rows, 0) - _wide(plgpu.load(memory.sums.at[number], layout=_COLUMNS), 1)
        for number, rows in enumerate(since_start)
    ]
    between = jnp.exp2(jnp.where(column <= row, since[0] + since[1], -jnp.inf))
    between = between * _wide(plgpu.load(memory.factors.at[_READ], layout=_COLUMNS), 1)
    for number, part in enumerate(split(of_queries * between * _wide(norm_query, 0))):
        memory.scores[number] = part
    coupling = kept(column < row, of_keys * between * _wide(norm_key * gate(_BETA, _ROWS), 0))

    inverse = _invert(memory, coupling, emulate)

    for number, part in enumerate(split(inverse * _wide(gate(_BETA, _COLUMNS), 1))):
        memory.inverse[number] = part
    until_end = [memory.sums[number, TILE - 1] - vector for number, vector in enumerate(since_start)]
    start = jnp.exp2(since_start[0] + since_start[1])
    memory.factors[_READ] = norm_key * start
    memory.factors[_QUERY] = norm_query * start
    memory.factors[_WRITE] = norm_key * jnp.exp2(until_end[0] + until_end[1])
    memory.factors[_KEPT] = start
    plgpu.commit_smem()


def _invert(memory: _Memory, coupling, emulate: bool) -> jax.Array:
    """``(I + coupling)^-1`` of a strictly lower triangular matrix f32[64, 64].

    With A and B the inverses of neighbouring diagonal blocks and C the coupling of the second with the first, the
    inverse of both is ``[[A, 0], [-B C A, B]]``.
    """
    own = plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), 0, layout=_MATRIX) // BLOCK  # block of the row
    pieces = [coupling[:, start : start + BLOCK] for start in range(0, TILE, BLOCK)]

    def kept(mask, piece):
        return jnp.where(mask, piece, jnp.zeros_like(piece))

    diagonal = pieces[0]
    for number in range(1, BLOCKS):
        diagonal = jnp.where(own == number, pieces[number], diagonal)
    memory.coupling[...] = diagonal
    plgpu.commit_smem()
    if emulate:
        _substitute_emulated(memory)
    else:
        _substitute(memory)
    plgpu.commit_smem()
    diagonal = plgpu.load(memory.diagonal, layout=_MATRIX, optimized=False)
    inverse = lax.concatenate([kept(own == number, diagonal) for number in range(BLOCKS)], 1)

    empty = plgpu.layout_cast(jnp.zeros((TILE, BLOCK), jnp.float32), _MATRIX)
    pairs = lax.concatenate([kept(own == 1, pieces[0]), empty, kept(own == 3, pieces[2]), empty], 1)
    inverse = _join(memory, inverse, pairs, emulate)
    pairs = lax.concatenate([kept(own >= 2, pieces[0]), kept(own >= 2, pieces[1]), empty, empty], 1)
    return _join(memory, inverse, pairs, emulate)


def _join(memory: _Memory, inverse, coupling, emulate: bool) -> jax.Array:
    """Inverses of pairs of blocks, from those of the blocks and the coupling of each second block with its first."""

    def product(left, right_ref):
        def run(total):
            for i, j in ((1, 0), (0, 1), (0, 0)):
                total.add(left[i], right_ref.at[j])
            return total.read(0)

        return with_sums(run, ((TILE, TILE),), emulate=emulate)

    halves = split(inverse)
    for number, part in enumerate(halves):
        memory.inverse[number] = part
    plgpu.commit_smem()
    for number, part in enumerate(split(product(split(coupling), memory.inverse))):
        memory.crossing[number] = part
    plgpu.commit_smem()
    return inverse - product(halves, memory.crossing)


def _substitute(memory: _Memory) -> None:
    """Inverses of the diagonal blocks: of row i, what the rows before it take off, one after the other."""
    blocks, inverses = (ref.reshape((BLOCKS, BLOCK, BLOCK)) for ref in (memory.coupling, memory.diagonal))
    step = plgpu.broadcasted_iota(jnp.int32, (BLOCKS, BLOCK), 1, layout=_INVERSES)
    solved = []
    for i in range(BLOCK):
        found = jnp.where(step == i, 1.0, 0.0)
        for k, before in enumerate(solved):
            factor = plgpu.load(blocks.at[:, i, k], layout=_INVERSES.reduce(1), optimized=False)
            factor = plgpu.layout_cast(lax.broadcast_in_dim(factor, (BLOCKS, BLOCK), [0]), _INVERSES)
            found = found - factor * before
        inverses[:, i, :] = found
        solved.append(found)


def _substitute_emulated(memory: _Memory) -> None:
    """The same for the interpreter, which knows no other shape of a reference."""
    blocks = memory.coupling[...].reshape(BLOCKS, BLOCK, BLOCK)
    solved = []
    for i in range(BLOCK):
        found = jnp.broadcast_to(jnp.arange(BLOCK) == i, (BLOCKS, BLOCK)).astype(jnp.float32)
        for k, before in enumerate(solved):
            found = found - blocks[:, i, k, None] * before
        solved.append(found)
    memory.diagonal[...] = jnp.stack(solved, axis=1).reshape(TILE, BLOCK)
