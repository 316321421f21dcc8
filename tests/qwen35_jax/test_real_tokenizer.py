"""Text handling with Qwen3's real tokenizer (its ids are not Qwen3.5's: it proves loading, text and templates)."""

import functools
import os
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35_jax.text import TextStream, Tokenizer, split_reasoning

DIRECTORY = Path(
    os.environ.get("QWEN35_TEST_TOKENIZER") or Path(__file__).parents[2] / ".cache" / "test-tokenizer"
)  # the variable names another folder that scripts/fetch_test_tokenizer.sh filled

pytestmark = pytest.mark.skipif(
    not (DIRECTORY / "tokenizer.json").is_file(), reason="no real tokenizer: run scripts/fetch_test_tokenizer.sh"
)

TEXTS = {
    "hindi": "नमस्ते दुनिया! क्षत्रिय और ज्ञानी, हिन्दी में १२३।",
    "thai": "สวัสดีครับ ผมชื่อสมชาย น้ำแข็งกี่ก้อน",
    "zwj emoji": "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 👍🏽 🇩🇪 ❤️\u200d🔥",
    "cjk": "日本語の文章、中文文本。한국어 문장입니다. 𠮷野家",
    "combining": "e\u0301 n\u0303 a\u030a Zalgo: Z\u0335a\u0310l\u0321g\u0358o\u0322 \u1e69\u0323",
    "arabic": "السَّلامُ عَلَيْكُمْ ١٢٣",
    "code": "def f(x):\r\n\treturn x**2  # 12345\n\n\n",
    "chat": "<|im_start|>user\nHi<|im_end|>\n<think>\n\n</think>\n\n",
    "odd": "\u2028\u2029\u0085\u200b\ufeff\ufffd \x00\x1f tabs\t\t  ",
}


@functools.cache
def real_tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(DIRECTORY)


@functools.cache
def raw_tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@pytest.mark.parametrize("name", TEXTS)
def test_ids_are_those_of_the_file_and_texts_come_back(name):
    tokenizer, text = real_tokenizer(), TEXTS[name]
    ids = tokenizer.encode(text)
    assert ids == raw_tokenizer().encode(text).ids
    full = tokenizer.decode(ids, skip_special_tokens=False)
    assert full == unicodedata.normalize("NFC", text)  # the file asks for NFC
    stream, shown = TextStream(tokenizer, skip_special_tokens=False), ""
    for token_id in ids:
        stream.push([token_id])
        shown += stream.take()
        assert full.startswith(shown)
    stream.finish()
    assert stream.text == full


def test_facts_of_the_file():
    tokenizer = real_tokenizer()
    assert tokenizer.vocab_limit == 151669
    assert tokenizer.eos_token_ids == (151645,)
    assert {151643, 151644, 151645} <= tokenizer.special_ids
    assert tokenizer.special_ids.isdisjoint({151667, 151668})  # think tags are text


def test_most_pieces_of_emoji_are_incomplete_characters():
    """The property below would be empty if no token cut a character."""
    tokenizer = real_tokenizer()
    ids = tokenizer.encode(TEXTS["zwj emoji"])
    assert sum("\ufffd" in tokenizer.decode([i]) for i in ids) > 5


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 151_999), max_size=60), st.booleans(), st.integers(1, 7))
def test_random_ids_stream_to_their_full_decode(ids, skip, pieces):
    tokenizer = real_tokenizer()
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    for start in range(0, len(ids), pieces):
        stream.push(ids[start : start + pieces])
    stream.finish()
    assert stream.text == tokenizer.decode(ids, skip)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_stop_strings_cut_out_of_any_text(data):
    tokenizer = real_tokenizer()
    text = unicodedata.normalize("NFC", data.draw(st.text(max_size=60)))
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stop = text[start : start + data.draw(st.integers(1, 6))] or "x"
    ids = tokenizer.encode(text)
    full = tokenizer.decode(ids, skip_special_tokens=False)
    stream = TextStream(tokenizer, stop=[stop], skip_special_tokens=False)
    for token_id in ids:
        stream.push([token_id])
    stream.finish()
    assert stream.text == full.partition(stop)[0]
    assert (stream.stop_hit is None) == (stop not in full)


def test_stop_string_across_token_pieces():
    tokenizer = real_tokenizer()
    ids = tokenizer.encode("The answer is 42.\n\nQuestion: what now?")
    stream = TextStream(tokenizer, stop=["Question:", "\n\nQ"])
    hits = [stream.push([token_id]) for token_id in ids]
    assert "\n\nQ" in hits and stream.text == "The answer is 42."
    assert stream.num_tokens_kept == hits.index("\n\nQ") + 1 < len(ids)


def test_chat_template_and_its_switch():
    tokenizer = real_tokenizer()
    messages = [{"role": "system", "content": "Sei kurz."}, {"role": "user", "content": "नमस्ते 👩\u200d💻"}]
    head = (
        "<|im_start|>system\nSei kurz.<|im_end|>\n<|im_start|>user\nनमस्ते 👩\u200d💻<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render_chat(messages) == head
    assert tokenizer.render_chat(messages, enable_thinking=False) == head + "<think>\n\n</think>\n\n"
    ids = tokenizer.encode_chat(messages, enable_thinking=False)
    assert ids[0] == 151644 and ids.count(151645) == 2 and ids[-4:-1] == [151667, 271, 151668]
    assert tokenizer.decode(ids, skip_special_tokens=False) == head + "<think>\n\n</think>\n\n"


def test_chat_with_tools_and_a_tool_call():
    tokenizer = real_tokenizer()
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "ü"}'}}
    rendered = tokenizer.render_chat(
        [
            {"role": "user", "content": [{"type": "text", "text": "add"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ],
        tools=tools,
    )
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in rendered
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>' in rendered
    assert "<tool_response>\n2\n</tool_response>" in rendered
    assert rendered.endswith("<|im_start|>assistant\n")


def test_reasoning_of_a_real_answer():
    tokenizer = real_tokenizer()
    ids = tokenizer.encode("<think>\nHm, 👍🏽.\n</think>\n\nGern!<|im_end|>")
    stream = TextStream(tokenizer, stop=["</answer>"])
    stream.push(ids, ends_with_stop_token=True)
    stream.finish()
    assert split_reasoning(stream.text, stream.starts_inside_reasoning) == ("Hm, 👍🏽.", "Gern!")
