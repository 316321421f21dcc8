"""Definition of ``causal_conv`` in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import round_to, silu


def causal_conv(x, weight, conv_pool, layer, slot_ids, has_state, cu_seqlens) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.causal_conv`.

    Shifted slices of the whole pack serve every token whose window lies inside its own piece; the (at most three)
    leading tokens of each request, whose windows there reach into a neighbour, are replaced by values computed with
    the tail. Both add the taps in one order, so a request's values do not depend on how it is split.
    """
    x = x[:, : weight.shape[1]]
    num_tokens, _ = x.shape
    # The barrier keeps this read before the write at the end: fused into its uses, it would outlive the old pool and
    # make XLA copy the pool.
    tails, conv_pool = lax.optimization_barrier((conv_pool[layer, slot_ids], conv_pool))
    tails = jnp.where(has_state[:, None, None], tails, 0)  # [R, 3, C]
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]

    padded = jnp.pad(x, ((3, 0), (0, 0)))  # padded[t + 3] = x[t]
    y = _activate(_weigh([padded[tap : tap + num_tokens] for tap in range(4)], weight), x.dtype)
    y = jnp.where(jnp.arange(num_tokens)[:, None] < cu_seqlens[-1], y, 0)

    # The leading tokens: window of token j of request r is rows j .. j + 3 of [tail; first three tokens].
    leading = jnp.arange(3, dtype=jnp.int32)
    rows = cu_seqlens[:-1, None] + leading  # [R, 3]
    present = leading < lengths[:, None]
    heads = jnp.where(present[..., None], x[jnp.minimum(rows, num_tokens - 1)], 0)  # [R, 3, C]
    windows = jnp.concatenate([tails, heads], axis=1)  # [R, 6, C]
    leading_y = _activate(_weigh([windows[:, tap : tap + 3] for tap in range(4)], weight), x.dtype)
    y = y.at[jnp.where(present, rows, num_tokens)].set(leading_y, mode="drop")

    # New tail: the last three rows of [old tail; piece], whose row i is tail[i] for i < 3 and x[start + i - 3] after.
    source = lengths[:, None] + leading  # [R, 3]
    from_piece = x[jnp.clip(cu_seqlens[:-1, None] + source - 3, 0, num_tokens - 1)]
    from_tail = jnp.take_along_axis(tails, jnp.minimum(source, 2)[..., None], axis=1)
    new_tails = jnp.where((source >= 3)[..., None], from_piece, from_tail)
    targets = jnp.where(lengths > 0, slot_ids, 0)  # a request without tokens writes into the null slot
    return y, conv_pool.at[layer, targets].set(new_tails)


def _weigh(taps: list[jax.Array], weight: jax.Array) -> jax.Array:
    """Sum of the four taps in float32, oldest first."""
    total = taps[0].astype(jnp.float32) * weight[0].astype(jnp.float32)
    for tap in range(1, 4):
        total += taps[tap].astype(jnp.float32) * weight[tap].astype(jnp.float32)
    return total


def _activate(total: jax.Array, dtype) -> jax.Array:
    """Round to the activation dtype, then SiLU in float32, rounded again."""
    return silu(round_to(total, dtype)).astype(dtype)
