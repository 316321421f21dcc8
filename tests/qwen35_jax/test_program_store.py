"""Compiled programs on disk: files that are not what they should be, and starts that load."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import secrets
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from qwen35_jax import code_state, loading, program_store
from qwen35_jax import programs as programs_module
from qwen35_jax.config import ModelConfig
from qwen35_jax.params import ParamPack
from qwen35_jax.program_file import unwrap, wrap
from qwen35_jax.program_store import Program, ProgramStore, Signature
from qwen35_jax.programs import ProgramSet
from qwen35_jax.steps import StepSpec, device_state_shapes
from tests import engine_kit

ROOT = pathlib.Path(__file__).parents[2]
KEY, OTHER_KEY = "ab" * 32, "cd" * 32

# An engine of two devices whose rows are all sampled, so that half of the programs do; prints what it was and gave.
ENGINE = """
import dataclasses, json, logging, sys, jax
from unittest import mock
from qwen35_jax import loading, programs, runtime
from qwen35_jax.engine import Engine
from qwen35_jax.sampling_params import SamplingParams
from schedulers import BucketLadder
from tests import engine_kit

logged = []
class Lines(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger().addHandler(Lines())
logging.getLogger().setLevel("INFO")
calls = {"traced": 0, "lowered": 0}
def counted(owner, name, what):
    function = getattr(owner, name)
    def count(*arguments, **options):
        calls[what] += 1
        return function(*arguments, **options)
    setattr(owner, name, count)
counted(programs.Job, "trace", "traced")
counted(jax.stages.Traced, "lower", "lowered")
compiled = []
def listen(event, seconds, **about):
    if event.startswith("/jax/core/compile"):
        compiled.append(about.get("fun_name"))
runtime.prepare(0.9, sys.argv[1])
jax.monitoring.register_event_duration_secs_listener(listen)
options = dataclasses.replace(
    engine_kit.OPTIONS, decode_overlap="device", max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64,
    compilation_cache_dir=sys.argv[1],
).validate()
ladder = BucketLadder.from_limits(
    max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128, unified=False,
    token_rungs=[64], row_rungs=[2], width_rungs=[2],
)
with mock.patch.object(loading, "VARIANTS", ("full",)):
    engine = loading.build_engine(
        options, engine_kit.MODEL, lambda device, dtype: engine_kit._params(device),
        eos_ids=engine_kit.EOS, num_valid=engine_kit.NUM_VALID, ladder=ladder,
    )
report = engine.start_report
sets = (engine.programs, engine.prefill_device.programs)
before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine._state.cache)]
given = engine._state
params = SamplingParams(temperature=1.0, top_p=0.99, seed=3, max_tokens=6, ignore_eos=True, logprobs=1)
jobs = [engine_kit.Job(f"r{i}", tuple(range(1 + i, 40 + 20 * i)), params) for i in range(3)]
engine_kit.submit_all(engine, jobs)
results = engine_kit.drain(engine)
print(json.dumps({
    "programs": report.num_programs,
    "loaded": report.num_loaded,
    "scratch": report.scratch,
    "after_warm_up": engine.compiles_after_warmup,
    "calls": calls,
    "compiled": sorted(set(compiled) & {"step", "merge", "extract", "fill"}),
    "tokens": {name: result.tokens for name, result in results.items()},
    "in_place": before == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine._state.cache)],
    "consumed": all(x.is_deleted() for x in jax.tree.leaves(given)),
    "memory": {
        f"{s.device.id} {key}": [c.memory_analysis().alias_size_in_bytes, c.memory_analysis().temp_size_in_bytes]
        for s in sets for key, c in s.executables().items()
    },
    "texts": all(c.as_text() for s in sets for c in s.executables().values()),
    "kernels": [line for line in logged if "-> reference" in line],
    "warnings": [line for line in logged if "warning" in line],
}))
"""


# One of several processes that write and read the same program.
WRITER = """
import sys
import jax
from tests.qwen35_jax import test_program_store as here
warnings = []
store = here.ProgramStore(sys.argv[1], warnings.append)
program = here.small_program()
for _ in range(30):
    store.save(here.KEY, here.SIGNATURE, program)
    assert here.load(store) is not None, warnings
