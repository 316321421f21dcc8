"""The Triton kernels without a GPU: lowered for an H200 that is not here, interpreted, declined where they cannot run.

And with one (marker gpu): pools past 2^31 elements.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.kv_write.specs import KvWriteSpec
from pallas_kernels.paged_decode_attention.specs import PagedDecodeAttentionSpec
from pallas_kernels.paged_decode_attention.triton import _LONGEST, _share_of, num_shares
from pallas_kernels.paged_prefill_attention.specs import PagedPrefillAttentionSpec
from pallas_kernels.registry import Target, UnsupportedArguments, get_op
from pallas_kernels.spec import REAL_MODELS, ModelShape, Spec, specs_of
from tests.pallas_kernels import oracle
from tests.pallas_kernels.conformance import ROUNDOFF, assert_same_bits, host, worst_error

NAME = "triton"
OPS = ("kv_write", "paged_decode_attention", "paged_prefill_attention")
H200 = Target("gpu", "NVIDIA H200", "9.0")
ABSTRACT_H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
ON_H200 = jax.sharding.AbstractMesh((), (), abstract_device=ABSTRACT_H200)
SMALL = ModelShape("small", num_heads=2, num_kv_heads=1, num_k_heads=1, num_v_heads=1)


def abstract(spec: Spec):
    """Arguments as shapes, and the options."""
    options = {}

    def make():
        case = spec.case()
        options.update(case.options)
        return {name: jnp.asarray(array) for name, array in case.arguments.items()}

    return jax.eval_shape(make), options


def distinct(op: str) -> list[Spec]:
    """One spec of each kernel that all specs need: other sizes only change a grid and strides."""
    kernels = {}
    for spec in specs_of(op).values():
        group, several = spec.model.num_heads // spec.model.num_kv_heads, None
        if op == "paged_decode_attention":
            several = num_shares(len(spec.kv_lens), spec.model.num_kv_heads, max(spec.kv_lens) // 64) > 1
        kernels.setdefault((group, several), spec)
    return list(kernels.values())


def lowered_for_h200(spec: Spec, implementation: str = NAME) -> str:
    arguments, options = abstract(spec)

    def program(arguments):
        return getattr(pallas_kernels, spec.op)(**arguments, **options, implementation=implementation)

    with jax.sharding.use_abstract_mesh(ON_H200):
        return jax.jit(program).trace(arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "spec", [spec for op in OPS for spec in distinct(op)], ids=lambda spec: f"{spec.op}-{spec.name}"
)
@pytest.mark.host
def test_lowers_for_an_h200(spec):
    text = lowered_for_h200(spec)
    assert "__gpu$xla.gpu.triton" in text
    assert ("output_operand_alias<" in text) == bool(spec.pools), "a pool is not updated in place"


def test_what_auto_chooses_on_an_h200():
    for op in OPS:
        arguments, options = abstract(distinct(op)[0])
        chosen = get_op(op).select("auto", arguments | options, target=H200).name
        assert chosen == ("mosaic_sm90" if op in ("paged_prefill_attention", "kv_write") else NAME)  # of many tokens


@pytest.mark.parametrize("op", OPS)
@pytest.mark.host
def test_lowers_in_float32(op):
    spec = dataclasses.replace(distinct(op)[0], dtype="float32")
    assert "__gpu$xla.gpu.triton" in lowered_for_h200(spec)


def test_every_model_is_taken_on_an_h200():
    for op in OPS:
        for spec in {spec.model: spec for spec in specs_of(op).values()}.values():
            arguments, options = abstract(spec)
            get_op(op).implementations[NAME].supports(H200, arguments | options)


INTERPRETED = (
    (KvWriteSpec(name="", model=SMALL, lengths=(2, 0, 5, 1), starts=(62, 0, 0, 300), num_pads=2, num_layers=2), {}),
    (PagedDecodeAttentionSpec(name="", model=SMALL, kv_lens=(1, 0, 130), num_layers=2), {"shares": 1}),
    (PagedDecodeAttentionSpec(name="", model=SMALL, kv_lens=(1, 0, 300), width=6, num_layers=2), {"shares": 3}),
    (  # one long row in company that needs no shares; more of them than a tile of the second kernel
        PagedDecodeAttentionSpec(name="", model=SMALL, kv_lens=(65, 0, 2400, 1, 129), width=40),
        {"shares": 1, "longest": 2},
    ),
    (
        PagedDecodeAttentionSpec(name="", model=SMALL, kv_lens=(0, 640, 65), width=12),
        {"shares": 2, "longest": 3},
    ),
    (  # on both sides of the longest share
        PagedDecodeAttentionSpec(name="", model=SMALL, kv_lens=(8191, 8192, 8193, 0, 1), width=130),
        {"shares": 1},
    ),
    (
        PagedPrefillAttentionSpec(
            name="", model=SMALL, lengths=(5, 0, 37), prefixes=(70, 0, 0), num_pads=3, num_layers=2
        ),
        {},
    ),
)


@pytest.mark.parametrize(("spec", "extra"), INTERPRETED, ids=lambda item: getattr(item, "op", str(item)))
@pytest.mark.host
def test_interpreted_matches_the_oracle(spec, extra):
    case = host(dataclasses.replace(spec, dtype="float32").case(1, poison=True))
    function = getattr(importlib.import_module(f"pallas_kernels.{spec.op}.{NAME}"), spec.op)
    interpreted = jax.jit(functools.partial(function, **case.options, **extra, interpret=True))
    got = interpreted(**{name: jnp.asarray(array) for name, array in case.arguments.items()})
    want = getattr(oracle, spec.op)(**case.arguments, **case.options)
    if not spec.pools:
        assert worst_error(got, want[0]) < 1e-5
        assert not np.asarray(got)[want[0] == 0].any()
        return
    q_out, pool = got
    assert worst_error(q_out, want[0]) < 2e-6
    pool, old, expected = (np.moveaxis(np.asarray(array), 4, 2) for array in (pool, case.arguments["kv_pool"], want[1]))
    assert worst_error(pool[want[2]], expected[want[2]]) < 2e-6
    assert_same_bits(pool[~want[2]], old[~want[2]], "a place that no token owns")


def test_shares_fill_the_gpu_and_stay_within_the_table():
    assert num_shares(1, 4, 2048) == 132  # 128k tokens of one row: every SM has work
    assert num_shares(1, 4, 3) == 2  # no share below two pages
    assert num_shares(64, 4, 512) == 3
    assert num_shares(256, 4, 512) == 1
    assert num_shares(64, 4, 512, programs=1056) == 5


def test_a_long_row_is_spread_whatever_its_company():
    """256 rows, of which one has 128k tokens, another 1k and the others none: 16 programs a head instead of one."""
    split = num_shares(256, 4, 2048)
    assert split == 1
    kv_lens, shares = np.array([131072, 1024, 65, 1, 0]), np.arange(2048 // _LONGEST)
    how = {"page_size": 64, "split": split, "longest": _LONGEST}
    begin, end, number = (np.asarray(x) for x in _share_of(kv_lens[:, None], shares, **how))
    assert number.ravel().tolist() == [16, 1, 1, 1, 0], "a short row is still the work of one"
    pages = np.maximum(end - begin, 0)
    assert pages.sum(axis=1).tolist() == [2048, 16, 2, 1, 0] and pages.max() == 128
    assert (begin[:, 1:] == end[:, :-1]).all()
    # Where the batch alone gives shares, the limit changes nothing that is within it.
    begin, end, number = _share_of(np.array([32768]), np.arange(8), 64, split=8, longest=128)
    assert number.tolist() == [8] and (end - begin).tolist() == [64] * 8


@pytest.mark.parametrize("width", [1, 2, 3, 16, 127, 128, 129, 256, 257, 512, 4096])
@pytest.mark.parametrize(("rows", "num_kv_heads"), [(1, 2), (1, 4), (5, 4), (33, 2), (64, 4), (65, 4), (256, 4)])
def test_shares_cover_a_row_once_and_there_are_enough_of_them(width, rows, num_kv_heads):
    most, split = 64 * width, num_shares(rows, num_kv_heads, width)
    shares = max(split, -(-width // _LONGEST))
    around = [64 * pages + more for pages in (0, 1, 2, 3, 127, 128, 129, 255, 256, 257) for more in (-1, 0, 1)]
    kv_lens = np.array(sorted({min(max(length, 0), most) for length in [*around, most - 1, most]}))
    how = {"page_size": 64, "split": split, "longest": _LONGEST}
    begin, end, number = (np.asarray(x) for x in _share_of(kv_lens[:, None], np.arange(shares), **how))
    pages = end - begin
    np.testing.assert_array_equal(pages.sum(axis=1), -(-kv_lens // 64))
    np.testing.assert_array_equal(pages > 0, np.arange(shares) < number, "those with pages come first")
    assert (begin[:, 1:] == end[:, :-1]).all() and not begin[:, 0].any() and pages.max() <= _LONGEST


def test_absent_rows_beside_a_long_one_lower_for_an_h200():
    arguments, options = abstract(PagedDecodeAttentionSpec(name="", model=REAL_MODELS["4b"], kv_lens=(3,)))
    rows = {name: jax.ShapeDtypeStruct((256, *arguments[name].shape[1:]), jnp.bfloat16) for name in ("q", "gates")}
    rows |= {
        "page_table": jax.ShapeDtypeStruct((256, 2048), jnp.int32),
        "kv_lens": jax.ShapeDtypeStruct((256,), "int32"),
    }

    def program(arguments):
        return pallas_kernels.paged_decode_attention(**arguments, **options, implementation=NAME)

    with jax.sharding.use_abstract_mesh(ON_H200):
        text = jax.jit(program).trace(arguments | rows).lower(lowering_platforms=("cuda",)).as_text()
    assert "grid_x = 256" in text and "grid_y = 4" in text and "grid_z = 16" in text, text[:3000]


def test_declines_what_it_cannot_run():
    arguments, options = abstract(PagedDecodeAttentionSpec(name="", model=SMALL, kv_lens=(3,)))
    decode, prefill, write = (
        get_op(op).implementations[NAME].supports
        for op in ("paged_decode_attention", "paged_prefill_attention", "kv_write")
    )
    for supports in (decode, prefill):
        supports(H200, arguments)
        with pytest.raises(UnsupportedArguments, match="takes head dim 256, not 128"):
            narrow = jax.ShapeDtypeStruct((1, 2, 128), jnp.bfloat16)
            supports(H200, arguments | {"q": narrow})
        with pytest.raises(UnsupportedArguments, match="takes pages of 64, not 32"):
            supports(H200, arguments | {"kv_pool": jax.ShapeDtypeStruct((1, 4, 2, 1, 32, 256), jnp.bfloat16)})
        with pytest.raises(UnsupportedArguments, match="needs an NVIDIA GPU"):
            supports(Target("cpu", "cpu"), arguments)
        least, old = ("8.0", "7.5") if supports is decode else ("9.0", "8.0")
        with pytest.raises(UnsupportedArguments, match=f"needs compute capability {least}, the device has {old}"):
            supports(Target("gpu", "NVIDIA", old), arguments)
        with pytest.raises(UnsupportedArguments, match="is for devices before 10.0, this one has 12.0"):
            supports(Target("gpu", "NVIDIA GeForce RTX 5090", "12.0"), arguments)
    with pytest.raises(UnsupportedArguments, match="takes up to 16 query heads a key head, not 32 over 1"):
        decode(H200, arguments | {"q": jax.ShapeDtypeStruct((1, 32, 256), jnp.bfloat16)})
    arguments, options = abstract(KvWriteSpec(name="", model=SMALL, lengths=(3,)))
    write(H200, arguments | options)
    with pytest.raises(UnsupportedArguments, match="must be a power of two, got 48 / 2"):
        write(H200, arguments | options | {"rotary_dim": 48})


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_pools_past_two_gigaelements(op):
    """The last pages of a pool whose offsets do not fit 32 bits; its neighbours stay as they are."""
    model, used = REAL_MODELS["4b"], 12
    spec = {
        "kv_write": KvWriteSpec(name="", model=model, lengths=(3, 70), num_pages=used),
        "paged_decode_attention": PagedDecodeAttentionSpec(name="", model=model, kv_lens=(3, 270), num_pages=used),
        "paged_prefill_attention": PagedPrefillAttentionSpec(
            name="", model=model, lengths=(3, 70), prefixes=(0, 200), num_pages=used
        ),
    }[op]
    case = host(spec.case(1))
    small = case.arguments
    want = getattr(oracle, op)(**small, **case.options)
    pages = 2**31 // (2 * model.num_kv_heads * 64 * model.head_dim) + used
    pool = jnp.zeros((1, pages, *small["kv_pool"].shape[2:]), jnp.bfloat16).at[:, -used:].set(small["kv_pool"])
    index = "page_ids" if op == "kv_write" else "page_table"
    rest = {name: array for name, array in small.items() if name != "kv_pool"}
    rest[index] = np.where(rest[index] > 0, pages - used + rest[index], 0).astype(np.int32)
    function = jax.jit(
        lambda pool, rest: getattr(pallas_kernels, op)(kv_pool=pool, **rest, **case.options, implementation=NAME),
        donate_argnums=0,
    )
    got = function(pool, rest)
    if op == "kv_write":
        q_out, pool = got
        assert worst_error(pool[:, -used:], want[1]) < 2 * ROUNDOFF["bfloat16"]
        assert not pool[:, :-used].any()
        got = q_out
    assert worst_error(got, want[0]) < 4 * ROUNDOFF["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["0.8b", "4b", "27b"])
@pytest.mark.parametrize("rows", [1, 2, 5, 33, 200])
def test_real_heads_at_odd_batches(model, rows):
    """Decode in bfloat16, with one and with many shares of a row, from a single token to thousands."""
    lengths = np.random.default_rng(rows).integers(0, 2500 if rows < 9 else 200, rows)
    lengths[0] = 3000
    spec = PagedDecodeAttentionSpec(name="", model=REAL_MODELS[model], kv_lens=tuple(int(n) for n in lengths))
    case = host(spec.case(rows, poison=True))
    want = oracle.paged_decode_attention(**case.arguments, **case.options)[0]
    got = pallas_kernels.paged_decode_attention(**case.arguments, **case.options, implementation=NAME)
    assert worst_error(got, want) < 2 * ROUNDOFF["bfloat16"]
    assert not np.asarray(got)[lengths == 0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["0.8b", "27b"])
def test_ragged_prefill_on_real_heads(model):
    """Prefill in bfloat16: lengths around a tile and around a page, on prefixes and without."""
    spec = PagedPrefillAttentionSpec(
        name="",
        model=REAL_MODELS[model],
        lengths=(1, 127, 128, 129, 0, 300, 65, 2),
        prefixes=(1000, 0, 64, 63, 0, 129, 0, 511),
        num_pads=77,
    )
    case = host(spec.case(3, poison=True))
    want = oracle.paged_prefill_attention(**case.arguments, **case.options)[0]
    got = pallas_kernels.paged_prefill_attention(**case.arguments, **case.options, implementation=NAME)
    assert worst_error(got, want) < 4 * ROUNDOFF["bfloat16"]
    assert not np.asarray(got)[want == 0].any()
