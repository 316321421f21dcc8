"""Free lists of numbered resources; id 0 is the null one and is never given out."""

from __future__ import annotations

from typing import ClassVar


class FreeList:
    """Hands out ids 1 .. size - 1, the most recently freed first; what both pools are."""

    kind: ClassVar[str]

    def __init__(self, size: int):
        """Args: size: size of the pool's axis, the null id included."""
        if size < 2:
            raise ValueError(f"num_{self.kind}s must be at least 2 ({self.kind} 0 is the null {self.kind}), got {size}")
        self._free = list(range(size - 1, 0, -1))
        self._taken = bytearray(size)

    @property
    def total(self) -> int:
        """Ids that requests can own; the null one is not among them."""
        return len(self._taken) - 1

    @property
    def free(self) -> int:
        """Ids not owned by anyone."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Ids owned by requests."""
        return self.total - self.free

    def _take(self) -> int:
        """The next free id; the caller has checked that there is one."""
        taken = self._free.pop()
        self._taken[taken] = 1
        return taken

    def _give_back(self, owned: int) -> None:
        if not 0 < owned < len(self._taken) or not self._taken[owned]:
            raise RuntimeError(f"{self.kind} pool: {self.kind} {owned} is given back but nobody owns it")
        self._taken[owned] = 0
        self._free.append(owned)
