"""Conformance of every implementation of gated_rms_norm, and its Mosaic kernel without a GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gated_rms_norm import mosaic_sm90
from pallas_kernels.gated_rms_norm.specs import GatedRmsNormSpec
from pallas_kernels.registry import Target, UnsupportedArguments, get_op
from pallas_kernels.spec import TINY_MODELS, ModelShape, specs_of
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import (
    assert_close,
    assert_same_bits,
    call,
    every_implementation,
    host,
    share_of_equal_bits,
    worst_error,
)
from tests.pallas_kernels.test_mosaic_sm90 import abstract, lowered_for_h200

OP, NAME = "gated_rms_norm", "mosaic_sm90"
SMALL = ModelShape("small", num_heads=4, num_kv_heads=1, num_k_heads=1, num_v_heads=4)


def spec_of(rows: int, dtype: str = "float32", model: ModelShape = SMALL) -> GatedRmsNormSpec:
    return GatedRmsNormSpec(name="", model=model, dtype=dtype, num_tokens=rows)


@every_implementation(OP)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 16, 33, 64, 129])
def test_matches_the_oracle(implementation, dtype, rows):
    """Whatever stands beside the gates is not looked at."""
    case = host(spec_of(rows, dtype).case(rows, poison=True))
    (got,) = call(OP, implementation, case)
    want = oracle.gated_rms_norm(**case.arguments, **case.options)
    assert got.dtype == case.arguments["x"].dtype
    assert_close(OP, implementation, got, want, name="y")
    if dtype != "float32":
        assert share_of_equal_bits(got, want) > 0.98


@every_implementation(OP)
@pytest.mark.parametrize("model", TINY_MODELS.values(), ids=lambda model: model.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_head_counts(implementation, model, dtype):
    case = host(spec_of(21, dtype, model).case(1, poison=True))
    (got,) = call(OP, implementation, case)
    assert_close(OP, implementation, got, oracle.gated_rms_norm(**case.arguments, **case.options), name="y")


@every_implementation(OP)
def test_a_bad_row_touches_no_neighbour(implementation):
    case = host(spec_of(35, "bfloat16").case(1, poison=True))
    (clean,) = call(OP, implementation, case)
    x = case.arguments["x"].copy()
    x[18, 2] = np.nan
    (spoiled,) = call(OP, implementation, host(case, x=x))
    assert np.isnan(spoiled[18, 2]).all()
    good = np.ones(spoiled.shape[:2], bool)
    good[18, 2] = False
    assert_same_bits(spoiled[good], clean[good], "a neighbour")


@every_implementation(OP)
def test_zeros_and_far_gates(implementation):
    """Rows of zeros (pads) give zeros; gates far from zero neither overflow nor turn into NaN."""
    case = host(spec_of(16).case(1))
    (got,) = call(OP, implementation, host(case, x=np.zeros_like(case.arguments["x"])))
    assert not got.any()
    for gate in (-200.0, 200.0):
        far = host(case, projected=np.full_like(case.arguments["projected"], gate))
        (got,) = call(OP, implementation, far)
        want = oracle.gated_rms_norm(**far.arguments, **far.options)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)


def interpreted(case, **settings):
    program = jax.jit(
        lambda a: mosaic_sm90.gated_rms_norm(**a, **case.options, **settings, interpret=plgpu.InterpretGPUParams())
    )
    return program({name: jnp.asarray(array) for name, array in case.arguments.items()})


@pytest.mark.parametrize(("rows", "tile", "dtype"), [(16, 32, "float32"), (33, 16, "bfloat16"), (41, 32, "float32")])
@pytest.mark.host
def test_interpreted_matches_the_oracle(rows, tile, dtype):
    """Fewer tokens than a tile has; a last tile that begins within the one before it."""
    case = host(spec_of(rows, dtype).case(4, poison=True))
    got = interpreted(case, tiling=mosaic_sm90.Tiling(rows=tile))
    want = oracle.gated_rms_norm(**case.arguments, **case.options)
    assert worst_error(got, want) < (2e-6 if dtype == "float32" else 2**-8)


@pytest.mark.parametrize("name", ["0.8b-rows64", "4b-rows8192", "27b-rows1024"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.host
def test_lowers_for_an_h200(name, dtype):
    """One kernel; the gates are not cut out of the projection for it."""
    text = lowered_for_h200(dataclasses.replace(specs_of(OP)[name], dtype=dtype), NAME)
    assert text.count("@mosaic_gpu") == 1 and "stablehlo.slice" not in text


@pytest.mark.parametrize("name", ["0.8b-rows8192", "4b-rows64", "27b-rows8192"])
@pytest.mark.host
def test_auto_takes_it_on_hopper_alone(name):
    arguments, options = abstract(specs_of(OP)[name])
    hopper, ampere = Target("gpu", "NVIDIA H200", "9.0"), Target("gpu", "NVIDIA A100", "8.0")
    assert get_op(OP).select("auto", arguments | options, target=hopper).name == NAME
    for target in (ampere, Target("cpu", "cpu")):
        assert get_op(OP).select("auto", arguments | options, target=target).name == "reference"


def test_declines_what_it_cannot_run():
    supports, hopper = get_op(OP).implementations[NAME].supports, Target("gpu", "NVIDIA H200", "9.0")
    arguments, options = abstract(spec_of(16, "bfloat16"))
    supports(hopper, arguments | options)
    with pytest.raises(UnsupportedArguments, match="takes at least 16 tokens, not 5"):
        supports(hopper, abstract(spec_of(5, "bfloat16"))[0] | options)
    with pytest.raises(UnsupportedArguments, match="columns in multiples of 16 bytes, not 1030 numbers"):
        supports(hopper, abstract(spec_of(16, "bfloat16", TINY_MODELS["tiny3"]))[0] | options)
    with pytest.raises(UnsupportedArguments, match="first column of the gates in multiples of 16 bytes, not 4 numbers"):
        supports(hopper, arguments | options | {"first": 4})
    narrow = jax.ShapeDtypeStruct((16, 4, 96), jnp.bfloat16)
    with pytest.raises(UnsupportedArguments, match="takes heads of up to 256 in 64s, not 96"):
        supports(hopper, arguments | options | {"x": narrow})
    most, more = (jax.ShapeDtypeStruct((16 * 65535 + extra, 4, 128), jnp.bfloat16) for extra in (0, 1))
    supports(hopper, arguments | options | {"x": most})
    with pytest.raises(UnsupportedArguments, match="takes at most 1048560 tokens, not 1048561"):
        supports(hopper, arguments | options | {"x": more})  # a block more than that axis of a grid can have
    with pytest.raises(UnsupportedArguments, match="needs compute capability 9.0, the device has 8.0"):
        supports(Target("gpu", "NVIDIA A100", "8.0"), arguments | options)


@pytest.mark.parametrize("rows", [0, 8, 24])
def test_refuses_tilings_that_are_none(rows):
    with pytest.raises(ValueError, match="no tiling of this kernel"):
        mosaic_sm90.Tiling(rows=rows)
