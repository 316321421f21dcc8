"""``kv_write`` on NVIDIA GPUs, Pallas-Triton: a warp for each token and key/value head.

A program normalises and rotates the query heads of one group, then their key head, and copies the value; everything it
needs of the rotation (``rotary_dim / 2`` sines and cosines) it computes once. A head is held as pieces whose sizes are
powers of two: the two halves that rotate into one another, then the dims that pass through. The loads of all heads are
independent of one another, so one warp has about 3 kB in flight and 32 of them saturate the memory of an SM.

Operands are read where they are: XLA cuts a slice out for a Triton kernel by a launch of its own. The heads are one
array, as the layer's matrix product has left it, which the kernel gets three times, for queries, keys and values. The
norm weights may be those of all layers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpu_support import require, require_nvidia


def supports(target, arguments) -> None:
    """Any activation dtype (there is no matrix product), any sizes whose pieces are few."""
    require_nvidia(target, at_least=(8, 0))
    head_dim, rotary_dim = arguments["heads"].shape[2], arguments["rotary_dim"]
    require(len(_pieces(head_dim, rotary_dim)) <= 8, f"head dim {head_dim} with {rotary_dim} rotated dims")
    require(_is_power_of_two(rotary_dim // 2), f"rotary_dim / 2 must be a power of two, got {rotary_dim} / 2")
    heads, kv_heads = arguments["num_heads"], arguments["kv_pool"].shape[3]
    require(heads % kv_heads == 0, f"{heads} query heads are no multiple of {kv_heads} key heads")


def kv_write(
    heads,
    q_norm,
    k_norm,
    kv_pool,
    layer,
    page_ids,
    page_offsets,
    positions,
    *,
    num_heads,
    rotary_dim,
    rope_theta,
    eps,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.kv_write`. The pool is an operand aliased to a result: written in place."""
    num_tokens, _, head_dim = heads.shape
    num_kv_heads = kv_pool.shape[3]
    group = num_heads // num_kv_heads  # 0: keys and values alone
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    inverse_frequencies = jnp.asarray((1.0 / rope_theta**exponents).astype(np.float32))
    norms = (norm.reshape(-1, head_dim) for norm in (q_norm, k_norm))

    def a_head(first: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, head_dim), lambda token, head: (token, first + head, 0))

    whole = pl.BlockSpec(memory_space=pl.ANY)
    queries = [pl.BlockSpec((None, group, head_dim), lambda token, head: (token, head, 0))] if group else []
    parts = [*queries, a_head(2 * num_heads), a_head(2 * num_heads + num_kv_heads)]  # and keys, values
    arguments = [*norms, inverse_frequencies, layer[None], page_ids, page_offsets, positions, kv_pool]
    q_shape = jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), heads.dtype)
    *q_out, kv_pool = pl.pallas_call(
        functools.partial(_kernel, group=group, pieces=_pieces(head_dim, rotary_dim), eps=eps),
        grid=(num_tokens, num_kv_heads),
        in_specs=[*parts, *[whole] * len(arguments)],
        out_specs=[*queries, whole],
        out_shape=[*[q_shape] * len(queries), jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype)],
        input_output_aliases={len(parts) + len(arguments) - 1: len(queries)},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="kv_write",
    )(*[heads] * len(parts), *arguments)
    return q_out[0] if group else jnp.zeros(q_shape.shape, q_shape.dtype), kv_pool


def _kernel(*refs, group: int, pieces: tuple[tuple[int, int], ...], eps: float):
    q_ref, *refs = refs if group else (None, *refs)  # [G, H]
    k_ref, v_ref, q_norm_ref, k_norm_ref, inverse_frequencies_ref, *refs = refs  # [H], [H], [1 or L, H] twice
    layer_ref, page_ids_ref, page_offsets_ref, positions_ref, *refs = refs  # then the pool, read by nobody
    q_out_ref, pool_ref = refs[-2], refs[-1]  # [G, H] if there are queries, [L, P, 2, K, Z, H]
    token, head = pl.program_id(0), pl.program_id(1)
    page, place, layer = page_ids_ref[token], page_offsets_ref[token], layer_ref[0]
    real = page != 0
    angle = positions_ref[token].astype(jnp.float32) * inverse_frequencies_ref[...]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rotate = functools.partial(_normed_and_rotated, layer=layer, pieces=pieces, cos=cos, sin=sin, eps=eps)

    for number in range(group):
        for (start, size), part in zip(pieces, rotate(q_ref, (number,), q_norm_ref), strict=True):
            q_out_ref[number, pl.ds(start, size)] = jnp.where(real, part, 0).astype(q_out_ref.dtype)

    @pl.when(real)  # pads write nothing, not even the null page
    def _():
        for (start, size), part in zip(pieces, rotate(k_ref, (), k_norm_ref), strict=True):
            dims = pl.ds(start, size)
            pool_ref[layer, page, 0, head, place, dims] = part.astype(pool_ref.dtype)
            pool_ref[layer, page, 1, head, place, dims] = v_ref[dims]


def _normed_and_rotated(x_ref, head, norm_ref, *, layer, pieces, cos, sin, eps: float) -> list[jax.Array]:
    """The pieces of one head, float32."""
    row = layer if norm_ref.shape[0] > 1 else 0
    parts = [x_ref[(*head, pl.ds(start, size))].astype(jnp.float32) for start, size in pieces]
    head_dim = sum(size for _, size in pieces)
    inverse_rms = lax.rsqrt(sum(jnp.sum(part * part) for part in parts) / head_dim + eps)
    first, second, *rest = (
        part * inverse_rms * (1.0 + norm_ref[row, pl.ds(start, size)])
        for (start, size), part in zip(pieces, parts, strict=True)
    )
    return [first * cos - second * sin, second * cos + first * sin, *rest]


def _pieces(head_dim: int, rotary_dim: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of the two rotating halves, then of the rest in powers of two, smallest first: aligned starts."""
    half = rotary_dim // 2
    pieces, start = [(0, half), (half, half)], rotary_dim
    while start < head_dim:
        size = min(start & -start, 1 << ((head_dim - start).bit_length() - 1))
        pieces.append((start, size))
        start += size
    return tuple(pieces)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
