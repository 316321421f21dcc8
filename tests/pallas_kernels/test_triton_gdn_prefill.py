"""The Triton kernels of gdn_prefill without a GPU: lowered for an H200 that is not here, interpreted, declined.

And with one (marker gpu): real head counts, pools past 2^31 elements.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.gdn_prefill import triton
from pallas_kernels.gdn_prefill.specs import GdnPrefillSpec
from pallas_kernels.registry import Target, UnsupportedArguments, get_op
from pallas_kernels.spec import REAL_MODELS, ModelShape, specs_of
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import ROUNDOFF, assert_same_bits, host, worst_error
from tests.pallas_kernels.test_triton import H200, NAME, abstract, lowered_for_h200

SMALL = ModelShape("small", num_heads=2, num_kv_heads=1, num_k_heads=2, num_v_heads=4)
PACK = GdnPrefillSpec(
    name="",
    model=SMALL,
    dtype="float32",
    lengths=(2, 0, 130, 64, 1),
    has_state=(True, True, True, False, False),
    num_pads=3,
    num_layers=2,
)
BY_MODEL = {spec.model: spec for spec in specs_of("gdn_prefill").values()}


@pytest.mark.parametrize("spec", BY_MODEL.values(), ids=lambda spec: spec.name)
@pytest.mark.host
def test_lowers_for_an_h200(spec):
    text = lowered_for_h200(spec)
    assert text.count("__gpu$xla.gpu.triton") == 2
    assert text.count("output_operand_alias<") == 1, "the pool is not updated in place"
    for dtype, chosen in (("bfloat16", "mosaic_sm90"), ("float32", NAME)):
        arguments, options = abstract(dataclasses.replace(spec, dtype=dtype))
        assert get_op("gdn_prefill").select("auto", arguments | options, target=H200).name == chosen


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.host
def test_lowers_in_every_dtype(dtype, state_dtype):
    spec = dataclasses.replace(specs_of("gdn_prefill")["4b-1x8192"], dtype=dtype, state_dtype=state_dtype)
    assert lowered_for_h200(spec).count("__gpu$xla.gpu.triton") == 2


@functools.cache
def interpreted(num_k_heads: int):
    """One compilation for all cases of a dtype."""
    function = functools.partial(triton.gdn_prefill, num_k_heads=num_k_heads, head_k_dim=128, interpret=True)
    return jax.jit(function)


def repeated_keys(case):
    """Equal keys, written with beta = 0.97: where powers of the coupling matrix would explode."""
    case = host(case)
    qkv, b, real = case.arguments["qkv"], case.arguments["b"], case.arguments["cu_seqlens"][-1]
    keys = slice(SMALL.num_k_heads * 128, 2 * SMALL.num_k_heads * 128)
    qkv[:real, keys] = qkv[0, keys]
    b[:real] = 3.5
    return case


def decays_of_every_size(case):
    """Weak decays behind erasing ones."""
    case = host(case)
    case.arguments["a"][::7] = 30.0
    return case


CASES = {
    "mixed": ({}, host),
    "strong": ({"decay": "strong"}, host),
    "none, repeated keys": ({"decay": "none"}, repeated_keys),
    "every size": ({}, decays_of_every_size),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.host
def test_interpreted_matches_the_oracle(dtype, name):
    changes, edit = CASES[name]
    spec = dataclasses.replace(PACK, dtype=dtype, **changes)
    case = edit(spec.case(1, poison=True))
    out, pool = map(np.asarray, interpreted(SMALL.num_k_heads)(**device(case.arguments)))
    want, want_pool, written = oracle.gdn_prefill(**case.arguments, **case.options)
    exact = 1e-5 if dtype == "float32" else 3e-4
    assert worst_error(out, want) < (exact if dtype == "float32" else 2 * ROUNDOFF[dtype])
    assert not out[want == 0].any(), "outputs of pads are not zero"
    assert worst_error(pool[written], want_pool[written]) < exact
    assert_same_bits(pool[~written], case.arguments["state_pool"][~written], "a slot of nobody")


def device(arguments):
    """The pools and the rest as arrays of the default device, layers as a scalar array."""
    return {name: jnp.asarray(array) for name, array in arguments.items()}


@pytest.mark.host
def test_interpreted_with_the_state_in_pieces():
    """Another tiling, one value head a key head, and a 16-bit pool."""
    model = dataclasses.replace(SMALL, num_k_heads=1, num_v_heads=1)
    spec = dataclasses.replace(PACK, model=model, lengths=(3, 66), has_state=(False, True), state_dtype="bfloat16")
    case = host(spec.case(2, poison=True))
    tiling = triton.Tiling(value_dims=64, key_dims=32, parts=3, solved=8)
    function = functools.partial(triton.gdn_prefill, **case.options, tiling=tiling, interpret=True)
    out, pool = jax.jit(function)(**device(case.arguments))
    want, want_pool, written = oracle.gdn_prefill(**case.arguments, **case.options)
    assert worst_error(out, want) < 1e-5
    assert worst_error(np.asarray(pool)[written], want_pool[written]) < 2 * ROUNDOFF["bfloat16"]


@pytest.mark.parametrize(("parts", "bar"), [(1, 3e-2), (2, 1e-4), (3, 2e-6)])
@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_the_inverse(size, parts, bar):
    """Of I + beta on the strict lower triangle, where I - L + L^2 - ... has terms of 1e17, and of a random matrix."""
    steps = np.arange(64)
    rows, columns = np.broadcast_arrays(steps[:, None], steps[None, :])
    random = 0.2 * np.random.default_rng(0).standard_normal((64, 64))
    for matrix in (np.full((64, 64), 0.97), random):
        strict = np.tril(matrix, -1).astype(np.float32)
        got = triton._inverse(jnp.asarray(strict), jnp.asarray(rows), jnp.asarray(columns), size, parts)
        want = np.linalg.inv(np.eye(64) + strict.astype(np.float64))
        assert np.abs(np.asarray(got) - want).max() < bar * np.abs(want).max() * (1 if parts > 1 else 4)


def test_declines_what_it_cannot_run():
    arguments, options = abstract(PACK)
    supports = get_op("gdn_prefill").implementations[NAME].supports
    supports(H200, arguments | options)
    with pytest.raises(UnsupportedArguments, match="takes heads of 128 x 128, not 64 x 128"):
        supports(H200, arguments | options | {"state_pool": jax.ShapeDtypeStruct((1, 4, 2, 64, 128), jnp.float32)})
    with pytest.raises(UnsupportedArguments, match="takes at most 65535 tiles and requests, not 65541 tiles"):
        supports(H200, arguments | options | {"qkv": jax.ShapeDtypeStruct((65536 * 64, 1024), jnp.bfloat16)})
    with pytest.raises(UnsupportedArguments, match="needs an NVIDIA GPU"):
        supports(Target("cpu", "cpu"), arguments | options)
    with pytest.raises(UnsupportedArguments, match="needs compute capability 9.0, the device has 8.0"):
        supports(Target("gpu", "NVIDIA A100", "8.0"), arguments | options)
    with pytest.raises(UnsupportedArguments, match="is for devices before 10.0, this one has 12.0"):
        supports(Target("gpu", "NVIDIA GeForce RTX 5090", "12.0"), arguments | options)


def run(case):
    """The implementation by name, on the default device."""
    return pallas_kernels.gdn_prefill(**case.arguments, **case.options, implementation=NAME)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["0.8b", "4b", "27b"])
def test_ragged_packs_on_real_heads(model, state_dtype):
    """Prefill in bfloat16: lengths around a tile, pads behind, states and none."""
    spec = GdnPrefillSpec(
        name="",
        model=REAL_MODELS[model],
        lengths=(1, 63, 64, 65, 0, 2, 300, 128),
        num_pads=77,
        num_layers=2,
        state_dtype=state_dtype,
    )
    case = host(spec.case(3, poison=True))
    want, want_pool, written = oracle.gdn_prefill(**case.arguments, **case.options)
    out, pool = map(np.asarray, run(case))
    assert worst_error(out, want) < 2 * ROUNDOFF["bfloat16"]
    assert not out[want == 0].any()
    bar = 3e-4 if state_dtype == "float32" else 2 * ROUNDOFF["bfloat16"]
    assert worst_error(pool[written], want_pool[written]) < bar
    written[-1, 0] = True  # unspecified
    assert_same_bits(pool[~written], case.arguments["state_pool"][~written], "a slot of nobody")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [NAME, "mosaic_sm90"])
def test_pools_past_two_gigaelements(implementation):
    """The last slots of a pool whose offsets do not fit 32 bits; its neighbours stay as they are."""
    model = REAL_MODELS["4b"]
    spec = GdnPrefillSpec(name="", model=model, lengths=(3, 70), has_state=(True, True), num_slots=4)
    slots = 2**31 // (model.value_dim * model.head_k_dim) + 4
    case = host(spec.case(1))
    want, want_pool, _ = oracle.gdn_prefill(**case.arguments, **case.options)
    small = case.arguments.pop("state_pool")
    pool = jnp.zeros((1, slots, *small.shape[2:]), small.dtype).at[:, -4:].set(small)
    case.arguments["slot_ids"] = (slots - 4 + case.arguments["slot_ids"]).astype(np.int32)
    function = jax.jit(
        lambda pool, rest: pallas_kernels.gdn_prefill(
            state_pool=pool, **rest, **case.options, implementation=implementation
        ),
        donate_argnums=0,
    )
    out, pool = function(pool, case.arguments)
    assert worst_error(out, want) < 2 * ROUNDOFF["bfloat16"]
    assert worst_error(pool[:, -4:], want_pool) < 3e-4
    assert not pool[:, :-4].any()
    assert not out[want == 0].any()
