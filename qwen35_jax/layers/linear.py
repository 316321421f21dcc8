"""Matrix products at the model's precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import precision_of
from qwen35_jax.shapes import Activations, Embedding, Logits, Matrix


def linear(x: Activations, weight: Matrix, scope: str = "linear") -> jax.Array:
    """``x @ weight`` with fp32 accumulation, rounded once to the dtype of ``x``; profiles show it as ``scope``."""
    with jax.named_scope(scope):
        return jnp.dot(x, weight, precision=precision_of(x.dtype))


def unembed(x: Activations, table: Matrix | Embedding, *, transposed: bool) -> Logits:
    """Logits ``[M, vocab]``, fp32 from the accumulator on (never rounded to the activation dtype).

    Args:
        x: ``[M, D]``.
        table: ``[D, vocab]``, or ``[vocab, D]`` when ``transposed`` (the embedding of a tied model).
        transposed: whether ``table`` is contracted over its second axis.
    """
    contract = ((1,), (1 if transposed else 0,))
    return lax.dot_general(
        x, table, (contract, ((), ())), precision=precision_of(x.dtype), preferred_element_type=jnp.float32
    )
