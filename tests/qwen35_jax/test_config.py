"""Reading Hugging Face configs, presets, and the checks of every option."""

import dataclasses
import json
import logging

import pytest

from qwen35_jax.config import AttentionConfig, EngineConfig, GatedDeltaNetConfig, ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.hf_config import parse_model_config
from tests.oracle import tiny

GENERATION = {"eos_token_id": [510, 511]}


def write(path, config, generation=None):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def parse(case="4b-tied", root=None, text=None, generation=None):
    return parse_model_config(tiny.edited_config(case, root=root, text=text), generation or {}, source="config.json")


# ---- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", tiny.CASES)
@pytest.mark.parametrize("text_only", [False, True])
def test_nested_and_flat_configs_read_the_same(tmp_path, case, text_only):
    path = write(tmp_path / "m", tiny.hf_config(case, text_only=text_only), GENERATION)
    config = ModelConfig.from_hf(path)
    text = tiny.text_config(case)
    assert config.hidden_size == text["hidden_size"]
    assert config.intermediate_size == text["intermediate_size"]
    assert config.vocab_size == tiny.VOCAB_SIZE
    assert list(config.layer_types) == text["layer_types"]
    assert config.attention == AttentionConfig(text["num_attention_heads"], text["num_key_value_heads"], 256, 64, 1e7)
    assert config.gdn == GatedDeltaNetConfig(text["linear_num_key_heads"], text["linear_num_value_heads"])
    assert config.tie_word_embeddings == case.endswith("-tied")
    assert config.max_position_embeddings == 4096
    assert config.dtype == "bfloat16"
    assert config.moe is None


def test_a_published_config_gives_the_preset():
    """The numbers of a member, written by hand as its config.json has them."""
    text = {
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "vocab_size": 248320,
    }
    root = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False, "vision_config": {}}
    config = parse_model_config(root, {"eos_token_id": [248046, 248044]}, source="config.json")
    assert config == ModelConfig.preset("27b")


def test_layer_types_win_over_the_interval_and_are_derived_without():
    assert [kind[0] for kind in parse().layer_types] == list("lffl")
    derived = parse(text={"layer_types": None})
    assert [kind[0] for kind in derived.layer_types] == list("lllf")
    every_second = parse(text={"layer_types": None, "full_attention_interval": 2})
    assert [kind[0] for kind in every_second.layer_types] == list("lflf")


