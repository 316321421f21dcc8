"""Deterministic miniature checkpoints: real family members shrunk in hidden size, layers and heads only.

Head sizes (256 for attention, 128 for the recurrence), the rotary share, the convolution and every switch of the real
configuration stay, so that each kernel that serves the real model serves these as well. The tensors carry genuine
Hugging Face names and layouts.

Needs numpy only, except :func:`write_hf_dir` (safetensors, and ml_dtypes for bfloat16 files).
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 512
PREFIX = "model.language_model."
TEXT_ONLY_PREFIX = "model."


@dataclasses.dataclass(frozen=True)
class _Shrunk:
    """What is changed of a real member; everything else is as published."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    layer_types: str  # one letter a layer: L(inear) or F(ull)


# Hv = Hk, 2 Hk and 3 Hk as in the 0.8B, 4B and 27B; Hk = 2 so that grouped and tiled head orders differ. The second
# has two layers of each kind and a last layer that is not the usual one: `layer_types` must win over the interval.
_MEMBERS = {
    "0.8b": _Shrunk(64, 224, 4, 1, 2, 2, "LLLF"),
    "4b": _Shrunk(128, 448, 8, 2, 2, 4, "LFFL"),
    "27b": _Shrunk(64, 208, 6, 1, 2, 6, "LLLF"),
}
CASES: tuple[str, ...] = tuple(f"{member}-{tie}" for member in _MEMBERS for tie in ("tied", "untied"))


def text_config(case: str) -> dict[str, Any]:
    """The flat text configuration of a case, as `text_config` of a published config.json holds it."""
    member, _, tie = case.partition("-")
    shrunk = _MEMBERS[member]
    kinds = {"L": "linear_attention", "F": "full_attention"}
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": VOCAB_SIZE - 2,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": shrunk.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shrunk.intermediate_size,
        "layer_types": [kinds[letter] for letter in shrunk.layer_types],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": shrunk.linear_num_key_heads,
        "linear_num_value_heads": shrunk.linear_num_value_heads,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": shrunk.num_attention_heads,
        "num_hidden_layers": len(shrunk.layer_types),
        "num_key_value_heads": shrunk.num_key_value_heads,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": tie == "tied",
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def hf_config(case: str, *, text_only: bool = False) -> dict[str, Any]:
    """The config.json of a case.

    Args:
        case: one of :data:`CASES`.
        text_only: the flat layout of a text-only export instead of the full one with `text_config`.
    """
    text = text_config(case)
    if text_only:
        return {"architectures": ["Qwen3_5ForCausalLM"], **text}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": VOCAB_SIZE - 3,
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "video_token_id": VOCAB_SIZE - 4,
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "model_type": "qwen3_5",
            "num_heads": 2,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_start_token_id": VOCAB_SIZE - 6,
        "vision_end_token_id": VOCAB_SIZE - 5,
    }


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Rounds to the nearest bfloat16 (ties to even); the result is float32 and exactly representable in bfloat16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def _to_bf16(x: np.ndarray) -> np.ndarray:
    import ml_dtypes  # not in every environment that imports this module

    return x.astype(ml_dtypes.bfloat16)


def is_float32_tensor(name: str) -> bool:
    """Whether published checkpoints store this tensor in float32 beside bfloat16 matrices."""
    return name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))


