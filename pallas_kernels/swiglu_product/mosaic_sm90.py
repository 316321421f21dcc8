"""``swiglu_product`` on Hopper, Pallas Mosaic GPU: a warp-specialised product whose accumulators never leave registers.

A tile's gate and up columns come from the two halves of the weight by copies of their own and meet in one accumulator,
so each thread has gate and up of the same numbers and the activation is a matter of registers. While it is computed,
the first steps of the next tile arrive. See ``mosaic_waves`` for the frame, and NOTES.md beside this.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuned
from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.mosaic_products import DEPTH
from pallas_kernels.mosaic_waves import Frame, multiply
from pallas_kernels.numerics import silu_by_root

STRIP = 64  # columns side by side in shared memory: 128 bytes, the widest swizzle
COLUMNS = 128  # hidden columns of a tile at the most


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        wide: of a tile: 1: 128 rows and 128 hidden columns, 2: 256 rows and 64 columns; a hidden column is a gate and
            an up column of the weight.
        stages: steps of the inner dimension in shared memory.
        products: of a step: 1 for gate and up together, or 2.
        start: step of the first warpgroup with which the second begins a tile: one has the tensor cores while the other
            computes its activation. At 1 they begin together.
        pairs: numbers that share a reciprocal, 1 or 2.
        cluster: blocks that share each step's weight.
        group: row blocks, of all blocks of a cluster, that are taken together before the columns move on.
        blocks: blocks of the grid; more than the GPU has multiprocessors wait.
        tail: 2: if the last wave of tiles fills the grid by half or less, its tiles are cut in two; 1: never. 2 takes
            one product of a step.
    """

    wide: int = 1
    stages: int = 4
    products: int = 1
    start: int = 1
    pairs: int = 2
    cluster: int = 2
    group: int = 8
    blocks: int = 132
    tail: int = 1

    def __post_init__(self):
        known = all(value in (1, 2) for value in (self.wide, self.products, self.pairs, self.cluster, self.tail))
        if not (known and 1 <= self.start <= self.stages and self.stages >= 2 and self.group >= 1):
            raise ValueError(f"no tiling of this kernel: {self}")
        if self.blocks < self.cluster:
            raise ValueError(f"{self.blocks} blocks are no cluster of {self.cluster}")

    @property
    def rows(self) -> int:
        """Tokens of a tile."""
        return 128 * self.wide

    @property
    def columns(self) -> int:
        """Hidden columns of a tile."""
        return 128 // self.wide

    @property
    def frame(self) -> Frame:
        """The same for the frame of the kernel."""
        return Frame(
            rows=self.rows,
            columns=self.columns,
            halves=2,
            joined=self.products == 1,
            strip=STRIP,
            stages=self.stages,
            start=self.start,
            cluster=self.cluster,
            group=self.group,
            blocks=self.blocks,
            tail=self.tail,
        )

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of a block, less its barriers."""
        return self.frame.shared_bytes(itemsize)


def tuning_key(arguments) -> tuned.Key:
    """Shapes that tuned tilings are found by."""
    (tokens, width), doubled = arguments["x"].shape, arguments["weight"].shape[1]
    exact = {"dtype": jnp.dtype(arguments["x"].dtype).name}
    return exact, {"tokens": tokens, "width": width, "hidden": doubled // 2}


def supports(target, arguments) -> None:
    """Hopper, 16-bit activations, a width of whole steps, hidden columns of whole tiles."""
    require_nvidia(target, at_least=(9, 0), before=(10, 0))  # wgmma is Hopper's alone
    (tokens, width), doubled = arguments["x"].shape, arguments["weight"].shape[1]
    dtype = arguments["x"].dtype
    require(dtype.itemsize == 2, f"takes 16-bit activations, not {dtype}")
    require(width % DEPTH == 0 and width > 0, f"takes widths in multiples of {DEPTH}, not {width}")
    whole = doubled % (2 * COLUMNS) == 0 and doubled > 0
    require(whole, f"takes hidden sizes in multiples of {COLUMNS}, not {doubled / 2:g}")
    require(tokens > 0, "takes at least one token")
    largest = max(tokens * width, tokens * doubled // 2, width * doubled)
    require(largest < 2**31, f"an array of {largest} numbers is past int32")


def swiglu_product(x, weight, *, tiling: Tiling | None = None, interpret=False) -> jax.Array:
    """See :func:`pallas_kernels.swiglu_product`."""
    if tiling is None:
        key = tuning_key({"x": x, "weight": weight})
        tiling = tuned.settings(Tiling(), "swiglu_product", "mosaic_sm90", key)
    if tiling.pairs * tiling.wide > 2:
        raise ValueError(f"no tiling of this kernel: halves of {tiling.columns} columns are no whole strips: {tiling}")
    finish = functools.partial(_finish, pairs=tiling.pairs)
    # profiles know a kernel without a scope by its name
    return multiply(x, weight, tiling.frame, finish, name="gate_up_swiglu", interpret=interpret)


def _finish(products, gate, up, *, pairs: int) -> list:
    """The activation, of all columns or of the left and the right ones if those are whole strips."""
    if pairs == 2 and gate.shape[1] % (2 * STRIP) == 0:
        gates, ups = products.halves(gate), products.halves(up)
        return [silu * up for silu, up in zip(_two_silus(*gates), ups, strict=True)]
    return [silu_by_root(gate) * up]


def _two_silus(x, y):
    """One reciprocal for two: the unit for special functions is what the activation waits for.

    Exponents are held at 2^60, so that the product of two stays a number: a SiLU below 1e-17 in size is too large then.
    """
    one, other = (1.0 + jnp.exp2(jnp.minimum(number * -math.log2(math.e), 60.0)) for number in (x, y))
    root = lax.rsqrt(one * other)
    both = root * root
    return x * (both * other), y * (both * one)
