"""``gdn_prefill`` on NVIDIA GPUs, Pallas-Triton: the chunkwise form in two kernels.

With K and Q the raw rows of a chunk's tokens (k = a K, q = c Q, where a and c are the factors of the normalisation), G
the inclusive log-decay sums and S^T [Dk, Dv] the state before the chunk, the definition (:mod:`reference`) reads

    d  = T (V - diag(a exp(G)) K S^T)                        T = (I + L)^-1 diag(beta)
    o  = diag(c exp(G)) Q S^T + P d                          P_ij = (q_i . k_j) exp(G_i - G_j) for j <= i
    S'^T = exp(G_last) S^T + K^T diag(a exp(G_last - G)) d

Everything that does not depend on the state (T, P and the factors of the rows) is computed by the first kernel, a
program for each tile of 64 tokens and value head, all of them in parallel. The second walks through the tiles of a
request in order, a program for each (request, value head, block of value dims), with its part of the state in
registers from the pool to the pool. Programs of the longest requests start first.

Precision. K, Q and V enter the products as they are, so 16-bit ones are exact operands of the tensor cores; the factors
of their rows multiply the float32 results. A float32 operand is carried as the sum of two bfloat16 numbers (16 bits of
mantissa) for bfloat16 activations and of three (all 24 bits) for others, which are split themselves. The inverse is
found by elimination in diagonal blocks of 16 tokens, in plain float32, and the blocks are joined by products: powers of
L, whose entries grow like binomials where keys repeat, never appear.

Between the kernels stand T and P, for each of the ``T // 64 + R`` tiles and each value head 2 x 64 x 64 numbers of 4
bytes (6 unless activations are bfloat16): for 8192 tokens of 8 requests 68 MiB with 16 value heads, 136 MiB with 32 and
204 MiB with 48, beside 3 % of factors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gdn_prefill.reference import STRONGEST_LOG_DECAY
from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.numerics import L2_EPSILON, delta_gates
from pallas_kernels.packing import TILE, max_tiles, tile_work_list

DIM = 128  # Dk and Dv
_READ, _QUERY, _WRITE, _KEPT = range(4)  # factors of the rows: a exp(G), c exp(G), a exp(G_last - G), exp(G)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        value_dims: value dims of a program of the second kernel.
        key_dims: key dims of one product of the second kernel; the state is held in pieces of as many.
        parts: bfloat16 numbers that carry a float32 operand (1 to 3).
        solved: tokens of a diagonal block that is inverted by elimination.
        solve_warps: warps of a program of the first kernel.
        scan_warps: warps of a program of the second kernel.
        scan_stages: depth of the pipeline that loads the tiles of the second kernel.
    """

    value_dims: int = 32
    key_dims: int = 128
    parts: int = 2
    solved: int = 16
    solve_warps: int = 4
    scan_warps: int = 4
    scan_stages: int = 3


# Three parts fill the shared memory: no pipeline, narrow blocks, the state in two pieces.
FULL_FLOAT32 = Tiling(value_dims=16, key_dims=64, parts=3, scan_stages=1)
"""Of activations that are not bfloat16."""


