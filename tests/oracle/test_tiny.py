"""The miniature checkpoints: deterministic, genuine layout, every variant the same model."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.oracle import goldens, tiny


@pytest.mark.parametrize("case", tiny.CASES)
def test_weights_are_those_of_the_goldens(case):
    digest = goldens.weights_digest(tiny.weights(case))
    assert digest == goldens.load_index()["cases"][case]["weights_sha256"], "run scripts/make_goldens.py again"


def test_every_head_ratio_tied_and_untied():
    ratios = set()
    for case in tiny.CASES:
        config = tiny.text_config(case)
        assert config["head_dim"] == 256 and config["linear_key_head_dim"] == config["linear_value_head_dim"] == 128
        ratio = config["linear_num_value_heads"] // config["linear_num_key_heads"]
        ratios.add((ratio, config["tie_word_embeddings"]))
        assert ("lm_head.weight" in tiny.weights(case)) != config["tie_word_embeddings"]
    assert ratios == {(ratio, tied) for ratio in (1, 2, 3) for tied in (False, True)}


def test_norm_weights_are_not_neutral_and_decays_spread():
    tensors = tiny.weights("27b-tied")
    for name, value in tensors.items():
        if name.endswith(("layernorm.weight", "q_norm.weight", "k_norm.weight")):
            assert 0.05 < np.abs(value).mean() < 0.6, name
        if name.endswith("A_log"):
            assert np.exp(value).max() > 10 and np.exp(value).min() < 0.05


def test_round_bf16_is_round_to_nearest_even():
    import ml_dtypes

    x = np.concatenate([np.random.default_rng(0).standard_normal(1000), [1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0]])
    x = x.astype(np.float32)
    np.testing.assert_array_equal(tiny.round_bf16(x), x.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("text_only", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_file_variant_holds_the_same_model(tmp_path, dtype, text_only, shards):
    case = "0.8b-untied"
    path = tiny.write_hf_dir(tmp_path / "m", case, dtype=dtype, text_only=text_only, shards=shards)
    if shards > 1:
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        stored = {}
        for file in sorted(set(index.values())):
            part = load_file(path / file)
            assert set(part) == {name for name, where in index.items() if where == file}
            stored |= part
    else:
        stored = load_file(path / "model.safetensors")
    wanted = tiny.weights(case)
    if text_only:
        wanted = {name.replace(tiny.PREFIX, tiny.TEXT_ONLY_PREFIX): value for name, value in wanted.items()}
    assert stored.keys() == wanted.keys()
    for name, value in stored.items():
        assert value.dtype.name == ("float32" if tiny.is_float32_tensor(name) else dtype), name
        np.testing.assert_array_equal(value.astype(np.float32), wanted[name], err_msg=name)
    config = json.loads((path / "config.json").read_text())
    assert config["model_type"] == ("qwen3_5_text" if text_only else "qwen3_5")
    assert config.get("text_config", config)["dtype"] == dtype


def test_edited_config_removes_and_replaces():
    config = tiny.edited_config("4b-tied", root={"tie_word_embeddings": None}, text={"rms_norm_eps": 1e-5})
    assert "tie_word_embeddings" not in config
    assert config["text_config"]["rms_norm_eps"] == 1e-5
    assert tiny.hf_config("4b-tied")["text_config"]["rms_norm_eps"] == 1e-6
