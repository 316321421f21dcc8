"""How far a kernel's results are from the float32 reference, beside what the reference itself loses in that dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Results = tuple[jax.Array, tuple[jax.Array, ...]]
"""Output of an op and its updated pools."""

SLACK = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 1e-4}
"""May be added to twice the error of the reference in that dtype: four roundoffs, or for float32 (where
its own error is nothing) a thousand, which another order of long sums explains."""


def in_float32(arguments: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arguments of an op with every floating array widened (or narrowed) to float32."""
    return {
        name: array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array
        for name, array in arguments.items()
    }


@jax.jit
def without_null(results: Results) -> Results:
    """The results with zeros in the null slot and the null page, whose contents are unspecified."""
    out, pools = results
    return out, tuple(pool.at[:, 0].set(0) for pool in pools)


def checks(pools: Sequence[str], got: Results, own: Results, exact: Results) -> dict[str, Any]:
    """Compare results as a record of a results file says it.

    An element is wrong when its error |got - exact| / (|exact| + rms(row of exact)) exceeds twice the largest that the
    reference itself makes in the same dtype, plus :data:`SLACK`: what the dtype costs is measured, not guessed.

    Args:
        pools: their names.
        got: of the kernel.
        own: of the reference on the same arguments.
        exact: of the reference on those arguments in float32.

    Returns:
        ``errors`` and ``bars`` by name ("output" and the pools'), ``first_mismatch`` (name and index, or None), the
        largest absolute and relative error of the output, and how many rows were compared.
    """
    names = ("output", *pools)
    errors, bars, wrong = {}, {}, []
    for name, one, yardstick, want in zip(
        names, (got[0], *got[1]), (own[0], *own[1]), (exact[0], *exact[1]), strict=True
    ):
        worst, place = _worst_error(one, want)
        errors[name] = float(worst)
        bars[name] = 2 * float(_worst_error(yardstick, want)[0]) + SLACK[jnp.dtype(one.dtype).name]
        if not errors[name] <= bars[name]:  # NaN is wrong
            wrong.append([name, *(int(i) for i in np.unravel_index(int(place), want.shape))])
    output, want = got[0], exact[0]
    return {
        "rows_compared": int(want.shape[0]),
        "max_abs_delta": float(jnp.max(jnp.abs(output.astype(jnp.float32) - want), initial=0.0)),
        "max_relative_error": errors["output"],
        "errors": errors,
        "bars": bars,
        "first_mismatch": wrong[0] if wrong else None,
        "skipped": 0,
    }


@jax.jit
def _worst_error(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Largest relative error (NaN if there is one) and its flat index.

    A row, the last axis, has a scale of its own: a query that sees few keys has larger outputs, and with them larger
    roundings, than one that averages thousands.
    """
    if not want.size:  # an op asked for what it writes to a pool alone
        return jnp.float32(0), jnp.int32(0)
    want = want.astype(jnp.float32)
    scale = jnp.sqrt(jnp.mean(want**2, axis=-1, keepdims=True))
    error = jnp.abs(got.astype(jnp.float32) - want) / (jnp.abs(want) + scale + 1e-30)
    place = jnp.argmax(jnp.where(jnp.isnan(error), jnp.inf, error))
    return error.ravel()[place], place
