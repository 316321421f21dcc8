"""``paged_prefill_attention`` on NVIDIA GPUs, Pallas-Triton: a program for each tile of queries and each query head.

The tiles come from the work list of the pack; the pads behind it ride along as one more request without keys, so they
become zeros without a write of their own. The heads of one tile run side by side and share its keys in the L2 cache;
tiles start from the end of the pack: later queries of a request see more keys, long programs first leave short ones to
fill the gaps. Pages that every query of a tile sees whole need no mask; the few at the diagonal run in a second loop.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpu_support import full_float32, require, require_nvidia, three_tf32, weighted_sum
from pallas_kernels.packing import tile_work_list

_LOWEST = -1e30  # start of running maxima: finite, so that no difference is NaN
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        queries: tokens of a tile.
        keys: keys of a step, a power of two that divides the page.
        warps: warps of a program.
        stages: depth of the pipeline that loads keys and values.
    """

    queries: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 2


FLOAT32 = Tiling(queries=16, keys=32, warps=4, stages=1)
"""Larger tiles spill registers: three products of TF32 parts stand for each product."""


def supports(target, arguments) -> None:
    """Head dim 256, pages of 64, any activation dtype."""
    require_nvidia(target, at_least=(9, 0), before=(10, 0))  # others have less shared memory, or were never tried
    head_dim, page_size = arguments["q"].shape[2], arguments["kv_pool"].shape[4]
    require(head_dim == 256, f"takes head dim 256, not {head_dim}")
    require(page_size == 64, f"takes pages of 64, not {page_size}")


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
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See :func:`pallas_kernels.paged_prefill_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    num_requests = page_table.shape[0]
    group = num_heads // kv_pool.shape[3]
    tiling = tiling or (Tiling() if q.dtype.itemsize == 2 else FLOAT32)
    queries = tiling.queries
    # A CPU, where kernels are interpreted, has no TF32.
    precision = full_float32(q.dtype) if interpret else three_tf32(q.dtype)
    offsets = jnp.concatenate([cu_seqlens, jnp.full((1,), num_tokens, cu_seqlens.dtype)])
    totals = jnp.concatenate([kv_lens, jnp.zeros((1,), kv_lens.dtype)])
    tiles = tile_work_list(offsets, num_tokens, queries)
    first_positions = totals[tiles.request] - offsets[tiles.request + 1] + tiles.start
    index = jnp.arange(tiles.start.shape[0], dtype=jnp.int32)
    lengths = jnp.where(index < tiles.count, tiles.length, 0)  # dead tiles hold no token
    # Pads sit at negative positions: no key is visible to them.
    first_positions = jnp.where(tiles.request < num_requests, first_positions, -queries - 1)
    work = jnp.stack([jnp.minimum(tiles.request, num_requests - 1), tiles.start, lengths, first_positions])

    whole = pl.BlockSpec(memory_space=pl.ANY)
    # Room for the last tile to run past the end: rows past a tile's length are masked, so nothing is read there.
    tokens, tokens_and_gates = (
        pl.BlockSpec((num_tokens + queries, heads, head_dim), lambda head, tile: (0, 0, 0))
        for heads in (num_heads, gates.shape[1])
    )
    return pl.pallas_call(
        functools.partial(
            _attend, queries=queries, keys=tiling.keys, group=group, first_gate=first_gate, precision=precision
        ),
        grid=(num_heads, index.shape[0]),
        in_specs=[whole, tokens, tokens_and_gates, whole, whole, whole],
        out_specs=tokens,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="paged_prefill_attention",
    )(work, q, gates, kv_pool, layer[None], page_table)


def _attend(
    work_ref,  # [4, M]
    q_ref,  # [T, N, H]
    gates_ref,  # [T, X, H]
    pool_ref,  # [L, P, 2, K, Z, H]
    layer_ref,  # [1]
    table_ref,  # [R, W]
    out_ref,  # [T, N, H]
    *,
    queries: int,
    keys: int,
    group: int,
    first_gate: int,
    precision,
):
    """One tile of queries of one head."""
    head, tile = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1)
    request, start, length, first_position = (work_ref[field, tile] for field in range(4))
    page_size, head_dim = pool_ref.shape[4:]
    kv_head, layer = head // group, layer_ref[0]
    steps = jnp.arange(queries, dtype=jnp.int32)
    tokens = pl.ds(start, queries)
    real = jnp.broadcast_to((steps < length)[:, None], (queries, head_dim))
    positions = first_position + steps
    kv_len = first_position + length  # what the last query of the tile sees

    scale = head_dim**-0.5 * _LOG2_E

    @pl.when(length > 0)
    def _():
        q = plgpu.load(q_ref.at[tokens, head], mask=real, other=0.0)  # [queries, H]

        def some_keys(number, carry, *, masked: bool):
            top, norm, acc = carry
            first = number * keys
            page = table_ref[request, lax.div(first, page_size)]
            places = pl.ds(lax.rem(first, page_size), keys)
            key = pool_ref[layer, page, 0, kv_head, places]  # [keys, H]
            scores = plgpu.dot(q, key, trans_b=True, precision=precision)
            if masked:
                where = first + jnp.arange(keys, dtype=jnp.int32)
                scores = jnp.where(where[None, :] <= jnp.minimum(positions, kv_len - 1)[:, None], scores, -jnp.inf)
                seen = jnp.broadcast_to((where < kv_len)[:, None], (keys, head_dim))
                value = plgpu.load(pool_ref.at[layer, page, jnp.int32(1), kv_head, places], mask=seen, other=0.0)
            else:
                value = pool_ref[layer, page, 1, kv_head, places]
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            weights = jnp.exp2((scores - new_top[:, None]) * scale)
            shrink = jnp.exp2((top - new_top) * scale)
            norm = norm * shrink + jnp.sum(weights, axis=1)
            # Queries of few keys lie at the diagonal: there a rounded weight would show, so both its halves count.
            acc = acc * shrink[:, None] + weighted_sum(weights, value, exact=masked, precision=precision)
            return new_top, norm, acc

        carry = (
            jnp.full((queries,), _LOWEST, jnp.float32),
            jnp.zeros((queries,), jnp.float32),
            jnp.zeros((queries, head_dim), jnp.float32),
        )
        seen_whole = jnp.maximum(first_position + 1, 0) // keys
        last = pl.cdiv(jnp.maximum(kv_len, 0), keys)
        carry = lax.fori_loop(0, seen_whole, functools.partial(some_keys, masked=False), carry)
        _, norm, acc = lax.fori_loop(seen_whole, last, functools.partial(some_keys, masked=True), carry)
        gate = plgpu.load(gates_ref.at[tokens, first_gate + head], mask=real, other=0.0)
        gated = acc / norm[:, None] * lax.logistic(gate.astype(jnp.float32))
        gated = jnp.where(kv_len > 0, gated, 0.0).astype(out_ref.dtype)  # pads: zeros, whatever their gates hold
        plgpu.store(out_ref.at[tokens, head], gated, mask=real)
