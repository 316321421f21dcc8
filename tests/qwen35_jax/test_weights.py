"""Safetensors to parameters: values, completeness, every way in which files can be wrong; random parameters."""

import itertools
import json
import logging
import struct
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwen35_jax import weights as weights_module
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.name_table import parameter_table
from qwen35_jax.params import ParamPack
from qwen35_jax.safetensors_files import READABLE_DTYPES, TensorReader, open_shards, read_shard
from qwen35_jax.weights import load_params, plan_load, random_params
from tests.oracle import tiny

FULL = tiny.PREFIX


def by_path(config, flat, dtype):
    """Every parameter of a packed tuple by its path, as numpy."""
    pack = ParamPack(config, dtype=dtype)
    out = {}
    for leaf, array in zip(pack.leaves, flat, strict=True):
        for index, path in enumerate(leaf.paths):
            out[path] = np.asarray(array[index] if leaf.stacked else array)
    return out


def expected_parameters(case):
    """The fused layouts, written out by hand from Hugging Face tensors (float32)."""
    text, hf = tiny.text_config(case), tiny.weights(case)
    heads, head_dim = text["num_attention_heads"], text["head_dim"]
    out = {"embed": hf[FULL + "embed_tokens.weight"], "final_norm": hf[FULL + "norm.weight"]}
    if not text["tie_word_embeddings"]:
        out["lm_head"] = hf["lm_head.weight"].T
    for i, kind in enumerate(text["layer_types"]):
        src, dst = f"{FULL}layers.{i}.", f"layers.{i}."
        out[dst + "input_norm"] = hf[src + "input_layernorm.weight"]
        out[dst + "post_norm"] = hf[src + "post_attention_layernorm.weight"]
        gate, up = hf[src + "mlp.gate_proj.weight"], hf[src + "mlp.up_proj.weight"]
        out[dst + "mlp.gate_up"] = np.hstack([gate.T, up.T])
        out[dst + "mlp.down"] = hf[src + "mlp.down_proj.weight"].T
        if kind == "linear_attention":
            la = src + "linear_attn."
            out[dst + "mixer.in_proj"] = np.hstack([hf[f"{la}in_proj_{x}.weight"].T for x in ("qkv", "z", "b", "a")])
            conv = hf[la + "conv1d.weight"]
            out[dst + "mixer.conv_weight"] = np.stack([conv[:, 0, tap] for tap in range(4)])
            out[dst + "mixer.A_log"], out[dst + "mixer.dt_bias"] = hf[la + "A_log"], hf[la + "dt_bias"]
            out[dst + "mixer.norm"] = hf[la + "norm.weight"]
            out[dst + "mixer.out_proj"] = hf[la + "out_proj.weight"].T
        else:
            sa = src + "self_attn."
            q_proj = hf[sa + "q_proj.weight"]
            q_rows = [q_proj[2 * n * head_dim : (2 * n + 1) * head_dim] for n in range(heads)]
            gate_rows = [q_proj[(2 * n + 1) * head_dim : (2 * n + 2) * head_dim] for n in range(heads)]
            others = [hf[sa + "k_proj.weight"], hf[sa + "v_proj.weight"]]
            out[dst + "mixer.qkv_proj"] = np.concatenate([*q_rows, *gate_rows, *others]).T
            out[dst + "mixer.q_norm"], out[dst + "mixer.k_norm"] = hf[sa + "q_norm.weight"], hf[sa + "k_norm.weight"]
            out[dst + "mixer.o_proj"] = hf[sa + "o_proj.weight"].T
    return out


def is_fp32(path):
    return "norm" in path or path.endswith(("A_log", "dt_bias"))


