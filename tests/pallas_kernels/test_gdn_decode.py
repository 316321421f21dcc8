"""Conformance of every implementation of gdn_decode."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.core import ClusterBarrierType  # there is no public name for kinds of barriers
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gdn_decode import mosaic_sm90
from pallas_kernels.gdn_decode.specs import GdnDecodeSpec
from pallas_kernels.spec import REAL_MODELS, TINY_MODELS
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import (
    assert_close,
    assert_same_bits,
    call,
    check,
    every_implementation,
    host,
    share_of_equal_bits,
)

OP = "gdn_decode"
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
BASE = GdnDecodeSpec(
    name="base", model=TINY_MODELS["tiny1"], dtype="float32", num_rows=5, num_pads=2, num_slots=9, num_layers=2
)


@every_implementation(OP)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 33])
def test_odd_batches(implementation, rows):
    pads = rows // 3
    spec = dataclasses.replace(BASE, num_rows=rows, num_pads=pads, num_slots=rows + 4)
    check(OP, implementation, spec.case(1, poison=True))


@every_implementation(OP)
@pytest.mark.parametrize("model", ["tiny1", "tiny2", "tiny3", "tiny4g16"])
def test_every_head_ratio(implementation, model):
    check(OP, implementation, dataclasses.replace(BASE, model=TINY_MODELS[model]).case(2, poison=True))


@every_implementation(OP)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_bfloat16(implementation, state_dtype):
    spec = dataclasses.replace(BASE, dtype="bfloat16", state_dtype=state_dtype, model=TINY_MODELS["tiny2"])
    check(OP, implementation, spec.case(3, poison=True))


@every_implementation(OP)
def test_rounds_where_the_definition_rounds(implementation):
    """The convolution before and after its activation, o before its norm, the result."""
    spec = dataclasses.replace(BASE, dtype="bfloat16", model=TINY_MODELS["tiny2"])
    case = host(spec.case(3, poison=True))
    (y, *_), (want, *_) = call(OP, implementation, case), oracle.gdn_decode(**case.arguments, **case.options)
    assert share_of_equal_bits(y, want) > 0.97


@every_implementation(OP)
@pytest.mark.parametrize("decay", ["strong", "none", "mixed"])
def test_decays(implementation, decay):
    for seed in (4, 5):
        check(OP, implementation, dataclasses.replace(BASE, decay=decay).case(seed, poison=True))


@every_implementation(OP)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decay", ["strong", "none"])
def test_decays_in_bfloat16(implementation, decay, state_dtype):
    spec = dataclasses.replace(BASE, dtype="bfloat16", state_dtype=state_dtype, decay=decay, model=TINY_MODELS["tiny3"])
    check(OP, implementation, spec.case(12, poison=True))


def gate_columns(case):
    """Columns of b and of a in the projection."""
    heads, width = case.arguments["state_pool"].shape[2], case.arguments["projected"].shape[1]
    return slice(width - 2 * heads, width - heads), slice(width - heads, width)


@every_implementation(OP)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_no_decay_and_no_write_keep_the_state_to_the_bit(implementation, state_dtype):
    spec = dataclasses.replace(BASE, state_dtype=state_dtype, decay="none", model=TINY_MODELS["tiny2"])
    case = host(spec.case(13, poison=True))
    case.arguments["projected"][:, gate_columns(case)[0]] = -200.0  # beta is 0, not merely small
    _, _, pool = call(OP, implementation, case)
    assert_same_bits(pool[:, 1:], case.arguments["state_pool"][:, 1:], "a state")


@every_implementation(OP)
def test_strong_decay_forgets_to_the_bit(implementation):
    """Where exp(g) is 0, nothing of the old state may be left, whatever its size."""
    case = host(dataclasses.replace(BASE, decay="strong", model=TINY_MODELS["tiny2"]).case(14))
    case.arguments["projected"][:, gate_columns(case)[1]] = 100.0
    first = call(OP, implementation, case)
    other = call(OP, implementation, host(case, state_pool=case.arguments["state_pool"] * -1e6))
    slots = case.arguments["slot_ids"][case.arguments["slot_ids"] > 0]
    assert_same_bits(first[2][-1, slots] + 0.0, other[2][-1, slots] + 0.0, "a state")  # -0 is 0
    assert_same_bits(first[0] + 0.0, other[0] + 0.0, "an output")


@every_implementation(OP)
def test_infinite_decay(implementation):
    case = host(BASE.case(6, poison=True))
    decay = case.arguments["A_log"].copy()
    decay[0] = 100.0
    y, _, pool = call(OP, implementation, host(case, A_log=decay))
    live = case.arguments["slot_ids"][case.arguments["slot_ids"] > 0]
    assert np.isfinite(y).all() and np.isfinite(pool[-1, live]).all()


@every_implementation(OP)
def test_all_rows_padding(implementation):
    """Every row in the null slot, as often as you like: zeros out, no slot touched."""
    case = host(BASE.case(7, poison=True), slot_ids=np.zeros(BASE.num_rows, np.int32))
    y, conv_pool, state_pool = call(OP, implementation, case)
    assert not y.any()
    assert_same_bits(conv_pool[:, 1:], case.arguments["conv_pool"][:, 1:], "a tail")
    assert_same_bits(state_pool[:, 1:], case.arguments["state_pool"][:, 1:], "a state")


@every_implementation(OP)
def test_company_does_not_matter(implementation):
    """A row alone (the others padding), in reversed order, and among others: the same result."""
    case = host(dataclasses.replace(BASE, num_pads=0).case(8, poison=True))
    y, conv_pool, state_pool = call(OP, implementation, case)
    row_inputs = ("projected", "slot_ids")
    reversed_rows = {name: case.arguments[name][::-1] for name in row_inputs}
    y_reversed, conv_reversed, state_reversed = call(OP, implementation, host(case, **reversed_rows))
    assert_close(OP, implementation, y_reversed[::-1], y, name="rows in reversed order")
    slots = case.arguments["slot_ids"]
    assert_same_bits(conv_reversed[-1, slots], conv_pool[-1, slots], "a tail in reversed order")
    assert_close(OP, implementation, state_reversed[-1, slots], state_pool[-1, slots], name="states, reversed order")
    for row in range(BASE.num_rows):
        alone = np.where(np.arange(BASE.num_rows) == row, slots, 0).astype(np.int32)
        y_alone, _, state_alone = call(OP, implementation, host(case, slot_ids=alone))
        assert_close(OP, implementation, y_alone[row], y[row], name=f"row {row} alone")
        assert_close(OP, implementation, state_alone[-1, slots[row]], state_pool[-1, slots[row]], name="its state")


@every_implementation(OP)
@pytest.mark.parametrize("where", ["qkv", "z", "b", "a", "state", "tail"])
def test_nan_row_touches_no_neighbour(implementation, where):
    case = host(dataclasses.replace(BASE, num_pads=1).case(9, poison=True))
    clean = call(OP, implementation, case)
    slots = case.arguments["slot_ids"]
    victim = int(np.flatnonzero(slots)[1])
    name = {"state": "state_pool", "tail": "conv_pool"}.get(where, "projected")
    poisoned = case.arguments[name].copy()
    channels = BASE.model.conv_dim
    b, a = gate_columns(case)
    columns = {"qkv": slice(channels), "z": slice(channels, channels + BASE.model.value_dim), "b": b, "a": a}.get(where)
    poisoned[(-1, slots[victim]) if name.endswith("pool") else (victim, columns)] = np.nan
    got = call(OP, implementation, host(case, **{name: poisoned}))
    assert np.isnan(got[0][victim]).any()
    rows = np.arange(BASE.num_rows) != victim
    assert_same_bits(got[0][rows], clean[0][rows], "a neighbour's output")
    others = np.setdiff1d(np.arange(1, BASE.num_slots), slots[victim])
    assert_same_bits(got[1][:, others], clean[1][:, others], "a neighbour's tail")
    assert_same_bits(got[2][:, others], clean[2][:, others], "a neighbour's state")


@pytest.mark.gpu
@every_implementation(OP)
@pytest.mark.parametrize(
    ("model", "rows", "state_dtype"),
    [
        ("0.8b", 1, "bfloat16"),
        ("0.8b", 133, "float32"),
        ("4b", 3, "float32"),
        ("4b", 37, "bfloat16"),
        ("27b", 1, "float32"),
        ("27b", 11, "bfloat16"),
    ],
)
def test_real_heads_at_odd_batches(implementation, model, rows, state_dtype):
    """bfloat16 activations, padding rows among the others, rows with NaN that touch no neighbour."""
    shape = REAL_MODELS[model]
    spec = GdnDecodeSpec(name="", model=shape, num_rows=rows, num_pads=rows // 3, num_slots=rows + 4)
    case = host(dataclasses.replace(spec, state_dtype=state_dtype).case(rows, poison=True))
    clean = check(OP, implementation, case)
    live = np.flatnonzero(case.arguments["slot_ids"])
    if len(live) < 2:
        return
    projected, victims = case.arguments["projected"].copy(), live[::2]
    projected[victims] = np.nan
    got = call(OP, implementation, host(case, projected=projected))
    assert np.isnan(got[0][victims]).all()
    rest = np.setdiff1d(np.arange(rows), victims)
    assert_same_bits(got[0][rest], clean[0][rest], "a neighbour's output")
    others = np.setdiff1d(np.arange(1, spec.num_slots), case.arguments["slot_ids"][victims])
    assert_same_bits(got[1][:, others], clean[1][:, others], "a neighbour's tail")
    assert_same_bits(got[2][:, others], clean[2][:, others], "a neighbour's state")


def results_of(spec: GdnDecodeSpec, tiling: mosaic_sm90.Tiling, interpret) -> list[np.ndarray]:
    case = host(spec.case(2, poison=True))
    options = case.options | {"tiling": tiling, "interpret": interpret}
    run = jax.jit(lambda arguments: mosaic_sm90.gdn_decode(**arguments, **options))
    return [np.asarray(got) for got in run({name: jnp.asarray(array) for name, array in case.arguments.items()})]


def interpret(kind: str, group: int) -> None:
    """What a child process does: a split kernel against one that is not, or a search for races in it."""
    model = dataclasses.replace(TINY_MODELS["tiny1"], num_k_heads=1, num_v_heads=group, head_k_dim=128, head_v_dim=128)
    races = kind != "values"
    spec = GdnDecodeSpec(name="", model=model, num_rows=1 if races else 3, num_pads=1 - races, num_layers=2)
    wait = plgpu.barrier_wait
    if kind == "early":  # the tail of query and key is written before the other blocks have read it
        is_tail = lambda barrier: isinstance(barrier.dtype, ClusterBarrierType)  # noqa: E731
        mosaic_sm90.plgpu.barrier_wait = lambda barrier: None if is_tail(barrier) else wait(barrier)
    how = plgpu.InterpretGPUParams(detect_races=races)
    for more in ({}, {"values": 128}, {"plain": True}):
        got = results_of(spec, mosaic_sm90.Tiling(split=True, **more), how)
        if kind == "values":
            for one, other in zip(got, results_of(spec, mosaic_sm90.Tiling(**more), how), strict=True):
                assert_same_bits(one, other, str(more))
    print("interpreted", kind)


@pytest.mark.parametrize(("kind", "group"), [("values", 2), ("values", 3), ("races", 3), ("early", 2)])
@pytest.mark.host
def test_split_interpreted(kind, group):
    """Blocks of a cluster wait for one another: the interpreter needs threads."""
    program = f"from tests.pallas_kernels.test_gdn_decode import interpret; interpret({kind!r}, {group})"
    environment = os.environ | {"PJRT_NPROC": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )
    printed = done.stdout + done.stderr
    assert ("RACE DETECTED" in printed) == (kind == "early"), printed
    assert kind == "early" or (done.returncode == 0 and f"interpreted {kind}" in done.stdout), printed


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", [{}, {"values": 128}, {"stages": 4}, {"plain": True}], ids=str)
@pytest.mark.parametrize(("model", "rows", "state_dtype"), [("4b", 37, "float32"), ("27b", 5, "bfloat16")])
def test_tilings_on_a_gpu(model, rows, state_dtype, tiling):
    """Within the bars of the kernel; and the same bits whether value heads have blocks of their own or not."""
    spec = GdnDecodeSpec(name="", model=REAL_MODELS[model], num_rows=rows, num_pads=rows // 3, state_dtype=state_dtype)
    together, split = (results_of(spec, mosaic_sm90.Tiling(**tiling, split=split), False) for split in (False, True))
    for one, another in zip(together, split, strict=True):
        assert_same_bits(another, one, str(tiling))
    case = host(spec.case(2, poison=True))
    *want, written = oracle.gdn_decode(**case.arguments, **case.options)
    assert_close(OP, "mosaic_sm90", split[0], want[0], name="y")
    behind = {"after_rounding": True, "activations": case.arguments["projected"].dtype}
    assert_close(OP, "mosaic_sm90", split[2][written], want[2][written], name="state_pool", **behind)
