"""SwiGLU MLP."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from pallas_kernels import swiglu_product
from pallas_kernels.registry import implementation_of
from qwen35_jax.config import ModelConfig
from qwen35_jax.layers.linear import linear
from qwen35_jax.layers.parameters import matrix
from qwen35_jax.shapes import Activations, Delta


class MLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))`` with gate and up fused into one product.

    Parameters: ``gate_up [D, 2F]`` (gate, then up) and ``down [F, D]``, activation dtype. The SiLU and its product with
    up are fp32, rounded once (the public reference implementation rounds after the SiLU as well).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None, kernels: str, dtype: jnp.dtype):
        width, hidden = config.hidden_size, config.intermediate_size
        self.implementation = implementation_of(kernels, "swiglu_product")
        self.gate_up = matrix(rngs, (width, 2 * hidden), dtype)
        self.down = matrix(rngs, (hidden, width), dtype)

    def __call__(self, x: Activations, *, in_parts: bool = False) -> Delta:
        """Maps ``[M, D]`` to ``[M, D]``, or to fp32 parts ``[P, M, D]`` if the caller takes them, see ``linear``."""
        hidden = swiglu_product(x, self.gate_up[...], implementation=self.implementation)  # [M, F]
        return linear(hidden, self.down[...], "down", in_parts=in_parts)
