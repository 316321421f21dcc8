"""The gated delta rule over whole sequences: differentiable, in parallel over chunks, restarting at segments.

The mathematics is that of ``pallas_kernels/gdn_prefill/reference.py`` (:func:`chunk_step`), in another order. There a
loop visits one chunk after another; here everything that does not need the state is computed for all chunks at once:

    (I + L) d = beta (v - exp(G) S k),  so  d = U - W S^T  with  U = (I + L)^-1 beta v,  W = (I + L)^-1 beta exp(G) k

and a scan with two matrix products a chunk is left for the state.

Segments. A token that starts a segment erases the state first, as a log decay of -inf would. The sums G stay finite
(they are formed from the real decays); a factor ``exp(G_i - G_j)`` becomes 0 when a segment starts in ``j + 1 .. i``,
which, segments being contiguous, is when i and j lie in different ones. The carried state plays the part of a token
in the segment in which the chunk before ended. So segments may start anywhere, also inside a chunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gdn_prefill.reference import STRONGEST_LOG_DECAY

CHUNK = 64
BASE = 16  # side of the diagonal blocks that are inverted row by row


def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    decay: jax.Array,
    segments: jax.Array,
    *,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> jax.Array:
    """Outputs of the rule for whole sequences, in the dtype of the arguments (float32 or float64).

    Args:
        query: ``[B, T, Hk, Dk]``, normalised and scaled.
        key: ``[B, T, Hk, Dk]``, normalised.
        value: ``[B, T, Hv, Dv]``; value head h reads key head ``h // (Hv // Hk)``.
        beta: ``[B, T, Hv]``, in (0, 1).
        decay: ``[B, T, Hv]``, log decays.
        segments: int32 ``[B, T]``; the state is zero at the start of each run of equal numbers. A number must not come
            back later in its row.
        precision: of the matrix products.

    Returns:
        ``[B, T, Hv, Dv]``.
    """
    batch, length, num_k_heads, _ = key.shape
    num_v_heads, head_v_dim = value.shape[2:]
    group = num_v_heads // num_k_heads
    pad = -length % CHUNK
    if pad:  # a pad writes nothing and belongs to the last segment
        arrays = (query, key, value, beta, decay)
        query, key, value, beta, decay = (
            jnp.pad(array, ((0, 0), (0, pad)) + ((0, 0),) * (array.ndim - 2)) for array in arrays
        )
        segments = jnp.pad(segments, ((0, 0), (0, pad)), mode="edge")
    chunks = (length + pad) // CHUNK

    def einsum(spec: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(spec, *operands, precision=precision)

    # Chunks in front (the scan's axis), then rows and heads: n b k g are batch axes of every product. [N, B, K, (G,) C]
    query, key = (x.reshape(batch, chunks, CHUNK, num_k_heads, -1).transpose(1, 0, 3, 2, 4) for x in (query, key))
    value = value.reshape(batch, chunks, CHUNK, num_k_heads, group, head_v_dim).transpose(1, 0, 3, 4, 2, 5)
    beta, decay = (x.reshape(batch, chunks, CHUNK, num_k_heads, group).transpose(1, 0, 3, 4, 2) for x in (beta, decay))
    segments = segments.reshape(batch, chunks, CHUNK).transpose(1, 0, 2)  # [N, B, C]
    carried = jnp.concatenate([segments[:1, :, :1], segments[:-1, :, -1:]])  # of the state; zeros need no number

    causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    seen = causal & (segments[..., :, None] == segments[..., None, :])  # [N, B, C, C]
    # Inclusive sums as a product with a triangle: a cumsum compiles to a kernel of its own.
    total = einsum("nbkgj,ij->nbkgi", jnp.maximum(decay, STRONGEST_LOG_DECAY), causal.astype(decay.dtype))
    between = jnp.exp(
        jnp.where(_heads(seen), total[..., :, None] - total[..., None, :], -jnp.inf)
    )  # [N, B, K, G, C, C]
    since_start = jnp.where(_heads(segments == carried), jnp.exp(total), 0)  # [N, B, K, G, C]
    until_end = jnp.where(_heads(segments == segments[..., -1:]), jnp.exp(total[..., -1:] - total), 0)

    keys_keys = einsum("nbkid,nbkjd->nbkij", key, key)[:, :, :, None]
    coupling = jnp.where(jnp.tril(causal, -1), beta[..., None] * keys_keys * between, 0)
    inverse = unit_lower_inverse(coupling, precision)
    writes = einsum("nbkgij,nbkgjv->nbkgiv", inverse * beta[..., None, :], value)  # U
    erases = einsum("nbkgij,nbkjd->nbkgid", inverse * (beta * since_start)[..., None, :], key)  # W
    kept_keys = until_end[..., None] * key[:, :, :, None]  # [N, B, K, G, C, Dk]

    def one_chunk(state, chunk):
        write, erase, kept_key, kept = chunk
        delta = write - einsum("bkgcd,bkgvd->bkgcv", erase, state)
        after = kept[..., None, None] * state + einsum("bkgcv,bkgcd->bkgvd", delta, kept_key)
        return after, (state, delta)

    start = jnp.zeros((batch, num_k_heads, group, head_v_dim, key.shape[-1]), key.dtype)
    _, (states, delta) = lax.scan(one_chunk, start, (writes, erases, kept_keys, since_start[..., -1]))

    attention = einsum("nbkid,nbkjd->nbkij", query, key)[:, :, :, None] * between
    out = since_start[..., None] * einsum("nbkcd,nbkgvd->nbkgcv", query, states)
    out += einsum("nbkgij,nbkgjv->nbkgiv", attention, delta)
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, chunks * CHUNK, num_v_heads, head_v_dim)
    return out[:, :length]


def _heads(x: jax.Array) -> jax.Array:
    """Room for the two axes of heads behind chunks and rows: ``[N, B, ...]`` to ``[N, B, 1, 1, ...]``."""
    return x[:, :, None, None]


def unit_lower_inverse(strict: jax.Array, precision: lax.Precision = lax.Precision.HIGHEST) -> jax.Array:
    """``(I + strict)^-1`` of matrices ``[..., C, C]`` that are zero on and above the diagonal, C = 16 * 2^n.

    Diagonal blocks of 16 by forward substitution, then neighbours are joined twice over: [[A, 0], [X, B]] has the
    inverse [[A', 0], [-B' X A', B']]. Nothing larger than the inverse itself appears, whereas a Neumann product loses
    everything when neighbouring keys repeat. The derivative needs the inverse alone: two products.
    """
    return _inverse(precision, strict)


def _inverse_forward(precision: lax.Precision, strict: jax.Array) -> jax.Array:
    size = strict.shape[-1]
    blocks = _blocks(strict, BASE, 0)  # [..., C / 16, 16, 16]
    identity = jnp.broadcast_to(jnp.eye(BASE, dtype=strict.dtype), blocks.shape)

    def one_row(i, solved):
        row = lax.dynamic_slice_in_dim(blocks, i, 1, axis=-2)  # columns >= i are zero: only solved rows count
        change = jnp.sum(jnp.swapaxes(row, -1, -2) * solved, axis=-2, keepdims=True)
        fresh = lax.dynamic_slice_in_dim(solved, i, 1, axis=-2) - change
        return lax.dynamic_update_slice_in_dim(solved, fresh, i, axis=-2)

    inverse, side = lax.fori_loop(1, BASE, one_row, identity), BASE
    while side < size:
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = jnp.matmul(_blocks(strict, side, 1), upper, precision=precision)
        corner = -jnp.matmul(lower, corner, precision=precision)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse, side = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2), 2 * side
    return inverse[..., 0, :, :]


def _blocks(matrix: jax.Array, side: int, below: int) -> jax.Array:
    """Square blocks: those of the diagonal, or (below = 1) the one left of every second of them."""
    starts = range(0, matrix.shape[-1], side) if not below else range(side, matrix.shape[-1], 2 * side)
    return jnp.stack([matrix[..., i : i + side, i - below * side : i - below * side + side] for i in starts], axis=-3)


_inverse = jax.custom_vjp(_inverse_forward, nondiff_argnums=(0,))


def _inverse_with_residual(precision: lax.Precision, strict: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse_forward(precision, strict)
    return inverse, inverse


def _inverse_backward(precision: lax.Precision, inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    product = jnp.matmul(jnp.matmul(turned, cotangent, precision=precision), turned, precision=precision)
    return (-jnp.tril(product, -1),)


_inverse.defvjp(_inverse_with_residual, _inverse_backward)
