"""Makes the directory of the demo model, all but its weights: tokenizer, chat template and configurations.

    python -m scripts.demo_model.tokenizer --output=examples/demo-model

The tokenizer is a byte-level BPE with the normaliser, pre-tokenizer and added tokens of Qwen3.5, trained on examples of
the model's own tasks and stories, so that their words are single pieces. The same sources and libraries give the same
files.
"""

import pathlib
from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from qwen35_jax.cli.common import CommandLine, run_command, run_with_flags
from qwen35_jax.config import ModelConfig
from qwen35_jax.name_table import FLOAT32_INITS, parameter_table
from scripts.demo_model import chat, corpus, tasks
from scripts.demo_model.architecture import config_of_tokenizer
from scripts.demo_model.languages import LANGUAGES
from scripts.demo_model.lexicon import ADJECTIVES, NOUNS
from scripts.make_demo_checkpoint import ADDED_TOKENS, END_OF_TEXT, SPLIT_PATTERN, write_json, write_tokenizer_config

NUM_IDS = 3040  # some rows of the embedding are left over, as in published models
SEED = 35
# Examples of each task and documents; those of recall are long and hold few kinds of words.
EXAMPLES = {task: 6000 for task in tasks.TASKS} | {"recall": 4000, "recall_long": 0, "qa": 12000, "chat": 2000}
DOCUMENTS = 8000
# So often the words of lists appear beside the examples: the English ones then are single pieces with and without a
# space before them, which is what recall by exact words is easiest with.
ENGLISH_WORDS, OTHER_WORDS = 700, 300


def training_texts() -> list[str]:
    """Examples as the model reads them, stories, the words of lists, and every paragraph of prose."""
    texts = []
    for index, (task, count) in enumerate(EXAMPLES.items()):
        rng = np.random.default_rng([SEED, index])
        texts += [chat.text(tasks.generate(task, rng, max_tokens=512)) for _ in range(count)]
    rng = np.random.default_rng([SEED, len(EXAMPLES)])
    texts += [corpus.story(rng, corpus.pick_language(rng, english=0.3)) for _ in range(DOCUMENTS)]
    words = [" ".join(("", *NOUNS, *ADJECTIVES)), "\n".join(NOUNS)]
    others = [" ".join(("", *it.nouns(), *it.names)) for it in LANGUAGES.values() if it.code != "en"]
    return [*texts, *words * ENGLISH_WORDS, *others * OTHER_WORDS, *corpus.prose()]


def train(texts: list[str]) -> Tokenizer:
    """A tokenizer of ``NUM_IDS`` ids.

    Raises:
        ValueError: the texts give fewer pieces.
    """
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
    pieces = NUM_IDS - len(ADDED_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=pieces,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_without_added(text) for text in texts], trainer)
    if tokenizer.get_vocab_size() != pieces:
        raise ValueError(f"the training text gives {tokenizer.get_vocab_size()} pieces, expected {pieces}")
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in ADDED_TOKENS])
    return tokenizer


def _without_added(text: str) -> str:
    """The text with added tokens taken out, which are no material for pieces."""
    for token, _ in ADDED_TOKENS:
        text = text.replace(token, "\n")
    return text


def weight_bytes(config: ModelConfig) -> tuple[int, int]:
    """Parameters of a model, and their bytes as a checkpoint stores them."""
    parameters = size = 0
    for recipe in parameter_table(config).values():
        count = sum(int(np.prod(source.shape)) for source in recipe.sources)
        parameters += count
        size += count * (4 if recipe.init in FLOAT32_INITS else 2)
    return parameters, size


def write_directory(output: pathlib.Path, tokenizer: Tokenizer) -> ModelConfig:
    """Writes the files into a directory, which may exist; other files in it stay as they are."""
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / "tokenizer.json"), pretty=False)
    config = config_of_tokenizer(output)
    write_tokenizer_config(output, tokenizer, config.max_position_embeddings)
    images = ("image_pad", "video_pad", "vision_start", "vision_end")
    names = ("image", "video", "vision_start", "vision_end")
    ids = {f"{name}_token_id": tokenizer.token_to_id(f"<|{token}|>") for name, token in zip(names, images, strict=True)}
    write_json(output / "config.json", config.to_hf() | ids)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    # Greedy: every task has one right answer.
    write_json(
        output / "generation_config.json",
        {
            "bos_token_id": end_of_text,
            "do_sample": False,
            "eos_token_id": list(config.eos_token_ids),
            "pad_token_id": end_of_text,
        },
    )
    return config


def _run(line: CommandLine) -> int:
    line.require("output")
    config = write_directory(pathlib.Path(line.output), train(training_texts()))
    parameters, size = weight_bytes(config)
    print(
        f"{line.output}: {NUM_IDS} ids, {config.vocab_size} rows; a model of {parameters:,} parameters, {size:,} bytes"
    )
    return 0


def main(argv: Sequence[str]) -> int:
    line = CommandLine("python -m scripts.demo_model.tokenizer --output=DIR", __doc__ or "")
    line.group("Tokenizer")
    line.define("str", "output", None, "Directory to write into.")
    return run_with_flags(line, argv, _run)


if __name__ == "__main__":
    run_command(main)
