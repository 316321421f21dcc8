"""Fixtures of the package's tests."""

import signal
from collections.abc import Iterator

import pytest

from qwen35_jax.engine import Engine
from tests.engine_kit import kit


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A fresh engine of the kit without overlap; a test may close it."""
    engine = kit("off").engine()
    yield engine
    if hasattr(engine, "_programs"):
        engine.close()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own reaction to SIGINT: a process that a shell has put into the background begins with none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
