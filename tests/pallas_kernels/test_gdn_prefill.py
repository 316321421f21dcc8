"""Conformance of every implementation of gdn_prefill."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pallas_kernels.gdn_prefill.specs import GdnPrefillSpec
from pallas_kernels.spec import TINY_MODELS
from tests.pallas_kernels.conformance import assert_close, assert_same_bits, call, check, every_implementation, host

OP = "gdn_prefill"
MIXED = GdnPrefillSpec(
    name="mixed",
    model=TINY_MODELS["tiny1"],
    dtype="float32",
    lengths=(70, 0, 1, 64, 130, 3),
    has_state=(True, True, False, False, True, True),
    num_pads=5,
    num_layers=2,
)


@every_implementation(OP)
@pytest.mark.parametrize("model", ["tiny1", "tiny2", "tiny3", "tiny4g16"])
def test_matches_the_oracle_at_every_head_ratio(implementation, model):
    check(OP, implementation, dataclasses.replace(MIXED, model=TINY_MODELS[model]).case(1, poison=True))


@every_implementation(OP)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_bfloat16(implementation, state_dtype):
    spec = dataclasses.replace(MIXED, dtype="bfloat16", state_dtype=state_dtype, model=TINY_MODELS["tiny2"])
    check(OP, implementation, spec.case(2, poison=True))


@every_implementation(OP)
def test_fresh_inputs(implementation):
    for seed in range(3, 6):
        check(OP, implementation, MIXED.case(seed, poison=True))


@every_implementation(OP)
def test_strong_decay(implementation):
    """Each token erases the state; factored exponentials would overflow here."""
    check(OP, implementation, dataclasses.replace(MIXED, decay="strong").case(6, poison=True))


@every_implementation(OP)
def test_no_decay(implementation):
    """exp(g) = 1: nothing is forgotten, no error either."""
    check(OP, implementation, dataclasses.replace(MIXED, decay="none").case(7, poison=True))


@every_implementation(OP)
def test_infinite_decay(implementation):
    """exp(A_log) overflows to infinity on one head: its log decay is -inf."""
    case = host(MIXED.case(8, poison=True))
    decay = case.arguments["A_log"].copy()
    decay[1] = 100.0
    case = host(case, A_log=decay)
    out, pool = call(OP, implementation, case)
    assert np.isfinite(out).all()
    decay[1] = 8.0  # log decays far below -100 are the same thing in finite numbers
    want, want_pool = call(OP, implementation, host(case, A_log=decay))
    assert_close(OP, implementation, out, want, name="output")
    slots = [slot for slot, length in zip(case.arguments["slot_ids"], MIXED.lengths, strict=True) if length]
    assert_close(OP, implementation, pool[-1, slots], want_pool[-1, slots], name="states")


@every_implementation(OP)
def test_decays_of_every_size_in_one_chunk(implementation):
    """Weak decays right after erasing ones keep their accuracy."""
    case = host(MIXED.case(9, poison=True))
    inputs = case.arguments["a"].copy()
    inputs[::7] = 30.0  # softplus(30) x exp(A_log): up to about -50 a token
    check(OP, implementation, host(case, a=inputs))


@every_implementation(OP)
def test_repeated_keys(implementation):
    """Equal keys, strong writes, no decay: powers of the coupling matrix grow like binomials, the solution does not."""
    case = host(dataclasses.replace(MIXED, decay="none").case(10, poison=True))
    qkv, real = case.arguments["qkv"].copy(), MIXED.num_pads
    keys = slice(TINY_MODELS["tiny1"].num_k_heads * 128, 2 * TINY_MODELS["tiny1"].num_k_heads * 128)
    qkv[:-real, keys] = qkv[0, keys]
    b = case.arguments["b"].copy()
    b[:-real] = 3.5  # beta = 0.97
    check(OP, implementation, host(case, qkv=qkv, b=b))


def piecewise(implementation, case, pieces):
    """Run the first sum(pieces) tokens as request 0 piece by piece; returns its outputs and its state."""
    requests, slot = len(case.arguments["slot_ids"]), case.arguments["slot_ids"][0]
    pool, outputs, start = case.arguments["state_pool"], [], 0
    for number, piece in enumerate(pieces):
        moved = {}
        for name in ("qkv", "b", "a"):
            moved[name] = np.full_like(case.arguments[name], np.nan)
            moved[name][:piece] = case.arguments[name][start : start + piece]
        offsets = np.full(requests + 1, piece, np.int32)
        offsets[0] = 0
        step = host(case, **moved, state_pool=pool, cu_seqlens=offsets, has_state=np.full(requests, number > 0, bool))
        out, pool = call(OP, implementation, step)
        outputs.append(out[:piece])
        start += piece
    return np.concatenate(outputs), pool[-1, slot]


@every_implementation(OP)
@pytest.mark.parametrize("pieces", [(64, 64, 22), (128, 22), (1, 149), (63, 2, 85), (65, 64, 21)])
def test_pieces_equal_one_shot(implementation, pieces):
    case = host(MIXED.case(11, poison=True))
    want, want_state = piecewise(implementation, case, (sum(pieces),))
    got, got_state = piecewise(implementation, case, pieces)
    assert_close(OP, implementation, got, want, name="outputs in pieces")
    assert_close(OP, implementation, got_state, want_state, name="state after pieces")


@every_implementation(OP)
def test_packed_equals_alone(implementation):
    case = host(MIXED.case(12, poison=True))
    out, pool = call(OP, implementation, case)
    offsets = case.arguments["cu_seqlens"]
    for request, slot in enumerate(case.arguments["slot_ids"]):
        start, stop = offsets[request], offsets[request + 1]
        moved = {}
        for name in ("qkv", "b", "a"):
            moved[name] = np.full_like(case.arguments[name], np.nan)
            moved[name][: stop - start] = case.arguments[name][start:stop]
        alone = np.where(np.arange(len(offsets)) > request, stop - start, 0).astype(np.int32)
        out_alone, pool_alone = call(OP, implementation, host(case, **moved, cu_seqlens=alone))
        assert_close(OP, implementation, out_alone[: stop - start], out[start:stop], name=f"request {request} alone")
        if stop > start:
            assert_close(OP, implementation, pool_alone[-1, slot], pool[-1, slot], name=f"state of request {request}")


@every_implementation(OP)
def test_bucket_size_does_not_matter(implementation):
    """More pads, more absent requests: the same numbers."""
    case = host(MIXED.case(13, poison=True))
    out, pool = call(OP, implementation, case)
    tokens, pads, absent = len(out), 59, 3
    larger = {
        name: np.concatenate([case.arguments[name], np.full((pads, *case.arguments[name].shape[1:]), np.nan, "f4")])
        for name in ("qkv", "b", "a")
    }
    larger["slot_ids"] = np.concatenate([case.arguments["slot_ids"], np.zeros(absent, np.int32)])
    larger["has_state"] = np.concatenate([case.arguments["has_state"], np.zeros(absent, bool)])
    last = case.arguments["cu_seqlens"][-1:]
    larger["cu_seqlens"] = np.concatenate([case.arguments["cu_seqlens"], np.repeat(last, absent)])
    out_larger, pool_larger = call(OP, implementation, host(case, **larger))
    assert_close(OP, implementation, out_larger[:tokens], out, name="output in a larger bucket")
    assert not out_larger[tokens:].any()
    written = case.arguments["slot_ids"][np.diff(case.arguments["cu_seqlens"]) > 0]
    assert_close(OP, implementation, pool_larger[-1, written], pool[-1, written], name="states in a larger bucket")
    untouched = np.setdiff1d(np.arange(1, pool.shape[1]), written)
    assert_same_bits(pool_larger[-1, untouched], case.arguments["state_pool"][-1, untouched], "an untouched slot")


@every_implementation(OP)
def test_nothing_live_writes_nothing(implementation):
    case = host(MIXED.case(14, poison=True))
    out, pool = call(OP, implementation, host(case, cu_seqlens=np.zeros_like(case.arguments["cu_seqlens"])))
    assert not out.any()
    assert_same_bits(pool[:, 1:], case.arguments["state_pool"][:, 1:], "a slot")


@every_implementation(OP)
@pytest.mark.parametrize("victim", [0, 3])
def test_nan_tokens_touch_no_neighbour(implementation, victim):
    case = host(MIXED.case(15, poison=True))
    clean_out, clean_pool = call(OP, implementation, case)
    offsets = case.arguments["cu_seqlens"]
    rows = np.zeros(len(clean_out), bool)
    rows[offsets[victim] : offsets[victim + 1]] = True
    qkv = np.where(rows[:, None], np.nan, case.arguments["qkv"]).astype(np.float32)
    out, pool = call(OP, implementation, host(case, qkv=qkv))
    slot = case.arguments["slot_ids"][victim]
    assert np.isnan(out[rows]).all() and np.isnan(pool[-1, slot]).all()
    assert_same_bits(out[~rows], clean_out[~rows], "a neighbour's output")
    others = np.setdiff1d(np.arange(1, pool.shape[1]), [slot])
    assert_same_bits(pool[:, others], clean_pool[:, others], "a neighbour's state")


@every_implementation(OP)
@pytest.mark.parametrize("decay", ["mixed", "none"])
def test_long_context(implementation, decay):
    """2,048 tokens in one request: the state's error does not grow with the number of chunks."""
    spec = dataclasses.replace(
        MIXED, model=TINY_MODELS["tiny2g8"], lengths=(2048,), has_state=(True,), num_pads=0, decay=decay
    )
    check(OP, implementation, spec.case(16, poison=True))
