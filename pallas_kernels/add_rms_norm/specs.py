"""Workloads of ``add_rms_norm``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pallas_kernels.spec import REAL_MODELS, TINY_MODELS, Case, Draw, Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddRmsNormSpec(Spec):
    """A step's tokens.

    Attributes:
        num_tokens: M.
        num_parts: P of a delta in parts; 0 for one that is not.
    """

    op: ClassVar[str] = "add_rms_norm"
    pools: ClassVar[tuple[str, ...]] = ()
    bound: ClassVar[str] = "bytes"
    chained: ClassVar[str] = "x"

    num_tokens: int
    num_parts: int = 0

    def case(self, seed: int = 0, *, poison: bool = False) -> Case:
        """See :meth:`Spec.case`; nothing here must not be read."""
        del poison
        draw, shape = Draw(seed), (self.num_tokens, self.model.hidden_size)
        arguments = {
            "x": draw.normal(shape, self.dtype),
            "delta": draw.normal((self.num_parts, *shape), "float32", 0.1)
            if self.num_parts
            else draw.normal(shape, self.dtype, 0.3),
            "weight": draw.normal(shape[1:], "float32", 0.1),
        }
        return Case(arguments, {"eps": 1e-6})

    def compulsory_bytes(self) -> int:
        """Two rows in, or one and the parts of another, and two out a token; the weight once."""
        delta = 4 * self.num_parts or self.itemsize
        return ((3 * self.itemsize + delta) * self.num_tokens + 4) * self.model.hidden_size

    def flops(self) -> int:
        """No matrix products."""
        return 0


REAL_SPECS = tuple(
    AddRmsNormSpec(name=f"{model.name}-rows{rows}", model=model, num_tokens=rows)
    for model in REAL_MODELS.values()
    for rows in (1, 64, 256, 8192)
) + tuple(
    AddRmsNormSpec(name=f"{model.name}-rows{rows}-in-parts", model=model, num_tokens=rows, num_parts=4)
    for model in REAL_MODELS.values()
    for rows in (16, 64)
)
TINY_SPECS = tuple(
    AddRmsNormSpec(name=f"{model.name}-rows5", model=model, num_tokens=5) for model in TINY_MODELS.values()
)
