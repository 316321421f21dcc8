"""Who may enter: checks at submission and first-come-first-served admission with whole-lifetime reservation."""

from __future__ import annotations

from schedulers.page_pool import PagePool, pages_for
from schedulers.request import Request, RequestRejected, SequenceState
from schedulers.slot_pool import SlotPool


def check_request(
    request: Request, *, max_model_len: int, total_pages: int, staging_pages: int | None, page_size: int
) -> None:
    """Reject a request that could never run, before it can block those behind it.

    The context check comes before the page check: a request too long for the model is told so, whatever the pool size.

    Args:
        request: the request.
        max_model_len: longest prompt + output.
        total_pages: pages that requests can own (null page not counted).
        staging_pages: the same of the staging pool, or None when there is none.
        page_size: tokens of a page.

    Raises:
        RequestRejected: with both numbers, the one asked and the one there is.
    """
    if request.prompt_len < 1:
        raise RequestRejected(f"the prompt has {request.prompt_len} tokens, at least 1 is needed")
    if request.max_tokens < 1:
        raise RequestRejected(f"max_tokens is {request.max_tokens}, at least 1 is needed")
    parts = f"prompt of {request.prompt_len} tokens + max_tokens {request.max_tokens}"
    if request.lifetime > max_model_len:
        raise RequestRejected(f"{parts} = {request.lifetime} exceeds the model length of {max_model_len} tokens")
    pages = pages_for(request.lifetime, page_size)
    if pages > total_pages:
        raise RequestRejected(f"{parts} needs {pages} KV pages of {page_size} tokens, the pool has {total_pages}")
    if staging_pages is not None:
        pages = pages_for(request.prompt_len, page_size)
        if pages > staging_pages:
            raise RequestRejected(
                f"prompt of {request.prompt_len} tokens needs {pages} staging pages of {page_size} tokens, "
                f"the staging pool has {staging_pages}"
            )


def admit_in_order(
    waiting: dict[str, SequenceState],
    *,
    running: int,
    max_num_seqs: int,
    pages: PagePool,
    slots: SlotPool,
    page_size: int,
) -> list[SequenceState]:
    """Admit from the front of the queue while the whole lifetime of each request fits; nobody bypasses the front.

    Every admitted request owns all pages it can ever need, so it can always finish.

    Args:
        waiting: requests in arrival order; the admitted ones are removed from it.
        running: requests that hold a slot already, whatever their phase.
        max_num_seqs: most requests that may hold one.
        pages: KV pages.
        slots: state slots.
        page_size: tokens of a page.

    Returns:
        The admitted, in order, with slot and pages set and phase "prefill".
    """
    admitted: list[SequenceState] = []
    for seq in waiting.values():
        needed = pages_for(seq.request.lifetime, page_size)
        if running + len(admitted) >= max_num_seqs or slots.free < 1 or pages.free < needed:
            break
        seq.slot = slots.acquire()
        seq.pages = pages.allocate(needed)
        seq.phase = "prefill"
        admitted.append(seq)
    for seq in admitted:
        del waiting[seq.request.request_id]
    return admitted
