"""Small constants of a program that the ops take as arrays.

On a GPU XLA copies the operand of a custom kernel, a launch each time, if it is a constant, or a slice that does not
begin and end at a multiple of 256 bytes. So these numbers lie in tables with rows of such a size, which a program makes
once; what the ops take is a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.numerics import inverse_frequencies
from qwen35_jax.config import ModelConfig
from qwen35_jax.shapes import Frequencies, LayerNumber, LayerNumbers

_ROW = 64  # numbers of four bytes: 256 bytes


class Constants(NamedTuple):
    """The tables.

    Attributes:
        layer_numbers: ``int32 [L, 64]``, row i is full of i: the number of a layer in the pools of its kind.
        inverse_frequencies: fp32, radians a position of each pair of rotated dims, then zeros up to a full row.
    """

    layer_numbers: LayerNumbers
    inverse_frequencies: Frequencies

    @classmethod
    @jax.named_scope("constants")
    def of(cls, config: ModelConfig) -> Constants:
        """Makes the tables of a model; meant for the inside of a trace, once a program."""
        kinds = list(config.layer_types)
        layers = lax.broadcasted_iota(jnp.int32, (max(map(kinds.count, kinds)), _ROW), 0)
        found = inverse_frequencies(config.attention.rotary_dim, config.attention.rope_theta)
        # An array that the compiler could compute would be a constant again: it does not compute this choice by iota.
        places = lax.iota(jnp.int32, -(-(found.size + 1) // _ROW) * _ROW)
        frequencies = jnp.where(places < found.size, np.resize(found, places.shape), 0.0)
        # Behind a barrier, or XLA would make every row by itself.
        return cls(*lax.optimization_barrier((layers, frequencies)))

    def layer(self, number: int) -> LayerNumber:
        """A layer's number in the pools of its kind, as the ops take it: they look at the first of equal ones."""
        return lax.index_in_dim(self.layer_numbers, number, keepdims=False)
