"""The Mosaic kernels of gdn_prefill without a GPU: work lists, lowered for an H200, interpreted, races.

And with one (marker gpu): the same cases, real head counts, neighbours of NaN, pools past 2^31 elements.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels.gdn_prefill import mosaic_sm90, mosaic_solve, mosaic_work
from pallas_kernels.gdn_prefill.specs import GdnPrefillSpec
from pallas_kernels.registry import Target, UnsupportedArguments, get_op
from pallas_kernels.spec import REAL_MODELS, ModelShape, specs_of
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import ROUNDOFF, assert_same_bits, host, worst_error
from tests.pallas_kernels.test_mosaic_sm90 import abstract, lowered_for_h200
from tests.pallas_kernels.test_races import raced
from tests.pallas_kernels.test_triton_gdn_prefill import CASES as TRITON_CASES
from tests.pallas_kernels.test_triton_gdn_prefill import repeated_keys

NAME = "mosaic_sm90"
OUTPUT_BAR, STATE_BAR = 2 * ROUNDOFF["bfloat16"], 3e-4
SMALL = ModelShape("small", num_heads=2, num_kv_heads=1, num_k_heads=1, num_v_heads=2)
# A request that begins in the middle of eight rows and one that ends there, one of a token, one of whole windows.
PACK = GdnPrefillSpec(
    name="",
    model=SMALL,
    lengths=(2, 0, 150, 64, 1),
    has_state=(True, True, True, False, False),
    num_pads=4,
    num_layers=2,
)
BY_MODEL = {spec.model: spec for spec in specs_of("gdn_prefill").values()}


@functools.partial(jax.jit, static_argnums=3)
def work_lists(cu_seqlens, slot_ids, has_state, num_tokens):
    return mosaic_work.work_lists(cu_seqlens, slot_ids, has_state, num_tokens)


@pytest.mark.parametrize("seed", range(4))
def test_work_lists_cover_every_token_once(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 5, 8, 63, 64, 65, 130, 300], 6)
    if seed == 0:
        lengths[:] = 0  # pads alone
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    slots, has_state, num_tokens = np.arange(3, 9, dtype=np.int32), np.arange(6) % 2 == 0, 2048
    windows, requests = jax.tree.map(np.asarray, work_lists(offsets, slots, has_state, num_tokens))
    owner = np.full(num_tokens, -1)
    for number, (start, first, end) in enumerate(windows.T):
        assert start % 8 == 0 and 0 <= first <= end <= 64
        assert (owner[start + first : start + end] == -1).all(), "two windows own a token"
        owner[start + first : start + end] = number
    np.testing.assert_array_equal(owner >= 0, np.arange(num_tokens) < offsets[-1])

    spans = requests.end - requests.first
    assert (np.diff(spans[:-1]) <= 0).all(), "not the longest first"
    assert requests.slot[-1] == -1 and (requests.base + requests.end)[-1] == num_tokens
    assert (requests.base + requests.first)[-1] == offsets[-1]
    for base, first, end, tile, slot, flag in zip(*(field[:-1] for field in requests), strict=True):
        request = slot - 3
        assert flag == has_state[request] and base % 8 == 0 and 0 <= first < 8
        assert (base + first, base + end) == (offsets[request], offsets[request + 1])
        for chunk in range(-(-end // 64) if end > first else 0):
            tokens = np.arange(max(base + 64 * chunk, offsets[request]), min(base + 64 * chunk + 64, base + end))
            assert windows[0, tile + chunk] == base + 64 * chunk and (owner[tokens] == tile + chunk).all()


def test_work_lists_have_room_for_the_worst_pack():
    """Every request starts at the worst place and ends in a window of one token."""
    lengths = np.array([7] + [58 + 64] * 5)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    windows, _ = work_lists(offsets, np.arange(6, dtype=np.int32), np.ones(6, bool), int(offsets[-1]))
    assert np.sum(windows[2] - windows[1]) == offsets[-1]


@pytest.mark.parametrize(("model", "state_dtype"), [("0.8b", "float32"), ("4b", "bfloat16"), ("27b", "float32")])
@pytest.mark.host
def test_lowers_for_an_h200(model, state_dtype):
    spec = dataclasses.replace(specs_of("gdn_prefill")[f"{model}-ragged8192"], state_dtype=state_dtype)
    text = lowered_for_h200(spec)
    assert text.count("@mosaic_gpu") == 2
    assert text.count("output_operand_alias<") == 1, "the pool is not updated in place"


@pytest.mark.parametrize(("dtype", "name"), [(jnp.bfloat16, NAME), (jnp.float32, "triton")])
def test_auto_takes_it_for_bfloat16(dtype, name):
    arguments, options = abstract(PACK)
    arguments = {
        key: jax.ShapeDtypeStruct(array.shape, dtype) if array.dtype == jnp.bfloat16 else array
        for key, array in arguments.items()
    }
    found = get_op("gdn_prefill").select("auto", arguments | options, target=Target("gpu", "NVIDIA H200", "9.0"))
    assert found.name == name


def test_declines_what_it_cannot_run():
    arguments, options = abstract(PACK)
    supports = get_op("gdn_prefill").implementations[NAME].supports
    hopper = Target("gpu", "NVIDIA H200", "9.0")
    supports(hopper, arguments | options)
    for target, changes, message in (
        (hopper, {"state_pool": jax.ShapeDtypeStruct((1, 4, 2, 64, 128), jnp.float32)}, "takes heads of 128 x 128"),
        (hopper, {"qkv": jax.ShapeDtypeStruct((64, 512), jnp.float32)}, "takes bfloat16 activations, not float32"),
        (hopper, {"qkv": jax.ShapeDtypeStruct((65536 * 64, 512), jnp.bfloat16)}, "takes at most 65535 windows"),
        (Target("cpu", "cpu"), {}, "needs an NVIDIA GPU"),
        (Target("gpu", "NVIDIA A100", "8.0"), {}, "needs compute capability 9.0, the device has 8.0"),
        (Target("gpu", "NVIDIA B200", "10.0"), {}, "is for devices before 10.0, this one has 10.0"),
    ):
        with pytest.raises(UnsupportedArguments, match=message):
            supports(target, arguments | options | changes)


def assert_right(case, out, pool):
    out, pool = np.asarray(out), np.asarray(pool)
    want, want_pool, written = oracle.gdn_prefill(**case.arguments, **case.options)
    assert worst_error(out, want) < OUTPUT_BAR
    assert not out[want == 0].any(), "outputs of pads are not zero"
    bar = STATE_BAR if pool.dtype == np.float32 else 2 * ROUNDOFF["bfloat16"]
    assert worst_error(pool[written], want_pool[written]) < bar
    written[case.arguments["layer"], 0] = True  # unspecified
    assert_same_bits(pool[~written], case.arguments["state_pool"][~written], "a slot of nobody")


@functools.cache
def interpreted():
    """One compilation for all cases of a shape."""
    function = functools.partial(mosaic_sm90.gdn_prefill, num_k_heads=1, head_k_dim=128)
    return jax.jit(functools.partial(function, interpret=plgpu.InterpretGPUParams()))


def equal_keys(case):
    """As :func:`repeated_keys`, for the one key head of these models."""
    case = host(case)
    qkv, b, real = case.arguments["qkv"], case.arguments["b"], case.arguments["cu_seqlens"][-1]
    qkv[:real, 128:256] = qkv[0, 128:256]
    b[:real] = 3.5
    return case


CASES = {
    name: (changes, equal_keys if edit is repeated_keys else edit) for name, (changes, edit) in TRITON_CASES.items()
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.host
def test_interpreted_matches_the_oracle(name):
    changes, edit = CASES[name]
    case = edit(dataclasses.replace(PACK, **changes).case(1, poison=True))
    assert_right(case, *interpreted()(**{key: jnp.asarray(array) for key, array in case.arguments.items()}))


@pytest.mark.host
def test_interpreted_with_three_value_heads_and_a_16_bit_pool():
    """A last tile that ends behind the last row, and tokens that are no multiple of the copy engine's eight rows."""
    model = dataclasses.replace(SMALL, num_v_heads=3)
    spec = dataclasses.replace(PACK, model=model, lengths=(67,), has_state=(True,), num_pads=0, state_dtype="bfloat16")
    case = host(spec.case(2, poison=True))
    assert_right(case, *interpreted()(**{key: jnp.asarray(array) for key, array in case.arguments.items()}))


