"""swiglu_product: conformance of every implementation, and its Mosaic kernel lowered and interpreted without a GPU."""

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
from jax import lax

import pallas_kernels
from pallas_kernels import bench, tune
from pallas_kernels.registry import Target, UnsupportedArguments, get_op
from pallas_kernels.spec import TINY_MODELS, specs_of
from pallas_kernels.swiglu_product import mosaic_sm90, reference
from pallas_kernels.swiglu_product.api import FEWEST_TOKENS
from pallas_kernels.swiglu_product.mosaic_sm90 import Tiling
from pallas_kernels.swiglu_product.specs import SwigluProductSpec
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import (
    ROUNDOFF,
    assert_close,
    assert_same_bits,
    call,
    every_implementation,
    host,
    implementations,
    share_of_equal_bits,
    worst_error,
)

OP, NAME = "swiglu_product", "mosaic_sm90"
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
ON_H200 = jax.sharding.AbstractMesh((), (), abstract_device=H200)
HOPPER = Target("gpu", "NVIDIA H200", "9.0")
REPOSITORY = pathlib.Path(__file__).parents[2]


def spec_of(rows: int, width: int, hidden: int, dtype: str = "bfloat16") -> SwigluProductSpec:
    model = dataclasses.replace(TINY_MODELS["tiny1"], hidden_size=width, intermediate_size=hidden)
    return SwigluProductSpec(name="", model=model, dtype=dtype, num_tokens=rows)


def abstract(spec) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.eval_shape(lambda: {name: jnp.asarray(array) for name, array in spec.case().arguments.items()})


@every_implementation(OP)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width", "hidden"), [(1, 64, 128), (13, 256, 384), (200, 320, 256), (300, 64, 128)])
def test_matches_the_oracle(implementation, dtype, rows, width, hidden):
    case = host(spec_of(rows, width, hidden, dtype).case(rows))
    (out,) = call(OP, implementation, case)
    (want,) = oracle.swiglu_product(**case.arguments)
    assert out.dtype == case.arguments["x"].dtype and out.shape == (rows, hidden)
    assert_close(OP, implementation, out, want, name="output")
    if dtype != "float32" and implementation != "reference":
        assert share_of_equal_bits(out, want) > 0.99, "rounded more than once"


@every_implementation(OP)
def test_a_bad_row_touches_no_neighbour(implementation):
    case = host(spec_of(9, 128, 128).case(1))
    (clean,) = call(OP, implementation, case)
    x = case.arguments["x"].copy()
    x[2] = np.nan
    (spoiled,) = call(OP, implementation, host(case, x=x))
    assert np.isnan(spoiled[2].astype(np.float32)).all()
    rows = np.arange(9) != 2
    assert_same_bits(spoiled[rows], clean[rows], "a neighbour")


@every_implementation(OP)
def test_gates_far_out(implementation):
    """A SiLU of large numbers is the number or nothing, and never NaN."""
    case = host(spec_of(3, 64, 128).case(1))
    (out,) = call(OP, implementation, host(case, x=case.arguments["x"] * 300))
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.host
def test_the_reference_is_a_product_and_an_activation():
    """To the last bit, whatever the op's frame adds: what the model computed before it was an op.

    On a GPU, products of one shape in two programs may be of different kernels.
    """
    case = spec_of(24, 256, 384).case(3)
    x, weight = (jnp.asarray(case.arguments[name]) for name in ("x", "weight"))

    @jax.jit
    def parts(x, weight):
        gate, up = (half.astype(jnp.float32) for half in jnp.split(jnp.dot(x, weight), 2, axis=-1))
        return (gate * lax.logistic(gate) * up).astype(x.dtype)

    want = parts(x, weight)
    assert_same_bits(np.asarray(reference.swiglu_product(x, weight)), np.asarray(want), "the reference")
    assert_same_bits(np.asarray(pallas_kernels.swiglu_product(x, weight)), np.asarray(want), "the op")


def test_auto_takes_the_fused_kernel_for_many_tokens():
    def chosen(tokens: int, dtype=jnp.bfloat16, target=HOPPER) -> str:
        arguments = abstract(spec_of(tokens, 2560, 9216, jnp.dtype(dtype).name))
        return get_op(OP).select("auto", arguments, target=target).name

    assert chosen(8192) == chosen(FEWEST_TOKENS) == NAME
    assert chosen(FEWEST_TOKENS - 1) == chosen(1) == "reference"
    assert chosen(8192, jnp.float32) == chosen(8192, target=Target("gpu", "NVIDIA A100", "8.0")) == "reference"
    assert get_op(OP).select(NAME, abstract(spec_of(1, 2560, 9216)), target=HOPPER).name == NAME


