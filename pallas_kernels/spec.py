"""Specs: named workloads of an op on real model shapes, shared by tests, benchmarks and tuning."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that its kernels see.

    Attributes:
        name: short name, the start of spec names.
        num_heads: query heads N.
        num_kv_heads: key/value heads K.
        num_k_heads: GDN key heads Hk.
        num_v_heads: GDN value heads Hv.
        head_dim: attention head dim H.
        hidden_size: width D of the residual stream.
        intermediate_size: width F of the MLP.
        rotary_dim: rotated dims.
        head_k_dim: Dk.
        head_v_dim: Dv.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    num_k_heads: int
    num_v_heads: int
    head_dim: int = 256
    hidden_size: int = 256
    intermediate_size: int = 256
    rotary_dim: int = 64
    head_k_dim: int = 128
    head_v_dim: int = 128

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution, 2 Hk Dk + Hv Dv."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    @property
    def projected_heads(self) -> int:
        """Heads of an attention layer's projection, side by side: queries, gates, keys and values, 2 N + 2 K."""
        return 2 * self.num_heads + 2 * self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Hv Dv."""
        return self.num_v_heads * self.head_v_dim


REAL_MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("0.8b", 8, 2, num_k_heads=16, num_v_heads=16, hidden_size=1024, intermediate_size=3584),
        ModelShape("2b", 8, 2, num_k_heads=16, num_v_heads=16, hidden_size=2048, intermediate_size=6144),
        ModelShape("4b", 16, 4, num_k_heads=16, num_v_heads=32, hidden_size=2560, intermediate_size=9216),
        ModelShape("9b", 16, 4, num_k_heads=16, num_v_heads=32, hidden_size=4096, intermediate_size=12288),
        ModelShape("27b", 24, 4, num_k_heads=16, num_v_heads=48, hidden_size=5120, intermediate_size=17408),
    )
}

TINY_MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        # Every ratio of value to key heads and of query to key/value heads in the family (the last two are those of
        # the mixture-of-experts members), at head dims that every kernel can run.
        ModelShape("tiny1", num_heads=4, num_kv_heads=1, num_k_heads=2, num_v_heads=2),
        ModelShape("tiny2", num_heads=8, num_kv_heads=2, num_k_heads=2, num_v_heads=4),
        ModelShape("tiny3", num_heads=6, num_kv_heads=1, num_k_heads=1, num_v_heads=3),
        ModelShape("tiny2g8", num_heads=8, num_kv_heads=1, num_k_heads=1, num_v_heads=2),
        ModelShape("tiny4g16", num_heads=16, num_kv_heads=1, num_k_heads=1, num_v_heads=4),
    )
}

RAGGED_8192 = (37, 3879, 512, 1, 1200, 64, 2049, 450)
"""One ragged pack of 8192 tokens, from a single token to most of the pack."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one call.

    Attributes:
        arguments: arrays by argument name, in the order of the signature.
        options: static keyword options.
    """

    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec(abc.ABC):
    """A workload of one op.

    Attributes:
        op: name of the op.
        pools: arguments that the op updates in place; they are its last results, in this order.
        chained: of an op without such pools, the argument that a result of the call before it can stand for; None
            where no argument has the shape of the result.
        bound: "bytes" or "flops": which ceiling the op is measured against.
        name: name of the spec, unique in its op.
        model: model shape.
        dtype: activation dtype.
        num_layers: layers of the pools; the call uses the last one.
    """

    op: ClassVar[str]
    pools: ClassVar[tuple[str, ...]]
    bound: ClassVar[str]
    chained: ClassVar[str | None] = "q"

    name: str
    model: ModelShape
    dtype: str = "bfloat16"
    num_layers: int = 1

    @abc.abstractmethod
    def case(self, seed: int = 0, *, poison: bool = False) -> Case:
        """Random arguments.

        Args:
            seed: seed of everything random.
            poison: fill whatever the op must not depend on with NaN: the null slot and page, other slots and pages,
                other layers, positions past a length, states where has_state is False, pad tokens.
        """

    @abc.abstractmethod
    def compulsory_bytes(self) -> int:
        """Bytes that any implementation must move: every live input read once, every output written once."""

    @abc.abstractmethod
    def flops(self) -> int:
        """Multiply-adds of the op's matrix products, times two."""

    @property
    def itemsize(self) -> int:
        """Bytes of one activation."""
        return jnp.dtype(self.dtype).itemsize


