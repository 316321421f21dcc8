"""Converted directories: round trip, provenance, refusals, other device counts; sharding rules."""

import dataclasses
import json
import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax import checkpoint as checkpoint_module
from qwen35_jax.checkpoint import (
    MANIFEST_FILE,
    ConvertedCheckpoint,
    Manifest,
    check_weights,
    convert,
    load_model_params,
    open_model_dir,
    read_model_config,
    restore_on_mesh,
    sampled_digest,
    save_part,
    split_parts,
    write_manifest,
)
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.params import ParamPack
from qwen35_jax.sharding import logical_axes, make_mesh, parameter_sharding, partition_spec
from qwen35_jax.weights import load_params
from tests.oracle import tiny

CASE = "4b-untied"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "Tiny-Model"
    tiny.write_hf_dir(path, CASE, shards=2, skipped_tensors=True)
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "notes.md").write_text("not needed")
    return path


@pytest.fixture(scope="module")
def config(source):
    return ModelConfig.from_hf(source)


@pytest.fixture(scope="module")
def pristine(source, tmp_path_factory):
    """A converted directory; tests that change it use ``converted``."""
    output = tmp_path_factory.mktemp("converted") / "deep" / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "_PART_BYTES", 2 << 20)
        patch.setattr(split_parts, "__defaults__", (2 << 20,))
        convert(source, output)
    return output


@pytest.fixture
def converted(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "model")


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def refuse(path, config, message):
    with pytest.raises(UserInputError, match=message) as caught:
        load_model_params(path, config)
    assert "\n" not in str(caught.value)


# ---- round trip ----------------------------------------------------------------------------------------------------


def test_either_directory_gives_the_same_parameters(source, pristine, config):
    assert (open_model_dir(source), open_model_dir(pristine)) == ("hf", "orbax")
    assert read_model_config(source) == read_model_config(pristine) == config
    assert len(Manifest.read(pristine).parts) > 1
    for dtype in (None, "float32"):
        hf = load_model_params(source, config, dtype=dtype)
        assert_same(load_model_params(pristine, config, dtype=dtype), hf)
        assert_same(load_params(source, config, dtype=dtype), hf)


def test_conversion_in_another_dtype(source, config, tmp_path):
    manifest = convert(source, tmp_path / "out", dtype="float32")
    assert manifest.dtype == "float32"
    assert_same(load_model_params(tmp_path / "out", config), load_params(source, config))


def test_restore_goes_to_the_device_and_tells_progress(pristine, config):
    calls = []
    second = jax.devices()[1]
    flat = load_model_params(pristine, config, device=second, progress=lambda *args: calls.append(args))
    assert all(array.devices() == {second} for array in flat)
    assert len(calls) > 1 and calls[-1][1] == calls[-1][2]


