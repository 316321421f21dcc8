"""Workloads of ``gdn_prefill``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from pallas_kernels.spec import RAGGED_8192, REAL_MODELS, TINY_MODELS, Case, Draw, Spec, nan_where, packed_offsets

DECAYS = {"mixed": (-4.0, 0.5), "strong": (4.0, 8.0), "none": (-60.0, -50.0)}
"""Range of A_log: log decays in about (-3, 0), far below -100, and 0 to the last bit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GdnPrefillSpec(Spec):
    """A pack of prompt pieces.

    Attributes:
        lengths: tokens of each request (0: absent).
        num_pads: pad tokens after the pack.
        has_state: whether each request has a state; None alternates True, False.
        num_slots: slots of the pool, the null slot included; None takes the requests and three more.
        state_dtype: dtype of the state pool.
        decay: a key of :data:`DECAYS`.
    """

    op: ClassVar[str] = "gdn_prefill"
    pools: ClassVar[tuple[str, ...]] = ("state_pool",)
    bound: ClassVar[str] = "flops"

    lengths: tuple[int, ...]
    num_pads: int = 0
    has_state: tuple[bool, ...] | None = None
    num_slots: int | None = None
    state_dtype: str = "float32"
    decay: str = "mixed"

    def case(self, seed: int = 0, *, poison: bool = False) -> Case:
        """See :meth:`Spec.case`."""
        draw, model = Draw(seed), self.model
        requests, heads = len(self.lengths), model.num_v_heads
        slots = self.num_slots or requests + 4
        tokens = sum(self.lengths) + self.num_pads
        has_state = np.array(self.has_state or [r % 2 == 0 for r in range(requests)], bool)
        slot_ids = draw.distinct(requests, slots - 1)
        qkv = draw.normal((tokens, model.conv_dim), self.dtype)
        b = draw.normal((tokens, heads), self.dtype)
        a = draw.normal((tokens, heads), self.dtype)
        pool_shape = (self.num_layers, slots, heads, model.head_v_dim, model.head_k_dim)
        pool = draw.normal(pool_shape, self.state_dtype, 0.3)
        if poison:
            unread = np.ones((self.num_layers, slots), bool)
            unread[-1, slot_ids[has_state]] = False
            pool = nan_where(unread, pool)
            pads = np.arange(tokens) >= sum(self.lengths)
            qkv, b, a = (nan_where(pads, array) for array in (qkv, b, a))
        arguments = {
            "qkv": qkv,
            "b": b,
            "a": a,
            "A_log": draw.uniform((heads,), *DECAYS[self.decay]),
            "dt_bias": draw.normal((heads,), "float32", 0.5),
            "state_pool": pool,
            "layer": np.int32(self.num_layers - 1),
            "slot_ids": slot_ids,
            "has_state": has_state,
            "cu_seqlens": packed_offsets(self.lengths),
        }
        return Case(arguments, {"num_k_heads": model.num_k_heads, "head_k_dim": model.head_k_dim})

    def compulsory_bytes(self) -> int:
        """Tokens in and out, gates, a state in (with one) and out a request."""
        model, requests = self.model, len(self.lengths)
        states = requests + sum(self.has_state or [r % 2 == 0 for r in range(requests)])
        state = jnp.dtype(self.state_dtype).itemsize * model.value_dim * model.head_k_dim
        token = self.itemsize * (model.conv_dim + model.value_dim + 2 * model.num_v_heads)
        return token * sum(self.lengths) + states * state + 8 * model.num_v_heads

    def flops(self) -> int:
        """The chunkwise form with chunks of C = 64, nothing saved on triangles.

        A token and key head: two rows of C products of Dk (k k^T and q k^T). A token and value head: three products
        with a state (S k, S q and the update), one row of C with d, and the solve's C / 2.
        """
        model, chunk = self.model, 64
        key_side = 2 * chunk * model.head_k_dim
        value_side = 3 * model.head_k_dim * model.head_v_dim + 3 * chunk * model.head_v_dim // 2
        return 2 * sum(self.lengths) * (model.num_k_heads * key_side + model.num_v_heads * value_side)


def _specs(models, packs, **fields) -> tuple[GdnPrefillSpec, ...]:
    return tuple(
        GdnPrefillSpec(name=f"{model.name}-{name}", model=model, lengths=lengths, **fields)
        for model in models
        for name, lengths in packs.items()
    )


REAL_SPECS = _specs(REAL_MODELS.values(), {"8x1024": (1024,) * 8, "1x8192": (8192,), "ragged8192": RAGGED_8192})
TINY_SPECS = _specs(TINY_MODELS.values(), {"ragged": (5, 0, 66, 1)}, num_pads=3, num_layers=2)
