"""Free list of recurrent-state slots; slot 0 is the null slot and is never given out."""

from __future__ import annotations

from schedulers.free_list import FreeList


class SlotPool(FreeList):
    """Hands out slot ids 1 .. num_slots - 1, the most recently freed first."""

    kind = "slot"

    def acquire(self) -> int:
        """Take a slot.

        Raises:
            RuntimeError: none is free (callers check :attr:`free` first).
        """
        if not self.free:
            raise RuntimeError(f"slot pool: none free of {self.total}")
        return self._take()

    def release(self, slot: int) -> None:
        """Give a slot back.

        Raises:
            RuntimeError: the slot is not owned (freed twice, null, or out of range): an accounting fault.
        """
        self._give_back(slot)
