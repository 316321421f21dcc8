"""Measures the model against the float64 oracle and against what transformers computed (tests/goldens).

All sequences of a case run packed in one prefill program (absent requests and padding among them) and one decode
program, on pools that are full of NaN at first and pages that lie in random order. Log-probabilities are compared at
every position and id, residual streams after every layer.

Used by the tests and by scripts/gpu_check.py: :func:`float32_distances`, :func:`bfloat16_distances`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen35_jax.cache import PAGE_SIZE, Cache, cache_shapes
from qwen35_jax.config import ModelConfig
from qwen35_jax.model import DecodeInputs, PrefillInputs
from qwen35_jax.params import ParamPack
from qwen35_jax.weights import load_params
from tests.oracle import goldens, tiny
from tests.oracle.qwen35_numpy import Oracle, OracleOutput, log_softmax

# float32 against float64.
MAX_LOGPROB_ERROR = 5e-4
MEAN_LOGPROB_ERROR = 2e-5
# Largest error of a layer's output over that layer's root mean square; transformers' own float32 reaches 4e-5.
MAX_LAYER_ERROR = 1e-4
# bfloat16: distance from the exact value over transformers' own bfloat16-to-float32 distance.
BF16_RATIO = 1.25

TOKENS = 704  # the sequences of a case add up to 679 tokens
ROWS = 40  # prefill requests and decode rows; the case has 36 sequences
ABSENT = (3, 20, 21, 39)  # these requests have no tokens, these decode rows are padding
WIDTH = 6
STEPS = goldens.DECODE_STEPS
NUM_PAGES, NUM_SLOTS = 52, 44

type SequenceKey = tuple[int, int]  # (length, index among the sequences of that length)


def _tokens(case: str, key: SequenceKey) -> np.ndarray:
    length, index = key
    return goldens.load_golden(case, length).tokens[index]


@functools.cache
def oracle_outputs(case: str) -> dict[SequenceKey, OracleOutput]:
    oracle = Oracle(tiny.hf_config(case), tiny.weights(case))
    return {key: oracle.forward(_tokens(case, key)) for _, key in _rows()}


@functools.cache
def _rows() -> tuple[tuple[int, SequenceKey], ...]:
    """(row of the batch, sequence), long and short ones mixed, around the absent rows."""
    keys = [(length, index) for length, count in goldens.SEQUENCES.items() for index in range(count)]
    order = np.random.default_rng(0).permutation(len(keys))
    rows = [row for row in range(ROWS) if row not in ABSENT]
    return tuple((row, keys[i]) for row, i in zip(rows, order, strict=True))


# --- the product behind one small adapter ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Product:
    """The product's model with a checkpoint in memory.

    Attributes:
        forward: (prefill inputs, decode inputs, cache) -> (last hidden of every prefill request or None, hidden of all
            tokens, layer outputs [L, M, D], cache); the cache is donated.
        logits: hidden [M, D] -> logits [M, V].
        new_cache: pools full of NaN.
    """

    forward: Callable[..., Any]
    logits: Callable[..., Any]
    new_cache: Callable[[], Cache]


@functools.cache
def forward_program(config: ModelConfig, dtype: str, kernels: str):
    """The compiled forward pass of a tied model; an untied one has the same pass, so the two share it."""
    pack = ParamPack(config, dtype=dtype, kernels=kernels)

    def run(flat, prefill, decode, cache):
        out = pack.unpack(flat).forward(prefill, decode, cache, layer_outputs=True)
        hidden = out.decode_hidden if prefill is None else out.prefill_all_hidden
        return out.prefill_hidden, hidden, jnp.stack(out.layer_outputs), out.cache

    return jax.jit(run, donate_argnums=3)


def build_product(directory: Path, dtype: str, kernels: str) -> Product:
    """Loads a Hugging Face directory with the product."""
    config = ModelConfig.from_hf(directory)
    pack = ParamPack(config, dtype=dtype, kernels=kernels)
    params = load_params(directory, config, dtype)
    trunk = tuple(array for leaf, array in zip(pack.leaves, params, strict=True) if leaf.name != "lm_head")
    forward = forward_program(dataclasses.replace(config, tie_word_embeddings=True), dtype, kernels)
    logits = jax.jit(lambda flat, hidden: pack.unpack(flat).logits(hidden))

    def new_cache() -> Cache:
        shapes = cache_shapes(config, NUM_PAGES, NUM_SLOTS, jnp.dtype(dtype), jnp.dtype("float32"))
        return Cache(*(jnp.full(shape.shape, jnp.nan, shape.dtype) for shape in shapes))

    return Product(functools.partial(forward, trunk), functools.partial(logits, params), new_cache)


@functools.cache
def product(case: str, dtype: str, root: Path, kernels: str = "auto") -> Product:
    """The product with a case's checkpoint, which is written below ``root`` if it is not there yet."""
    directory = root / case
    if not directory.exists():
        # Every layout of a checkpoint is met: full and text-only, single and sharded.
        number = tiny.CASES.index(case)
        tiny.write_hf_dir(directory, case, shards=1 + number % 3, text_only=number % 2 == 1, skipped_tensors=True)
    return build_product(directory, dtype, kernels)


