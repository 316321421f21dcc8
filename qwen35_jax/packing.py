"""From a plan to the host fields of a program: numpy only, no device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from qwen35_jax import sampling
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.steps import Variant
from schedulers import Bucket, Chunk, DecodeRow


class LiveRequest:
    """The engine's record of a request that has not ended.

    Attributes:
        request_id: the request.
        prompt: ``int32[prompt_len]``.
        params: its options.
        sampler_row: ``int32[ROW_WORDS]``, its options as the device reads them.
        max_tokens: most tokens to generate.
        stop_token_ids: the request's own stop ids.
        needs_full: whether it needs the full sampler.
        generated: tokens committed so far.
        finished: whether it has ended.
        on_device: whether anything of it lies in the main device's pools.
    """

    __slots__ = (
        "finished",
        "generated",
        "max_tokens",
        "needs_full",
        "on_device",
        "params",
        "prompt",
        "request_id",
        "sampler_row",
        "stop_token_ids",
    )

    def __init__(
        self, request_id: str, prompt: np.ndarray, params: SamplingParams, sampler_row: np.ndarray, max_tokens: int
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.sampler_row = sampler_row
        self.max_tokens = max_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.needs_full = sampling.needs_full(params)
        self.generated = 0
        self.finished = False
        self.on_device = False


def variant_of(requests: Iterable[LiveRequest]) -> Variant:
    """The sampler variant that serves all of them."""
    return "full" if any(live.needs_full for live in requests) else "greedy"


def prefill_values(
    chunks: Sequence[Chunk], requests: Sequence[LiveRequest], bucket: Bucket, *, staging: bool = False
) -> dict[str, np.ndarray]:
    """Host fields of the prefill half.

    Args:
        chunks: prompt parts in packing order.
        requests: their requests.
        bucket: the program's shape.
        staging: take the slots and pages of the staging pool instead of the main one's.
    """
    tokens = np.zeros(bucket.tokens, np.int32)
    cu_seqlens = np.zeros(bucket.requests + 1, np.int32)
    slots = np.zeros(bucket.requests, np.int32)
    starts = np.zeros(bucket.requests, np.int32)
    sample = np.zeros(bucket.requests, np.int32)
    rows = np.zeros((bucket.requests, sampling.ROW_WORDS), np.int32)
    pages = np.zeros((bucket.requests, bucket.width), np.int32)
    end = 0
    for i, (chunk, live) in enumerate(zip(chunks, requests, strict=True)):
        tokens[end : end + chunk.length] = live.prompt[chunk.start : chunk.start + chunk.length]
        end += chunk.length
        cu_seqlens[i + 1] = end
        slots[i] = chunk.staging_slot if staging else chunk.slot
        starts[i] = chunk.start
        sample[i] = chunk.last
        rows[i] = live.sampler_row
        own = (chunk.staging_pages if staging else chunk.pages)[: bucket.width]
        pages[i, : len(own)] = own
    cu_seqlens[len(chunks) + 1 :] = end
    return {
        "tokens": tokens,
        "cu_seqlens": cu_seqlens,
        "prefill_slots": slots,
        "starts": starts,
        "sample": sample,
        "sampler_rows": rows,
        "prefill_pages": pages,
    }


def decode_values(rows: Sequence[DecodeRow], bucket: Bucket) -> dict[str, np.ndarray]:
    """Host fields of the decode half."""
    slots = np.zeros(bucket.rows, np.int32)
    positions = np.zeros(bucket.rows, np.int32)
    steps = np.zeros(bucket.rows, np.int32)
    pages = np.zeros((bucket.rows, bucket.width), np.int32)
    for i, row in enumerate(rows):
        slots[i], positions[i], steps[i] = row.slot, row.position, row.steps
        own = row.pages[: bucket.width]
        pages[i, : len(own)] = own
    return {"decode_slots": slots, "positions": positions, "steps": steps, "decode_pages": pages}
