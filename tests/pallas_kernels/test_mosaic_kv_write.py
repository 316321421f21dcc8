"""The streaming kv_write without a GPU: lowered for an H200 that is not here, interpreted, its races, its limits.

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

from pallas_kernels import registry
from pallas_kernels.kv_write import mosaic_sm90
from pallas_kernels.kv_write.mosaic_sm90 import FEWEST_TOKENS, Tiling
from pallas_kernels.kv_write.specs import KvWriteSpec
from pallas_kernels.kv_write.tuning import TUNABLES
from pallas_kernels.spec import REAL_MODELS, ModelShape, specs_of
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import host, share_of_equal_bits, worst_error
from tests.pallas_kernels.test_mosaic_sm90 import abstract, lowered_for_h200
from tests.pallas_kernels.test_races import raced

OP, NAME = "kv_write", "mosaic_sm90"
TWO, ONE = (ModelShape("small", num_heads=2 * n, num_kv_heads=n, num_k_heads=1, num_v_heads=1) for n in (2, 1))
HOPPER = registry.Target("gpu", "NVIDIA H200", "9.0")

pytestmark = pytest.mark.host


def spec(lengths, starts=None, **fields) -> KvWriteSpec:
    return KvWriteSpec(name="", lengths=lengths, starts=starts, **{"model": TWO, "num_layers": 2} | fields)


def compare(case, **settings):
    """With the oracle: outputs, what was written, and every bit of the pool that was not, the null page included."""
    program = jax.jit(
        lambda a: mosaic_sm90.kv_write(**a, **case.options, **settings, interpret=plgpu.InterpretGPUParams())
    )
    q_out, pool = program({name: jnp.asarray(array) for name, array in case.arguments.items()})
    want, want_pool, written = oracle.kv_write(**case.arguments, **case.options)
    exact = case.arguments["heads"].dtype == np.float32
    assert worst_error(q_out, want) < (2e-6 if exact else 2**-8)
    assert exact or not want.size or share_of_equal_bits(np.asarray(q_out), want) > 0.98
    assert not np.asarray(q_out)[case.arguments["page_ids"] == 0].any(), "queries of pads are not zero"
    old = case.arguments["kv_pool"]
    pool, old, want_pool = (np.moveaxis(np.asarray(array), 4, 2) for array in (pool, old, want_pool))
    assert worst_error(pool[written], want_pool[written]) < (2e-6 if exact else 2**-8)
    kind = {2: np.uint16, 4: np.uint32}[old.dtype.itemsize]
    values = (slice(None), 1)
    np.testing.assert_array_equal(pool[written][values], want_pool[written][values].astype(old.dtype))
    np.testing.assert_array_equal(pool[~written].view(kind), old[~written].view(kind))


@pytest.mark.parametrize(
    ("one", "tiling"),
    [
        # Requests and pages that begin at every place of a tile, decode rows, pads, a last tile that begins early.
        (spec((5, 0, 29, 1, 1), (62, 0, 0, 300, 191), num_pads=5), Tiling(rows=32, stages=3, blocks=3)),
        # Whole runs of one page: copies alone. More blocks than tiles.
        (spec((32, 16), (64, 16), model=ONE), Tiling(rows=16, stages=2, blocks=100)),
        # Nothing but pads and decode rows: no copies to the pool. Every stage is refilled.
        (spec((1,) * 20, tuple(range(40, 60)), num_pads=12, model=ONE), Tiling(rows=16, stages=2, blocks=1)),
    ],
    ids=["mixed", "runs", "rows"],
)
def test_interpreted_matches_the_oracle(one, tiling):
    compare(host(dataclasses.replace(one, dtype="float32").case(1, poison=True)), tiling=tiling)


def test_interpreted_in_bfloat16():
    """Fewer tokens than a tile has."""
    compare(host(spec((5, 12), (62, 0), num_pads=2, model=ONE).case(2, poison=True)), tiling=Tiling(stages=3, blocks=2))


def test_keys_and_values_alone():
    """As a prompt's last layer writes them: no queries."""
    one = spec((5, 29, 1), (62, 0, 191), num_pads=5, queries=False, dtype="float32")
    compare(host(one.case(5, poison=True)), tiling=Tiling(rows=32, stages=3, blocks=3))


def test_places_that_only_look_like_a_run():
    """The ends of eight tokens match, what lies between does not; the same page, and another one."""
    case = host(spec((32,), model=ONE, num_pages=4).case(3))
    offsets, pages = case.arguments["page_offsets"], case.arguments["page_ids"]
    offsets[[1, 2]] = offsets[[2, 1]]
    pages[12] = 1 + pages[12] % 3
    compare(host(case, page_offsets=offsets, page_ids=pages), tiling=Tiling(rows=16, stages=2, blocks=2))


