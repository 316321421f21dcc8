"""SwiGLU MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from qwen35_jax.config import ModelConfig
from qwen35_jax.layers.linear import linear
from qwen35_jax.layers.parameters import matrix
from qwen35_jax.shapes import Activations


class MLP(nnx.Module):
    """``down(silu(gate(x)) * up(x))`` with gate and up fused into one product.

    Parameters: ``gate_up [D, 2F]`` (gate, then up) and ``down [F, D]``, activation dtype.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None, dtype: jnp.dtype):
        width, hidden = config.hidden_size, config.intermediate_size
        self.gate_up = matrix(rngs, (width, 2 * hidden), dtype)
        self.down = matrix(rngs, (hidden, width), dtype)

    def __call__(self, x: Activations) -> Activations:
        """Maps ``[M, D]`` to ``[M, D]``."""
        gate, up = jnp.split(linear(x, self.gate_up[...], "gate_up"), 2, axis=-1)  # [M, F] each
        return linear(swiglu(gate, up), self.down[...], "down")


@jax.named_scope("swiglu")
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``silu(gate) * up`` in fp32, rounded once (the reference rounds after the SiLU as well).

    ``lax.logistic`` rather than ``jax.nn.silu``: the latter is a nested jit, which XLA cannot place on a GPU stream.
    """
    gate32 = gate.astype(jnp.float32)
    return (gate32 * lax.logistic(gate32) * up.astype(jnp.float32)).astype(gate.dtype)
