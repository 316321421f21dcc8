"""The dense members of the family by name, and shrunken ones for tests and demonstrations.

A checkpoint's own ``config.json`` always wins over these numbers: they serve random weights, benchmarks and tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from qwen35_jax.config import AttentionConfig, GatedDeltaNetConfig, LayerKind, ModelConfig
from qwen35_jax.errors import UserInputError

FULL_ATTENTION_INTERVAL = 4


def layer_pattern(num_layers: int, interval: int = FULL_ATTENTION_INTERVAL) -> tuple[LayerKind, ...]:
    """Kinds of ``num_layers`` layers: every ``interval``-th is full attention, the others Gated DeltaNet."""
    return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers))


def _member(hidden: int, layers: int, intermediate: int, heads: str, linear_heads: str, tied: bool) -> ModelConfig:
    num_heads, num_kv_heads = map(int, heads.split("/"))
    num_k_heads, num_v_heads = map(int, linear_heads.split("/"))
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=248320,
        layer_types=layer_pattern(layers),
        attention=AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads),
        gdn=GatedDeltaNetConfig(num_k_heads=num_k_heads, num_v_heads=num_v_heads),
        tie_word_embeddings=tied,
        eos_token_ids=(248046, 248044),
    )


def _shrink(base: str, layers: int, heads: str, linear_heads: str) -> ModelConfig:
    """A real member with fewer and narrower layers; head sizes, head ratios, tying and layer pattern stay.

    The vocabulary shrinks too (ids stay distinct from EOS ids near its end), so that logits stay small on a CPU.
    """
    small = _member(128, layers, 384, heads, linear_heads, PRESETS[base].tie_word_embeddings)
    return dataclasses.replace(small, vocab_size=2048, eos_token_ids=(2046, 2044))


PRESETS: dict[str, ModelConfig] = {
    "0.8b": _member(1024, 24, 3584, "8/2", "16/16", tied=True),
    "2b": _member(2048, 24, 6144, "8/2", "16/16", tied=True),
    "4b": _member(2560, 32, 9216, "16/4", "16/32", tied=True),
    "9b": _member(4096, 32, 12288, "16/4", "16/32", tied=False),
    "27b": _member(5120, 64, 17408, "24/4", "16/48", tied=False),
}
# Value heads 1x, 2x and 3x the key heads: the three ways in which the members group them.
PRESETS |= {
    "tiny-0.8b": _shrink("0.8b", 4, "4/1", "2/2"),
    "tiny-4b": _shrink("4b", 4, "8/2", "2/4"),
    "tiny-27b": _shrink("27b", 8, "12/2", "2/6"),
}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Looks a preset up and replaces fields; see :meth:`ModelConfig.preset`."""
    config = PRESETS.get(name.lower())
    if config is None:
        raise UserInputError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    if "num_layers" in overrides:
        overrides["layer_types"] = layer_pattern(overrides.pop("num_layers"))
    unknown = sorted(set(overrides) - {field.name for field in dataclasses.fields(ModelConfig)})
    if unknown:
        raise UserInputError(f"preset {name!r}: unknown field {unknown[0]!r}")
    if "vocab_size" in overrides and "eos_token_ids" not in overrides:
        # EOS ids of the preset that the new vocabulary does not hold cannot be generated.
        overrides["eos_token_ids"] = tuple(t for t in config.eos_token_ids if t < overrides["vocab_size"])
    return dataclasses.replace(config, **overrides)
