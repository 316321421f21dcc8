"""The Mosaic prefill attention without a GPU: its work list, lowered for an H200, interpreted with its barriers."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.paged_prefill_attention import mosaic_sm90, mosaic_work
from pallas_kernels.paged_prefill_attention.specs import PagedPrefillAttentionSpec
from pallas_kernels.registry import Target, UnsupportedArguments, get_op
from pallas_kernels.spec import REAL_MODELS, TINY_MODELS, ModelShape, specs_of

NAME = "mosaic_sm90"
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
ON_H200 = jax.sharding.AbstractMesh((), (), abstract_device=H200)
REPOSITORY = pathlib.Path(__file__).parents[2]


@functools.partial(jax.jit, static_argnums=2)
def work_list(cu_seqlens, kv_lens, num_tokens):
    return mosaic_work.work_list(cu_seqlens, kv_lens, num_tokens)


@pytest.mark.parametrize("seed", range(4))
def test_work_list_covers_every_token_once(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 5, 8, 63, 64, 65, 130, 300], 6)
    if seed == 0:
        lengths[:] = 0  # pads alone
    prefixes = rng.choice([0, 1, 63, 64, 500], 6)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    totals = (prefixes + lengths).astype(np.int32)
    num_tokens = 2048
    work, count = work_list(offsets, totals, num_tokens)
    work = mosaic_work.Work(*(np.asarray(field) for field in work))
    assert (np.diff(work.pages) <= 0).all(), "not the longest first"
    owner = np.full(num_tokens, -2)
    for tile in range(len(work.start)):
        request, start, first, end, position, pages, whole = (int(field[tile]) for field in work)
        if tile >= count:
            assert first == end and pages == 0, "a dead tile has rows"
            continue
        assert 0 <= first < end <= 64 and start % 8 == 0 and start >= 0
        tokens = np.arange(start + first, start + end)
        assert (owner[tokens] == -2).all(), "two tiles own a token"
        owner[tokens] = request if pages else -1
        if not pages:
            assert start + first >= offsets[-1], "a request's tokens became zeros"
            continue
        positions = position + np.arange(first, end)
        np.testing.assert_array_equal(positions, prefixes[request] + tokens - offsets[request])
        assert pages == positions[-1] // 64 + 1
        assert whole == min((positions[0] + 1) // 64, pages) and pages - whole <= 2
        assert pages <= mosaic_sm90.EXACT_PAGES or whole >= 1
    want = np.concatenate([np.repeat(np.arange(6), lengths), np.full(num_tokens - offsets[-1], -1)])
    np.testing.assert_array_equal(owner, want)


def test_work_list_has_room_for_the_worst_pack():
    """Every request starts at the worst place and ends in a tile of one token."""
    lengths = np.array([7] + [58 + 64] + [64] * 5)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    work, count = work_list(offsets, lengths.astype(np.int32), int(offsets[-1]))
    assert count <= len(work.start)


def lowered_for_h200(spec, **options) -> str:
    arguments = jax.eval_shape(lambda: {k: jnp.asarray(v) for k, v in spec.case().arguments.items()})
    with jax.sharding.use_abstract_mesh(ON_H200):
        function = functools.partial(pallas_kernels.paged_prefill_attention, implementation=NAME)
        if options:
            function = functools.partial(mosaic_sm90.paged_prefill_attention, **options)
        program = jax.jit(lambda arguments: function(**arguments, first_gate=spec.model.num_heads))
        return program.trace(arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "model", [REAL_MODELS["4b"], REAL_MODELS["27b"], TINY_MODELS["tiny4g16"]], ids=lambda m: m.name
)
@pytest.mark.host
def test_lowers_for_an_h200(model):
    spec = PagedPrefillAttentionSpec(name="", model=model, lengths=(5, 0, 66, 1), prefixes=(70, 0, 0, 300), num_pads=3)
    dtype = "float16" if model.name.startswith("tiny") else "bfloat16"
    assert lowered_for_h200(dataclasses.replace(spec, dtype=dtype)).count("@mosaic_gpu") == 1


@pytest.mark.host
def test_lowers_with_turns_and_clusters():
    spec = specs_of("paged_prefill_attention")["4b-8x1024"]
    assert "@mosaic_gpu" in lowered_for_h200(spec, tuning=mosaic_sm90.Tuning(schedule="turns", cluster=2))


def test_declines_what_it_cannot_run():
    supports = get_op("paged_prefill_attention").implementations[NAME].supports
    hopper, ampere = Target("gpu", "NVIDIA H200", "9.0"), Target("gpu", "NVIDIA A100", "8.0")

    def arguments(heads=4, kv_heads=1, dim=256, page=64, dtype=jnp.bfloat16):
        return {
            "q": jax.ShapeDtypeStruct((10, heads, dim), dtype),
            "kv_pool": jax.ShapeDtypeStruct((1, 4, 2, kv_heads, page, dim), dtype),
        }

    supports(hopper, arguments())
    for target, given, message in (
        (ampere, arguments(), "needs compute capability 9.0"),
        (Target("cpu", "cpu"), arguments(), "needs an NVIDIA GPU"),
        (hopper, arguments(dim=128), "takes head dim 256, not 128"),
        (hopper, arguments(page=16), "takes pages of 64, not 16"),
        (hopper, arguments(dtype=jnp.float32), "takes 16-bit activations, not float32"),
        (hopper, arguments(heads=3), "takes an even number of query heads a key/value head, not 3"),
    ):
        with pytest.raises(UnsupportedArguments, match=message):
            supports(target, given)


def test_refused_tunings():
    with pytest.raises(ValueError, match="schedule 'fast'"):
        mosaic_sm90.Tuning(schedule="fast")
    with pytest.raises(ValueError, match="cluster 2 with schedule 'overlap'"):
        mosaic_sm90.Tuning(cluster=2)


def interpret(kind: str) -> None:
    """What the child process does: a pack on few blocks, so that each has several tiles."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from tests.pallas_kernels import oracle
    from tests.pallas_kernels.conformance import host, worst_error

    ragged = {"lengths": (67, 0, 1, 8), "prefixes": (0, 0, 190, 60), "num_pads": 3}
    # Whole tiles only: the ragged way out names its memory in another way, which the detector takes for a race.
    whole = {"lengths": (64, 64), "prefixes": (128, 0)}
    tuning = mosaic_sm90.Tuning(blocks=1)
    heads = 2
    if kind == "cluster":
        tuning, heads = mosaic_sm90.Tuning(blocks=2, schedule="turns", cluster=2), 4
    model = ModelShape("small", num_heads=heads, num_kv_heads=1, num_k_heads=1, num_v_heads=1)
    spec = PagedPrefillAttentionSpec(name="", model=model, num_layers=2, **(whole if kind == "races" else ragged))
    case = host(spec.case(1, poison=True))
    want, *_ = oracle.paged_prefill_attention(**case.arguments, **case.options)
    parameters = plgpu.InterpretGPUParams(detect_races=kind == "races")
    function = functools.partial(
        mosaic_sm90.paged_prefill_attention, **case.options, tuning=tuning, interpret=parameters
    )
    got = np.asarray(jax.jit(function)(**{name: jnp.asarray(array) for name, array in case.arguments.items()}))
    assert worst_error(got, want) < 4 * 2.0**-9
    assert not got[sum(spec.lengths) :].any(), "pads are not zero"
    print("interpreted", kind)


@pytest.mark.parametrize("kind", ["ragged", "cluster", "races"])
@pytest.mark.host
def test_interpreted(kind):
    """Values, barriers and, on whole tiles, races. Three warpgroups a block wait for one another: they need threads."""
    program = f"from tests.pallas_kernels.test_mosaic_prefill_attention import interpret; interpret({kind!r})"
    environment = os.environ | {"PJRT_NPROC": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and f"interpreted {kind}" in done.stdout, done.stdout + done.stderr
    assert "RACE DETECTED" not in done.stdout + done.stderr, done.stdout + done.stderr
