"""Public op ``paged_prefill_attention``."""

from __future__ import annotations

import functools

import jax
import numpy as np

from pallas_kernels import checks, registry
from pallas_kernels.paged_prefill_attention import mosaic_sm90, reference, triton
from pallas_kernels.registry import Implementation

OP = registry.define_op("paged_prefill_attention")
OP.register(registry.REFERENCE, reference.paged_prefill_attention, priority=0)
OP.register("mosaic_sm90", mosaic_sm90.paged_prefill_attention, priority=20, supports=mosaic_sm90.supports)
OP.register("triton", triton.paged_prefill_attention, priority=10, supports=triton.supports)


def paged_prefill_attention(
    q: jax.Array,
    gates: jax.Array,
    kv_pool: jax.Array,
    layer: jax.Array | int,
    page_table: jax.Array,
    cu_seqlens: jax.Array,
    kv_lens: jax.Array,
    *,
    first_gate: int = 0,
    implementation: str = registry.AUTO,
) -> jax.Array:
    """Causal attention of packed new tokens over their requests' pages, times the sigmoid of the heads' gates.

    The keys and values of the new tokens are already in the pages. With ``n_r = cu_seqlens[r + 1] - cu_seqlens[r]``,
    token i of request r sits at position ``kv_lens[r] - n_r + i`` and sees positions up to its own. Scale ``H^-0.5``;
    query head h reads key/value head ``h // (N // K)``.

    Args:
        q: [T, N, H] normalised, rotated queries.
        gates: [T, X, H], dtype of q: heads side by side, among them the gates of the N query heads. The layer's
            projection may be given as it is.
        kv_pool: [L, P, 2, K, Z, H] pages of (key, value), dtype of q. Page 0 is the null page.
        layer: i32 scalar, which layer of the pool.
        page_table: i32[R, W], page of positions ``Z w .. Z w + Z - 1`` of request r; entries past the length are
            unread.
        cu_seqlens: i32[R + 1], packed offsets; tokens from cu_seqlens[R] on are padding.
        kv_lens: i32[R], length with the new tokens, at most W Z.
        first_gate: head of ``gates`` that is the gate of query head 0; those of the others follow.
        implementation: "auto" or a registered name.

    Returns:
        [T, N, H] in the dtype of q, zeros for pads.

    Raises:
        ValueError: shapes do not fit; TypeError: dtypes do not fit.
        UnsupportedArguments: the implementation does not take these arguments.
        UnknownImplementation: no such implementation.
    """
    check = checks.ArgumentChecker(OP.name)
    check.shape("q", q, ("T", "N", "H")).shape("gates", gates, ("T", "X", "H"))
    check.shape("kv_pool", kv_pool, ("L", "P", 2, "K", "Z", "H")).shape("page_table", page_table, ("R", "W"))
    check.shape("cu_seqlens", cu_seqlens, (check["R"] + 1,)).shape("kv_lens", kv_lens, ("R",))
    check.require(
        check["N"] % check["K"] == 0,
        f"N = {check['N']} query heads (q) must be a multiple of K = {check['K']} (kv_pool, shape {kv_pool.shape})",
    )
    check.require(
        0 <= first_gate <= check["X"] - check["N"],
        f"gates, shape {np.shape(gates)}, holds no N = {check['N']} heads from first_gate = {first_gate} on",
    )
    check.dtype("q", q, checks.ACTIVATION_DTYPES).same_dtype(q=q, gates=gates, kv_pool=kv_pool)
    for name, array in (("page_table", page_table), ("cu_seqlens", cu_seqlens), ("kv_lens", kv_lens)):
        check.dtype(name, array, ("int32",))
    arguments = {
        "q": q,
        "gates": gates,
        "kv_pool": kv_pool,
        "layer": checks.layer_index(OP.name, layer),
        "page_table": page_table,
        "cu_seqlens": cu_seqlens,
        "kv_lens": kv_lens,
    }
    options = {"first_gate": first_gate}
    return _paged_prefill_attention(arguments, **options, implementation=OP.select(implementation, arguments | options))


@functools.partial(jax.jit, static_argnames=("first_gate", "implementation"))
def _paged_prefill_attention(arguments: dict[str, jax.Array], *, first_gate: int, implementation: Implementation):
    with jax.named_scope(OP.name):
        return implementation.function(**arguments, first_gate=first_gate)
