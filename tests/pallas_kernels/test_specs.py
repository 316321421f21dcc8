"""Specs: real shapes that the ops take, honest counts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.spec import REAL_MODELS, TINY_MODELS, Case, specs_of, tiny_specs_of
from tests.pallas_kernels.conformance import OPS, host

DISTINCT = ("0.8b", "4b", "27b")  # 2b and 9b have the mixers of 0.8b and 4b


def specs_to_trace(op):
    """Every workload of one model, the first two of each other distinct one."""
    for name in DISTINCT:
        specs = [spec for spec in specs_of(op).values() if spec.model.name == name]
        assert len(specs) > 2
        yield from specs if name == "4b" else specs[:2]


@pytest.mark.parametrize("op", OPS)
def test_real_specs_trace_through_their_op(op):
    for spec in specs_to_trace(op):

        def program(spec=spec):
            case: Case = spec.case()
            results = getattr(pallas_kernels, op)(**case.arguments, **case.options)
            pools = [case.arguments[name] for name in spec.pools]
            return results if isinstance(results, tuple) else (results,), pools

        results, pools = jax.eval_shape(program)
        updated = results[len(results) - len(pools) :]
        assert [(pool.shape, pool.dtype) for pool in updated] == [(pool.shape, pool.dtype) for pool in pools]
        assert results[0].dtype == jnp.bfloat16
        assert spec.compulsory_bytes() > 0 and spec.flops() >= 0


@pytest.mark.parametrize("op", OPS)
def test_names_are_unique_and_all_models_are_there(op):
    specs = list(specs_of(op).values())
    assert {spec.model.name for spec in specs} == {*REAL_MODELS, *TINY_MODELS}
    assert len({(spec.op, spec.name) for spec in specs}) == len(specs)
    for name, spec in specs_of(op).items():
        assert name == spec.name and name.startswith(f"{spec.model.name}-") and spec.op == op
        assert name not in tiny_specs_of(op) or spec.model.name in TINY_MODELS


def test_models_are_those_of_the_family():
    assert {model.num_v_heads // model.num_k_heads for model in REAL_MODELS.values()} == {1, 2, 3}
    assert {model.num_v_heads // model.num_k_heads for model in TINY_MODELS.values()} >= {1, 2, 3}
    assert {model.num_heads // model.num_kv_heads for model in TINY_MODELS.values()} == {4, 6, 8, 16}
    assert REAL_MODELS["4b"].conv_dim == 2 * 16 * 128 + 32 * 128
    assert REAL_MODELS["27b"].value_dim == 48 * 128


def test_counts_by_hand():
    decode = specs_of("gdn_decode")["4b-rows64"]
    state = 32 * 128 * 128 * 4
    row = 2 * state + 2 * (8192 + 6 * 8192 + 4096 + 4096 + 32 + 32)  # state, qkv, tail in and out, z, y, b, a
    weights = 2 * 4 * 8192 + 4 * (32 + 32 + 128)
    assert decode.compulsory_bytes() == 64 * row + weights
    attention = specs_of("paged_decode_attention")["4b-64x1k"]
    assert attention.compulsory_bytes() == 64 * (1024 * 2 * 4 * 256 * 2 + 3 * 16 * 256 * 2 + 16 * 4)
    prefill = specs_of("paged_prefill_attention")["4b-8x1024"]
    assert prefill.flops() == 8 * (1024 * 1025 // 2) * 16 * 256 * 4
    prefixed = specs_of("paged_prefill_attention")["4b-2048on30k"]
    assert prefixed.flops() == sum(30720 + i + 1 for i in range(2048)) * 16 * 256 * 4


@pytest.mark.parametrize("op", OPS)
def test_poison_covers_what_must_not_be_read(op):
    """A poisoned case is the plain one with NaN in some places, the null slot or page among them."""
    spec = next(iter(tiny_specs_of(op).values()))
    plain, poisoned = host(spec.case(3)), host(spec.case(3, poison=True))
    for name, array in plain.arguments.items():
        other = poisoned.arguments[name]
        if name == "page_table":
            continue  # entries past a length are stray pages instead of 0
        if jnp.issubdtype(array.dtype, jnp.floating):
            np.testing.assert_array_equal(other[~np.isnan(other)], array[~np.isnan(other)])
        else:
            np.testing.assert_array_equal(other, array)
    pools = [name for name in poisoned.arguments if name.endswith("_pool")]
    for name in pools:
        assert np.isnan(poisoned.arguments[name][:, 0]).all(), f"{name}: the null entry is not poisoned"
        assert np.isnan(poisoned.arguments[name][0]).all(), f"{name}: another layer is not poisoned"


def test_cases_repeat_with_the_seed():
    spec = dataclasses.replace(tiny_specs_of("gdn_decode")["tiny1-rows5"])
    first, again, other = (host(spec.case(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.arguments["projected"], again.arguments["projected"])
    assert (first.arguments["projected"] != other.arguments["projected"]).any()
