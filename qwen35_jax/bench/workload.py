"""Workloads of the benchmarks: prompts of random ids with output lengths, and when they arrive.

Everything derives from a seed through ``numpy.random.default_rng``: the same seed gives the same lengths, ids and
arrival times on every machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qwen35_jax.errors import UserInputError

LOGNORMAL_REQUESTS = 2000
"""Requests of the lognormal workload where its figures are to be compared."""

_PROMPT_LOG = (6.2, 0.9, 16, 8192)  # mean and deviation of the logarithm, least and most tokens
_OUTPUT_LOG = (5.0, 0.8, 8, 1024)


@dataclasses.dataclass(frozen=True)
class WorkItem:
    """One request.

    Attributes:
        prompt: token ids, int32 ``[T]``.
        max_tokens: output tokens it asks for, and gets: EOS is ignored.
    """

    prompt: np.ndarray
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are sent.

    Attributes:
        name: how cells call it: ``<in>x<out>``, ``lognormal`` or the name of a file.
        items: the requests.
        seed: what the ids (and lengths) were drawn with.
    """

    name: str
    items: tuple[WorkItem, ...]
    seed: int = 0

    @property
    def longest(self) -> int:
        """Most tokens, prompt and output, of any request."""
        return max(len(item.prompt) + item.max_tokens for item in self.items)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths of a workload without its ids: all that has to be known before there is a model.

    Attributes:
        name: see :class:`Workload`.
        prompts: tokens of every prompt.
        outputs: tokens of every output.
        given: ids that a file gave, by request; they go before random ones.
        seed: what lengths were drawn with, and what ids will be.
    """

    name: str
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    given: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    seed: int = 0

    @property
    def longest(self) -> int:
        """Most tokens, prompt and output, of any request."""
        return max(map(sum, zip(self.prompts, self.outputs, strict=True)))

    def fill(self, vocab_size: int) -> Workload:
        """The workload, with ids uniform over ``[0, vocab_size)``.

        Ids have a generator of their own, ``default_rng((seed, 1))``: lengths do not depend on the vocabulary.

        Raises:
            UserInputError: an id that a file gave is outside of the vocabulary.
        """
        rng = np.random.default_rng((self.seed, 1))
        items = []
        for index, (length, output) in enumerate(zip(self.prompts, self.outputs, strict=True)):
            if index in self.given:
                prompt = np.asarray(self.given[index], np.int64)
                if prompt.max() >= vocab_size:
                    raise UserInputError(
                        f"request {index} of workload {self.name}: id {prompt.max()} is outside of the vocabulary "
                        f"0..{vocab_size - 1}"
                    )
            else:
                prompt = rng.integers(0, vocab_size, length)
            items.append(WorkItem(prompt.astype(np.int32), output))
        return Workload(self.name, tuple(items), self.seed)


def fixed(number: int, input_len: int, output_len: int, *, seed: int = 0) -> Lengths:
    """Every prompt and every output of the same length.

    Raises:
        UserInputError: a number below 1.
    """
    for name, value in (("num_requests", number), ("input_len", input_len), ("output_len", output_len)):
        if value < 1:
            raise UserInputError(f"{name} must be at least 1, got {value}")
    return Lengths(f"{input_len}x{output_len}", (input_len,) * number, (output_len,) * number, seed=seed)


def lognormal(number: int = LOGNORMAL_REQUESTS, *, seed: int = 0) -> Lengths:
    """The lognormal workload: 2,000 requests, seed 0, wherever figures are compared.

    Prompt lengths exp(N(6.2, 0.9)) clipped to [16, 8192], output lengths exp(N(5.0, 0.8)) clipped to [8, 1024], rounded
    to the nearest integer. All prompt lengths are drawn before all output lengths.

    Raises:
        UserInputError: ``number`` is below 1.
    """
    if number < 1:
        raise UserInputError(f"num_requests must be at least 1, got {number}")
    rng = np.random.default_rng(seed)
    prompts, outputs = (
        tuple(np.rint(np.clip(np.exp(rng.normal(mean, deviation, number)), least, most)).astype(int).tolist())
        for mean, deviation, least, most in (_PROMPT_LOG, _OUTPUT_LOG)
    )
    return Lengths("lognormal", prompts, outputs, seed=seed)


def from_file(path: str | os.PathLike[str], number: int | None = None, *, seed: int = 0) -> Lengths:
    """Requests of a JSONL file, each line the lengths or the ids of one.

    ``{"input_len": 900, "output_len": 120}`` or ``{"prompt_token_ids": [1, 2], "output_len": 120}``; a ``custom_id`` is
    allowed and not used.

    Args:
        path: the file; cells are called after its name.
        number: take the first so many; None takes all.
        seed: for ids that the file does not give.

    Raises:
        UserInputError: the file cannot be read, holds something else or too few; the message names the line.
    """
    path = Path(path)
    name = re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower())
    if not re.match("[a-z]", name):
        raise UserInputError(f"{path}: cells are called after the file, whose name must begin with a letter")
    prompts: list[int] = []
    outputs: list[int] = []
    given: dict[int, tuple[int, ...]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for line_number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                if number is not None and len(prompts) >= number:
                    break
                try:
                    length, output, ids = _read_line(line)
                except ValueError as error:
                    raise UserInputError(f"{path}, line {line_number}: {error}") from error
                if ids is not None:
                    given[len(prompts)] = ids
                prompts.append(length)
                outputs.append(output)
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not prompts or len(prompts) < (number or 0):
        raise UserInputError(f"{path}: has {len(prompts)} requests, {number or 'at least 1'} are needed")
    return Lengths(name, tuple(prompts), tuple(outputs), given, seed)


def _read_line(line: str) -> tuple[int, int, tuple[int, ...] | None]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"a request is an object, this is {line.strip()[:60]!r}")
    unknown = sorted(set(value) - {"custom_id", "input_len", "output_len", "prompt_token_ids"})
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}")
    if ("input_len" in value) == ("prompt_token_ids" in value):
        raise ValueError("either input_len or prompt_token_ids is needed")
    output = _count("output_len", value.get("output_len"))
    if "input_len" in value:
        return _count("input_len", value["input_len"]), output, None
    ids = value["prompt_token_ids"]
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("prompt_token_ids must be a list of at least one id")
    return len(ids), output, tuple(ids)


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def poisson_arrivals(number: int, rate: float, *, seed: int = 0) -> Sequence[float]:
    """Seconds after the start at which requests arrive: gaps exponential, the last at ``number / rate``.

    The first request comes after a gap too. As ``vllm bench serve`` does, the times are scaled so that the last falls
    where the rate says: a short run then really offers the load that its cell names, whatever was drawn.

    Raises:
        UserInputError: ``rate`` is not positive.
    """
    if not 0 < rate < float("inf"):
        raise UserInputError(f"rate must be a positive number of requests a second, got {rate}")
    times = np.cumsum(np.random.default_rng((seed, 2)).exponential(1 / rate, number))
    return (times * (number / rate / times[-1])).tolist()
