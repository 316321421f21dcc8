"""linear: conformance of every implementation, and its Mosaic kernel lowered and interpreted without a GPU."""

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

import pallas_kernels
from pallas_kernels import tune
from pallas_kernels.linear import mosaic_sm90, reference
from pallas_kernels.linear.api import MOST_COLUMNS, TOKENS
from pallas_kernels.linear.mosaic_sm90 import Tiling, default_tiling
from pallas_kernels.linear.specs import LinearSpec
from pallas_kernels.mosaic_waves import SHARED_BYTES, Waves, waves_of
from pallas_kernels.registry import Target, UnsupportedArguments, get_op
from pallas_kernels.spec import TINY_MODELS, specs_of
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

OP, NAME = "linear", "mosaic_sm90"
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
ON_H200 = jax.sharding.AbstractMesh((), (), abstract_device=H200)
HOPPER = Target("gpu", "NVIDIA H200", "9.0")
REPOSITORY = pathlib.Path(__file__).parents[2]


def spec_of(rows: int, inner: int, columns: int, dtype: str = "bfloat16") -> LinearSpec:
    model = dataclasses.replace(TINY_MODELS["tiny1"], hidden_size=columns, intermediate_size=inner)
    return LinearSpec(name="", model=model, dtype=dtype, num_tokens=rows)


def abstract(spec) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.eval_shape(lambda: {name: jnp.asarray(array) for name, array in spec.case().arguments.items()})


@every_implementation(OP)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 64, 8), (13, 256, 384), (200, 320, 168), (300, 64, 1000)])
def test_matches_the_oracle(implementation, dtype, rows, inner, columns):
    case = host(spec_of(rows, inner, columns, dtype).case(rows))
    (out,) = call(OP, implementation, case)
    (want,) = oracle.linear(**case.arguments)
    assert out.dtype == case.arguments["x"].dtype and out.shape == (rows, columns)
    assert_close(OP, implementation, out, want, name="output")
    if dtype != "float32":
        assert share_of_equal_bits(out, want) > 0.98, "rounded more than once"


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


@pytest.mark.host
def test_the_reference_is_the_product():
    """To the last bit, whatever the op's frame adds. On a GPU, products in two programs may be of different kernels."""
    case = spec_of(24, 256, 384).case(3)
    x, weight = (jnp.asarray(case.arguments[name]) for name in ("x", "weight"))
    want = np.asarray(jax.jit(jnp.dot)(x, weight))
    assert_same_bits(np.asarray(reference.linear(x, weight)), want, "the reference")
    assert_same_bits(np.asarray(pallas_kernels.linear(x, weight)), want, "the op")


def test_auto_takes_the_kernel_for_a_range_of_tokens():
    def chosen(tokens: int, columns=2560, dtype="bfloat16", target=HOPPER) -> str:
        return get_op(OP).select("auto", abstract(spec_of(tokens, 4096, columns, dtype)), target=target).name

    assert chosen(1024) == chosen(TOKENS[0]) == chosen(TOKENS[1]) == chosen(1024, MOST_COLUMNS) == NAME
    assert chosen(TOKENS[0] - 1) == chosen(TOKENS[1] + 1) == chosen(1024, MOST_COLUMNS + 8) == "reference"
    assert chosen(1024, dtype="float32") == chosen(1024, target=Target("gpu", "NVIDIA A100", "8.0")) == "reference"
    assert get_op(OP).select(NAME, abstract(spec_of(1, 4096, 2560)), target=HOPPER).name == NAME


def test_declines_what_it_cannot_run():
    supports = get_op(OP).implementations[NAME].supports
    for spec in specs_of(OP).values():
        supports(HOPPER, abstract(spec))
    for target, spec, message in (
        (Target("cpu", "cpu"), spec_of(5, 64, 128), "needs an NVIDIA GPU"),
        (Target("gpu", "NVIDIA A100", "8.0"), spec_of(5, 64, 128), "needs compute capability 9.0"),
        (HOPPER, spec_of(5, 64, 128, "float32"), "takes 16-bit activations, not float32"),
        (HOPPER, spec_of(5, 96, 128), "takes widths in multiples of 64, not 96"),
        (HOPPER, spec_of(5, 64, 100), "takes columns in multiples of 8, not 100"),
        (HOPPER, spec_of(0, 64, 128), "takes at least one token"),
    ):
        with pytest.raises(UnsupportedArguments, match=message):
            supports(target, abstract(spec))


@pytest.mark.parametrize(
    "fields",
    [
        {"strip": 16},
        {"columns": 0},
        {"columns": 288},
        {"stages": 1},
        {"start": 0},
        {"cluster": 4},
        {"group": 0},
        {"tail": 3},
        {"columns": 160, "strip": 64},
        {"columns": 160, "tail": 2},
        {"columns": 256, "strip": 64, "stages": 6},
    ],
    ids=str,
)
def test_refused_tilings(fields):
    with pytest.raises(ValueError, match="no tiling of this kernel"):
        lowered_for_h200(specs_of(OP)["4b-down-rows1024"], tiling=Tiling(**fields))
    with pytest.raises(ValueError, match="1 blocks are no cluster of 2"):
        Tiling(cluster=2, blocks=1)


