"""Tokenizer, chat rendering, text stream and reasoning split on small byte-level tokenizers made here."""

import json
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from qwen35_jax.text import ChatError, TextStream, Tokenizer, TokenizerError, split_reasoning
from qwen35_jax.text import tokenizer as tokenizer_module

BASE = 300  # byte-level entries; the added tokens follow
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<think>", "</think>", "<ü tag>")  # added tokens that are text, one beyond the byte alphabet
TEMPLATE = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
{{ call.function.name }}({% for k, v in call.function.arguments | items %}{{ k }}={{ v }}{% endfor %})
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- if messages[0].role == 'bad' %}{{ raise_exception('no such role: bad') }}{% endif -%}
{%- if messages[0].role == 'worse' %}{{ missing.attribute.of }}{% endif -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif -%}
"""
CORPUS = ["the cat sat on the mat and the hat, then ate the bread", "日本語のテスト、日本語", "naïve café 👍 👍🏽"] * 3


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens(list(PLAIN_ADDED))
    return backend


def write_model_dir(path, **files):
    path.mkdir(exist_ok=True)
    byte_level_backend().save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    for name, content in ({"tokenizer_config": config} | files).items():
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_dir(write_model_dir(tmp_path_factory.mktemp("model") / "m"))


def stream_text(tokenizer, ids, pieces=1, **options) -> TextStream:
    stream = TextStream(tokenizer, **options)
    for start in range(0, len(ids), pieces):
        stream.push(ids[start : start + pieces])
    stream.finish()
    return stream


# ---------------------------------------------------------------- tokenizer


def test_ids_are_those_of_the_file(tokenizer):
    raw = tokenizers.Tokenizer.from_file(str(tokenizer.directory / "tokenizer.json"))
    for text in [*CORPUS, "", "<|im_start|>user\n<think>\nnaïve</think>", "a\r\n\tb  c"]:
        assert tokenizer.encode(text) == raw.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_limits_and_special_ids(tokenizer):
    assert tokenizer.vocab_limit == BASE + len(SPECIAL) + len(PLAIN_ADDED)
    assert tokenizer.special_ids == {300, 301, 302}
    assert tokenizer.eos_token_ids == (302,)
    assert tokenizer.decode([300, 301]) == ""
    assert tokenizer.decode([300, 10_000]) == ""  # ids of the padded vocabulary have no text
    assert tokenizer.token_bytes(10_000) == b""


def test_eos_is_the_union_of_all_files(tmp_path):
    directory = write_model_dir(
        tmp_path / "m",
        generation_config={"eos_token_id": [300, 302]},
        config={"eos_token_id": 7, "text_config": {"eos_token_id": [7, 8]}},
    )
    assert Tokenizer.from_dir(directory).eos_token_ids == (302, 300, 7, 8)
    write_model_dir(tmp_path / "m", tokenizer_config={}, generation_config={"eos_token_id": None}, config={})
    assert Tokenizer.from_dir(directory).eos_token_ids == ()
    write_model_dir(directory, tokenizer_config={"eos_token": {"content": "<|endoftext|>"}})
    assert Tokenizer.from_dir(directory).eos_token_ids == (300,)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer_config": {"eos_token": "<eos>"}}, ("tokenizer_config.json", "'<eos>'")),
        ({"generation_config": {"eos_token_id": "x"}}, ("generation_config.json", "eos_token_id")),
        ({"generation_config": {"eos_token_id": [True]}}, ("generation_config.json", "True")),
        ({"config": {"text_config": {"eos_token_id": -1}}}, ("config.json", "-1")),
        ({"generation_config": [1]}, ("generation_config.json", "list")),
        ({"tokenizer_config": {"added_tokens_decoder": {"303": {"content": "<|im_end|>"}}}}, ("<|im_end|>", "302")),
        ({"tokenizer_config": {"added_tokens_decoder": {"400": {"content": "<new>"}}}}, ("<new>", "None")),
    ],
)
def test_files_that_disagree_are_refused_by_name(tmp_path, files, words):
    directory = write_model_dir(tmp_path / "m", **files)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_dir(directory)
    assert all(word in str(caught.value) for word in words)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"nowhere/tokenizer.json: no such file"):
        Tokenizer.from_dir(tmp_path / "nowhere")
    directory = write_model_dir(tmp_path / "m")
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"generation_config.json: not readable as JSON"):
        Tokenizer.from_dir(directory)
    (directory / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(TokenizerError, match=r"tokenizer.json: not a readable tokenizer"):
        Tokenizer.from_dir(directory)


def test_other_decoders_are_refused_by_name(tmp_path):
    for decoder, name in ((decoders.ByteFallback(), "ByteFallback"), (None, "null")):
        backend = byte_level_backend()
        if decoder is None:
            backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        else:
            backend.decoder = decoder
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(TokenizerError, match=rf"tokenizer.json: decoder '{name}' is not supported"):
            Tokenizer.from_dir(tmp_path)


def test_truncation_and_padding_left_in_the_file_do_nothing(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "the cat sat on the mat and the hat " * 4
    assert Tokenizer.from_dir(tmp_path).encode(text) == byte_level_backend().encode(text).ids


def test_lone_surrogates_and_other_types_are_clear_errors(tokenizer):
    with pytest.raises(ValueError, match=r"lone surrogate \('\\ud800' at character 2\)"):
        tokenizer.encode("ab\ud800c")
    with pytest.raises(TypeError, match="expected text, got int"):
        tokenizer.encode(3)


# ---------------------------------------------------------------- chat


def test_render_chat_and_the_thinking_switch(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    thinking = tokenizer.render_chat(messages)
    assert thinking == head + "<|im_start|>assistant\n<think>\n"
    assert tokenizer.starts_inside_reasoning(thinking)
    plain = tokenizer.render_chat(messages, enable_thinking=False)
    assert plain == head + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert not tokenizer.starts_inside_reasoning(plain)
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == head
    assert tokenizer.encode_chat(messages) == tokenizer.encode(thinking)
    assert 301 in tokenizer.encode_chat(messages)


def test_messages_are_brought_into_one_form(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rendered = tokenizer.render_chat([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert rendered == "<|im_start|>user\nab<|im_end|>\n"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    rendered = tokenizer.render_chat(
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
        tools=[{"type": "function", "function": {"name": "f"}}],
        add_generation_prompt=False,
    )
    assert "f(x=1)" in rendered and '"name": "f"' in rendered
    assert call["function"]["arguments"] == '{"x": 1}'  # the caller's object is left alone


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "messages: the list is empty"),
        ("hi", {}, "messages: expected a list"),
        ({"role": "user"}, {}, "messages: expected a list"),
        (["hi"], {}, r"messages\[0\]: expected an object"),
        ([{"content": "x"}], {}, r"messages\[0\].role"),
        ([{"role": 3, "content": "x"}], {}, r"messages\[0\].role.*3"),
        ([{"role": "user"}], {}, r"messages\[0\].content: missing"),
        ([{"role": "user", "content": 5}], {}, r"messages\[0\].content.*int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            {},
            r"messages\[0\].content\[0\]: only text parts are supported, got 'image_url'",
        ),
        ([{"role": "user", "content": ["x"]}], {}, r"content\[0\]: only text parts"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            {},
            r"tool_calls\[0\].function.arguments: not JSON",
        ),
        ([{"role": "assistant", "tool_calls": "f"}], {}, r"tool_calls: expected a list"),
        ([{"role": "bad", "content": "x"}], {}, "chat template failed: .*no such role: bad"),
        ([{"role": "worse", "content": "x"}], {}, "chat template failed: UndefinedError"),
        ([{"role": "user", "content": "x"}], {"tokenize": True}, "chat_template_kwargs: 'tokenize'"),
        ([{"role": "user", "content": "x"}], {"tools": "f"}, "tools: expected a list"),
    ],
)
def test_chat_errors_are_clear(tokenizer, messages, options, words):
    with pytest.raises(ChatError, match=words):
        tokenizer.render_chat(messages, **options)


def test_a_model_without_a_template_says_so(tmp_path):
    tokenizer = Tokenizer.from_dir(write_model_dir(tmp_path / "m", tokenizer_config={"eos_token": "<|im_end|>"}))
    with pytest.raises(ChatError, match=r"m: the model has no chat template \(neither chat_template.jinja"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    again = Tokenizer.from_dir(tmp_path / "m")
    assert again.render_chat([{"role": "user", "content": "x"}]) == "x!"


# ---------------------------------------------------------------- detokenisation


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_ids_stream_to_their_full_decode(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_limit + 3), max_size=40))
    skip = data.draw(st.booleans())
    pieces = data.draw(st.integers(1, 5))
    stream = stream_text(tokenizer, ids, pieces, skip_special_tokens=skip)
    assert stream.text == tokenizer.decode(ids, skip)
    assert stream.num_tokens_kept == len(ids)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=30))
def test_broken_utf8_becomes_the_same_replacement_characters(tokenizer, data):
    char_of = {byte: char for char, byte in tokenizer_module._BYTE_OF_CHAR.items()}
    vocab = tokenizer._backend.get_vocab()
    ids = [vocab[char_of[byte]] for byte in data]
    assert stream_text(tokenizer, ids).text == tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_incomplete_characters_are_held_and_real_replacement_characters_pass(tokenizer):
    ids = tokenizer.encode("é👍🏽\ufffdx")
    stream, seen = TextStream(tokenizer), []
    for token_id in ids:
        stream.push([token_id])
        seen.append(stream.text)
    full = "é👍🏽\ufffdx"
    assert all(full.startswith(text) for text in seen)  # nothing shown is ever taken back
    assert full[:-1] in seen  # the real U+FFFD came out before the next character
    assert stream.text == full


def test_finish_flushes_a_character_that_was_cut(tokenizer):
    ids = tokenizer.encode("ok ")
    thumb = [tokenizer._backend.get_vocab()[c] for c in "ðŁ"]  # two of four bytes
    stream = TextStream(tokenizer)
    stream.push(ids + thumb)
    assert stream.text == "ok "
    stream.finish()
    stream.finish()
    assert stream.text == tokenizer.decode(ids + thumb) == "ok \ufffd"
    with pytest.raises(RuntimeError, match="finish"):
        stream.push([1])


def test_special_tokens_inside_a_character_do_not_break_it(tokenizer):
    vocab = tokenizer._backend.get_vocab()
    ids = [vocab["Ã"], 302, vocab["©"]]
    assert stream_text(tokenizer, ids).text == tokenizer.decode(ids) == "é"
    assert stream_text(tokenizer, ids, skip_special_tokens=False).text == tokenizer.decode(ids, False)


def test_take_gives_every_character_once(tokenizer):
    ids = tokenizer.encode("the cat 👍 sat END of it")
    stream, taken = TextStream(tokenizer, stop=["END"]), ""
    for token_id in ids:
        stream.push([token_id])
        taken += stream.take()
        assert taken == stream.text
    stream.finish()
    taken += stream.take()
    assert taken == stream.text == "the cat 👍 sat "
    assert stream.take() == ""


def test_time_is_linear_in_the_output(tokenizer):
    """Ten times the tokens take about ten times as long, also for the inputs that made others quadratic."""
    vocab = tokenizer._backend.get_vocab()
    replacement = [vocab[c] for c in "ï¿½"]  # U+FFFD itself
    almost = tokenizer.encode("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")

    def seconds(ids, stop) -> float:
        best = float("inf")
        for _ in range(3):
            stream = TextStream(tokenizer, stop=stop)
            start = time.process_time()
            for token_id in ids:
                stream.push([token_id])
            stream.finish()
            assert stream.text == tokenizer.decode(ids)
            best = min(best, time.process_time() - start)
        return best

    for ids, stop in ((replacement, ()), (replacement, ("\ufffd" * 50 + "x",)), (almost, ("a" * 200 + "b",))):
        short = ids * (2000 // len(ids))
        assert seconds(short * 10, stop) < 30 * seconds(short, stop) + 0.05


# ---------------------------------------------------------------- stop strings


def reference_cut(text: str, stops, include: bool, allowed_from: int = 0):
    """First completed stop string (the longest of those that end there), by brute force."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending and end > allowed_from:
            hit = max(ending, key=len)
            return text[: end if include else end - len(hit)], hit
    return text, None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_stop_strings_cut_like_brute_force(tokenizer, data):
    alphabet = st.sampled_from("ab日<> ")
    text = data.draw(st.text(alphabet, max_size=40))
    stops = data.draw(st.lists(st.text(alphabet, min_size=1, max_size=4), min_size=1, max_size=4))
    include = data.draw(st.booleans())
    vocab = tokenizer._backend.get_vocab()
    char_of = {byte: char for char, byte in tokenizer_module._BYTE_OF_CHAR.items()}
    ids = data.draw(
        st.sampled_from([tokenizer.encode(text), [vocab[char_of[byte]] for byte in text.encode()]])
    )  # as the tokenizer splits it, or byte by byte
    want, hit = reference_cut(text, stops, include)
    stream = TextStream(tokenizer, stop=stops, include_stop_str_in_output=include)
    pieces = data.draw(st.integers(1, 4))
    for start in range(0, len(ids), pieces):
        stream.push(ids[start : start + pieces])
        assert want.startswith(stream.text)  # nothing shown is ever taken back
    stream.finish()
    assert (stream.text, stream.stop_hit) == (want, hit)
    if hit is None:
        assert stream.num_tokens_kept == len(ids)
    else:  # the token that completed the stop string is the last that counts
        kept = stream.num_tokens_kept
        assert reference_cut(tokenizer.decode(ids[:kept]), stops, include)[1] == hit
        before = tokenizer.decode(ids[: kept - 1])
        assert reference_cut(before, stops, include)[1] is None or before.endswith("\ufffd")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_stop_strings_before_min_tokens_do_not_count(tokenizer, data):
    text = data.draw(st.text("ab", max_size=30))
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3))
    min_tokens = data.draw(st.integers(0, 12))
    ids = tokenizer.encode(text)
    early = len(tokenizer.decode(ids[:min_tokens]))
    want, hit = reference_cut(text, stops, False, allowed_from=early)
    stream = stream_text(tokenizer, ids, stop=stops, min_tokens=min_tokens)
    assert (stream.text, stream.stop_hit) == (want, hit)
    if hit is not None:
        assert stream.num_tokens_kept > min_tokens


