"""``paged_prefill_attention`` on Hopper, Pallas Mosaic GPU: warp-specialised, pages by the copy engine, wgmma.

A block takes tiles of 64 tokens of one request and two query heads of one key/value head, the next when it is done with
the last. Two warpgroups compute, a head each; a third brings queries, pages and gates, two stages deep and ahead of
them across tiles. Both heads use each page that it brings: a pair of heads rather than a pair of token tiles, so that
the two see the same pages and ragged ends waste at most 64 rows. Each warpgroup computes the softmax of a page while
the tensor cores multiply the weights of the page before with its values (or the two warpgroups take turns, see
:class:`Tuning`). Pages that every query of the tile sees whole need no mask; the one or two at the diagonal run in a
second loop.

The copy engine moves blocks of 8 rows, so tiles begin at multiples of 8 tokens of the *pack*: the first tile of a
request may begin with up to 7 tokens of the request before it, which are computed (each row is its own affair) and not
stored. Whole tiles leave by the copy engine, ragged ones row by row.

The design follows published ones: FlashAttention-3 (specialised warpgroups, weights in registers as the left operand,
softmax beside products) and its rendering in JAX's own ``pallas.ops.gpu.attention_mgpu``. See NOTES.md beside this.
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

from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.paged_prefill_attention.mosaic_products import DIM, Emulated, Products
from pallas_kernels.paged_prefill_attention.mosaic_work import ALIGNMENT, PAGE, TILE, Work, work_list

STAGES = 2
EXACT_PAGES = 2  # tiles that see no more pages carry their weights in full
HEADS = 2  # query heads of a block, a warpgroup each

SCHEDULES = ("overlap", "turns", "free")

_LOG2_E = math.log2(math.e)
_MATRIX = plgpu.Layout.WGMMA
_ROWS = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What may be tuned.

    Attributes:
        blocks: blocks of the grid; each takes its share of the work. More than the GPU has multiprocessors wait.
        schedule: "turns": the two warpgroups of a block take turns at the tensor cores; "overlap": each computes the
            softmax of a page beside its own product with the values of the page before; "free": neither.
        cluster: blocks that take the same tile for neighbouring pairs of heads of one key/value head, each bringing a
            part of every page for all. One where the pairs do not divide.
    """

    blocks: int = 132
    schedule: str = "overlap"
    cluster: int = 1

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r}: known are {', '.join(SCHEDULES)}")
        if self.cluster > 1 and self.schedule == "overlap":
            raise ValueError(
                f"cluster {self.cluster} with schedule 'overlap': the compiler would serialise its products"
            )


def supports(target, arguments) -> None:
    """Hopper, head dim 256, pages of 64, 16-bit activations, an even number of query heads a key/value head."""
    require_nvidia(target, at_least=(9, 0), before=(10, 0))  # wgmma is Hopper's alone
    num_tokens, num_heads, head_dim = arguments["q"].shape
    pool = arguments["kv_pool"].shape
    require(head_dim == DIM, f"takes head dim {DIM}, not {head_dim}")
    require(pool[4] == PAGE, f"takes pages of {PAGE}, not {pool[4]}")
    require(arguments["q"].dtype.itemsize == 2, f"takes 16-bit activations, not {arguments['q'].dtype}")
    group = num_heads // pool[3]
    require(group % HEADS == 0, f"takes an even number of query heads a key/value head, not {group}")
    require(num_tokens > 0, "takes at least one token")
    require(math.prod(pool[:4]) < 2**31, f"{math.prod(pool[:4])} matrices of keys and values are past int32")


