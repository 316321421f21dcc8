"""Conformance of every implementation of paged_prefill_attention."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels.paged_prefill_attention.specs import PagedPrefillAttentionSpec
from pallas_kernels.spec import TINY_MODELS, Case
from tests.pallas_kernels.conformance import assert_close, assert_same_bits, call, check, every_implementation, host

OP = "paged_prefill_attention"
MIXED = PagedPrefillAttentionSpec(
    name="mixed",
    model=TINY_MODELS["tiny1"],
    dtype="float32",
    lengths=(70, 0, 1, 64, 130, 3),
    prefixes=(0, 0, 300, 64, 63, 1),
    num_pads=5,
    width=7,
    num_layers=2,
)

# float32, and the dtype of the kernels that take no float32.
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def mixed(dtype: str, **changes) -> PagedPrefillAttentionSpec:
    return dataclasses.replace(MIXED, dtype=dtype, **changes)


@every_implementation(OP)
@both_dtypes
@pytest.mark.parametrize("model", ["tiny1", "tiny2", "tiny3", "tiny2g8", "tiny4g16"])
def test_matches_the_oracle_at_every_head_ratio(implementation, dtype, model):
    check(OP, implementation, mixed(dtype, model=TINY_MODELS[model]).case(1, poison=True))


@every_implementation(OP)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_dtypes(implementation, dtype):
    check(OP, implementation, mixed(dtype).case(2, poison=True))


@every_implementation(OP)
@both_dtypes
def test_fresh_inputs(implementation, dtype):
    for seed in range(3, 6):
        check(OP, implementation, mixed(dtype).case(seed, poison=True))


@every_implementation(OP)
@both_dtypes
def test_peaked_scores(implementation, dtype):
    """Scores in the hundreds: the softmax must be shifted by its maximum, and rescaled as the maximum moves."""
    case = host(mixed(dtype).case(6, poison=True))
    check(OP, implementation, host(case, q=case.arguments["q"] * 40), scale=40)  # errors of scores 40 times as large


def test_scores_are_not_all_alike():
    """The cases above would not see a missing mask if attention were nearly uniform over thousands of keys."""
    case = host(MIXED.case(1))
    q, pool = case.arguments["q"], case.arguments["kv_pool"]
    scores = np.einsum("nh,zh->nz", q[0], pool[-1, case.arguments["page_table"][0, 0], 0, 0]) / 16
    assert scores.std() > 0.5


@every_implementation(OP)
@both_dtypes
def test_packed_equals_alone(implementation, dtype):
    case = host(mixed(dtype).case(7, poison=True))
    (out,) = call(OP, implementation, case)
    offsets = case.arguments["cu_seqlens"]
    for request in range(len(MIXED.lengths)):
        start, stop = offsets[request], offsets[request + 1]
        moved = {}
        for name in ("q", "gates"):
            moved[name] = np.full_like(case.arguments[name], np.nan)
            moved[name][: stop - start] = case.arguments[name][start:stop]
        alone = np.where(np.arange(len(offsets)) > request, stop - start, 0).astype(np.int32)
        (out_alone,) = call(OP, implementation, host(case, **moved, cu_seqlens=alone))
        assert_close(OP, implementation, out_alone[: stop - start], out[start:stop], name=f"request {request} alone")


@every_implementation(OP)
@both_dtypes
@pytest.mark.parametrize("pieces", [(64, 64, 2), (1, 129), (100, 30)])
def test_pieces_equal_one_shot(implementation, dtype, pieces):
    """Request 4 (130 tokens on a prefix of 63) piece by piece, with NaN in the pages of what is still to come."""
    case = host(mixed(dtype).case(8, poison=True))
    (out,) = call(OP, implementation, case)
    offsets, request = case.arguments["cu_seqlens"], 4
    first, done, outputs = offsets[request], 0, []
    for piece in pieces:
        moved = {}
        for name in ("q", "gates"):
            moved[name] = np.full_like(case.arguments[name], np.nan)
            moved[name][:piece] = case.arguments[name][first + done : first + done + piece]
        done += piece
        kv_lens = case.arguments["kv_lens"].copy()
        kv_lens[request] = MIXED.prefixes[request] + done
        pool = case.arguments["kv_pool"].copy()
        for position in range(kv_lens[request], MIXED.kv_lens[request]):
            pool[-1, case.arguments["page_table"][request, position // 64], :, :, position % 64] = np.nan
        step_offsets = np.where(np.arange(len(offsets)) > request, piece, 0).astype(np.int32)
        step = host(case, **moved, kv_pool=pool, kv_lens=kv_lens, cu_seqlens=step_offsets)
        outputs.append(call(OP, implementation, step)[0][:piece])
    got = np.concatenate(outputs)
    assert_close(OP, implementation, got, out[first : first + sum(pieces)], name="outputs in pieces")


@every_implementation(OP)
@both_dtypes
def test_bucket_size_does_not_matter(implementation, dtype):
    """More pads, absent requests and a wider page table: the same numbers."""
    case = host(mixed(dtype).case(9, poison=True))
    (out,) = call(OP, implementation, case)
    tokens, pads, absent = len(out), 50, 2
    larger = {
        name: np.concatenate([array, np.full((pads, *array.shape[1:]), np.nan, array.dtype)])
        for name, array in case.arguments.items()
        if name in ("q", "gates")
    }
    table = case.arguments["page_table"]
    larger["page_table"] = np.zeros((len(table) + absent, 16), np.int32)
    larger["page_table"][: len(table), : table.shape[1]] = table
    larger["kv_lens"] = np.concatenate([case.arguments["kv_lens"], np.zeros(absent, np.int32)])
    last = case.arguments["cu_seqlens"][-1:]
    larger["cu_seqlens"] = np.concatenate([case.arguments["cu_seqlens"], np.repeat(last, absent)])
    (out_larger,) = call(OP, implementation, host(case, **larger))
    assert_close(OP, implementation, out_larger[:tokens], out, name="output in a larger bucket")
    assert not out_larger[tokens:].any()


@every_implementation(OP)
@both_dtypes
def test_nan_request_touches_no_neighbour(implementation, dtype):
    case = host(mixed(dtype).case(10, poison=True))
    (clean,) = call(OP, implementation, case)
    offsets, victim = case.arguments["cu_seqlens"], 3
    rows = np.zeros(len(clean), bool)
    rows[offsets[victim] : offsets[victim + 1]] = True
    q = case.arguments["q"].copy()
    q[rows] = np.nan
    pool = case.arguments["kv_pool"].copy()
    pool[-1, case.arguments["page_table"][victim, :2]] = np.nan
    (out,) = call(OP, implementation, host(case, q=q, kv_pool=pool))
    assert np.isnan(out[rows]).all()
    assert_same_bits(out[~rows], clean[~rows], "a neighbour's output")


@every_implementation(OP)
@both_dtypes
@pytest.mark.parametrize("first", [0, 1, 6])
def test_gates_are_read_where_they_are(implementation, dtype, first):
    """At the front of the array, in the middle and at its end: the same bits."""
    case = host(mixed(dtype).case(13, poison=True))
    (out,) = call(OP, implementation, case)
    heads, own = MIXED.model.num_heads, case.options["first_gate"]
    moved = np.full_like(case.arguments["gates"], np.nan)
    moved[:, first : first + heads] = case.arguments["gates"][:, own : own + heads]
    other = Case(case.arguments | {"gates": moved}, {"first_gate": first})
    assert_same_bits(call(OP, implementation, other)[0], out, "the output")


@every_implementation(OP)
@both_dtypes
def test_future_tokens_are_not_seen(implementation, dtype):
    """Other keys and values past a query's position change nothing, to the last bit."""
    case = host(mixed(dtype).case(11, poison=True))
    (clean,) = call(OP, implementation, case)
    pool = case.arguments["kv_pool"].copy()
    request = 4
    for position in range(MIXED.prefixes[request] + 10, MIXED.kv_lens[request]):
        pool[-1, case.arguments["page_table"][request, position // 64], :, :, position % 64] += 1.0
    (out,) = call(OP, implementation, host(case, kv_pool=pool))
    first, last = case.arguments["cu_seqlens"][request : request + 2]
    assert_same_bits(out[first : first + 10], clean[first : first + 10], "an earlier token's output")
    assert (out[first + 10 : last] != clean[first + 10 : last]).any(axis=(1, 2)).all()


@every_implementation(OP)
@both_dtypes
def test_long_prefix(implementation, dtype):
    """A chunk of 20 tokens on a prefix of 8k (32k on a GPU)."""
    prefix = 32768 if jax.default_backend() == "gpu" else 8192
    spec = mixed(dtype, lengths=(20,), prefixes=(prefix,), num_pads=0, width=None, num_layers=1)
    check(OP, implementation, spec.case(12, poison=True))
