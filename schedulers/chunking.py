"""Cuts the prompts at the front of the prefill queue into the chunks of one step."""

from __future__ import annotations

from collections.abc import Iterable

CHUNK_GRID = 64
"""Chunk boundaries inside a request lie on multiples of this, so results do not depend on what else was in the step."""


def take_chunks(left: Iterable[int], budget: int, max_requests: int, grid: int = CHUNK_GRID) -> list[int]:
    """Lengths of the chunks that the front of the queue gives to one step.

    Walks the queue in order and takes ``min(left, budget left)`` of each prompt. A chunk that does not end its prompt
    is cut down to the grid; when nothing remains of it the walk stops, so nobody overtakes.

    Args:
        left: prompt tokens left of each queued request, FIFO order; consumed only as far as needed. Each request's
            earlier chunks ended on the grid.
        budget: prefill tokens allowed in the step.
        max_requests: most requests the step's bucket can carry.
        grid: the grid in tokens.

    Returns:
        One length for each of the first ``n`` requests of the queue; only the last may leave its prompt unfinished.
    """
    lengths: list[int] = []
    if budget < 1 or max_requests < 1:
        return lengths
    for tokens in left:
        take = min(tokens, budget)
        if take < tokens:
            take -= take % grid
        if take == 0:
            break
        lengths.append(take)
        budget -= take
        if take < tokens or budget == 0 or len(lengths) == max_requests:
            break
    return lengths
