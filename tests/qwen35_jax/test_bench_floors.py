"""Floors: the 4B table, what is counted, and how each term moves them."""

import pytest

from pallas_kernels.spec import specs_of
from qwen35_jax.bench import floors
from qwen35_jax.bench.floors import (
    Ceilings,
    decode_part_floors_s,
    decode_step_floor_s,
    offline_floor,
    prefill_floor_s,
    prefill_part_floors_s,
)
from qwen35_jax.cache import page_bytes
from qwen35_jax.config import ModelConfig
from qwen35_jax.params import ParamPack

FOUR = ModelConfig.preset("4b")


@pytest.mark.parametrize(
    ("rows", "milliseconds"), [(1, 2.0), (8, 2.2), (16, 2.5), (64, 4.0), (128, 6.1), (256, 11.0), (512, 21.9)]
)
def test_decode_steps_of_4b_at_1088_tokens(rows, milliseconds):
    assert round(decode_step_floor_s(FOUR, rows, 1088) * 1e3, 1) == milliseconds


def test_prefill_of_4b():
    seconds = prefill_floor_s(FOUR, 8192) / 8192
    assert seconds * 1e6 == pytest.approx(8.9, abs=0.05)
    assert 1 / seconds == pytest.approx(112_500, rel=0.001)


def test_offline_of_4b():
    floor = offline_floor(FOUR, 1024, 128, 256)
    assert floor.prefill_s * 1e3 == pytest.approx(9.1, abs=0.05)
    assert (floor.prefill_s + floor.decode_s) * 1e3 == pytest.approx(14.6, abs=0.1)
    assert floor.in_turns_tok_s == pytest.approx(8_780, rel=0.005)
    assert floor.overlapped_tok_s == pytest.approx(14_070, rel=0.01)


def test_what_4b_moves():
    assert floors.weight_bytes(FOUR) == pytest.approx(8.41e9, rel=0.001)
    assert floors.layer_parameters(FOUR) == pytest.approx(3.57e9, rel=0.001)
    # Of the last layer's attention the queries, gates and output of 16 heads of 256, and its MLP.
    assert floors.layer_parameters(FOUR) - floors.prompt_parameters(FOUR) == 2560 * (3 * 16 * 256 + 3 * 9216)
    assert floors.state_bytes(FOUR) == 48 * 2**20
    assert floors.state_bytes(FOUR, "bfloat16") == 24 * 2**20
    assert floors.kv_token_bytes(FOUR) == 32 * 2**10 == page_bytes(FOUR, "bfloat16") // 64


@pytest.mark.parametrize("size", ["0.8b", "4b", "9b", "27b", "tiny-27b"])
def test_matrices_are_those_of_the_model(size):
    """Everything else in the model (norms, taps, decay rates, an untied embedding) is small or not read whole."""
    config = ModelConfig.preset(size)
    untied = 0 if config.tie_word_embeddings else config.hidden_size * config.vocab_size
    small = 1 - (floors.decode_parameters(config) + untied) / ParamPack(config).num_parameters
    assert 0 < small < (0.02 if size.startswith("tiny") else 0.001)


def test_many_rows_are_bound_by_operations_and_few_by_reading():
    one, two = floors.decode_gemm_floor_s(FOUR, 1), floors.decode_gemm_floor_s(FOUR, 2)
    assert one == two == floors.weight_bytes(FOUR) / 4.26e12
    assert floors.decode_gemm_floor_s(FOUR, 1024) == pytest.approx(2 * floors.decode_gemm_floor_s(FOUR, 512))
    assert prefill_floor_s(FOUR, 1) == 2 * floors.layer_parameters(FOUR) / 4.26e12


def test_options_move_what_they_should():
    full, half = decode_step_floor_s(FOUR, 64, 0), decode_step_floor_s(FOUR, 64, 0, state_dtype="bfloat16")
    assert full - half == pytest.approx(64 * 48 * 2**20 / 4.26e12)
    slow = Ceilings(bytes_per_s=2.13e12, flops_per_s=390e12)
    assert decode_step_floor_s(FOUR, 256, 1000, ceilings=slow) == pytest.approx(
        2 * decode_step_floor_s(FOUR, 256, 1000)
    )
    pairs = 7 * 8 * 1024 * 1025 // 2 + 8 * 1024  # seven layers with all queries, and one with the last token's
    attention = prefill_floor_s(FOUR, 8192, lengths=[1024] * 8) - prefill_floor_s(FOUR, 8192)
    assert attention == pytest.approx(4 * 16 * 256 * pairs / 780e12)


@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_parts_of_a_decode_step_add_up_to_its_floor(rows, state_dtype):
    parts = decode_part_floors_s(FOUR, rows, 1088, state_dtype=state_dtype)
    assert list(parts) == ["GEMMs", "gdn_decode", "paged_decode_attention"]
    assert sum(parts.values()) == decode_step_floor_s(FOUR, rows, 1088, state_dtype=state_dtype)
    assert parts["GEMMs"] == floors.decode_gemm_floor_s(FOUR, rows)
    assert parts["gdn_decode"] == pytest.approx(rows * 2 * floors.state_bytes(FOUR, state_dtype) / 4.26e12)
    assert parts["paged_decode_attention"] == pytest.approx(rows * 1088 * floors.kv_token_bytes(FOUR) / 4.26e12)


