"""The streaming causal_conv without a GPU: lowered for an H200 that is not here, interpreted, its races, its limits.

The conformance suite runs it where there is a GPU; the packs here are those that its tiles and spans make special.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import registry
from pallas_kernels.causal_conv import mosaic_sm90, mosaic_stream
from pallas_kernels.causal_conv.specs import CausalConvSpec
from pallas_kernels.causal_conv.tuning import TUNABLES
from pallas_kernels.spec import REAL_MODELS, ModelShape
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import host, share_of_equal_bits, worst_error
from tests.pallas_kernels.test_mosaic_sm90 import abstract, distinct, lowered_for_h200
from tests.pallas_kernels.test_races import raced

NAME = "mosaic_stream"
NARROW, WIDE = (ModelShape("small", num_heads=4, num_kv_heads=1, num_k_heads=1, num_v_heads=n) for n in (1, 2))
HOPPER = registry.Target("gpu", "NVIDIA H200", "9.0")

pytestmark = pytest.mark.host


def spec(lengths, has_state=None, **fields) -> CausalConvSpec:
    return CausalConvSpec(name="", lengths=lengths, has_state=has_state, **{"model": WIDE, "num_layers": 2} | fields)


def interpreted(function, case, **settings):
    program = jax.jit(lambda arguments: function(**arguments, **settings, interpret=plgpu.InterpretGPUParams()))
    return program({name: jnp.asarray(array) for name, array in case.arguments.items()})


def compare(function, case, **settings):
    """With the oracle: outputs, tails that were written, and every bit that was not."""
    y, pool = interpreted(function, case, **settings)
    want, want_pool, written = oracle.causal_conv(**case.arguments)
    exact = case.arguments["x"].dtype == np.float32
    assert worst_error(y, want) < (1e-6 if exact else 2**-7)
    assert exact or share_of_equal_bits(np.asarray(y), want) > 0.99
    pool, old = np.asarray(pool), case.arguments["conv_pool"]
    kind = {2: np.uint16, 4: np.uint32}[old.dtype.itemsize]
    np.testing.assert_array_equal(pool[written], want_pool[written].astype(old.dtype))
    np.testing.assert_array_equal(pool[~written].view(kind), old[~written].view(kind))


REAL = [one for one in distinct("causal_conv") if one.model.name in REAL_MODELS]


@pytest.mark.parametrize(
    "one",
    [*(dataclasses.replace(one, beside=4160) for one in REAL), REAL[0]],
    ids=lambda one: f"{one.name}-{one.beside}",
)
def test_lowers_for_an_h200(one):
    text = lowered_for_h200(one, NAME)
    assert text.count("@mosaic_gpu") == 1
    assert len(re.findall(r"output_operand_alias<", text)) == 1, "the pool is not updated in place"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_lowers_in_other_dtypes(dtype):
    assert "@mosaic_gpu" in lowered_for_h200(dataclasses.replace(REAL[0], dtype=dtype), NAME)


TILING = mosaic_stream.Tiling(rows=8, stages=2, blocks=8, unroll=4)


@pytest.mark.parametrize(
    ("one", "blocks"),
    [
        # Short pieces, several in a tile; absent ones; pads; the last window begins before its tile (86 tokens).
        (
            spec((1, 2, 3, 1, 2, 3, 4, 0, 65), (True, True, True, False, False, False, True, True, False), num_pads=5),
            8,
        ),
        # Spans of 16 tokens: edges at the second and third token of a request, at its first, and in one that ends
        # before its fourth.
        (spec((15, 15, 18, 2, 14), (True,) * 5, model=NARROW), 12),
        # The least tiles: the edge of a span moves over all of the next one.
        (spec((7, 16, 0, 5, 2), (True, False, True, True, True), model=NARROW, num_pads=2), 200),
        # Fewer tokens than a tile has rows.
        (spec((3,), (True,), num_pads=2, model=NARROW), 12),
    ],
    ids=["mixed", "edges", "least", "tiny"],
)
def test_interpreted_matches_the_oracle(one, blocks):
    tiling = dataclasses.replace(TILING, blocks=blocks, **({"rows": 2, "unroll": 2} if blocks == 200 else {}))
    compare(
        mosaic_stream.causal_conv, host(dataclasses.replace(one, dtype="float32").case(1, poison=True)), tiling=tiling
    )


def test_interpreted_in_bfloat16():
    """Whole tiles, so that each stage is refilled; requests begin where tiles do; pads; columns beside."""
    one = spec((16, 40), (True, False), num_pads=8, beside=8)
    tiling = mosaic_stream.Tiling(rows=8, stages=3, blocks=2)
    compare(mosaic_stream.causal_conv, host(one.case(2, poison=True)), tiling=tiling)


def test_wide_loads_match_the_oracle():
    """Of the kernel that walks tiles."""
    one = spec((2, 9, 0, 67, 1), (True, False, True, True, True), num_pads=2, beside=8)
    compare(mosaic_sm90.causal_conv, host(one.case(3, poison=True)), tiling=mosaic_sm90.Tiling(wide=1))


RACED = spec((2, 0, 43, 11), (True, False, True, True), model=NARROW, num_pads=6)


def test_no_race():
    found, printed = raced(RACED, NAME, tiling=mosaic_stream.Tiling(rows=8, stages=2, blocks=3))
    assert not found and not printed, printed[:2000]


@pytest.mark.parametrize("step", ["barrier_wait", "wait_smem_to_gmem", "commit_smem"])
def test_a_missing_step_is_seen(step, monkeypatch):
    """Each synchronisation with the copy engine, left out."""
    monkeypatch.setattr(mosaic_stream.plgpu, step, lambda *args, **options: None)
    found, printed = raced(RACED, NAME, tiling=mosaic_stream.Tiling(rows=8, stages=3, blocks=3))
    assert found and "RACE DETECTED" in printed


def test_declines_what_it_cannot_run():
    supports = pallas_kernels.registry.get_op("causal_conv").implementations[NAME].supports
    arguments, _ = abstract(spec((5,), beside=8))
    supports(HOPPER, arguments)
    with pytest.raises(registry.UnsupportedArguments, match="needs compute capability 9.0, the device has 8.0"):
        supports(registry.Target("gpu", "NVIDIA A100", "8.0"), arguments)
    odd, _ = abstract(spec((5,), beside=4))
    with pytest.raises(registry.UnsupportedArguments, match="takes rows in multiples of 16 bytes, not 1032"):
        supports(HOPPER, odd)
    with pytest.raises(registry.UnsupportedArguments, match="takes channels in multiples of 128, not 100"):
        supports(HOPPER, {name: jax.ShapeDtypeStruct((5, 100), jnp.bfloat16) for name in ("x", "weight")})


@pytest.mark.parametrize(
    "settings", [{"rows": 257}, {"rows": 1, "unroll": 1}, {"stages": 1}, {"blocks": 0}, {"unroll": 5}], ids=str
)
def test_refuses_tilings_that_are_none(settings):
    with pytest.raises(ValueError, match="no tiling of this kernel"):
        mosaic_stream.Tiling(**settings)
    with pytest.raises(ValueError, match="no tiling of this kernel"):
        mosaic_sm90.Tiling(wide=2)


def test_tuning_stays_inside_shared_memory():
    [tunable] = TUNABLES
    arguments, _ = abstract(spec((5,)))
    assert tunable.possible(mosaic_stream.Tiling(rows=64, stages=6), arguments)
    assert not tunable.possible(mosaic_stream.Tiling(rows=64, stages=8), arguments)
    assert tunable.key(arguments) == ({"dtype": "bfloat16"}, {"tokens": 5, "channels": 512})
