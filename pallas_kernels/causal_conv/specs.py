"""Workloads of ``causal_conv``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from pallas_kernels.spec import RAGGED_8192, REAL_MODELS, TINY_MODELS, Case, Draw, Spec, nan_where, packed_offsets


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalConvSpec(Spec):
    """A pack of pieces.

    Attributes:
        lengths: tokens of each request (0: absent).
        num_pads: pad tokens after the pack.
        has_state: whether each request has a tail; None alternates True, False.
        num_slots: slots of the pool, the null slot included; None takes the requests and three more.
        beside: columns of x beside those of the convolution.
    """

    op: ClassVar[str] = "causal_conv"
    pools: ClassVar[tuple[str, ...]] = ("conv_pool",)
    bound: ClassVar[str] = "bytes"

    lengths: tuple[int, ...]
    num_pads: int = 0
    has_state: tuple[bool, ...] | None = None
    num_slots: int | None = None
    beside: int = 0

    def case(self, seed: int = 0, *, poison: bool = False) -> Case:
        """See :meth:`Spec.case`."""
        draw = Draw(seed)
        requests, channels = len(self.lengths), self.model.conv_dim
        slots = self.num_slots or requests + 4
        tokens = sum(self.lengths) + self.num_pads
        has_state = np.array(self.has_state or [r % 2 == 0 for r in range(requests)], bool)
        slot_ids = draw.distinct(requests, slots - 1)
        x = draw.normal((tokens, channels + self.beside), self.dtype)
        weight = draw.normal((4, channels), self.dtype, 0.5)
        pool = draw.normal((self.num_layers, slots, 3, channels), self.dtype)
        if poison:
            unread = np.ones((self.num_layers, slots), bool)
            unread[-1, slot_ids[has_state]] = False
            pool = nan_where(unread, pool)
            x = nan_where(np.arange(tokens) >= sum(self.lengths), x)
            if self.beside:
                x[:, channels:] = np.nan
        arguments = {
            "x": x,
            "weight": weight,
            "conv_pool": pool,
            "layer": np.int32(self.num_layers - 1),
            "slot_ids": slot_ids,
            "has_state": has_state,
            "cu_seqlens": packed_offsets(self.lengths),
        }
        return Case(arguments, {})

    def compulsory_bytes(self) -> int:
        """Tokens in and out, weight, a tail in (with a state) and out a request."""
        requests = len(self.lengths)
        tails = requests + sum(self.has_state or [r % 2 == 0 for r in range(requests)])
        return self.itemsize * self.model.conv_dim * (2 * sum(self.lengths) + 4 + 3 * tails)

    def flops(self) -> int:
        """Four taps a value."""
        return 8 * sum(self.lengths) * self.model.conv_dim


def _specs(models, packs, **fields) -> tuple[CausalConvSpec, ...]:
    return tuple(
        CausalConvSpec(name=f"{model.name}-{name}", model=model, lengths=lengths, **fields)
        for model in models
        for name, lengths in packs.items()
    )


REAL_SPECS = _specs(REAL_MODELS.values(), {"8x1024": (1024,) * 8, "1x8192": (8192,), "ragged8192": RAGGED_8192})
TINY_SPECS = _specs(TINY_MODELS.values(), {"ragged": (5, 0, 66, 1)}, num_pads=3, num_layers=2)
