"""Free lists of KV pages; page 0 is the null page and is never given out."""

from __future__ import annotations

from collections.abc import Iterable

from schedulers.free_list import FreeList


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens: ceil(tokens / page_size)."""
    return -(-tokens // page_size)


class PagePool(FreeList):
    """Hands out page ids 1 .. num_pages - 1.

    The order of ids is arbitrary for callers but deterministic: the most recently freed page is reused first.
    """

    kind = "page"

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take ``count`` pages.

        Raises:
            RuntimeError: fewer are free (callers check :attr:`free` first).
        """
        if count > self.free:
            raise RuntimeError(f"page pool: {count} pages asked, {self.free} free of {self.total}")
        return tuple(self._take() for _ in range(count))

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back.

        Raises:
            RuntimeError: a page is not owned (freed twice, null, or out of range): an accounting fault.
        """
        for page in pages:
            self._give_back(page)
