import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers import Axes, Bucket, BucketLadder, BucketOverflow


def ladder(**changes):
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 8192}
    return BucketLadder.from_limits(**(limits | changes))


def test_normal_rungs():
    made = ladder()
    assert made.prefill_axes.tokens == (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    assert made.prefill_axes.requests == (4, 8, 16, 32, 64, 128, 256, 256)
    assert made.decode_axes.rows == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert made.prefill_axes.widths == made.decode_axes.widths == (4, 16, 64, 128)
    assert made.unified == ()


def test_coarse_rungs():
    made = ladder(preset="coarse")
    assert made.prefill_axes.tokens == (64, 256, 1024, 4096, 8192)
    assert made.decode_axes.rows == (1, 4, 16, 64, 256)
    assert made.decode_axes.widths == (16, 128)


def test_gpu_rungs_are_fine_where_padding_costs():
    made = ladder(preset="gpu", max_model_len=262144, unified=True)
    assert made.prefill_axes.tokens == (128, 512, 1024, 2048, 4096, 8192)
    assert made.prefill_axes.widths == (4096,)
    assert made.decode_axes.rows == (1, 16, 64, 128, 256)
    assert made.decode_axes.widths == (64, 512, 4096)
    assert made.unified_axes.tokens == (1024, 8192) and made.unified_axes.rows == (64, 256)
    assert made.unified_axes.widths == (4096,)
    assert len(made.prefill) == 6 and len(made.decode) == 15 and len(made.unified) == 4


def test_gpu_rungs_of_small_limits():
    made = ladder(preset="gpu", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1000, unified=True)
    assert made.prefill == (Bucket(64, 4, 0, 16),)
    assert made.decode == (Bucket(0, 0, 1, 16), Bucket(0, 0, 8, 16))
    assert made.unified == (Bucket(64, 4, 8, 16),)


def test_unified_is_a_coarse_product():
    made = ladder(unified=True)
    assert made.unified_axes.tokens == (64, 256, 1024, 4096, 8192)
    assert made.unified_axes.rows == (1, 4, 16, 64, 256)
    assert made.unified_axes.widths == (16, 128)
    assert len(made.unified) == 50
    assert len(made.prefill) == 32 and len(made.decode) == 36


@pytest.mark.parametrize("limits", [(8, 512, 1024), (256, 8192, 262144), (1, 64, 64), (3, 64, 65)])
def test_small_has_at_most_two_rungs_an_axis(limits):
    seqs, tokens, length = limits
    made = BucketLadder.from_limits(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length, unified=True, preset="small"
    )
    for axes in (made.prefill_axes, made.decode_axes, made.unified_axes):
        assert max(len(axes.tokens), len(axes.rows), len(axes.widths)) <= 2
    assert len(made.prefill) <= 4 and len(made.decode) <= 4 and len(made.unified) <= 8


@pytest.mark.parametrize("preset", ["normal", "coarse", "small", "gpu"])
def test_caps_are_rungs_even_off_the_powers_of_two(preset):
    made = BucketLadder.from_limits(
        max_num_seqs=37, max_num_batched_tokens=832, max_model_len=5000, unified=True, preset=preset
    )
    assert (made.max_rows, made.max_tokens, made.max_width) == (37, 832, 79)
    assert made.max_requests == 37  # 832 / 16 = 52 is capped by the sequences


def test_own_rungs_replace_the_presets_and_get_their_cap():
    made = ladder(token_rungs=(512,), row_rungs=(), width_rungs=(128,), unified=True)
    assert made.prefill_axes.tokens == (512, 8192)
    assert made.decode_axes.rows == (256,)
    assert made.decode_axes.widths == (128,)
    assert made.unified_axes.tokens == (512, 8192)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"preset": "huge"}, "preset 'huge' is unknown"),
        ({"row_rungs": (512,)}, "row_rungs must lie between 1 and the cap 256"),
        ({"token_rungs": (0,)}, "token_rungs must lie between 1"),
    ],
)
def test_bad_limits_are_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        ladder(**changes)


