"""Workloads of ``gdn_decode``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from pallas_kernels.gdn_prefill.specs import DECAYS
from pallas_kernels.spec import REAL_MODELS, TINY_MODELS, Case, Draw, Spec, nan_where


@dataclasses.dataclass(frozen=True, kw_only=True)
class GdnDecodeSpec(Spec):
    """A batch of decode rows.

    Attributes:
        num_rows: B, padding rows included.
        num_pads: padding rows, spread over the batch.
        num_slots: slots of the pools, the null slot included; None takes the rows and three more.
        state_dtype: dtype of the state pool.
        decay: a key of :data:`pallas_kernels.gdn_prefill.specs.DECAYS`.
    """

    op: ClassVar[str] = "gdn_decode"
    pools: ClassVar[tuple[str, ...]] = ("conv_pool", "state_pool")
    bound: ClassVar[str] = "bytes"

    num_rows: int
    num_pads: int = 0
    num_slots: int | None = None
    state_dtype: str = "float32"
    decay: str = "mixed"

    def case(self, seed: int = 0, *, poison: bool = False) -> Case:
        """See :meth:`Spec.case`."""
        draw, model = Draw(seed), self.model
        rows, heads, channels = self.num_rows, model.num_v_heads, model.conv_dim
        slots = self.num_slots or rows + 4
        slot_ids = draw.distinct(rows, slots - 1)
        pads = np.zeros(rows, bool)
        pads[draw.numpy.permutation(rows)[: self.num_pads]] = True
        slot_ids[pads] = 0
        # qkv, z, b and a, side by side.
        parts = [draw.normal((rows, width), self.dtype) for width in (channels, model.value_dim, heads, heads)]
        joined = np.concatenate if all(isinstance(part, np.ndarray) for part in parts) else jnp.concatenate
        projected = joined(parts, axis=1)
        conv_pool = draw.normal((self.num_layers, slots, 3, channels), self.dtype)
        state_shape = (self.num_layers, slots, heads, model.head_v_dim, model.head_k_dim)
        state_pool = draw.normal(state_shape, self.state_dtype, 0.3)
        if poison:
            unread = np.ones((self.num_layers, slots), bool)
            unread[-1, slot_ids[~pads]] = False
            conv_pool, state_pool = nan_where(unread, conv_pool), nan_where(unread, state_pool)
            projected = nan_where(pads, projected)
        arguments = {
            "projected": projected,
            "conv_weight": draw.normal((4, channels), self.dtype, 0.5),
            "A_log": draw.uniform((heads,), *DECAYS[self.decay]),
            "dt_bias": draw.normal((heads,), "float32", 0.5),
            "norm_weight": 1.0 + draw.normal((model.head_v_dim,), "float32", 0.1),
            "conv_pool": conv_pool,
            "state_pool": state_pool,
            "layer": np.int32(self.num_layers - 1),
            "slot_ids": slot_ids,
        }
        return Case(arguments, {"num_k_heads": model.num_k_heads, "head_k_dim": model.head_k_dim, "eps": 1e-6})

    def compulsory_bytes(self) -> int:
        """A live row: its inputs and output, its tail and its state in and out; the weights once."""
        model = self.model
        state = jnp.dtype(self.state_dtype).itemsize * model.value_dim * model.head_k_dim
        row = self.itemsize * (7 * model.conv_dim + 2 * model.value_dim + 2 * model.num_v_heads) + 2 * state
        weights = self.itemsize * 4 * model.conv_dim + 8 * model.num_v_heads + 4 * model.head_v_dim
        return (self.num_rows - self.num_pads) * row + weights

    def flops(self) -> int:
        """Two reads of a state and one rank-one update a row and value head."""
        return 6 * (self.num_rows - self.num_pads) * self.model.value_dim * self.model.head_k_dim


REAL_SPECS = tuple(
    GdnDecodeSpec(
        name=f"{model.name}-rows{rows}" + ("@bf16state" if state_dtype == "bfloat16" else ""),
        model=model,
        num_rows=rows,
        state_dtype=state_dtype,
    )
    for model in REAL_MODELS.values()
    for rows in (1, 16, 64, 128, 256)
    for state_dtype in ("float32", "bfloat16")
)
TINY_SPECS = tuple(
    GdnDecodeSpec(name=f"{model.name}-rows5", model=model, num_rows=5, num_pads=1, num_layers=2)
    for model in TINY_MODELS.values()
)
