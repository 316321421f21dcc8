"""Examples and text packed into rows of fixed length: what the demo model is trained on.

A batch is a pure function of its arguments and the step, so a run that resumes sees the same data, and any process can
make any batch. Each example is a segment of its own: the model restarts there, as at inference.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

from qwen35_jax.errors import UserInputError
from scripts.demo_model import chat, corpus, tasks

# Before the first use: each of many worker processes is to use one core.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers  # noqa: E402

SPLITS = ("train", "held_out")
TEXT = "text"
# Share of all tokens; of rows too short for a task, the others take its share. Text also fills what is left of rows.
MIXTURE: Mapping[str, float] = {
    "recall": 0.20,
    "recall_long": 0.20,
    "copy": 0.06,
    "reverse": 0.08,
    "sort": 0.12,
    "arithmetic": 0.12,
    "json": 0.08,
    "qa": 0.12,
    "chat": 0.02,
    TEXT: 0.08,
}
# Weight of the tokens of answers and text. Where few tokens of many are answers, they count for more.
WEIGHTS: Mapping[str, float] = {"recall": 4.0, "recall_long": 8.0, "qa": 3.0}
# Tokens of an example, about: how many to make at a time.
USUAL_TOKENS = {"recall": 230, "recall_long": 2300, "qa": 110}
OTHER_TOKENS = 75
ROUND = 256


class Batches:
    """Packed batches of all tasks.

    Args:
        tokenizer_dir: directory with a tokenizer.json.
        seed: of the examples.
        batch_size: rows B.
        seq_len: tokens T of a row. ``recall`` examples are up to 1k tokens long, or what fits; from 4096 on there is
            ``recall_long`` too: short rows first and long ones later are a curriculum.
        split: "train" or "held_out"; the two never share an example.
        mixture: share of the tokens by task ("text" is one), in any unit; tasks left out get none. None takes
            ``MIXTURE``.

    Attributes:
        task_names: what the numbers in ``tasks`` mean.

    Raises:
        UserInputError: an argument is wrong, or there is no readable tokenizer.
    """

    task_names = (*tasks.TASKS, TEXT)

    def __init__(
        self,
        tokenizer_dir: str | os.PathLike[str],
        seed: int,
        batch_size: int,
        seq_len: int,
        *,
        split: str = "train",
        mixture: Mapping[str, float] | None = None,
    ):
        if split not in SPLITS:
            raise UserInputError(f"split: {split!r} is not one of {', '.join(SPLITS)}")
        if batch_size < 1 or seq_len < 2:
            raise UserInputError(f"batches need batch_size >= 1 and seq_len >= 2, got {batch_size} and {seq_len}")
        self._shares = _shares(MIXTURE if mixture is None else mixture, seq_len)
        self._seed = (seed % (1 << 64), SPLITS.index(split))
        self._held_out = split == "held_out"
        self._shape = (batch_size, seq_len)
        self._encoder = Encoder(tokenizer_dir)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step.

        Returns:
            Arrays ``[B, T]``: ``tokens`` int32; ``weights`` float32, 1 or more (``WEIGHTS``) on what the assistant
            writes, the end of its turn included, and on text, 0 on the rest and on the first token of a segment;
            ``segments`` int32, counted from 0 in each row; ``tasks`` int32, index into ``task_names`` of what a token
            belongs to.
        """
        rng = np.random.default_rng([*self._seed, step])
        rows, seq_len = self._shape
        examples = []
        for number, name in enumerate(tasks.TASKS):
            quota = self._shares.get(name, 0.0) * rows * seq_len
            examples += [(number, *one) for one in self._examples(rng, name, quota)]
        dtypes = {"tokens": np.int32, "weights": np.float32, "segments": np.int32, "tasks": np.int32}
        out: dict[str, np.ndarray] = {name: np.zeros(self._shape, dtype) for name, dtype in dtypes.items()}
        used = np.zeros(rows, np.int64)
        count = np.zeros(rows, np.int64)

        def put(row: int, number: int, ids: np.ndarray, weights: np.ndarray) -> None:
            place = (row, slice(used[row], used[row] + len(ids)))
            out["tokens"][place] = ids
            out["weights"][place] = weights
            out["weights"][row, used[row]] = 0
            out["segments"][place] = count[row]
            out["tasks"][place] = number
            used[row] += len(ids)
            count[row] += 1

        # Long ones first; each goes to the emptiest row. What fits nowhere is left out.
        for i in np.argsort([-len(example[1]) for example in examples], kind="stable").tolist():
            row = int(np.argmin(used))
            if used[row] + len(examples[i][1]) <= seq_len:
                put(row, *examples[i])
        documents = self._documents(rng)
        for row in range(rows):
            while used[row] < seq_len:
                ids, weights = next(documents)
                room = seq_len - used[row]
                put(row, len(tasks.TASKS), ids[:room], weights[:room])
        return out

    def _examples(self, rng: np.random.Generator, name: str, quota: float) -> list[tuple[np.ndarray, np.ndarray]]:
        """Examples of about ``quota`` tokens in all; the last one is kept with the probability that makes it so."""
        out = []
        while quota > 0:
            count = min(ROUND, 1 + int(quota / USUAL_TOKENS.get(name, OTHER_TOKENS)))
            made = [tasks.generate(name, rng, max_tokens=self._shape[1], held_out=self._held_out) for _ in range(count)]
            for ids, weights in self._encoder.encode([chat.pieces(example) for example in made]):
                if len(ids) > self._shape[1]:
                    continue
                if len(ids) > quota and rng.random() * len(ids) > quota:
                    return out
                out.append((ids, weights * np.float32(WEIGHTS.get(name, 1.0))))
                quota -= len(ids)
                if quota <= 0:
                    break
        return out

    def _documents(self, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            texts = [f"{corpus.document(rng)}{chat.END_OF_TEXT}" for _ in range(self._shape[0])]
            yield from self._encoder.encode([[(text, 1.0)] for text in texts])


class Encoder:
    """Turns pieces into ids with weights.

    Raises:
        UserInputError: the directory has no readable tokenizer.json.
    """

    def __init__(self, tokenizer_dir: str | os.PathLike[str]):
        path = pathlib.Path(tokenizer_dir) / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserInputError(f"{path}: not a readable tokenizer: {error}") from error

    def encode(self, examples: list[list[chat.Piece]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids int32 and weights float32 of each example, its pieces end to end."""
        texts = [text for pieces in examples for text, _ in pieces]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        out = []
        for pieces in examples:
            ids = [next(encoded).ids for _ in pieces]
            weights = np.repeat(np.array([weight for _, weight in pieces], np.float32), [len(part) for part in ids])
            out.append((np.array([one for part in ids for one in part], np.int32), weights))
        return out


def _shares(mixture: Mapping[str, float], seq_len: int) -> dict[str, float]:
    """Shares that sum to 1, of the tasks that rows of this length can hold."""
    unknown = sorted(mixture.keys() - {*Batches.task_names})
    if unknown:
        raise UserInputError(f"mixture: {unknown[0]!r} is not one of {', '.join(Batches.task_names)}")
    wrong = [name for name, share in mixture.items() if not share >= 0]
    if wrong:
        raise UserInputError(f"mixture: {wrong[0]} must not be negative, got {mixture[wrong[0]]}")
    fits = {
        name: share for name, share in mixture.items() if name not in tasks.LONG_TASKS or seq_len >= tasks.LONG_TOKENS
    }
    total = sum(fits.values())
    if not total > 0:
        raise UserInputError(f"mixture: nothing is left for rows of {seq_len} tokens")
    return {name: share / total for name, share in fits.items()}
