"""The demo checkpoint: genuine Hugging Face layout, a tokenizer that all loaders agree on, the template's switches."""

import collections
import hashlib
import json
import pathlib

import jinja2.exceptions
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.name_table import FULL_PREFIX, parameter_table
from scripts import make_demo_checkpoint
from tests.oracle.qwen35_numpy import Oracle

TEXTS = (
    "Hello, world!",
    "Zürich, 3.14 and 1234567 apples don't\n\n\n  count \t themselves.",
    "नमस्ते! क्या आप इसे फिर से समझा सकते हैं? चिट्ठियाँ",
    "สวัสดีครับ ค่อย ๆ ที่นี่ เรื่องน้ำผึ้ง",
    "السيّئة، مرّةً أخرى",
    "湖和海有什么区别?ガ行",
    "안녕하세요",
    "👩‍👩‍👧‍👦 ❤️ 🎉",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n</think>\n\n<tool_call>",
    " ",
    "\r\n",
)


@pytest.fixture(scope="module")
def raw(demo_checkpoint: pathlib.Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))


@pytest.fixture(scope="module")
def auto(demo_checkpoint: pathlib.Path):
    return AutoTokenizer.from_pretrained(demo_checkpoint)


def digests(directory: pathlib.Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def stored_tensors(directory: pathlib.Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Name -> (file, shape, dtype) of everything that the shards hold."""
    out = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                assert name not in out, f"{name} is stored twice"
                out[name] = (path.name, tuple(part.get_shape()), part.get_dtype())
    return out


def test_config_is_read_by_transformers_and_by_the_package(demo_checkpoint: pathlib.Path) -> None:
    theirs, ours = AutoConfig.from_pretrained(demo_checkpoint), ModelConfig.from_hf(demo_checkpoint)
    assert theirs.model_type == "qwen3_5"
    text = theirs.text_config
    assert tuple(text.layer_types) == ours.layer_types == ("linear_attention",) * 3 + ("full_attention",)
    assert (text.head_dim, text.linear_key_head_dim, text.linear_value_head_dim) == (256, 128, 128)
    assert text.linear_num_value_heads == 2 * text.linear_num_key_heads
    assert text.rope_parameters["partial_rotary_factor"] == 0.25
    assert ours.attention.rotary_dim == 64
    assert ours.tie_word_embeddings and text.tie_word_embeddings


def test_stop_ids_come_from_both_configs(demo_checkpoint: pathlib.Path, raw: Tokenizer) -> None:
    ends = {raw.token_to_id("<|im_end|>"), raw.token_to_id("<|endoftext|>")}
    generation = GenerationConfig.from_pretrained(demo_checkpoint)
    assert set(generation.eos_token_id) == ends
    assert (generation.temperature, generation.top_p, generation.top_k) == (1.0, 0.95, 20)
    assert set(ModelConfig.from_hf(demo_checkpoint).eos_token_ids) == ends


def test_shards_and_index_hold_every_tensor_once(demo_checkpoint: pathlib.Path) -> None:
    index = json.loads((demo_checkpoint / "model.safetensors.index.json").read_text())
    stored = stored_tensors(demo_checkpoint)
    table = parameter_table(ModelConfig.from_hf(demo_checkpoint))
    expected = {s.full_name(FULL_PREFIX): s.shape for recipe in table.values() for s in recipe.sources}
    assert {name: shape for name, (_, shape, _) in stored.items()} == expected
    assert index["weight_map"] == {name: file for name, (file, _, _) in stored.items()}
    assert len(set(index["weight_map"].values())) >= 2
    sizes = {"BF16": 2, "F32": 4}
    total = sum(sizes[dtype] * int(np.prod(shape)) for _, shape, dtype in stored.values())
    assert index["metadata"]["total_size"] == total


def test_dtypes_are_mixed_as_in_published_files(demo_checkpoint: pathlib.Path) -> None:
    by_dtype = collections.defaultdict(set)
    for name, (_, _, dtype) in stored_tensors(demo_checkpoint).items():
        by_dtype[dtype].add(name.split(".", 4)[-1])
    assert by_dtype["F32"] == {"linear_attn.A_log", "linear_attn.norm.weight"}
    assert not by_dtype["F32"] & by_dtype["BF16"]
    assert set(by_dtype) == {"F32", "BF16"}


def test_same_sources_give_the_same_files(demo_checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    make_demo_checkpoint.write_checkpoint(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(demo_checkpoint)
    make_demo_checkpoint.write_checkpoint(tmp_path / "again", seed=1)
    changed = {name for name, value in digests(tmp_path / "again").items() if value != digests(demo_checkpoint)[name]}
    assert changed == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}


def test_replaces_a_demo_checkpoint_and_nothing_else(tmp_path: pathlib.Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "config.json").write_text("{}")
    with pytest.raises(UserInputError, match="precious exists and is not a demo checkpoint"):
        make_demo_checkpoint.write_checkpoint(precious)
    assert make_demo_checkpoint.main(["x", f"--output={precious}"]) == 2
    assert [path.name for path in precious.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_vocabulary_is_padded_beyond_the_tokenizer(demo_checkpoint: pathlib.Path, raw: Tokenizer) -> None:
    rows = ModelConfig.from_hf(demo_checkpoint).vocab_size
    assert raw.get_vocab_size() == make_demo_checkpoint.NUM_PIECES + len(make_demo_checkpoint.ADDED_TOKENS)
    assert max(raw.get_vocab().values()) == raw.get_vocab_size() - 1
    assert rows % 128 == 0 and raw.get_vocab_size() < rows < raw.get_vocab_size() + 256


def test_added_tokens_follow_the_pieces_in_the_published_order(raw: Tokenizer) -> None:
    ids = [raw.token_to_id(text) for text, _ in make_demo_checkpoint.ADDED_TOKENS]
    assert ids == list(range(make_demo_checkpoint.NUM_PIECES, raw.get_vocab_size()))
    offset = {text: ids[i] - ids[0] for i, (text, _) in enumerate(make_demo_checkpoint.ADDED_TOKENS)}
    assert (offset["<|im_start|>"], offset["<|im_end|>"]) == (1, 2)
    assert (offset["<think>"], offset["</think>"]) == (24, 25)
    # Reasoning marks are text to skip_special_tokens, end marks are not.
    assert raw.decode(raw.encode("<think>a</think><|im_end|>").ids) == "<think>a</think>"


@pytest.mark.parametrize("text", TEXTS)
def test_auto_tokenizer_gives_the_ids_of_tokenizer_json(auto, raw: Tokenizer, text: str) -> None:
    assert auto(text)["input_ids"] == raw.encode(text).ids


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(raw: Tokenizer, text: str) -> None:
    assert raw.decode(raw.encode(text).ids, skip_special_tokens=False) == text


def test_normalises_to_nfc(raw: Tokenizer) -> None:
    assert raw.encode("Cafe\u0301").ids == raw.encode("Caf\u00e9").ids


def test_digits_stay_apart_and_marks_stay_with_their_letters(raw: Tokenizer) -> None:
    assert raw.encode("2024").tokens == ["2", "0", "2", "4"]
    pieces = [text for text, _ in raw.pre_tokenizer.pre_tokenize_str("हिन्दी में")]
    assert len(pieces) == 2, "a combining mark began a new piece"


def test_special_tokens_of_the_config(auto) -> None:
    assert (auto.eos_token, auto.pad_token, auto.bos_token) == ("<|im_end|>", "<|endoftext|>", None)


def render(auto, messages, **kwargs) -> str:
    return auto.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)


HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("kwargs", "ending"),
    [
        ({}, "<think>\n"),
        ({"enable_thinking": True}, "<think>\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_switch(auto, kwargs, ending: str) -> None:
    start = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert render(auto, HELLO, **kwargs) == start + ending


def test_template_drops_old_reasoning_and_joins_text_parts(auto) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two?"}]},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThree."},
        {"role": "user", "content": "Why?"},
    ]
    assert render(auto, conversation) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne two?<|im_end|>\n"
        "<|im_start|>assistant\nThree.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_template_renders_tools_calls_and_responses(auto) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
    conversation = [
        *HELLO,
        {"role": "assistant", "content": "", "reasoning_content": "ask", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "warm"},
    ]
    text = render(auto, conversation, tools=tools)
    assert text.startswith("<|im_start|>system\n# Tools") and '"name": "weather"' in text
    assert (
        "<think>\nask\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    ) in text
    responses = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>"
    assert f"<|im_start|>user\n{responses}<|im_end|>\n" in text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ([{"role": "narrator", "content": "x"}], "Unknown role: narrator"),
        ([*HELLO, {"role": "system", "content": "late"}], "must be the first"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "Only text parts"),
    ],
)
def test_template_refuses(auto, messages, message: str) -> None:
    with pytest.raises((jinja2.exceptions.TemplateError, ValueError), match=message):
        render(auto, messages)


def test_random_weights_make_text_that_wanders(demo_checkpoint: pathlib.Path, raw: Tokenizer) -> None:
    """By the float64 oracle: logits spread over a few units, and greedy text is not one token repeated."""
    config = ModelConfig.from_hf(demo_checkpoint)
    ends = list(config.eos_token_ids)
    oracle = Oracle(config.to_hf(), make_demo_checkpoint.random_tensors(config, ends, make_demo_checkpoint.SEED))
    tokens, state = raw.encode("Wie spät ist es in Tokio?").ids, oracle.new_state()
    out = oracle.forward(tokens, state)
    assert 1.5 < out.logits.std(axis=-1).mean() < 4.0
    text = []
    for _ in range(40):
        logits = out.logits[-1, : raw.get_vocab_size()].copy()
        logits[ends] = -np.inf
        text.append(int(logits.argmax()))
        out = oracle.forward(text[-1:], state)
    assert len(set(text)) > 25
