"""Compiled programs on disk: what decides a key, files that are not what they should be, and starts that load."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import secrets
import subprocess
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax import loading, program_store, programs
from qwen35_jax.config import ModelConfig
from qwen35_jax.params import ParamPack
from qwen35_jax.program_store import CacheHits, Program, ProgramStore, Trees, circumstances, digest, unwrap, wrap
from qwen35_jax.programs import ProgramSet
from qwen35_jax.steps import ProgramKey, StepSpec, device_state_shapes
from schedulers import Bucket

ROOT = pathlib.Path(__file__).parents[2]
KEY, OTHER_KEY = "ab" * 32, "cd" * 32

# An engine of two devices whose rows are all sampled, so that half of the programs do; prints what it was and gave.
ENGINE = """
import dataclasses, json, logging, sys, jax
from unittest import mock
from qwen35_jax import loading, runtime
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
    store.save(here.KEY, here.TREES, program)
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


def make_set(**changes) -> ProgramSet:
    """Programs of a tiny model that has only shapes, one thing of which is another."""
    changed = {
        "model": {},
        "dtype": "float32",
        "state_dtype": "float32",
        "kernels": "auto",
        "pages": 65,
        "num_valid": 500,
        "device": 0,
    } | changes
    config = ModelConfig.preset(
        "tiny-4b", **{"vocab_size": 512, "layer_types": ("linear_attention", "full_attention")} | changed["model"]
    )
    dtype = jnp.dtype(changed["dtype"])
    pack = ParamPack(config, dtype=dtype, kernels=changed["kernels"])
    shapes = device_state_shapes(config, changed["pages"], 9, dtype, jnp.dtype(changed["state_dtype"]))
    keys = (ProgramKey("decode", Bucket(0, 0, 8, 16), 1, "greedy"),)
    device = jax.devices()[changed["device"]]
    return ProgramSet(StepSpec(pack, changed["num_valid"]), device, pack.leaf_specs, shapes, keys)


def step_key(found: ProgramSet) -> str:
    (key, job), *_ = found.jobs().items()
    return digest(found.ingredients(key, job))


def test_a_key_is_the_same_for_the_same_program():
    assert step_key(make_set()) == step_key(make_set())
    usual = step_key(make_set())
    with jax.log_compiles(True), mock.patch.dict(os.environ, XLA_PYTHON_CLIENT_MEM_FRACTION="0.5"):
        assert step_key(make_set()) == usual  # neither is part of a program


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"rms_norm_eps": 1e-5}},
        {"model": {"layer_types": ("full_attention", "linear_attention")}},
        {"dtype": "bfloat16"},
        {"state_dtype": "bfloat16"},
        {"kernels": "reference"},
        {"pages": 66},
        {"num_valid": 501},
        {"device": 1},
    ],
    ids=str,
)
def test_what_an_engine_is_made_of_is_part_of_a_key(changes):
    assert step_key(make_set(**changes)) != step_key(make_set())


def test_the_program_is_part_of_a_key():
    usual = ProgramKey("decode", Bucket(0, 0, 8, 16), 1, "greedy")
    keys = [
        usual,
        dataclasses.replace(usual, variant="full"),
        dataclasses.replace(usual, steps=8),
        dataclasses.replace(usual, bucket=Bucket(0, 0, 4, 16)),
        dataclasses.replace(usual, bucket=Bucket(0, 0, 8, 8)),
        ProgramKey("prefill", Bucket(64, 8, 0, 16), 1, "greedy"),
    ]
    found = make_set()
    pack = found._spec.pack
    several = ProgramSet(
        found._spec,
        found.device,
        pack.leaf_specs,
        found.shapes,
        tuple(keys),
        extract_widths=(1, 2),
        merge_widths=(1, 2),
    )
    digests = {digest(several.ingredients(key, job)) for key, job in several.jobs().items()}
    assert len(digests) == len(keys) + 5
    (key, job), *_ = found.jobs().items()
    with mock.patch.object(programs, "compiler_options", return_value={"xla_option": True}):
        assert digest(found.ingredients(key, job)) not in digests


