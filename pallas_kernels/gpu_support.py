"""What the capability checks of the GPU implementations share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.registry import Target, UnsupportedArguments

HOPPER_SHARED_BYTES = 220 * 1024
"""Shared memory of a block on Hopper that stages may fill, less what is small."""


def require_nvidia(target: Target, *, at_least: tuple[int, int], before: tuple[int, int] | None = None) -> None:
    """Decline anything but an NVIDIA GPU of a compute capability.

    Devices that do not tell their capability (those that stand for a GPU that is not here) are taken by their name.

    Args:
        target: the device of the call.
        at_least: lowest compute capability, (major, minor).
        before: lowest one that is too new; None takes every later one.

    Raises:
        UnsupportedArguments: another device.
    """
    if target.platform != "gpu" or not target.device_kind.startswith("NVIDIA"):
        raise UnsupportedArguments(f"needs an NVIDIA GPU, the device is {target.platform} ({target.device_kind})")
    if target.compute_capability is not None:
        found = tuple(int(part) for part in target.compute_capability.split(".")[:2])
        if found < at_least:
            wanted = ".".join(map(str, at_least))
            raise UnsupportedArguments(f"needs compute capability {wanted}, the device has {target.compute_capability}")
        if before is not None and found >= before:
            limit = ".".join(map(str, before))
            raise UnsupportedArguments(f"is for devices before {limit}, this one has {target.compute_capability}")


def require(condition: bool, message: str) -> None:
    """Decline with a message unless the condition holds.

    Raises:
        UnsupportedArguments: it does not.
    """
    if not condition:
        raise UnsupportedArguments(message)


def full_float32(dtype) -> lax.Precision | None:
    """Precision of a kernel's products: float32 operands must not be rounded to TF32, 16-bit ones need nothing."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize == 4 else None


def three_tf32(dtype) -> lax.DotAlgorithmPreset | None:
    """Precision of products of float32 operands as three of their TF32 parts: 21 bits, on the tensor cores."""
    return lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if jnp.dtype(dtype).itemsize == 4 else None


def weighted_sum(weights: jax.Array, values: jax.Array, *, exact: bool = True, precision=None) -> jax.Array:
    """``weights @ values`` inside a Triton kernel.

    Args:
        weights: f32[M, S].
        values: [S, H].
        exact: 16-bit values only: carry the weights as two numbers of their dtype (16 mantissa bits for bfloat16) in
            two products. Otherwise they are rounded once, an error of one roundoff of ``sum |weight value|``.
        precision: of the product of float32 values; None keeps them whole.

    Returns:
        f32[M, H].
    """
    high = weights.astype(values.dtype)
    total = plgpu.dot(high, values, precision=precision or full_float32(values.dtype))
    if exact and values.dtype.itemsize == 2:
        total = total + plgpu.dot((weights - high.astype(jnp.float32)).astype(values.dtype), values)
    return total
