"""Products of a prefill alone: nothing is left out of what is timed, and rates are of what was run."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen35_jax.bench import floors, products
from qwen35_jax.bench.products import CHAIN, GATE_UP, SQUARE, Product, Timing
from qwen35_jax.config import ModelConfig
from qwen35_jax.layers.linear import linear
from qwen35_jax.presets import PRESETS

TINY = ModelConfig.preset("tiny-4b")


def dots(product: Product) -> int:
    """Matrix products of the compiled program."""
    program, *arguments = product.run.func, *product.run.args
    return len(
        re.findall(r" dot\(|onednn\$matmul|__onednn|custom-call.*matmul", program.lower(*arguments).compile().as_text())
    )


@pytest.mark.parametrize("size", PRESETS)
def test_shapes_are_those_of_the_layers(size):
    config = ModelConfig.preset(size)
    of_kind = {"linear_attention": ("in_proj", "out_proj"), "full_attention": ("qkv_proj", "o_proj")}
    names = [name for kind in config.layer_types for name in (*of_kind[kind], GATE_UP, "down")]
    shapes = products.shapes_of(config)
    assert sum(shapes[name][0] * shapes[name][1] for name in names) == floors.layer_parameters(config)


def test_products_of_one_shape_are_measured_once():
    assert products.names_of(ModelConfig.preset("4b")) == (
        *("in_proj", "qkv_proj", "out_proj", GATE_UP, "down"),  # o_proj has the shape of out_proj
        *(CHAIN, SQUARE),
    )
    shapes = products.shapes_of(ModelConfig.preset("4b"))
    assert shapes["out_proj"] == shapes["o_proj"] == (4096, 2560) and shapes[GATE_UP] == (2560, 18432)


@pytest.mark.parametrize("name", [name for name in products.names_of(TINY) if name != CHAIN])
def test_no_call_is_left_out(name):
    product = products.alone(name, TINY, 24)
    inner, columns = (24, 24) if name == SQUARE else products.shapes_of(TINY)[name]
    calls = product.flops // (2 * 24 * inner * columns)
    assert calls > 1 and product.flops == calls * 2 * 24 * inner * columns
    assert dots(product) == calls


def test_every_weight_has_its_turn_and_every_output_part():
    x = jax.random.normal(jax.random.key(0), (3, 4))
    weights = [jax.random.normal(jax.random.key(1 + number), (4, 5)) for number in range(3)]
    product = products.repeated("mine", linear, x, weights, flops=7)
    total, out = product.run()
    outputs = [np.asarray(x, np.float64) @ np.asarray(weight, np.float64) for weight in weights]
    np.testing.assert_allclose(total, sum(one[0, 0] for one in outputs), rtol=1e-5)
    np.testing.assert_allclose(out, outputs[-1], rtol=1e-5)
    assert (product.name, product.flops) == ("mine", 21)


def test_the_chain_is_every_product_of_every_layer():
    product = products.chain(TINY, 24)
    assert product.flops == 2 * 24 * floors.layer_parameters(TINY)
    assert dots(product) == 4 * TINY.num_layers
    total, out = product.run()
    assert out.shape == (24, TINY.hidden_size) and np.isfinite(out.astype(jnp.float32)).all()
    assert total != 0, "input projections have part in the sum"


def test_zeros_stay_zeros():
    for product in (products.chain(TINY, 8, zeros=True), products.alone(SQUARE, TINY, 8, zeros=True)):
        total, out = product.run()
        assert total == 0 and not out.any()


def test_the_difference_is_relative_to_the_reference():
    ours, reference = (
        dataclasses.replace(products.alone(SQUARE, TINY, 8), run=lambda number=number: (None, jnp.full(3, number)))
        for number in (1.5, 1.0)
    )
    assert products.difference(ours, reference) == pytest.approx(0.5)
    assert products.difference(reference, reference) == 0


def test_rates_are_of_the_first_run_and_of_those_that_follow(monkeypatch):
    """A device that takes 1 s for the first run after a pause, and 2 s from then on."""
    now, ran = [0.0], []

    def run():
        ran.append(now[0])
        now[0] += 1.0 if len(ran) <= 2 else 2.0

    def rest(seconds):
        assert len(ran) == 1, "the first run comes after the pause"
        now[0] += seconds

    monkeypatch.setattr(products.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(products.time, "sleep", rest)
    rate = products.measure(Product("it", run, 8), Timing(pause=5.0, settle=6.0, sample=3.0, samples=2))
    assert (rate.first, rate.lasting, rate.spread, dict(rate.clocks)) == (8.0, 4.0, 0.0, {})
    assert ran[1] == 6.0, "one run to compile, then the pause"
    assert len(ran) == 2 + 3 + 2 * 3, "three runs a sample, of which one settles for its six seconds"
    assert rate.metrics == {"tflop_s": 4e-12, "first_tflop_s": 8e-12, "spread": 0.0}


def test_clocks_are_those_of_the_samples():
    rate = products.measure(
        Product("it", lambda: jnp.zeros(1), 8), Timing(0, 0, 0.01, 1), read=lambda: (1500.0, 690.0, True)
    )
    assert rate.metrics["clocks"]["sm_clock_mhz"] == 1500.0 and rate.metrics["clocks"]["power_capped_share"] == 1.0