def test_declines_what_it_cannot_run():
    supports = get_op(OP).implementations[NAME].supports
    for model in ("0.8b", "4b", "9b", "27b"):
        supports(HOPPER, abstract(specs_of(OP)[f"{model}-rows8192"]))
    for target, spec, message in (
        (Target("cpu", "cpu"), spec_of(5, 64, 128), "needs an NVIDIA GPU"),
        (Target("gpu", "NVIDIA A100", "8.0"), spec_of(5, 64, 128), "needs compute capability 9.0"),
        (HOPPER, spec_of(5, 64, 128, "float32"), "takes 16-bit activations, not float32"),
        (HOPPER, spec_of(5, 96, 128), "takes widths in multiples of 64, not 96"),
        (HOPPER, spec_of(5, 64, 192), "takes hidden sizes in multiples of 128, not 192"),
        (HOPPER, spec_of(0, 64, 128), "takes at least one token"),
    ):
        with pytest.raises(UnsupportedArguments, match=message):
            supports(target, abstract(spec))


@pytest.mark.parametrize(
    "fields",
    [
        {"wide": 3},
        {"products": 0},
        {"stages": 1},
        {"start": 5},
        {"start": 0},
        {"cluster": 4},
        {"pairs": 3},
        {"group": 0},
        {"tail": 3},
    ],
    ids=str,
)
def test_refused_tilings(fields):
    with pytest.raises(ValueError, match="no tiling of this kernel"):
        Tiling(**fields)
    with pytest.raises(ValueError, match="1 blocks are no cluster of 2"):
        Tiling(cluster=2, blocks=1)


@pytest.mark.parametrize("fields", [{"wide": 2, "tail": 1}, {"wide": 2, "pairs": 1}, {"products": 2}], ids=str)
def test_halves_that_are_no_strips_are_refused(fields):
    with pytest.raises(ValueError, match="halves of a tile are no whole strips"):
        lowered_for_h200(specs_of(OP)["4b-rows8192"], tiling=Tiling(**fields))


@pytest.mark.parametrize(
    ("tokens", "fields", "waves"),
    [
        (1024, {}, (4, 72, 264, 24, 66)),
        (1024, {"tail": 1}, (4, 72, 288, 0, 66)),
        (2048, {}, (8, 72, 576, 0, 66)),  # the last wave is more than half full
        (4096, {"cluster": 1}, (32, 72, 2244, 60, 132)),
        (64, {}, (1, 72, 66, 6, 66)),
        (64, {"blocks": 288}, (1, 72, 0, 72, 144)),  # half a wave in all
        (64, {"blocks": 144}, (1, 72, 72, 0, 72)),  # nothing is left
    ],
)
def test_waves(tokens, fields, waves):
    assert mosaic_sm90.waves_of(Tiling(**fields), tokens, 9216) == waves


@pytest.mark.parametrize(("row_blocks", "column_blocks", "group"), [(64, 72, 16), (9, 4, 4), (1, 3, 16), (5, 7, 1)])
def test_tiles_are_each_taken_once(row_blocks, column_blocks, group):
    tiles = np.arange(row_blocks * column_blocks, dtype=np.int32)
    rows, columns = jax.vmap(lambda tile: mosaic_sm90._place(tile, row_blocks, column_blocks, group))(tiles)
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) == {
        (row, column) for row in range(row_blocks) for column in range(column_blocks)
    }
    together = np.asarray(rows)[: group * column_blocks]
    assert together.max() < group, "another group before this one is done"


def lowered_for_h200(spec, **options) -> str:
    def program(arguments):
        if options:
            return mosaic_sm90.swiglu_product(**arguments, **options)
        return pallas_kernels.swiglu_product(**arguments, implementation=NAME)

    with jax.sharding.use_abstract_mesh(ON_H200):
        return jax.jit(program).trace(abstract(spec)).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", ["0.8b-rows1024", "4b-rows8192", "27b-rows4096", "tiny1-rows5"])
@pytest.mark.host
def test_lowers_for_an_h200(name):
    dtype = "float16" if name.startswith("27b") else "bfloat16"
    assert lowered_for_h200(dataclasses.replace(specs_of(OP)[name], dtype=dtype)).count("@mosaic_gpu") == 1


