"""Free list of recurrent-state slots; slot 0 is the null slot and is never given out."""

from __future__ import annotations


class SlotPool:
    """Hands out slot ids 1 .. num_slots - 1, the most recently freed first."""

    def __init__(self, num_slots: int):
        """Args: num_slots: size S of the pool's slot axis, the null slot included."""
        if num_slots < 2:
            raise ValueError(f"num_slots must be at least 2 (slot 0 is the null slot), got {num_slots}")
        self._free = list(range(num_slots - 1, 0, -1))
        self._taken = bytearray(num_slots)

    @property
    def total(self) -> int:
        """Slots that requests can own; the null slot is not one."""
        return len(self._taken) - 1

    @property
    def free(self) -> int:
        """Slots not owned by anyone."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots owned by requests."""
        return self.total - self.free

    def acquire(self) -> int:
        """Take a slot.

        Raises:
            RuntimeError: none is free (callers check :attr:`free` first).
        """
        if not self._free:
            raise RuntimeError(f"slot pool: none free of {self.total}")
        slot = self._free.pop()
        self._taken[slot] = 1
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back.

        Raises:
            RuntimeError: the slot is not owned (freed twice, null, or out of range): an accounting fault.
        """
        if not 0 < slot < len(self._taken) or not self._taken[slot]:
            raise RuntimeError(f"slot pool: slot {slot} is given back but nobody owns it")
        self._taken[slot] = 0
        self._free.append(slot)