def test_the_floor_of_decode_parts_is_most_of_what_their_kernels_must_move():
    """The specs of the kernels count projections, tails and outputs too, which are small beside states and keys."""
    parts = decode_part_floors_s(FOUR, 64, 1024)
    for op, spec, layers in (("gdn_decode", "4b-rows64", 24), ("paged_decode_attention", "4b-64x1k", 8)):
        kernel = layers * specs_of(op)[spec].compulsory_bytes() / 4.26e12
        assert 0.96 < parts[op] / kernel <= 1, op


@pytest.mark.parametrize("size", ["0.8b", "4b", "9b"])
def test_parts_of_a_prefill_move_what_their_kernels_must(size):
    """In every layer; the weights of a kernel are not counted, nor states that fresh prompts do not have."""
    config = ModelConfig.preset(size)
    parts = prefill_part_floors_s(config, [1024] * 8)
    for op, *layers in (
        ("causal_conv", ("8x1024", config.num_gdn_layers)),
        ("gdn_prefill", ("8x1024", config.num_gdn_layers)),
        ("kv_write", ("8x1024", config.num_attention_layers - 1), ("8x1024@keys", 1)),
        ("gated_norm", ("rows8192", config.num_gdn_layers)),
        ("add_rms_norm", ("rows8192", 2 * config.num_layers - 2)),
    ):
        specs = specs_of("gated_rms_norm" if op == "gated_norm" else op)
        kernels = sum(n * specs[f"{size}-{spec}"].compulsory_bytes() for spec, n in layers) / 4.26e12
        assert 0.96 < parts[op] / kernels <= 1, op
    assert parts["GEMMs"] == prefill_floor_s(config, 8192)


def test_prefill_attention_is_bound_by_bytes_or_operations():
    long, short = [16384], [64] * 256
    operations = prefill_floor_s(FOUR, 16384, lengths=long) - prefill_floor_s(FOUR, 16384)
    assert prefill_part_floors_s(FOUR, long)["paged_prefill_attention"] == pytest.approx(operations)
    moved = 7 * 16384 * 2 * (3 * 16 * 256 + 2 * 4 * 256)
    assert prefill_part_floors_s(FOUR, short)["paged_prefill_attention"] == pytest.approx(moved / 4.26e12)


def test_the_floor_of_a_chunk_over_its_prefix():
    """By hand: the last of 16 chunks of 8,192 tokens, 7 attention layers of 16 heads of 256, and one for one token."""
    pairs = 8192 * 122_880 + 8192 * 8193 // 2  # every token sees all before the chunk, and the chunk up to itself
    assert pairs == 1_040_191_488
    assert floors.prefix_attention_flops(FOUR, 122_880, 8192) == 16_384 * (7 * pairs + 131_072)
    last = floors.chunk_part_floors_s(FOUR, 122_880, 8192)
    assert last["paged_prefill_attention"] * 1e3 == pytest.approx(152.95, abs=0.01)
    assert last["GEMMs"] * 1e3 == pytest.approx(72.82, abs=0.01)
    # A last chunk of one token: its keys and values take longer to read than to multiply, its weights as well.
    one = floors.chunk_part_floors_s(FOUR, 131_071, 1)
    assert one["paged_prefill_attention"] == pytest.approx(131_072 * 32 * 2**10 / 4.26e12)
    assert one["GEMMs"] == prefill_floor_s(FOUR, 1)


@pytest.mark.parametrize("chunk", [4096, 8192, 131_072])
def test_chunks_of_a_long_prompt_do_the_work_of_the_whole(chunk):
    chunks = [(start, chunk) for start in range(0, 131_072, chunk)]
    whole = prefill_floor_s(FOUR, 131_072, lengths=[131_072])
    # But for the last layer's query of the last token of every chunk.
    assert sum(floors.chunk_floors_s(FOUR, chunks)) == pytest.approx(whole, rel=1e-4)
    slow = Ceilings(bytes_per_s=2.13e12, flops_per_s=390e12)
    assert sum(floors.chunk_floors_s(FOUR, chunks, ceilings=slow)) == pytest.approx(2 * whole, rel=1e-4)


def test_options_move_the_parts_of_a_prefill():
    one, many = prefill_part_floors_s(FOUR, [8192]), prefill_part_floors_s(FOUR, [1024] * 8)
    assert many["gdn_prefill"] - one["gdn_prefill"] == pytest.approx(7 * floors.state_bytes(FOUR) / 4.26e12)
    half = prefill_part_floors_s(FOUR, [8192], state_dtype="bfloat16")
    assert one["gdn_prefill"] - half["gdn_prefill"] == pytest.approx(floors.state_bytes(FOUR, "bfloat16") / 4.26e12)
    slow = prefill_part_floors_s(FOUR, [1024] * 8, ceilings=Ceilings(bytes_per_s=2.13e12, flops_per_s=390e12))
    assert slow == pytest.approx({part: 2 * seconds for part, seconds in many.items()})
    assert many["swiglu"] == pytest.approx(31 * 8192 * 3 * 9216 * 2 / 4.26e12)
    assert many["gated_norm"] == pytest.approx(24 * 8192 * 3 * 4096 * 2 / 4.26e12)
