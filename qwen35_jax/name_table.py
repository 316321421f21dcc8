"""The one table between Hugging Face tensors and the model's parameters.

Each parameter of the module names the tensors that it is made of and how they are put together. Loading, completeness
checks and random weights all follow this table; a test holds it equal to the module's own parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from qwen35_jax.config import ModelConfig

FULL_PREFIX = "model.language_model."  # released checkpoints, which hold the vision tower as well
TEXT_ONLY_PREFIX = "model."  # exports of the text model alone
LM_HEAD = "lm_head.weight"  # at the root in both
# Parts of released checkpoints that text generation does not use: the vision tower and the multi-token predictor.
SKIPPED_PREFIXES = ("model.visual.", "mtp.")

Assembly = Literal["rows", "columns", "gated_attention", "taps", "vector"]
Init = Literal["matrix", "embedding", "taps", "near_zero", "near_one", "decay", "step_bias"]
# Stored in float32 by released files whatever the other tensors are: A_log and the norm of the recurrence.
FLOAT32_INITS: tuple[Init, ...] = ("decay", "near_one")


@dataclasses.dataclass(frozen=True)
class Source:
    """A Hugging Face tensor: its name without the prefix of the text model (``lm_head`` has none), and its shape."""

    name: str
    shape: tuple[int, ...]

    def full_name(self, prefix: str) -> str:
        """The name in a checkpoint with this prefix."""
        return self.name if self.name == LM_HEAD else prefix + self.name


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a parameter is made.

    Attributes:
        path: the parameter's path in the module, for example ``layers.0.mixer.in_proj``.
        sources: the tensors that it holds, in order.
        assembly: how they are joined. "rows": as it is. "columns": each ``[out, in]`` transposed, side by side.
            "gated_attention": like "columns", after the rows of the first source, which alternate between q and gate
            by head, are sorted into all q and all gate. "taps": ``[channels, 1, taps]`` to ``[taps, channels]``.
            "vector": as it is, fp32 in memory.
        init: how random weights are drawn.
    """

    path: str
    sources: tuple[Source, ...]
    assembly: Assembly
    init: Init


def parameter_table(config: ModelConfig) -> dict[str, Recipe]:
    """The recipes of all parameters of a dense model, by path."""
    hidden, vocab = config.hidden_size, config.vocab_size
    recipes = [Recipe("embed", (Source("embed_tokens.weight", (vocab, hidden)),), "rows", "embedding")]
    for index, kind in enumerate(config.layer_types):
        mixer = _gdn(config) if kind == "linear_attention" else _attention(config)
        for recipe in (*_block(config), *mixer):
            recipes.append(_in_layer(recipe, index))
    recipes.append(_vector("final_norm", "norm.weight", hidden, "near_zero"))
    if not config.tie_word_embeddings:
        recipes.append(Recipe("lm_head", (Source(LM_HEAD, (vocab, hidden)),), "columns", "embedding"))
    return {recipe.path: recipe for recipe in recipes}


def _in_layer(recipe: Recipe, index: int) -> Recipe:
    sources = tuple(Source(f"layers.{index}.{source.name}", source.shape) for source in recipe.sources)
    return dataclasses.replace(recipe, path=f"layers.{index}.{recipe.path}", sources=sources)


def _vector(path: str, name: str, size: int, init: Init) -> Recipe:
    return Recipe(path, (Source(name, (size,)),), "vector", init)


def _columns(path: str, sources: dict[str, tuple[int, int]], assembly: Assembly = "columns") -> Recipe:
    return Recipe(path, tuple(Source(name, shape) for name, shape in sources.items()), assembly, "matrix")


def _block(config: ModelConfig) -> list[Recipe]:
    hidden, inter = config.hidden_size, config.intermediate_size
    return [
        _vector("input_norm", "input_layernorm.weight", hidden, "near_zero"),
        _vector("post_norm", "post_attention_layernorm.weight", hidden, "near_zero"),
        _columns("mlp.gate_up", {f"mlp.{half}_proj.weight": (inter, hidden) for half in ("gate", "up")}),
        _columns("mlp.down", {"mlp.down_proj.weight": (hidden, inter)}),
    ]


def _gdn(config: ModelConfig) -> list[Recipe]:
    hidden, gdn, hf = config.hidden_size, config.gdn, "linear_attn"
    inputs = {"qkv": gdn.conv_dim, "z": gdn.value_dim, "b": gdn.num_v_heads, "a": gdn.num_v_heads}
    taps = Source(f"{hf}.conv1d.weight", (gdn.conv_dim, 1, gdn.conv_kernel))
    return [
        _columns("mixer.in_proj", {f"{hf}.in_proj_{name}.weight": (size, hidden) for name, size in inputs.items()}),
        Recipe("mixer.conv_weight", (taps,), "taps", "taps"),
        _vector("mixer.A_log", f"{hf}.A_log", gdn.num_v_heads, "decay"),
        _vector("mixer.dt_bias", f"{hf}.dt_bias", gdn.num_v_heads, "step_bias"),
        _vector("mixer.norm", f"{hf}.norm.weight", gdn.head_v_dim, "near_one"),
        _columns("mixer.out_proj", {f"{hf}.out_proj.weight": (hidden, gdn.value_dim)}),
    ]


def _attention(config: ModelConfig) -> list[Recipe]:
    hidden, attention, hf = config.hidden_size, config.attention, "self_attn"
    q_dim, kv_dim = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    inputs = {"q": 2 * q_dim, "k": kv_dim, "v": kv_dim}  # q_proj holds the output gate too
    sources = {f"{hf}.{name}_proj.weight": (size, hidden) for name, size in inputs.items()}
    return [
        _columns("mixer.qkv_proj", sources, "gated_attention"),
        _vector("mixer.q_norm", f"{hf}.q_norm.weight", attention.head_dim, "near_zero"),
        _vector("mixer.k_norm", f"{hf}.k_norm.weight", attention.head_dim, "near_zero"),
        _columns("mixer.o_proj", {f"{hf}.o_proj.weight": (hidden, q_dim)}),
    ]