def test_the_circumstances_are_part_of_a_key():
    def of(device=None, **patched):
        if device is not None:
            return digest(circumstances(device))
        with mock.patch.multiple(program_store, **patched):
            return digest(circumstances(jax.devices()[0]))

    def device(kind="NVIDIA H200", platform="gpu", version="CUDA 12.9", capability="9.0", number=0, count=1):
        client = types.SimpleNamespace(platform_version=version, device_count=lambda: count)
        return types.SimpleNamespace(
            id=number, platform=platform, device_kind=kind, compute_capability=capability, client=client
        )

    found = [
        digest(circumstances(jax.devices()[0])),
        of(_sources=lambda: "another"),
        of(_versions=lambda: ["jax 0"]),
        of(_host_processor=lambda: ["flags: none"]),
        of(device()),
        of(device(kind="NVIDIA H100")),
        of(device(platform="cuda")),
        of(device(version="CUDA 13.0")),
        of(device(capability="9.1")),
        of(device(number=1)),
        of(device(count=2)),
    ]
    for name in ("XLA_FLAGS", "XLA_SOMETHING", "MOSAIC_GPU_X", "NVIDIA_TF32_OVERRIDE"):
        with mock.patch.dict(os.environ, {name: "another"}):
            found.append(digest(circumstances(jax.devices()[0])))
    with jax.default_matmul_precision("highest"):
        found.append(digest(circumstances(jax.devices()[0])))
    with jax.enable_x64(True):
        found.append(digest(circumstances(jax.devices()[0])))
    with jax.numpy_dtype_promotion("strict"):
        found.append(digest(circumstances(jax.devices()[0])))
    assert len(set(found)) == len(found)


def test_versions_and_processor_are_known():
    versions = program_store._versions()
    for name in ("jax", "jaxlib", "flax", "numpy"):
        assert any(line.startswith(f"{name} ") for line in versions), name
    assert any(line.startswith("jaxlib-") and line.endswith(".dist-info") for line in versions)
    assert sys.version in versions
    assert any(line for line in program_store._host_processor())


def test_code_and_data_files_are_part_of_a_key(tmp_path):
    package = tmp_path / "package"
    (package / "op").mkdir(parents=True)
    (package / "op" / "code.py").write_text("x = 1")
    (package / "op" / "tuned.json").write_text("[]")
    found = [program_store.source_digest(package)]
    (package / "op" / "NOTES.md").write_text("words")
    assert program_store.source_digest(package) == found[0]
    for name, text in (("op/code.py", "x = 2"), ("op/tuned.json", "[1]"), ("new.py", ""), ("op/new.json", "")):
        (package / name).write_text(text)
        found.append(program_store.source_digest(package))
    (package / "new.py").rename(package / "newer.py")
    found.append(program_store.source_digest(package))
    assert len(set(found)) == len(found)
    every = [
        path for folder in ("qwen35_jax", "pallas_kernels", "schedulers") for path in (ROOT / folder).rglob("*.py")
    ]
    read = []
    original = pathlib.Path.read_bytes
    with mock.patch.object(pathlib.Path, "read_bytes", lambda path: read.append(path) or original(path)):
        program_store._sources.__wrapped__()
    assert set(every) <= set(read)


TREES = Trees(jax.tree.structure(((0, 0), {})), jax.tree.structure({"sum": 0}))


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
    return store.load(key, TREES, jax.devices()[1])


