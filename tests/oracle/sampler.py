"""Plain numpy sampler: the definition that the device sampler is tested against. Imports nothing of the product.

One row at a time, decisions in float64, values where the product promises fp32 in fp32. The noise is computed with a
Threefry-2x32 of its own, so that the random bits of a (key, step, token) are pinned too.
"""

from __future__ import annotations

import dataclasses

import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: tuple[int, int], counter: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds."""
    with np.errstate(over="ignore"):
        k0, k1 = np.uint32(key[0]), np.uint32(key[1])
        schedule = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
        x0, x1 = np.asarray(counter[0], np.uint32) + schedule[0], np.asarray(counter[1], np.uint32) + schedule[1]
        for group in range(5):
            for rotation in _ROTATIONS[group % 2]:
                x0 = x0 + x1
                x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
                x1 = x1 ^ x0
            x0 = x0 + schedule[(group + 1) % 3]
            x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def noise(key: tuple[int, int], step: int, vocab: int) -> np.ndarray:
    """Gumbel noise of every token at one step, float64."""
    zero = np.zeros(1, np.uint32)
    step_key = threefry(key, (zero, np.array([step], np.uint32)))
    ids = np.arange(vocab, dtype=np.uint32)
    word, _ = threefry((int(step_key[0][0]), int(step_key[1][0])), (np.zeros_like(ids), ids))
    uniform = np.minimum((word.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-uniform))


@dataclasses.dataclass
class Row:
    """Options and history of one row."""

    key: tuple[int, int]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    output: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Result:
    """What one step of one row should give.

    ``place`` is the token's place among the adjusted logits, ``kept`` counts the tokens that survive the cut-offs;
    ``clear`` is False where rounding may decide otherwise.
    """

    token: int
    place: int
    kept: int
    clear: bool


def sample(row: Row, logits: np.ndarray, num_valid: int) -> Result:
    """Token of the row's next step; ``row`` is not changed."""
    f32 = np.float32
    adjusted = logits.astype(f32).copy()
    adjusted[num_valid:] = -np.inf
    counts = np.bincount(np.asarray(row.output, int), minlength=len(logits)).astype(f32)
    seen = counts > 0
    seen[list(row.prompt)] = True
    repeated = np.where(adjusted > 0, adjusted / f32(row.repetition), adjusted * f32(row.repetition))
    adjusted = np.where(seen, repeated, adjusted)
    adjusted = adjusted - f32(row.frequency) * counts - np.where(counts > 0, f32(row.presence), f32(0))
    if len(row.output) < row.min_tokens:
        adjusted[[i for i in row.stop_ids if i < len(logits)]] = -np.inf
    if row.temperature == 0:
        order = np.lexsort((np.arange(len(logits)), -adjusted))
        gap = adjusted[order[0]] - adjusted[order[1]]
        return Result(int(order[0]), 0, 1, bool(gap == 0 or gap > 1e-5))

    scaled = (adjusted / f32(row.temperature)).astype(np.float64)
    order = np.lexsort((np.arange(len(logits)), -scaled))  # value descending, id ascending
    ordered = scaled[order]
    noisy = ordered + noise(row.key, len(row.output), len(logits))[order]

    def kept(slack: float) -> np.ndarray:
        """What survives when the cut-offs are moved by ``slack``, relative."""
        keep = ordered > -np.inf
        if row.min_p > 0:
            keep &= ordered >= ordered[0] + (np.log(row.min_p) - slack if row.min_p < 1 else 0)
        if row.top_k > 0:
            keep &= np.arange(len(order)) < row.top_k
        weights = np.where(keep, np.exp(ordered - ordered[0]), 0)
        if row.top_p < 1:
            before = np.cumsum(weights) - weights
            keep &= (before < (row.top_p + slack) * weights.sum()) | (np.arange(len(order)) == 0)
        return keep

    keep = kept(0)
    place = int(np.argmax(np.where(keep, noisy, -np.inf)))
    clear = all(np.argmax(np.where(kept(slack), noisy, -np.inf)) == place for slack in (-2e-6, 2e-6))
    best = np.sort(noisy[keep])
    clear &= len(best) == 1 or best[-1] - best[-2] > 2e-5
    return Result(int(order[place]), place, int(keep.sum()), bool(clear))


def logprobs(logits: np.ndarray, num_valid: int) -> np.ndarray:
    """Log-softmax of the unmodified logits over real ids, float64."""
    real = logits[:num_valid].astype(np.float64)
    shifted = real - real.max()
    out = np.full(len(logits), -np.inf)
    out[:num_valid] = shifted - np.log(np.exp(shifted).sum())
    return out
