"""Public op ``add_rms_norm``."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import checks, registry
from pallas_kernels.add_rms_norm import mosaic_sm90, reference
from pallas_kernels.registry import Implementation

OP = registry.define_op("add_rms_norm")
OP.register(registry.REFERENCE, reference.add_rms_norm, priority=0)
OP.register("mosaic_sm90", mosaic_sm90.add_rms_norm, priority=20, supports=mosaic_sm90.supports)


def add_rms_norm(
    x: jax.Array, delta: jax.Array, weight: jax.Array, *, eps: float, implementation: str = registry.AUTO
) -> tuple[jax.Array, jax.Array]:
    """The next residual stream and what the next block reads of it.

    ``total = round(x + delta)`` and ``normed = round(total / sqrt(mean total^2 + eps) * (1 + weight))``, rounded to the
    dtype of x, all else in float32.

    Args:
        x: [M, D], the residual stream.
        delta: [M, D], what is added to it; dtype of x. Or its parts, f32[P, M, D], whose sum in their order is rounded
            to the dtype of x first: what a product of few rows leaves whose inner dimension was cut in P.
        weight: f32[D], near 0.
        eps: added to the mean square.
        implementation: "auto" or a registered name.

    Returns:
        total [M, D] and normed [M, D], dtype of x.

    Raises:
        ValueError: shapes do not fit; TypeError: dtypes do not fit.
        UnsupportedArguments: the implementation does not take these arguments.
        UnknownImplementation: no such implementation.
    """
    check = checks.ArgumentChecker(OP.name)
    in_parts = delta.ndim == 3
    check.shape("x", x, ("M", "D")).shape("delta", delta, ("P", "M", "D") if in_parts else ("M", "D"))
    check.shape("weight", weight, ("D",)).dtype("x", x, checks.ACTIVATION_DTYPES)
    if in_parts:
        check.dtype("delta", delta, ("float32",)).require(check["P"] > 0, f"delta, shape {delta.shape}, has no parts")
    else:
        check.same_dtype(x=x, delta=delta)
    check.dtype("weight", weight, ("float32",))
    arguments = {"x": x, "delta": delta, "weight": weight}
    options = {"eps": float(eps)}
    return _add_rms_norm(arguments, **options, implementation=OP.select(implementation, arguments | options))


@functools.partial(jax.jit, static_argnames=("eps", "implementation"))
def _add_rms_norm(arguments: dict[str, jax.Array], *, eps: float, implementation: Implementation):
    with jax.named_scope("norm"):  # the part of a step that profiles call so
        return implementation.function(**arguments, eps=eps)
