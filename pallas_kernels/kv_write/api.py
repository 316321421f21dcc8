"""Public op ``kv_write``."""

from __future__ import annotations

import functools

import jax
import numpy as np

from pallas_kernels import checks, registry
from pallas_kernels.kv_write import mosaic_sm90, reference, triton
from pallas_kernels.registry import Implementation

OP = registry.define_op("kv_write")
OP.register(registry.REFERENCE, reference.kv_write, priority=0)
OP.register("triton", triton.kv_write, priority=10, supports=triton.supports)
OP.register(
    "mosaic_sm90",
    mosaic_sm90.kv_write,
    priority=20,
    supports=mosaic_sm90.supports,
    auto_supports=mosaic_sm90.auto_supports,
)


def kv_write(
    heads: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    kv_pool: jax.Array,
    layer: jax.Array | int,
    page_ids: jax.Array,
    page_offsets: jax.Array,
    positions: jax.Array,
    *,
    num_heads: int,
    rotary_dim: int,
    rope_theta: float,
    eps: float,
    implementation: str = registry.AUTO,
) -> tuple[jax.Array, jax.Array]:
    """Normalise q and k per head (weight ``1 + w``), rotate them, and write k and v into the page pool.

    Args:
        heads: [T, 2 N + 2 K, H], side by side: N raw queries, N gates (not read), K raw keys and K values. The
            layer's projection as it comes out of the matrix product.
        q_norm: f32[H], stored near 0; or f32[L, H], that of each layer of the pool.
        k_norm: likewise.
        kv_pool: [L, P, 2, K, Z, H] pages of (key, value), dtype of heads. Page 0 is the null page, the sink of pads.
        layer: i32 scalar, which layer of the pool.
        page_ids: i32[T], page of each token, 0 for pads.
        page_offsets: i32[T], place in the page, 0..Z-1.
        positions: i32[T], position in the sequence, for the rotation.
        num_heads: N; 0 to write keys and values alone.
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
    check.require(num_heads >= 0, f"num_heads must not be negative, got {num_heads}")
    check.shape("kv_pool", kv_pool, ("L", "P", 2, "K", "Z", "H"))
    origin = f"2 * num_heads + 2 * K, with K = {check['K']} of kv_pool"
    check.bind("X", 2 * num_heads + 2 * check["K"], origin).shape("heads", heads, ("T", "X", "H"))
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        check.shape(name, norm, ("L", "H") if np.ndim(norm) == 2 else ("H",)).dtype(name, norm, ("float32",))
    check.shape("page_ids", page_ids, ("T",))
    check.shape("page_offsets", page_offsets, ("T",)).shape("positions", positions, ("T",))
    check.dtype("heads", heads, checks.ACTIVATION_DTYPES).same_dtype(heads=heads, kv_pool=kv_pool)
    for name, array in (("page_ids", page_ids), ("page_offsets", page_offsets), ("positions", positions)):
        check.dtype(name, array, ("int32",))
    check.require(
        0 < rotary_dim <= check["H"] and rotary_dim % 2 == 0,
        f"rotary_dim must be even, positive and at most H = {check['H']}, got {rotary_dim}",
    )
    arguments = {
        "heads": heads,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "kv_pool": kv_pool,
        "layer": checks.layer_index(OP.name, layer),
        "page_ids": page_ids,
        "page_offsets": page_offsets,
        "positions": positions,
    }
    options = {"num_heads": num_heads, "rotary_dim": rotary_dim, "rope_theta": float(rope_theta), "eps": float(eps)}
    return _kv_write(arguments, **options, implementation=OP.select(implementation, arguments | options))


@functools.partial(jax.jit, static_argnames=("num_heads", "rotary_dim", "rope_theta", "eps", "implementation"))
def _kv_write(arguments: dict[str, jax.Array], *, implementation: Implementation, **options: int | float):
    with jax.named_scope(OP.name):
        return implementation.function(**arguments, **options)
