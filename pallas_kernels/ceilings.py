"""What a device can do: the ceilings that shares of kernels are counted of."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp

COLD_BYTES = 256 << 20
"""Several times the L2 cache of any device that these kernels run on: what calls take so much of is in memory."""
KNOWN_CEILINGS = {"NVIDIA H200": (4.26e12, 780e12)}
"""Bytes/s of a device copy and bf16 FLOP/s of a large product, by device kind, where they were measured apart."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the device can do.

    Attributes:
        bytes_per_s: the better of the copy measured in this run and the known figure.
        flops_per_s: known figure, or None.
        measured_bytes_per_s: the copy measured in this run.
    """

    bytes_per_s: float
    flops_per_s: float | None
    measured_bytes_per_s: float


def measure_ceilings(num_bytes: int) -> Ceilings:
    """Time copies of an array of ``num_bytes`` (read once, written once) and look up what is known of the device."""
    source = jnp.zeros((num_bytes // 4,), jnp.int32)
    best = 0.0
    for copy in (jax.jit(jnp.copy), jax.jit(lambda x: x + 1)):
        jax.block_until_ready(copy(source))
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready([copy(source) for _ in range(4)])
            best = max(best, 4 * 2 * source.nbytes / (time.perf_counter() - start))
    known_bytes, known_flops = KNOWN_CEILINGS.get(jax.devices()[0].device_kind, (0.0, None))
    return Ceilings(max(best, known_bytes), known_flops, best)
