"""Conformance of every implementation of paged_decode_attention."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels.paged_decode_attention.specs import PagedDecodeAttentionSpec
from pallas_kernels.spec import TINY_MODELS
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
def test_small_dtypes(implementation, dtype):
    check(OP, implementation, dataclasses.replace(BASE, dtype=dtype).case(3, poison=True))


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
    backwards = {name: case.arguments[name][::-1] for name in ("q", "gate", "page_table", "kv_lens")}
    assert_close(OP, implementation, call(OP, implementation, host(case, **backwards))[0][::-1], out, name="reversed")
    for row in range(5):
        alone = np.where(np.arange(5) == row, case.arguments["kv_lens"], 0).astype(np.int32)
        assert_close(OP, implementation, call(OP, implementation, host(case, kv_lens=alone))[0][row], out[row], name="")
    wide = np.zeros((5, 16), np.int32)
    wide[:, :6] = case.arguments["page_table"]
    assert_close(OP, implementation, call(OP, implementation, host(case, page_table=wide))[0], out, name="wider table")


@every_implementation(OP)
@pytest.mark.parametrize("where", ["q", "gate", "pages"])
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