@pytest.mark.host
def test_every_tiling_that_is_tried_lowers():
    """One of each kind: what differs in numbers alone makes the same program."""
    spec = specs_of(OP)["4b-rows8192"]
    (tunable,) = tune.tunables_of(OP)
    tried = {one for step in tunable.steps for one in tune.combinations(Tiling(), step)}
    possible = [one for one in tried if tunable.possible(one, abstract(spec))]
    assert Tiling() in possible and Tiling(products=2, start=2, tail=1) not in possible
    assert Tiling(products=2, tail=1) in possible and Tiling(products=2) not in possible
    assert Tiling(tail=1) not in possible and tunable.possible(Tiling(tail=1), abstract(specs_of(OP)["4b-rows1024"]))
    kinds = {(one.products, one.start, one.cluster): one for one in possible}
    for tiling in sorted(kinds.values(), key=str)[::2]:
        assert "@mosaic_gpu" in lowered_for_h200(spec, tiling=tiling)


def test_a_chain_of_calls_holds_each_back_until_the_one_before_is_done():
    """No argument has the shape of the result, so a barrier orders the calls that the bench times."""
    spec = specs_of(OP)["tiny1-rows5"]
    arguments = {name: jnp.asarray(array) for name, array in spec.case().arguments.items()}
    inputs = bench.separate_inputs(arguments, 3)
    program = jax.jit(bench.chained(spec, "reference", {}, rounds=2))
    lowered = program.lower((), inputs)
    assert lowered.as_text().count("optimization_barrier") == 6, "two, then three and the loop's"
    assert lowered.compile().as_text().count(" dot(") == 6, "no call is left out"
    (out, total), pools = program((), inputs)
    want = pallas_kernels.swiglu_product(**arguments)
    assert pools == () and (out == want).all()
    np.testing.assert_allclose(total, 5 * np.float32(want[0, 0]), rtol=1e-6)


TILINGS = {
    "plain": ((200, 128, 256), Tiling(blocks=3, group=1, products=2, stages=2, cluster=1, pairs=1, tail=1)),
    "strips": ((13, 64, 256), Tiling(blocks=1, cluster=1)),
    "late": ((136, 256, 128), Tiling(blocks=1, start=2, stages=3, cluster=1)),
    "wide": ((300, 128, 128), Tiling(blocks=2, wide=2, stages=2, cluster=1, pairs=1, tail=1)),
    "cluster": ((300, 128, 128), Tiling(blocks=2, cluster=2, group=2, stages=2, start=2, pairs=1)),
    "cut": ((264, 128, 256), Tiling(blocks=4, cluster=1, stages=3, tail=2)),  # a wave of four, two cut in two
    "cut alone": ((136, 128, 128), Tiling(blocks=4, cluster=1, start=2, stages=2, pairs=1, tail=2)),
    "cut pairs": ((300, 192, 384), Tiling(blocks=8, cluster=2, group=2, stages=3, start=2, tail=2)),  # four, then two
    "not cut": ((264, 128, 128), Tiling(blocks=2, cluster=1, pairs=1, stages=2, tail=2, group=1)),
    "cut races": ((128, 192, 384), Tiling(blocks=2, cluster=1, stages=2, start=2, tail=2)),
    "races": ((128, 192, 256), Tiling(blocks=1, start=2, stages=2, pairs=2, cluster=1)),
}


def error_of(kind: str, interpret=False) -> float:
    """Distance to the oracle in roundoffs."""
    shape, tiling = TILINGS[kind]
    case = host(spec_of(*shape).case(1))
    program = jax.jit(lambda arguments: mosaic_sm90.swiglu_product(**arguments, tiling=tiling, interpret=interpret))
    got = np.asarray(program({name: jnp.asarray(array) for name, array in case.arguments.items()}))
    (want,) = oracle.swiglu_product(**case.arguments)
    return worst_error(got, want) / ROUNDOFF["bfloat16"]


def interpret(kind: str) -> None:
    """What the child process does: few blocks, so that each has several tiles and every stage is refilled."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    assert error_of(kind, plgpu.InterpretGPUParams(detect_races="races" in kind)) < 2
    print("interpreted", kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TILINGS)
def test_tilings_on_a_gpu(kind):
    if NAME not in implementations(OP):
        pytest.skip("declined: not on this GPU")
    assert error_of(kind) < 2


@pytest.mark.host
def test_interpreted():
    """Values, barriers and, where one block works alone, races. Three warpgroups wait for one another: threads."""
    program = "from tests.pallas_kernels import test_swiglu_product as t; [t.interpret(kind) for kind in t.TILINGS]"
    environment = os.environ | {"PJRT_NPROC": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0 and done.stdout.count("interpreted") == len(TILINGS), done.stdout + done.stderr
    assert "RACE DETECTED" not in done.stdout + done.stderr, done.stdout + done.stderr
