"""The portable decode step and attention without a GPU: interpreted, lowered for Ampere, Ada and Hopper, declined."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.gdn_decode import triton
from pallas_kernels.gdn_decode.specs import GdnDecodeSpec
from pallas_kernels.gdn_decode.triton import Tiling
from pallas_kernels.paged_decode_attention.specs import PagedDecodeAttentionSpec
from pallas_kernels.registry import Target, UnsupportedArguments, get_op
from pallas_kernels.spec import REAL_MODELS, ModelShape, Spec
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import assert_same_bits, host, tolerance, worst_error

GPUS = ("NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA H200")
ONE, GROUP = (ModelShape("s", num_heads=4, num_kv_heads=1, num_k_heads=2, num_v_heads=n) for n in (2, 6))
PADDED = GdnDecodeSpec(name="", model=GROUP, num_rows=3, num_pads=1, num_layers=2, dtype="float32")


@pytest.mark.parametrize(
    ("spec", "tiling"),
    [
        (PADDED, None),
        (dataclasses.replace(PADDED, model=ONE, decay="strong"), Tiling(values=128)),
        (
            dataclasses.replace(PADDED, model=ONE, dtype="bfloat16", state_dtype="bfloat16", num_rows=2),
            Tiling(values=32),
        ),
    ],
    ids=["group", "whole", "bfloat16"],
)
@pytest.mark.host
def test_interpreted_matches_the_oracle(spec, tiling):
    case = host(spec.case(1, poison=True))
    run = jax.jit(functools.partial(triton.gdn_decode, **case.options, tiling=tiling, interpret=True))
    got = run(**{name: jnp.asarray(array) for name, array in case.arguments.items()})
    *want, written = oracle.gdn_decode(**case.arguments, **case.options)
    bar = functools.partial(tolerance, "gdn_decode", "triton", activations=spec.dtype)
    assert worst_error(got[0], want[0]) < bar(spec.dtype)
    assert not np.asarray(got[0])[want[0] == 0].any()
    for name, new, expected in zip(spec.pools, got[1:], want[1:], strict=True):
        new, old = np.asarray(new), case.arguments[name]
        assert worst_error(new[written], expected[written]) < bar(old.dtype, after_rounding=True)
        assert_same_bits(new[~written], old[~written], f"an untouched part of {name}")


def abstract(spec: Spec):
    options = {}

    def make():
        case = spec.case()
        options.update(case.options)
        return {name: jnp.asarray(array) for name, array in case.arguments.items()}

    return jax.eval_shape(make), options


def lowered(spec: Spec, gpu: str) -> str:
    device = jax.sharding.AbstractDevice(device_kind=gpu, platform="gpu", num_cores=108)
    arguments, options = abstract(spec)
    run = functools.partial(getattr(pallas_kernels, spec.op), **options, implementation="triton")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return (
            jax.jit(lambda arguments: run(**arguments)).trace(arguments).lower(lowering_platforms=("cuda",)).as_text()
        )


DECODE = GdnDecodeSpec(name="group2", model=REAL_MODELS["4b"], num_rows=3, state_dtype="bfloat16")
ATTENTION = PagedDecodeAttentionSpec(name="group4", model=REAL_MODELS["4b"], kv_lens=(3, 200))


@pytest.mark.parametrize(
    ("spec", "gpu"),
    [
        *((spec, gpu) for spec in (DECODE, ATTENTION) for gpu in GPUS),
        (GdnDecodeSpec(name="group1", model=REAL_MODELS["0.8b"], num_rows=3), GPUS[0]),
        (GdnDecodeSpec(name="group3", model=REAL_MODELS["27b"], num_rows=3, dtype="float32"), GPUS[0]),
        (dataclasses.replace(ATTENTION, name="group6", model=REAL_MODELS["27b"], dtype="float32"), GPUS[1]),
    ],
    ids=lambda value: f"{value.op}-{value.name}" if isinstance(value, Spec) else value,
)
@pytest.mark.host
def test_lowers_for_three_generations(spec, gpu):
    text = lowered(spec, gpu)
    assert "__gpu$xla.gpu.triton" in text
    assert len(re.findall("output_operand_alias<", text)) == len(spec.pools), "a pool is not updated in place"


@pytest.mark.parametrize(
    ("capability", "decode", "attention"),
    [
        ("7.5", "reference", "reference"),
        ("8.0", "triton", "triton"),
        ("8.9", "triton", "triton"),
        ("9.0", "mosaic_sm90", "triton"),
    ],
)
def test_auto_by_compute_capability(capability, decode, attention):
    target = Target("gpu", "NVIDIA GPU", capability)
    for spec, chosen in (
        (GdnDecodeSpec(name="", model=REAL_MODELS["4b"], num_rows=1), decode),
        (PagedDecodeAttentionSpec(name="", model=REAL_MODELS["4b"], kv_lens=(3,)), attention),
    ):
        arguments, options = abstract(spec)
        assert get_op(spec.op).select("auto", arguments | options, target=target).name == chosen


def test_declines_what_it_cannot_run():
    arguments, options = abstract(PADDED)
    ampere, supports = Target("gpu", "NVIDIA A100", "8.0"), triton.supports
    supports(ampere, arguments | options)
    supports(Target("gpu", "NVIDIA H200", "9.0"), arguments | options)  # by name
    for target, words in (
        (Target("gpu", "NVIDIA T4", "7.5"), "needs compute capability 8.0, the device has 7.5"),
        (Target("gpu", "NVIDIA B200", "10.0"), "is for devices before 10.0"),
        (Target("cpu", "cpu"), "needs an NVIDIA GPU"),
    ):
        with pytest.raises(UnsupportedArguments, match=words):
            supports(target, arguments | options)
    with pytest.raises(UnsupportedArguments, match="takes head dims of 32, 64, 128 or 256, not 96"):
        odd = jax.ShapeDtypeStruct((1, 4, 2, 128, 96), jnp.float32)
        supports(ampere, arguments | options | {"state_pool": odd})
    with pytest.raises(UnsupportedArguments, match="takes at most 8 value heads a key head, not 16"):
        many = jax.ShapeDtypeStruct((1, 4, 16, 128, 128), jnp.float32)
        supports(ampere, arguments | {"num_k_heads": 1, "state_pool": many})


@pytest.mark.parametrize("settings", [{"values": 48}, {"warps": 3}])
def test_a_tiling_that_cannot_be_is_refused(settings):
    with pytest.raises(ValueError, match="no tiling of this kernel"):
        Tiling(**settings)


@pytest.mark.gpu
def test_pools_past_two_gigaelements():
    """The last slots of a state pool whose offsets do not fit 32 bits; its neighbours stay as they are."""
    model = REAL_MODELS["4b"]
    spec = GdnDecodeSpec(name="", model=model, num_rows=2, num_slots=4)
    slots = 2**31 // (model.value_dim * model.head_k_dim) + 4
    case = host(spec.case(1))
    *want, _ = oracle.gdn_decode(**case.arguments, **case.options)
    pools = {
        name: jnp.zeros((1, slots, *case.arguments[name].shape[2:]), case.arguments[name].dtype)
        .at[:, -4:]
        .set(case.arguments[name])
        for name in spec.pools
    }
    rest = {name: array for name, array in case.arguments.items() if name not in pools}
    rest["slot_ids"] = (slots - 4 + case.arguments["slot_ids"]).astype(np.int32)
    run = functools.partial(pallas_kernels.gdn_decode, **case.options, implementation="triton")
    got = jax.jit(lambda pools, rest: run(**pools, **rest), donate_argnums=0)(pools, rest)
    assert worst_error(got[0], want[0]) < tolerance("gdn_decode", "triton", spec.dtype)
    for new, expected in zip(got[1:], want[1:], strict=True):
        assert worst_error(new[:, -4:], expected) < 2**-7
        assert not new[:, :-4].any()
