"""Races in the Mosaic kernels, found by the interpreter's vector clocks, without a GPU.

What it sees: accesses of shared memory by a warpgroup and by the copy engine that nothing orders: a tile read before
its barrier, a stage refilled while it is still being copied out, a copy that starts before the writes are committed
(the tests below take each of these away and demand that it is noticed). What it cannot see: the threads of one
warpgroup are one thread to it, so a missing synchronisation between them stays unseen; blocks run one after another, so
races between blocks do too; Triton kernels have another interpreter, which has no threads at all. compute-sanitizer
(``python -m pallas_kernels.sanitize``) looks there. The races of the prefill attention and of kv_write are looked for
beside their other tests.
"""

from __future__ import annotations

import contextlib
import io

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call  # there is no public name for the verdict
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import registry
from pallas_kernels.add_rms_norm.specs import AddRmsNormSpec
from pallas_kernels.causal_conv.specs import CausalConvSpec
from pallas_kernels.gated_rms_norm.specs import GatedRmsNormSpec
from pallas_kernels.gdn_decode import mosaic_sm90
from pallas_kernels.gdn_decode.specs import GdnDecodeSpec
from pallas_kernels.spec import ModelShape, Spec
from tests.pallas_kernels.conformance import host

ONE_HEAD, GROUP = (ModelShape("small", num_heads=4, num_kv_heads=1, num_k_heads=1, num_v_heads=n) for n in (1, 3))
TWO_HEADS = ModelShape("small", num_heads=4, num_kv_heads=1, num_k_heads=1, num_v_heads=4)
DECODE = GdnDecodeSpec(name="", model=GROUP, num_rows=1)
CASES = (
    GdnDecodeSpec(name="one", model=ONE_HEAD, num_rows=2, num_pads=1),
    GdnDecodeSpec(name="group", model=GROUP, num_rows=1, state_dtype="bfloat16"),
    CausalConvSpec(name="ragged", model=ONE_HEAD, lengths=(2, 0, 67), has_state=(True, False, True), num_pads=2),
    AddRmsNormSpec(name="rows", model=ONE_HEAD, num_tokens=3),
    GatedRmsNormSpec(name="rows", model=TWO_HEADS, num_tokens=32),
)

pytestmark = pytest.mark.host


def mosaic_implementations(op: str) -> list[str]:
    return [name for name in registry.get_op(op).implementations if name.startswith("mosaic")]


def raced(spec: Spec, name: str, **settings) -> tuple[bool, str]:
    """Whether the interpreter found a race, and what it printed or raised."""
    case = host(spec.case(1))
    function = registry.get_op(spec.op).implementations[name].function
    params = plgpu.InterpretGPUParams(detect_races=True)
    program = jax.jit(lambda arguments: function(**arguments, **case.options, **settings, interpret=params))
    printed = io.StringIO()
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    try:
        with contextlib.redirect_stdout(printed):
            jax.block_until_ready(program({key: jnp.asarray(array) for key, array in case.arguments.items()}))
    except jax.errors.JaxRuntimeError as error:  # a broken kernel may also stop the interpreter
        printed.write(str(error))
    found = interpret_pallas_call.get_races().races_found
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    return found, printed.getvalue()


@pytest.mark.parametrize(
    ("spec", "name"),
    [(spec, name) for spec in CASES for name in mosaic_implementations(spec.op)],
    ids=lambda value: f"{value.op}-{value.name}" if isinstance(value, Spec) else value,
)
def test_no_race(spec, name):
    found, printed = raced(spec, name)
    assert not found and not printed, printed[:2000]


@pytest.mark.parametrize(
    "tiling",
    [{"stages": 3}, {"stages": 4}, {"values": 128}, {"plain": True}, {"plain": True, "stages": 3}],
    ids=str,
)
def test_no_race_in_other_tilings(tiling):
    """Six tiles of 64 value dims, or three of 128: every stage is refilled."""
    found, printed = raced(DECODE, "mosaic_sm90", tiling=mosaic_sm90.Tiling(**tiling))
    assert not found and not printed, printed[:2000]


@pytest.mark.parametrize("step", ["barrier_wait", "wait_smem_to_gmem", "commit_smem"])
def test_a_missing_step_is_seen(step, monkeypatch):
    """Each synchronisation of the decode kernel with the copy engine, left out."""
    monkeypatch.setattr(mosaic_sm90.plgpu, step, lambda *args, **options: None)
    found, printed = raced(DECODE, mosaic_implementations("gdn_decode")[0])
    assert found and "RACE DETECTED" in printed
