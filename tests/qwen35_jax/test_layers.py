"""The parts of a layer that are not kernels: norms, products, MLP, and how tokens of a step are put together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen35_jax.config import ModelConfig
from qwen35_jax.layers.gated_delta_net import GatedDeltaNet
from qwen35_jax.layers.inputs import Batch, DecodeInputs, PrefillInputs
from qwen35_jax.layers.linear import linear, parts_of, unembed, whole
from qwen35_jax.layers.mlp import MLP
from qwen35_jax.layers.norm import gated_rms_norm, rms_norm
from qwen35_jax.model import Qwen35
from tests.pallas_kernels.conformance import with_excess_precision

EPS = 1e-6


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def _normalised(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _as_float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def test_rms_norm_multiplies_by_one_plus_weight():
    x, weight = _normal(0, 5, 96).astype(np.float32), (0.1 * _normal(1, 96)).astype(np.float32)
    got = rms_norm(jnp.asarray(x), jnp.asarray(weight), EPS)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, _normalised(x.astype(np.float64)) * (1 + weight), rtol=2e-6)


def test_rms_norm_of_bf16_rounds_once_at_the_end_and_keeps_small_weights():
    x = jnp.asarray(_normal(2, 64, 96), jnp.bfloat16)
    weight = jnp.full((96,), 0.003, jnp.float32)  # 1.003 is not a bf16 number: a folded weight would become 1
    exact = _normalised(_as_float64(x)) * 1.003
    got = rms_norm(x, weight, EPS)
    assert got.dtype == jnp.bfloat16
    # At most half a unit in the last place of bf16, and on average nearer than with a folded weight.
    np.testing.assert_array_less(np.abs(_as_float64(got) - exact), 2.0**-7.99 * np.abs(exact) + 1e-9)
    folded = _as_float64(rms_norm(x, jnp.zeros_like(weight), EPS))
    assert np.abs(_as_float64(got) - exact).mean() < 0.9 * np.abs(folded - exact).mean()


def test_gated_rms_norm_is_norm_then_gate_with_a_plain_weight():
    x, z = _normal(3, 7, 2, 64).astype(np.float32), _normal(4, 7, 2, 64).astype(np.float32)
    weight = (1 + 0.1 * _normal(5, 64)).astype(np.float32)
    want = _normalised(x.astype(np.float64)) * weight * z * _sigmoid(z.astype(np.float64))
    got = gated_rms_norm(jnp.asarray(x), jnp.asarray(z), jnp.asarray(weight), EPS)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_gated_rms_norm_keeps_zeros_of_padding_at_zero():
    z = jnp.asarray(_normal(6, 3, 2, 64), jnp.float32)
    got = gated_rms_norm(jnp.zeros((3, 2, 64)), z, jnp.ones((64,)), EPS)
    np.testing.assert_array_equal(got, 0)


def test_linear_accumulates_bf16_in_fp32_and_returns_bf16():
    x = jnp.full((2, 4096), 1.0078125, jnp.bfloat16)
    got = linear(x, jnp.ones((4096, 3), jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(_as_float64(got), 4128.0)  # a bf16 accumulator would have stopped growing at 256


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (2, 8), (16, 8), (17, 4), (64, 4), (65, 1)])
def test_a_product_of_few_rows_is_left_in_parts_to_who_takes_them(rows, parts):
    x, w = jnp.asarray(_normal(1, rows, 4096), jnp.bfloat16), jnp.asarray(_normal(2, 4096, 24), jnp.bfloat16)
    assert linear(x, w).shape == (rows, 24)
    got = linear(x, w, in_parts=True)
    assert got.shape == ((rows, 24) if parts == 1 else (parts, rows, 24))
    assert got.dtype == (jnp.bfloat16 if parts == 1 else jnp.float32)
    if parts > 1:
        exact = np.einsum(
            "mpk,pkn->pmn", _as_float64(x).reshape(rows, parts, -1), _as_float64(w).reshape(parts, -1, 24)
        )
        np.testing.assert_allclose(got, exact, atol=1e-3)
    np.testing.assert_allclose(_as_float64(whole(got, x.dtype)), _as_float64(linear(x, w)), atol=0.6)  # of hundreds
    assert whole(got, x.dtype).dtype == jnp.bfloat16


def test_the_sum_of_parts_is_rounded_where_a_compiler_keeps_excess_precision():
    parts = jnp.asarray(_normal(1, 4, 3, 24), jnp.float32)
    (got,) = with_excess_precision(lambda parts: whole(parts, jnp.bfloat16).astype(jnp.float32), parts)
    np.testing.assert_array_equal(_as_float64(got), _as_float64(whole(parts, jnp.bfloat16)))


def test_parts_are_whole_steps_of_the_inner_dimension():
    inner = (512, 2048, 3072, 3584, 4096, 6144, 9216, 12288, 17408)
    assert [parts_of(16, size) for size in inner] == [1, 4, 6, 7, 8, 8, 9, 8, 8]
    assert [parts_of(17, size) for size in inner] == [1, 2, 3, 2, 4, 6, 9, 8, 8]


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")])
def test_products_state_their_precision(dtype, precision):
    x, w = jnp.zeros((4, 8), dtype), jnp.zeros((8, 8), dtype)
    for product in (lambda x, w: linear(x, w), lambda x, w: unembed(x, w, transposed=True)):
        text = jax.jit(product).lower(x, w).as_text()
        assert f"precision = [{precision}, {precision}]" in text


def test_unembed_returns_fp32_for_both_layouts():
    x, table = jnp.asarray(_normal(7, 3, 64), jnp.bfloat16), jnp.asarray(_normal(8, 32, 64), jnp.bfloat16)
    tied, untied = unembed(x, table, transposed=True), unembed(x, table.T, transposed=False)
    assert tied.dtype == untied.dtype == jnp.float32
    exact = _as_float64(x) @ _as_float64(table).T
    np.testing.assert_allclose(tied, exact, atol=1e-4)  # bf16 logits would be off by up to 0.06
    np.testing.assert_allclose(untied, exact, atol=1e-4)


def test_mlp_takes_the_gate_from_the_first_half():
    config = ModelConfig.preset("tiny-0.8b")
    mlp = MLP(config, rngs=nnx.Rngs(0), kernels="auto", dtype=jnp.dtype("float32"))
    x = jnp.asarray(_normal(11, 3, config.hidden_size), jnp.float32)
    gate_up, down = np.asarray(mlp.gate_up[...], np.float64), np.asarray(mlp.down[...], np.float64)
    gate, up = np.split(np.asarray(x, np.float64) @ gate_up, 2, axis=-1)
    np.testing.assert_allclose(mlp(x), (gate * _sigmoid(gate) * up) @ down, rtol=1e-4, atol=1e-6)


def _prefill(tokens: int) -> PrefillInputs:
    per_token = jnp.arange(tokens, dtype=jnp.int32)
    one = jnp.zeros((1,), jnp.int32)
    cu_seqlens = jnp.asarray([0, tokens], jnp.int32)
    return PrefillInputs(
        per_token, per_token + 10, per_token + 20, per_token + 30, cu_seqlens, one, one > 0, one[:, None], one
    )


def _decode(rows: int) -> DecodeInputs:
    per_row = jnp.arange(rows, dtype=jnp.int32) + 100
    return DecodeInputs(per_row, per_row + 10, per_row + 20, per_row + 30, per_row, per_row[:, None], per_row)


def test_batch_puts_prefill_tokens_before_decode_rows():
    batch = Batch.of(_prefill(3), _decode(2))
    np.testing.assert_array_equal(batch.tokens, [0, 1, 2, 100, 101])
    np.testing.assert_array_equal(batch.positions, [10, 11, 12, 110, 111])
    np.testing.assert_array_equal(batch.page_ids, [20, 21, 22, 120, 121])
    np.testing.assert_array_equal(batch.page_offsets, [30, 31, 32, 130, 131])
    prefill, decode = batch.split(batch.tokens)
    np.testing.assert_array_equal(prefill, [0, 1, 2])
    np.testing.assert_array_equal(decode, [100, 101])
    np.testing.assert_array_equal(batch.join([prefill, decode]), batch.tokens)


def test_batch_of_one_part_has_only_its_tokens():
    np.testing.assert_array_equal(Batch.of(_prefill(3), None).tokens, [0, 1, 2])
    decode = Batch.of(None, _decode(2))
    np.testing.assert_array_equal(decode.split(decode.tokens)[1], [100, 101])
    assert decode.num_prefill_tokens == 0


def test_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="both are None"):
        Batch.of(None, None)


def test_layer_kinds_are_data_and_number_the_pools():
    kinds = ("full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention")
    config = ModelConfig.preset("tiny-4b", layer_types=kinds)
    model = nnx.eval_shape(lambda: Qwen35(config))
    mixers = [layer.mixer for layer in model.layers]
    assert [isinstance(mixer, GatedDeltaNet) for mixer in mixers] == [kind == "linear_attention" for kind in kinds]
    assert [mixer.pool_layer for mixer in mixers] == [0, 0, 1, 1, 2]
