"""Wrong arguments are refused by name, before anything is traced."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tests.pallas_kernels.conformance import OPS, POOL_OPS, tiny_specs_of

S = jax.ShapeDtypeStruct


def case_of(op):
    return next(iter(tiny_specs_of(op).values())).case()


def trace(op, options=None, **changes):
    """Trace the op with some arguments replaced."""
    case = case_of(op)
    arguments = dict(case.arguments) | changes
    static = case.options | (options or {})
    return jax.eval_shape(lambda arguments: getattr(pallas_kernels, op)(**arguments, **static), arguments)


def shaped(op, name, change):
    array = case_of(op).arguments[name]
    return S(change(tuple(np.shape(array))), array.dtype)


def cases_of_wrong_shapes():
    for op in OPS:
        for name in case_of(op).arguments:
            if name != "layer":
                yield pytest.param(op, name, lambda shape: (*shape, 1), id=f"{op}-{name}-rank")
    for op, name, axis in [
        ("add_rms_norm", "delta", 0),
        ("add_rms_norm", "weight", 0),
        ("gated_rms_norm", "projected", 0),
        ("gated_rms_norm", "weight", 0),
        ("causal_conv", "weight", 0),
        ("causal_conv", "weight", 1),
        ("causal_conv", "conv_pool", 2),
        ("causal_conv", "conv_pool", 3),
        ("causal_conv", "has_state", 0),
        ("causal_conv", "cu_seqlens", 0),
        ("gdn_prefill", "qkv", 1),
        ("gdn_prefill", "b", 0),
        ("gdn_prefill", "b", 1),
        ("gdn_prefill", "a", 1),
        ("gdn_prefill", "cu_seqlens", 0),
        ("gdn_decode", "projected", 0),
        ("gdn_decode", "projected", 1),
        ("gdn_decode", "conv_weight", 0),
        ("gdn_decode", "conv_pool", 2),
        ("gdn_decode", "norm_weight", 0),
        ("gdn_decode", "slot_ids", 0),
        ("kv_write", "heads", 0),
        ("kv_write", "heads", 1),
        ("kv_write", "heads", 2),
        ("kv_write", "q_norm", 0),
        ("kv_write", "k_norm", 0),
        ("kv_write", "kv_pool", 2),
        ("kv_write", "kv_pool", 5),
        ("kv_write", "positions", 0),
        ("paged_prefill_attention", "gates", 0),
        ("paged_prefill_attention", "cu_seqlens", 0),
        ("paged_prefill_attention", "kv_lens", 0),
        ("paged_decode_attention", "gates", 2),
        ("paged_decode_attention", "page_table", 0),
        ("paged_decode_attention", "kv_lens", 0),
        ("swiglu_product", "weight", 0),
        ("swiglu_product", "weight", 1),
    ]:

        def longer(shape, axis=axis):
            return tuple(size + (number == axis) for number, size in enumerate(shape))

        yield pytest.param(op, name, longer, id=f"{op}-{name}-axis{axis}")


@pytest.mark.parametrize(("op", "name", "change"), list(cases_of_wrong_shapes()))
def test_wrong_shapes_are_named(op, name, change):
    wrong = shaped(op, name, change)
    with pytest.raises(ValueError) as caught:
        trace(op, **{name: wrong})
    message = str(caught.value)
    assert message.startswith(f"{op}: ")
    # A size that two arguments disagree on may be reported at either; both are then named.
    assert name in message and str(wrong.shape) in message or "comes from" in message and name in message


@pytest.mark.parametrize("op", ["gdn_prefill", "gdn_decode"])
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_numbers_of_heads_may_have_more_behind_them(op, name):
    heads = case_of(op).arguments["state_pool"].shape[2]
    trace(op, **{name: S((heads + 5,), jnp.float32)})
    for shape in [(heads - 1,), (heads, 1)]:
        with pytest.raises(
            ValueError, match=rf"{op}: {name} must be \[Hv or more\], got shape {re.escape(str(shape))}"
        ):
            trace(op, **{name: S(shape, jnp.float32)})


@pytest.mark.parametrize("op", OPS)
def test_wrong_dtypes_are_named(op):
    for name, array in case_of(op).arguments.items():
        wrong = S(np.shape(array), jnp.uint8)
        with pytest.raises(TypeError, match=rf"^{op}: .*{name}"):
            trace(op, **{name: wrong} if name != "layer" else {name: S((), jnp.float32)})


@pytest.mark.parametrize("op", POOL_OPS)
def test_layer_is_one_integer(op):
    with pytest.raises(ValueError, match=f"{op}: layer must be a scalar, got shape \\(1,\\)"):
        trace(op, layer=S((1,), jnp.int32))
    with pytest.raises(TypeError, match=f"{op}: layer must be an integer"):
        getattr(pallas_kernels, op)(**case_of(op).arguments | {"layer": 1.0}, **case_of(op).options)


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("gdn_prefill", {"num_k_heads": 3}, r"num_k_heads must divide Hv = 2 \(state_pool, shape .*\), got 3"),
        ("gdn_decode", {"num_k_heads": 0}, r"num_k_heads must divide Hv = 2 .*, got 0"),
        (
            "gdn_prefill",
            {"num_k_heads": 1},
            r"qkv must be \[T, C\].*axis 1 is 768, expected 512 \(C = 512 comes from 2 \* Hk",
        ),
        (
            "gdn_decode",
            {"head_k_dim": 64},
            r"state_pool must be .*axis 4 is 128, expected 64 \(Dk = 64 comes from head_k_dim",
        ),
        ("kv_write", {"rotary_dim": 258}, "rotary_dim must be even, positive and at most H = 256, got 258"),
        ("kv_write", {"rotary_dim": 63}, "rotary_dim must be even, positive and at most H = 256, got 63"),
        ("kv_write", {"num_heads": -1}, "num_heads must not be negative, got -1"),
        (
            "kv_write",
            {"num_heads": 3},
            r"heads must be \[T, X, H\].*axis 1 is 10, expected 8 \(X = 8 comes from 2 \* num_heads \+ 2 \* K, "
            r"with K = 1 of kv_pool",
        ),
        (
            "gated_rms_norm",
            {"first": 773},
            r"projected, shape \(37, 1028\), has no 2 \* 128 columns from first = 773 on",
        ),
        ("gated_rms_norm", {"first": -1}, "columns from first = -1 on"),
        (
            "paged_prefill_attention",
            {"first_gate": 7},
            r"gates, shape \(75, 10, 256\), holds no N = 4 heads from first_gate = 7 on",
        ),
        (
            "paged_decode_attention",
            {"first_gate": 7},
            r"gates, shape \(5, 10, 256\), holds no N = 4 heads from first_gate = 7",
        ),
        ("paged_decode_attention", {"first_gate": -1}, "holds no N = 4 heads from first_gate = -1 on"),
    ],
)
def test_wrong_options_are_named(op, options, message):
    with pytest.raises(ValueError, match=message):
        trace(op, options)


@pytest.mark.parametrize("op", ["paged_prefill_attention", "paged_decode_attention"])
def test_query_heads_must_be_a_multiple(op):
    case = case_of(op)
    rows, _, dim = case.arguments["q"].shape
    pool = case.arguments["kv_pool"].shape
    arrays = {
        "q": S((rows, 4, dim), case.arguments["q"].dtype),
        "kv_pool": S((*pool[:3], 3, *pool[4:]), case.arguments["q"].dtype),
    }
    with pytest.raises(ValueError, match=rf"{op}: N = 4 query heads \(q\) must be a multiple of K = 3"):
        trace(op, **arrays)
