"""``gdn_prefill`` on Hopper, Pallas Mosaic GPU: the scan over chunks on wgmma, its operands by the copy engine.

The maths, the first kernel (everything that does not depend on the state, all chunks in parallel) and the precision are
those of :mod:`triton`; here the second kernel is another one. A block, a single warpgroup, walks through the chunks of
a request for 64 value dims of a value head. It holds the state [64 value dims, 128 key dims] and all that comes of it
transposed, value dims by tokens,

    reads^T = S K^T     d^T = (V^T - reads^T diag(..)) T^T     o^T = S Q^T diag(..) + d^T P^T     S' = .. S + d^T K

so that each product's left operand is what the product before left in registers, split into two bfloat16 numbers where
it stands, and each right operand is a tile in shared memory as the copy engine brought it: nothing that depends on the
state passes through shared memory, but the output on its way out. See NOTES.md beside this.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gdn_prefill import mosaic_solve
from pallas_kernels.gdn_prefill.mosaic_products import split, with_sums
from pallas_kernels.gdn_prefill.mosaic_work import ALIGNMENT, Requests, most_windows, work_lists
from pallas_kernels.gdn_prefill.triton import _KEPT, _QUERY, _READ, _WRITE, DIM
from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.packing import TILE

VALUES = 64  # value dims of a block: the rows of one wgmma
PARTS = 2  # bfloat16 numbers that carry a float32 operand

_MATRIX = plgpu.Layout.WGMMA
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
_TOKENS = plgpu.Layout.WGMMA.reduce(0)


def supports(target, arguments) -> None:
    """Hopper, heads of 128 x 128, bfloat16 activations."""
    require_nvidia(target, at_least=(9, 0), before=(10, 0))  # wgmma is Hopper's alone
    num_tokens = arguments["qkv"].shape[0]
    layers, slots, heads, head_v_dim, head_k_dim = arguments["state_pool"].shape
    require(head_v_dim == DIM and head_k_dim == DIM, f"takes heads of {DIM} x {DIM}, not {head_v_dim} x {head_k_dim}")
    require(arguments["qkv"].dtype == jnp.bfloat16, f"takes bfloat16 activations, not {arguments['qkv'].dtype}")
    require(num_tokens > 0, "takes at least one token")
    windows = most_windows(num_tokens, arguments["slot_ids"].shape[0])
    require(windows < 2**16, f"takes at most 65535 windows, not {windows}")
    require(layers * slots * heads < 2**31, f"{layers * slots * heads} state matrices are past int32")


def gdn_prefill(
    qkv,
    b,
    a,
    A_log,
    dt_bias,
    state_pool,
    layer,
    slot_ids,
    has_state,
    cu_seqlens,
    *,
    num_k_heads,
    head_k_dim,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.gdn_prefill`."""
    num_tokens = qkv.shape[0]
    windows, requests = work_lists(cu_seqlens, slot_ids, has_state, num_tokens)
    padding = -num_tokens % ALIGNMENT  # none in a bucket of the engine
    if padding:
        qkv = jnp.pad(qkv, ((0, padding), (0, 0)))
    gates = mosaic_solve.gates(b, a, A_log, dt_bias, num_tokens + padding)
    found = mosaic_solve.solve(windows, qkv, gates, num_k_heads=num_k_heads, interpret=interpret)
    out, pool = scan(requests, qkv, *found, layer, state_pool, num_k_heads=num_k_heads, interpret=interpret)
    return out[:num_tokens] if padding else out, pool


