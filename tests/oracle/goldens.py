"""Reads the committed goldens: what transformers computed for the miniature checkpoints (scripts/make_goldens.py)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS_DIR = Path(__file__).resolve().parent.parent / "goldens"
INDEX_FILE = "index.json"
# Prompt length -> sequences of that length. A single short sequence has too few positions for its mean and 99th
# percentile to mean anything: one badly conditioned token decides both.
SEQUENCES: dict[int, int] = {1: 16, 3: 12, 17: 4, 64: 1, 65: 1, 130: 1, 300: 1}
LENGTHS: tuple[int, ...] = tuple(SEQUENCES)
DECODE_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Golden:
    """The sequences of one length of a case: `length` tokens of prefill, then eight teacher-forced decode steps.

    Attributes:
        tokens: int32 [N, length + 8].
        positions: int32 [P], the positions kept of the first sequence: some of the prefill, its last one, all steps.
        logprobs: float32 [P, V] of transformers in float32, first sequence.
        layer_outputs: float32 [L, P, D], residual stream after each layer, likewise.
        bf16_mean: mean of |logprob(bfloat16) - logprob(float32)| of transformers over all sequences, positions, ids.
        bf16_p99: 99th percentile of the same.
    """

    tokens: np.ndarray
    positions: np.ndarray
    logprobs: np.ndarray
    layer_outputs: np.ndarray
    bf16_mean: float
    bf16_p99: float


def kept_positions(length: int) -> np.ndarray:
    """Positions a golden keeps: first, chunk edges, middle and last of the prefill, and the decode steps."""
    prefill = {p for p in (0, 1, 63, 64, 127, 128, 200, length // 2, length - 1) if p < length}
    return np.array(sorted(prefill) + list(range(length, length + DECODE_STEPS)), np.int32)


def weights_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Digest of a checkpoint's names and values, so that goldens of other weights are noticed at once."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name], np.float32).tobytes())
    return digest.hexdigest()


@functools.cache
def load_index(directory: Path = GOLDENS_DIR) -> dict[str, Any]:
    """The JSON beside the goldens: versions, weight digests, distances measured."""
    return json.loads((directory / INDEX_FILE).read_text())


@functools.cache
def load_golden(case: str, length: int, directory: Path = GOLDENS_DIR) -> Golden:
    """Loads one golden."""
    numbers = load_index(directory)["cases"][case]["lengths"][str(length)]
    with np.load(directory / f"{case}.npz") as file:
        return Golden(
            tokens=file[f"tokens_{length}"].astype(np.int32),
            positions=file[f"positions_{length}"].astype(np.int32),
            logprobs=file[f"logprobs_{length}"],
            layer_outputs=file[f"layers_{length}"],
            bf16_mean=numbers["bf16_mean"],
            bf16_p99=numbers["bf16_p99"],
        )


def distance(logprobs: np.ndarray, reference: np.ndarray) -> tuple[float, float, float]:
    """(max, mean, 99th percentile) of |logprobs - reference| over all positions and ids."""
    delta = np.abs(logprobs.astype(np.float64) - reference.astype(np.float64))
    return float(delta.max()), float(delta.mean()), float(np.quantile(delta, 0.99))


def relative_error(layer_outputs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """For each layer, max |difference| over the root mean square of the reference; inputs are [L, T, D]."""
    difference = np.abs(layer_outputs.astype(np.float64) - reference.astype(np.float64)).max(axis=(1, 2))
    return difference / np.sqrt((reference.astype(np.float64) ** 2).mean(axis=(1, 2)))
