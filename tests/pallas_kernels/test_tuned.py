"""Settings from data files: which entry counts, when none does, what is wrong with a file."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import pathlib
import tomllib

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import registry, tuned
from pallas_kernels.paged_decode_attention.specs import PagedDecodeAttentionSpec
from pallas_kernels.paged_decode_attention.triton import Tiling, default_tiling
from pallas_kernels.spec import TINY_MODELS, specs_of
from pallas_kernels.tuned import Entry, MalformedTuning, closest

OPS = [op.name for op in registry.all_ops()]
EXACT = {"group": 4, "dtype": "bfloat16"}
GOOD = {
    "implementation": "triton",
    "device": "NVIDIA H200",
    "exact": EXACT,
    "sizes": {"programs": 256, "width": 16},
    "use": {"keys": 32, "warps": 8},
    "measured": {"spec": "4b-64x1k", "commit": "0123"},
}
H200, H20 = (
    jax.sharding.AbstractMesh(
        (), (), abstract_device=jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=cores)
    )
    for kind, cores in (("NVIDIA H200", 132), ("NVIDIA H20", 78))
)


def entry(programs: int, width: int, **changes) -> Entry:
    return Entry(**GOOD | {"sizes": {"programs": programs, "width": width}} | changes)


def test_the_closest_that_fits_counts():
    entries = [entry(4, 16), entry(256, 16), entry(32, 512), entry(256, 16, use={"keys": 64})]

    def find(programs, width):
        return closest(entries, "triton", "NVIDIA H200", (EXACT, {"programs": programs, "width": width}))

    assert find(256, 16) is entries[1], "the first of equals"
    assert find(200, 20) is entries[1] and find(8, 16) is entries[0] and find(32, 128) is entries[2]
    assert find(2048, 128) is entries[1], "eight times as large is in reach"
    assert find(2049, 16) is None and find(1, 1) is None


@pytest.mark.parametrize(
    "other",
    [{"implementation": "mosaic"}, {"device": "NVIDIA H100"}, {"exact": EXACT | {"group": 6}}, {"sizes": {"rows": 64}}],
)
def test_what_differs_does_not_fit(other):
    assert closest([Entry(**GOOD)], "triton", "NVIDIA H200", (EXACT, GOOD["sizes"])) is not None
    assert closest([Entry(**GOOD | other)], "triton", "NVIDIA H200", (EXACT, GOOD["sizes"])) is None


def test_settings_replace_the_named_fields_on_their_device_only(tmp_path):
    path = tmp_path / "tuned.json"
    ask = lambda: tuned.settings(Tiling(), "op", "triton", (EXACT, GOOD["sizes"]), path=path)  # noqa: E731
    with jax.sharding.use_abstract_mesh(H200):
        assert ask() == Tiling(), "no file"
        path.write_text(json.dumps([GOOD]))
        assert ask() == Tiling(keys=32, warps=8)
        path.write_text("[]")
        assert ask() == Tiling(), "the file is read anew"
    path.write_text(json.dumps([GOOD]))
    with jax.sharding.use_abstract_mesh(H20):
        assert ask() == Tiling(), "another device"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "tuned.json of .*: not JSON"),
        ("{}", "must be a list of entries, is a dict"),
        ("[3]", "entry 0: must be an object, is a int"),
        (json.dumps([GOOD, {k: v for k, v in GOOD.items() if k != "use"}]), "entry 1: no field 'use'"),
        (json.dumps([GOOD | {"uses": {}}]), "entry 0: unknown field 'uses'"),
        (json.dumps([GOOD | {"device": ""}]), "device must be a name, is ''"),
        (json.dumps([GOOD | {"sizes": [1]}]), r"sizes must be an object, is \[1\]"),
        (json.dumps([GOOD | {"sizes": {"programs": 0}}]), "sizes.programs must be a positive integer, is 0"),
        (json.dumps([GOOD | {"use": {"keys": "64"}}]), "use.keys must be a positive integer, true or false, is '64'"),
        (json.dumps([GOOD | {"sizes": {"programs": True}}]), "sizes.programs must be a positive integer, is True"),
        (json.dumps([GOOD | {"use": {"kyes": 64}}]), "triton, use {'kyes': 64}: .*unexpected keyword"),
        (json.dumps([GOOD | {"use": {"keys": True}}]), "use {'keys': True}: keys is a number"),
        (json.dumps([GOOD | {"use": {"keys": 48}}]), "use {'keys': 48}: no tiling of this kernel"),
    ],
)
def test_malformed_files(tmp_path, text, words):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with jax.sharding.use_abstract_mesh(H200), pytest.raises(MalformedTuning, match=words):
        tuned.settings(Tiling(), "op", "triton", (EXACT, GOOD["sizes"]), path=path)


def test_an_op_takes_its_settings_from_the_file(tmp_path, monkeypatch):
    spec = PagedDecodeAttentionSpec(name="", model=TINY_MODELS["tiny1"], kv_lens=(3, 70))
    arguments = {name: jnp.asarray(array) for name, array in spec.case().arguments.items()}

    def traced() -> str:
        with jax.sharding.use_abstract_mesh(H200):
            run = lambda arguments: pallas_kernels.paged_decode_attention(**arguments, implementation="triton")  # noqa: E731
            return str(jax.make_jaxpr(run)(arguments))

    path = tmp_path / "tuned.json"
    monkeypatch.setattr(tuned, "path_of", lambda op: path)
    assert "num_warps=4" in traced() and "num_warps=8" not in traced()
    path.write_text(json.dumps([GOOD | {"sizes": {"programs": 2, "width": 2}}]))
    jax.clear_caches()  # the op is traced once for equal shapes
    assert "num_warps=8" in traced()
    jax.clear_caches()


def test_defaults():
    assert default_tiling("bfloat16") == default_tiling("float16") == Tiling()
    assert default_tiling("float32").keys == 32, "a whole page of float32 takes more than some devices have"


def abstract(spec):
    """Arguments as shapes, with the options."""
    options = {}

    def make():
        case = spec.case()
        options.update(case.options)
        return {name: jnp.asarray(array) for name, array in case.arguments.items()}

    return jax.eval_shape(make) | options


def tunables(op: str) -> list[tuned.Tunable]:
    name = f"pallas_kernels.{op}.tuning"
    return list(importlib.import_module(name).TUNABLES) if importlib.util.find_spec(name) else []


@pytest.mark.parametrize("op", OPS)
def test_files_that_ship_are_sound(op):
    """Every entry is of a tunable implementation, with its keys, and settings that it takes."""
    known = {tunable.implementation: tunable for tunable in tunables(op)}
    for number, one in enumerate(tuned.read(tuned.path_of(op))):
        tunable = known[one.implementation]
        for spec in one.measured["spec"].split(", "):
            arguments = abstract(specs_of(op)[spec])
            exact, sizes = tunable.key(arguments)
            assert (exact, sizes) == (one.exact, one.sizes), f"entry {number} is not of the spec that it names"
            dataclasses.replace(tunable.default(arguments), **one.use)


@pytest.mark.parametrize("op", OPS)
def test_tunables_name_what_is_there(op):
    for tunable in tunables(op):
        assert tunable.op == op and tunable.implementation in registry.get_op(op).implementations
        arguments = abstract(next(iter(specs_of(op).values())))
        default = tunable.default(arguments)
        fields = {field.name for field in dataclasses.fields(default)}
        tried = [name for step in tunable.steps for name in step]
        assert set(tried) == fields and len(tried) == len(fields), "each field is tried in one step"
        for step in tunable.steps:
            for name, values in step.items():
                for value in values:
                    dataclasses.replace(default, **{name: value})
        exact, sizes = tunable.key(arguments)
        assert all(type(size) is int for size in sizes.values()) and json.dumps(exact)


def test_data_files_are_packaged():
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "tuned.json" in project["tool"]["setuptools"]["package-data"]["*"]
