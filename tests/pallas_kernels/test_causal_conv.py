"""Conformance of every implementation of causal_conv."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pallas_kernels.causal_conv.specs import CausalConvSpec
from pallas_kernels.spec import TINY_MODELS
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import (
    assert_close,
    assert_same_bits,
    call,
    check,
    every_implementation,
    host,
    share_of_equal_bits,
)

OP = "causal_conv"
TINY = TINY_MODELS["tiny1"]
# Pieces of 1, 2 and 3 tokens with and without a state, longer ones, absent ones.
MIXED = CausalConvSpec(
    name="mixed",
    model=TINY,
    dtype="float32",
    lengths=(1, 2, 3, 1, 2, 3, 4, 0, 70),
    has_state=(True, True, True, False, False, False, True, True, False),
    num_pads=5,
    num_layers=2,
)


@every_implementation(OP)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matches_the_oracle(implementation, dtype):
    check(OP, implementation, dataclasses.replace(MIXED, dtype=dtype).case(1, poison=True))


@every_implementation(OP)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_beside_its_own_are_not_read(implementation, dtype):
    check(OP, implementation, dataclasses.replace(MIXED, dtype=dtype, beside=264).case(2, poison=True))


@every_implementation(OP)
def test_rounds_before_and_after_the_activation(implementation):
    case = host(dataclasses.replace(MIXED, dtype="bfloat16").case(1, poison=True))
    (y, *_), (want, *_) = call(OP, implementation, case), oracle.causal_conv(**case.arguments)
    assert share_of_equal_bits(y, want) > 0.99


@every_implementation(OP)
def test_fresh_inputs(implementation):
    for seed in range(2, 5):
        check(OP, implementation, MIXED.case(seed, poison=True))


@every_implementation(OP)
def test_many_channels(implementation):
    check(OP, implementation, dataclasses.replace(MIXED, model=TINY_MODELS["tiny4g16"]).case(3, poison=True))


def in_pieces(implementation, case, pieces):
    """Feed request 0's first tokens piece by piece through the tail; returns its outputs and the pool."""
    first = case.arguments["cu_seqlens"][:1] * 0
    pool, outputs, start = case.arguments["conv_pool"], [], 0
    for number, piece in enumerate(pieces):
        x = np.full_like(case.arguments["x"], np.nan)
        x[:piece] = case.arguments["x"][start : start + piece]
        step = host(
            case,
            x=x,
            conv_pool=pool,
            cu_seqlens=np.concatenate([first, np.full(len(case.arguments["slot_ids"]), piece, np.int32)]),
            has_state=np.full(len(case.arguments["slot_ids"]), number > 0),
        )
        y, pool = call(OP, implementation, step)
        outputs.append(y[:piece])
        start += piece
    return np.concatenate(outputs), pool


@every_implementation(OP)
@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 7), (2, 2, 7), (3, 8), (1, 2, 3, 5), (10, 1), (9, 2)])
def test_pieces_equal_one_shot(implementation, pieces):
    case = host(MIXED.case(5, poison=True))
    want, want_pool = in_pieces(implementation, case, (sum(pieces),))
    got, got_pool = in_pieces(implementation, case, pieces)
    assert_close(OP, implementation, got, want, name="outputs in pieces")
    slot = case.arguments["slot_ids"][0]
    assert_same_bits(got_pool[-1, slot], want_pool[-1, slot], "the tail after pieces")


@every_implementation(OP)
def test_packed_equals_alone(implementation):
    case = host(MIXED.case(6, poison=True))
    y, pool = call(OP, implementation, case)
    offsets = case.arguments["cu_seqlens"]
    for request, slot in enumerate(case.arguments["slot_ids"]):
        start, stop = offsets[request], offsets[request + 1]
        alone = np.where(np.arange(len(offsets)) > request, stop - start, 0).astype(np.int32)
        x = np.full_like(case.arguments["x"], np.nan)
        x[: stop - start] = case.arguments["x"][start:stop]
        y_alone, pool_alone = call(OP, implementation, host(case, x=x, cu_seqlens=alone))
        assert_close(OP, implementation, y_alone[: stop - start], y[start:stop], name=f"request {request} alone")
        assert_same_bits(pool_alone[-1, slot], pool[-1, slot], f"tail of request {request}")


@every_implementation(OP)
def test_nothing_live_writes_nothing(implementation):
    case = host(MIXED.case(7, poison=True))
    y, pool = call(OP, implementation, host(case, cu_seqlens=np.zeros_like(case.arguments["cu_seqlens"])))
    assert not y.any()
    assert_same_bits(pool[:, 1:], case.arguments["conv_pool"][:, 1:], "a slot")


@every_implementation(OP)
def test_nan_tokens_touch_no_neighbour(implementation):
    case = host(MIXED.case(8, poison=True))
    clean_y, clean_pool = call(OP, implementation, case)
    offsets, victim = case.arguments["cu_seqlens"], 4
    rows = slice(offsets[victim], offsets[victim + 1])
    x = case.arguments["x"].copy()
    x[rows] = np.nan
    y, pool = call(OP, implementation, host(case, x=x))
    assert np.isnan(y[rows]).all()
    others = np.arange(len(x)) // 1
    others = others[(others < rows.start) | (others >= rows.stop)]
    assert_same_bits(y[others], clean_y[others], "a neighbour's output")
    slots = np.arange(1, pool.shape[1])
    slots = slots[slots != case.arguments["slot_ids"][victim]]
    assert_same_bits(pool[:, slots], clean_pool[:, slots], "a neighbour's tail")


@every_implementation(OP)
def test_absent_requests_may_share_the_null_slot(implementation):
    case = host(MIXED.case(9, poison=True))
    lengths = np.array([3, 0, 0, 2, 0, 0, 0, 0, 60])
    slots = np.where(lengths > 0, case.arguments["slot_ids"], 0).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    has_state = case.arguments["has_state"] & (lengths > 0)
    check(OP, implementation, host(case, slot_ids=slots, cu_seqlens=offsets, has_state=has_state))
