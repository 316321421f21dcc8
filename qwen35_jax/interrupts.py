"""Signals between the steps of an engine, never inside one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block is done; a second one acts at once, and the first with it.

    A handler in Python may raise (KeyboardInterrupt, SystemExit) wherever the main thread is. In the middle of an
    engine's call that leaves donated pools without their successors, or a request that the scheduler knows and the
    engine does not. Signals that no Python handler waits for, and blocks outside of the main thread, are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    held: list[tuple[int, FrameType | None]] = []
    at_once = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal at_once
        held.append((number, frame))
        at_once = at_once or len(held) > 1
        if at_once:
            act()

    def act() -> None:
        while held:
            number, frame = held.pop(0)
            handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is hold:  # else a handler has just installed another one
                signal.signal(number, handler)
        act()