class Draw:
    """Random arrays, a function of the seed and the order of the draws.

    Small arrays are drawn in numpy (no compilation), large ones by jax where they will live (and abstractly under
    ``jax.eval_shape``).
    """

    _LARGE = 1 << 22  # elements

    def __init__(self, seed: int):
        self._key = jax.random.key(seed)
        self._count = 0
        self.numpy = np.random.default_rng(seed)

    def normal(self, shape: tuple[int, ...], dtype: str = "float32", scale: float = 1.0):
        """Normal values."""
        if math.prod(shape) < self._LARGE:
            return (scale * self.numpy.standard_normal(shape, np.float32)).astype(jnp.dtype(dtype))
        self._count += 1
        return (scale * jax.random.normal(jax.random.fold_in(self._key, self._count), shape)).astype(dtype)

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
        """Uniform float32 values (small arrays only)."""
        return self.numpy.uniform(low, high, shape).astype(np.float32)

    def distinct(self, count: int, top: int) -> np.ndarray:
        """Distinct int32 values out of 1 .. top, in random order."""
        return (1 + self.numpy.permutation(top)[:count]).astype(np.int32)


def packed_offsets(lengths: tuple[int, ...]) -> np.ndarray:
    """cu_seqlens of a pack, i32[R + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def nan_where(mask: np.ndarray, array):
    """The array with NaN where the mask (broadcast from the left) says so."""
    mask = mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim))
    if isinstance(array, np.ndarray):
        return np.where(mask, np.asarray(np.nan, array.dtype), array)
    return jnp.where(mask, jnp.asarray(jnp.nan, array.dtype), array)


def page_table(draw: Draw, lengths: tuple[int, ...], width: int, num_pages: int, *, stray: bool) -> np.ndarray:
    """Page tables with distinct pages out of order; entries past a length are 0, or any page if ``stray``."""
    needed = [-(-length // PAGE_SIZE) for length in lengths]
    pages = iter(draw.distinct(sum(needed), num_pages - 1))
    table = draw.numpy.integers(0, num_pages, (len(lengths), width))
    if not stray:
        table[:] = 0
    for row, count in enumerate(needed):
        table[row, :count] = [next(pages) for _ in range(count)]
    return table.astype(np.int32)


def unwritten(table: np.ndarray, lengths: tuple[int, ...], num_layers: int, num_pages: int) -> np.ndarray:
    """bool[L, P, 1, 1, Z], True wherever the last layer holds no written position."""
    mask = np.ones((num_layers, num_pages, PAGE_SIZE), bool)
    for row, length in enumerate(lengths):
        positions = np.arange(length)
        mask[-1, table[row, positions // PAGE_SIZE], positions % PAGE_SIZE] = False
    return mask[:, :, None, None, :]


def specs_of(op: str) -> Mapping[str, Spec]:
    """All specs of an op by name: the real shapes, then the tiny ones."""
    module = importlib.import_module(f"pallas_kernels.{op}.specs")
    return {spec.name: spec for spec in (*module.REAL_SPECS, *module.TINY_SPECS)}


def tiny_specs_of(op: str) -> Mapping[str, Spec]:
    """The tiny specs of an op by name."""
    module = importlib.import_module(f"pallas_kernels.{op}.specs")
    return {spec.name: spec for spec in module.TINY_SPECS}
