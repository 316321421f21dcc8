"""The Mosaic kernels without a GPU: lowered for an H200 that is not here, interpreted, declined where they cannot run.

And with one (marker gpu): pools past 2^31 elements.
"""

from __future__ import annotations

import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels.causal_conv.specs import CausalConvSpec
from pallas_kernels.gdn_decode.specs import GdnDecodeSpec
from pallas_kernels.registry import UnsupportedArguments
from pallas_kernels.spec import REAL_MODELS, ModelShape, Spec, specs_of
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import host, worst_error

NAME = "mosaic_sm90"
OPS = ("causal_conv", "gdn_decode")
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
ON_H200 = jax.sharding.AbstractMesh((), (), abstract_device=H200)
SMALL = ModelShape("small", num_heads=4, num_kv_heads=1, num_k_heads=1, num_v_heads=2)


def distinct(op: str) -> list[Spec]:
    """One spec of each kernel that all specs need: sizes of a batch or a pack only change a grid and strides."""
    kernels = {}
    for spec in specs_of(op).values():
        kernels[spec.model.num_k_heads, spec.model.num_v_heads, getattr(spec, "state_dtype", None)] = spec
    return list(kernels.values())


def abstract(spec: Spec):
    """Arguments as shapes, and the options."""
    options = {}

    def make():
        case = spec.case()
        options.update(case.options)
        return {name: jnp.asarray(array) for name, array in case.arguments.items()}

    return jax.eval_shape(make), options


def lowered_for_h200(spec: Spec, implementation: str = NAME) -> str:
    arguments, options = abstract(spec)

    def program(arguments):
        return getattr(pallas_kernels, spec.op)(**arguments, **options, implementation=implementation)

    with jax.sharding.use_abstract_mesh(ON_H200):
        return jax.jit(program).trace(arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "spec",
    [spec for op in OPS for spec in distinct(op)]
    + [dataclasses.replace(spec, beside=4160, name=f"{spec.name}+beside") for spec in distinct("causal_conv")],
    ids=lambda spec: f"{spec.op}-{spec.name}",
)
@pytest.mark.host
def test_lowers_for_an_h200(spec):
    text = lowered_for_h200(spec)
    assert text.count("@mosaic_gpu") == 1
    aliases = re.findall(r"output_operand_alias<", text)
    assert len(aliases) == len(spec.pools), "a pool is not updated in place"


@pytest.mark.parametrize(
    ("op", "dtype"), [("causal_conv", "float16"), ("causal_conv", "float32"), ("gdn_decode", "float32")]
)
@pytest.mark.host
def test_lowers_in_other_dtypes(op, dtype):
    assert "@mosaic_gpu" in lowered_for_h200(dataclasses.replace(distinct(op)[0], dtype=dtype))


@pytest.mark.parametrize(
    "spec",
    [
        CausalConvSpec(
            name="", model=SMALL, lengths=(2, 9, 0, 67, 1), has_state=(True, False, True, True, True), num_pads=2
        ),
        CausalConvSpec(
            name="beside", model=SMALL, lengths=(2, 0, 67), has_state=(True, False, True), num_pads=2, beside=9
        ),
        GdnDecodeSpec(name="", model=SMALL, num_rows=3, num_pads=1),
    ],
    ids=lambda spec: spec.op + spec.name,
)
@pytest.mark.host
def test_interpreted_matches_the_oracle(spec):
    case = host(dataclasses.replace(spec, num_layers=2, dtype="float32").case(1, poison=True))
    function = getattr(importlib.import_module(f"pallas_kernels.{spec.op}.{NAME}"), spec.op)
    interpreted = jax.jit(lambda arguments: function(**arguments, **case.options, interpret=plgpu.InterpretGPUParams()))
    got = interpreted({name: jnp.asarray(array) for name, array in case.arguments.items()})
    *want, written = getattr(oracle, spec.op)(**case.arguments, **case.options)
    assert worst_error(got[0], want[0]) < 3e-6
    for name, new, expected in zip(spec.pools, got[1:], want[1:], strict=True):
        new, old = np.asarray(new), case.arguments[name]
        assert worst_error(new[written], expected[written]) < 3e-6
        np.testing.assert_array_equal(new[~written].view(np.uint32), old[~written].view(np.uint32))


def test_declines_what_it_cannot_run():
    arguments, options = abstract(GdnDecodeSpec(name="", model=SMALL, num_rows=2))
    gdn = pallas_kernels.registry.get_op("gdn_decode").implementations[NAME].supports
    conv = pallas_kernels.registry.get_op("causal_conv").implementations[NAME].supports
    hopper, ampere = (
        pallas_kernels.registry.Target("gpu", f"NVIDIA {n}", cc) for n, cc in (("H200", "9.0"), ("A100", "8.0"))
    )
    gdn(hopper, arguments | options)
    with pytest.raises(UnsupportedArguments, match="needs compute capability 9.0, the device has 8.0"):
        gdn(ampere, arguments | options)
    with pytest.raises(UnsupportedArguments, match="needs an NVIDIA GPU"):
        gdn(pallas_kernels.registry.Target("cpu", "cpu"), arguments | options)
    narrow = jax.ShapeDtypeStruct((1, 4, 2, 64, 64), jnp.float32)
    with pytest.raises(UnsupportedArguments, match="takes heads of 128 x 128, not 64 x 64"):
        gdn(hopper, arguments | options | {"state_pool": narrow})
    with pytest.raises(UnsupportedArguments, match="takes channels in multiples of 128, not 100"):
        conv(hopper, {name: jax.ShapeDtypeStruct((5, 100), jnp.bfloat16) for name in ("x", "weight")})


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_pools_past_two_gigaelements(op):
    """The last slot of a pool whose offsets do not fit 32 bits; its neighbours stay as they are."""
    model = REAL_MODELS["4b"]
    if op == "gdn_decode":
        spec = GdnDecodeSpec(name="", model=model, num_rows=2, num_slots=4)
        per_slot = model.value_dim * model.head_k_dim
    else:
        spec = CausalConvSpec(name="", model=model, lengths=(3, 70), has_state=(True, True), num_slots=4)
        per_slot = 3 * model.conv_dim
    slots = 2**31 // per_slot + 4
    case = host(spec.case(1))
    small, last = case.arguments, slots - 4 + case.arguments["slot_ids"]
    want = getattr(oracle, op)(**small, **case.options)
    large = {name: jnp.zeros((1, slots, *small[name].shape[2:]), small[name].dtype) for name in spec.pools}
    large = {name: pool.at[:, -4:].set(small[name]) for name, pool in large.items()} | {
        "slot_ids": last.astype(np.int32)
    }
    function = jax.jit(
        lambda pools, rest: getattr(pallas_kernels, op)(**pools, **rest, **case.options, implementation=NAME),
        donate_argnums=0,
    )
    pools = {name: large.pop(name) for name in spec.pools}
    got = function(pools, {name: array for name, array in (small | large).items() if name not in spec.pools})
    assert worst_error(got[0], want[0]) < 2**-7
    for new, expected, name in zip(got[1:], want[1:], spec.pools, strict=False):
        assert worst_error(new[:, -4:], expected) < 2**-7, name
        assert not new[:, :-4].any(), name
