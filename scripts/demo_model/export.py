"""Writes a trained demo model as a Hugging Face directory.

    python -m scripts.demo_model.export --run_dir=DIR --tokenizer=DIR --output=DIR

config.json and generation_config.json (the tokenizer's own, if they name this model), model.safetensors (bfloat16, the
family's tensor names; ``A_log`` and the norm of the recurrence in float32, as published files have them) and the
tokenizer's files. --output, which may be the tokenizer's directory, keeps other files, such as the model card.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from qwen35_jax.cli.common import CommandLine, run_command, run_with_flags
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.hf_config import CONFIG_FILE, GENERATION_CONFIG_FILE
from qwen35_jax.name_table import FLOAT32_INITS, FULL_PREFIX, Recipe, parameter_table
from scripts.demo_model import architecture, checkpointing

WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def parameters_by_path(config: ModelConfig, leaves: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Stacked leaves of the training state taken apart: float32 arrays by the parameter's path."""
    out = {}
    for leaf in architecture.training_pack(config).leaves:
        array = np.asarray(leaves[leaf.name], np.float32)
        for index, path in enumerate(leaf.paths):
            out[path] = array[index] if leaf.stacked else array
    return out


def to_hf_tensors(config: ModelConfig, get: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """The family's tensors out of the model's parameters: what the loader does, backwards.

    Args:
        config: the model's numbers.
        get: the parameter of a path, any float dtype.

    Returns:
        Arrays by their full names, bfloat16, or float32 where published files keep it.
    """
    tensors = {}
    for recipe in parameter_table(config).values():
        dtype = np.float32 if recipe.init in FLOAT32_INITS else ml_dtypes.bfloat16
        parts = _take_apart(config, recipe, np.asarray(get(recipe.path)))
        for source, part in zip(recipe.sources, parts, strict=True):
            if part.shape != source.shape:
                raise ValueError(f"{source.name}: shape {part.shape}, expected {source.shape}")
            tensors[source.full_name(FULL_PREFIX)] = np.ascontiguousarray(part.astype(dtype))
    return tensors


def _take_apart(config: ModelConfig, recipe: Recipe, value: np.ndarray) -> list[np.ndarray]:
    """The tensors of a parameter, in the order of its sources."""
    match recipe.assembly:
        case "rows" | "vector":
            return [value]
        case "taps":  # [taps, channels] to [channels, 1, taps]
            return [value.T[:, None, :]]
        case "columns" | "gated_attention":
            bounds = np.cumsum([source.shape[0] for source in recipe.sources])[:-1]
            parts = [part.T for part in np.split(value, bounds, axis=1)]  # [out, in] each
            if recipe.assembly == "gated_attention":  # all q and all gate: heads of q and gate in turns
                heads = parts[0].reshape(2, config.attention.num_heads, -1, parts[0].shape[-1])
                parts[0] = heads.transpose(1, 0, 2, 3).reshape(parts[0].shape)
            return parts
    raise ValueError(f"{recipe.path}: no way back from {recipe.assembly!r}")


def write_hf_dir(
    output: pathlib.Path, config: ModelConfig, leaves: Mapping[str, Any], tokenizer_dir: pathlib.Path | None = None
) -> int:
    """Writes the directory; files of the same names are replaced, others stay.

    Args:
        output: made if absent.
        config: the model's numbers.
        leaves: parameters by the name of the training state's leaf.
        tokenizer_dir: the tokenizer's files are copied from here, unless it is ``output`` itself; None copies none.

    Returns:
        Bytes of the weights.

    Raises:
        UserInputError: the tokenizer's directory lacks a file.
    """
    output.mkdir(parents=True, exist_ok=True)
    extra: dict[str, Any] = {}
    generation: dict[str, Any] = {"do_sample": False, "eos_token_id": list(config.eos_token_ids)}
    if tokenizer_dir is not None:
        ids = _added_ids(tokenizer_dir)
        for name in ("image", "video"):
            extra[f"{name}_token_id"] = ids.get(f"<|{name}_pad|>")
        for name in ("start", "end"):
            extra[f"vision_{name}_token_id"] = ids.get(f"<|vision_{name}|>")
        extra = {name: value for name, value in extra.items() if value is not None}
        generation |= {"pad_token_id": ids.get(architecture.END_TOKENS[1])}
        for name in TOKENIZER_FILES:
            if not (tokenizer_dir / name).is_file():
                raise UserInputError(f"{tokenizer_dir / name}: no such file")
            if tokenizer_dir.resolve() != output.resolve():
                shutil.copyfile(tokenizer_dir / name, output / name)
    if tokenizer_dir is None or not _describes(tokenizer_dir, config):
        _write_json(output / CONFIG_FILE, config.to_hf() | extra)
        _write_json(output / GENERATION_CONFIG_FILE, generation)
    elif tokenizer_dir.resolve() != output.resolve():
        for name in (CONFIG_FILE, GENERATION_CONFIG_FILE):
            shutil.copyfile(tokenizer_dir / name, output / name)
    by_path = parameters_by_path(config, leaves)
    partial = output / f".{WEIGHTS}.partial"
    save_file(to_hf_tensors(config, by_path.__getitem__), partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, output / WEIGHTS)
    return (output / WEIGHTS).stat().st_size


def _describes(tokenizer_dir: pathlib.Path, config: ModelConfig) -> bool:
    """Whether the tokenizer's directory holds the configurations of this very model already."""
    named = all((tokenizer_dir / name).is_file() for name in (CONFIG_FILE, GENERATION_CONFIG_FILE))
    return named and ModelConfig.from_hf(tokenizer_dir) == config


def _added_ids(tokenizer_dir: pathlib.Path) -> dict[str, int]:
    path = tokenizer_dir / TOKENIZER_FILES[0]
    try:
        return {token["content"]: token["id"] for token in json.loads(path.read_text("utf-8"))["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserInputError(f"{path}: not a tokenizer ({error})") from error


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def load_run(run_dir: pathlib.Path) -> tuple[ModelConfig, dict[str, jax.Array], dict[str, Any]]:
    """The newest checkpoint of a run: model, parameters by leaf, provenance.

    Raises:
        UserInputError: the run has no checkpoint, or it does not hold the model that it names.
    """
    checkpoint = checkpointing.latest(run_dir)
    if checkpoint is None:
        raise UserInputError(f"{str(run_dir)!r} has no checkpoint")
    provenance = checkpointing.read_provenance(checkpoint)
    config = ModelConfig.from_dict(provenance["model_config"])
    shapes = {leaf.name: leaf.spec for leaf in architecture.training_pack(config).leaves}
    params = checkpointing.restore(checkpoint, {"params": shapes}, partial=True)["params"]
    return config, params, provenance


def _run(line: CommandLine) -> int:
    line.require("run_dir", "tokenizer", "output")
    config, params, provenance = load_run(pathlib.Path(line.run_dir))
    tokenizer_dir = pathlib.Path(line.tokenizer)
    trained_with = provenance.get("tokenizer_sha256")
    if trained_with not in (None, checkpointing.file_digest(tokenizer_dir / TOKENIZER_FILES[0])):
        raise UserInputError(f"{tokenizer_dir}: not the tokenizer that the model was trained with")
    size = write_hf_dir(pathlib.Path(line.output), config, params, tokenizer_dir)
    print(f"{line.output}: step {provenance['step']}, {size / 1e6:.2f} MB of weights")
    return 0


def main(argv: Sequence[str]) -> int:
    usage = "python -m scripts.demo_model.export --run_dir=DIR --tokenizer=DIR --output=DIR"
    line = CommandLine(usage, __doc__ or "")
    line.group("Export")
    line.define("str", "run_dir", None, "Directory of the training run.")
    line.define("str", "tokenizer", None, "Directory of the tokenizer that it was trained with.")
    line.define("str", "output", None, "Directory to write.")
    return run_with_flags(line, argv, _run)


if __name__ == "__main__":
    run_command(main)
