"""Fixtures of the package's tests."""

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