def test_bad_axes_are_refused():
    with pytest.raises(ValueError, match="tokens must be positive and ascending"):
        Axes((128, 64), (1, 1), (), (4,))
    with pytest.raises(ValueError, match="non-decreasing"):
        Axes((64, 128), (2, 1), (), (4,))
    with pytest.raises(ValueError, match="widths are empty"):
        Axes((64,), (1,), (), ())


def test_pick_is_the_smallest_that_fits():
    made = ladder(unified=True)
    assert made.pick("prefill", tokens=65, requests=1, width=5) == Bucket(128, 8, 0, 16)
    assert made.pick("decode", rows=5, width=1) == Bucket(0, 0, 8, 4)
    assert made.pick("unified", tokens=65, requests=3, rows=5, width=5) == Bucket(256, 16, 16, 16)


def test_pick_climbs_the_tokens_for_the_requests():
    assert ladder().pick("prefill", tokens=9, requests=9, width=1) == Bucket(256, 16, 0, 4)


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("prefill", {"tokens": 8193, "requests": 1}, "8193 tokens exceed the largest bucket, which has 8192"),
        ("prefill", {"tokens": 300, "requests": 257}, "257 requests exceed the largest bucket, which has 256"),
        ("decode", {"rows": 257}, "257 rows exceed the largest bucket, which has 256"),
        ("decode", {"rows": 1, "width": 129}, "129 width exceed the largest bucket, which has 128"),
        ("decode", {"rows": 1, "tokens": 1}, "1 tokens exceed the largest bucket, which has 0"),
        ("decode", {"rows": -1}, "-1 rows is negative"),
    ],
)
def test_pick_refuses_what_no_bucket_holds(kind, sizes, words):
    with pytest.raises(BucketOverflow, match=words):
        ladder().pick(kind, **sizes)


def test_pick_refuses_a_kind_that_is_not_there():
    with pytest.raises(ValueError, match="no 'unified' programs"):
        ladder().pick("unified", tokens=1, requests=1, rows=1)


@settings(max_examples=60, deadline=None)
@given(
    seqs=st.integers(1, 80),
    cells=st.integers(1, 40),
    length=st.integers(64, 9000),
    preset=st.sampled_from(["normal", "coarse", "small", "gpu"]),
    share=st.tuples(*(st.floats(0, 1) for _ in range(4))),
)
def test_pick_agrees_with_a_search_through_all_buckets(seqs, cells, length, preset, share):
    made = BucketLadder.from_limits(
        max_num_seqs=seqs, max_num_batched_tokens=64 * cells, max_model_len=length, unified=True, preset=preset
    )

    def part(index, cap):
        return 1 + int(share[index] * (cap - 1))

    requests = part(0, made.max_requests)
    sizes = {
        "tokens": max(requests, part(1, 64 * cells)),
        "requests": requests,
        "rows": part(2, seqs),
        "width": part(3, made.max_width),
    }
    kinds = {"prefill": ("tokens", "requests", "width"), "decode": ("rows", "width"), "unified": tuple(sizes)}
    for kind, axes in kinds.items():
        asked = {axis: sizes[axis] for axis in axes}
        fits = [b for b in getattr(made, kind) if all(getattr(b, axis) >= asked[axis] for axis in axes)]
        picked = made.pick(kind, **asked)
        assert picked in fits
        assert all(a <= b for other in fits for a, b in zip(picked, other, strict=True))


def test_describe_prints_the_worst_padding():
    text = ladder(unified=True).describe()
    assert text.startswith("bucket ladder: 118 shapes (32 prefill, 36 decode, 50 unified)")
    lines = [line.split() for line in text.splitlines()]
    assert ["prefill", "tokens", "64", "1", "98.4%"] in lines
    assert ["decode", "rows", "256", "129", "49.6%"] in lines
    assert ["unified", "width", "128", "17", "86.7%"] in lines


def test_every_bucket_is_there_once():
    made = ladder(unified=True)
    buckets = list(itertools.chain(made.prefill, made.decode, made.unified))
    assert len(set(buckets)) == len(buckets) == 118
