"""Public op ``gdn_decode``."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import checks, registry
from pallas_kernels.gdn_decode import mosaic_sm90, reference, triton
from pallas_kernels.registry import Implementation

OP = registry.define_op("gdn_decode")
OP.register(registry.REFERENCE, reference.gdn_decode, priority=0)
OP.register("triton", triton.gdn_decode, priority=10, supports=triton.supports)
OP.register("mosaic_sm90", mosaic_sm90.gdn_decode, priority=20, supports=mosaic_sm90.supports)


def gdn_decode(
    projected: jax.Array,
    conv_weight: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    norm_weight: jax.Array,
    conv_pool: jax.Array,
    state_pool: jax.Array,
    layer: jax.Array | int,
    slot_ids: jax.Array,
    *,
    num_k_heads: int,
    head_k_dim: int,
    eps: float,
    implementation: str = registry.AUTO,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One decode step of a Gated DeltaNet mixer, between its input and output projections.

    Convolution with the slot's tail and SiLU as in :func:`pallas_kernels.causal_conv`, one step of the delta rule as
    in :func:`pallas_kernels.gdn_prefill`, then ``y = norm_weight * rms_norm(round(o)) * silu(z)``.

    Args:
        projected: [B, C + Hv Dv + 2 Hv], side by side: qkv before the convolution (C = 2 Hk Dk + Hv Dv), z [Hv Dv],
            b [Hv] and a [Hv].
        conv_weight: [4, C], tap 3 multiplies the current token; dtype of projected.
        A_log: f32[Hv or more], whatever stands behind the heads' numbers.
        dt_bias: f32[Hv or more].
        norm_weight: f32[Dv].
        conv_pool: [L, S, 3, C], dtype of projected. Slot 0 is the null slot.
        state_pool: [L, S, Hv, Dv, Dk], float32 or bfloat16.
        layer: i32 scalar, which layer of the pools.
        slot_ids: i32[B], distinct, except that any number of rows may be padding: slot 0.
        num_k_heads: Hk, divides Hv.
        head_k_dim: Dk.
        eps: epsilon of the output norm.
        implementation: "auto" or a registered name.

    Returns:
        y [B, Hv Dv] in the dtype of projected (zeros for padding rows), conv_pool, state_pool.

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
    check.bind("P", check["C"] + check["Hv"] * (check["Dv"] + 2), "C + Hv * Dv + 2 * Hv")
    check.shape("projected", projected, ("B", "P"))
    check.shape("conv_weight", conv_weight, (4, "C")).shape("norm_weight", norm_weight, ("Dv",))
    check.at_least("A_log", A_log, "Hv").at_least("dt_bias", dt_bias, "Hv")
    check.shape("conv_pool", conv_pool, ("L", "S", 3, "C")).shape("slot_ids", slot_ids, ("B",))
    check.dtype("projected", projected, checks.ACTIVATION_DTYPES)
    check.same_dtype(projected=projected, conv_weight=conv_weight, conv_pool=conv_pool)
    check.dtype("A_log", A_log, ("float32",)).dtype("dt_bias", dt_bias, ("float32",))
    check.dtype("norm_weight", norm_weight, ("float32",)).dtype("state_pool", state_pool, checks.STATE_DTYPES)
    check.dtype("slot_ids", slot_ids, ("int32",))
    arguments = {
        "projected": projected,
        "conv_weight": conv_weight,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "norm_weight": norm_weight,
        "conv_pool": conv_pool,
        "state_pool": state_pool,
        "layer": checks.layer_index(OP.name, layer),
        "slot_ids": slot_ids,
    }
    options = {"num_k_heads": num_k_heads, "head_k_dim": head_k_dim, "eps": float(eps)}
    return _gdn_decode(arguments, **options, implementation=OP.select(implementation, arguments | options))


@functools.partial(jax.jit, static_argnames=("num_k_heads", "head_k_dim", "eps", "implementation"))
def _gdn_decode(
    arguments: dict[str, jax.Array], *, num_k_heads: int, head_k_dim: int, eps: float, implementation: Implementation
):
    with jax.named_scope(OP.name):
        return implementation.function(**arguments, num_k_heads=num_k_heads, head_k_dim=head_k_dim, eps=eps)
