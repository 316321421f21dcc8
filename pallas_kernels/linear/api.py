"""Public op ``linear``."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import checks, registry
from pallas_kernels.gpu_support import require
from pallas_kernels.linear import mosaic_sm90, reference
from pallas_kernels.registry import Implementation

TOKENS = (513, 1536)
"""The numbers of tokens from and to which "auto" takes the Mosaic kernel, not measured yet."""

MOST_COLUMNS = 4096
"""So many columns at the most has a weight for which "auto" takes it: few tiles for the library, which then splits the
inner dimension and clears sums first. Not measured yet."""


def _pays(target, arguments) -> None:
    del target
    tokens, columns = arguments["x"].shape[0], arguments["weight"].shape[1]
    require(TOKENS[0] <= tokens <= TOKENS[1], f"pays for {TOKENS[0]} to {TOKENS[1]} tokens, not for {tokens}")
    require(columns <= MOST_COLUMNS, f"pays for at most {MOST_COLUMNS} columns, not for {columns}")


OP = registry.define_op("linear")
OP.register(registry.REFERENCE, reference.linear, priority=0)
OP.register("mosaic_sm90", mosaic_sm90.linear, priority=20, supports=mosaic_sm90.supports, auto_supports=_pays)


def linear(x: jax.Array, weight: jax.Array, *, implementation: str = registry.AUTO) -> jax.Array:
    """``x @ weight``, accumulated in float32 and rounded to the dtype of x once.

    Args:
        x: [M, K].
        weight: [K, N], dtype of x.
        implementation: "auto" or a registered name.

    Returns:
        [M, N], dtype of x.

    Raises:
        ValueError: shapes do not fit; TypeError: dtypes do not fit.
        UnsupportedArguments: the implementation does not take these arguments.
        UnknownImplementation: no such implementation.
    """
    check = checks.ArgumentChecker(OP.name)
    check.shape("x", x, ("M", "K")).shape("weight", weight, ("K", "N"))
    check.dtype("x", x, checks.ACTIVATION_DTYPES).same_dtype(x=x, weight=weight)
    arguments = {"x": x, "weight": weight}
    return _of_weight(arguments, implementation=OP.select(implementation, arguments))


# Not by the op's name: in a profile a product is the part of a step that its caller's scope says.
@functools.partial(jax.jit, static_argnames=("implementation",))
def _of_weight(arguments: dict[str, jax.Array], *, implementation: Implementation):
    return implementation.function(**arguments)
