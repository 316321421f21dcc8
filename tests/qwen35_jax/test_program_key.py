"""What decides a key: the code on disk before it is imported, kernels, versions, device, settings, and the program."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import registry
from qwen35_jax import code_state, program_key, program_store, programs
from qwen35_jax.config import ModelConfig
from qwen35_jax.params import ParamPack
from qwen35_jax.program_key import circumstances, digest, foreign_kernels, kernel_table
from qwen35_jax.programs import ProgramSet
from qwen35_jax.steps import ProgramKey, StepSpec, device_state_shapes
from schedulers import Bucket

ROOT = pathlib.Path(__file__).parents[2]


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
        with mock.patch.multiple(program_key, **patched):
            return digest(circumstances(jax.devices()[0]))

    def at_import(**changes):
        return mock.patch.object(code_state, "AT_IMPORT", dataclasses.replace(code_state.AT_IMPORT, **changes))

    def device(kind="NVIDIA H200", platform="gpu", version="CUDA 12.9", capability="9.0", number=0, count=1):
        client = types.SimpleNamespace(platform_version=version, device_count=lambda: count)
        return types.SimpleNamespace(
            id=number, platform=platform, device_kind=kind, compute_capability=capability, client=client
        )

    found = [
        digest(circumstances(jax.devices()[0])),
        of(_versions=lambda: ["jax 0"]),
        of(_host_processor=lambda: ["flags: none"]),
        of(device()),
        of(device(kind="NVIDIA H100")),
        of(device(platform="cuda")),
        of(device(version="CUDA 13.0")),
        of(device(capability="9.1")),
        of(device(number=1)),
        of(device(count=2)),
        of(kernel_table=lambda: []),
    ]
    for changes in ({"sources": "another"}, {"installed": ("jaxlib-0.dist-info",)}):
        with at_import(**changes):
            found.append(digest(circumstances(jax.devices()[0])))
    with mock.patch.object(code_state, "FLAGS_AT_IMPORT", {"XLA_FLAGS": "which XLA may have read"}):
        found.append(digest(circumstances(jax.devices()[0])))
    with mock.patch.object(program_key, "_driver", lambda: "NVRM version: 1"):
        assert digest(circumstances(jax.devices()[0])) == found[0]  # a CPU has none
        found.append(of(device()))
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


def test_who_started_a_process_has_no_part():
    """A process with Mosaic GPU hands on a variable that this has set; whatever it is, it is set anew."""
    child = "from qwen35_jax.code_state import *; import pallas_kernels; print(FLAGS_AT_IMPORT, compiler_flags())"
    parent = f"import subprocess, sys, pallas_kernels; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MOSAIC_GPU_")}

    def told(code: str, **more: str) -> str:
        command, environment = [sys.executable, "-c", code], variables | more
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    directly = told(child)
    assert told(parent) == directly
    assert told(child, MOSAIC_GPU_CUDA_ROOT="/of/another") == directly
    assert "MOSAIC_GPU_CUDA_ROOT" in directly, "what JAX has found has part"


def test_versions_driver_and_processor_are_known(tmp_path):
    versions = program_key._versions()
    for name in ("jax", "jaxlib", "flax", "numpy"):
        assert any(line.startswith(f"{name} ") for line in versions), name
    assert sys.version in versions
    assert any(line.startswith("jaxlib-") for line in code_state.AT_IMPORT.installed)
    assert any(line for line in program_key._host_processor())
    with mock.patch.object(program_key, "_DRIVER", tmp_path / "version"):
        assert program_key._driver() == ""
        (tmp_path / "version").write_text("NVRM version: 580\nGCC version: 13\n")
        assert program_key._driver() == "NVRM version: 580"


# --- code -------------------------------------------------------------------------------------------------------------


def write(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_code_and_data_files_are_digested(tmp_path):
    package = write(tmp_path / "package", {"op/code.py": "x = 1", "op/tuned.json": "[]"})
    found = [code_state.source_digest(package)]
    write(package, {"op/NOTES.md": "words"})
    assert code_state.source_digest(package) == found[0]
    for name, text in (("op/code.py", "x = 2"), ("op/tuned.json", "[1]"), ("new.py", ""), ("op/new.json", "")):
        write(package, {name: text})
        found.append(code_state.source_digest(package))
    (package / "new.py").rename(package / "newer.py")
    found.append(code_state.source_digest(package))
    assert len(set(found)) == len(found) and None not in found


def test_folders_behind_links_are_digested_once(tmp_path):
    package = write(tmp_path / "package", {"code.py": "x = 1"})
    write(tmp_path / "elsewhere", {"code.py": "x = 1"})
    found = [code_state.source_digest(package)]
    (package / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(package)
    found.append(code_state.source_digest(package))
    write(tmp_path / "elsewhere", {"code.py": "x = 2"})
    found.append(code_state.source_digest(package))
    assert len(set(found)) == 3


def test_every_module_of_the_project_is_digested():
    every = [path for name in code_state.PACKAGES for path in (ROOT / name).rglob("*.py")]
    read = []
    original = pathlib.Path.read_bytes
    with mock.patch.object(pathlib.Path, "read_bytes", lambda path: read.append(path) or original(path)):
        code_state.unchanged()
    assert set(every) <= set(read) and len(every) > 100


def test_files_that_vanish_and_links_to_nowhere_have_no_part(tmp_path, monkeypatch):
    package = write(tmp_path / "package", {"code.py": "x = 1"})
    usual = code_state.source_digest(package)
    (package / ".#code.py").symlink_to("someone@somewhere.1234")
    (package / "folder.py").mkdir()
    assert code_state.source_digest(package) == usual
    write(package, {"gone.py": "", "folder/gone.py": ""})
    original = pathlib.Path.read_bytes

    def vanishes(path):
        if path.name == "gone.py":
            path.unlink()
        return original(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", vanishes)
    assert code_state.source_digest(package) == usual
    assert code_state.source_digest(tmp_path / "nothing") is None


def test_a_package_without_source_files_has_no_digest(tmp_path):
    write(tmp_path / "package", {"data.json": "[]", "code.pyc": ""})
    assert code_state.source_digest(tmp_path / "package") is None


# Imports a copy of the packages, one file of which is edited while they are being imported.
EDITED = """
import pathlib, sys
place = pathlib.Path(sys.argv[1])
import qwen35_jax
from qwen35_jax import code_state
assert code_state.FOLDERS[1] == place / "qwen35_jax", code_state.FOLDERS
assert not any(name in sys.modules for name in ("jax", "schedulers", "pallas_kernels"))
usual, unchanged = code_state.AT_IMPORT, code_state.unchanged()
import schedulers.slot_pool
(place / "schedulers" / "slot_pool.py").write_text("# edited")
print(unchanged, code_state.unchanged(), code_state._take().sources != usual.sources)
"""

LATE = """
import schedulers
from qwen35_jax import code_state
print(*code_state.IMPORTED_BEFORE)
"""


def python(code: str, path: pathlib.Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(path)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True, check=True).stdout.strip()


def test_code_is_digested_before_it_is_imported_and_again_later(tmp_path):
    for name in code_state.PACKAGES:
        write(tmp_path / name, {"__init__.py": ""})
    write(tmp_path, {"schedulers/slot_pool.py": "", "schedulers/__init__.py": ""})
    for name in ("__init__.py", "code_state.py"):
        write(tmp_path / "qwen35_jax", {name: (ROOT / "qwen35_jax" / name).read_text()})
    assert python(EDITED, tmp_path, str(tmp_path)) == "True False True"


def test_what_was_imported_before_is_known():
    assert python(LATE, ROOT) == "schedulers"
    assert python(LATE.replace("import schedulers", ""), ROOT) == ""


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch):
    """A table of one op with the implementations that a test gives."""

    def set_to(*implementations: registry.Implementation) -> None:
        op = registry.Op("op")
        for each in implementations:
            op.register(each.name, each.function, priority=each.priority, supports=each.supports)
        monkeypatch.setattr(registry, "_OPS", {"op": op})

    return set_to


def implementation(name="reference", function=registry.describe, priority=0, supports=registry._supports_anything):
    return registry.Implementation("op", name, function, supports, priority)


def test_the_table_of_kernels_is_part_of_a_key(kernels):
    tables = [
        (implementation(),),
        (implementation("triton"),),
        (implementation(priority=1),),
        (implementation(function=program_key.digest),),
        (implementation(), implementation("triton", priority=-1)),
        (implementation(), implementation("triton", priority=1)),
    ]
    found = []
    for table in tables:
        kernels(*table)
        found.append(digest({"table": kernel_table()}))
    target = registry.Target("gpu", "NVIDIA H200", "9.0")
    with mock.patch.object(registry, "current_target", lambda: target):
        found.append(digest({"table": kernel_table()}))
    assert len(set(found)) == len(found)


def test_the_project_registers_no_kernel_of_others():
    code = "from qwen35_jax.program_key import foreign_kernels; import qwen35_jax.engine; print(foreign_kernels())"
    assert python(code, ROOT) == "[]"


class _Callable:
    def __call__(self):
        return None


@pytest.mark.parametrize(
    "foreign",
    [
        {"function": write},
        {"function": functools.partial(write)},
        {"function": jax.jit(write)},
        {"function": _Callable()},
        {"function": eval("lambda: None")},
        {"function": len},
        {"supports": write},
    ],
    ids=["function", "partial", "jitted", "object", "evaluated", "builtin", "supports"],
)
def test_a_kernel_of_others_is_seen_and_there_is_no_store(kernels, foreign, tmp_path):
    kernels(implementation(), implementation("mine", **foreign))
    assert foreign_kernels() == ["op=mine"]
    warnings = []
    with mock.patch.object(code_state, "IMPORTED_BEFORE", ()):
        assert program_store.open_store(tmp_path, warnings.append) is None
    (warning,) = warnings
    assert "kernels from outside of the packages are registered: op=mine" in warning


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unchanged": lambda: True}, None),  # whoever edits files while tests run
        ({"IMPORTED_BEFORE": ("schedulers",)}, "schedulers imported before"),
        ({"AT_IMPORT": code_state.CodeState(None, ())}, "no source files"),
        ({"AT_IMPORT": code_state.CodeState("another", ())}, "have changed"),
        ({"unchanged": lambda: False}, "have changed"),
    ],
)
def test_there_is_a_store_only_of_code_that_is_known(kernels, changes, reason, tmp_path):
    kernels(implementation(function=jax.jit(registry.describe)), implementation("part", functools.partial(digest)))
    warnings = []
    with mock.patch.multiple(code_state, **{"IMPORTED_BEFORE": ()} | changes):
        store = program_store.open_store(tmp_path, warnings.append)
    assert (store is None) == (reason is not None) == bool(warnings)
    assert reason is None or reason in warnings[0]
