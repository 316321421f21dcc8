"""Workloads of ``gated_rms_norm``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from pallas_kernels.spec import REAL_MODELS, TINY_MODELS, Case, Draw, Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedRmsNormSpec(Spec):
    """A step's prefill tokens.

    Attributes:
        num_tokens: T.
    """

    op: ClassVar[str] = "gated_rms_norm"
    pools: ClassVar[tuple[str, ...]] = ()
    bound: ClassVar[str] = "bytes"
    chained: ClassVar[str] = "x"

    num_tokens: int

    def case(self, seed: int = 0, *, poison: bool = False) -> Case:
        """See :meth:`Spec.case`; what must not be read are the columns beside the gates."""
        draw, model = Draw(seed), self.model
        heads, width = model.num_v_heads, model.conv_dim + model.value_dim + 2 * model.num_v_heads
        projected = draw.normal((self.num_tokens, width), self.dtype)
        if poison:
            columns = np.arange(width)
            gates = (columns >= model.conv_dim) & (columns < model.conv_dim + model.value_dim)
            projected = np.where(gates, projected, np.asarray(np.nan, projected.dtype))
        arguments = {
            "x": draw.normal((self.num_tokens, heads, model.head_v_dim), self.dtype),
            "projected": projected,
            "weight": 1.0 + draw.normal((model.head_v_dim,), "float32", 0.1),
        }
        return Case(arguments, {"first": model.conv_dim, "eps": 1e-6})

    def compulsory_bytes(self) -> int:
        """Values, gates and results; the weight once."""
        return 3 * self.itemsize * self.num_tokens * self.model.value_dim + 4 * self.model.head_v_dim

    def flops(self) -> int:
        """No matrix products."""
        return 0


REAL_SPECS = tuple(
    GatedRmsNormSpec(name=f"{model.name}-rows{rows}", model=model, num_tokens=rows)
    for model in REAL_MODELS.values()
    for rows in (64, 1024, 8192)
)
TINY_SPECS = tuple(
    GatedRmsNormSpec(name=f"{model.name}-rows37", model=model, num_tokens=37) for model in TINY_MODELS.values()
)
