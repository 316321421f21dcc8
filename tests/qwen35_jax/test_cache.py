"""The memory plan: everything is counted, and what does not fit is clamped or refused with the numbers."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_decode_attention import triton
from qwen35_jax.cache import (
    _LOGITS_COPIES,
    PAGE_SIZE,
    MemoryPlanError,
    cache_shapes,
    page_bytes,
    plan_memory,
    round_down,
    sampler_row_bytes,
    slot_bytes,
    tree_bytes,
)
from qwen35_jax.config import ModelConfig

GIB = 2**30
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
MODEL = ModelConfig.preset("4b")


def plan(limit_gib: float, **changes):
    arguments = {
        "limit": int(limit_gib * GIB),
        "dtype": BF16,
        "state_dtype": F32,
        "weights": 8 * GIB,
        "max_num_seqs": 256,
        "max_model_len": 262144,
        "max_model_len_is_default": True,
        "max_num_batched_tokens": 8192,
        "sampled_rows": 256,
    }
    return plan_memory(MODEL, **arguments | changes)


def test_the_plan_counts_what_is_allocated():
    found = plan(100)
    pools = cache_shapes(MODEL, found.num_pages, found.num_seqs + 1, BF16, F32)
    assert found.pools == tree_bytes(pools)
    assert found.total <= found.limit
    assert found.total + page_bytes(MODEL, BF16) + found.pools // 64 > found.limit, "memory is left unused"
    assert (found.num_seqs, found.max_model_len, found.warnings) == (256, 262144, ())


def test_state_and_pages_cost_what_the_family_says():
    assert page_bytes(MODEL, BF16) == 64 * 32 * 2**10
    assert 48 * 2**20 < slot_bytes(MODEL, BF16, F32) < 50 * 2**20
    assert slot_bytes(MODEL, BF16, BF16) < 0.52 * slot_bytes(MODEL, BF16, F32)


@pytest.mark.parametrize("limit_gib", (11.5, 12, 14, 16, 24, 40, 141))
@pytest.mark.parametrize("num_kv_pages", (None, 300))
def test_a_plan_never_exceeds_its_limit_and_one_sequence_of_full_length_fits(limit_gib, num_kv_pages):
    found = plan(limit_gib, num_kv_pages=num_kv_pages, max_num_seqs=64, sampled_rows=64)
    assert found.total <= found.limit
    assert found.num_seqs >= 1
    assert found.max_model_len <= (found.num_pages - 1) * 64
    assert found.num_pages - 1 == (num_kv_pages or found.num_pages - 1)


def test_more_sequences_than_slots_fit_are_clamped_with_a_warning():
    found = plan(30, max_model_len=4096, max_model_len_is_default=False)
    assert 1 < found.num_seqs < 256
    assert any(f"max_num_seqs clamped from 256 to {found.num_seqs}" in warning for warning in found.warnings)


def test_a_default_length_gives_way_to_sequences_and_an_asked_one_does_not():
    found = plan(14)
    assert 64 * 64 < found.max_model_len < 262144 and found.num_seqs > 10
    assert any("max_model_len lowered from 262144" in warning for warning in found.warnings)
    asked = plan(20, max_model_len_is_default=False)
    assert asked.max_model_len == 262144 and asked.num_seqs >= 1
    with pytest.raises(MemoryPlanError, match="max_model_len=262144 tokens does not fit"):
        plan(14, max_model_len_is_default=False)
    with pytest.raises(MemoryPlanError, match="does not fit"):
        plan(9)


def test_pages_asked_for_bound_a_default_length_and_refuse_a_longer_asked_one():
    found = plan(100, num_kv_pages=1000)
    assert (found.num_pages, found.max_model_len) == (1001, 64000)
    assert any("max_model_len lowered from 262144 to 64000" in warning for warning in found.warnings)
    with pytest.raises(MemoryPlanError, match="num_kv_pages=1000 holds 64000 tokens, fewer than max_model_len=64001"):
        plan(100, num_kv_pages=1000, max_model_len=64001, max_model_len_is_default=False)
    with pytest.raises(MemoryPlanError, match=r"num_kv_pages=100000 needs .* are left"):
        plan(100, num_kv_pages=100000)


def test_the_head_of_every_row_is_counted():
    few, many = plan(100, sampled_rows=256), plan(100, max_num_seqs=1024, sampled_rows=1024)
    assert many.workspace - few.workspace > 768 * MODEL.vocab_size * 4


@pytest.mark.parametrize("rows", (1, 16, 64, 65, 256, 1024))
@pytest.mark.parametrize("name", ("0.8b", "2b", "4b", "9b", "27b"))
def test_partial_sums_of_decode_attention_fit_where_the_logits_go(name, rows):
    config = ModelConfig.preset(name)
    attention, width = config.attention, config.max_position_embeddings // PAGE_SIZE
    arguments = {
        "q": ((rows, attention.num_heads, attention.head_dim), BF16),
        "gates": ((rows, attention.num_heads, attention.head_dim), BF16),
        "kv_pool": ((1, 2, 2, attention.num_kv_heads, PAGE_SIZE, attention.head_dim), BF16),
        "layer": ((), jnp.int32),
        "page_table": ((rows, width), jnp.int32),
        "kv_lens": ((rows,), jnp.int32),
    }
    shapes = {key: jax.ShapeDtypeStruct(*of) for key, of in arguments.items()}
    traced = jax.make_jaxpr(functools.partial(triton.paged_decode_attention, first_gate=0))(**shapes)
    (first, _) = (one for one in traced.eqns if one.primitive.name == "pallas_call")
    partial_sums = tree_bytes([one.aval for one in first.outvars])
    assert partial_sums > rows * attention.num_heads * attention.head_dim * 4
    assert partial_sums < rows * config.vocab_size * 4 * _LOGITS_COPIES["gpu"]


def test_rounding_takes_less_than_a_hundredth_and_never_adds():
    assert [round_down(n) for n in (-5, 0, 1, 200, 255, 256, 257, 511, 512, 1023)] == [
        *(0, 0, 1, 200, 255),
        *(256, 256, 510, 512, 1020),
    ]
    for n in (3 * GIB + 12345, 141 * 10**9 + 7, 2**62 - 1):
        assert n - n // 128 <= round_down(n) <= n
        assert round_down(round_down(n)) == round_down(n)


@pytest.mark.parametrize("limit_gib", (13.5, 16, 24, 40, 140))
@pytest.mark.parametrize("num_kv_pages", (None, 300))
def test_sizes_do_not_follow_every_byte_of_free_memory(limit_gib, num_kv_pages):
    """They decide which compiled programs of an earlier start are of use: a step is about a hundredth of the pools."""

    def sizes(limit: float) -> tuple[int, int, int]:
        found = plan(limit, num_kv_pages=num_kv_pages)
        assert found.total <= found.limit
        return found.num_pages, found.num_seqs, found.max_model_len

    span = limit_gib / 20
    near = [sizes(limit_gib + span * i / 400) for i in range(400)]  # five per cent more, in steps of megabytes
    assert len(set(near)) <= 60


def test_what_is_asked_for_and_fits_is_given_in_full():
    """Rounding takes from what follows free memory, never from sizes that a user has named."""
    page, slot = page_bytes(MODEL, BF16), slot_bytes(MODEL, BF16, F32) + sampler_row_bytes(MODEL)
    small = plan(30, max_num_seqs=8, sampled_rows=8, max_model_len=64, max_model_len_is_default=False)
    left = small.limit - small.weights - small.workspace - page - slot
    pages = (left - 8 * slot) // page  # to the last page; rounded, one sequence would be left
    found = plan(
        30, max_num_seqs=8, sampled_rows=8, max_model_len=64, max_model_len_is_default=False, num_kv_pages=pages
    )
    assert (found.num_seqs, found.num_pages, found.warnings) == (8, pages + 1, ())
    assert found.total <= found.limit < found.total + page

    length = (left - 8 * slot - 7 * 16 * page) // page * 64
    found = plan(30, max_num_seqs=8, sampled_rows=8, max_model_len=length, max_model_len_is_default=False)
    assert (found.num_seqs, found.max_model_len, found.warnings) == (8, length, ())
    assert found.total <= found.limit
    assert found.num_pages - 1 >= length // 64