RACES = dataclasses.replace(
    PACK,
    name="races",
    model=dataclasses.replace(SMALL, num_v_heads=1),
    lengths=(5, 140),
    has_state=(False, True),
    num_pads=2,
    num_layers=1,
)


@pytest.mark.host
def test_warpgroups_of_the_first_kernel_take_several_items_each(monkeypatch):
    """Twelve live items for the three warpgroups of a block, then dead ones: inputs are brought an item ahead."""
    monkeypatch.setattr(mosaic_solve, "MOST_BLOCKS", 1)
    case = host(PACK.case(7, poison=True))
    function = functools.partial(mosaic_sm90.gdn_prefill, **case.options, interpret=plgpu.InterpretGPUParams())
    assert_right(case, *jax.jit(function)(**{key: jnp.asarray(array) for key, array in case.arguments.items()}))


@pytest.mark.host
def test_no_race(monkeypatch):
    """Three chunks: every piece of shared memory is filled again, in the first kernel by a warpgroup's next item."""
    monkeypatch.setattr(mosaic_solve, "MOST_BLOCKS", 1)
    found, printed = raced(RACES, NAME)
    assert not found and not printed, printed[:2000]


@pytest.mark.parametrize("step", ["barrier_wait", "wait_smem_to_gmem", "commit_smem"])
@pytest.mark.parametrize("module", [mosaic_solve, mosaic_sm90], ids=["solve", "scan"])
@pytest.mark.host
def test_a_missing_step_is_seen(module, step, monkeypatch):
    """Each synchronisation with the copy engine, left out of one of the kernels; for the first a window will do."""
    monkeypatch.setattr(module, "plgpu", _Without(plgpu, step))
    short = dataclasses.replace(RACES, lengths=(5,), has_state=(False,))
    _, printed = raced(short if module is mosaic_solve else RACES, NAME)  # the verdict is the last kernel's alone
    assert "RACE DETECTED" in printed or "Not all copy_smem_to_gmem read-side operations completed" in printed