def check_values(case, config, flat, dtype):
    got, want = by_path(config, flat, dtype), expected_parameters(case)
    assert got.keys() == want.keys()
    for path, value in want.items():
        stored = np.dtype(np.float32 if is_fp32(path) else dtype)
        assert got[path].dtype == stored, path
        np.testing.assert_array_equal(got[path], value.astype(stored), err_msg=path)


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", tiny.CASES)
def test_the_table_is_the_model(case):
    config = ModelConfig.from_dict(ModelConfig.preset("tiny-4b").to_dict())
    pack, table = ParamPack(config), parameter_table(config)
    assert set(pack.specs) == set(table)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("0.8b-tied", {"shards": 1}),
        ("4b-untied", {"shards": 3, "skipped_tensors": True}),
        ("27b-tied", {"shards": 2, "text_only": True}),
        ("27b-untied", {"shards": 1, "text_only": True, "mixed_dtypes": True}),
    ],
)
def test_every_layout_of_files_gives_the_parameters(tmp_path, case, options):
    tiny.write_hf_dir(tmp_path, case, dtype="float32", **options)
    config = ModelConfig.from_hf(tmp_path)
    check_values(case, config, load_params(tmp_path, config), np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_of_files_may_be_mixed(tmp_path, dtype):
    """bf16 matrices, fp32 A_log and norm in the file; fp32 small parameters in memory whatever is asked for."""
    case = "4b-tied"
    tiny.write_hf_dir(tmp_path, case, dtype="bfloat16", mixed_dtypes=True)
    config = ModelConfig.from_hf(tmp_path)
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    check_values(case, config, load_params(tmp_path, config, dtype), dtype)


def test_rounding_of_small_parameters_comes_from_the_file_only(tmp_path):
    case = "0.8b-tied"
    tiny.write_hf_dir(tmp_path, case, dtype="bfloat16", mixed_dtypes=False)
    config = ModelConfig.from_hf(tmp_path)
    got = by_path(config, load_params(tmp_path, config), ml_dtypes.bfloat16)
    a_log = tiny.weights(case)[FULL + "layers.0.linear_attn.A_log"]
    assert got["layers.0.mixer.A_log"].dtype == np.float32
    np.testing.assert_array_equal(got["layers.0.mixer.A_log"], tiny.round_bf16(a_log))


def test_float16_and_float64_files(tmp_path):
    from safetensors.numpy import save_file

    tensors = tiny.weights("0.8b-tied")
    half = {k: v.astype(np.float64 if "norm" in k else np.float16) for k, v in tensors.items()}
    tiny.write_hf_dir(tmp_path, "0.8b-tied")
    save_file(half, tmp_path / "model.safetensors")
    config = ModelConfig.from_hf(tmp_path)
    got = by_path(config, load_params(tmp_path, config, "float32"), np.float32)
    np.testing.assert_array_equal(got["embed"], half[FULL + "embed_tokens.weight"].astype(np.float32))
    np.testing.assert_array_equal(got["final_norm"], half[FULL + "norm.weight"].astype(np.float32))


def test_parameters_go_to_the_device_asked_for(tmp_path):
    tiny.write_hf_dir(tmp_path, "0.8b-tied")
    config = ModelConfig.from_hf(tmp_path)
    second = jax.devices()[1]
    for flat in (load_params(tmp_path, config, device=second), random_params(config, device=second)):
        assert all(array.devices() == {second} for array in flat)


def test_progress_ends_at_the_total(tmp_path):
    tiny.write_hf_dir(tmp_path, "4b-tied", dtype="float32")
    config = ModelConfig.from_hf(tmp_path)
    calls = []
    load_params(tmp_path, config, progress=lambda *args: calls.append(args))
    done, totals = [c[1] for c in calls], {c[2] for c in calls}
    assert done == sorted(set(done)) and len(done) > 2
    assert totals == {done[-1]}
    assert done[-1] == round(plan_load(tmp_path, config).num_bytes / 2**20)


def test_host_memory_holds_two_parameters_at_most(tmp_path, monkeypatch):
    """Counts the bytes of tensors that have been read and are still alive."""
    tiny.write_hf_dir(tmp_path, "4b-tied", dtype="float32")
    config = ModelConfig.from_hf(tmp_path)
    alive, peak = {}, 0
    read = TensorReader.read

    class Tracked(np.ndarray):
        pass

    def tracked(self, entry):
        nonlocal peak
        value = read(self, entry).view(Tracked)
        alive[id(value)] = value.nbytes
        weakref.finalize(value, alive.pop, id(value))
        peak = max(peak, sum(alive.values()))
        return value

    monkeypatch.setattr(TensorReader, "read", tracked)
    plan = plan_load(tmp_path, config)
    load_params(plan, config)
    sizes = [sum(entry.num_bytes for entry in plan.entries[path]) for path in ParamPack(config).specs]
    assert 0 < peak <= max(map(sum, itertools.pairwise(sizes))) < plan.num_bytes / 2
    assert not alive


# ---- skipped and tied ----------------------------------------------------------------------------------------------


def test_vision_and_mtp_tensors_are_skipped_and_logged(tmp_path, caplog):
    tiny.write_hf_dir(tmp_path, "0.8b-tied", skipped_tensors=True)
    with caplog.at_level(logging.DEBUG, logger="qwen35_jax"):
        plan = plan_load(tmp_path, ModelConfig.from_hf(tmp_path))
    assert sorted(plan.skipped) == [
        "model.visual.blocks.0.norm1.weight",
        "model.visual.patch_embed.proj.bias",
        "mtp.fc.weight",
        "mtp.layers.0.mlp.up_proj.weight",
    ]
    assert "2 model.visual.*, 2 mtp.*" in caplog.text
    assert "mtp.layers.0.mlp.up_proj.weight" in caplog.text


def test_a_tied_model_may_store_its_embedding_again(tmp_path):
    tensors = tiny.weights("0.8b-tied")
    tensors["lm_head.weight"] = tensors[FULL + "embed_tokens.weight"]
    tiny.write_hf_dir(tmp_path, "0.8b-tied", tensors=tensors)
    plan = plan_load(tmp_path, ModelConfig.from_hf(tmp_path))
    assert plan.skipped == ("lm_head.weight",)


@pytest.mark.parametrize("change", [lambda x: x[::-1], lambda x: x[:-1], lambda x: np.r_[x[:-1], x[-1:] + 1]])
def test_a_tied_model_with_another_head_is_refused(tmp_path, change, monkeypatch):
    monkeypatch.setattr(weights_module, "_COMPARE_BYTES", 1 << 12)
    tensors = tiny.weights("0.8b-tied")
    tensors["lm_head.weight"] = change(tensors[FULL + "embed_tokens.weight"])
    tiny.write_hf_dir(tmp_path, "0.8b-tied", tensors=tensors)
    with pytest.raises(UserInputError, match=r"'lm_head.weight' differs .*tie_word_embeddings = true"):
        plan_load(tmp_path, ModelConfig.from_hf(tmp_path))


def test_an_untied_model_without_head_is_refused(tmp_path):
    tensors = tiny.weights("0.8b-untied")
    del tensors["lm_head.weight"]
    tiny.write_hf_dir(tmp_path, "0.8b-untied", tensors=tensors)
    with pytest.raises(UserInputError, match=r"tensor 'lm_head\.weight' is missing.*not tied"):
        plan_load(tmp_path, ModelConfig.from_hf(tmp_path))


# ---- tensors that do not fit ---------------------------------------------------------------------------------------


def write_changed(path, change, case="4b-tied"):
    tensors = tiny.weights(case)
    change(tensors)
    tiny.write_hf_dir(path, case, tensors=tensors, shards=2)
    return ModelConfig.from_hf(path)


def rename(old, new):
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(FULL + "layers.1.self_attn.k_norm.weight"),
            r"missing tensors: \S+layers\.1\.self_attn\.k_norm",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if ".layers.3." in name],
            r"missing tensors: .*layers\.3\..*, \.\.\. \(1\d in all\)",
        ),
        (lambda t: t.update({FULL + "layers.4.mlp.up_proj.weight": np.ones(3)}), r"does not have: \S+layers\.4\.mlp"),
        (
            rename(FULL + "norm.weight", FULL + "final_layernorm.weight"),
            r"missing tensors: \S+\.norm\.weight; tensors that the model does not have: \S+final_layernorm",
        ),
        (
            lambda t: t.update({FULL + "norm.weight": np.ones(127, np.float32)}),
            r"wrong shape: \S+language_model\.norm\.weight \[127\] instead of \[128\]",
        ),
        (
            lambda t: t.update({FULL + "layers.0.linear_attn.conv1d.weight": np.ones((1024, 4), np.float32)}),
            r"conv1d\.weight \[1024, 4\] instead of \[1024, 1, 4\]",
        ),
        (
            lambda t: t.update({FULL + "layers.0.mlp.up_proj.weight_scale_inv": np.ones((1, 1), np.float32)}),
            r"weight_scale_inv; this looks like a quantised checkpoint",
        ),
        (
            rename(FULL + "norm.weight", "model.norm.weight"),  # both prefixes in one checkpoint
            r"missing tensors: model\.language_model\.norm\.weight; .* does not have: model\.norm\.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    config = write_changed(tmp_path, change)
    with pytest.raises(UserInputError, match=message) as caught:
        plan_load(tmp_path, config)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_quantised_dtypes_are_refused(tmp_path):
    tiny.write_hf_dir(tmp_path, "0.8b-tied")
    config = ModelConfig.from_hf(tmp_path)
    name = FULL + "layers.0.mlp.up_proj.weight"
    rewrite_header(tmp_path / "model.safetensors", lambda h: fp8(h, name))
    with pytest.raises(UserInputError, match=r"dtype that is not supported .quantised.*up_proj\.weight F8_E4M3"):
        plan_load(tmp_path, config)


def fp8(header, name):
    """Makes a tensor fp8 by turning one half of it into a tensor that is skipped."""
    begin, end = header[name]["data_offsets"]
    half = (end - begin) // 2
    header[name] = {**header[name], "dtype": "F8_E4M3", "data_offsets": [begin, begin + half]}
    header["mtp.rest"] = {"dtype": "U8", "shape": [half], "data_offsets": [begin + half, end]}


def test_checks_come_before_any_allocation(tmp_path, monkeypatch):
    config = write_changed(tmp_path, lambda t: t.pop(FULL + "norm.weight"))

    def forbidden(*args, **kwargs):
        raise AssertionError("something was read or placed before the checks were done")

    monkeypatch.setattr(jax, "device_put", forbidden)
    monkeypatch.setattr(TensorReader, "read", forbidden)
    with pytest.raises(UserInputError, match="missing tensors"):
        load_params(tmp_path, config)


# ---- files ---------------------------------------------------------------------------------------------------------


def rewrite_header(path, change):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.fixture
def sharded(tmp_path):
    tiny.write_hf_dir(tmp_path, "0.8b-tied", shards=3)
    return tmp_path


SECOND = "model-00002-of-00003.safetensors"


def check_refused(path, message):
    with pytest.raises(UserInputError, match=message) as caught:
        plan_load(path, ModelConfig.from_hf(path))
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(sharded):
    (sharded / SECOND).unlink()
    check_refused(sharded, rf"index\.json names {SECOND}, which is not in the directory \(1 of 3 files missing\)")


@pytest.mark.parametrize("cut", [1, 1000, "header", 4, 0])
def test_a_truncated_shard_is_named(sharded, cut):
    file = sharded / SECOND
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    keep = {1: len(data) - 1, 1000: len(data) - 1000, "header": 8 + length // 2, 4: 4, 0: 0}[cut]
    file.write_bytes(data[:keep])
    check_refused(sharded, rf"{SECOND} (is truncated: the header \w+ \d+ bytes, the file has {keep}|is not a safe)")


def test_bytes_after_the_end_are_refused(sharded):
    with (sharded / SECOND).open("ab") as file:
        file.write(b"xyz")
    check_refused(sharded, rf"{SECOND} has \d+ bytes, 3 more than")


def test_a_git_lfs_pointer_is_named(sharded):
    (sharded / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    check_refused(sharded, rf"{SECOND} is a Git LFS pointer")


def test_stale_files_beside_an_index_are_ignored(sharded):
    (sharded / "model-00004-of-00004.safetensors").write_bytes(b"old")
    (sharded / "model.safetensors").write_bytes(b"older")
    config = ModelConfig.from_hf(sharded)
    check_values("0.8b-tied", config, load_params(sharded, config), ml_dtypes.bfloat16)


def test_the_index_decides_between_two_copies_of_a_tensor(sharded):
    """A shard that also holds a tensor which the index places elsewhere does not fill it twice."""
    from safetensors.numpy import load_file, save_file

    first = sharded / "model-00001-of-00003.safetensors"
    tensors = load_file(first)
    tensors[FULL + "norm.weight"] = np.full(64, 9.0, np.float32)
    save_file(tensors, first)
    config = ModelConfig.from_hf(sharded)
    check_values("0.8b-tied", config, load_params(sharded, config), ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda m: m.update({FULL + "norm.weight": "model-00001-of-00003.safetensors"}),
            r"norm\.weight' in model-00001",
        ),
        (lambda m: m.update({FULL + "norm.weight": "../norm.safetensors"}), "must be a file name, got '../norm"),
        (lambda m: m.update({FULL + "norm.weight": None}), "must be a file name, got None"),
        (lambda m: m.clear(), "weight_map is missing or empty"),
    ],
)
def test_a_wrong_index_is_named(sharded, edit, message):
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    file.write_text(json.dumps(index))
    check_refused(sharded, message)


def test_no_weights_at_all(tmp_path):
    tiny.write_hf_dir(tmp_path, "0.8b-tied")
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    check_refused(tmp_path, r"neither model\.safetensors nor .*found other\.safetensors")
    (tmp_path / "other.safetensors").unlink()
    check_refused(tmp_path, r"neither model\.safetensors nor model\.safetensors\.index\.json$")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "data_offsets": [0, 8]},
        [1],
    ],
)
def test_inconsistent_headers_are_refused(tmp_path, entry):
    text = json.dumps({"x": entry}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(UserInputError, match=r"a\.safetensors: the header entry of tensor 'x' is inconsistent"):
        read_shard(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[1, 2]", "its header is not an object"),
        (b'{"x": ', "its header is not JSON"),
        (
            b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            b' "x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
            "'x' is in the header twice",
        ),
        (
            b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            b' "y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            "overlaps or leaves a gap",
        ),
        (b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "overlaps or leaves a gap"),
    ],
)
def test_malformed_headers_are_refused(tmp_path, text, message):
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(UserInputError, match=message):
        read_shard(tmp_path / "a.safetensors")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(sharded):
    config = ModelConfig.from_hf(sharded)
    plan = plan_load(sharded, config)
    file = sharded / SECOND
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserInputError, match=rf"{SECOND} ends inside tensor"):
        load_params(plan, config)