assert not warnings, warnings
"""


def start(script, directory, **environment) -> subprocess.Popen:
    """A process that works on a directory."""
    return subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(child: subprocess.Popen) -> str:
    out, err = child.communicate(timeout=200)
    assert child.returncode == 0, err
    return out


@pytest.mark.timeout(300)
def test_a_second_start_compiles_nothing_and_gives_the_same_tokens(tmp_path):
    first = json.loads(ended(start(ENGINE, tmp_path, PYTHONHASHSEED="1")))
    files = list((tmp_path / program_store.SUBDIRECTORY).iterdir())
    assert len(files) == first["programs"] and {path.suffix for path in files} == {".program"}
    again = json.loads(ended(start(ENGINE, tmp_path, PYTHONHASHSEED="2")))
    assert first["compiled"] == ["extract", "fill", "merge", "step"] and first["loaded"] == 0
    assert first["calls"] == {"traced": first["programs"], "lowered": first["programs"]}
    assert again["calls"] == {"traced": 0, "lowered": 0}
    assert again["compiled"] == [] and again["loaded"] == again["programs"] == first["programs"]
    for found in (first, again):
        assert found["after_warm_up"] == 0 and found["in_place"] and found["consumed"] and found["texts"]
        assert found["warnings"] == []
    for name in ("tokens", "memory", "scratch"):
        assert first[name] == again[name], name
    # Only tracing chooses kernels; the log still says which run.
    assert any("gdn_decode: auto -> reference, in programs kept" in line for line in again["kernels"])


def test_processes_share_a_directory(tmp_path):
    for child in [start(WRITER, tmp_path) for _ in range(2)]:
        ended(child)
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.program"]


FOUR = ((4,), "float32")
SIGNATURE = Signature(
    jax.tree.structure(((0, 0), {})), jax.tree.structure({"sum": 0}), ((*FOUR, True), (*FOUR, False)), (FOUR,)
)


def small_program() -> Program:
    def add(x, y):
        return {"sum": x + y}

    add.__name__ = f"add_{secrets.token_hex(8)}"  # JAX's own cache has none of this name
    shape = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[1]))
    compiled = jax.jit(add, donate_argnums=0).lower(shape, shape).compile()
    return Program(compiled, 12, ("op: auto -> reference",))


@pytest.fixture
def store(tmp_path):
    warnings = []
    found = ProgramStore(tmp_path / "programs", warnings.append)
    found.warnings = warnings
    return found


def load(store, key=KEY):
    return store.load(key, SIGNATURE, jax.devices()[1])


def test_a_program_comes_back(store):
    assert load(store) is None and store.warnings == []
    store.save(KEY, SIGNATURE, small_program())
    found = load(store)
    assert (found.scratch, found.kernels) == (12, ("op: auto -> reference",))
    x, y = (jax.device_put(np.full(4, value, np.float32), jax.devices()[1]) for value in (1, 2))
    result = found.compiled(x, y)["sum"]
    np.testing.assert_array_equal(result, np.full(4, 3))
    assert x.is_deleted() and not y.is_deleted() and result.devices() == {jax.devices()[1]}
    assert found.compiled.memory_analysis().alias_size_in_bytes == 16
    assert store.warnings == [] and len(list(store.directory.iterdir())) == 1
    assert oct(store._path(KEY).stat().st_mode & 0o044) != "0o0"  # for whoever else may use the directory


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def altered(data: bytes, payload: bytes | None = None, **facts) -> bytes:
    said, own = unwrap(KEY, data)
    return b"".join(wrap(KEY, said | facts, own if payload is None else payload))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: b"", "it is too short"),
        (lambda data: data[:50], "it is too short"),
        (lambda data: data[:-1], "bytes, not"),
        (lambda data: data + b"x", "bytes, not"),
        (lambda data: b"\x7fELF" + data[4:], "it is no compiled program"),
        (lambda data: data[:8] + b"\x09\0\0\0" + data[12:], "its format is 9, not 2"),
        (lambda data: flipped(data, 20), "it is another program"),
        (lambda data: flipped(data, 60), "it is damaged"),  # the digest itself
        (lambda data: flipped(data, 95), "it is damaged"),  # the facts
        (lambda data: flipped(data, len(data) - 5), "it is damaged"),
        (
            lambda data: b"".join(wrap(OTHER_KEY, *unwrap(KEY, data))),
            "it is another program",
        ),  # renamed
        (lambda data: b"".join(wrap(KEY, {}, unwrap(KEY, data)[1])), "it does not say its scratch"),
        (lambda data: b"".join(wrap(KEY, [], unwrap(KEY, data)[1])), "it does not say its scratch"),
        (lambda data: altered(data, device=["gpu", "NVIDIA H200", 1]), "it is of the device ['gpu', 'NVIDIA H200', 1]"),
    ],
)
def test_a_file_that_is_not_the_program_is_reported_and_removed(store, spoil, reason):
    store.save(KEY, SIGNATURE, small_program())
    path = store._path(KEY)
    path.write_bytes(spoil(path.read_bytes()))
    assert load(store) is None
    (warning,) = store.warnings
    assert str(path) in warning and reason in warning and "; removed; compiled anew" in warning
    assert "\n" not in warning and not path.exists()
    store.save(KEY, SIGNATURE, small_program())
    assert load(store) is not None


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"takes": ((*FOUR, True), (*FOUR, True))}, "takes, consumes or gives"),
        ({"takes": (((4,), "int32", True), (*FOUR, False))}, "takes, consumes or gives"),
        ({"takes": (((5,), "float32", True), (*FOUR, False))}, "takes, consumes or gives"),
        ({"gives": (((5,), "float32"),)}, "takes, consumes or gives"),
        ({"gives": (((4,), "bfloat16"),)}, "takes, consumes or gives"),
    ],
)
def test_a_program_of_another_signature_is_neither_loaded_nor_saved(store, wrong, reason):
    expected = dataclasses.replace(SIGNATURE, **wrong)
    store.save(KEY, SIGNATURE, small_program())
    assert store.load(KEY, expected, jax.devices()[1]) is None
    assert reason in store.warnings.pop() and not store._path(KEY).exists()
    store.save(KEY, expected, small_program())
    assert "takes or gives something else" in store.warnings.pop() and not store._path(KEY).exists()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: altered(data, aliased=17), "it would reuse 16 bytes of its arguments, not 17"),
        (lambda data: altered(data, payload=b"no executable"), "invalid load key"),
    ],
)
def test_a_whole_file_that_cannot_be_loaded_stays_and_is_not_tried_again(store, spoil, reason, monkeypatch):
    store.save(KEY, SIGNATURE, small_program())
    path = store._path(KEY)
    path.write_bytes(spoil(path.read_bytes()))
    assert load(store) is None
    assert reason in store.warnings[0] and "cannot be loaded" in store.warnings[0] and path.exists()
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", lambda *_, **__: pytest.fail("loaded again"))
    assert load(store) is None and len(store.warnings) == 1


@pytest.mark.parametrize("error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")])
def test_no_memory_is_no_fault_of_a_file(store, error, monkeypatch):
    store.save(KEY, SIGNATURE, small_program())

    def deserialize(*_, **__):
        raise error

    monkeypatch.setattr(serialize_executable, "deserialize_and_load", deserialize)
    assert load(store) is None and store._path(KEY).exists()
    (warning,) = store.warnings
    assert "cannot be loaded" in warning and ("RESOURCE_EXHAUSTED" in warning or "MemoryError" in warning)


def test_an_unknown_reuse_of_arguments_is_not_held_against_a_program(store):
    store.save(KEY, SIGNATURE, small_program())
    path = store._path(KEY)
    path.write_bytes(altered(path.read_bytes(), aliased=None))
    assert load(store) is not None and store.warnings == []


def test_a_file_of_another_device_does_not_become_this_ones(store):
    """Its key has the number of its device; should that fail, the file says it as well."""
    store.save(KEY, SIGNATURE, small_program())
    assert store.load(KEY, SIGNATURE, jax.devices()[0]) is None
    assert "it is of the device ['cpu', 'cpu', 1]" in store.warnings[0] or "cannot be loaded" in store.warnings[0]


def test_what_cannot_be_removed_is_not_loaded_again(store, monkeypatch):
    store.save(KEY, SIGNATURE, small_program())
    store._path(KEY).write_bytes(b"")

    def unlink(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "unlink", unlink)
    assert load(store) is None and load(store) is None
    (warning,) = store.warnings
    assert "1 of them cannot be removed" in warning and "Permission denied" in warning and "; removed" not in warning
    store.save(OTHER_KEY, SIGNATURE, small_program())
    store.discard([OTHER_KEY], "a kernel is missing")
    assert store._path(OTHER_KEY).exists() and load(store, OTHER_KEY) is None
    store.save(OTHER_KEY, SIGNATURE, small_program())  # replaced, it is another file
    assert load(store, OTHER_KEY) is not None


def test_nothing_is_written_once_code_has_changed(tmp_path):
    warnings, answers = [], [True, False, True]
    store = ProgramStore(tmp_path / "programs", warnings.append, lambda: answers.pop(0))
    store.save(KEY, SIGNATURE, small_program())
    store.save(OTHER_KEY, SIGNATURE, small_program())
    store.save("ef" * 32, SIGNATURE, small_program())
    assert [path.stem for path in store.directory.iterdir()] == [KEY]
    (warning,) = warnings
    assert "have changed since this process started" in warning
    assert ProgramStore(tmp_path)._unchanged is code_state.unchanged


def test_what_killed_processes_left_is_removed(store):
    store.directory.mkdir()
    old, new, other = (store.directory / name for name in ("a.1.tmp", "b.2.tmp", "notes.txt"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    store.save(KEY, SIGNATURE, small_program())
    assert not old.exists() and new.exists() and other.exists()


def test_no_memory_to_save_with_is_one_warning(store, monkeypatch):
    def wrap(*_):
        raise MemoryError

    monkeypatch.setattr(program_store, "wrap", wrap)
    store.save(KEY, SIGNATURE, small_program())
    (warning,) = store.warnings
    assert "cannot be written (MemoryError)" in warning and list(store.directory.iterdir()) == []


def test_stored_programs_are_counted(store):
    assert program_store.stored_programs(store.directory) == 0
    store.save(KEY, SIGNATURE, small_program())
    (store.directory / "a.1.tmp").touch()
    assert program_store.stored_programs(store.directory) == 1


def test_a_file_that_cannot_be_read_is_left_alone(store):
    store._path(KEY).mkdir(parents=True)
    assert load(store) is None
    (warning,) = store.warnings
    assert str(store._path(KEY)) in warning and store._path(KEY).exists()


def test_a_full_disk_is_one_warning_and_no_more_writes(store, monkeypatch):
    def replace(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    store.save(KEY, SIGNATURE, small_program())
    monkeypatch.undo()
    store.save(OTHER_KEY, SIGNATURE, small_program())
    (warning,) = store.warnings
    assert str(store.directory) in warning and "No space left" in warning
    assert list(store.directory.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    warnings = []
    store = ProgramStore(tmp_path / "file" / "programs", warnings.append)
    store.save(KEY, SIGNATURE, small_program())
    store.save(KEY, SIGNATURE, small_program())
    assert len(warnings) == 1 and "cannot be written" in warnings[0]


def test_a_backend_that_cannot_serialize_is_one_warning(store):
    def serialize(compiled):
        raise ValueError("no serialization here")

    with mock.patch.object(serialize_executable, "serialize", serialize):
        for key in (KEY, OTHER_KEY):
            store.save(key, SIGNATURE, small_program())
    (warning,) = store.warnings
    assert "no serialization here" in warning and not store.directory.exists()
    store.save(KEY, SIGNATURE, small_program())
    assert load(store) is not None


def test_a_missing_file_comes_back_although_jax_has_the_program(tmp_path):
    """What JAX reads from its own cache cannot be serialized on a CPU: its cache is out of use with a store."""
    hits = []

    def listen(event, **_):
        hits.extend([event] if event == "/jax/compilation_cache/cache_hits" else [])

    jax_cache, floor = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    own = str(tmp_path / "jax")
    jax.monitoring.register_event_listener(listen)
    try:
        jax.config.update("jax_compilation_cache_dir", own)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        found = [small_set(), small_set(), small_set()]
        for programs in found[:2]:
            programs.compile(threads=1)
        assert len(hits) == 1, "JAX's cache does not have the program"
        store = ProgramStore(tmp_path / "programs")
        found[2].compile(threads=1, store=store)
        assert len(hits) == 1 and jax.config.jax_compilation_cache_dir == own
        jax.jit(lambda x: x + 1).lower(1.0).compile()
        assert len(list((tmp_path / "jax").glob("*-cache"))) == 2, "JAX's cache is not in use again"
    finally:
        jax.monitoring.unregister_event_listener(listen)
        jax.config.update("jax_compilation_cache_dir", jax_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", floor)
        compilation_cache.reset_cache()
    again = small_set()
    again.compile(threads=1, store=store)
    assert program_store.stored_programs(store.directory) == again.num_loaded == 1


def small_set() -> ProgramSet:
    """Only the program that fills memory, of a model that has only shapes."""
    config = ModelConfig.preset("tiny-4b", vocab_size=512, layer_types=("linear_attention", "full_attention"))
    pack = ParamPack(config, dtype=jnp.dtype("float32"))
    shapes = device_state_shapes(config, 5, 3, jnp.dtype("float32"), jnp.dtype("float32"))
    return ProgramSet(StepSpec(pack, 500), jax.devices()[0], pack.leaf_specs, shapes, ())


@pytest.mark.parametrize("runs", [True, False])
def test_compiling_anew_at_warm_up_counts_as_compiling(store, monkeypatch, runs):
    class Programs:
        shapes = device = None
        num_loaded = 2

        def warm_up(self, state):
            if not runs and self.num_loaded:
                raise RuntimeError("a kernel is missing")

        def discard_loaded(self, store, reason):
            self.num_loaded = 0

    monkeypatch.setattr(loading, "init_device_state", lambda shapes, device: "state")
    monkeypatch.setattr(loading, "_compile", lambda *_: 12.5)
    assert loading._warm_up(Programs(), lambda *_: None, "compiling", store)[1] == (0.0 if runs else 12.5)


@pytest.mark.parametrize(("overlap", "sets"), [("off", 1), ("device", 2)])
def test_the_report_of_a_start_has_every_second_of_compiling(monkeypatch, overlap, sets):
    def warm_up(programs, *_):
        return programs_module.init_device_state(programs.shapes, programs.device), 1000.0

    monkeypatch.setattr(loading, "_compile", lambda *_: 10.0)
    monkeypatch.setattr(loading, "_warm_up", warm_up)
    monkeypatch.setattr(ProgramSet, "scratch_bytes", lambda _: 0)
    engine = loading.build_engine(
        dataclasses.replace(engine_kit.OPTIONS, decode_overlap=overlap).validate(),
        engine_kit.MODEL,
        lambda device, dtype: engine_kit._params(device),
        eos_ids=engine_kit.EOS,
        num_valid=engine_kit.NUM_VALID,
    )
    assert engine.start_report.compile_s == sets * 1010.0
    engine.close()


def test_what_a_user_must_know_is_a_warning_of_the_log_without_a_display(caplog):
    loading._warner(lambda *_: None)("a program is of no use")
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", "a program is of no use")
    display = mock.Mock()
    loading._warner(display)("a program is of no use")
    display.message.assert_called_once_with("warning: a program is of no use")
    assert len(caplog.records) == 1


def test_kept_programs_that_do_not_run_are_compiled_anew(store, monkeypatch):
    calls = []

    class Programs:
        shapes = device = None
        number, num_loaded = 3, 2

        def __init__(self, error="a kernel is missing"):
            self.error = error

        def warm_up(self, state):
            calls.append("warm_up")
            if self.num_loaded:
                raise RuntimeError(self.error)
            return state

        def discard_loaded(self, store, reason):
            calls.append(f"discard: {reason}")
            self.num_loaded = 0

        def compile(self, progress, threads, store):
            calls.append("compile")

    monkeypatch.setattr(loading, "init_device_state", lambda shapes, device: "state")
    assert loading._warm_up(Programs(), lambda *_: None, "compiling", store)[0] == "state"
    discarded = "discard: a program that was loaded failed at its first run: a kernel is missing"
    assert calls == ["warm_up", discarded, "compile", "warm_up"]
    with pytest.raises(RuntimeError, match="a kernel is missing"):
        loading._warm_up(Programs(), lambda *_: None, "compiling", None)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):  # no fault of the programs
        loading._warm_up(Programs("RESOURCE_EXHAUSTED: no memory"), lambda *_: None, "compiling", store)


def test_discarded_programs_are_gone_from_the_set_and_the_store(store):
    found = small_set()
    store.save(KEY, SIGNATURE, small_program())
    found._programs, found._loaded = {"a": small_program(), "b": small_program()}, {"a": KEY}
    found.discard_loaded(store, "a kernel is missing")
    assert list(found.executables()) == ["b"] and found.num_loaded == 0
    assert load(store) is None and "a kernel is missing" in store.warnings[0]
