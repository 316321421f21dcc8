"""What a step computes: packed prefill tokens, decode rows, or both in one batch of tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen35_jax.shapes import CuSeqlens, HasState, KVLens, PageIds, PageOffsets, PageTable, Positions, SlotIds, TokenIds


class PrefillInputs(NamedTuple):
    """Prompt tokens of up to R requests, end to end on one axis of T tokens.

    Request r owns tokens ``cu_seqlens[r] : cu_seqlens[r + 1]``; an absent request has no tokens; tokens from
    ``cu_seqlens[R]`` on are padding.

    Attributes:
        tokens: token ids ``int32 [T]``.
        positions: positions in their sequences ``int32 [T]``.
        page_ids: page that receives the token's key and value ``int32 [T]``; 0 for padding.
        page_offsets: offset in that page ``int32 [T]``.
        cu_seqlens: cumulative lengths ``int32 [R + 1]``, non-decreasing, the first is 0.
        slot_ids: state slot of a request ``int32 [R]``; 0 for an absent one.
        has_state: ``bool [R]``; False for the first chunk of a sequence: what the slot holds is then ignored.
        page_table: pages of a request in order ``int32 [R, W]``.
        kv_lens: tokens of a request in the pages, those of this step included ``int32 [R]``.
    """

    tokens: TokenIds
    positions: Positions
    page_ids: PageIds
    page_offsets: PageOffsets
    cu_seqlens: CuSeqlens
    slot_ids: SlotIds
    has_state: HasState
    page_table: PageTable
    kv_lens: KVLens


class DecodeInputs(NamedTuple):
    """One token of each of B running sequences; rows with slot 0 are padding.

    Attributes:
        tokens: token ids ``int32 [B]``.
        positions: their positions ``int32 [B]``.
        page_ids: page that receives the token's key and value ``int32 [B]``; 0 for padding.
        page_offsets: offset in that page ``int32 [B]``.
        slot_ids: state slots ``int32 [B]``.
        page_table: pages of a row in order ``int32 [B, W]``.
        kv_lens: tokens of a row in the pages, this one included ``int32 [B]``; 0 for padding.
    """

    tokens: TokenIds
    positions: Positions
    page_ids: PageIds
    page_offsets: PageOffsets
    slot_ids: SlotIds
    page_table: PageTable
    kv_lens: KVLens


def _last_of(x: jax.Array, prefill: PrefillInputs) -> jax.Array:
    """Each request's last of ``x [T, ...]``: ``[R, ...]``; another's for an absent request."""
    return jnp.take(x, prefill.cu_seqlens[1:] - 1, axis=0, mode="clip")


def _widened(page_table: PageTable, width: int) -> PageTable:
    """The table with the null page where no row has one."""
    return jnp.pad(page_table, ((0, 0), (0, width - page_table.shape[1])))


class Batch(NamedTuple):
    """All tokens of a step, prefill first, with the two parts that the mixers tell apart.

    The first four fields lie on the axis of all M = T + B tokens.
    """

    tokens: TokenIds
    positions: Positions
    page_ids: PageIds
    page_offsets: PageOffsets
    prefill: PrefillInputs | None
    decode: DecodeInputs | None

    @classmethod
    def of(cls, prefill: PrefillInputs | None, decode: DecodeInputs | None) -> Batch:
        """Joins the parts of a step.

        Raises:
            ValueError: both parts are None.
        """
        parts = [part for part in (prefill, decode) if part is not None]
        if not parts:
            raise ValueError("a step needs prefill inputs, decode inputs or both: both are None")
        return cls(
            tokens=jnp.concatenate([part.tokens for part in parts]),
            positions=jnp.concatenate([part.positions for part in parts]),
            page_ids=jnp.concatenate([part.page_ids for part in parts]),
            page_offsets=jnp.concatenate([part.page_offsets for part in parts]),
            prefill=prefill,
            decode=decode,
        )

    @property
    def num_prefill_tokens(self) -> int:
        """T, 0 in a step without prefill."""
        return 0 if self.prefill is None else self.prefill.tokens.shape[0]

    def split(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cuts ``x [M, ...]`` into its prefill part ``[T, ...]`` and its decode part ``[B, ...]``."""
        num_prefill = self.num_prefill_tokens
        return x[:num_prefill], x[num_prefill:]

    def last_rows(self, x: jax.Array) -> jax.Array:
        """Of ``x [M, ...]`` what the head needs: each request's last token, then the decode rows: ``[R + B, ...]``.

        The row of an absent request is another's.
        """
        if self.prefill is None:
            return x
        of_prefill, of_decode = self.split(x)
        last = _last_of(of_prefill, self.prefill)
        return last if self.decode is None else jnp.concatenate([last, of_decode])

    def as_rows(self) -> DecodeInputs:
        """What :meth:`last_rows` keeps, as rows of a decode step: one token each, all before it in the pages.

        Absent requests are padding.
        """
        rows = []
        if self.prefill is not None:
            prefill, present = self.prefill, jnp.diff(self.prefill.cu_seqlens) > 0
            rows.append(
                DecodeInputs(
                    tokens=_last_of(prefill.tokens, prefill),
                    positions=_last_of(prefill.positions, prefill),
                    page_ids=jnp.where(present, _last_of(prefill.page_ids, prefill), 0),
                    page_offsets=_last_of(prefill.page_offsets, prefill),
                    slot_ids=jnp.where(present, prefill.slot_ids, 0),
                    page_table=prefill.page_table,
                    kv_lens=jnp.where(present, prefill.kv_lens, 0),
                )
            )
        if self.decode is not None:
            rows.append(self.decode)
        width = max(part.page_table.shape[1] for part in rows)
        rows = [part._replace(page_table=_widened(part.page_table, width)) for part in rows]
        return rows[0] if len(rows) == 1 else jax.tree.map(lambda *fields: jnp.concatenate(fields), *rows)

    def join(self, parts: list[jax.Array]) -> jax.Array:
        """Puts the parts that a step has end to end again, prefill first: ``[M, ...]``."""
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
