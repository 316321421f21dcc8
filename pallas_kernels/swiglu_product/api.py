"""Public op ``swiglu_product``."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import checks, registry
from pallas_kernels.gpu_support import require
from pallas_kernels.registry import Implementation
from pallas_kernels.swiglu_product import mosaic_sm90, reference

FEWEST_TOKENS = 1024
"""From so many tokens on "auto" takes the fused kernel; fewer are a product that the library has better tiles for."""


def _pays(target, arguments) -> None:
    del target
    tokens = arguments["x"].shape[0]
    require(tokens >= FEWEST_TOKENS, f"pays from {FEWEST_TOKENS} tokens on, not for {tokens}")


OP = registry.define_op("swiglu_product")
OP.register(registry.REFERENCE, reference.swiglu_product, priority=0)
OP.register("mosaic_sm90", mosaic_sm90.swiglu_product, priority=20, supports=mosaic_sm90.supports, auto_supports=_pays)


def swiglu_product(x: jax.Array, weight: jax.Array, *, implementation: str = registry.AUTO) -> jax.Array:
    """The first product of a SwiGLU MLP with its activation: ``silu(x @ gate) * (x @ up)``.

    Both products accumulate in float32, the activation is float32, the result is rounded to the dtype of x once. An
    implementation may round the products to that dtype before the activation: the reference does, whose product is an
    array of its own, a fused kernel does not.

    Args:
        x: [M, D].
        weight: [D, 2F], the gate's columns, then those of up; dtype of x.
        implementation: "auto" or a registered name.

    Returns:
        [M, F], dtype of x.

    Raises:
        ValueError: shapes do not fit; TypeError: dtypes do not fit.
        UnsupportedArguments: the implementation does not take these arguments.
        UnknownImplementation: no such implementation.
    """
    check = checks.ArgumentChecker(OP.name)
    check.shape("x", x, ("M", "D")).shape("weight", weight, ("D", "2F"))
    check.require(check["2F"] % 2 == 0, f"weight, shape {weight.shape}, has no two halves of columns")
    check.dtype("x", x, checks.ACTIVATION_DTYPES).same_dtype(x=x, weight=weight)
    arguments = {"x": x, "weight": weight}
    return _swiglu_product(arguments, implementation=OP.select(implementation, arguments))


@functools.partial(jax.jit, static_argnames=("implementation",))
def _swiglu_product(arguments: dict[str, jax.Array], *, implementation: Implementation):
    with jax.named_scope("gate_up"):  # the part of a step that profiles call so
        return implementation.function(**arguments)
