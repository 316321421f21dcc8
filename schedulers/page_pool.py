"""Free lists of KV pages; page 0 is the null page and is never given out."""

from __future__ import annotations

from collections.abc import Iterable


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens: ceil(tokens / page_size)."""
    return -(-tokens // page_size)


class PagePool:
    """Hands out page ids 1 .. num_pages - 1.

    The order of ids is arbitrary for callers but deterministic: the most recently freed page is reused first.
    """

    def __init__(self, num_pages: int):
        """Args: num_pages: size P of the pool's page axis, the null page included."""
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is the null page), got {num_pages}")
        self._free = list(range(num_pages - 1, 0, -1))
        self._taken = bytearray(num_pages)

    @property
    def total(self) -> int:
        """Pages that requests can own; the null page is not one."""
        return len(self._taken) - 1

    @property
    def free(self) -> int:
        """Pages not owned by anyone."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages owned by requests."""
        return self.total - self.free

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take ``count`` pages.

        Raises:
            RuntimeError: fewer are free (callers check :attr:`free` first).
        """
        if count > len(self._free):
            raise RuntimeError(f"page pool: {count} pages asked, {len(self._free)} free of {self.total}")
        keep = len(self._free) - count
        pages = tuple(reversed(self._free[keep:]))
        del self._free[keep:]
        for page in pages:
            self._taken[page] = 1
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give pages back.

        Raises:
            RuntimeError: a page is not owned (freed twice, null, or out of range): an accounting fault.
        """
        for page in pages:
            if not 0 < page < len(self._taken) or not self._taken[page]:
                raise RuntimeError(f"page pool: page {page} is given back but nobody owns it")
            self._taken[page] = 0
            self._free.append(page)
