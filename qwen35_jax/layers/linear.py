"""Matrix products at the model's precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from pallas_kernels.numerics import precision_of
from pallas_kernels.registry import implementation_of
from qwen35_jax.shapes import Activations, Embedding, Logits, Matrix


def linear(x: Activations, weight: Matrix, scope: str = "linear", *, kernels: str | None = None) -> jax.Array:
    """``x @ weight`` with fp32 accumulation, rounded once to the dtype of ``x``; profiles show it as ``scope``.

    Args:
        x: ``[M, K]``; without ``kernels`` any number of axes in front of K.
        weight: ``[K, N]``.
        scope: name of the part of a step.
        kernels: which kernels the model runs, for products that the op ``linear`` has kernels for; None for XLA's.
    """
    with jax.named_scope(scope):
        if kernels is None:
            return jnp.dot(x, weight, precision=precision_of(x.dtype))
        return pallas_kernels.linear(x, weight, implementation=implementation_of(kernels, "linear"))


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
