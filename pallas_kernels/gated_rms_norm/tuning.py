"""What ``pallas_kernels.tune`` may try."""

from __future__ import annotations

from pallas_kernels.gated_rms_norm import mosaic_sm90
from pallas_kernels.tuned import Tunable

TUNABLES = (
    Tunable(
        "gated_rms_norm",
        "mosaic_sm90",
        default=lambda arguments: mosaic_sm90.Tiling(),
        key=mosaic_sm90.tuning_key,
        steps=({"rows": (16, 32, 48, 64)},),
    ),
)