def test_a_stop_string_across_tokens_and_what_is_held_back(tokenizer):
    stream = TextStream(tokenizer, stop=["STOP", "\n\nUser"])
    shown = []
    for piece in ("one S", "TO", "Y two ST", "OP three"):
        hit = stream.push(tokenizer.encode(piece))
        shown.append((stream.text, hit))
    assert shown == [("one ", None), ("one ", None), ("one STOY two ", None), ("one STOY two ", "STOP")]
    kept = stream.num_tokens_kept
    assert stream.push([1, 2, 3]) == "STOP"  # later tokens are ignored
    stream.finish()
    assert stream.text == "one STOY two " and stream.num_tokens_kept == kept


def test_held_text_is_released_at_the_end(tokenizer):
    assert stream_text(tokenizer, tokenizer.encode("a line\n\nUse"), stop=["\n\nUser"]).text == "a line\n\nUse"


def test_stop_string_in_flushed_bytes(tokenizer):
    """A cut character becomes U+FFFD at the end, which may itself be a stop string."""
    ids = [*tokenizer.encode("ok"), tokenizer._backend.get_vocab()["ð"]]
    stream = stream_text(tokenizer, ids, stop=["k\ufffd"])
    assert (stream.text, stream.stop_hit) == ("o", "k\ufffd")


