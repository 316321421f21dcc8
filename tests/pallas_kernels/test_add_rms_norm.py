"""Conformance of every implementation of add_rms_norm."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels.add_rms_norm import mosaic_sm90, reference
from pallas_kernels.add_rms_norm.specs import AddRmsNormSpec
from pallas_kernels.registry import Target, UnsupportedArguments, get_op
from pallas_kernels.spec import REAL_MODELS, TINY_MODELS, specs_of
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import (
    assert_close,
    assert_same_bits,
    call,
    every_implementation,
    host,
    share_of_equal_bits,
    with_excess_precision,
    worst_error,
)

OP = "add_rms_norm"
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)


def spec_of(rows: int, width: int, dtype: str = "float32", parts: int = 0) -> AddRmsNormSpec:
    model = dataclasses.replace(TINY_MODELS["tiny1"], hidden_size=width)
    return AddRmsNormSpec(name="", model=model, dtype=dtype, num_tokens=rows, num_parts=parts)


@every_implementation(OP)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (2, 256), (5, 2560), (33, 384), (7, 5120)])
def test_matches_the_oracle(implementation, dtype, rows, width):
    case = host(spec_of(rows, width, dtype).case(rows))
    total, normed = call(OP, implementation, case)
    want_total, want_normed = oracle.add_rms_norm(**case.arguments, **case.options)
    assert total.dtype == normed.dtype == case.arguments["x"].dtype
    assert_close(OP, implementation, total, want_total, name="total")
    assert_close(OP, implementation, normed, want_normed, name="normed")
    if dtype != "float32":
        assert share_of_equal_bits(total, want_total) > 0.999
        assert share_of_equal_bits(normed, want_normed) > 0.98


@every_implementation(OP)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width", "parts"), [(1, 128, 1), (5, 2560, 4), (16, 384, 9)])
def test_a_delta_in_parts_matches_the_oracle(implementation, dtype, rows, width, parts):
    case = host(spec_of(rows, width, dtype, parts).case(rows))
    total, normed = call(OP, implementation, case)
    want_total, want_normed = oracle.add_rms_norm(**case.arguments, **case.options)
    assert total.dtype == normed.dtype == case.arguments["x"].dtype
    assert_close(OP, implementation, total, want_total, name="total")
    assert_close(OP, implementation, normed, want_normed, name="normed")


@every_implementation(OP)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_are_summed_in_their_order_and_rounded_before_they_are_added(implementation, dtype):
    case = host(spec_of(5, 256, dtype, 4).case(3))
    delta = case.arguments["delta"]
    whole = (((delta[0] + delta[1]) + delta[2]) + delta[3]).astype(case.arguments["x"].dtype)
    for one, other in zip(
        call(OP, implementation, case), call(OP, implementation, host(case, delta=whole)), strict=True
    ):
        assert_same_bits(one, other, "a result")


def test_the_reference_rounds_parts_where_a_compiler_keeps_excess_precision():
    arguments = {name: jnp.asarray(array) for name, array in spec_of(5, 256, "bfloat16", 4).case(3).arguments.items()}
    got = with_excess_precision(lambda *operands: reference.add_rms_norm(*operands, eps=1e-6), *arguments.values())
    want, _ = oracle.add_rms_norm(**{name: np.asarray(array) for name, array in arguments.items()}, eps=1e-6)
    assert share_of_equal_bits(np.asarray(got[0]), want) > 0.999
    unrounded = with_excess_precision(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), arguments["delta"])
    assert (unrounded[0] == arguments["delta"]).all(), "the stand-in for the compiler does what it says"


def test_parts_are_float32_and_have_the_rows_of_x():
    arguments = dict(spec_of(3, 128, "bfloat16", 2).case().arguments)
    with pytest.raises(TypeError, match="delta"):
        pallas_kernels.add_rms_norm(**arguments | {"delta": jnp.zeros((2, 3, 128), jnp.bfloat16)}, eps=1e-6)
    with pytest.raises(ValueError, match="delta"):
        pallas_kernels.add_rms_norm(**arguments | {"delta": jnp.zeros((2, 4, 128))}, eps=1e-6)
    with pytest.raises(ValueError, match=r"delta, shape \(0, 3, 128\), has no parts"):
        pallas_kernels.add_rms_norm(**arguments | {"delta": jnp.zeros((0, 3, 128))}, eps=1e-6)


@every_implementation(OP)
def test_a_bad_row_touches_no_neighbour(implementation):
    case = host(spec_of(5, 256).case(1))
    clean = call(OP, implementation, case)
    x = case.arguments["x"].copy()
    x[2] = np.nan
    spoiled = call(OP, implementation, host(case, x=x))
    rows = np.arange(5) != 2
    for one, other in zip(clean, spoiled, strict=True):
        assert np.isnan(other[2]).all()
        assert_same_bits(other[rows], one[rows], "a neighbour")


@every_implementation(OP)
def test_rows_of_zeros(implementation):
    case = host(spec_of(3, 256).case(1))
    zeros = {name: np.zeros_like(case.arguments[name]) for name in ("x", "delta")}
    for result in call(OP, implementation, host(case, **zeros)):
        assert not result.any()


@pytest.mark.parametrize(
    "name", ["0.8b-rows64", "4b-rows1", "4b-rows8192", "27b-rows256", "tiny1-rows5", "4b-rows16-in-parts"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.host
def test_lowers_for_an_h200(name, dtype):
    case = dataclasses.replace(specs_of(OP)[name], dtype=dtype).case
    arguments = jax.eval_shape(lambda: {key: jnp.asarray(array) for key, array in case().arguments.items()})
    program = jax.jit(lambda a: pallas_kernels.add_rms_norm(**a, eps=1e-6, implementation="mosaic_sm90"))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H200)):
        assert program.trace(arguments).lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1


@pytest.mark.parametrize("model", ["0.8b", "2b", "4b", "9b", "27b"])
@pytest.mark.host
def test_the_most_parts_lower_for_an_h200(model):
    width = REAL_MODELS[model].hidden_size
    arguments = {name: jnp.asarray(array) for name, array in spec_of(3, width, "bfloat16", 9).case().arguments.items()}
    program = jax.jit(lambda a: pallas_kernels.add_rms_norm(**a, eps=1e-6, implementation="mosaic_sm90"))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H200)):
        assert program.trace(arguments).lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1


@pytest.mark.parametrize(("width", "parts"), [(128, 0), (384, 0), (1024, 0), (384, 3)])
@pytest.mark.host
def test_interpreted_matches_the_oracle(width, parts):
    case = host(spec_of(3, width, parts=parts).case(4))
    interpreted = jax.jit(lambda a: mosaic_sm90.add_rms_norm(**a, **case.options, interpret=plgpu.InterpretGPUParams()))
    got = interpreted({name: jnp.asarray(array) for name, array in case.arguments.items()})
    for one, want in zip(got, oracle.add_rms_norm(**case.arguments, **case.options), strict=True):
        assert worst_error(one, want) < 1e-6


def test_declines_what_it_cannot_run():
    supports = get_op(OP).implementations["mosaic_sm90"].supports
    hopper = Target("gpu", "NVIDIA H200", "9.0")
    supports(hopper, {"x": jax.ShapeDtypeStruct((5, 2560), jnp.bfloat16)})
    with pytest.raises(UnsupportedArguments, match="takes up to 8192 columns in 128s, not 100"):
        supports(hopper, {"x": jax.ShapeDtypeStruct((5, 100), jnp.bfloat16)})
    with pytest.raises(UnsupportedArguments, match="takes up to 8192 columns in 128s, not 16384"):
        supports(hopper, {"x": jax.ShapeDtypeStruct((5, 16384), jnp.bfloat16)})
    with pytest.raises(UnsupportedArguments, match="needs an NVIDIA GPU"):
        supports(Target("cpu", "cpu"), {"x": jax.ShapeDtypeStruct((5, 256), jnp.bfloat16)})