def scan(
    requests: Requests, qkv, solved, scores, factors, layer, state_pool, *, num_k_heads: int, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """The second kernel. The pool is a reference to it: updated in place.

    Args:
        requests: see :func:`mosaic_work.work_lists`.
        qkv: bf16[T, C], T a multiple of 8.
        solved: T of every window, bf16[M, Hv, 2, 64, 64]; it and the next two come from :func:`mosaic_solve.solve`.
        scores: P.
        factors: f32[M, Hv, 4, 64].
        layer: i32 scalar.
        state_pool: [L, S, Hv, Dv, Dk].
        num_k_heads: Hk.
        interpret: whether and how the kernel is interpreted.

    Returns:
        The outputs, bf16[T, Hv, Dv], and the pool.
    """
    num_heads = state_pool.shape[2]
    blocks = (DIM // VALUES) * num_heads * requests.base.shape[0]
    sizes = {"num_k_heads": num_k_heads, "num_heads": num_heads, "state_dtype": state_pool.dtype}
    pool_ref = jax.new_ref(state_pool)
    kernel = pl.kernel(
        functools.partial(_kernel, **sizes, emulate=bool(interpret)),
        out_type=[jax.ShapeDtypeStruct((qkv.shape[0], num_heads, DIM), qkv.dtype)],
        mesh=plgpu.Mesh(grid=(blocks,), grid_names=("block",)),
        # Barriers are placed by hand, with commit_smem.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        name="gdn_prefill_scan",
    )
    [out] = kernel(qkv, solved, scores, factors, jnp.stack(requests), layer[None], pool_ref)
    return out, jax.freeze(pool_ref)


class _Memory(NamedTuple):
    """Shared memory and barriers of a block."""

    reads: Any  # [2, 128, 128], keys and below them queries, of this chunk and the next
    values: Any  # [64 tokens, 64 value dims]
    solved: Any  # [2, 64, 64]
    scores: Any  # [2, 64, 64]
    factors: Any  # [4, 64]
    out: Any  # [64 tokens, 64 value dims], where the scores were
    rows: Any  # the same, rows one behind the other
    reads_full: Any  # a barrier a stage
    inputs_full: Any  # values, solved, factors
    scores_full: Any


def _kernel(
    qkv_ref,  # [T, C]
    solved_ref,  # [M, Hv, 2, 64, 64]
    scores_ref,
    factors_ref,  # [M, Hv, 4, 64]
    requests_ref,  # [6, R + 1]
    layer_ref,  # [1]
    pool_ref,  # [L, S, Hv, Dv, Dk]
    out_ref,  # [T, Hv, Dv]
    *,
    num_k_heads: int,
    num_heads: int,
    state_dtype,
    emulate: bool,
):
    """A block of value dims of one value head of one request, from its first token to its last."""
    halves = DIM // VALUES
    block = lax.axis_index("block")
    place, part = lax.div(block, halves * num_heads), lax.rem(block, halves * num_heads)
    head, first_value = lax.div(part, halves), lax.rem(part, halves) * VALUES
    request = Requests(*(requests_ref[field, place] for field in range(len(Requests._fields))))
    own = pl.ds(first_value, VALUES)

    def scan(reads, values, solved, shared, factors, *barriers):
        scores, rows = shared  # a chunk's output takes the place of its scores
        _scan(
            (qkv_ref, solved_ref, scores_ref, factors_ref),
            pool_ref.at[layer_ref[0], request.slot, head, own],
            out_ref,
            _Memory(reads, values, solved, scores, factors, scores.at[0], rows, *barriers),
            request,
            head,
            first_value,
            num_k_heads=num_k_heads,
            group=num_heads // num_k_heads,
            state_dtype=state_dtype,
            emulate=emulate,
        )

    def clear(rows_ref):
        rows_ref[...] = plgpu.layout_cast(jnp.zeros((TILE, VALUES), out_ref.dtype), _MATRIX)
        plgpu.commit_smem()

        @pl.loop(request.first, request.end)
        def _(row):
            plgpu.copy_smem_to_gmem(rows_ref.at[0], out_ref.at[request.base + row, head, own])

        plgpu.wait_smem_to_gmem(0)

    dtype = qkv_ref.dtype
    swizzled = {"transforms": (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))}

    @pl.when((request.slot >= 0) & (request.end > request.first))
    def _():
        pl.run_scoped(
            scan,
            plgpu.SMEM((2, 2 * TILE, DIM), dtype, **swizzled),
            plgpu.SMEM((TILE, VALUES), dtype, **swizzled),
            plgpu.SMEM((PARTS, TILE, TILE), dtype, **swizzled),
            plgpu.RefUnion(plgpu.SMEM((PARTS, TILE, TILE), dtype, **swizzled), plgpu.SMEM((TILE, VALUES), dtype)),
            plgpu.SMEM((4, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(),
        )

    @pl.when((request.slot < 0) & (request.end > request.first))  # pads
    def _():
        pl.run_scoped(clear, plgpu.SMEM((TILE, VALUES), dtype))


def _scan(
    inputs,
    pool_ref,  # [64, 128]
    out_ref,
    memory: _Memory,
    request: Requests,
    head,
    first_value,
    *,
    num_k_heads: int,
    group: int,
    state_dtype,
    emulate: bool,
):
    qkv_ref, solved_ref, scores_ref, factors_ref = inputs
    key_head = lax.div(head, group)
    chunks = lax.div(request.end + (TILE - 1), TILE)

    def window(chunk):
        return pl.ds(request.base + chunk * TILE, TILE)

    def keys(chunk):
        return memory.reads.at[lax.rem(chunk, 2), pl.ds(0, TILE)]

    def fetch_reads(chunk):
        stage = lax.rem(chunk, 2)
        for row, column in ((0, num_k_heads + key_head), (TILE, key_head)):
            source = qkv_ref.at[window(chunk), pl.ds(column * DIM, DIM)]
            plgpu.copy_gmem_to_smem(source, memory.reads.at[stage, pl.ds(row, TILE)], memory.reads_full.at[stage])

    def fetch_inputs(chunk):
        tile, barrier = request.tile + chunk, memory.inputs_full
        values = pl.ds(2 * num_k_heads * DIM + head * DIM + first_value, VALUES)
        plgpu.copy_gmem_to_smem(factors_ref.at[tile, head], memory.factors, barrier)
        plgpu.copy_gmem_to_smem(qkv_ref.at[window(chunk), values], memory.values, barrier)
        plgpu.copy_gmem_to_smem(solved_ref.at[tile, head], memory.solved, barrier)

    def fetch_scores(chunk):
        plgpu.copy_gmem_to_smem(scores_ref.at[request.tile + chunk, head], memory.scores, memory.scores_full)

    fetch_reads(jnp.int32(0))
    fetch_inputs(jnp.int32(0))
    fetch_scores(jnp.int32(0))
    pl.when(chunks > 1)(lambda: fetch_reads(jnp.int32(1)))

    def bounds(chunk):
        """Rows of a chunk's window that are the request's."""
        return jnp.where(chunk == 0, request.first, 0), jnp.minimum(request.end - chunk * TILE, TILE)

    def store(chunk, out):
        start = request.base + chunk * TILE
        _store(out_ref, memory, out, start, *bounds(chunk), head, pl.ds(first_value, VALUES))

    def rows(kind):
        """A factor of every token: of every column here."""
        return lax.broadcast_in_dim(plgpu.load(memory.factors.at[kind], layout=_TOKENS), (VALUES, TILE), [1])

    def clean(chunk, *refs):
        """Zeros for what is not the request's: a neighbour's may be NaN, and zero times NaN is NaN.

        Its queries need none: they lie in columns that are not stored.
        """
        first, end = bounds(chunk)

        @pl.when((first > 0) | (end < TILE))
        def _():
            row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=_MATRIX)
            for ref in refs:
                piece = plgpu.load(ref, layout=_MATRIX)
                ref[...] = jnp.where((row >= first) & (row < end), piece, jnp.zeros_like(piece))
            plgpu.commit_smem()

    def await_reads(chunk):
        stage = lax.rem(chunk, 2)
        plgpu.barrier_wait(memory.reads_full.at[stage])
        clean(chunk, *(memory.reads.at[stage, pl.ds(0, TILE), pl.ds(column, TILE)] for column in (0, TILE)))

    def add_reads(reads, chunk, halves, column):
        """The product of 64 key dims of the state with those of a chunk's keys and queries."""
        for half in halves:
            reads.add(half, memory.reads.at[lax.rem(chunk, 2), :, pl.ds(column, TILE)].transpose((1, 0)))

    def one_chunk(chunk, carry):
        """From the reads of a chunk to those of the next."""
        state, reads = carry
        read, asked = reads[:, :TILE], reads[:, TILE:]
        plgpu.barrier_wait(memory.inputs_full)
        clean(chunk, memory.values)

        def products(out, delta, total, reads):
            value = plgpu.load(memory.values.transpose((1, 0)), layout=_MATRIX).astype(jnp.float32)
            high, low = split(value - rows(_READ) * read)
            solved = [memory.solved.at[number].transpose((1, 0)) for number in range(PARTS)]
            for left, right in ((low, solved[0]), (high, solved[1]), (high, solved[0])):
                delta.add(left, right)
            kept, write = memory.factors[_KEPT, TILE - 1], rows(_WRITE)
            out.start(rows(_QUERY) * asked)
            found = delta.read(running=0)
            high, low = split(found)
            plgpu.barrier_wait(memory.scores_full)
            scores = [memory.scores.at[number].transpose((1, 0)) for number in range(PARTS)]
            for left, right in ((low, scores[0]), (high, scores[1]), (high, scores[0])):
                out.add(left, right)
            total.start(kept * state)
            for half in split(write * found):
                total.add(half, keys(chunk))
            store(chunk, out.read(running=2).astype(out_ref.dtype))  # everyone is done with all inputs but the keys

            @pl.when(chunk + 1 < chunks)
            def _():
                fetch_inputs(chunk + 1)
                await_reads(chunk + 1)

            new_state = total.read(running=0)
            # Here, not at the beginning of the sum's scope, from where zeros would hold registers.
            reads.start(plgpu.layout_cast(jnp.zeros((VALUES, DIM), jnp.float32), _MATRIX))
            for column in (0, TILE):  # of nothing behind the last chunk
                add_reads(reads, chunk + 1, split(new_state[:, column : column + TILE]), column)

            @pl.when(chunk + 1 < chunks)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the output has left, everyone is done with the keys
                fetch_scores(chunk + 1)
                pl.when(chunk + 2 < chunks)(lambda: fetch_reads(chunk + 2))

            return new_state, reads.read(running=0)

        square, wide = (VALUES, TILE), (VALUES, DIM)
        return with_sums(products, (square, square, wide, wide), emulate=emulate)

    def first_reads(reads):
        # All is split before the first product: ptxas puts a wait in between otherwise.
        for column, halves in [(column, split(state[:, column : column + TILE])) for column in (0, TILE)]:
            add_reads(reads, 0, halves, column)
        return reads.read(running=0)

    state = plgpu.load(pool_ref, layout=_MATRIX, optimized=False).astype(jnp.float32)
    state = jnp.where(request.has_state != 0, state, jnp.zeros_like(state))
    await_reads(jnp.int32(0))
    reads = with_sums(first_reads, ((VALUES, DIM),), emulate=emulate)
    state, _ = lax.fori_loop(0, chunks, one_chunk, (state, reads))
    pool_ref[...] = state.astype(state_dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory must outlive the copies


def _store(out_ref, memory: _Memory, out, start, first, end, head, own):
    """The output of a chunk, value dims by tokens: whole tiles in one piece, ragged ones row by row."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the output before this one has left

    @pl.when((first == 0) & (end == TILE))
    def _():
        memory.out.transpose((1, 0))[...] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.out, out_ref.at[pl.ds(start, TILE), head, own])

    @pl.when((first > 0) | (end < TILE))
    def _():
        memory.rows.transpose((1, 0))[...] = out
        plgpu.commit_smem()

        @pl.loop(first, end)
        def _(row):
            plgpu.copy_smem_to_gmem(memory.rows.at[row], out_ref.at[start + row, head, own])