def supports(target, arguments) -> None:
    """Hopper, heads of 128 x 128, any activation and state dtype."""
    require_nvidia(target, at_least=(9, 0), before=(10, 0))  # others were never tried
    _, _, _, head_v_dim, head_k_dim = arguments["state_pool"].shape
    require(head_v_dim == DIM and head_k_dim == DIM, f"takes heads of {DIM} x {DIM}, not {head_v_dim} x {head_k_dim}")
    num_requests = arguments["slot_ids"].shape[0]
    tiles = max_tiles(arguments["qkv"].shape[0], num_requests)
    require(max(tiles, num_requests + 1) < 2**16, f"takes at most 65535 tiles and requests, not {tiles} tiles")


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
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.gdn_prefill`. The pool is an operand aliased to a result: written in place."""
    num_tokens, channels = qkv.shape
    num_heads, head_v_dim = state_pool.shape[2:4]
    tiling = tiling or (Tiling() if qkv.dtype == jnp.bfloat16 else FULL_FLOAT32)
    tiles, requests = _work(cu_seqlens, slot_ids, has_state, num_tokens)
    num_tiles = tiles.shape[1]
    sizes = {"num_k_heads": num_k_heads, "group": num_heads // num_k_heads, "parts": tiling.parts}

    whole = pl.BlockSpec(memory_space=pl.ANY)

    def token_rows(*shape: int) -> pl.BlockSpec:
        """Room for the last tile to run past the end: rows past a tile's length are masked, nothing is read there."""
        return pl.BlockSpec((num_tokens + TILE, *shape), lambda *_: (0,) * (1 + len(shape)))

    matrices = jax.ShapeDtypeStruct((num_tiles, num_heads, tiling.parts, TILE, TILE), jnp.bfloat16)
    factors = jax.ShapeDtypeStruct((num_tiles, num_heads, 4, TILE), jnp.float32)
    solved, scores, factors = pl.pallas_call(
        functools.partial(_solve, **sizes, size=tiling.solved),
        grid=(num_heads, num_tiles),
        in_specs=[whole, token_rows(channels), token_rows(num_heads), token_rows(num_heads), whole, whole],
        out_specs=[whole] * 3,
        out_shape=[matrices, matrices, factors],
        compiler_params=plgpu.CompilerParams(num_warps=tiling.solve_warps, num_stages=1),
        interpret=interpret,
        name="gdn_prefill_solve",
    )(tiles, qkv, b, a, A_log, dt_bias)

    out, state_pool = pl.pallas_call(
        functools.partial(_scan, **sizes, value_dims=tiling.value_dims, key_dims=tiling.key_dims),
        grid=(head_v_dim // tiling.value_dims, num_heads, requests.shape[1]),
        in_specs=[whole, token_rows(channels), whole, whole, whole, whole, whole],
        out_specs=[token_rows(num_heads, head_v_dim), whole],
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, num_heads, head_v_dim), qkv.dtype),
            jax.ShapeDtypeStruct(state_pool.shape, state_pool.dtype),
        ],
        input_output_aliases={6: 1},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.scan_warps, num_stages=tiling.scan_stages),
        interpret=interpret,
        name="gdn_prefill_scan",
    )(requests, qkv, solved, scores, factors, layer[None], state_pool)
    return out, state_pool


def _work(cu_seqlens, slot_ids, has_state, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Work of the two kernels.

    Returns:
        i32[2, M], (start, length) of each tile, length 0 for dead entries; i32[5, R + 1], (start, length, first tile,
        slot, has_state) of the requests, longest first, and of the pads as one more request at the end, of slot -1.
    """
    tiles = tile_work_list(cu_seqlens, num_tokens)
    index = jnp.arange(tiles.start.shape[0], dtype=jnp.int32)
    tile_fields = jnp.stack([tiles.start, jnp.where(index < tiles.count, tiles.length, 0)])

    num_requests = slot_ids.shape[0]
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    index = jnp.arange(num_requests, dtype=jnp.int32)
    tiles_before = jnp.sum(jnp.where(index < index[:, None], (lengths + TILE - 1) // TILE, 0), axis=1)
    fields = jnp.stack([cu_seqlens[:-1], lengths, tiles_before, slot_ids, has_state.astype(jnp.int32)])
    longer = (lengths > lengths[:, None]) | ((lengths == lengths[:, None]) & (index < index[:, None]))
    place = jnp.sum(longer, axis=1, dtype=jnp.int32)  # of each request in the order
    fields = jnp.sum(jnp.where(place == index[:, None], fields[:, None], 0), axis=2, dtype=jnp.int32)
    pads = jnp.stack([cu_seqlens[-1], num_tokens - cu_seqlens[-1], 0, -1, 0]).astype(jnp.int32)
    return tile_fields, jnp.concatenate([fields, pads[:, None]], axis=1)


def _solve(
    tiles_ref,  # [2, M]
    qkv_ref,  # [T + 64, C]
    b_ref,  # [T + 64, Hv]
    a_ref,
    A_log_ref,  # [Hv]
    dt_bias_ref,
    solved_ref,  # [M, Hv, parts, 64, 64]
    scores_ref,
    factors_ref,  # [M, Hv, 4, 64]
    *,
    num_k_heads: int,
    group: int,
    parts: int,
    size: int,
):
    """T, P and the factors of one tile of one value head."""
    head, tile = pl.program_id(0), pl.program_id(1)
    start, length = tiles_ref[0, tile], tiles_ref[1, tile]
    key_head = head // group
    steps = jnp.arange(TILE, dtype=jnp.int32)
    tokens, real = pl.ds(start, TILE), steps < length
    real_rows = jnp.broadcast_to(real[:, None], (TILE, DIM))

    @pl.when(length > 0)
    def _():
        query = plgpu.load(qkv_ref.at[tokens, pl.ds(key_head * DIM, DIM)], mask=real_rows, other=0.0)
        key = plgpu.load(qkv_ref.at[tokens, pl.ds((num_k_heads + key_head) * DIM, DIM)], mask=real_rows, other=0.0)
        norm_query, norm_key = (
            lax.rsqrt(jnp.sum(rows * rows, axis=1) + L2_EPSILON)
            for rows in (query.astype(jnp.float32), key.astype(jnp.float32))
        )
        norm_query = norm_query * DIM**-0.5
        beta, decay = delta_gates(
            plgpu.load(b_ref.at[tokens, head], mask=real, other=0.0),
            plgpu.load(a_ref.at[tokens, head], mask=real, other=0.0),
            A_log_ref[head],
            dt_bias_ref[head],
        )
        beta = jnp.where(real, beta, 0.0)
        decay = jnp.where(real, jnp.maximum(decay, STRONGEST_LOG_DECAY), 0.0)

        rows, columns = (jnp.broadcast_to(x, (TILE, TILE)) for x in (steps[:, None], steps[None, :]))
        # Inclusive sums, in powers of two, as two numbers, so that differences of large ones are good: multiples of
        # 1 / 64, exact up to 2^18, and what is left, below 1 / 64 a token.
        decay = decay * math.log2(math.e)
        coarse = jnp.floor(decay * 64.0) * (1.0 / 64.0)
        decays = coarse, decay - coarse
        sums = [lax.cumsum(x) for x in decays]
        since = sum(x[:, None] - x[None, :] for x in sums)
        since_start = jnp.exp2(sum(sums))
        until_end = jnp.exp2(sum(jnp.sum(x) - until for x, until in zip(decays, sums, strict=True)))

        key_parts = _split(key, parts)
        keys_transposed = [part.T for part in key_parts]
        between = jnp.exp2(jnp.where(columns <= rows, since, -jnp.inf)) * norm_key[None, :]
        scores = _product(_split(query, parts), keys_transposed) * between * norm_query[:, None]
        for number, part in enumerate(_split(scores, parts)):
            scores_ref[tile, head, number] = part
        coupling = _product(key_parts, keys_transposed) * between * (beta * norm_key)[:, None]
        inverse = _inverse(jnp.where(columns < rows, coupling, 0.0), rows, columns, size, parts)
        for number, part in enumerate(_split(inverse * beta[None, :], parts)):
            solved_ref[tile, head, number] = part
        factors_ref[tile, head, _READ] = norm_key * since_start
        factors_ref[tile, head, _QUERY] = norm_query * since_start
        factors_ref[tile, head, _WRITE] = norm_key * until_end
        factors_ref[tile, head, _KEPT] = since_start


def _inverse(strict, rows, columns, size: int, parts: int) -> jax.Array:
    """``(I + strict)^-1`` of a strictly lower triangular matrix f32[64, 64].

    Gauss elimination in the diagonal blocks of ``size`` rows, all at once, column after column; then the inverses of
    neighbouring blocks are joined until one is left.
    """
    count = TILE // size
    blocks = jnp.arange(count, dtype=jnp.int32)
    diagonal = jnp.broadcast_to(
        blocks[:, None, None, None] == blocks[None, None, :, None], (count, size, count, size)
    )  # [own block, row, block, column]
    coupling = jnp.sum(jnp.where(diagonal, strict.reshape(diagonal.shape), 0.0), axis=2)  # [block, row, column]
    steps = jnp.arange(size, dtype=jnp.int32)

    def eliminate(step, inverse):
        column = jnp.sum(jnp.where(steps[None, None, :] == step, coupling, 0.0), axis=2)
        row = jnp.sum(jnp.where(steps[None, :, None] == step, inverse, 0.0), axis=1)
        return inverse - column[:, :, None] * row[:, None, :]

    unit = jnp.where(steps[:, None] == steps[None, :], 1.0, 0.0)
    inverse = lax.fori_loop(0, size - 1, eliminate, jnp.broadcast_to(unit[None], coupling.shape))
    inverse = jnp.where(diagonal, inverse[:, :, None, :], 0.0).reshape(TILE, TILE)
    power = size.bit_length() - 1
    while 1 << power < TILE:
        pairs = ((rows >> power + 1) == (columns >> power + 1)) & ((rows >> power) != (columns >> power))
        halves = _split(inverse, parts)
        crossing = _product(halves, _split(jnp.where(pairs, strict, 0.0), parts))
        inverse = inverse - _product(_split(crossing, parts), halves)
        power += 1
    return inverse


def _scan(
    requests_ref,  # [5, R + 1]
    qkv_ref,  # [T + 64, C]
    solved_ref,  # [M, Hv, parts, 64, 64]
    scores_ref,
    factors_ref,  # [M, Hv, 4, 64]
    layer_ref,  # [1]
    _,  # the pool: read through its alias
    out_ref,  # [T + 64, Hv, Dv]
    pool_ref,  # [L, S, Hv, Dv, Dk]
    *,
    num_k_heads: int,
    group: int,
    parts: int,
    value_dims: int,
    key_dims: int,
):
    """A block of value dims of one value head of one request, from its first token to its last."""
    block, head, place = (pl.program_id(axis) for axis in range(3))
    start, length, first_tile, slot, has_state = (requests_ref[field, place] for field in range(5))
    layer, key_head = layer_ref[0], head // group
    own = pl.ds(block * value_dims, value_dims)
    steps = jnp.arange(TILE, dtype=jnp.int32)
    num_tiles = (length + TILE - 1) // TILE
    pieces = [pl.ds(piece * key_dims, key_dims) for piece in range(DIM // key_dims)]

    def tile_rows(number):
        """Token rows of a tile, and masks of the real ones by width."""
        real = steps < length - number * TILE
        return pl.ds(start + number * TILE, TILE), lambda width: jnp.broadcast_to(real[:, None], (TILE, width))

    def one_tile(number, state):
        tokens, real = tile_rows(number)
        tile = first_tile + number

        def load(first_channel, width):
            return plgpu.load(qkv_ref.at[tokens, pl.ds(first_channel, width)], mask=real(width), other=0.0)

        # Loads that feed no product are not pipelined: they come first, to be there when they are used.
        read, query, write = (factors_ref[tile, head, kind][:, None] for kind in (_READ, _QUERY, _WRITE))
        kept = factors_ref[tile, head, _KEPT, TILE - 1]
        keys, reads, queries = [], [], []
        for piece, part in enumerate(state):
            halves = _split(part, parts)
            channels = key_head * DIM + piece * key_dims
            keys.append(_split(load(num_k_heads * DIM + channels, key_dims), parts))
            reads.append(_product(keys[-1], halves, wide=True))
            queries.append(_product(_split(load(channels, key_dims), parts), halves, wide=True))
        reads, queries = (functools.reduce(jnp.add, terms) for terms in (reads, queries))
        value = load(2 * num_k_heads * DIM + head * DIM + block * value_dims, value_dims).astype(jnp.float32)
        solved = [solved_ref[tile, head, part] for part in range(parts)]
        delta = _product(solved, _split(value - read * reads, parts), wide=True)
        scores = [scores_ref[tile, head, part] for part in range(parts)]
        out = query * queries + _product(scores, _split(delta, parts), wide=True)
        plgpu.store(out_ref.at[tokens, head, own], out.astype(out_ref.dtype), mask=real(value_dims))

        written = _split(write * delta, parts)
        added = [_product([half.T for half in key], written, wide=True) for key in keys]
        return tuple(kept * part + new for part, new in zip(state, added, strict=True))

    @pl.when((slot >= 0) & (length > 0))
    def _():
        stored = jnp.broadcast_to(has_state != 0, (value_dims, key_dims))
        state = tuple(
            plgpu.load(pool_ref.at[layer, slot, head, own, dims], mask=stored, other=0.0).astype(jnp.float32).T
            for dims in pieces
        )
        state = lax.fori_loop(0, num_tiles, one_tile, state)
        for dims, part in zip(pieces, state, strict=True):
            pool_ref[layer, slot, head, own, dims] = part.T.astype(pool_ref.dtype)

    @pl.when(slot < 0)  # pads
    def _():
        def clear(number, carry):
            tokens, real = tile_rows(number)
            zeros = jnp.zeros((TILE, value_dims), out_ref.dtype)
            plgpu.store(out_ref.at[tokens, head, own], zeros, mask=real(value_dims))
            return carry

        lax.fori_loop(0, num_tiles, clear, jnp.int32(0))


def _split(x: jax.Array, parts: int) -> list[jax.Array]:
    """A matrix as a sum of bfloat16 ones, largest first: itself, or ``parts`` of another dtype."""
    if x.dtype == jnp.bfloat16:
        return [x]
    rest, found = x.astype(jnp.float32), []
    for _ in range(parts - 1):
        # Rounded in integers: a conversion there and back is several times slower. A NaN may become a zero here, but
        # stays in the rest.
        bits = (lax.bitcast_convert_type(rest, jnp.int32) + 0x8000) & -0x10000
        part = lax.bitcast_convert_type(bits, jnp.float32)
        found.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return [*found, rest.astype(jnp.bfloat16)]


def _product(left: Sequence[jax.Array], right: Sequence[jax.Array], *, wide: bool = False) -> jax.Array:
    """Product of two sums of matrices, without the terms below the last part of either, smallest terms first.

    A loop waits for each of its products, so that one of two matrices side by side (``wide``) is faster than two of one
    each; there all terms of two parts are taken. It costs registers.
    """
    if wide and len(right) == 2:
        both = _side_by_side(*right)
        total = plgpu.dot(left[-1], both)
        for part in reversed(left[:-1]):
            total = total + plgpu.dot(part, both)
        return jnp.sum(total.reshape(-1, 2, right[0].shape[1]), axis=1)
    depth = max(len(left), len(right))
    terms = [(i, j) for i in range(len(left)) for j in range(len(right)) if i + j < depth]
    total = None
    for i, j in sorted(terms, key=lambda term: -sum(term)):
        term = plgpu.dot(left[i], right[j])
        total = term if total is None else total + term
    return total


def _side_by_side(first: jax.Array, second: jax.Array) -> jax.Array:
    """``[first | second]``, a matter of naming registers."""
    rows, columns = first.shape
    which = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32)[None, :, None], (rows, 2, columns))
    return jnp.where(which == 0, first[:, None], second[:, None]).reshape(rows, 2 * columns)