def paged_prefill_attention(
    q,
    gates,
    kv_pool,
    layer,
    page_table,
    cu_seqlens,
    kv_lens,
    *,
    first_gate,
    tuning: Tuning | None = None,
    interpret=False,
) -> jax.Array:
    """See :func:`pallas_kernels.paged_prefill_attention`."""
    num_tokens, num_heads, _ = q.shape
    num_pages, _, num_kv_heads = kv_pool.shape[1:4]
    tuning = tuning or Tuning()
    work, count = work_list(cu_seqlens, kv_lens, num_tokens)
    padding = -num_tokens % ALIGNMENT  # none in a bucket of the engine
    if padding:
        q, gates = (jnp.pad(array, ((0, padding), (0, 0), (0, 0))) for array in (q, gates))
    pairs = num_heads // HEADS
    cluster = tuning.cluster if (pairs // num_kv_heads) % tuning.cluster == 0 else 1
    clusters = min(tuning.blocks, work.start.shape[0] * pairs) // cluster
    body = functools.partial(
        _kernel,
        pairs=pairs,
        num_kv_heads=num_kv_heads,
        num_pages=num_pages,
        first_gate=first_gate,
        num_clusters=clusters,
        cluster=cluster,
        schedule=tuning.schedule,
        emulate=bool(interpret),
    )
    kernel = pl.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        mesh=plgpu.Mesh(
            grid=(clusters,),
            grid_names=("cluster",),
            cluster=(cluster,) if cluster > 1 else (),
            cluster_names=("block",) if cluster > 1 else (),
            num_threads=HEADS + 1,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        interpret=interpret,
        name="paged_prefill_attention",
    )
    # A matrix of keys or values is 64 x 256 in one piece: the copy engine addresses (matrix, row, column).
    matrices = kv_pool.reshape(-1, PAGE, DIM)
    items = (count * (pairs // cluster))[None]
    [out] = kernel(q, gates, matrices, jnp.stack(work), items, layer[None], page_table, kv_lens)
    return out[:num_tokens] if padding else out


def _kernel(
    q_ref,  # [T, N, H]
    gates_ref,  # [T, X, H]
    matrices_ref,  # [L P 2 K, Z, H]
    work_ref,  # [7, M]
    items_ref,  # [1]: items of work
    layer_ref,  # [1]
    table_ref,  # [R, W]
    kv_lens_ref,  # [R]
    out_ref,  # [T, N, H]
    *,
    pairs: int,
    num_kv_heads: int,
    num_pages: int,
    first_gate: int,
    num_clusters: int,
    cluster: int,
    schedule: str,
    emulate: bool,
):
    dtype = q_ref.dtype
    swizzled = (plgpu.TilingTransform((8, 128 // dtype.itemsize)), plgpu.SwizzleTransform(128))

    def body(queries, matrices, *barriers):
        warpgroup, own_cluster = lax.axis_index("warpgroup"), lax.axis_index("cluster")
        block = lax.axis_index("block") if cluster > 1 else 0
        memory = _Memory(queries, *matrices, *barriers)
        items = items_ref[0]
        rounds = lax.div(items + (num_clusters - 1), jnp.int32(num_clusters))

        def every_tile(of_tile):
            """Items are dealt there and back, so that nobody gets the longest of every round."""

            def one_round(number, used):
                place = jnp.where(lax.rem(number, jnp.int32(2)) == 0, own_cluster, num_clusters - 1 - own_cluster)
                item = number * num_clusters + place
                parts = jnp.int32(pairs // cluster)
                tile, pair = lax.div(item, parts), lax.rem(item, parts) * cluster + block
                live = item < items
                tile = jnp.where(live, tile, 0)
                work = Work(*(work_ref[field, tile] for field in range(len(Work._fields))))

                @pl.when(live)
                def _():
                    of_tile(work, pair, used)

                return used + jnp.where(live, work.pages + 1, 0)

            return lax.fori_loop(0, rounds, one_round, jnp.int32(0))

        @pl.when(warpgroup < HEADS)
        def _():
            plgpu.set_max_registers(232, action="increase")

            def of_tile(work, pair, used):
                head = pair * HEADS + warpgroup
                _compute(out_ref, memory, work, head, warpgroup, used, schedule, shared, emulate)

            every_tile(of_tile)

        @pl.when(warpgroup == HEADS)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            def of_tile(work, pair, used):
                kv_head = lax.div(pair, jnp.int32(pairs // num_kv_heads))

                def matrix(step):
                    page = layer_ref[0] * num_pages + table_ref[work.request, step]
                    return page * (2 * num_kv_heads) + kv_head

                sources = (q_ref, gates_ref, matrices_ref)
                kv_len = kv_lens_ref[work.request]
                _bring(*sources, memory, work, pair, used, kv_len, matrix, num_kv_heads, first_gate, shared)

            _drain(memory, every_tile(of_tile))

    shared = "block" if cluster > 1 else None
    matrices = (2, STAGES, TILE, DIM)
    free = {"num_arrivals": HEADS, "num_barriers": 2 * STAGES}
    pl.run_scoped(
        body,
        plgpu.SMEM((HEADS, TILE, DIM), dtype, transforms=swizzled),
        plgpu.RefUnion(plgpu.SMEM(matrices, dtype, transforms=swizzled), plgpu.SMEM(matrices, dtype)),
        plgpu.Barrier(num_barriers=HEADS),
        plgpu.Barrier(num_barriers=HEADS),
        plgpu.Barrier(num_barriers=2 * STAGES),
        plgpu.ClusterBarrier(collective_axes=(shared,), **free) if shared else plgpu.Barrier(**free),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=HEADS),
        collective_axes="warpgroup",
    )


class _Memory(NamedTuple):
    """Shared memory and barriers of a block."""

    queries: Any  # [2, 64, 256], of each head
    matrices: Any  # [2, STAGES, 64, 256]: keys, values; behind the last page the gates of each head, then its output
    plain: Any  # the same memory without swizzle
    queries_full: Any  # a barrier a head
    queries_free: Any
    full: Any  # barriers of the keys' stages, then of the values'
    free: Any
    tail: Any  # values that are to be cleaned
    turn: Any


KEYS, VALUES = 0, 1


def _barrier(kind, stage):
    """Which barrier of ``full`` or ``free`` belongs to a stage."""
    return kind * STAGES + stage


def _bring(q_ref, gates_ref, matrices_ref, memory, work, pair, used, kv_len, matrix, num_kv_heads, first_gate, shared):
    """The third warpgroup: queries of both heads, keys and values of every page of the tile, then the gates."""
    window = pl.ds(work.start, TILE)
    for head in range(HEADS):
        pl.when(used > 0)(functools.partial(plgpu.barrier_wait, memory.queries_free.at[head]))
        source = q_ref.at[window, pair * HEADS + head]
        plgpu.copy_gmem_to_smem(source, memory.queries.at[head], memory.queries_full.at[head])

    def wait_until_free(kind, number):
        barrier = memory.free.at[_barrier(kind, lax.rem(number, jnp.int32(STAGES)))]
        pl.when(number >= STAGES)(functools.partial(plgpu.barrier_wait, barrier))

    def fetch(kind, number, source, *, barrier=None, shared=None):
        stage = lax.rem(number, jnp.int32(STAGES))
        barrier = memory.full.at[_barrier(kind, stage)] if barrier is None else barrier
        plgpu.copy_gmem_to_smem(source, memory.matrices.at[kind, stage], barrier, collective_axes=shared)

    @pl.loop(0, work.pages)
    def _(step):
        number = used + step
        source = matrix(step)
        wait_until_free(KEYS, number)
        fetch(KEYS, number, matrices_ref.at[source], shared=shared)
        source = matrices_ref.at[source + num_kv_heads]
        written = kv_len - step * PAGE  # rows of the page that hold tokens
        wait_until_free(VALUES, number)

        @pl.when(written >= PAGE)
        def _():
            fetch(VALUES, number, source, shared=shared)

        # Behind the end of the request a page may hold NaN, and a weight of 0 times NaN is NaN: those values become
        # zeros before anyone sees them. Keys need nothing: their scores are replaced.
        @pl.when(written < PAGE)
        def _():
            fetch(VALUES, number, source, barrier=memory.tail, shared=shared)
            plgpu.barrier_wait(memory.tail)
            stage = lax.rem(number, jnp.int32(STAGES))
            row = plgpu.broadcasted_iota(jnp.int32, (PAGE, 64), 0, layout=_MATRIX)
            for column in range(0, DIM, 64):
                columns = pl.ds(column, 64)
                piece = plgpu.load(memory.matrices.at[VALUES, stage, :, columns], layout=_MATRIX)
                memory.matrices[VALUES, stage, :, columns] = jnp.where(row < written, piece, jnp.zeros_like(piece))
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.full.at[_barrier(VALUES, stage)])

    for head in range(HEADS):
        wait_until_free(head, used + work.pages)
        fetch(head, used + work.pages, gates_ref.at[window, first_gate + pair * HEADS + head])


def _drain(memory, used):
    """Wait for what the computing warpgroups have still to give back: no phase of a barrier goes unseen."""
    for head in range(HEADS):
        pl.when(used > 0)(functools.partial(plgpu.barrier_wait, memory.queries_free.at[head]))
    for behind in range(STAGES, 0, -1):
        for kind in (KEYS, VALUES):
            barrier = memory.free.at[_barrier(kind, lax.rem(used - behind + STAGES, jnp.int32(STAGES)))]
            pl.when(used >= behind)(functools.partial(plgpu.barrier_wait, barrier))


def _compute(out_ref, memory, work, head, warpgroup, used, schedule, shared, emulate):
    """One of the first two warpgroups: a head of the tile."""
    dtype = out_ref.dtype
    products = Emulated() if emulate else Products()
    queries = memory.queries.at[warpgroup]
    turns = schedule == "turns"

    def take_turn():
        if turns:
            plgpu.barrier_arrive(memory.turn)
            plgpu.barrier_wait(memory.turn)

    def stage_of(step):
        return lax.rem(used + step, jnp.int32(STAGES))

    def of(kind, step):
        return memory.matrices.at[kind, stage_of(step)]

    def wait_for(kind, step):
        plgpu.barrier_wait(memory.full.at[_barrier(kind, stage_of(step))])

    def give_back(kind, step):
        plgpu.barrier_arrive(memory.free.at[_barrier(kind, stage_of(step))])

    def softmax(step, scores, top, masked):
        """Weights, the new maximum (scaled, to base 2), and what sums up to now shrink by."""
        if masked:
            query = plgpu.broadcasted_iota(jnp.int32, (TILE, PAGE), 0, layout=_MATRIX) + work.position
            key = plgpu.broadcasted_iota(jnp.int32, (TILE, PAGE), 1, layout=_MATRIX) + step * PAGE
            scores = jnp.where(query >= key, scores, -jnp.inf)
        scale = DIM**-0.5 * _LOG2_E
        new_top = jnp.maximum(top, jnp.max(scores, axis=1) * scale)
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_top, (TILE, PAGE), [0]))
        return weights, new_top, jnp.exp2(top - new_top)

    def one_page(step, carry, *, masked: bool, exact: bool):
        """Scores, softmax and sum of a page, one after the other; the keys of the page are there."""
        total, top, norm = carry
        scores = products.scores(queries, of(KEYS, step), take_turn)
        give_back(KEYS, step)
        weights, top, shrink = softmax(step, scores, top, masked)
        total = total * lax.broadcast_in_dim(shrink, (TILE, DIM), [0])
        halves = [weights.astype(dtype)]
        if exact:
            halves.append((weights - halves[0].astype(jnp.float32)).astype(dtype))
        if turns:
            plgpu.barrier_arrive(memory.turn)  # the softmax is done
        wait_for(VALUES, step)
        if turns:
            plgpu.barrier_wait(memory.turn)
        norm = norm * shrink + jnp.sum(weights, axis=1)

        def while_running():
            pl.when(step + 1 < work.pages)(lambda: wait_for(KEYS, step + 1))

        total = products.add(total, halves, of(VALUES, step), while_running)
        give_back(VALUES, step)
        return total, top, norm

    def overlapped(step, carry, *, masked: bool):
        """Scores of a page, then the sum of the page before it while the softmax of this one is computed."""
        total, top, norm, weights = carry
        before = step - 1
        wait_for(KEYS, step)

        def after_scores(scores):
            give_back(KEYS, step)
            new_weights, new_top, shrink = softmax(step, scores, top, masked)
            return new_weights.astype(dtype), new_top, shrink, norm * shrink + jnp.sum(new_weights, axis=1)

        total, (weights, top, shrink, norm) = products.both(
            queries,
            of(KEYS, step),
            total,
            weights,
            of(VALUES, before),
            lambda: wait_for(VALUES, before),
            after_scores,
        )
        give_back(VALUES, before)
        total = total * lax.broadcast_in_dim(shrink, (TILE, DIM), [0])
        return total, top, norm, weights

    carry = (
        plgpu.layout_cast(jnp.zeros((TILE, DIM), jnp.float32), _MATRIX),
        plgpu.layout_cast(jnp.full((TILE,), -jnp.inf, jnp.float32), _ROWS),
        plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), _ROWS),
    )

    def few_pages(carry):
        """Queries of few keys: there a rounded weight would show, so both its halves count."""
        return lax.fori_loop(0, work.pages, functools.partial(one_page, masked=True, exact=True), carry)

    def many_pages(carry):
        if schedule != "overlap":
            whole, masked = (functools.partial(one_page, masked=masked, exact=False) for masked in (False, True))
            return lax.fori_loop(work.whole, work.pages, masked, lax.fori_loop(0, work.whole, whole, carry))
        total, top, norm = carry
        scores = products.scores(queries, of(KEYS, 0), lambda: None)
        give_back(KEYS, 0)
        weights, top, _ = softmax(0, scores, top, False)  # EXACT_PAGES >= 2: the first page is seen whole
        carry = total, top, jnp.sum(weights, axis=1), weights.astype(dtype)
        carry = lax.fori_loop(1, work.whole, functools.partial(overlapped, masked=False), carry)
        carry = lax.fori_loop(work.whole, work.pages, functools.partial(overlapped, masked=True), carry)
        total, top, norm, weights = carry
        last = work.pages - 1
        wait_for(VALUES, last)
        total = products.add(total, [weights], of(VALUES, last), lambda: None)
        give_back(VALUES, last)
        return total, top, norm

    plgpu.barrier_wait(memory.queries_full.at[warpgroup])

    @pl.when(work.pages > 0)
    def _():
        wait_for(KEYS, 0)
        pl.when(warpgroup == 1)(take_turn)

    total, _, norm = lax.cond(work.pages > EXACT_PAGES, many_pages, few_pages, carry)
    plgpu.barrier_arrive(memory.queries_free.at[warpgroup])
    pl.when((warpgroup == 0) & (work.pages > 0))(take_turn)

    # One more stage: the gates of the first head in the memory of keys, those of the second in that of values. The
    # output takes their place on its way out.
    for kind in (KEYS, VALUES):
        wait_for(kind, work.pages)
    if not shared:
        give_back(1 - warpgroup, work.pages)
    stage = stage_of(work.pages)
    gates = plgpu.load(memory.matrices.at[warpgroup, stage], layout=_MATRIX).astype(jnp.float32)
    gates = jnp.tanh(gates * 0.5) * 0.5 + 0.5  # the logistic function by one special function instead of two
    out = total * lax.broadcast_in_dim(1.0 / norm, (TILE, DIM), [0]) * gates
    out = jnp.where(work.pages > 0, out, jnp.zeros_like(out)).astype(dtype)  # pads: whatever their gates hold

    @pl.when(work.end - work.first == TILE)
    def _():
        memory.matrices[warpgroup, stage] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.matrices.at[warpgroup, stage], out_ref.at[pl.ds(work.start, TILE), head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(work.end - work.first < TILE)
    def _():
        memory.plain[warpgroup, stage] = out

        @pl.loop(work.first, work.end)
        def _(row):
            out_ref[work.start + row, head] = memory.plain[warpgroup, stage, row]

        plgpu.commit_smem()  # the copy engine writes there next

    if shared:  # one thread speaks for its warpgroup: not before all have come here
        give_back(1 - warpgroup, work.pages)
    give_back(warpgroup, work.pages)
