"""``linear`` on Hopper, Pallas Mosaic GPU: the frame of ``mosaic_waves`` with tiles whose width fits the shape.

For products that have about as many tiles as the GPU has multiprocessors, what counts is how full the waves are: 1024
rows by 2560 columns are 160 tiles of 128 x 128 (two waves, the second a fifth full), but 128 tiles of 128 x 160, one
wave. See NOTES.md beside this.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tuned
from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.mosaic_products import DEPTH
from pallas_kernels.mosaic_waves import SHARED_BYTES, Frame, multiply, waves_of

COLUMN_ALIGNMENT = 8  # 16 bytes, which the copy engine moves
MOST_STAGES = 6


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        columns: of a tile, whole strips; rows are 128.
        strip: columns side by side in shared memory, 32 or 64 (64 or 128 bytes, the pattern in which banks alternate).
        stages: steps of the inner dimension in shared memory.
        start: step of the first warpgroup with which the second begins a tile. At 1 they begin together.
        cluster: blocks that share each step's weight.
        group: row blocks, of all blocks of a cluster, that are taken together before the columns move on.
        blocks: blocks of the grid; more than the GPU has multiprocessors wait.
        tail: 2: if the last wave of tiles fills the grid by half or less, its tiles are cut in two; 1: never.
    """

    columns: int = 160
    strip: int = 32
    stages: int = 5
    start: int = 1
    cluster: int = 2
    group: int = 8
    blocks: int = 132
    tail: int = 1

    def __post_init__(self):
        known = self.strip in (32, 64) and self.cluster in (1, 2) and self.tail in (1, 2) and self.group >= 1
        if not (known and 1 <= self.start <= self.stages and self.stages >= 2 and 0 < self.columns <= 256):
            raise ValueError(f"no tiling of this kernel: {self}")
        if self.blocks < self.cluster:
            raise ValueError(f"{self.blocks} blocks are no cluster of {self.cluster}")

    @property
    def whole(self) -> bool:
        """Whether tiles, and the pieces that they may be cut in, are whole strips."""
        return self.columns % (self.strip * self.tail) == 0

    @property
    def frame(self) -> Frame:
        """The same for the frame of the kernel."""
        return Frame(
            rows=128,
            columns=self.columns,
            halves=1,
            joined=self.tail > 1,
            strip=self.strip,
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


_WIDTHS = tuple(
    Tiling(columns=columns, strip=strip, stages=stages, cluster=cluster, tail=tail)
    for columns, strip, stages, tail in (
        (256, 64, 3, 2),
        (192, 32, 4, 2),
        (160, 32, 5, 1),
        (128, 64, 6, 2),
        (96, 32, 6, 1),
        (64, 64, 6, 1),
    )
    for cluster in (2, 1)
)
_FIXED_COLUMNS = 32  # a tile costs as much as so many columns more: rows that are brought and read for few columns


def default_tiling(num_rows: int, columns: int) -> Tiling:
    """Tiles whose waves are the fewest columns of a block; of equals the widest, and clusters, which bring less.

    Args:
        num_rows: M.
        columns: N.
    """

    def cost(tiling: Tiling) -> float:
        waves = waves_of(tiling.frame, num_rows, columns)
        whole = pl.cdiv(waves.whole, tiling.blocks // tiling.cluster) * (tiling.columns + _FIXED_COLUMNS)
        return whole + (tiling.columns / tiling.tail + _FIXED_COLUMNS if waves.cut else 0)

    return min(_WIDTHS, key=cost)


def tuning_key(arguments) -> tuned.Key:
    """Shapes that tuned tilings are found by; the width of tiles follows from exact ones."""
    (tokens, width), columns = arguments["x"].shape, arguments["weight"].shape[1]
    exact = {"dtype": jnp.dtype(arguments["x"].dtype).name, "columns": columns, "row_blocks": pl.cdiv(tokens, 128)}
    return exact, {"width": width}


def supports(target, arguments) -> None:
    """Hopper, 16-bit activations, an inner dimension of whole steps, columns of whole pieces of 16 bytes."""
    require_nvidia(target, at_least=(9, 0), before=(10, 0))  # wgmma is Hopper's alone
    (tokens, width), columns = arguments["x"].shape, arguments["weight"].shape[1]
    dtype = arguments["x"].dtype
    require(dtype.itemsize == 2, f"takes 16-bit activations, not {dtype}")
    require(width % DEPTH == 0 and width > 0, f"takes widths in multiples of {DEPTH}, not {width}")
    aligned = columns % COLUMN_ALIGNMENT == 0 and columns > 0
    require(aligned, f"takes columns in multiples of {COLUMN_ALIGNMENT}, not {columns}")
    require(tokens > 0, "takes at least one token")
    largest = max(tokens * width, tokens * columns, width * columns)
    require(largest < 2**31, f"an array of {largest} numbers is past int32")


def linear(x, weight, *, tiling: Tiling | None = None, interpret=False) -> jax.Array:
    """See :func:`pallas_kernels.linear`."""
    if tiling is None:
        default = default_tiling(x.shape[0], weight.shape[1])
        tiling = tuned.settings(default, "linear", "mosaic_sm90", tuning_key({"x": x, "weight": weight}))
    if tiling.shared_bytes(x.dtype.itemsize) > SHARED_BYTES:
        raise ValueError(f"no tiling of this kernel: {SHARED_BYTES} bytes of shared memory do not hold {tiling}")
    # without a scope, profiles take it for a product by its name
    return multiply(x, weight, tiling.frame, _finish, name="linear_gemm", interpret=interpret)


def _finish(products, total) -> list:
    """Nothing but rounding is left to do."""
    del products
    return [total]