def test_another_head_and_the_norms_of_all_layers():
    """Heads of 128, all of which rotate; two rows of norms, of which one is looked at."""
    case = host(spec((20,), model=dataclasses.replace(ONE, head_dim=128, rotary_dim=128), dtype="float32").case(4))
    rows = {}
    for name in ("q_norm", "k_norm"):
        rows[name] = np.full((2, 128), np.nan, np.float32)
        rows[name][1] = case.arguments[name]
    compare(dataclasses.replace(case, arguments=case.arguments | rows), tiling=Tiling(rows=16, stages=2, blocks=2))


@pytest.mark.parametrize("name", ["0.8b-8x1024", "4b-8x1024@keys", "4b-ragged8192", "4b-rows64", "27b-8x1024"])
def test_lowers_for_an_h200(name):
    text = lowered_for_h200(specs_of(OP)[name], NAME)
    assert text.count("@mosaic_gpu") == 1
    assert len(re.findall(r"output_operand_alias<", text)) == 1, "the pool is not updated in place"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_lowers_in_other_dtypes(dtype):
    assert "@mosaic_gpu" in lowered_for_h200(dataclasses.replace(specs_of(OP)["4b-8x1024"], dtype=dtype), NAME)


# Whole tiles: where the last one begins within the one before it, both write the same, which the detector calls a race.
RACED = spec((5, 24), (62, 8), num_pads=3, model=ONE)


@pytest.mark.parametrize("tiling", [Tiling(rows=16, stages=2, blocks=2), Tiling(rows=32, stages=3, blocks=1)], ids=str)
def test_no_race(tiling):
    found, printed = raced(RACED, NAME, tiling=tiling)
    assert not found and not printed, printed[:2000]


@pytest.mark.parametrize("step", ["barrier_wait", "wait_smem_to_gmem", "commit_smem"])
def test_a_missing_step_is_seen(step, monkeypatch):
    """Each synchronisation with the copy engine, left out."""
    monkeypatch.setattr(mosaic_sm90.plgpu, step, lambda *args, **options: None)
    found, printed = raced(RACED, NAME, tiling=Tiling(rows=16, stages=2, blocks=2))
    assert found and "RACE DETECTED" in printed


@pytest.mark.parametrize(
    ("tokens", "target", "chosen"),
    [
        (FEWEST_TOKENS, HOPPER, NAME),
        (FEWEST_TOKENS - 1, HOPPER, "triton"),
        (1, HOPPER, "triton"),
        (8192, registry.Target("gpu", "NVIDIA A100", "8.0"), "triton"),
        (8192, registry.Target("cpu", "cpu"), "reference"),
    ],
)
def test_what_auto_takes(tokens, target, chosen):
    arguments, options = abstract(spec((tokens,), model=REAL_MODELS["4b"]))
    assert registry.get_op(OP).select("auto", arguments | options, target=target).name == chosen


def test_declines_what_it_cannot_run():
    supports = registry.get_op(OP).implementations[NAME].supports
    arguments, options = abstract(spec((16,)))
    supports(HOPPER, arguments | options)
    with pytest.raises(registry.UnsupportedArguments, match="needs compute capability 9.0, the device has 8.0"):
        supports(registry.Target("gpu", "NVIDIA A100", "8.0"), arguments | options)
    with pytest.raises(registry.UnsupportedArguments, match="takes at least 16 tokens, not 5"):
        supports(HOPPER, abstract(spec((5,)))[0] | options)
    with pytest.raises(registry.UnsupportedArguments, match="not 256 with 48 rotated"):
        supports(HOPPER, arguments | options | {"rotary_dim": 48})
    with pytest.raises(registry.UnsupportedArguments, match="takes heads of 128 or 256 .*, not 192 with 64 rotated"):
        supports(HOPPER, abstract(spec((16,), model=dataclasses.replace(ONE, head_dim=192)))[0] | options)
    small = jax.ShapeDtypeStruct((2, 9, 2, 2, 4, 256), jnp.bfloat16)
    with pytest.raises(registry.UnsupportedArguments, match="takes pages of at least 8 tokens, not 4"):
        supports(HOPPER, arguments | options | {"kv_pool": small})
    vast = jax.ShapeDtypeStruct((16, 2**26, 2, 2, 64, 256), jnp.bfloat16)
    with pytest.raises(registry.UnsupportedArguments, match="4294967296 pages of heads are past int32"):
        supports(HOPPER, arguments | options | {"kv_pool": vast})


@pytest.mark.parametrize("settings", [{"rows": 8}, {"rows": 80}, {"rows": 24}, {"stages": 1}, {"blocks": 0}], ids=str)
def test_refuses_tilings_that_are_none(settings):
    with pytest.raises(ValueError, match="no tiling of this kernel"):
        Tiling(**settings)


def test_tuning_stays_inside_shared_memory():
    [tunable] = TUNABLES
    arguments, options = abstract(spec((16,)))
    assert tunable.possible(Tiling(rows=32, stages=12), arguments)
    assert not tunable.possible(Tiling(rows=32, stages=14), arguments)
    exact, sizes = tunable.key(arguments | options)
    assert (exact, sizes) == ({"dtype": "bfloat16", "head_dim": 256}, {"tokens": 16, "heads": 8})