@pytest.mark.parametrize(
    ("tiling", "rows", "columns", "want"),
    [
        (Tiling(), 1024, 2560, Waves(4, 16, 64, 64)),
        (Tiling(cluster=1), 1024, 2560, Waves(8, 16, 128, 128)),
        (Tiling(columns=128, cluster=1), 1024, 2560, Waves(8, 20, 160, 132)),
        (Tiling(columns=128, tail=2, cluster=1), 1024, 2560, Waves(8, 20, 132, 132)),  # 28 are cut: 56 for 132 blocks
        (Tiling(columns=128, tail=2, cluster=2), 1024, 2560, Waves(4, 20, 66, 66)),
        (Tiling(columns=256, tail=2, cluster=1), 1024, 2560, Waves(8, 10, 80, 80)),  # 160 pieces would be two waves
        (Tiling(columns=256, tail=2, cluster=1), 512, 2560, Waves(4, 10, 0, 80)),  # nothing but pieces
        (Tiling(columns=128, tail=2, blocks=8, cluster=1), 1024, 128, Waves(8, 1, 8, 8)),  # a whole wave
    ],
)
def test_waves(tiling, rows, columns, want):
    waves = waves_of(tiling.frame, rows, columns)
    assert waves == want
    assert waves.cut * tiling.tail <= waves.clusters and (not waves.cut or waves.whole % waves.clusters == 0)


def test_tiles_fill_the_waves_of_real_shapes():
    for model, tokens, columns, width in (
        ("4b", 1024, 2560, (160, 2)),
        ("4b", 2048, 2560, (160, 2)),
        ("4b", 640, 2560, (256, 2)),  # all of them cut in two
        ("4b", 640, 4096, (160, 1)),  # five row blocks are no pairs
        ("9b", 1024, 4096, (256, 2)),
        ("0.8b", 1024, 1024, (128, 2)),  # all of them cut in two
    ):
        tiling = default_tiling(tokens, columns)
        assert (tiling.columns, tiling.cluster) == width, model
    for tiling in mosaic_sm90._WIDTHS:
        assert tiling.whole and tiling.shared_bytes(2) <= SHARED_BYTES


def lowered_for_h200(spec, **options) -> str:
    def program(arguments):
        if options:
            return mosaic_sm90.linear(**arguments, **options)
        return pallas_kernels.linear(**arguments, implementation=NAME)

    with jax.sharding.use_abstract_mesh(ON_H200):
        return jax.jit(program).trace(abstract(spec)).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", ["0.8b-down-rows1024", "4b-out_proj-rows2048", "27b-down-rows512", "tiny1-rows5"])
@pytest.mark.host
def test_lowers_for_an_h200(name):
    dtype = "float16" if name.startswith("27b") else "bfloat16"
    assert lowered_for_h200(dataclasses.replace(specs_of(OP)[name], dtype=dtype)).count("@mosaic_gpu") == 1


@pytest.mark.host
def test_every_kind_of_tiling_that_is_tried_lowers():
    """One of each kind: what differs in numbers alone makes the same program."""
    spec = dataclasses.replace(specs_of(OP)["4b-out_proj-rows1024"], num_tokens=1408)  # tails of every width
    (tunable,) = tune.tunables_of(OP)
    default = tunable.default(abstract(spec))
    tried = {one for step in tunable.steps[:2] for one in tune.combinations(default, step)}
    possible = [one for one in tried if tunable.possible(one, abstract(spec))]
    assert default in possible and len(possible) > 20
    kinds = {(one.columns % 64, one.strip, one.tail, one.cluster, one.start): one for one in possible}
    for tiling in sorted(kinds.values(), key=str):
        assert "@mosaic_gpu" in lowered_for_h200(spec, tiling=tiling)


TILINGS = {
    "ragged": ((200, 128, 360), Tiling(blocks=3, group=1, stages=2, cluster=1)),  # a last tile of 40 columns
    "narrow": ((13, 64, 256), Tiling(columns=96, blocks=1, stages=3, start=2, cluster=1)),
    "few": ((40, 320, 168), Tiling(columns=64, strip=64, stages=3, cluster=1)),  # fewer tiles than blocks
    "cluster": ((300, 128, 264), Tiling(columns=128, strip=64, blocks=4, cluster=2, group=2, stages=2)),
    "cut": (
        (264, 192, 360),
        Tiling(columns=128, strip=64, blocks=4, stages=3, tail=2, cluster=1),
    ),  # the ninth is
    "cut clusters": ((300, 128, 520), Tiling(columns=192, blocks=8, cluster=2, stages=2, start=2, tail=2)),  # six, two
    "cut alone": ((24, 256, 256), Tiling(columns=256, strip=64, stages=3, tail=2, cluster=1)),
    "races": ((128, 192, 320), Tiling(blocks=1, stages=2, cluster=1)),
    "cut races": ((128, 192, 384), Tiling(columns=128, strip=32, blocks=2, stages=2, start=2, tail=2, cluster=1)),
}


def error_of(kind: str, interpret=False) -> float:
    """Distance to the oracle in roundoffs."""
    shape, tiling = TILINGS[kind]
    case = host(spec_of(*shape).case(1))
    program = jax.jit(lambda arguments: mosaic_sm90.linear(**arguments, tiling=tiling, interpret=interpret))
    got = np.asarray(program({name: jnp.asarray(array) for name, array in case.arguments.items()}))
    (want,) = oracle.linear(**case.arguments)
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
    program = "from tests.pallas_kernels import test_linear as t; [t.interpret(kind) for kind in t.TILINGS]"
    environment = os.environ | {"PJRT_NPROC": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0 and done.stdout.count("interpreted") == len(TILINGS), done.stdout + done.stderr
    assert "RACE DETECTED" not in done.stdout + done.stderr, done.stdout + done.stderr
