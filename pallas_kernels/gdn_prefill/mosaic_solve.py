"""What of a chunk does not depend on the state, for all chunks at once: the first kernel of the Mosaic prefill.

In the terms of :mod:`triton`: T, P and the factors of the rows. A warpgroup has a window of 64 tokens and a value head
at a time; its neighbours in the block are there to fill its waits, and nothing but the end is common to them.
Everything is done by blocks of 16 tokens, because the rows of a warp in a matrix of ``wgmma`` are just such
a block: a warp's own columns, the triangle, are 16 of 64; those before them are full, those behind them empty.

The decay between two tokens of different blocks is a product of what lies in the row's block and of what lies before
it, a factor of the row and one of the column; only the triangle needs a number of its own for every pair.

The inverse of I + L is found as in :mod:`triton`, by substitution inside of the diagonal blocks and by products that
join blocks. The substitution is laid out so that a warp has a block, a thread a column of its inverse, and a row costs
a multiply-add for each row before it, with the coupling read from shared memory. The products never touch an empty
block: inverses of blocks of 16 (then 32) tokens stand below each other in a matrix of 16 (32) columns.
"""

from __future__ import annotations

import functools
import itertools
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
WARPGROUPS = 3  # of a block; a thread can then have no more than 168 registers
MOST_BLOCKS = 132  # one for each multiprocessor of an H200

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
    # transpose below, and copies it back for whoever reads rows.
    b, a = (with_layout_constraint(x, Layout(major_to_minor=(0, 1))) for x in (b, a))
    # Transposed by themselves: XLA makes a kernel of every transpose with an exponential behind it.
    b, a = jnp.split(lax.optimization_barrier(jnp.concatenate([b, a], axis=1).T), 2)
    beta, decay = delta_gates(b, a, A_log[:num_heads, None], dt_bias[:num_heads, None])
    decay = jnp.maximum(decay, STRONGEST_LOG_DECAY) * math.log2(math.e)
    coarse = jnp.floor(decay * 64.0) * (1.0 / 64.0)
    found = jnp.stack([beta, coarse, decay - coarse], axis=1)
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
    kernel = pl.kernel(
        functools.partial(_kernel, num_k_heads=num_k_heads, num_heads=num_heads, emulate=bool(interpret)),
        out_type=[matrices, matrices, jax.ShapeDtypeStruct((num_tiles, num_heads, 4, TILE), jnp.float32)],
        mesh=plgpu.Mesh(
            grid=(min(MOST_BLOCKS, -(-num_tiles * num_heads // WARPGROUPS)),),
            grid_names=("block",),
            num_threads=WARPGROUPS,
            thread_name="warpgroup",
        ),
        # Barriers are placed by hand, with commit_smem.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
        ),
        interpret=interpret,
        name="gdn_prefill_solve",
    )
    return kernel(tiles, qkv, gates)


class _Memory(NamedTuple):
    """Shared memory and barrier of a warpgroup."""

    gates: Any  # [3, 64]
    columns: Any  # [3, 64], what the columns need of each token, see _COARSE_SUM
    factors: Any  # [4, 64]
    reads: Any  # [128, 128]: keys, below them queries
    parts: Any  # [2, 64, 64]: of P, then of T
    coupling: Any  # [64, 16], of the diagonal blocks
    diagonal: Any  # [64, 16], their inverses
    narrow: Any  # [2, 2, 64, 16], right operands of the first join
    broad: Any  # [2, 64, 32], of the second, one after the other
    full: Any


_COARSE_SUM, _FINE_SUM, _NORM = range(3)  # inclusive sums of the decays in the token's block, norm of the key
_LATER_BETA = _COARSE_SUM  # whose place beta takes once the sums are used: the gates may be the next item's by then


def _kernel(tiles_ref, qkv_ref, gates_ref, solved_ref, scores_ref, factors_ref, *, num_k_heads, num_heads, emulate):
    """Pairs of window and value head are dealt to the warpgroups of all blocks, one after the other."""
    num_items = tiles_ref.shape[1] * num_heads
    stride = WARPGROUPS * min(MOST_BLOCKS, -(-num_items // WARPGROUPS))
    rounds = -(-num_items // stride)

    def body(*refs):
        own = lax.axis_index("warpgroup")

        def memory_now():
            """Found anew in every turn: else hundreds of addresses are made before the loop and kept in memory."""
            opaque = lax.optimization_barrier(own)
            vectors, *memory = (ref.at[opaque] for ref in refs)
            return _Memory(*(vectors.at[pl.ds(row, rows)] for row, rows in ((0, 3), (3, 3), (6, 4))), *memory)

        number = lax.axis_index("block") * WARPGROUPS + own

        def window(item):
            """Where an item's window begins, its first row that counts and the row behind the last; 0 if it is dead."""
            tile = lax.div(jnp.minimum(item, num_items - 1), num_heads)
            start, first, end = (tiles_ref[field, tile] for field in range(3))
            return start, first, jnp.where(item < num_items, end, 0)

        def fetch(memory, item):
            start, _, end = window(item)

            @pl.when(end > 0)
            def _():
                head = lax.rem(item, num_heads)
                key_head, tokens = lax.div(head, num_heads // num_k_heads), pl.ds(start, TILE)
                for row, first in ((0, num_k_heads), (TILE, 0)):
                    source = qkv_ref.at[tokens, pl.ds((first + key_head) * DIM, DIM)]
                    plgpu.copy_gmem_to_smem(source, memory.reads.at[pl.ds(row, TILE)], memory.full)
                plgpu.copy_gmem_to_smem(gates_ref.at[head, :, tokens], memory.gates, memory.full)

        fetch(memory_now(), number)

        @pl.loop(0, rounds)
        def _(turn):
            item, memory = turn * stride + number, memory_now()
            _, first, end = window(item)

            @pl.when(end > 0)
            def _():
                place = lax.div(item, num_heads), lax.rem(item, num_heads)
                plgpu.barrier_wait(memory.full)
                pl.when((first > 0) | (end < TILE))(functools.partial(_clean, memory, first, end))
                outputs = [ref.at[place] for ref in (scores_ref, solved_ref, factors_ref)]
                _one_head(memory, outputs, functools.partial(fetch, memory, item + stride), emulate)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory must outlive the copies

    def matrices(*shape):
        columns = min(shape[-1], TILE)
        transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))
        return plgpu.SMEM((WARPGROUPS, *shape), jnp.bfloat16, transforms=transforms)

    def vectors(*shape):
        return plgpu.SMEM((WARPGROUPS, *shape), jnp.float32)

    pl.run_scoped(
        body,
        vectors(3 + 3 + 4, TILE),
        matrices(2 * TILE, DIM),
        matrices(PARTS, TILE, TILE),
        vectors(TILE, BLOCK),
        vectors(TILE, BLOCK),
        matrices(2, PARTS, TILE, BLOCK),
        matrices(PARTS, TILE, 2 * BLOCK),
        plgpu.Barrier(num_arrivals=3, num_barriers=WARPGROUPS),
        collective_axes="warpgroup",
    )


def _clean(memory: _Memory, first, end) -> None:
    """Zeros for what is not the request's: a neighbour's may be NaN. Such a token writes nothing and decays nothing."""
    row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=_MATRIX)
    token = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_ROWS)
    for place in itertools.product((0, TILE), repeat=2):  # of a piece of the keys or queries
        rows, columns = (pl.ds(begin, TILE) for begin in place)
        piece = plgpu.load(memory.reads.at[rows, columns], layout=_MATRIX)
        memory.reads[rows, columns] = jnp.where((row >= first) & (row < end), piece, jnp.zeros_like(piece))
    gates = [plgpu.load(memory.gates.at[kind], layout=_ROWS) for kind in range(3)]
    plgpu.commit_smem()  # four threads hold each number: none may write it before all have read it
    for kind, found in enumerate(gates):
        memory.gates[kind] = jnp.where((token >= first) & (token < end), found, jnp.zeros_like(found))
    plgpu.commit_smem()


def _rows(vector: jax.Array) -> jax.Array:
    """A number a token as a matrix [64, 16] that has it in a row."""
    return lax.broadcast_in_dim(vector, (TILE, BLOCK), [0])


def _pieces(ref) -> list[jax.Array]:
    """A number a token as matrices [64, 16] that have it in a column, one for each block of columns."""
    vectors = [plgpu.load(ref.at[pl.ds(start, BLOCK)], layout=_COLUMNS) for start in range(0, TILE, BLOCK)]
    return [lax.broadcast_in_dim(vector, (TILE, BLOCK), [1]) for vector in vectors]


def _masked(mask, matrix):
    return jnp.where(mask, matrix, jnp.zeros_like(matrix))


def _one_head(memory: _Memory, outputs, fetch_next, emulate: bool) -> None:
    """P, T and the factors of one value head, on their way out, and the next one's inputs on their way in."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), axis, layout=_MATRIX) for axis in range(2))
    own, row = lax.shift_right_logical(row, 4), row & (BLOCK - 1)  # the row's block, and its place there
    token = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_ROWS)
    scores_ref, solved_ref, factors_ref = outputs

    def of_own(pieces):
        """Each row's own block of columns."""
        found = pieces[-1]
        for number in range(BLOCKS - 2, -1, -1):
            found = jnp.where(own == number, pieces[number], found)
        return found

    def products(of_keys, of_queries):
        keys, queries = (memory.reads.at[pl.ds(begin, TILE)] for begin in (0, TILE))
        of_keys.add(keys, keys.transpose((1, 0)))
        of_queries.add(queries, memory.reads.transpose((1, 0)))
        sums = [
            jnp.sum(_masked(column <= row, of_own(_pieces(memory.gates.at[kind]))), axis=1) for kind in (_COARSE, _FINE)
        ]
        return of_keys.read(0), of_queries.read(0), sums

    of_keys, of_queries, since = with_sums(products, ((TILE, TILE), (TILE, 2 * TILE)), emulate=emulate)
    of_keys, of_queries, squares = (
        [product[:, begin + start : begin + start + BLOCK] for start in range(0, TILE, BLOCK)]
        for product, begin in ((of_keys, 0), (of_queries, 0), (of_queries, TILE))
    )

    def inverse_norm(squares):
        return lax.rsqrt(jnp.sum(_masked(column == row, squares), axis=1) + L2_EPSILON)

    own_keys, own_queries = of_own(of_keys), of_own(of_queries)
    norm_key, norm_query = inverse_norm(own_keys), inverse_norm(of_own(squares)) * DIM**-0.5
    beta = plgpu.load(memory.gates.at[_BETA], layout=_ROWS)
    for number, vector in enumerate((*since, norm_key)):
        memory.columns[number] = vector
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was found before has left
    plgpu.commit_smem()
    fetch_next()

    def of_block(block, starts):
        """What belongs to the block of each row."""
        found = jnp.where(block == 1, starts[1], jnp.zeros_like(block, jnp.float32))
        for number in range(2, BLOCKS):
            found = jnp.where(block == number, starts[number], found)
        return found

    # Decays before each block, and those of the window.
    before = []
    for kind in (_COARSE_SUM, _FINE_SUM):
        before.append([jnp.float32(0)])
        for last in range(BLOCK - 1, TILE, BLOCK):
            before[-1].append(before[-1][-1] + memory.columns[kind, last])

    sums = [_pieces(memory.columns.at[kind]) for kind in (_COARSE_SUM, _FINE_SUM)]
    norms = _pieces(memory.columns.at[_NORM])
    # Of a key in a block before the row's: its norm, and the decay from it to the beginning of the row's block.
    outer = []
    for number in range(BLOCKS - 1):
        coarse, fine = (
            (of_block(own, starts) - starts[number]) - sums[kind][number] for kind, starts in enumerate(before)
        )
        outer.append(_masked(own > number, jnp.exp2(coarse + fine) * norms[number]))
    coarse, fine = (_rows(since[kind]) - of_own(sums[kind]) for kind in range(2))
    inner = jnp.exp2(jnp.where(column <= row, coarse + fine, -jnp.inf)) * of_own(norms)

    in_block = jnp.exp2(since[0] + since[1])
    row_query, row_key = norm_query * in_block, norm_key * beta
    triangle = own_queries * inner * _rows(norm_query)
    scores = [of_queries[number] * outer[number] * _rows(row_query) for number in range(BLOCKS - 1)]
    scores.append(jnp.zeros_like(triangle))
    scores = [jnp.where(own == number, triangle, piece) for number, piece in enumerate(scores)]
    for number, part in enumerate(split(lax.concatenate(scores, 1))):
        memory.parts[number] = part

    start = [of_block(lax.shift_right_logical(token, 4), starts) + since[kind] for kind, starts in enumerate(before)]
    rest = [starts[-1] - start[kind] for kind, starts in enumerate(before)]
    start = jnp.exp2(start[0] + start[1])
    memory.factors[_READ] = norm_key * start
    memory.factors[_QUERY] = norm_query * start
    memory.factors[_WRITE] = norm_key * jnp.exp2(rest[0] + rest[1])
    memory.factors[_KEPT] = start

    memory.coupling[...] = _masked(column < row, own_keys * inner * _rows(row_key))
    row_less = -row_key * in_block  # an inverse takes the coupling of blocks off
    less = [of_keys[number] * outer[number] * _rows(row_less) for number in range(BLOCKS - 1)]
    plgpu.commit_smem()
    memory.columns[_LATER_BETA] = beta
    plgpu.copy_smem_to_gmem(memory.parts, scores_ref)
    plgpu.copy_smem_to_gmem(memory.factors, factors_ref)

    inverse = _invert(memory, less, own, emulate)
    betas = _pieces(memory.columns.at[_LATER_BETA])
    inverse = lax.concatenate([piece * beta for piece, beta in zip(inverse, betas, strict=True)], 1)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # P has left
    for number, part in enumerate(split(inverse)):
        memory.parts[number] = part
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(memory.parts, solved_ref)


def _invert(memory: _Memory, less, own, emulate: bool) -> list[jax.Array]:
    """``(I + L)^-1`` of a strictly lower triangular matrix, f32[64, 64] in four blocks of columns.

    ``less`` has the first three blocks of columns of -L, zeros but before each row's own block, where L is in shared
    memory. With A and B the inverses of neighbouring diagonal blocks and C the block of -L that couples the second with
    the first, the inverse of both is ``[[A, 0], [B C A, B]]``.
    """
    if emulate:
        _substitute_emulated(memory)
    else:
        _substitute(memory)
    plgpu.commit_smem()

    def product(*pairs):
        """Sums of products of float32 matrices, the left ones as their parts, the right ones in shared memory."""

        def run(*totals):
            for total, (left, right) in zip(totals, pairs, strict=True):
                for i, j in ((1, 0), (0, 1), (0, 0)):
                    total.add(left[i], right.at[j])
            return [total.read(0) for total in totals]

        return with_sums(run, [(TILE, right.shape[-1]) for _, right in pairs], emulate=emulate)

    def share(matrix, ref):
        """A matrix's parts, also in shared memory."""
        halves = split(matrix)
        for number, part in enumerate(halves):
            ref[number] = part
        plgpu.commit_smem()
        return halves

    def rows(ref, block, blocks=1):
        return ref.at[:, pl.ds(block * BLOCK, blocks * BLOCK)]

    # Rows of no interest give numbers of no interest: every row of a product depends on its own row on the left alone.
    small = plgpu.load(memory.diagonal, layout=_MATRIX, optimized=False)
    halves, coupled = share(small, memory.narrow.at[0]), [split(piece) for piece in less]
    first, second = (memory.narrow.at[number] for number in range(2))
    low, high = product((coupled[0], rows(first, 0)), (coupled[2], rows(first, 2)))
    share(jnp.where(own < 2, low, high), second)
    low, high = product((halves, rows(second, 1)), (halves, rows(second, 3)))
    joined = jnp.where(own < 2, low, high)

    empty = jnp.zeros_like(small)
    odd = (own & 1) == 1
    pair = [jnp.where(odd, joined, small), jnp.where(odd, small, empty)]
    halves = share(lax.concatenate(pair, 1), memory.broad)
    coupled = [lax.concatenate([coupled[block][part] for block in range(2)], 1) for part in range(PARTS)]
    [crossing] = product((coupled, rows(memory.broad, 0, 2)))
    plgpu.commit_smem()  # everyone is done with the operand that was there
    share(crossing, memory.broad)
    [joined] = product((halves, rows(memory.broad, 2, 2)))
    joined = [joined[:, start : start + BLOCK] for start in (0, BLOCK)]
    behind = [jnp.where(own < 2, above, below) for above, below in zip(pair, joined, strict=True)]
    return behind + [_masked(own >= 2, piece) for piece in pair]


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