def test_files_beside_the_parameters(source, pristine):
    names = {path.name for path in pristine.iterdir()}
    assert names == {
        *("params", MANIFEST_FILE, "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"),
    }
    assert (pristine / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert os.stat(pristine).st_mode & 0o777 == 0o777 & ~checkpoint_module._umask()


def test_provenance(source, pristine, config):
    manifest = Manifest.read(pristine)
    assert manifest.model_config == config
    assert manifest.dtype == "bfloat16"
    assert manifest.project_version
    assert manifest.source["directory"] == "Tiny-Model"
    assert manifest.source["layout"] == "full"
    assert manifest.source["skipped_tensors"] == 4
    files = {file["name"]: file for file in manifest.source["files"]}
    assert set(files) == {path.name for path in source.glob("*.safetensors")}
    for name, file in files.items():
        assert file["bytes"] == (source / name).stat().st_size
        assert len(file["header_sha256"]) == 64
    specs = ParamPack(config).specs
    assert manifest.parameters == {path: (spec.shape, spec.dtype.name) for path, spec in specs.items()}


def test_parts_are_bounded_and_complete(config):
    pack = ParamPack(config)
    parts = split_parts(pack, 1 << 20)
    assert [path for part in parts for path in part] == list(pack.specs)
    size = {path: spec.size * spec.dtype.itemsize for path, spec in pack.specs.items()}
    assert len(parts) > 3
    assert all(len(part) == 1 or sum(size[path] for path in part) <= 1 << 20 for part in parts)


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_another_number_of_layers_is_refused(converted, config):
    """Twelve layers never become sixteen silently: neither by the caller nor by an edited config.json."""
    kinds = config.layer_types
    more = dataclasses.replace(config, layer_types=(*kinds, "linear_attention", "full_attention"))
    refuse(converted, more, r"missing parameters: layers\.4\.input_norm.*\(1\d in all\)")
    fewer = dataclasses.replace(config, layer_types=kinds[:3])
    refuse(converted, fewer, r"parameters that the model does not have: layers\.3\.input_norm")
    file = converted / "config.json"
    text = json.loads(file.read_text())
    text["text_config"]["num_hidden_layers"] = 6
    text["text_config"]["layer_types"] = [*kinds, "linear_attention", "full_attention"]
    file.write_text(json.dumps(text))
    refuse(converted, read_model_config(converted), r"does not fit .*config\.json: missing parameters: layers\.4")


def test_another_kind_of_layer_tying_or_width_is_refused(pristine, config):
    swapped = dataclasses.replace(config, layer_types=("full_attention", *config.layer_types[1:]))
    refuse(pristine, swapped, r"missing parameters: layers\.0\.mixer")
    refuse(pristine, dataclasses.replace(config, tie_word_embeddings=True), "does not have: lm_head")
    wider = dataclasses.replace(config, intermediate_size=512)
    refuse(pristine, wider, r"layers\.\d\.mlp\.\w+ is bfloat16 \[.*\], expected bfloat16 \[.*\]")


def edit_manifest(path, change):
    file = path / MANIFEST_FILE
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="other"), "format is 'other'"),
        (lambda m: m.update(format_version=2), "format_version 2 is not supported"),
        (lambda m: m.pop("parts"), "is malformed: KeyError.'parts'"),
        (lambda m: m.update(parameters=[]), "is malformed"),
        (lambda m: m["model_config"].pop("gdn"), "is malformed: .*gdn"),
        (lambda m: m["parameters"].pop("embed"), "missing parameters: embed"),
        (lambda m: m["parameters"].update({"embed": [[2, 2], "bfloat16"]}), r"embed is bfloat16 \[2, 2\]"),
        (lambda m: m["parameters"].update({"embed": [[512, 128], "float32"]}), "embed is float32"),
        (lambda m: m["parts"][0].pop(), "parts do not hold every parameter exactly once"),
        (lambda m: m["parts"][1].append(m["parts"][0][0]), "parts do not hold every parameter exactly once"),
        (lambda m: m["parts"].reverse(), r"params/0000 does not fit"),
        (lambda m: m.update(dtype="float32"), "embed is bfloat16"),
        (lambda m: m.update(dtype="bfloat17"), "is malformed: .*bfloat17"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(converted, config, change, message):
    edit_manifest(converted, change)
    refuse(converted, config, message)


def described_files(directory):
    """The manifest's account of the files as they are now."""
    files = (f for f in (directory / "params").rglob("*") if f.is_file())
    return {str(f.relative_to(directory)): [f.stat().st_size, sampled_digest(f)] for f in files}


def test_orbax_metadata_is_compared_with_the_manifest(converted, config):
    """A part replaced by a sound Orbax checkpoint of something else."""
    manifest = Manifest.read(converted)
    shutil.rmtree(converted / "params" / "0000")
    other = {path: jnp.zeros((3, 3), jnp.bfloat16) for path in manifest.parts[0]}
    save_part(converted, 0, other)
    edit_manifest(converted, lambda values: values.update(files=described_files(converted)))
    refuse(converted, config, r"does not fit .*: \S+ is bfloat16 \[3, 3\], expected")


def test_damaged_orbax_metadata_is_named(converted, config):
    file = converted / "params" / "0000" / "_METADATA"
    file.write_bytes(bytes(file.stat().st_size))
    edit_manifest(converted, lambda values: values.update(files=described_files(converted)))
    refuse(converted, config, r"params/0000: its Orbax metadata is damaged")


@pytest.mark.parametrize("where", ("start", "end", "everything"))
def test_files_padded_with_zeros_are_named(converted, config, where):
    """A copy that broke off leaves a file of the right size that is partly zeros."""
    data = max((f for f in (converted / "params").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = data.read_bytes()
    half = len(content) // 2
    kept = {"start": bytes(half) + content[half:], "end": content[:half] + bytes(len(content) - half)}
    data.write_bytes(kept.get(where, bytes(len(content))))
    refuse(converted, config, rf"{data.name} is damaged")


def test_missing_and_truncated_files_are_named(converted, config):
    data = max((converted / "params").rglob("*"), key=lambda f: f.stat().st_size if f.is_file() else 0)
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    refuse(converted, config, rf"{data.name} has {len(content) - 1} bytes, the manifest says {len(content)}")
    data.unlink()
    refuse(converted, config, rf"{data.name} is missing")


def test_checks_come_before_any_allocation(converted, config, monkeypatch):
    manifest = Manifest.read(converted)
    last = [name for name in manifest.files if name.startswith(f"params/{len(manifest.parts) - 1:04d}/")][-1]
    (converted / last).unlink()

    def forbidden(*args, **kwargs):
        raise AssertionError("something was restored before the checks were done")

    monkeypatch.setattr(ConvertedCheckpoint, "_restore_part", forbidden)
    refuse(converted, config, "is missing")


def test_weights_are_checked_without_being_read(source, converted, config, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(ConvertedCheckpoint, "_restore_part", forbidden)
    monkeypatch.setattr(checkpoint_module, "load_params", forbidden)
    check_weights(source, config)
    check_weights(converted, config)
    other = dataclasses.replace(config, intermediate_size=512)
    for path in (source, converted):
        with pytest.raises(UserInputError, match="mlp"):
            check_weights(path, other)


def test_a_config_edited_since_the_conversion_is_told(converted, config, caplog):
    edited = dataclasses.replace(config, rms_norm_eps=1e-5)
    with caplog.at_level(logging.WARNING):
        ConvertedCheckpoint(converted, edited)
    assert "changed since the conversion: rms_norm_eps" in caplog.text


def test_directories_that_are_neither_or_both(converted, tmp_path):
    with pytest.raises(UserInputError, match="does not exist"):
        open_model_dir(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserInputError, match=r"'.*empty' has no config\.json"):
        open_model_dir(tmp_path / "empty")
    (converted / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserInputError, match=r"holds both .* and model\.safetensors"):
        open_model_dir(converted)
    (converted / MANIFEST_FILE).unlink()
    with pytest.raises(UserInputError, match="incomplete conversion"):
        open_model_dir(converted)


def test_converting_twice_is_refused(pristine, tmp_path):
    with pytest.raises(UserInputError, match=r"is converted already \(from 'Tiny-Model'\)"):
        convert(pristine, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# ---- device counts -------------------------------------------------------------------------------------------------


def test_saved_on_one_device_restored_on_two(pristine, config):
    mesh = make_mesh(jax.devices()[:2])
    restored = restore_on_mesh(pristine, config, mesh)
    single = restore_on_mesh(pristine, config, make_mesh(jax.devices()[:1]))
    assert restored.keys() == ParamPack(config).specs.keys()
    for path, array in restored.items():
        assert array.sharding == parameter_sharding(path, array.shape, mesh)
        np.testing.assert_array_equal(np.asarray(array, np.float32), np.asarray(single[path], np.float32))
    gate_up = restored["layers.0.mlp.gate_up"]
    assert len(gate_up.addressable_shards) == 2
    assert gate_up.addressable_shards[0].data.shape == (gate_up.shape[0], gate_up.shape[1] // 2)


def test_saved_on_two_devices_restored_on_one(source, config, tmp_path):
    pack = ParamPack(config)
    mesh = make_mesh(jax.devices()[:2])
    flat = load_params(source, config)
    values = {
        path: array[index] if leaf.stacked else array
        for leaf, array in zip(pack.leaves, flat, strict=True)
        for index, path in enumerate(leaf.paths)
    }
    sharded = {
        path: jax.device_put(value, parameter_sharding(path, value.shape, mesh)) for path, value in values.items()
    }
    parts = split_parts(pack)
    save_part(tmp_path, 0, sharded)
    write_manifest(tmp_path, pack, parts, {"directory": "memory"})
    shutil.copy(source / "config.json", tmp_path)
    assert_same(load_model_params(tmp_path, config), flat)


def test_every_parameter_has_logical_axes():
    for name in ("tiny-0.8b", "tiny-27b"):
        for path, spec in ParamPack(ModelConfig.preset(name)).specs.items():
            assert len(logical_axes(path)) == len(spec.shape), path
    with pytest.raises(ValueError, match=r"'layers\.0\.mixer\.router' has no logical axes"):
        logical_axes("layers.0.mixer.router")


def test_partition_specs_follow_the_rules():
    assert partition_spec("lm_head") == jax.sharding.PartitionSpec(None, "model")
    assert partition_spec("layers.7.mixer.o_proj") == jax.sharding.PartitionSpec("model", None)
    assert partition_spec("layers.7.mixer.q_norm") == jax.sharding.PartitionSpec(None)
    assert partition_spec("embed", {"hidden": "data"}) == jax.sharding.PartitionSpec(None, "data")


def test_dimensions_that_do_not_divide_are_refused_with_numbers(pristine, config):
    mesh = make_mesh(jax.devices()[:2])
    with pytest.raises(UserInputError, match=r"embed: dimension 0 \(vocab\) of size 511 .* 2 devices .*'model'"):
        parameter_sharding("embed", (511, 128), mesh)
    assert parameter_sharding("embed", (511, 128), make_mesh(jax.devices()[:1])).spec[0] == "model"
