"""Public op ``causal_conv``."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import checks, registry
from pallas_kernels.causal_conv import mosaic_rows, mosaic_sm90, mosaic_stream, reference
from pallas_kernels.registry import Implementation

OP = registry.define_op("causal_conv")
OP.register(registry.REFERENCE, reference.causal_conv, priority=0)
OP.register("mosaic_sm90", mosaic_sm90.causal_conv, priority=20, supports=mosaic_rows.supports)
OP.register("mosaic_stream", mosaic_stream.causal_conv, priority=30, supports=mosaic_stream.supports)


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    conv_pool: jax.Array,
    layer: jax.Array | int,
    slot_ids: jax.Array,
    has_state: jax.Array,
    cu_seqlens: jax.Array,
    *,
    implementation: str = registry.AUTO,
) -> tuple[jax.Array, jax.Array]:
    """Causal depthwise convolution of width 4, then SiLU, over a ragged pack.

    ``y_t = silu(cast(sum_j weight[j] * x[t - 3 + j]))`` with float32 accumulation, where inputs before the piece come
    from the request's tail in the pool (zeros without a state). The tail becomes the last three raw inputs.

    Args:
        x: [T, C or more] packed raw inputs: the first C columns, whatever stands beside them.
        weight: [4, C], tap 3 multiplies the current token; dtype of x.
        conv_pool: [L, S, 3, C] last three raw inputs of each slot, oldest first; dtype of x. Slot 0 is the null slot.
        layer: i32 scalar, which layer of the pool.
        slot_ids: i32[R], slot of each request.
        has_state: bool[R], False starts from zeros whatever the slot holds.
        cu_seqlens: i32[R + 1], packed offsets; tokens from cu_seqlens[R] on are padding.
        implementation: "auto" or a registered name.

    Returns:
        y [T, C] (zeros for pads) and the pool. Slots of requests without tokens keep their tails.

    Raises:
        ValueError: shapes do not fit; TypeError: dtypes do not fit.
        UnsupportedArguments: the implementation does not take these arguments.
        UnknownImplementation: no such implementation.
    """
    check = checks.ArgumentChecker(OP.name)
    check.shape("x", x, ("T", "X")).shape("weight", weight, (4, "C")).shape("conv_pool", conv_pool, ("L", "S", 3, "C"))
    check.require(check["X"] >= check["C"], f"x, shape {x.shape}, has fewer columns than weight, shape {weight.shape}")
    check.shape("slot_ids", slot_ids, ("R",)).shape("has_state", has_state, ("R",))
    check.shape("cu_seqlens", cu_seqlens, (check["R"] + 1,))
    check.dtype("x", x, checks.ACTIVATION_DTYPES).same_dtype(x=x, weight=weight, conv_pool=conv_pool)
    check.dtype("slot_ids", slot_ids, ("int32",)).dtype("cu_seqlens", cu_seqlens, ("int32",))
    check.dtype("has_state", has_state, ("bool",))
    arguments = {
        "x": x,
        "weight": weight,
        "conv_pool": conv_pool,
        "layer": checks.layer_index(OP.name, layer),
        "slot_ids": slot_ids,
        "has_state": has_state,
        "cu_seqlens": cu_seqlens,
    }
    return _causal_conv(arguments, implementation=OP.select(implementation, arguments))


@functools.partial(jax.jit, static_argnames=("implementation",))
def _causal_conv(arguments: dict[str, jax.Array], *, implementation: Implementation):
    with jax.named_scope(OP.name):
        return implementation.function(**arguments)
