"""Matrix products at the model's precision."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import precision_of, round_to
from qwen35_jax.shapes import Activations, Delta, Embedding, Logits, Matrix

PART_ROWS = range(2, 65)
"""Rows of a product that is left in parts: a single row is no matrix product, and more fill the device without."""
MOST_PARTS = 9
"""As many as a product of 2,560 columns needs for every multiprocessor to read; with more their sum takes longer."""
FEW_ROWS = 16
LEAST_INNER = (512, 1024)
"""Of a part, at the least: with few rows, with more."""


def linear(x: Activations, weight: Matrix, scope: str = "linear", *, in_parts: bool = False) -> Delta:
    """``x @ weight`` with fp32 accumulation, rounded once to the dtype of ``x``; profiles show it as ``scope``.

    A library cuts the inner dimension of a product of few rows, and sums the parts in a kernel of their own.

    Args:
        x: ``[M, K]``.
        weight: ``[K, N]``.
        scope: name of the part of a step.
        in_parts: whether the caller sums them itself (``add_rms_norm`` does).

    Returns:
        ``[M, N]``, or fp32 parts ``[P, M, N]`` where the caller takes them and :func:`parts_of` says that it pays.
    """
    parts = parts_of(*x.shape) if in_parts else 1
    with jax.named_scope(scope):
        if parts == 1:
            return jnp.dot(x, weight, precision=precision_of(x.dtype))
        return lax.dot_general(
            x.reshape(x.shape[0], parts, -1),
            weight.reshape(parts, -1, weight.shape[1]),
            (((2,), (1,)), ((1,), (0,))),
            precision=precision_of(x.dtype),
            preferred_element_type=jnp.float32,
        )


def parts_of(rows: int, inner: int) -> int:
    """Parts that a product of so many rows is cut in; 1 for a whole one."""
    if rows not in PART_ROWS:
        return 1
    most = min(MOST_PARTS, inner // LEAST_INNER[rows > FEW_ROWS])
    return next((parts for parts in range(most, 1, -1) if inner % (64 * parts) == 0), 1)


def whole(product: Delta, dtype: jax.typing.DTypeLike) -> Activations:
    """``[M, N]`` of what :func:`linear` gives, in parts or not."""
    return product if product.ndim == 2 else round_to(functools.reduce(jnp.add, list(product)), dtype).astype(dtype)


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
