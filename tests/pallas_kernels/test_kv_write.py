"""Conformance of every implementation of kv_write."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pallas_kernels.kv_write.specs import KvWriteSpec
from pallas_kernels.spec import TINY_MODELS, Case
from tests.pallas_kernels.conformance import assert_same_bits, call, check, every_implementation, host

OP = "kv_write"
MIXED = KvWriteSpec(
    name="mixed",
    model=TINY_MODELS["tiny2"],
    dtype="float32",
    lengths=(5, 0, 66, 1, 1),
    starts=(62, 0, 0, 300, 191),
    num_pads=5,
    num_layers=2,
)


@every_implementation(OP)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matches_the_oracle(implementation, dtype):
    for seed in (1, 2):
        check(OP, implementation, dataclasses.replace(MIXED, dtype=dtype).case(seed, poison=True))


@every_implementation(OP)
@pytest.mark.parametrize("model", ["tiny1", "tiny3"])
def test_other_head_counts(implementation, model):
    check(OP, implementation, dataclasses.replace(MIXED, model=TINY_MODELS[model]).case(3, poison=True))


@every_implementation(OP)
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_odd_batches_of_decode_rows(implementation, rows):
    starts = tuple(int(start) for start in np.random.default_rng(rows).integers(0, 130, rows))
    spec = dataclasses.replace(MIXED, lengths=(1,) * rows, starts=starts, num_pads=0)
    check(OP, implementation, spec.case(4, poison=True))


@every_implementation(OP)
def test_far_positions(implementation):
    """Up to the end of the longest context: angles of hundreds of thousands of radians."""
    case = host(MIXED.case(5, poison=True))
    positions = case.arguments["positions"].copy()
    positions[:72] = np.linspace(262143 - 72 * 3000, 262143, 72).astype(np.int32)
    check(OP, implementation, host(case, positions=positions))


@every_implementation(OP)
def test_no_rotation_at_position_zero_and_only_leading_dims_rotate(implementation):
    case = host(MIXED.case(6))
    at_zero = host(case, positions=np.zeros_like(case.arguments["positions"]))
    q_zero, _ = call(OP, implementation, at_zero)
    q_far, _ = call(OP, implementation, host(case, positions=np.full_like(case.arguments["positions"], 123)))
    assert_same_bits(q_zero[..., 64:], q_far[..., 64:], "a dim that does not rotate")
    assert (q_zero[:70, :, :64] != q_far[:70, :, :64]).mean() > 0.99


@every_implementation(OP)
def test_pads_share_the_null_page(implementation):
    case = host(MIXED.case(7, poison=True), page_ids=np.zeros(78, np.int32))
    q_out, pool = call(OP, implementation, case)
    assert not q_out.any()
    assert_same_bits(pool[:, 1:], case.arguments["kv_pool"][:, 1:], "a page")


@every_implementation(OP)
def test_nan_row_touches_no_neighbour(implementation):
    case = host(MIXED.case(8, poison=True))
    q_clean, pool_clean = call(OP, implementation, case)
    token = 20
    heads = case.arguments["heads"].copy()
    heads[token] = np.nan
    q_out, pool = call(OP, implementation, host(case, heads=heads))
    pool = pool.copy()
    page, place = case.arguments["page_ids"][token], case.arguments["page_offsets"][token]
    assert np.isnan(q_out[token]).all() and np.isnan(pool[-1, page, :, :, place]).all()
    rows = np.arange(len(q_out)) != token
    assert_same_bits(q_out[rows], q_clean[rows], "a neighbour's query")
    pool[-1, page, :, :, place] = pool_clean[-1, page, :, :, place]
    assert_same_bits(pool[:, 1:], pool_clean[:, 1:], "a neighbour's key or value")


@every_implementation(OP)
@pytest.mark.parametrize("layer", [0, 1])
def test_norms_of_all_layers(implementation, layer):
    """The row of the layer counts, of which nothing else is looked at."""
    case = host(MIXED.case(9, poison=True), layer=np.int32(layer))
    want = call(OP, implementation, case)
    rows = {}
    for name in ("q_norm", "k_norm"):
        rows[name] = np.full((2, MIXED.model.head_dim), np.nan, np.float32)
        rows[name][layer] = case.arguments[name]
    stacked = Case(case.arguments | rows, case.options)
    check(OP, implementation, stacked)
    for got, plain, name in zip(call(OP, implementation, stacked), want, ("queries", "the pool"), strict=True):
        assert_same_bits(got, plain, name)
