"""Public op ``gdn_prefill``."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import checks, registry
from pallas_kernels.gdn_prefill import mosaic_sm90, reference, triton
from pallas_kernels.registry import Implementation

OP = registry.define_op("gdn_prefill")
OP.register(registry.REFERENCE, reference.gdn_prefill, priority=0)
OP.register("mosaic_sm90", mosaic_sm90.gdn_prefill, priority=20, supports=mosaic_sm90.supports)
OP.register("triton", triton.gdn_prefill, priority=10, supports=triton.supports)


def gdn_prefill(
    qkv: jax.Array,
    b: jax.Array,
    a: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    state_pool: jax.Array,
    layer: jax.Array | int,
    slot_ids: jax.Array,
    has_state: jax.Array,
    cu_seqlens: jax.Array,
    *,
    num_k_heads: int,
    head_k_dim: int,
    implementation: str = registry.AUTO,
) -> tuple[jax.Array, jax.Array]:
    """Gated delta rule over a ragged pack, starting from and leaving each request's state in the pool.

    For each token, in order, with q and k l2-normalised, q scaled by Dk^-0.5, ``beta = sigmoid(b)`` and
    ``g = -exp(A_log) softplus(a + dt_bias)``, value head h reading key head ``h // (Hv // Hk)``:
    ``S <- exp(g) S;  d = beta (v - S k);  S <- S + d k^T;  o = S q``.

    Args:
        qkv: [T, 2 Hk Dk + Hv Dv] packed q, k, v after convolution and SiLU.
        b: [T, Hv], dtype of qkv.
        a: [T, Hv], dtype of qkv.
        A_log: f32[Hv or more], whatever stands behind the heads' numbers.
        dt_bias: f32[Hv or more].
        state_pool: [L, S, Hv, Dv, Dk], float32 or bfloat16. Slot 0 is the null slot.
        layer: i32 scalar, which layer of the pool.
        slot_ids: i32[R], slot of each request.
        has_state: bool[R], False starts from zeros whatever the slot holds.
        cu_seqlens: i32[R + 1], packed offsets; tokens from cu_seqlens[R] on are padding.
        num_k_heads: Hk, divides Hv.
        head_k_dim: Dk.
        implementation: "auto" or a registered name.

    Returns:
        o [T, Hv, Dv] in the dtype of qkv (zeros for pads) and the pool. Slots of requests without tokens are untouched.

    Raises:
        ValueError: shapes or options do not fit; TypeError: dtypes do not fit.
        UnsupportedArguments: the implementation does not take these arguments.
        UnknownImplementation: no such implementation.
    """
    check = checks.ArgumentChecker(OP.name)
    check.bind("Dk", head_k_dim, "head_k_dim")
    check.shape("state_pool", state_pool, ("L", "S", "Hv", "Dv", "Dk"))
    check.require(
        num_k_heads > 0 and check["Hv"] % num_k_heads == 0,
        f"num_k_heads must divide Hv = {check['Hv']} (state_pool, shape {state_pool.shape}), got {num_k_heads}",
    )
    check.bind("C", 2 * num_k_heads * head_k_dim + check["Hv"] * check["Dv"], "2 * Hk * Dk + Hv * Dv")
    check.shape("qkv", qkv, ("T", "C")).shape("b", b, ("T", "Hv")).shape("a", a, ("T", "Hv"))
    check.at_least("A_log", A_log, "Hv").at_least("dt_bias", dt_bias, "Hv")
    check.shape("slot_ids", slot_ids, ("R",)).shape("has_state", has_state, ("R",))
    check.shape("cu_seqlens", cu_seqlens, (check["R"] + 1,))
    check.dtype("qkv", qkv, checks.ACTIVATION_DTYPES).same_dtype(qkv=qkv, b=b, a=a)
    check.dtype("A_log", A_log, ("float32",)).dtype("dt_bias", dt_bias, ("float32",))
    check.dtype("state_pool", state_pool, checks.STATE_DTYPES).dtype("slot_ids", slot_ids, ("int32",))
    check.dtype("has_state", has_state, ("bool",)).dtype("cu_seqlens", cu_seqlens, ("int32",))
    arguments = {
        "qkv": qkv,
        "b": b,
        "a": a,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "state_pool": state_pool,
        "layer": checks.layer_index(OP.name, layer),
        "slot_ids": slot_ids,
        "has_state": has_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"num_k_heads": num_k_heads, "head_k_dim": head_k_dim}
    return _gdn_prefill(arguments, **options, implementation=OP.select(implementation, arguments | options))


@functools.partial(jax.jit, static_argnames=("num_k_heads", "head_k_dim", "implementation"))
def _gdn_prefill(arguments: dict[str, jax.Array], *, num_k_heads: int, head_k_dim: int, implementation: Implementation):
    with jax.named_scope(OP.name):
        return implementation.function(**arguments, num_k_heads=num_k_heads, head_k_dim=head_k_dim)
