"""Public op ``gated_rms_norm``."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import checks, registry
from pallas_kernels.gated_rms_norm import mosaic_sm90, reference
from pallas_kernels.registry import Implementation

OP = registry.define_op("gated_rms_norm")
OP.register(registry.REFERENCE, reference.gated_rms_norm, priority=0)
OP.register("mosaic_sm90", mosaic_sm90.gated_rms_norm, priority=20, supports=mosaic_sm90.supports)


def gated_rms_norm(
    x: jax.Array,
    projected: jax.Array,
    weight: jax.Array,
    *,
    first: int,
    eps: float,
    implementation: str = registry.AUTO,
) -> jax.Array:
    """The norm behind a Gated DeltaNet mixer's core: each head normalised, then gated.

    ``y = round(weight * x / sqrt(mean x^2 + eps) * silu(z))`` over each head, all else in float32.

    Args:
        x: [T, Hv, Dv], what the delta rule gave.
        projected: [T, X], the mixer's projection; its columns ``first`` to ``first + Hv Dv`` are the gates z of the
            heads; dtype of x.
        weight: f32[Dv], an ordinary weight near 1.
        first: column where the gates begin.
        eps: added to the mean square.
        implementation: "auto" or a registered name.

    Returns:
        y [T, Hv, Dv], dtype of x.

    Raises:
        ValueError: shapes or options do not fit; TypeError: dtypes do not fit.
        UnsupportedArguments: the implementation does not take these arguments.
        UnknownImplementation: no such implementation.
    """
    check = checks.ArgumentChecker(OP.name)
    check.shape("x", x, ("T", "Hv", "Dv")).shape("projected", projected, ("T", "X")).shape("weight", weight, ("Dv",))
    check.require(
        0 <= first <= check["X"] - check["Hv"] * check["Dv"],
        f"projected, shape {projected.shape}, has no {check['Hv']} * {check['Dv']} columns from first = {first} on",
    )
    check.dtype("x", x, checks.ACTIVATION_DTYPES).same_dtype(x=x, projected=projected)
    check.dtype("weight", weight, ("float32",))
    arguments = {"x": x, "projected": projected, "weight": weight}
    options = {"first": first, "eps": float(eps)}
    return _gated_rms_norm(arguments, **options, implementation=OP.select(implementation, arguments | options))


@functools.partial(jax.jit, static_argnames=("first", "eps", "implementation"))
def _gated_rms_norm(arguments: dict[str, jax.Array], *, first: int, eps: float, implementation: Implementation):
    with jax.named_scope("gated_norm"):  # the part of a step that profiles call so
        return implementation.function(**arguments, first=first, eps=eps)
