"""RMS norms; all arithmetic in fp32, one rounding at the end.

Rounding points against the public reference implementation: the reference rounds ``x_hat`` of the gated norm to the
activation dtype before the weight; here it stays in fp32. Block norms agree (the reference also rounds last).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import gated_rms_normalize
from qwen35_jax.shapes import Activations, DeltaOutputs, Vector


@jax.named_scope("norm")
def rms_norm(x: Activations, weight: Vector, eps: float) -> Activations:
    """``x_hat * (1 + weight)`` over the last axis.

    ``1 + weight`` is formed in fp32 at every use: folded into a bf16 weight, small weights would round away.

    Args:
        x: ``[..., D]``, activation dtype.
        weight: fp32 ``[D]``, stored near 0.
        eps: added to the mean square.

    Returns:
        ``[..., D]`` in the dtype of ``x``.
    """
    x32 = x.astype(jnp.float32)
    x_hat = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x_hat * (1.0 + weight)).astype(x.dtype)


@jax.named_scope("gated_norm")
def gated_rms_norm(x: DeltaOutputs, z: DeltaOutputs, weight: Vector, eps: float) -> DeltaOutputs:
    """``weight * x_hat * silu(z)`` over the last axis: the norm comes first, then the gate.

    For what must be differentiable; the model's mixer runs :func:`pallas_kernels.gated_rms_norm`.

    Args:
        x: ``[..., Dv]``, activation dtype.
        z: ``[..., Dv]``, activation dtype.
        weight: fp32 ``[Dv]``, an ordinary weight near 1 (no ``1 +``).
        eps: added to the mean square.

    Returns:
        ``[..., Dv]`` in the dtype of ``x``.
    """
    return gated_rms_normalize(x, z, weight, eps).astype(x.dtype)