def test_think_tags_pass_whole_whatever_is_held_for_stops(tokenizer):
    """The tag is one token here: it comes out at once, in one piece, and only a real beginning of a stop is held."""
    stream = TextStream(tokenizer, stop=["</answer>", "<|"])
    shown = []
    for piece in ("so", "</think>", "\n\nanswer", "</", "think>"):
        stream.push(tokenizer.encode(piece))
        shown.append(stream.take())
    assert shown == ["so", "</think>", "\n\nanswer", "", "</think>"]


def test_the_text_of_a_stop_token_is_left_out_but_counted(tokenizer):
    ids = tokenizer.encode("the cat</think>")  # the last is a token of its own
    for include, text in ((False, "the cat"), (True, "the cat</think>")):
        for stop in ((), ("zzz",)):
            stream = TextStream(tokenizer, stop=stop, include_stop_str_in_output=include)
            stream.push(ids, ends_with_stop_token=True)
            stream.finish()
            assert (stream.text, stream.num_tokens_kept) == (text, len(ids))


def test_prompt_tail_decides_where_the_output_starts(tokenizer):
    assert TextStream(tokenizer, prompt_tail="<|im_start|>assistant\n<think>\n").starts_inside_reasoning
    assert not TextStream(tokenizer, prompt_tail="<think>\n\n</think>\n\n").starts_inside_reasoning
    assert not TextStream(tokenizer).starts_inside_reasoning


# ---------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("text", "starts_inside", "reasoning", "content"),
    [
        ("because\n</think>\n\nanswer", True, "because", "answer"),
        ("\n\n</think>\n\nanswer", True, "", "answer"),
        ("never closed", True, "never closed", ""),
        ("<think>\ntwice\n</think>\nanswer", True, "twice", "answer"),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("plain", False, None, "plain"),
        ("plain </think> text", False, None, "plain </think> text"),
        ("  <think>\nown\n</think>\n\nanswer", False, "own", "answer"),
        ("about <think> tags", False, None, "about <think> tags"),
        ("\n\nplain", False, None, "\n\nplain"),
        ("", True, "", ""),
        ("", False, None, ""),
    ],
)
def test_split_reasoning(text, starts_inside, reasoning, content):
    assert split_reasoning(text, starts_inside) == (reasoning, content)
