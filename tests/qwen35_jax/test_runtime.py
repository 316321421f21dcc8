"""What the backend is told: directories of caches, and whose setting holds after a while without one."""

from __future__ import annotations

import errno
import os
import threading

import jax
import pytest

from qwen35_jax import runtime
from qwen35_jax.errors import UserInputError


@pytest.fixture
def settings(monkeypatch):
    """What :func:`runtime.prepare` changes is put back."""
    names = (
        "jax_traceback_in_locations_limit",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    yield before
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_directory_that_cannot_be_written_still_gives_programs(settings, tmp_path, monkeypatch, caplog):
    """Programs are loaded from it; only JAX's own cache has no place."""

    def read_only(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(os, "makedirs", read_only)
    runtime.prepare(0.9, str(tmp_path))
    assert jax.config.jax_compilation_cache_dir == settings["jax_compilation_cache_dir"]
    assert caplog.messages == [f"{tmp_path}/jax cannot be made (Read-only file system): JAX's own cache stays as it is"]
    with pytest.raises(UserInputError, match="'.*/none' cannot be a directory: Read-only file system"):
        runtime.prepare(0.9, str(tmp_path / "none"))


def test_a_file_is_no_directory_of_programs(settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserInputError, match="'.*/file' cannot be a directory: Not a directory"):
        runtime.prepare(0.9, str(tmp_path / "file"))


def test_numbers_of_64_bits_are_refused():
    with jax.enable_x64(True), pytest.raises(UserInputError, match="JAX_ENABLE_X64"):
        runtime.prepare(0.9, None)


def test_threads_leave_the_cache_as_it_was(settings, tmp_path):
    """Two that compile at once: neither takes what the other has set meanwhile for the setting."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    inside, go_on = threading.Event(), threading.Event()

    def first():
        with runtime.without_compilation_cache():
            inside.set()
            go_on.wait(10)

    def second():
        with runtime.without_compilation_cache():
            one.join(10)

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    assert inside.wait(10)
    two.start()
    two.join(0.2)
    go_on.set()
    one.join(10)
    two.join(10)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
