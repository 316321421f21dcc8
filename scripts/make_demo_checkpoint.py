"""Writes the demo checkpoint: a very small Qwen3.5 with random weights in genuine Hugging Face layout.

    python scripts/make_demo_checkpoint.py --output=DIR

The model is a real member of the family shrunk in hidden size, layers and heads only, so that it takes the same code
as a real one: hybrid layers, sharded mixed-dtype safetensors, a byte-level BPE tokenizer (trained here, on the text in
``scripts/demo/text``), a chat template with the ``enable_thinking`` switch, and embedding rows beyond the tokenizer's
last id. Nothing is downloaded, and the same sources give the same files.
"""

import json
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from qwen35_jax.cli.common import CommandLine, run_command, run_with_flags
from qwen35_jax.config import AttentionConfig, GatedDeltaNetConfig, ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.name_table import FLOAT32_INITS, FULL_PREFIX, parameter_table
from qwen35_jax.presets import layer_pattern

SOURCES = pathlib.Path(__file__).resolve().parent / "demo"
NUM_PIECES = 3072
VOCAB_MULTIPLE = 128
NUM_SHARDS = 2
SEED = 35

# Mean and spread of random weights by their part in the model (of matrices: the gain, spread times sqrt(inputs)).
# The decays of the recurrence, exp(-exp(A_log) softplus(a + dt_bias)), lie between about 0.6 and 0.999 a token.
STATISTICS = {
    "embedding": (0.0, 2.5),
    "matrix": (0.0, 1.0),
    "taps": (0.0, 0.5),
    "near_zero": (0.0, 0.1),
    "near_one": (1.0, 0.1),
    "decay": (-2.0, 0.7),
    "step_bias": (0.0, 0.5),
}
RESIDUAL_OUTPUTS = ("out_proj", "o_proj", "mlp.down")
RESIDUAL_GAIN = 2.0
END_ROW_LENGTH = 1.375

# The pre-tokenizer of Qwen3.5: letters together with their combining marks, digits one by one.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
# In the order of the published tokenizer; the second field says whether skip_special_tokens hides the token.
ADDED_TOKENS = (
    (END_OF_TEXT, True),
    ("<|im_start|>", True),
    (END_OF_TURN, True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)

MARKER = "DEMO.md"
NOTICE = """# Demo checkpoint

Written by `scripts/make_demo_checkpoint.py`. The weights are random numbers: this model shows that the whole path works
(tokenizer, chat template, sharded safetensors, hybrid layers, sampling), and its answers are random pieces of text.
"""


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer with the normaliser, pre-tokenizer and added tokens of Qwen3.5."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_PIECES,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != NUM_PIECES:
        raise ValueError(f"the training text gives {tokenizer.get_vocab_size()} pieces, expected {NUM_PIECES}")
    tokenizer.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text, special in ADDED_TOKENS],
    )
    return tokenizer


def training_texts() -> list[str]:
    """The paragraphs of the training text, files in the order of their names."""
    paths = sorted((SOURCES / "text").glob("*.txt"))
    return [paragraph for path in paths for paragraph in path.read_text("utf-8").split("\n\n")]