def weights(case: str, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of a case: HF name -> float32 array in HF layout (matrices are [out, in]).

    Every value is exactly representable in bfloat16, except those of :func:`is_float32_tensor`, so a bfloat16 file and
    a float32 file hold the same model. Scales keep activations near one, norm weights differ from their neutral value,
    and the decays of the recurrence run from almost none to almost complete within each layer.
    """
    config = text_config(case)
    rng = np.random.default_rng([seed, CASES.index(case)])
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim = k_heads * config["linear_key_head_dim"]
    value_dim = v_heads * config["linear_value_head_dim"]
    conv_dim = 2 * key_dim + value_dim
    out: dict[str, np.ndarray] = {}

    def put(name: str, value: np.ndarray) -> None:
        out[name] = value.astype(np.float32) if is_float32_tensor(name) else round_bf16(value)

    def matrix(name: str, rows: int, cols: int, scale: float = 1.0) -> None:
        put(name, rng.standard_normal((rows, cols)) * (scale / np.sqrt(cols)))

    def vector(name: str, size: int, mean: float, std: float) -> None:
        put(name, mean + std * rng.standard_normal(size))

    matrix(PREFIX + "embed_tokens.weight", config["vocab_size"], hidden, 2.0)
    for i, kind in enumerate(config["layer_types"]):
        layer = f"{PREFIX}layers.{i}."
        vector(layer + "input_layernorm.weight", hidden, 0.02, 0.1)
        vector(layer + "post_attention_layernorm.weight", hidden, -0.02, 0.1)
        if kind == "linear_attention":
            mixer = layer + "linear_attn."
            matrix(mixer + "in_proj_qkv.weight", conv_dim, hidden)
            matrix(mixer + "in_proj_z.weight", value_dim, hidden)
            matrix(mixer + "in_proj_b.weight", v_heads, hidden)
            matrix(mixer + "in_proj_a.weight", v_heads, hidden)
            put(mixer + "conv1d.weight", 0.5 * rng.standard_normal((conv_dim, 1, config["linear_conv_kernel_dim"])))
            decay_rates = np.geomspace(0.01, 16.0, v_heads) * rng.uniform(0.8, 1.0, v_heads)
            put(mixer + "A_log", np.log(rng.permutation(decay_rates)))
            vector(mixer + "dt_bias", v_heads, 0.0, 1.0)
            vector(mixer + "norm.weight", config["linear_value_head_dim"], 1.0, 0.1)
            matrix(mixer + "out_proj.weight", hidden, value_dim)
        else:
            mixer = layer + "self_attn."
            matrix(mixer + "q_proj.weight", 2 * heads * head_dim, hidden)
            matrix(mixer + "k_proj.weight", kv_heads * head_dim, hidden)
            matrix(mixer + "v_proj.weight", kv_heads * head_dim, hidden)
            matrix(mixer + "o_proj.weight", hidden, heads * head_dim)
            vector(mixer + "q_norm.weight", head_dim, 0.3, 0.3)
            vector(mixer + "k_norm.weight", head_dim, 0.2, 0.3)
        matrix(layer + "mlp.gate_proj.weight", inter, hidden)
        matrix(layer + "mlp.up_proj.weight", inter, hidden)
        matrix(layer + "mlp.down_proj.weight", hidden, inter)
    vector(PREFIX + "norm.weight", hidden, 0.05, 0.1)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden, 2.0)
    return out


def token_ids(case: str, length: int, *, seed: int = 0) -> np.ndarray:
    """Random token ids of a case, int32 [length]; a longer sequence of the same seed is not an extension."""
    rng = np.random.default_rng([seed, CASES.index(case), length])
    return rng.integers(0, VOCAB_SIZE, length, dtype=np.int32)


def write_hf_dir(
    path: str | Path,
    case: str,
    *,
    dtype: str = "bfloat16",
    shards: int = 1,
    text_only: bool = False,
    mixed_dtypes: bool = True,
    skipped_tensors: bool = False,
    seed: int = 0,
    tensors: Mapping[str, np.ndarray] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a case as a Hugging Face model directory (without a tokenizer) and returns its path.

    Args:
        path: the directory, made if absent.
        case: one of :data:`CASES`.
        dtype: "bfloat16" or "float32", the dtype of the file's matrices and of `dtype` in config.json.
        shards: 1 writes model.safetensors, more write that many shards and an index.
        text_only: flat config.json and the prefix `model.` of a text-only export.
        mixed_dtypes: keep the tensors of :func:`is_float32_tensor` in float32 in a bfloat16 file, as published files
            do; False rounds them to bfloat16.
        skipped_tensors: add small `model.visual.*` and `mtp.*` tensors, which a text engine must skip.
        seed: seed of the weights.
        tensors: HF names (of the full export) -> arrays to write instead of :func:`weights`.
        config: config.json to write instead of :func:`hf_config`.
    """
    from safetensors.numpy import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = dict(weights(case, seed=seed) if tensors is None else tensors)
    if skipped_tensors:
        tensors["model.visual.blocks.0.norm1.weight"] = np.ones(32, np.float32)
        tensors["model.visual.patch_embed.proj.bias"] = np.zeros(32, np.float32)
        tensors["mtp.fc.weight"] = np.ones((4, 8), np.float32)
        tensors["mtp.layers.0.mlp.up_proj.weight"] = np.ones((4, 8), np.float32)
    stored: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        keep = dtype == "float32" or (mixed_dtypes and is_float32_tensor(name))
        if text_only and name.startswith(PREFIX):
            name = TEXT_ONLY_PREFIX + name.removeprefix(PREFIX)
        stored[name] = np.ascontiguousarray(value if keep else _to_bf16(value))

    if config is None:
        config = hf_config(case, text_only=text_only)
        config.get("text_config", config)["dtype"] = dtype
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    eos = [VOCAB_SIZE - 2, VOCAB_SIZE - 1]
    generation = {"do_sample": True, "eos_token_id": eos, "temperature": 1.0, "top_k": 20, "top_p": 0.95}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")

    metadata = {"format": "pt"}
    if shards == 1:
        save_file(stored, path / "model.safetensors", metadata=metadata)
        return path
    names = list(stored)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: stored[name] for name in part}, path / file, metadata=metadata)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(value.nbytes for value in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return path


def edited_config(case: str, *, root: Mapping[str, Any] | None = None, text: Mapping[str, Any] | None = None) -> dict:
    """The full config.json of a case with some keys replaced; a value of None removes the key."""
    config = copy.deepcopy(hf_config(case))
    for target, edits in ((config, root), (config["text_config"], text)):
        for key, value in (edits or {}).items():
            if value is None:
                target.pop(key, None)
            else:
                target[key] = value
    return config
