"""Workloads of ``paged_prefill_attention``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from pallas_kernels.spec import (
    PAGE_SIZE,
    RAGGED_8192,
    REAL_MODELS,
    TINY_MODELS,
    Case,
    Draw,
    Spec,
    nan_where,
    packed_offsets,
    page_table,
    unwritten,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedPrefillAttentionSpec(Spec):
    """A pack of prompt pieces over their prefixes.

    Attributes:
        lengths: new tokens of each request (0: absent).
        prefixes: tokens already in the pages; None means none.
        num_pads: pad tokens after the pack.
        width: page-table width; None takes the longest request's.
        num_pages: pages of the pool, the null page included; None takes what is needed and three more.
    """

    op: ClassVar[str] = "paged_prefill_attention"
    pools: ClassVar[tuple[str, ...]] = ()
    bound: ClassVar[str] = "flops"

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...] | None = None
    num_pads: int = 0
    width: int | None = None
    num_pages: int | None = None

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Length of each request with its new tokens."""
        prefixes = self.prefixes or (0,) * len(self.lengths)
        return tuple(prefix + length for prefix, length in zip(prefixes, self.lengths, strict=True))

    def case(self, seed: int = 0, *, poison: bool = False) -> Case:
        """See :meth:`Spec.case`."""
        draw, model = Draw(seed), self.model
        width = self.width or max(1, -(-max(self.kv_lens) // PAGE_SIZE))
        num_pages = self.num_pages or 4 + sum(-(-length // PAGE_SIZE) for length in self.kv_lens)
        table = page_table(draw, self.kv_lens, width, num_pages, stray=poison)
        tokens = sum(self.lengths) + self.num_pads
        q = draw.normal((tokens, model.num_heads, model.head_dim), self.dtype)
        gates = draw.normal((tokens, model.projected_heads, model.head_dim), self.dtype)
        pool_shape = (self.num_layers, num_pages, 2, model.num_kv_heads, PAGE_SIZE, model.head_dim)
        pool = draw.normal(pool_shape, self.dtype)
        if poison:
            pads = np.arange(tokens) >= sum(self.lengths)
            others = np.arange(model.projected_heads) // model.num_heads != 1
            q, gates = nan_where(pads, q), nan_where(pads[:, None] | others, gates)
            pool = nan_where(unwritten(table, self.kv_lens, self.num_layers, num_pages), pool)
        arguments = {
            "q": q,
            "gates": gates,
            "kv_pool": pool,
            "layer": np.int32(self.num_layers - 1),
            "page_table": table,
            "cu_seqlens": packed_offsets(self.lengths),
            "kv_lens": np.array(self.kv_lens, np.int32),
        }
        return Case(arguments, {"first_gate": model.num_heads})

    def compulsory_bytes(self) -> int:
        """Queries, gates and outputs of the new tokens, each request's keys and values once."""
        model = self.model
        token = 3 * model.num_heads * model.head_dim
        return self.itemsize * (sum(self.lengths) * token + sum(self.kv_lens) * 2 * model.num_kv_heads * model.head_dim)

    def flops(self) -> int:
        """Two products of H for each (query, visible key) pair and head."""
        pairs = sum(n * total - n * (n - 1) // 2 for n, total in zip(self.lengths, self.kv_lens, strict=True))
        return 4 * pairs * self.model.num_heads * self.model.head_dim


REAL_SPECS = tuple(
    PagedPrefillAttentionSpec(name=f"{model.name}-{name}", model=model, lengths=lengths, prefixes=prefixes)
    for model in REAL_MODELS.values()
    for name, lengths, prefixes in (
        ("8x1024", (1024,) * 8, None),
        ("2x4096", (4096,) * 2, None),
        ("1x16384", (16384,), None),
        ("ragged8192", RAGGED_8192, None),
        ("2048on30k", (2048,), (30720,)),
        ("2048on120k", (2048,), (122880,)),
    )
)
TINY_SPECS = tuple(
    PagedPrefillAttentionSpec(
        name=f"{model.name}-ragged",
        model=model,
        lengths=(5, 0, 66, 1),
        prefixes=(70, 0, 0, 300),
        num_pads=3,
        num_layers=2,
    )
    for model in TINY_MODELS.values()
)
