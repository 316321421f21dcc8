"""Ctrl-C between the steps of an engine, never inside one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def held_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done; KeyboardInterrupt is then raised. A second Ctrl-C acts at once.

    Python raises KeyboardInterrupt wherever the main thread is. In the middle of an engine's call that leaves donated
    pools without their successors, or a request that the scheduler knows and the engine does not.

    Only Python's own reaction to SIGINT is held back: whoever has installed another handler, or runs outside of the
    main thread, keeps what it has.
    """
    own = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not own:
        yield
        return
    held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            own(number, frame)
        held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
        if held:
            raise KeyboardInterrupt
