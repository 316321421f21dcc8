"""What ``pallas_kernels.tune`` may try."""

from __future__ import annotations

from pallas_kernels.paged_decode_attention import triton
from pallas_kernels.tuned import Tunable

TUNABLES = (
    Tunable(
        "paged_decode_attention",
        "triton",
        default=lambda arguments: triton.default_tiling(arguments["q"].dtype),
        key=triton.tuning_key,
        steps=(
            {"keys": (32, 64), "warps": (2, 4, 8), "stages": (2, 3)},
            {"programs": (128, 256, 384, 528, 792, 1056)},
        ),
    ),
)
