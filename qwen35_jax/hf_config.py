"""Hugging Face ``config.json`` of the Qwen3.5 family to :class:`ModelConfig` and back.

Everything a text decoder depends on is read and checked; what the implementation cannot do is refused by name, never
ignored. Nothing is guessed: a size that the file does not give is an error that names it.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Any

from qwen35_jax.config import AttentionConfig, GatedDeltaNetConfig, ModelConfig, MoeConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.presets import layer_pattern

_log = logging.getLogger(__name__)

DENSE_MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
MOE_MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
# NVIDIA's quantiser writes its settings here rather than into config.json.
MODELOPT_FILE = "hf_quant_config.json"


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON file that must hold an object.

    Raises:
        UserInputError: unreadable, not UTF-8, not JSON (with line and column) or not an object; names the file.
    """
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UserInputError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserInputError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise UserInputError(
            f"{path} is not valid JSON: {error.msg} (line {error.lineno} column {error.colno})"
        ) from error
    except RecursionError as error:
        raise UserInputError(f"{path} is not valid JSON: nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise UserInputError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserInputError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def check_model_dir(model_dir: str | os.PathLike[str]) -> pathlib.Path:
    """The path as given, if it is a directory.

    Raises:
        UserInputError: it does not exist or is not a directory.
    """
    path = pathlib.Path(model_dir)
    if not path.exists():
        raise UserInputError(f"model directory {str(path)!r} does not exist (models are not downloaded by name)")
    if not path.is_dir():
        raise UserInputError(f"model path {str(path)!r} is not a directory")
    return path


def read_model_config(model_dir: str | os.PathLike[str]) -> ModelConfig:
    """Reads and checks the configuration of a Hugging Face directory; see :meth:`ModelConfig.from_hf`."""
    path = check_model_dir(model_dir)
    config_path = path / CONFIG_FILE
    if not config_path.is_file():
        raise UserInputError(f"{str(path)!r} has no {CONFIG_FILE}: not a Hugging Face model directory")
    root = read_json_object(config_path)
    generation_path = path / GENERATION_CONFIG_FILE
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    if (path / MODELOPT_FILE).is_file():
        raise UserInputError(f"{path / MODELOPT_FILE}: quantised checkpoints are not supported yet (modelopt)")
    config = parse_model_config(root, generation, source=str(config_path))
    refuse_unsupported(config, source=str(config_path))
    return config


def refuse_unsupported(config: ModelConfig, *, source: str) -> None:
    """Refuses models that parse but do not run yet.

    Raises:
        UserInputError: the model is a mixture of experts, or lacks one of the two layer kinds.
    """
    if config.moe is not None:
        raise UserInputError(
            f"{source}: mixture-of-experts models are not supported yet (num_experts = {config.moe.num_experts}, "
            f"top {config.moe.num_experts_per_tok}); supported: the dense members ({', '.join(DENSE_MODEL_TYPES)})"
        )
    for kind, count in (
        ("linear_attention", config.num_gdn_layers),
        ("full_attention", config.num_attention_layers),
    ):
        if count == 0:
            raise UserInputError(f"{source}: layer_types has no {kind} layer; both kinds are needed")


class _Fields:
    """Typed access to a JSON object whose errors name the file and the field."""

    def __init__(self, values: dict[str, Any], source: str, prefix: str = ""):
        self.values = values
        self.source = source
        self.prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def error(self, name: str, message: str) -> UserInputError:
        return UserInputError(f"{self.source}: {self.prefix}{name} {message}")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The value of a field, checked; ``default`` (None: required) where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, f"must be {kind.__name__}, got {value!r}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, int, default)
        if value < 1:
            raise self.error(name, f"must be positive, got {value}")
        return value

    def child(self, name: str) -> _Fields:
        return _Fields(self.get(name, dict), self.source, f"{self.prefix}{name}.")


def parse_model_config(root_values: dict[str, Any], generation: dict[str, Any], *, source: str) -> ModelConfig:
    """Parses the objects of ``config.json`` and ``generation_config.json``.

    Mixture-of-experts members parse into a config with ``moe`` set; :func:`refuse_unsupported` says no to them.

    Args:
        root_values: the object of config.json, nested (``text_config``) or flat.
        generation: the object of generation_config.json; empty where there is none.
        source: name of the file for messages.

    Raises:
        UserInputError: a field is missing, wrong or not supported.
    """
    root = _Fields(root_values, source)
    text = _text_fields(root)
    for fields in (root, text):
        _refuse_quantised(fields)
    if text.get("hidden_act", str, "silu") != "silu":
        raise text.error("hidden_act", f"= {text.values['hidden_act']!r} is not supported (only 'silu')")
    if text.get("attention_bias", bool, False):
        raise text.error("attention_bias", "= true is not supported")
    if not text.get("attn_output_gate", bool, True):
        raise text.error("attn_output_gate", "= false is not supported")

    moe = None
    if _model_type(root) in MOE_MODEL_TYPES or _model_type(text) in MOE_MODEL_TYPES:
        moe = MoeConfig(
            num_experts=text.size("num_experts"),
            num_experts_per_tok=text.size("num_experts_per_tok"),
            moe_intermediate_size=text.size("moe_intermediate_size"),
            shared_expert_intermediate_size=text.size("shared_expert_intermediate_size"),
        )
    head_dim = text.size("head_dim", 256)
    rope_theta, rotary_dim = _rope(text, head_dim)
    try:
        return ModelConfig(
            hidden_size=text.size("hidden_size"),
            intermediate_size=moe.shared_expert_intermediate_size if moe else text.size("intermediate_size"),
            vocab_size=text.size("vocab_size"),
            layer_types=_layer_types(text),
            attention=AttentionConfig(
                num_heads=text.size("num_attention_heads"),
                num_kv_heads=text.size("num_key_value_heads"),
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                rope_theta=rope_theta,
            ),
            gdn=GatedDeltaNetConfig(
                num_k_heads=text.size("linear_num_key_heads"),
                num_v_heads=text.size("linear_num_value_heads"),
                head_k_dim=text.size("linear_key_head_dim", 128),
                head_v_dim=text.size("linear_value_head_dim", 128),
                conv_kernel=text.size("linear_conv_kernel_dim", 4),
            ),
            rms_norm_eps=text.get("rms_norm_eps", float, 1e-6),
            max_position_embeddings=text.size("max_position_embeddings"),
            tie_word_embeddings=_tied(root, text),
            dtype=_dtype(root, text),
            eos_token_ids=_eos_ids(root, text, generation),
            moe=moe,
        )
    except UserInputError as error:
        message = str(error)
        raise (error if message.startswith(source) else UserInputError(f"{source}: {message}")) from None


def _model_type(fields: _Fields) -> str:
    return fields.get("model_type", str, "") or ""


def _text_fields(root: _Fields) -> _Fields:
    """The object that holds the text decoder: ``text_config`` or, in text-only exports, the root itself."""
    supported = DENSE_MODEL_TYPES + MOE_MODEL_TYPES
    if "model_type" not in root:
        raise root.error("model_type", f"is missing (supported: {', '.join(DENSE_MODEL_TYPES)})")
    candidates = [root]
    if "text_config" in root:
        candidates.append(root.child("text_config"))
    elif "hidden_size" not in root:
        raise root.error("text_config", "is missing, and the file has no hidden_size of its own")
    for fields in candidates:
        if _model_type(fields) not in supported and not (fields is not root and not _model_type(fields)):
            raise fields.error(
                "model_type", f"= {_model_type(fields)!r} is not supported (supported: {', '.join(DENSE_MODEL_TYPES)})"
            )
    return candidates[-1]


def _refuse_quantised(fields: _Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        settings = fields.values.get(name)
        if settings:
            method = settings.get("quant_method", "unknown method") if isinstance(settings, dict) else settings
            raise fields.error(name, f"({method}): quantised checkpoints are not supported yet")


def _layer_types(text: _Fields) -> tuple[Any, ...]:
    num_layers = text.size("num_hidden_layers")
    if "layer_types" not in text:
        return layer_pattern(num_layers, text.size("full_attention_interval", 4))
    kinds = tuple(text.get("layer_types", list))
    if len(kinds) != num_layers:
        raise text.error("layer_types", f"has {len(kinds)} entries but num_hidden_layers is {num_layers}")
    return kinds


def _rope(text: _Fields, head_dim: int) -> tuple[float, int]:
    """RoPE base and rotated dims, from ``rope_parameters`` / ``rope_scaling`` or the top of the text config.

    ``mrope_*`` keys place image patches; for text they change nothing and are not read.
    """
    groups = [text.child(name) for name in ("rope_parameters", "rope_scaling") if name in text]
    for group in groups:
        for name in ("rope_type", "type"):
            if group.get(name, str, "default") != "default":
                raise group.error(name, f"= {group.values[name]!r} is not supported (only 'default')")
    values = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        holder = next((fields for fields in (*groups, text) if name in fields), None)
        values[name] = holder.get(name, float) if holder else None
    if values["rope_theta"] is None:
        raise text.error("rope_theta", "is missing (neither in rope_parameters nor beside it)")
    factor = 0.25 if values["partial_rotary_factor"] is None else values["partial_rotary_factor"]
    if not 0 < factor <= 1:
        raise text.error("partial_rotary_factor", f"must be above 0 and at most 1, got {factor}")
    return values["rope_theta"], int(head_dim * factor)


def _tied(root: _Fields, text: _Fields) -> bool:
    flags = {f.prefix: f.get("tie_word_embeddings", bool) for f in (root, text) if "tie_word_embeddings" in f}
    if len(set(flags.values())) > 1:
        _log.warning(
            "%s: tie_word_embeddings is %s at the root and %s in text_config; text_config is taken",
            root.source,
            str(flags[root.prefix]).lower(),
            str(flags[text.prefix]).lower(),
        )
    return flags.get(text.prefix, flags.get(root.prefix, False))


def _dtype(root: _Fields, text: _Fields) -> str:
    for fields in (text, root):
        for name in ("dtype", "torch_dtype"):
            if name in fields:
                return fields.get(name, str).removeprefix("torch.")
    return "bfloat16"


def _eos_ids(root: _Fields, text: _Fields, generation: dict[str, Any]) -> tuple[int, ...]:
    """Union of the EOS ids of generation_config.json, the text config and the root, in that order."""
    ids: dict[int, None] = {}
    places = [
        ("generation_config.json: eos_token_id", generation.get("eos_token_id")),
        (f"{text.prefix}eos_token_id", text.values.get("eos_token_id")),
        ("eos_token_id", root.values.get("eos_token_id")),
    ]
    for place, value in places:
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int):
                raise UserInputError(f"{root.source}: {place} must be a token id or a list of them, got {value!r}")
            ids[token] = None
    return tuple(ids)


def to_hf_dict(config: ModelConfig, *, text_only: bool = False) -> dict[str, Any]:
    """The ``config.json`` object of a dense model; see :meth:`ModelConfig.to_hf`."""
    eos: int | list[int] | None = list(config.eos_token_ids) or None
    if eos is not None and len(eos) == 1:
        eos = eos[0]
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": config.dtype,
        "eos_token_id": eos,
        "head_dim": config.attention.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "linear_conv_kernel_dim": config.gdn.conv_kernel,
        "linear_key_head_dim": config.gdn.head_k_dim,
        "linear_num_key_heads": config.gdn.num_k_heads,
        "linear_num_value_heads": config.gdn.num_v_heads,
        "linear_value_head_dim": config.gdn.head_v_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "qwen3_5_text",
        "num_attention_heads": config.attention.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.attention.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": config.attention.rotary_dim / config.attention.head_dim,
            "rope_theta": config.attention.rope_theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    if text_only:
        return {"architectures": ["Qwen3_5ForCausalLM"], **text}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