def forget() -> None:
    """Lets go of models, programs and the oracle's outputs."""
    product.cache_clear()
    forward_program.cache_clear()
    oracle_outputs.cache_clear()


# --- packing --------------------------------------------------------------------------------------------------------


def _page_tables() -> np.ndarray:
    """[ROWS, WIDTH]: pages of every sequence in random order; an absent one keeps the null page."""
    pages = 1 + np.random.default_rng(0).permutation(NUM_PAGES - 1)
    tables = np.zeros((ROWS, WIDTH), np.int32)
    used = 0
    for row, (length, _) in _rows():
        count = -(-(length + STEPS) // PAGE_SIZE)
        tables[row, :count] = pages[used : used + count]
        used += count
    return tables


def _slots() -> np.ndarray:
    slots = np.zeros(ROWS, np.int32)
    for row, _ in _rows():
        slots[row] = NUM_SLOTS - 1 - row
    return slots


def prefill_inputs(case: str, spans: dict[int, tuple[int, int]]) -> PrefillInputs:
    """Packs tokens [start, stop) of every row's sequence; a row that is missing or empty is absent."""
    tables, slots = _page_tables(), _slots()
    fields = {name: np.zeros(TOKENS, np.int32) for name in ("tokens", "positions", "page_ids", "page_offsets")}
    cu_seqlens = np.zeros(ROWS + 1, np.int32)
    slot_ids, kv_lens = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
    has_state, table = np.zeros(ROWS, bool), np.zeros_like(tables)
    end, keys = 0, dict(_rows())
    for row in range(ROWS):
        start, stop = spans.get(row, (0, 0))
        if stop > start:
            positions = np.arange(start, stop)
            here = slice(end, end + stop - start)
            fields["tokens"][here] = _tokens(case, keys[row])[start:stop]
            fields["positions"][here] = positions
            fields["page_ids"][here] = tables[row, positions // PAGE_SIZE]
            fields["page_offsets"][here] = positions % PAGE_SIZE
            slot_ids[row], kv_lens[row], has_state[row], table[row] = slots[row], stop, start > 0, tables[row]
            end += stop - start
        cu_seqlens[row + 1] = end
    return PrefillInputs(
        **fields, cu_seqlens=cu_seqlens, slot_ids=slot_ids, has_state=has_state, page_table=table, kv_lens=kv_lens
    )


def decode_inputs(case: str, step: int) -> DecodeInputs:
    """One teacher-forced token of every sequence; the absent rows are padding."""
    tables, slots = _page_tables(), _slots()
    names = ("tokens", "positions", "page_ids", "page_offsets", "kv_lens")
    fields = {name: np.zeros(ROWS, np.int32) for name in names}
    for row, key in _rows():
        position = key[0] + step
        fields["tokens"][row] = _tokens(case, key)[position]
        fields["positions"][row] = position
        fields["page_ids"][row] = tables[row, position // PAGE_SIZE]
        fields["page_offsets"][row] = position % PAGE_SIZE
        fields["kv_lens"][row] = position + 1
    return DecodeInputs(**fields, slot_ids=slots, page_table=tables)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """What the product computed for one sequence: float64 [T, V] and [L, T, D]."""

    logprobs: np.ndarray
    layer_outputs: np.ndarray


def run_product(model: Product, case: str, *, split: bool = False) -> dict[SequenceKey, Sequence]:
    """Prefill (in one call, or every prompt in two pieces) and eight decode steps."""
    if split:  # cut near the start, in the middle of a page, on the page, near the end
        cuts = {1: 1, 3: 2, 17: 5, 64: 63, 65: 64, 130: 65, 300: 171}
        calls = [{row: (0, cuts[n]) for row, (n, _) in _rows()}, {row: (cuts[n], n) for row, (n, _) in _rows()}]
    else:
        calls = [{row: (0, length) for row, (length, _) in _rows()}]
    pieces: dict[SequenceKey, list[tuple[np.ndarray, np.ndarray]]] = {key: [] for _, key in _rows()}
    cache = model.new_cache()
    for spans in calls:
        inputs = prefill_inputs(case, spans)
        last, hidden, layers, cache = model.forward(inputs, None, cache)
        # np.array: copies, the last token of a request gets the scores that an engine would sample from.
        logits, last_logits, layers = np.array(model.logits(hidden)), np.asarray(model.logits(last)), np.asarray(layers)
        for row, key in _rows():
            start, stop = inputs.cu_seqlens[row : row + 2]
            if stop > start:
                logits[stop - 1] = last_logits[row]
            pieces[key].append((logits[start:stop], layers[:, start:stop]))
    for step in range(STEPS):
        _, hidden, layers, cache = model.forward(None, decode_inputs(case, step), cache)
        logits, layers = np.asarray(model.logits(hidden)), np.asarray(layers)
        for row, key in _rows():
            pieces[key].append((logits[row : row + 1], layers[:, row : row + 1]))
    results = {}
    for key, parts in pieces.items():
        all_logits = np.concatenate([logits for logits, _ in parts]).astype(np.float64)
        all_layers = np.concatenate([layers for _, layers in parts], axis=1).astype(np.float64)
        results[key] = Sequence(log_softmax(all_logits), all_layers)
    return results


# --- distances ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Float32Distance:
    """How far float32 is from the float64 oracle, over the sequences of a length.

    Attributes:
        length: tokens of their prompts.
        max_logprob: worst |delta logprob| of all positions and ids.
        mean_logprob: its mean.
        max_layer: worst error of a layer's output over that layer's root mean square.
    """

    length: int
    max_logprob: float
    mean_logprob: float
    max_layer: float

    @property
    def within_bars(self) -> bool:
        return (
            self.max_logprob <= MAX_LOGPROB_ERROR
            and self.mean_logprob <= MEAN_LOGPROB_ERROR
            and self.max_layer <= MAX_LAYER_ERROR
        )

    def __str__(self) -> str:
        return (
            f"length {self.length}: max {self.max_logprob:.1e} mean {self.mean_logprob:.1e} layer {self.max_layer:.1e}"
        )


@dataclasses.dataclass(frozen=True)
class Bfloat16Distance:
    """How far bfloat16 is from the exact values, over the sequences of a length, and how far transformers' own is.

    Attributes:
        length: tokens of their prompts.
        mean: mean |delta logprob| of all positions and ids.
        p99: its 99th percentile.
        golden_mean: transformers' mean |logprob(bfloat16) - logprob(float32)| on the same sequences.
        golden_p99: its 99th percentile.
    """

    length: int
    mean: float
    p99: float
    golden_mean: float
    golden_p99: float

    @property
    def mean_ratio(self) -> float:
        return self.mean / self.golden_mean

    @property
    def p99_ratio(self) -> float:
        return self.p99 / self.golden_p99

    @property
    def within_bars(self) -> bool:
        return self.mean_ratio <= BF16_RATIO and self.p99_ratio <= BF16_RATIO

    def __str__(self) -> str:
        return (
            f"length {self.length}: mean {self.mean:.4f} ({self.mean_ratio:.2f} of transformers'), "
            f"p99 {self.p99:.4f} ({self.p99_ratio:.2f})"
        )


def _logprob_distance(results: dict[SequenceKey, Sequence], case: str, length: int) -> tuple[float, float, float]:
    """(max, mean, p99) of |delta logprob| over the sequences of a length."""
    exact = oracle_outputs(case)
    keys = [key for key in results if key[0] == length]
    return goldens.distance(
        np.stack([results[key].logprobs for key in keys]), np.stack([exact[key].logprobs for key in keys])
    )


def float32_distances(
    case: str, root: Path, *, kernels: str = "auto", split: bool = False
) -> tuple[Float32Distance, ...]:
    """The float32 model against the oracle, a figure a length; see :func:`run_product` for ``split``."""
    results = run_product(product(case, "float32", root, kernels), case, split=split)
    exact, found = oracle_outputs(case), []
    for length in goldens.LENGTHS:
        top, mean, _ = _logprob_distance(results, case, length)
        layers = [
            goldens.relative_error(result.layer_outputs, exact[key].layer_outputs).max()
            for key, result in results.items()
            if key[0] == length
        ]
        found.append(Float32Distance(length, top, mean, float(np.max(layers))))  # NaN stays NaN
    return tuple(found)


def bfloat16_distances(case: str, root: Path, *, kernels: str = "auto") -> tuple[Bfloat16Distance, ...]:
    """The bfloat16 model against the oracle, a figure a length."""
    results = run_product(product(case, "bfloat16", root, kernels), case)
    found = []
    for length in goldens.LENGTHS:
        golden = goldens.load_golden(case, length)
        _, mean, p99 = _logprob_distance(results, case, length)
        found.append(Bfloat16Distance(length, mean, p99, golden.bf16_mean, golden.bf16_p99))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class FamilyBar:
    """The bfloat16 bar of a real member, taken from the miniature of its kind.

    Two right computations of one bfloat16 model differ by their roundings: transformers' own bfloat16 run differs from
    its float32 run by that much, in log-probability. What the miniatures share with the members (head sizes, how value
    heads are grouped, logits that spread over a few units) decides it more than the width. So the same figure serves
    two runs of one model that only differ in company, bucket or overlap mode: each rounds as the other does, and a
    wrong page, state or row shows as distances of order one.

    Attributes:
        case: the miniature.
        mean: bar of the mean |delta logprob|: 1.25 times transformers' own, averaged over lengths.
        p99: the same of the 99th percentile.
    """

    case: str
    mean: float
    p99: float


def family_bar(config: ModelConfig) -> FamilyBar:
    """The bar of a model: the miniature with its ratio of value heads to key heads and its tying."""
    ratio = config.gdn.num_v_heads // config.gdn.num_k_heads
    members = {1: "0.8b", 2: "4b", 3: "27b"}
    if ratio not in members:
        raise ValueError(f"no miniature has {ratio} value heads a key head")
    case = f"{members[ratio]}-{'tied' if config.tie_word_embeddings else 'untied'}"
    lengths = [goldens.load_golden(case, length) for length in goldens.LENGTHS]
    mean, p99 = (float(np.mean([getattr(g, name) for g in lengths])) for name in ("bf16_mean", "bf16_p99"))
    return FamilyBar(case, BF16_RATIO * mean, BF16_RATIO * p99)