def test_rope_settings_in_either_place():
    at_top = parse(text={"rope_parameters": None, "rope_theta": 5e6, "partial_rotary_factor": 0.5})
    assert (at_top.attention.rope_theta, at_top.attention.rotary_dim) == (5e6, 128)
    mixed = parse(text={"rope_parameters": {"rope_theta": 1e6}, "partial_rotary_factor": 0.125, "rope_theta": 7.0})
    assert (mixed.attention.rope_theta, mixed.attention.rotary_dim) == (1e6, 32)
    no_factor = parse(text={"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1]}})
    assert no_factor.attention.rotary_dim == 64


@pytest.mark.parametrize(
    ("root", "text", "tied", "warns"),
    [
        (True, True, True, False),
        (False, True, True, True),
        (True, False, False, True),
        (True, None, True, False),
        (None, True, True, False),
        (None, None, False, False),
    ],
)
def test_tie_flag_of_the_text_config_wins(caplog, root, text, tied, warns):
    with caplog.at_level(logging.WARNING):
        config = parse(root={"tie_word_embeddings": root}, text={"tie_word_embeddings": text})
    assert config.tie_word_embeddings is tied
    assert ("tie_word_embeddings" in caplog.text) is warns


def test_eos_ids_are_the_union_of_all_files(tmp_path):
    config = tiny.edited_config("4b-tied", root={"eos_token_id": [7, 8]}, text={"eos_token_id": 9})
    assert ModelConfig.from_hf(write(tmp_path, config, {"eos_token_id": [510, 9]})).eos_token_ids == (510, 9, 7, 8)
    assert ModelConfig.from_hf(write(tmp_path, config, {"eos_token_id": 3})).eos_token_ids == (3, 9, 7, 8)
    (tmp_path / "generation_config.json").unlink()
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == (9, 7, 8)


def test_dtype_under_its_old_and_new_names():
    assert parse(text={"dtype": "float32"}).dtype == "float32"
    assert parse(text={"dtype": None, "torch_dtype": "torch.float16"}).dtype == "float16"
    assert parse(root={"torch_dtype": "float32"}, text={"dtype": None}).dtype == "float32"
    assert parse(text={"dtype": None}).dtype == "bfloat16"


@pytest.mark.parametrize("text_only", [False, True])
@pytest.mark.parametrize("name", ["0.8b", "27b", "tiny-4b"])
def test_to_hf_is_read_back(name, text_only):
    config = ModelConfig.preset(name)
    assert parse_model_config(json.loads(json.dumps(config.to_hf(text_only=text_only))), {}, source="c") == config


def test_to_dict_is_read_back():
    config = ModelConfig.preset("tiny-27b")
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(UserInputError, match="hidden_size"):
        ModelConfig.from_dict({k: v for k, v in config.to_dict().items() if k != "hidden_size"})


# ---- refused -------------------------------------------------------------------------------------------------------

MOE = {
    "intermediate_size": None,
    "model_type": "qwen3_5_moe_text",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def test_moe_parses_and_is_refused_by_name(tmp_path):
    edits = {"root": {"model_type": "qwen3_5_moe"}, "text": MOE}
    parsed = parse(**edits)
    assert parsed.moe is not None
    assert (parsed.moe.num_experts, parsed.moe.num_experts_per_tok) == (256, 8)
    with pytest.raises(UserInputError, match=r"config\.json: mixture-of-experts .*256, top 8.*qwen3_5"):
        ModelConfig.from_hf(write(tmp_path, tiny.edited_config("4b-tied", **edits)))


@pytest.mark.parametrize(
    ("root", "text", "message"),
    [
        ({"model_type": "llama"}, {}, r"config\.json: model_type = 'llama' .*supported: qwen3_5, qwen3_5_text"),
        ({"model_type": None}, {}, "model_type is missing"),
        ({}, {"model_type": "qwen3"}, r"text_config\.model_type = 'qwen3'"),
        ({"text_config": None}, {}, "text_config is missing"),
        ({"text_config": [1]}, {}, r"text_config must be dict, got \[1\]"),
        ({}, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({}, {"attention_bias": True}, "attention_bias = true is not supported"),
        ({}, {"attn_output_gate": False}, "attn_output_gate = false is not supported"),
        ({}, {"rope_parameters": {"rope_theta": 1e7, "rope_type": "yarn"}}, "rope_parameters.rope_type = 'yarn'"),
        ({}, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type = 'linear'"),
        ({}, {"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({}, {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 2}}, "partial_rotary_factor"),
        ({}, {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.13}}, "rotary dims .33. must be even"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, r"quantization_config \(fp8\)"),
        ({}, {"quantization_config": {"quant_method": "awq"}}, r"text_config\.quantization_config \(awq\)"),
        ({"quantization_config": {"quant_method": "gptq"}}, {}, r"quantization_config \(gptq\)"),
        ({}, {"num_attention_heads": 7}, r"num_attention_heads \(7\) is not a multiple of num_key_value_heads \(2\)"),
        ({}, {"linear_num_value_heads": 5}, r"linear_num_value_heads \(5\) .* linear_num_key_heads \(2\)"),
        ({}, {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim = 3"),
        ({}, {"hidden_size": None}, r"text_config\.hidden_size is missing"),
        ({}, {"hidden_size": "big"}, r"text_config\.hidden_size must be int, got 'big'"),
        ({}, {"hidden_size": True}, r"text_config\.hidden_size must be int, got True"),
        ({}, {"vocab_size": 0}, r"text_config\.vocab_size must be positive, got 0"),
        ({}, {"num_hidden_layers": 5}, "layer_types has 4 entries but num_hidden_layers is 5"),
        ({}, {"layer_types": ["mamba"] * 4}, r"layer_types\[0\] is 'mamba'"),
        ({}, {"layer_types": ["linear_attention"] * 4}, "no full_attention layer"),
        ({}, {"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({}, {"tie_word_embeddings": "yes"}, r"text_config\.tie_word_embeddings must be bool, got 'yes'"),
        ({}, {"dtype": "int8"}, "dtype 'int8' is not supported"),
        ({}, {"eos_token_id": "</s>"}, r"text_config\.eos_token_id must be a token id"),
        ({}, {"eos_token_id": 512}, r"eos_token_id 512 is not an id below vocab_size \(512\)"),
    ],
)
def test_a_bad_config_is_named_with_its_numbers(tmp_path, root, text, message):
    config = tiny.edited_config("4b-tied", root=root, text=text)
    with pytest.raises(UserInputError, match=message) as caught:
        ModelConfig.from_hf(write(tmp_path, config))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_modelopt_quantisation_is_refused(tmp_path):
    path = write(tmp_path, tiny.hf_config("4b-tied"))
    (path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UserInputError, match=r"hf_quant_config\.json: quantised"):
        ModelConfig.from_hf(path)


def test_a_wrong_directory_is_named(tmp_path):
    with pytest.raises(UserInputError, match=r"'Qwen/Qwen3\.5-4B' does not exist"):
        ModelConfig.from_hf("Qwen/Qwen3.5-4B")
    with pytest.raises(UserInputError, match=r"has no config\.json"):
        ModelConfig.from_hf(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(UserInputError, match="is not a directory"):
        ModelConfig.from_hf(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{\n "a": }', r"is not valid JSON: .*line 2 column 7"),
        (b"[1]", "must hold a JSON object, found list"),
        (b"\xff\xfe{", "is not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON: .*digits"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_malformed_json_is_named(tmp_path, data, message, file):
    write(tmp_path, tiny.hf_config("4b-tied"), GENERATION)
    (tmp_path / file).write_bytes(data)
    with pytest.raises(UserInputError, match=message) as caught:
        ModelConfig.from_hf(tmp_path)
    assert file in str(caught.value)


# ---- presets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "full", "inter", "heads", "linear", "tied"),
    [
        ("0.8b", 1024, 24, 6, 3584, (8, 2), (16, 16), True),
        ("2b", 2048, 24, 6, 6144, (8, 2), (16, 16), True),
        ("4B", 2560, 32, 8, 9216, (16, 4), (16, 32), True),
        ("9b", 4096, 32, 8, 12288, (16, 4), (16, 32), False),
        ("27b", 5120, 64, 16, 17408, (24, 4), (16, 48), False),
    ],
)
def test_presets(name, hidden, layers, full, inter, heads, linear, tied):
    config = ModelConfig.preset(name)
    assert (config.hidden_size, config.num_layers, config.intermediate_size) == (hidden, layers, inter)
    assert (config.num_attention_layers, config.num_gdn_layers) == (full, layers - full)
    assert (config.attention.num_heads, config.attention.num_kv_heads) == heads
    assert (config.gdn.num_k_heads, config.gdn.num_v_heads) == linear
    assert config.tie_word_embeddings is tied
    assert (config.attention.head_dim, config.attention.rotary_dim) == (256, 64)
    assert (config.gdn.head_k_dim, config.gdn.head_v_dim) == (128, 128)
    assert config.vocab_size == 248320


@pytest.mark.parametrize(("name", "ratio"), [("tiny-0.8b", 1), ("tiny-4b", 2), ("tiny-27b", 3)])
def test_tiny_presets_keep_what_kernels_depend_on(name, ratio):
    config, real = ModelConfig.preset(name), ModelConfig.preset(name.removeprefix("tiny-"))
    assert config.gdn.num_v_heads == ratio * config.gdn.num_k_heads
    assert config.attention.num_heads // config.attention.num_kv_heads == (
        real.attention.num_heads // real.attention.num_kv_heads
    )
    assert (config.attention.head_dim, config.gdn.head_k_dim, config.gdn.head_v_dim) == (256, 128, 128)
    assert config.tie_word_embeddings == real.tie_word_embeddings
    assert config.num_attention_layers >= 1 and config.num_gdn_layers >= 3
    assert all(token < config.vocab_size for token in config.eos_token_ids)


def test_preset_overrides():
    config = ModelConfig.preset("4b", num_layers=8, vocab_size=1000)
    assert (config.num_layers, config.num_attention_layers, config.vocab_size) == (8, 2, 1000)
    assert config.eos_token_ids == ()
    with pytest.raises(UserInputError, match="unknown preset '5b'; known: 0.8b, 2b"):
        ModelConfig.preset("5b")
    with pytest.raises(UserInputError, match="unknown field 'hidden'"):
        ModelConfig.preset("4b", hidden=3)


# ---- engine options ------------------------------------------------------------------------------------------------


def test_defaults_are_valid_and_returned():
    config = EngineConfig()
    assert config.validate() is config


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dtype", "fp8", "dtype must be one of auto, bfloat16, float32, got 'fp8'"),
        ("dtype", "float16", "dtype must be one of"),
        ("state_dtype", "float16", "state_dtype must be one of"),
        ("load_format", "gguf", "load_format must be one of"),
        ("decode_overlap", "on", "decode_overlap must be one of"),
        ("scheduler_policy", "fast", "scheduler_policy must be one of"),
        ("scheduler_policy", "slo", "scheduler_policy='slo' is not supported yet"),
        ("scheduler_policy", "throughput", "scheduler_policy='throughput' is not supported yet"),
        ("enable_prefix_caching", True, "enable_prefix_caching=True is not supported yet"),
        ("batch_invariant", True, "batch_invariant=True is not supported yet"),
        ("tensor_parallel_size", 2, "tensor_parallel_size=2 is not supported yet"),
        ("data_parallel_size", 4, "data_parallel_size=4 is not supported yet"),
        ("quantization", "fp8", "quantization='fp8' is not supported yet"),
        ("decode_steps", 4, "decode_steps must be 1 or 8, got 4"),
        ("max_model_len", 1, "max_model_len must be at least 2"),
        ("max_num_seqs", 0, "max_num_seqs must be at least 1, got 0"),
        ("max_num_batched_tokens", 100, "max_num_batched_tokens must be a positive multiple of 64, got 100"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens must be a positive multiple of 64, got 0"),
        ("gpu_memory_utilization", 0.0, "gpu_memory_utilization must be above 0"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization must be above 0"),
        ("num_kv_pages", 0, "num_kv_pages must be at least 1"),
        ("async_chunks", 0, "async_chunks must be at least 1"),
        ("kernels", "", "kernels must be"),
        ("compilation_cache_dir", "", "compilation_cache_dir must be"),
        ("max_num_seqs", 2.0, "max_num_seqs must be int, got 2.0"),
        ("max_num_seqs", True, "max_num_seqs must be int, got True"),
        ("max_model_len", "4k", "max_model_len must be int or None, got '4k'"),
        ("seed", None, "seed must be int, got None"),
        ("gpu_memory_utilization", float("nan"), "gpu_memory_utilization must be above 0"),
        ("overlap_dispatch", 1, "overlap_dispatch must be bool, got 1"),
    ],
)
def test_every_option_is_checked(option, value, message):
    with pytest.raises(UserInputError, match=message):
        dataclasses.replace(EngineConfig(), **{option: value}).validate()


def test_every_option_has_a_check():
    """An option added without a type that the checks know fails here."""
    for field in dataclasses.fields(EngineConfig):
        with pytest.raises(UserInputError, match=f"^{field.name} must be"):
            dataclasses.replace(EngineConfig(), **{field.name: object()}).validate()


def test_activation_dtype():
    model = ModelConfig.preset("tiny-4b")
    assert EngineConfig().activation_dtype(model) == "bfloat16"
    assert EngineConfig(dtype="float32").activation_dtype(model) == "float32"
    assert EngineConfig().activation_dtype(dataclasses.replace(model, dtype="float16")) == "bfloat16"
