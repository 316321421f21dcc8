"""Workloads of ``swiglu_product``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pallas_kernels.spec import REAL_MODELS, TINY_MODELS, Case, Draw, Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwigluProductSpec(Spec):
    """A step's tokens.

    Attributes:
        num_tokens: M.
    """

    op: ClassVar[str] = "swiglu_product"
    pools: ClassVar[tuple[str, ...]] = ()
    bound: ClassVar[str] = "flops"
    chained: ClassVar[str | None] = None  # the result has the shape of no argument

    num_tokens: int

    def case(self, seed: int = 0, *, poison: bool = False) -> Case:
        """See :meth:`Spec.case`; nothing here must not be read. Gates are some 1.5 large, so that the SiLU bends."""
        del poison
        draw, width = Draw(seed), self.model.hidden_size
        arguments = {
            "x": draw.normal((self.num_tokens, width), self.dtype),
            "weight": draw.normal((width, 2 * self.model.intermediate_size), self.dtype, 1.5 * width**-0.5),
        }
        return Case(arguments, {})

    def compulsory_bytes(self) -> int:
        """Tokens and weight in, results out."""
        width, hidden = self.model.hidden_size, self.model.intermediate_size
        return self.itemsize * (self.num_tokens * (width + hidden) + 2 * width * hidden)

    def flops(self) -> int:
        """Two products."""
        return 4 * self.num_tokens * self.model.hidden_size * self.model.intermediate_size


def _specs(models, rows) -> tuple[SwigluProductSpec, ...]:
    return tuple(
        SwigluProductSpec(name=f"{model.name}-rows{count}", model=model, num_tokens=count)
        for model in models
        for count in rows
    )


REAL_SPECS = _specs(REAL_MODELS.values(), (1024, 2048, 4096, 8192))
TINY_SPECS = _specs(TINY_MODELS.values(), (5, 200))
