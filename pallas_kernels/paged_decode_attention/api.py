"""Public op ``paged_decode_attention``."""

from __future__ import annotations

import functools

import jax
import numpy as np

from pallas_kernels import checks, registry
from pallas_kernels.paged_decode_attention import reference, triton
from pallas_kernels.registry import Implementation

OP = registry.define_op("paged_decode_attention")
OP.register(registry.REFERENCE, reference.paged_decode_attention, priority=0)
OP.register("triton", triton.paged_decode_attention, priority=10, supports=triton.supports)


def paged_decode_attention(
    q: jax.Array,
    gates: jax.Array,
    kv_pool: jax.Array,
    layer: jax.Array | int,
    page_table: jax.Array,
    kv_lens: jax.Array,
    *,
    first_gate: int = 0,
    implementation: str = registry.AUTO,
) -> jax.Array:
    """Attention of one token a row over the row's pages, times the sigmoid of the heads' gates.

    Scale ``H^-0.5``; query head h reads key/value head ``h // (N // K)``.

    Args:
        q: [B, N, H] normalised, rotated queries.
        gates: [B, X, H], dtype of q: heads side by side, among them the gates of the N query heads. The layer's
            projection may be given as it is.
        kv_pool: [L, P, 2, K, Z, H] pages of (key, value), dtype of q. Page 0 is the null page.
        layer: i32 scalar, which layer of the pool.
        page_table: i32[B, W], page of positions ``Z w .. Z w + Z - 1`` of row b; entries past the length are unread.
        kv_lens: i32[B], length with the token just written, at most W Z; 0 is a padding row.
        first_gate: head of ``gates`` that is the gate of query head 0; those of the others follow.
        implementation: "auto" or a registered name.

    Returns:
        [B, N, H] in the dtype of q, zeros for padding rows.

    Raises:
        ValueError: shapes do not fit; TypeError: dtypes do not fit.
        UnsupportedArguments: the implementation does not take these arguments.
        UnknownImplementation: no such implementation.
    """
    check = checks.ArgumentChecker(OP.name)
    check.shape("q", q, ("B", "N", "H")).shape("gates", gates, ("B", "X", "H"))
    check.shape("kv_pool", kv_pool, ("L", "P", 2, "K", "Z", "H")).shape("page_table", page_table, ("B", "W"))
    check.shape("kv_lens", kv_lens, ("B",))
    check.require(
        check["N"] % check["K"] == 0,
        f"N = {check['N']} query heads (q) must be a multiple of K = {check['K']} (kv_pool, shape {kv_pool.shape})",
    )
    check.require(
        0 <= first_gate <= check["X"] - check["N"],
        f"gates, shape {np.shape(gates)}, holds no N = {check['N']} heads from first_gate = {first_gate} on",
    )
    check.dtype("q", q, checks.ACTIVATION_DTYPES).same_dtype(q=q, gates=gates, kv_pool=kv_pool)
    check.dtype("page_table", page_table, ("int32",)).dtype("kv_lens", kv_lens, ("int32",))
    arguments = {
        "q": q,
        "gates": gates,
        "kv_pool": kv_pool,
        "layer": checks.layer_index(OP.name, layer),
        "page_table": page_table,
        "kv_lens": kv_lens,
    }
    options = {"first_gate": first_gate}
    return _paged_decode_attention(arguments, **options, implementation=OP.select(implementation, arguments | options))


@functools.partial(jax.jit, static_argnames=("first_gate", "implementation"))
def _paged_decode_attention(arguments: dict[str, jax.Array], *, first_gate: int, implementation: Implementation):
    with jax.named_scope(OP.name):
        return implementation.function(**arguments, first_gate=first_gate)