def test_a_program_comes_back(store):
    assert load(store) is None and store.warnings == []
    store.save(KEY, TREES, small_program())
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


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: b"", "it is too short"),
        (lambda data: data[:50], "it is too short"),
        (lambda data: data[:-1], "bytes, not"),
        (lambda data: data + b"x", "bytes, not"),
        (lambda data: b"\x7fELF" + data[4:], "it is no compiled program"),
        (lambda data: data[:8] + b"\x09\0\0\0" + data[12:], "its format is 9, not 1"),
        (lambda data: flipped(data, 20), "it is another program"),
        (lambda data: flipped(data, 60), "it is damaged"),  # the digest itself
        (lambda data: flipped(data, 95), "it is damaged"),  # the facts
        (lambda data: flipped(data, len(data) - 5), "it is damaged"),
        (lambda data: wrap(OTHER_KEY, *unwrap(KEY, data)), "it is another program"),  # a file that was renamed
        (lambda data: wrap(KEY, {"scratch": 1, "kernels": []}, b"no executable"), ""),
        (lambda data: wrap(KEY, {}, unwrap(KEY, data)[1]), "scratch"),
    ],
)
def test_a_file_that_is_not_the_program_is_reported_and_removed(store, spoil, reason):
    store.save(KEY, TREES, small_program())
    path = store._path(KEY)
    path.write_bytes(spoil(path.read_bytes()))
    assert load(store) is None
    (warning,) = store.warnings
    assert str(path) in warning and reason in warning and "\n" not in warning
    assert not path.exists()
    store.save(KEY, TREES, small_program())
    assert load(store) is not None


def test_a_file_that_cannot_be_read_is_left_alone(store):
    store._path(KEY).mkdir(parents=True)
    assert load(store) is None
    (warning,) = store.warnings
    assert str(store._path(KEY)) in warning and store._path(KEY).exists()


def test_a_full_disk_is_one_warning_and_no_more_writes(store, monkeypatch):
    def write(path, data):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", write)
    store.save(KEY, TREES, small_program())
    monkeypatch.undo()
    store.save(OTHER_KEY, TREES, small_program())
    (warning,) = store.warnings
    assert str(store.directory) in warning and "No space left" in warning
    assert list(store.directory.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    warnings = []
    store = ProgramStore(tmp_path / "file" / "programs", warnings.append)
    store.save(KEY, TREES, small_program())
    store.save(KEY, TREES, small_program())
    assert len(warnings) == 1 and "cannot be written" in warnings[0]


def test_a_backend_that_cannot_serialize_is_one_warning(store):
    class Compiled:
        _executable = None

    for key in (KEY, OTHER_KEY):
        store.save(key, TREES, Program(Compiled(), 0))
    (warning,) = store.warnings
    assert "are not kept" in warning and not store.directory.exists()
    store.save(KEY, TREES, small_program())
    assert load(store) is not None


def test_a_program_of_another_structure_is_not_kept(store):
    store.save(KEY, dataclasses.replace(TREES, result=jax.tree.structure(0)), small_program())
    assert load(store) is None and "structure" in store.warnings[0]


def test_what_jax_has_read_from_its_cache_is_not_kept_on_a_cpu(store):
    """Serialized again it would have no code."""
    found, saved = make_set(), []
    (key, job), *_ = found.jobs().items()

    def build(hit):
        def compile(compiler_options):
            if hit:
                jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
            return small_program().compiled

        found._build(key, job, types.SimpleNamespace(compile=compile), 0.0, hits, store, "name")
        return len(saved)

    hits = CacheHits()
    with mock.patch.object(ProgramStore, "save", lambda *arguments: saved.append(arguments)):
        assert [build(False), build(True), build(False)] == [1, 1, 2]
    hits.close()
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    assert not hits.take()


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
    assert loading._warm_up(Programs(), lambda *_: None, "compiling", store) == "state"
    assert calls == ["warm_up", "discard: a kernel is missing", "compile", "warm_up"]
    with pytest.raises(RuntimeError, match="a kernel is missing"):
        loading._warm_up(Programs(), lambda *_: None, "compiling", None)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):  # no fault of the programs
        loading._warm_up(Programs("RESOURCE_EXHAUSTED: no memory"), lambda *_: None, "compiling", store)


def test_discarded_programs_are_gone_from_the_set_and_the_store(store):
    found = make_set()
    store.save(KEY, TREES, small_program())
    found._programs, found._loaded = {"a": small_program(), "b": small_program()}, {"a": KEY}
    found.discard_loaded(store, "a kernel is missing")
    assert list(found.executables()) == ["b"] and found.num_loaded == 0
    assert load(store) is None and "a kernel is missing" in store.warnings[0]
