"""Public op ``kv_write``."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import checks, registry
from pallas_kernels.kv_write import reference, triton
from pallas_kernels.registry import Implementation

OP = registry.define_op("kv_write")
OP.register(registry.REFERENCE, reference.kv_write, priority=0)
OP.register("triton", triton.kv_write, priority=10, supports=triton.supports)


def kv_write(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    kv_pool: jax.Array,
    layer: jax.Array | int,
    page_ids: jax.Array,
    page_offsets: jax.Array,
    positions: jax.Array,
    *,
    rotary_dim: int,
    rope_theta: float,
    eps: float,
    implementation: str = registry.AUTO,
) -> tuple[jax.Array, jax.Array]:
    """Normalise q and k per head (weight ``1 + w``), rotate them, and write k and v into the page pool.

    Args:
        q: [T, N, H] raw queries.
        k: [T, K, H] raw keys, dtype of q.
        v: [T, K, H] values, dtype of q.
        q_norm: f32[H], stored near 0.
        k_norm: f32[H].
        kv_pool: [L, P, 2, K, Z, H] pages of (key, value), dtype of q. Page 0 is the null page, the sink of pads.
        layer: i32 scalar, which layer of the pool.
        page_ids: i32[T], page of each token, 0 for pads.
        page_offsets: i32[T], place in the page, 0..Z-1.
        positions: i32[T], position in the sequence, for the rotation.
        rotary_dim: leading dims that rotate, even and at most H.
        rope_theta: base of the rotation.
        eps: epsilon of the norms.
        implementation: "auto" or a registered name.

    Returns:
        q_out [T, N, H], normalised and rotated (zeros where the page is 0), and the pool.

    Raises:
        ValueError: shapes or options do not fit; TypeError: dtypes do not fit.
        UnsupportedArguments: the implementation does not take these arguments.
        UnknownImplementation: no such implementation.
    """
    check = checks.ArgumentChecker(OP.name)
    check.shape("q", q, ("T", "N", "H")).shape("k", k, ("T", "K", "H")).shape("v", v, ("T", "K", "H"))
    check.shape("q_norm", q_norm, ("H",)).shape("k_norm", k_norm, ("H",))
    check.shape("kv_pool", kv_pool, ("L", "P", 2, "K", "Z", "H")).shape("page_ids", page_ids, ("T",))
    check.shape("page_offsets", page_offsets, ("T",)).shape("positions", positions, ("T",))
    check.dtype("q", q, checks.ACTIVATION_DTYPES).same_dtype(q=q, k=k, v=v, kv_pool=kv_pool)
    check.dtype("q_norm", q_norm, ("float32",)).dtype("k_norm", k_norm, ("float32",))
    for name, array in (("page_ids", page_ids), ("page_offsets", page_offsets), ("positions", positions)):
        check.dtype(name, array, ("int32",))
    check.require(
        0 < rotary_dim <= check["H"] and rotary_dim % 2 == 0,
        f"rotary_dim must be even, positive and at most H = {check['H']}, got {rotary_dim}",
    )
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "kv_pool": kv_pool,
        "layer": checks.layer_index(OP.name, layer),
        "page_ids": page_ids,
        "page_offsets": page_offsets,
        "positions": positions,
    }
    options = {"rotary_dim": rotary_dim, "rope_theta": float(rope_theta), "eps": float(eps)}
    return _kv_write(arguments, **options, implementation=OP.select(implementation, arguments | options))


@functools.partial(jax.jit, static_argnames=("rotary_dim", "rope_theta", "eps", "implementation"))
def _kv_write(
    arguments: dict[str, jax.Array], *, rotary_dim: int, rope_theta: float, eps: float, implementation: Implementation
):
    with jax.named_scope(OP.name):
        return implementation.function(**arguments, rotary_dim=rotary_dim, rope_theta=rope_theta, eps=eps)
