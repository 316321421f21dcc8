"""Workloads of ``linear``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pallas_kernels.spec import REAL_MODELS, TINY_MODELS, Case, Draw, Spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSpec(Spec):
    """A step's tokens, and a product that gives them the model's width again.

    Attributes:
        num_tokens: M.
        product: "down" of the MLP or "out_proj" of a GDN mixer.
    """

    op: ClassVar[str] = "linear"
    pools: ClassVar[tuple[str, ...]] = ()
    bound: ClassVar[str] = "flops"
    chained: ClassVar[str | None] = None  # the result has the shape of no argument

    num_tokens: int
    product: str = "down"

    @property
    def inner(self) -> int:
        """K."""
        return {"down": self.model.intermediate_size, "out_proj": self.model.value_dim}[self.product]

    def case(self, seed: int = 0, *, poison: bool = False) -> Case:
        """See :meth:`Spec.case`; nothing here must not be read."""
        del poison
        draw = Draw(seed)
        arguments = {
            "x": draw.normal((self.num_tokens, self.inner), self.dtype),
            "weight": draw.normal((self.inner, self.model.hidden_size), self.dtype, self.inner**-0.5),
        }
        return Case(arguments, {})

    def compulsory_bytes(self) -> int:
        """Tokens and weight in, results out."""
        width, inner = self.model.hidden_size, self.inner
        return self.itemsize * (self.num_tokens * (width + inner) + width * inner)

    def flops(self) -> int:
        """One product."""
        return 2 * self.num_tokens * self.inner * self.model.hidden_size


def _specs(models, products, rows) -> tuple[LinearSpec, ...]:
    return tuple(
        LinearSpec(name=f"{model.name}-{product}-rows{count}", model=model, num_tokens=count, product=product)
        for model in models
        for product in products
        for count in rows
    )


REAL_SPECS = _specs(REAL_MODELS.values(), ("down", "out_proj"), (512, 1024, 2048))
TINY_SPECS = tuple(
    LinearSpec(name=f"{model.name}-rows{count}", model=model, num_tokens=count)
    for model in TINY_MODELS.values()
    for count in (5, 200)
)