def test_reader_agrees_with_the_safetensors_library(tmp_path):
    from safetensors.numpy import load_file, save_file

    dtypes = [*READABLE_DTYPES.values()]
    tensors = {f"t{i}": np.arange(6 + i).astype(dtype).reshape(-1, 1) for i, dtype in enumerate(dtypes)}
    tensors |= {"empty": np.zeros((0, 3), np.float32), "scalar": np.asarray(4, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    entries, _ = open_shards(tmp_path)
    with TensorReader() as reader:
        for name, value in load_file(tmp_path / "model.safetensors").items():
            got = reader.read(entries[name])
            assert got.dtype == value.dtype and got.shape == value.shape
            np.testing.assert_array_equal(got, value)


# ---- random parameters ---------------------------------------------------------------------------------------------


def test_random_parameters_are_sane_and_depend_on_the_seed():
    config = ModelConfig.preset("tiny-27b", num_layers=4)
    got, again, other = (by_path(config, random_params(config, "float32", seed=s), np.float32) for s in (3, 3, -1))
    for path, value in got.items():
        np.testing.assert_array_equal(value, again[path])
        assert not np.array_equal(value, other[path]), path
        assert np.isfinite(value).all()
        assert value.dtype == np.float32
    matrix = got["layers.0.mlp.gate_up"]
    assert abs(matrix.mean()) < 0.01 * matrix.std()
    np.testing.assert_allclose(matrix.std(), 128**-0.5, rtol=0.02)
    np.testing.assert_allclose(got["embed"].std(), 2 * 128**-0.5, rtol=0.02)
    # neighbours, rows and other layers are not correlated
    assert abs(np.corrcoef(matrix[:, :-1].ravel(), matrix[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(matrix[:-1].ravel(), matrix[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(matrix.ravel(), got["layers.1.mlp.gate_up"].ravel())[0, 1]) < 0.01
    assert 0.02 < np.abs(got["layers.0.input_norm"]).mean() < 0.3
    assert abs(got["layers.0.mixer.norm"].mean() - 1) < 0.1
    a_log, dt_bias = got["layers.0.mixer.A_log"], got["layers.0.mixer.dt_bias"]
    assert (a_log >= 0).all() and (a_log <= np.log(16)).all()
    step = np.log1p(np.exp(dt_bias))
    assert (step > 0.9e-3).all() and (step < 1.1e-1).all()


def test_random_bf16_is_the_rounded_fp32():
    config = ModelConfig.preset("tiny-0.8b")
    low, full = random_params(config, seed=1), random_params(config, "float32", seed=1)
    for a, b in zip(low, full, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b.astype(a.dtype), np.float32))
    assert np.dtype(jnp.bfloat16) in {array.dtype for array in low}
