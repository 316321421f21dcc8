"""Workloads of ``kv_write``."""

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
    page_table,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvWriteSpec(Spec):
    """Tokens of several requests.

    Attributes:
        lengths: tokens of each request.
        starts: position of each request's first token; None starts at 0. Decode rows are requests of one token.
        num_pads: pad tokens after the pack.
        num_pages: pages of the pool, the null page included; None takes what is needed and three more.
        queries: whether there are queries, or keys and values alone.
    """

    op: ClassVar[str] = "kv_write"
    pools: ClassVar[tuple[str, ...]] = ("kv_pool",)
    bound: ClassVar[str] = "bytes"

    lengths: tuple[int, ...]
    starts: tuple[int, ...] | None = None
    num_pads: int = 0
    num_pages: int | None = None
    queries: bool = True

    @property
    def num_heads(self) -> int:
        """N."""
        return self.model.num_heads if self.queries else 0

    def case(self, seed: int = 0, *, poison: bool = False) -> Case:
        """See :meth:`Spec.case`."""
        draw, model = Draw(seed), self.model
        starts = self.starts or (0,) * len(self.lengths)
        totals = tuple(start + length for start, length in zip(starts, self.lengths, strict=True))
        num_pages = self.num_pages or 4 + sum(-(-total // PAGE_SIZE) for total in totals)
        width = max(1, -(-max(totals) // PAGE_SIZE))
        table = page_table(draw, totals, width, num_pages, stray=False)
        tokens = sum(self.lengths) + self.num_pads
        page_ids, page_offsets, positions = (np.zeros(tokens, np.int32) for _ in range(3))
        first = 0
        for row, (start, length) in enumerate(zip(starts, self.lengths, strict=True)):
            places = np.arange(start, start + length)
            rows = slice(first, first + length)
            positions[rows], page_offsets[rows] = places, places % PAGE_SIZE
            page_ids[rows] = table[row, places // PAGE_SIZE]
            first += length
        num_heads = 2 * self.num_heads + 2 * model.num_kv_heads
        heads = draw.normal((tokens, num_heads, model.head_dim), self.dtype)
        pool_shape = (self.num_layers, num_pages, 2, model.num_kv_heads, PAGE_SIZE, model.head_dim)
        pool = draw.normal(pool_shape, self.dtype)
        if poison:
            pads = np.arange(tokens) >= sum(self.lengths)
            gates = (np.arange(num_heads) >= self.num_heads) & (np.arange(num_heads) < 2 * self.num_heads)
            heads = nan_where(pads[:, None] | gates, heads)
            pool = nan_where(np.ones((self.num_layers, num_pages), bool), pool)
        arguments = {
            "heads": heads,
            "q_norm": draw.normal((model.head_dim,), "float32", 0.1),
            "k_norm": draw.normal((model.head_dim,), "float32", 0.1),
            "kv_pool": pool,
            "layer": np.int32(self.num_layers - 1),
            "page_ids": page_ids,
            "page_offsets": page_offsets,
            "positions": positions,
        }
        options = {"num_heads": self.num_heads, "rotary_dim": model.rotary_dim, "rope_theta": 1e7, "eps": 1e-6}
        return Case(arguments, options)

    def compulsory_bytes(self) -> int:
        """q, k and v in and out, where to write, the norm weights."""
        model = self.model
        token = 2 * self.itemsize * model.head_dim * (self.num_heads + 2 * model.num_kv_heads) + 12
        return sum(self.lengths) * token + 8 * model.head_dim

    def flops(self) -> int:
        """No matrix product."""
        return 0


REAL_SPECS = tuple(
    KvWriteSpec(name=f"{model.name}-{name}", model=model, lengths=lengths, starts=starts, queries=queries)
    for model in REAL_MODELS.values()
    for name, lengths, starts, queries in (
        ("8x1024", (1024,) * 8, None, True),
        ("8x1024@keys", (1024,) * 8, None, False),
        ("ragged8192", RAGGED_8192, None, True),
        ("rows64", (1,) * 64, (1023,) * 64, True),
        ("rows256", (1,) * 256, (1023,) * 256, True),
    )
)
TINY_SPECS = tuple(
    KvWriteSpec(
        name=f"{model.name}-{name}",
        model=model,
        lengths=(5, 0, 66, 1),
        starts=(70, 0, 0, 300),
        num_pads=3,
        num_layers=2,
        queries=queries,
    )
    for model in TINY_MODELS.values()
    for name, queries in (("ragged", True), ("ragged@keys", False))
)
