"""Definition of ``gdn_prefill`` in plain jnp: the chunkwise form of the gated delta rule.

A chunk of 64 tokens with inclusive log-decay sums G, starting state S [Dv, Dk], satisfies

    (I + L) d = beta (v - exp(G) S k),   L_ij = beta_i (k_i . k_j) exp(G_i - G_j)  for j < i
    o_i = exp(G_i) S q_i + sum_{j <= i} exp(G_i - G_j) (q_i . k_j) d_j
    S'  = exp(G_last) S + sum_j exp(G_last - G_j) d_j k_j^T

Differences G_i - G_j are masked to -inf before exp: factored exponentials overflow for strong decays. The unit lower
triangular system is solved by forward substitution, row by row over all heads at once. The alternatives: the plain
Neumann product over 64 x 64 loses everything when neighbouring keys repeat (entries grow like binomials; measured
error 1e11 for equal keys, beta 0.97, no decay), and `lax.linalg.triangular_solve` is as exact but measured slower on a
CPU. A pad has k = 0, v = 0, beta = 0, g = 0, so position 63 carries what the last real position does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import HIGHEST, delta_gates, l2_normalize
from pallas_kernels.packing import TILE, tile_work_list

# exp(-100) is below the smallest normal float32: a stronger decay erases the state all the same, but its sums would
# lose the small decays after it, and -inf would make the differences NaN.
STRONGEST_LOG_DECAY = -100.0


def gdn_prefill(
    qkv, b, a, A_log, dt_bias, state_pool, layer, slot_ids, has_state, cu_seqlens, *, num_k_heads, head_k_dim
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.gdn_prefill`. One loop iteration a live tile; dead entries of the list cost nothing."""
    num_tokens = qkv.shape[0]
    _, _, num_v_heads, head_v_dim, _ = state_pool.shape
    group = num_v_heads // num_k_heads
    key_dim = num_k_heads * head_k_dim
    tiles = tile_work_list(cu_seqlens, num_tokens)
    steps = jnp.arange(TILE, dtype=jnp.int32)
    # Room for the last tile to run past the end, so that tiles are plain slices.
    qkv = jnp.pad(qkv, ((0, TILE), (0, 0)))
    query = qkv[:, :key_dim].reshape(-1, num_k_heads, head_k_dim)
    key = qkv[:, key_dim : 2 * key_dim].reshape(-1, num_k_heads, head_k_dim)
    value = qkv[:, 2 * key_dim :].reshape(-1, num_v_heads, head_v_dim)
    beta, decay = (
        jnp.pad(gate, ((0, TILE), (0, 0)))[..., None]
        for gate in delta_gates(b, a, A_log[:num_v_heads], dt_bias[:num_v_heads])
    )  # [T + 64, Hv, 1]

    def one_tile(index, carry):
        out, pool, state = carry
        request, start = tiles.request[index], tiles.start[index]
        slot = slot_ids[request]
        real = steps < tiles.length[index]

        def take(array):
            """The tile's rows of a padded array, zeros past its length, with the heads in front: [heads, 64, width]."""
            rows = jnp.where(real[:, None, None], lax.dynamic_slice_in_dim(array, start, TILE), 0)
            return jnp.moveaxis(rows.astype(jnp.float32), 0, 1)

        place = (layer, slot, 0, 0, 0)
        stored = lax.dynamic_slice(pool, place, (1, 1, *pool.shape[2:])).astype(jnp.float32)
        stored = jnp.where(has_state[request], stored, 0)
        state = jnp.where(tiles.first[index], stored.reshape(state.shape), state)
        tile_out, state = chunk_step(
            l2_normalize(take(query)) * head_k_dim**-0.5,
            l2_normalize(take(key)),
            take(value).reshape(num_k_heads, group, TILE, head_v_dim),
            take(beta).reshape(num_k_heads, group, TILE),
            take(decay).reshape(num_k_heads, group, TILE),
            state,
        )

        # Tiles come in packing order and end where the next begins, so the zeros written past a partial tile are
        # overwritten by the next one, or are the zeros of the padding.
        tile_out = jnp.moveaxis(tile_out.reshape(num_v_heads, TILE, head_v_dim), 0, 1)
        out = lax.dynamic_update_slice_in_dim(out, tile_out.astype(out.dtype), start, 0)
        # Every tile writes its request's own slot: cheaper than a branch, and the last one stays.
        written = state.reshape(1, 1, *pool.shape[2:]).astype(pool.dtype)
        pool = lax.dynamic_update_slice(pool, written, place)
        return out, pool, state

    out = jnp.zeros((num_tokens + TILE, num_v_heads, head_v_dim), qkv.dtype)
    state = jnp.zeros((num_k_heads, group, head_v_dim, head_k_dim), jnp.float32)
    out, state_pool, _ = lax.fori_loop(0, tiles.count, one_tile, (out, state_pool, state))
    return out[:num_tokens], state_pool


