"""Writes a checkpoint of random weights in genuine Hugging Face layout, a block of a tensor at a time.

    python scripts/make_random_checkpoint.py --preset=4b --output=DIR

config.json, generation_config.json and sharded safetensors with an index, as released checkpoints have them; memory
stays small however large the model. A tensor's values depend on the seed and its name only. There is no tokenizer
unless ``--tokenizer_from`` copies one.
"""

import dataclasses
import json
import math
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from qwen35_jax.cli.common import CommandLine, run_command, run_with_flags
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.hf_config import CONFIG_FILE, GENERATION_CONFIG_FILE, read_json_object
from qwen35_jax.name_table import FLOAT32_INITS, FULL_PREFIX, Recipe, Source, parameter_table
from qwen35_jax.presets import PRESETS
from qwen35_jax.progress import Progress, ProgressFn
from qwen35_jax.safetensors_files import INDEX_FILE
from qwen35_jax.weights import ByteProgress, draw_small, matrix_scale

NUMPY_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
FILE_DTYPES = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", GENERATION_CONFIG_FILE),
)
BLOCK_VALUES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to be written: its full name, its source and recipe, its dtype name."""

    name: str
    source: Source
    recipe: Recipe
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.source.shape) * np.dtype(NUMPY_DTYPES[self.dtype]).itemsize

    def blocks(self, seed: int) -> Iterator[np.ndarray]:
        """The values, in blocks of whole rows."""
        if self.recipe.init not in ("matrix", "embedding"):
            yield draw_small(self.recipe, self.source.shape, seed).astype(NUMPY_DTYPES[self.dtype])
            return
        rng = np.random.default_rng([seed % (1 << 64), zlib.crc32(self.source.name.encode())])
        rows, columns = self.source.shape
        bound = np.float32(matrix_scale(self.recipe.init, columns) * math.sqrt(3.0))
        step = max(1, BLOCK_VALUES // columns)
        for start in range(0, rows, step):
            values = rng.random((min(step, rows - start), columns), np.float32)
            values *= 2 * bound
            values -= bound
            yield values.astype(NUMPY_DTYPES[self.dtype])


def list_tensors(config: ModelConfig) -> list[Tensor]:
    """All tensors of the model, in the order of the file."""
    return [
        Tensor(
            source.full_name(FULL_PREFIX),
            source,
            recipe,
            "float32" if recipe.init in FLOAT32_INITS else config.dtype,
        )
        for recipe in parameter_table(config).values()
        for source in recipe.sources
    ]


def split_shards(tensors: list[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """Consecutive tensors in shards of at most ``max_bytes``; a larger tensor has a shard of its own."""
    shards, size = [[]], 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def write_shard(path: pathlib.Path, tensors: list[Tensor], seed: int, report: ByteProgress) -> None:
    """Writes one safetensors file: the header, then block after block."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": FILE_DTYPES[tensor.dtype],
            "shape": tensor.source.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for block in tensor.blocks(seed):
                data = np.ascontiguousarray(block).view(np.uint8)
                file.write(data)
                report.add(data.size)


def write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def copy_tokenizer(source: pathlib.Path, target: pathlib.Path, config: ModelConfig) -> ModelConfig:
    """Copies tokenizer files; the model takes the EOS ids of the directory's generation config, if it has one."""
    from tokenizers import Tokenizer

    if not (source / "tokenizer.json").is_file():
        raise UserInputError(f"tokenizer_from: {str(source)!r} has no tokenizer.json")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    last = max(Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab().values())
    if last >= config.vocab_size:
        raise UserInputError(
            f"tokenizer_from: the tokenizer knows ids up to {last}, the model has {config.vocab_size} vocabulary rows "
            "(see --vocab_size)"
        )
    if not (source / GENERATION_CONFIG_FILE).is_file():
        return config
    eos = read_json_object(source / GENERATION_CONFIG_FILE).get("eos_token_id", [])
    return dataclasses.replace(config, eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,))


def write_checkpoint(
    directory: pathlib.Path,
    config: ModelConfig,
    *,
    seed: int,
    max_shard_bytes: int,
    tokenizer_from: str | None,
    progress: ProgressFn,
) -> None:
    """Writes everything into an existing, empty directory."""
    if tokenizer_from is not None:
        config = copy_tokenizer(pathlib.Path(tokenizer_from), directory, config)
    write_json(directory / CONFIG_FILE, config.to_hf())
    if not (directory / GENERATION_CONFIG_FILE).is_file():
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95}
        write_json(directory / GENERATION_CONFIG_FILE, {"eos_token_id": list(config.eos_token_ids), **sampling})
    tensors = list_tensors(config)
    total = sum(tensor.num_bytes for tensor in tensors)
    report = ByteProgress(progress, "writing weights (MiB)", total)
    shards = split_shards(tensors, max_shard_bytes)
    weight_map = {}
    for index, shard in enumerate(shards, start=1):
        name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        write_shard(directory / name, shard, seed, report)
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), name)
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def make_random_checkpoint(
    preset: str,
    output: pathlib.Path,
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    shard_size_mb: int = 4096,
    tokenizer_from: str | None = None,
    vocab_size: int | None = None,
) -> ModelConfig:
    """Makes the directory; it appears complete or not at all."""
    config = ModelConfig.preset(preset, dtype=dtype, **({} if vocab_size is None else {"vocab_size": vocab_size}))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserInputError(f"output {str(output)!r} exists and is not an empty directory")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.partial-", dir=output.parent) as scratch:
        made = pathlib.Path(scratch) / output.name
        made.mkdir()
        write_checkpoint(
            made,
            config,
            seed=seed,
            max_shard_bytes=shard_size_mb << 20,
            tokenizer_from=tokenizer_from,
            progress=Progress(),
        )
        made.replace(output)
    return config


def _run(line: CommandLine) -> int:
    line.require("preset", "output", "shard_size_mb")
    config = make_random_checkpoint(
        line.preset,
        pathlib.Path(line.output),
        dtype=line.dtype,
        seed=line.seed,
        shard_size_mb=line.shard_size_mb,
        tokenizer_from=line.tokenizer_from,
        vocab_size=line.vocab_size,
    )
    print(f"{line.output}: {config.num_layers} layers, {config.dtype}, random weights (seed {line.seed})")
    return 0


def main(argv: Sequence[str]) -> int:
    line = CommandLine("make_random_checkpoint.py --preset=NAME --output=DIR [--flag=value ...]", __doc__ or "")
    line.group("Checkpoint")
    line.define("str", "preset", None, f"One of {', '.join(PRESETS)}.")
    line.define("str", "output", None, "Directory to make; absent or empty.")
    line.define("str", "dtype", "bfloat16", f"dtype of the matrices: {', '.join(NUMPY_DTYPES)}.")
    line.define("int", "seed", 0, "Seed of the weights.")
    line.define("int", "shard_size_mb", 4096, "Largest size of a shard.")
    line.define("str", "tokenizer_from", None, "Directory whose tokenizer files are copied.")
    line.define("int", "vocab_size", None, "Vocabulary rows in place of the preset's.")
    return run_with_flags(line, argv, _run)


if __name__ == "__main__":
    run_command(main)