def model_config(tokenizer: Tokenizer) -> ModelConfig:
    """The shrunken model, with its vocabulary padded beyond the tokenizer's last id as published ones are."""
    ids = tokenizer.get_vocab_size()
    return ModelConfig(
        hidden_size=128,
        intermediate_size=448,
        vocab_size=(ids // VOCAB_MULTIPLE + 1) * VOCAB_MULTIPLE,
        layer_types=layer_pattern(4),
        attention=AttentionConfig(num_heads=2, num_kv_heads=1),
        gdn=GatedDeltaNetConfig(num_k_heads=1, num_v_heads=2),
        tie_word_embeddings=True,
        eos_token_ids=(tokenizer.token_to_id(END_OF_TURN),),
    )


def random_tensors(config: ModelConfig, end_ids: list[int], seed: int) -> dict[str, np.ndarray]:
    """Random weights by their Hugging Face names; a tensor's values depend on the seed and its name only.

    Scales are chosen so that the layers, not the embedding of the last token, decide the next one, and that logits
    spread over a few units: sampled text wanders over the vocabulary instead of repeating itself. The rows of the
    end tokens are longer than others, so that some answers end by themselves.
    """
    tensors = {}
    for recipe in parameter_table(config).values():
        mean, gain = STATISTICS[recipe.init]
        if recipe.path.endswith(RESIDUAL_OUTPUTS):
            gain = RESIDUAL_GAIN
        for source in recipe.sources:
            name = source.full_name(FULL_PREFIX)
            rng = np.random.default_rng([seed % (1 << 64), zlib.crc32(name.encode())])
            std = gain * source.shape[-1] ** -0.5 if recipe.init in ("matrix", "embedding") else gain
            values = mean + std * rng.standard_normal(source.shape)
            if recipe.init == "embedding":
                values[end_ids] *= END_ROW_LENGTH
            tensors[name] = values.astype(np.float32 if recipe.init in FLOAT32_INITS else ml_dtypes.bfloat16)
    return tensors


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file as the Hub's are: indented, not escaped, with a closing newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def write_weights(directory: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes the tensors as shards of about equal bytes with an index."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, np.ndarray]] = [{} for _ in range(NUM_SHARDS)]
    written = 0
    for name, tensor in tensors.items():
        shards[min(NUM_SHARDS - 1, written * NUM_SHARDS // total)][name] = tensor
        written += tensor.nbytes
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file_name = f"model-{i:05d}-of-{NUM_SHARDS:05d}.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        (directory / file_name).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file_name)
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def write_tokenizer(directory: pathlib.Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Writes tokenizer.json, its older twins vocab.json and merges.txt, tokenizer_config.json and the template."""
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer.model.save(str(directory))
    write_tokenizer_config(directory, tokenizer, max_length)


def write_tokenizer_config(directory: pathlib.Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Writes tokenizer_config.json and the chat template beside a tokenizer that knows ``ADDED_TOKENS``."""
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for text, special in ADDED_TOKENS
    }
    write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": END_OF_TURN,
            "errors": "replace",
            "model_max_length": max_length,
            "pad_token": END_OF_TEXT,
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )
    shutil.copyfile(SOURCES / "chat_template.jinja", directory / "chat_template.jinja")


def write_checkpoint(output: pathlib.Path, seed: int = SEED) -> ModelConfig:
    """Writes the whole checkpoint, or nothing; an earlier one in the same place is replaced.

    Raises:
        UserInputError: ``output`` exists and is not a demo checkpoint.
    """
    if output.exists() and not (output / MARKER).is_file():
        raise UserInputError(f"{output} exists and is not a demo checkpoint; choose another --output")
    tokenizer = train_tokenizer(training_texts())
    config = model_config(tokenizer)
    ends = [tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)]

    output.parent.mkdir(parents=True, exist_ok=True)
    staging = pathlib.Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        staging.chmod(0o755)
        hf_config = config.to_hf()
        hf_config |= {
            f"{name}_token_id": tokenizer.token_to_id(f"<|{token}|>")
            for name, token in (
                ("image", "image_pad"),
                ("video", "video_pad"),
                ("vision_start", "vision_start"),
                ("vision_end", "vision_end"),
            )
        }
        write_json(staging / "config.json", hf_config)
        write_json(
            staging / "generation_config.json",
            {
                "bos_token_id": ends[1],
                "do_sample": True,
                "eos_token_id": ends,
                "pad_token_id": ends[1],
                "temperature": 1.0,
                "top_k": 20,
                "top_p": 0.95,
            },
        )
        write_weights(staging, random_tensors(config, ends, seed))
        write_tokenizer(staging, tokenizer, config.max_position_embeddings)
        (staging / MARKER).write_text(NOTICE, "utf-8")
        if output.exists():
            shutil.rmtree(output)
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return config


def _run(line: CommandLine) -> int:
    line.require("output")
    config = write_checkpoint(pathlib.Path(line.output), line.seed)
    print(
        f"{line.output}: {config.num_layers} layers, width {config.hidden_size}, {config.vocab_size} vocabulary rows, "
        "random weights"
    )
    return 0


def main(argv: Sequence[str]) -> int:
    line = CommandLine("make_demo_checkpoint.py --output=DIR [--seed=N]", __doc__ or "")
    line.group("Checkpoint")
    line.define("str", "output", None, "Directory to write.")
    line.define("int", "seed", SEED, "Seed of the random weights.")
    return run_with_flags(line, argv, _run)


if __name__ == "__main__":
    run_command(main)