def chunk_step(query, key, value, beta, decay, state) -> tuple[jax.Array, jax.Array]:
    """One chunk of the gated delta rule, float32; K key heads, G value heads a key head.

    Heads stand in front and key and query share the products with the keys and with the state, which
    measured faster on a CPU than token-major operands multiplied one by one.

    Args:
        query: [K, C, Dk] normalised and scaled.
        key: [K, C, Dk] normalised.
        value: [K, G, C, Dv].
        beta: [K, G, C].
        decay: [K, G, C] log decays.
        state: [K, G, Dv, Dk].

    Returns:
        outputs [K, G, C, Dv] and the next state [K, G, Dv, Dk].
    """
    num_k_heads, group, size, head_v_dim = value.shape
    causal = jnp.tril(jnp.ones((size, size), bool))
    # Inclusive sums as a product with a triangle: a cumsum compiles to a kernel of its own.
    total = _einsum("kgj,ij->kgi", jnp.maximum(decay, STRONGEST_LOG_DECAY), causal.astype(jnp.float32))  # [K, G, C]
    between = jnp.exp(jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf))  # [K, G, C, C]
    since_start = jnp.exp(total)[..., None]  # [K, G, C, 1]
    until_end = jnp.exp(total[..., -1:] - total)[..., None]

    key_query = jnp.concatenate([key, query], axis=1)  # [K, 2 C, Dk]
    products = _einsum("kid,kjd->kij", key_query, key)[:, None]  # [K, 1, 2 C, C]
    reads = _einsum("kid,kvd->kiv", key_query, state.reshape(num_k_heads, group * head_v_dim, -1))
    reads = jnp.moveaxis(reads.reshape(num_k_heads, 2 * size, group, head_v_dim), 2, 1)  # [K, G, 2 C, Dv]

    coupling = jnp.where(jnp.tril(causal, -1), beta[..., None] * products[:, :, :size] * between, 0)
    delta = solve_unit_lower(coupling, beta[..., None] * (value - since_start * reads[:, :, :size]))
    out = since_start * reads[:, :, size:]
    out += _einsum("kgij,kgjv->kgiv", products[:, :, size:] * between, delta)
    state = jnp.exp(total[..., -1])[..., None, None] * state
    return out, state + _einsum("kgcv,kcd->kgvd", until_end * delta, key)


def solve_unit_lower(strict: jax.Array, right: jax.Array) -> jax.Array:
    """Solve ``(I + strict) x = right`` by forward substitution.

    Args:
        strict: [..., C, C], zero on and above the diagonal.
        right: [..., C, N].
    """

    def one_row(i, x):
        row = lax.dynamic_slice_in_dim(strict, i, 1, axis=-2)  # columns >= i are zero: only solved rows count
        solved = lax.dynamic_slice_in_dim(x, i, 1, axis=-2) - jnp.matmul(row, x, precision=HIGHEST)
        return lax.dynamic_update_slice_in_dim(x, solved, i, axis=-2)

    return lax.fori_loop(1, strict.shape[-1], one_row, right)


def _einsum(spec: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *operands, precision=HIGHEST)
