"""Conformance of every implementation of paged_decode_attention."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels.paged_decode_attention.specs import PagedDecodeAttentionSpec
from pallas_kernels.spec import PAGE_SIZE, REAL_MODELS, TINY_MODELS, Case, Draw, ModelShape, nan_where
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import assert_close, assert_same_bits, call, check, every_implementation, host

OP = "paged_decode_attention"
BASE = PagedDecodeAttentionSpec(
    name="base",
    model=TINY_MODELS["tiny1"],
    dtype="float32",
    kv_lens=(1, 65, 0, 300, 64),
    width=6,
    num_pages=40,
    num_layers=2,
)


@every_implementation(OP)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 33])
def test_odd_batches(implementation, rows):
    lengths = tuple(int(n) for n in np.random.default_rng(rows).integers(0, 200, rows))
    lengths = (*lengths[:-1], 130)  # at least one live row
    spec = dataclasses.replace(BASE, kv_lens=lengths, width=4, num_pages=140, num_layers=1)
    check(OP, implementation, spec.case(1, poison=True))


@every_implementation(OP)
@pytest.mark.parametrize("model", ["tiny1", "tiny2", "tiny3", "tiny2g8", "tiny4g16"])
def test_every_head_ratio(implementation, model):
    check(OP, implementation, dataclasses.replace(BASE, model=TINY_MODELS[model]).case(2, poison=True))


@every_implementation(OP)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", ["tiny1", "tiny3", "tiny2g8", "tiny4g16"])
def test_small_dtypes(implementation, model, dtype):
    """In groups of 4, 6, 8 and 16 query heads."""
    check(OP, implementation, dataclasses.replace(BASE, model=TINY_MODELS[model], dtype=dtype).case(3, poison=True))


@every_implementation(OP)
def test_every_length_around_a_page(implementation):
    """1..5, 62..66 and so on: lengths change, the shape does not."""
    lengths = np.array([1, 2, 3, 62, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 320], np.int32)
    for batch in lengths.reshape(3, 5):
        spec = dataclasses.replace(BASE, kv_lens=tuple(int(n) for n in batch))
        check(OP, implementation, spec.case(int(batch[0]), poison=True))


@every_implementation(OP)
def test_peaked_scores(implementation):
    """Scores in the hundreds: the softmax must be shifted by its maximum, and rescaled as the maximum moves."""
    case = host(BASE.case(4, poison=True))
    check(OP, implementation, host(case, q=case.arguments["q"] * 40), scale=40)  # errors of scores 40 times as large


@every_implementation(OP)
def test_all_rows_padding(implementation):
    case = host(BASE.case(5, poison=True), kv_lens=np.zeros(5, np.int32))
    (out,) = call(OP, implementation, case)
    assert not out.any()


@every_implementation(OP)
def test_company_and_width_do_not_matter(implementation):
    case = host(BASE.case(6, poison=True))
    (out,) = call(OP, implementation, case)
    backwards = {name: case.arguments[name][::-1] for name in ("q", "gates", "page_table", "kv_lens")}
    assert_close(OP, implementation, call(OP, implementation, host(case, **backwards))[0][::-1], out, name="reversed")
    for row in range(5):
        alone = np.where(np.arange(5) == row, case.arguments["kv_lens"], 0).astype(np.int32)
        assert_close(OP, implementation, call(OP, implementation, host(case, kv_lens=alone))[0][row], out[row], name="")
    wide = np.zeros((5, 16), np.int32)
    wide[:, :6] = case.arguments["page_table"]
    assert_close(OP, implementation, call(OP, implementation, host(case, page_table=wide))[0], out, name="wider table")


@every_implementation(OP)
@pytest.mark.parametrize("where", ["q", "gates", "pages"])
def test_nan_row_touches_no_neighbour(implementation, where):
    case = host(BASE.case(7, poison=True))
    (clean,) = call(OP, implementation, case)
    victim = 1
    name = "kv_pool" if where == "pages" else where
    poisoned = case.arguments[name].copy()
    poisoned[(-1, case.arguments["page_table"][victim, 0]) if where == "pages" else victim] = np.nan
    (out,) = call(OP, implementation, host(case, **{name: poisoned}))
    assert np.isnan(out[victim]).all()
    rows = np.arange(5) != victim
    assert_same_bits(out[rows], clean[rows], "a neighbour's output")


@every_implementation(OP)
def test_long_context(implementation):
    """One row of 32k tokens (128k on a GPU) beside a short one."""
    longest = 131072 if jax.default_backend() == "gpu" else 32768
    spec = dataclasses.replace(BASE, kv_lens=(longest, 3), width=None, num_pages=None, num_layers=1, dtype="bfloat16")
    check(OP, implementation, spec.case(8, poison=True))


@every_implementation(OP)
@pytest.mark.parametrize("first", [0, 1, 6])
def test_gates_are_read_where_they_are(implementation, first):
    """At the front of the array, in the middle and at its end: the same bits."""
    case = host(BASE.case(9, poison=True))
    (out,) = call(OP, implementation, case)
    heads, own = BASE.model.num_heads, case.options["first_gate"]
    moved = np.full_like(case.arguments["gates"], np.nan)
    moved[:, first : first + heads] = case.arguments["gates"][:, own : own + heads]
    other = Case(case.arguments | {"gates": moved}, {"first_gate": first})
    assert_same_bits(call(OP, implementation, other)[0], out, "the output")


def shared_pages(model: ModelShape, lengths, num_pages: int, seed: int) -> Case:
    """Rows far longer than the pool: their tables name its pages again and again, in no order.

    Page 0 and the last three pages hold NaN; entries past a length name one of those.
    """
    draw, rows = Draw(seed), len(lengths)
    width = max(1, -(-max(lengths) // PAGE_SIZE))
    pool = draw.normal((2, num_pages, 2, model.num_kv_heads, PAGE_SIZE, model.head_dim), "bfloat16")
    real = np.zeros((2, num_pages), bool)
    real[1, 1:-3] = True
    table = draw.numpy.integers(1, num_pages - 3, (rows, width))
    for row, length in enumerate(lengths):
        pages = -(-length // PAGE_SIZE)
        table[row, pages:] = draw.numpy.choice([0, num_pages - 3, num_pages - 1], width - pages)
    shape = (rows, model.num_heads, model.head_dim)
    arguments = {
        "q": draw.normal(shape, "bfloat16"),
        "gates": draw.normal(shape, "bfloat16"),
        "kv_pool": nan_where(~real, pool),
        "layer": np.int32(1),
        "page_table": table.astype(np.int32),
        "kv_lens": np.array(lengths, np.int32),
    }
    return Case(arguments, {})


def oracle_of_shared_pages(q, gates, kv_pool, layer, page_table, kv_lens) -> np.ndarray:
    """Float64: each distinct key once, its weight times how often it is seen; memory of the pool, not of the rows."""
    num_pages, num_kv_heads, head_dim = kv_pool.shape[1], kv_pool.shape[3], kv_pool.shape[5]
    out = np.zeros(q.shape)
    for row, length in enumerate(kv_lens):
        if length == 0:
            continue
        seen = np.zeros((num_pages, PAGE_SIZE))
        full, rest = divmod(length, PAGE_SIZE)
        np.add.at(seen, page_table[row, :full], 1)
        if rest:
            seen[page_table[row, full], :rest] += 1
        keys, values = (
            np.moveaxis(kv_pool[layer, :, which], 1, 0)[:, seen > 0].astype(np.float64) for which in (0, 1)
        )  # [K, S, H]
        query = q[row].astype(np.float64).reshape(num_kv_heads, -1, head_dim) * head_dim**-0.5
        scores = np.matmul(query, np.swapaxes(keys, 1, 2))
        weights = seen[seen > 0] * np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = np.matmul(weights / weights.sum(axis=-1, keepdims=True), values)
        out[row] = attended.reshape(q[row].shape) * oracle.sigmoid(gates[row].astype(np.float64))
    return out


@every_implementation(OP)
@pytest.mark.parametrize("rows", [(1, 4097, 0), (130, 64, 1, 63, 999)])
def test_shared_pages_in_no_order(implementation, rows):
    """The oracle of the long contexts below agrees with the one that gathers every page."""
    case = shared_pages(TINY_MODELS["tiny1"], rows, 12, 1)
    want = oracle_of_shared_pages(**case.arguments)
    np.testing.assert_allclose(want, oracle.paged_decode_attention(**case.arguments)[0], rtol=1e-9, atol=1e-12)
    (out,) = call(OP, implementation, case)
    assert_close(OP, implementation, out, want, name="output")


LONG = (
    (262144,),
    (131072, 1, 200001),
    (262143, 0, 1, 2, 63, 64, 65, 4097, 32768, 131072, 131071),
    (*range(1, 8192, 163), 131072),
)


@pytest.mark.gpu
@every_implementation(OP)
@pytest.mark.parametrize("model", ["4b", "27b", "tiny2g8", "tiny4g16"])
@pytest.mark.parametrize("lengths", LONG, ids=["1x256k", "3", "11", "52"])
def test_contexts_up_to_256k(implementation, model, lengths):
    """Groups of 4, 6, 8 and 16 query heads, lengths from 1 to the model's longest, odd numbers of rows and even."""
    case = shared_pages((REAL_MODELS | TINY_MODELS)[model], lengths, 40, len(lengths))
    (out,) = call(OP, implementation, case)
    assert_close(OP, implementation, out, oracle_of_shared_pages(**case.arguments), name="output")
    assert not out[np.array(lengths) == 0].any()
