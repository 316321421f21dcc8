"""The demo model's numbers and its first weights."""

from __future__ import annotations

import json
import math
import pathlib
import zlib

import jax.numpy as jnp
import numpy as np

from qwen35_jax.config import AttentionConfig, GatedDeltaNetConfig, ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.name_table import Recipe, parameter_table
from qwen35_jax.params import ParamPack
from qwen35_jax.presets import layer_pattern

VOCAB_MULTIPLE = 128
INIT_STDDEV = 0.02
RESIDUAL_OUTPUTS = ("out_proj", "o_proj", "mlp.down")
MAX_POSITIONS = 8192
END_TOKENS = ("<|im_end|>", "<|endoftext|>")


def demo_config(vocab_size: int, eos_token_ids: tuple[int, ...] = (), *, intermediate_size: int = 352) -> ModelConfig:
    """About 5.6 million parameters in the family's pattern, with the head sizes of real members.

    Args:
        vocab_size: ids of the tokenizer; rows are padded to a multiple of 128.
        eos_token_ids: ids that end a text.
        intermediate_size: width of the MLPs.
    """
    return ModelConfig(
        hidden_size=256,
        intermediate_size=intermediate_size,
        vocab_size=-(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        layer_types=layer_pattern(8),
        attention=AttentionConfig(num_heads=2, num_kv_heads=1),
        gdn=GatedDeltaNetConfig(num_k_heads=1, num_v_heads=2),
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        eos_token_ids=eos_token_ids,
    )


def config_of_tokenizer(tokenizer_dir: pathlib.Path, *, intermediate_size: int = 352) -> ModelConfig:
    """The demo model for the tokenizer of a directory.

    Raises:
        UserInputError: no tokenizer.json there, or it lacks the tokens that end a turn and a text.
    """
    path = tokenizer_dir / "tokenizer.json"
    try:
        values = json.loads(path.read_text("utf-8"))
        ids = dict(values["model"]["vocab"])
        ids |= {token["content"]: token["id"] for token in values["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserInputError(f"{path}: not a tokenizer ({error})") from error
    missing = [token for token in END_TOKENS if token not in ids]
    if missing:
        raise UserInputError(f"{path}: has no token {missing[0]}")
    ends = tuple(ids[token] for token in END_TOKENS)
    return demo_config(max(ids.values()) + 1, ends, intermediate_size=intermediate_size)


def initial_params(pack: ParamPack, seed: int) -> dict[str, np.ndarray]:
    """First weights, float32 arrays by the name of the pack's leaf.

    Matrices and the embedding are normal with standard deviation 0.02, those that write to the residual stream smaller
    by the root of the number of writers; norms start neutral; convolution taps are uniform in +-1/2. The decays are
    those of the published recipe: rates uniform in 1 .. 16, time steps even in their logarithm over two decades, so
    that heads forget over anything from one token to a thousand. A parameter depends on the seed and its path alone.
    """
    recipes = parameter_table(pack.config)
    values = {path: _draw(recipes[path], spec.shape, pack.config.num_layers, seed) for path, spec in pack.specs.items()}
    return {
        leaf.name: np.stack([values[path] for path in leaf.paths]) if leaf.stacked else values[leaf.paths[0]]
        for leaf in pack.leaves
    }


def _draw(recipe: Recipe, shape: tuple[int, ...], num_layers: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed % (1 << 64), zlib.crc32(recipe.path.encode())])
    match recipe.init:
        case "matrix" | "embedding":
            scale = (2 * num_layers) ** -0.5 if recipe.path.endswith(RESIDUAL_OUTPUTS) else 1.0
            value = INIT_STDDEV * scale * rng.standard_normal(shape)
        case "taps":
            value = rng.uniform(-(shape[0] ** -0.5), shape[0] ** -0.5, shape)
        case "near_zero":
            value = np.zeros(shape)
        case "near_one":
            value = np.ones(shape)
        case "decay":
            value = np.log(rng.uniform(1.0, 16.0, shape))
        case "step_bias":  # softplus(bias) is the time step
            step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))
            value = step + np.log(-np.expm1(-step))
        case _:
            raise ValueError(f"{recipe.path}: no first weights for {recipe.init!r}")
    return value.astype(np.float32)


def decayed(pack: ParamPack) -> dict[str, bool]:
    """Which leaves weight decay touches: matrices and the embedding."""
    recipes = parameter_table(pack.config)
    return {leaf.name: recipes[leaf.paths[0]].init in ("matrix", "embedding") for leaf in pack.leaves}


def training_pack(config: ModelConfig) -> ParamPack:
    """The layout of the float32 weights that training keeps."""
    return ParamPack(config, dtype=jnp.float32, kernels="reference")
