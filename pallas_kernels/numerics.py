"""The small formulas that several ops share, all in float32.

Rounding points, against the common bf16 implementation: that one also rounds beta, the cos/sin tables and the
normalised x_hat to the activation dtype. Here they stay float32 (closer to the exact maths, and one rounding point
fewer that every kernel would have to copy). What is rounded to the activation dtype: the convolution before its SiLU
and after it, the stored keys and values, the delta rule's output before its norm, and results.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

HIGHEST = lax.Precision.HIGHEST
L2_EPSILON = 1e-6


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Float32 numbers as ``dtype`` can hold them, still float32.

    A conversion there and back says the same, but XLA's GPU compiler takes it for excess precision and removes it.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def silu(x: jax.Array) -> jax.Array:
    """``x * sigmoid(x)``; plain operations, since a nested jit would keep a caller from using compute streams."""
    return x * lax.logistic(x)


def silu_by_root(x: jax.Array) -> jax.Array:
    """The same for kernels: ``1 / d`` as ``rsqrt(d)^2``, two instructions and as exact, where a division is a dozen."""
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return x * (root * root)


def precision_of(dtype: jax.typing.DTypeLike) -> lax.Precision:
    """HIGHEST for float32 operands (never TF32 or bf16 passes), the hardware's own product for the narrow types."""
    return HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def softplus(x: jax.Array) -> jax.Array:
    """``log(1 + exp(x))`` without overflow."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def l2_normalize(x: jax.Array) -> jax.Array:
    """``x / sqrt(sum x^2 + 1e-6)`` over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPSILON)


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """``x / sqrt(mean x^2 + eps)`` over the last axis, float32, without a weight."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def gated_rms_normalize(x: jax.Array, z: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """``x_hat * weight * silu(z)`` over the last axis, float32: the norm comes first, then the gate.

    Args:
        x: [..., Dv].
        z: [..., Dv].
        weight: f32[Dv], an ordinary weight near 1 (no ``1 +``).
        eps: added to the mean square.
    """
    return rms_normalize(x, eps) * weight * silu(z.astype(jnp.float32))


def delta_gates(b: jax.Array, a: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gates of the delta rule.

    Args:
        b: [..., Hv] input of the write strength.
        a: [..., Hv] input of the decay.
        A_log: f32[Hv], or [Hv, 1] with b and a transposed, [Hv, T].
        dt_bias: likewise.

    Returns:
        beta f32[..., Hv] in (0, 1) and the log decay g f32[..., Hv], <= 0.
    """
    beta = lax.logistic(b.astype(jnp.float32))
    g = -jnp.exp(A_log) * softplus(a.astype(jnp.float32) + dt_bias)
    return beta, g


def kept_share(a: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """``exp(g)`` of :func:`delta_gates` inside a kernel, where there is no log1p; scalars or arrays, float32."""
    x = a + dt_bias
    small = jnp.exp(-jnp.abs(x))  # log(1 + small), by its series where 1 + small would round it away
    log1p = jnp.where(small < 2.0**-10, small * (1.0 - 0.5 * small), jnp.log(1.0 + small))
    return jnp.exp(-jnp.exp(A_log) * (jnp.maximum(x, 0.0) + log1p))


def rope_cos_sin(positions: jax.Array, rotary_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary embedding.

    Args:
        positions: i32[T].
        rotary_dim: number of rotated dims (even).
        theta: base.

    Returns:
        f32[T, rotary_dim / 2] twice.
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    inverse_frequencies = jnp.asarray((1.0 / theta**exponents).astype(np.float32))
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the leading ``2 * cos.shape[-1]`` dims of each head, pairs ``(i, i + half)``; the rest passes through.

    Args:
        x: f32[T, heads, H].
        cos: f32[T, half].
        sin: f32[T, half].
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
