"""Workloads of ``paged_decode_attention``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from pallas_kernels.spec import (
    PAGE_SIZE,
    REAL_MODELS,
    TINY_MODELS,
    Case,
    Draw,
    Spec,
    nan_where,
    page_table,
    unwritten,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedDecodeAttentionSpec(Spec):
    """A batch of decode rows.

    Attributes:
        kv_lens: length of each row with the token just written; 0 is a padding row.
        width: page-table width; None takes the longest row's.
        num_pages: pages of the pool, the null page included; None takes what is needed and three more.
    """

    op: ClassVar[str] = "paged_decode_attention"
    pools: ClassVar[tuple[str, ...]] = ()
    bound: ClassVar[str] = "bytes"

    kv_lens: tuple[int, ...]
    width: int | None = None
    num_pages: int | None = None

    def case(self, seed: int = 0, *, poison: bool = False) -> Case:
        """See :meth:`Spec.case`."""
        draw, model = Draw(seed), self.model
        rows = len(self.kv_lens)
        width = self.width or max(1, -(-max(self.kv_lens) // PAGE_SIZE))
        num_pages = self.num_pages or 4 + sum(-(-length // PAGE_SIZE) for length in self.kv_lens)
        table = page_table(draw, self.kv_lens, width, num_pages, stray=poison)
        q = draw.normal((rows, model.num_heads, model.head_dim), self.dtype)
        gates = draw.normal((rows, model.projected_heads, model.head_dim), self.dtype)
        pool_shape = (self.num_layers, num_pages, 2, model.num_kv_heads, PAGE_SIZE, model.head_dim)
        pool = draw.normal(pool_shape, self.dtype)
        if poison:
            pads = np.array(self.kv_lens) == 0
            others = np.arange(model.projected_heads) // model.num_heads != 1
            q, gates = nan_where(pads, q), nan_where(pads[:, None] | others, gates)
            pool = nan_where(unwritten(table, self.kv_lens, self.num_layers, num_pages), pool)
        arguments = {
            "q": q,
            "gates": gates,
            "kv_pool": pool,
            "layer": np.int32(self.num_layers - 1),
            "page_table": table,
            "kv_lens": np.array(self.kv_lens, np.int32),
        }
        return Case(arguments, {"first_gate": model.num_heads})

    def compulsory_bytes(self) -> int:
        """Query, gate and output of each live row, its keys and values once, its page-table entries."""
        model = self.model
        live = sum(length > 0 for length in self.kv_lens)
        row = 3 * model.num_heads * model.head_dim
        keys_and_values = sum(self.kv_lens) * 2 * model.num_kv_heads * model.head_dim
        return self.itemsize * (live * row + keys_and_values) + 4 * sum(-(-n // PAGE_SIZE) for n in self.kv_lens)

    def flops(self) -> int:
        """Two products of H for each key and query head."""
        return 4 * sum(self.kv_lens) * self.model.num_heads * self.model.head_dim


REAL_SPECS = tuple(
    PagedDecodeAttentionSpec(name=f"{model.name}-{name}", model=model, kv_lens=kv_lens)
    for model in REAL_MODELS.values()
    for name, kv_lens in (
        ("1x1k", (1024,)),
        ("16x1k", (1024,) * 16),
        ("64x1k", (1024,) * 64),
        ("256x1k", (1024,) * 256),
        ("8x32k", (32768,) * 8),
        ("1x128k", (131072,)),
        ("1x128k-of-256", (131072, *(0,) * 255)),  # of the last layer of a prefill: its requests are mostly absent
        ("1x128k-255x1k", (131072, *(1024,) * 255)),
    )
)
TINY_SPECS = tuple(
    PagedDecodeAttentionSpec(name=f"{model.name}-rows5", model=model, kv_lens=(1, 65, 0, 300, 64), num_layers=2)
    for model in TINY_MODELS.values()
)