@pytest.mark.parametrize(
    ("step", "call"),
    [
        pytest.param("wait_smem_to_gmem", 1, id="T written over P"),
        pytest.param("commit_smem", 2, id="inputs brought over those in use"),
    ],
)
@pytest.mark.host
def test_a_missing_step_between_items_is_seen(step, call, monkeypatch):
    """Those by which a warpgroup of the first kernel uses its memory again.

    Not among them is the wait until the results of the item before have left: that one the interpreter does not miss.
    """
    monkeypatch.setattr(mosaic_solve, "MOST_BLOCKS", 1)
    monkeypatch.setattr(mosaic_solve, "plgpu", _Without(plgpu, step, call))
    _, printed = raced(RACES, NAME)
    assert "RACE DETECTED" in printed


class _Without:
    """A module with one function that does nothing (in one of its calls): the kernels of other modules keep theirs."""

    def __init__(self, module, name, call=None):
        self._module, self._name, self._call, self._calls = module, name, call, 0

    def __getattr__(self, name):
        function = getattr(self._module, name)
        return functools.partial(self._maybe, function) if name == self._name else function

    def _maybe(self, function, *args, **options):
        self._calls += 1
        if self._call not in (None, self._calls - 1):
            function(*args, **options)


def run(case):
    """The implementation by name, on the default device."""
    return pallas_kernels.gdn_prefill(**case.arguments, **case.options, implementation=NAME)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(name):
    changes, edit = CASES[name]
    case = edit(dataclasses.replace(PACK, **changes).case(1, poison=True))
    assert_right(case, *run(case))


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["0.8b", "4b", "27b"])
def test_ragged_packs_on_real_heads(model, state_dtype):
    """Lengths around a tile, pads behind, states and none."""
    lengths = (1, 63, 64, 65, 0, 2, 300, 128)
    spec = GdnPrefillSpec(
        name="", model=REAL_MODELS[model], lengths=lengths, num_pads=77, num_layers=2, state_dtype=state_dtype
    )
    case = host(spec.case(3, poison=True))
    assert_right(case, *run(case))


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["mixed", "none"])
def test_long_context(decay):
    """The state's error does not grow with the number of chunks."""
    case = host(dataclasses.replace(PACK, lengths=(2048,), has_state=(True,), decay=decay).case(4, poison=True))
    assert_right(case, *run(case))


@pytest.mark.gpu
@pytest.mark.parametrize("victim", [0, 2, 3])
def test_nan_tokens_touch_no_neighbour(victim):
    """Their rows lie in the windows of the requests before and behind."""
    case = host(PACK.case(5, poison=True))
    clean_out, clean_pool = map(np.asarray, run(case))
    offsets = case.arguments["cu_seqlens"]
    rows = np.zeros(len(clean_out), bool)
    rows[offsets[victim] : offsets[victim + 1]] = True
    for name in ("qkv", "b", "a"):
        case.arguments[name][rows] = np.nan
    out, pool = map(np.asarray, run(case))
    slot = case.arguments["slot_ids"][victim]
    assert np.isnan(out[rows].astype(np.float32)).all() and np.isnan(pool[-1, slot]).all()
    assert_same_bits(out[~rows], clean_out[~rows], "a neighbour's output")
    others = np.setdiff1d(np.arange(1, pool.shape[1]), [slot])
    assert_same_bits(pool[:, others], clean_pool[:, others], "a neighbour's state")


@pytest.mark.gpu
def test_same_bits_every_time():
    """A difference between runs on the same numbers would be a race."""
    spec = dataclasses.replace(PACK, model=REAL_MODELS["4b"], lengths=(700, 3, 300), has_state=None)
    case = host(spec.case(6, poison=True))
    first = [np.asarray(result) for result in run(case)]
    for _ in range(5):
        for one, again in zip(first, run(case), strict=True):
            assert_same_bits(np.asarray(again), one, "a result")
