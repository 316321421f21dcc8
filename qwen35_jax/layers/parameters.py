"""How parameters are made: matrices in the activation dtype, small vectors in fp32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

INIT_STDDEV = 0.02


class SmallParam(nnx.Param):
    """A parameter of a few kilobytes that every layer of a kind has: packed into one array across the layers.

    Every array argument of a program costs host time at each dispatch (see :class:`qwen35_jax.params.ParamPack`).
    """


class HeadParam(SmallParam):
    """A number a head. The ops take it with anything behind the heads' numbers, so that it can be handed out padded."""


class LayerParam(SmallParam):
    """A vector whose op takes those of all layers as well, and looks up the row of the layer that it is called for."""


def matrix(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param:
    """A matrix of the model: normal with standard deviation 0.02, or zeros when no ``rngs`` is given."""
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, dtype))
    return nnx.Param((INIT_STDDEV * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype))


def vector(size: int, value: float = 0.0) -> SmallParam:
    """An fp32 vector filled with ``value``."""
    return SmallParam(jnp.full((size,), value, jnp.float32))


def layer_vector(size: int) -> LayerParam:
    """An fp32 vector of zeros that may be handed out with those of the other layers."""
    return LayerParam(jnp.zeros((size,), jnp.float32))
