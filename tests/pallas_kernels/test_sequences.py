"""Ops in a row: prefill then decode gives what a longer prefill gives."""

from __future__ import annotations

import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.spec import TINY_MODELS
from tests.pallas_kernels.conformance import POOL_OPS, implementations, tolerance, worst_error

MODEL = TINY_MODELS["tiny2"]
EVERYWHERE = [name for name in implementations(POOL_OPS[0]) if all(name in implementations(op) for op in POOL_OPS)]
SLOT, POOL_SLOTS, BUCKET = 2, 4, 80


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    heads = MODEL.num_v_heads
    return {
        "conv_weight": (0.5 * rng.standard_normal((4, MODEL.conv_dim))).astype("f4"),
        "A_log": rng.uniform(-4, 0.5, heads).astype("f4"),
        "dt_bias": (0.5 * rng.standard_normal(heads)).astype("f4"),
        "norm_weight": (1 + 0.1 * rng.standard_normal(MODEL.head_v_dim)).astype("f4"),
    }


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(1)
    shapes = {
        "qkv": MODEL.conv_dim,
        "z": MODEL.value_dim,
        "b": MODEL.num_v_heads,
        "a": MODEL.num_v_heads,
    }
    return {name: rng.standard_normal((BUCKET, width), np.float32) for name, width in shapes.items()}


def gdn_prefill(implementation, weights, tokens, length):
    """The mixer over the first tokens of a fresh request; NaN everywhere else. Returns o and the pools."""
    heads = {"num_k_heads": MODEL.num_k_heads, "head_k_dim": MODEL.head_k_dim}
    state_shape = (1, POOL_SLOTS, MODEL.num_v_heads, MODEL.head_v_dim, MODEL.head_k_dim)
    conv_pool, state_pool = (
        np.full((1, POOL_SLOTS, 3, MODEL.conv_dim), np.nan, "f4"),
        np.full(state_shape, np.nan, "f4"),
    )
    live = {name: np.where(np.arange(BUCKET)[:, None] < length, array, np.nan) for name, array in tokens.items()}
    where = (np.int32(0), np.array([SLOT], np.int32), np.array([False]), np.array([0, length], np.int32))
    mixed, conv_pool = pallas_kernels.causal_conv(
        live["qkv"], weights["conv_weight"], conv_pool, *where, implementation=implementation
    )
    gates = (live["b"], live["a"], weights["A_log"], weights["dt_bias"])
    out, state_pool = pallas_kernels.gdn_prefill(
        mixed, *gates, state_pool, *where, **heads, implementation=implementation
    )
    return out, conv_pool, state_pool


@pytest.mark.parametrize("implementation", EVERYWHERE)
@pytest.mark.parametrize("prompt", [1, 2, 3, 64, 70])
def test_gdn_decode_continues_prefill(implementation, weights, tokens, prompt):
    steps = 4
    _, conv_pool, state_pool = gdn_prefill(implementation, weights, tokens, prompt)
    padding = np.zeros(1, np.int32)  # a padding row beside the live one
    outputs = []
    for position in range(prompt, prompt + steps):
        row = np.concatenate([tokens[name][position] for name in ("qkv", "z", "b", "a")])
        y, conv_pool, state_pool = pallas_kernels.gdn_decode(
            np.stack([row, np.full_like(row, np.nan)]),
            **weights,
            conv_pool=conv_pool,
            state_pool=state_pool,
            layer=0,
            slot_ids=np.concatenate([np.array([SLOT], np.int32), padding]),
            num_k_heads=MODEL.num_k_heads,
            head_k_dim=MODEL.head_k_dim,
            eps=1e-6,
            implementation=implementation,
        )
        outputs.append(np.asarray(y)[0])
    out, want_conv, want_state = gdn_prefill(implementation, weights, tokens, prompt + steps)
    out = np.asarray(out)[prompt : prompt + steps].astype(np.float64)
    z = tokens["z"][prompt : prompt + steps].astype(np.float64).reshape(out.shape)
    normed = weights["norm_weight"] * out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6)
    want = (normed * z / (1 + np.exp(-z))).reshape(steps, -1)
    bar = tolerance("gdn_decode", implementation, "float32")
    assert worst_error(np.stack(outputs), want) <= bar
    np.testing.assert_array_equal(np.asarray(conv_pool)[0, SLOT], np.asarray(want_conv)[0, SLOT])
    assert worst_error(np.asarray(state_pool)[0, SLOT], np.asarray(want_state)[0, SLOT]) <= bar


@pytest.mark.parametrize("implementation", EVERYWHERE)
@pytest.mark.parametrize("length", [1, 64, 65, 130])
def test_decode_attention_equals_prefill_of_the_last_token(implementation, length):
    """Write keys and values, attend by prefill, then the last token again as a decode row."""
    rng = np.random.default_rng(length)
    heads, kv_heads, dim, bucket = MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim, 136
    projected = rng.standard_normal((bucket, MODEL.projected_heads, dim), np.float32)
    q_norm, k_norm = (rng.standard_normal(dim, np.float32) * np.float32(0.1) for _ in range(2))
    pool = np.full((1, 6, 2, kv_heads, 64, dim), np.nan, "f4")
    table = np.array([[4, 2, 5]], np.int32)
    positions = np.arange(bucket, dtype=np.int32)
    live = positions < length
    pages = np.where(live, table[0, positions // 64], 0).astype(np.int32)
    q_out, pool = pallas_kernels.kv_write(
        projected, q_norm, k_norm, pool, 0, pages, positions % 64, positions,
        num_heads=heads, rotary_dim=64, rope_theta=1e7, eps=1e-6, implementation=implementation,
    )  # fmt: skip
    lengths = np.array([length], np.int32)
    options = {"first_gate": heads, "implementation": implementation}
    prefill = pallas_kernels.paged_prefill_attention(
        q_out, projected, pool, 0, table, np.array([0, length], np.int32), lengths, **options
    )
    last = slice(length - 1, length)
    decode = pallas_kernels.paged_decode_attention(
        np.asarray(q_out)[last], projected[last], pool, 0, table, lengths, **options
    )
    assert worst_error(decode, np.asarray(prefill)[last]) <= tolerance(
        "paged_decode_attention", implementation, "float32"
    )
