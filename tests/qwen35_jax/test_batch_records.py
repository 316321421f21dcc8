import dataclasses
import json
import math

import pytest

from qwen35_jax import SamplingParams
from qwen35_jax.batch.records import BadRow, Row, identify, line_digest, parse_line, rng_id, row_key
from qwen35_jax.batch.responses import dump_line, error_record, response_record
from qwen35_jax.outputs import CompletionOutput, Logprob, RequestOutput
from tests.qwen35_jax.fakes import EOS, FakeTokenizer

pytestmark = pytest.mark.timeout(60)
DEFAULTS = SamplingParams(temperature=0.5, top_k=20)
USER = [{"role": "user", "content": "hi"}]


def parse(value, **options):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_line(3, raw, options.pop("defaults", DEFAULTS), **options)


def chat(**body):
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": USER, **body}}


def completion(**body):
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", **body}}


# Good rows.


def test_an_openai_chat_line():
    row = parse(chat(max_tokens=7, temperature=0, stop="x", seed=3, chat_template_kwargs={"enable_thinking": False}))
    assert isinstance(row, Row)
    assert (row.line, row.custom_id, row.kind) == (3, "a", "chat")
    assert row.messages == tuple(USER) and row.chat_template_kwargs == {"enable_thinking": False}
    assert row.params == SamplingParams(temperature=0, top_k=20, max_tokens=7, stop=["x"], seed=3)


def test_an_openai_completion_line():
    assert parse(completion()).prompt == "hi"
    assert parse(completion(prompt=[1, 2])).prompt == {"prompt_token_ids": [1, 2]}
    value = completion(prompt_token_ids=[1, 2])
    del value["body"]["prompt"]
    row = parse(value)
    assert row.kind == "completion" and row.prompt == {"prompt_token_ids": [1, 2]}


def test_a_body_without_url_or_method_says_by_its_prompt_what_it_is():
    assert parse({"body": {"messages": USER}}).kind == "chat"
    assert parse({"body": {"prompt": "x"}}).kind == "completion"


@pytest.mark.parametrize("name", ["custom_id", "id"])
@pytest.mark.parametrize("custom_id", ["a", 7, ""])
def test_plain_lines(name, custom_id):
    row = parse({name: custom_id, "prompt": "hi", "temperature": 1.5, "max_tokens": 2})
    assert row.custom_id == custom_id and type(row.custom_id) is type(custom_id)
    assert row.params == SamplingParams(temperature=1.5, top_k=20, max_tokens=2)
    assert parse({"messages": USER}).kind == "chat"
    assert parse({"prompt_token_ids": [5]}).prompt == {"prompt_token_ids": [5]}


def test_what_the_row_says_goes_before_the_defaults():
    defaults = SamplingParams(max_tokens=9, logprobs=2, stop=["y"])
    assert parse({"prompt": "x"}, defaults=defaults).params == defaults
    row = parse({"prompt": "x", "max_tokens": 3, "stop": [], "logprobs": None}, defaults=defaults)
    assert row.params == SamplingParams(max_tokens=3, logprobs=2)
    row = parse(chat(chat_template_kwargs={"b": 2}), chat_template_kwargs={"a": 1, "b": 1})
    assert row.chat_template_kwargs == {"a": 1, "b": 2}


def test_null_means_not_given():
    value = chat(temperature=None, stop=None, logprobs=None, tools=None, max_tokens=None, stream=None, user=None)
    assert parse(value).params == DEFAULTS
    row = parse(chat(chat_template_kwargs={"enable_thinking": None}), chat_template_kwargs={"enable_thinking": False})
    assert row.chat_template_kwargs == {"enable_thinking": False}
    assert parse({"custom_id": None, "prompt": "x", "messages": None}).custom_id is None


def test_keys_without_effect():
    assert isinstance(parse(chat(model="gpt", stream=False, user="me", metadata={"a": 1})), Row)


def test_both_names_of_max_tokens():
    assert parse(chat(max_completion_tokens=5)).params.max_tokens == 5
    assert parse(chat(max_completion_tokens=5, max_tokens=5)).params.max_tokens == 5
    assert parse(chat(max_completion_tokens=5, max_tokens=None)).params.max_tokens == 5
    assert parse(chat(max_completion_tokens=None, max_tokens=5)).params.max_tokens == 5
    assert parse(chat(max_completion_tokens=None)).params.max_tokens == parse(chat()).params.max_tokens


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (chat(logprobs=True), 0),
        (chat(logprobs=True, top_logprobs=3), 3),
        (chat(logprobs=False), None),
        (completion(logprobs=2), 2),
        ({"prompt": "x", "logprobs": 2}, 2),
        ({"prompt": "x", "logprobs": True, "top_logprobs": 2}, 2),
        ({"messages": USER, "logprobs": 2}, 2),
    ],
)
def test_logprobs_in_either_form(value, number):
    assert parse(value).params.logprobs == number


def test_a_row_that_wants_no_logprobs_gets_none_whatever_the_default():
    defaults = SamplingParams(logprobs=2)
    assert parse(chat(logprobs=False), defaults=defaults).params.logprobs is None
    assert parse({"prompt": "x", "logprobs": False}, defaults=defaults).params.logprobs is None
    assert parse(chat(), defaults=defaults).params.logprobs == 2


def test_content_parts_and_tools():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": None}]
    row = parse({"messages": parts, "tools": [{"type": "function"}]})
    assert row.messages == tuple(parts) and row.tools == ({"type": "function"},)


@pytest.mark.parametrize("raw", [b"", b"  ", b"\r", b"\t \r", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r"])
def test_blank_lines_are_no_rows(raw):
    assert parse(raw) is None and identify(raw) == (False, None)


@pytest.mark.parametrize("raw", [b'\xef\xbb\xbf{"prompt": "a"}', b'{"prompt": "a"}\r', b'  {"prompt": "a"}  '])
def test_byte_order_mark_and_carriage_return(raw):
    row = parse(raw)
    assert row.prompt == "a" and row.digest == line_digest(b'{"prompt": "a"}')


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c"])
def test_other_line_ends_are_text(separator):
    raw = json.dumps({"prompt": f"a{separator}b"}, ensure_ascii=separator in "\x0b\x0c").encode()
    assert parse(raw).prompt == f"a{separator}b"


def test_a_surrogate_pair_is_one_character():
    assert parse(b'{"prompt": "\\ud83d\\ude00"}').prompt == "\U0001f600"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("best_of", 1),
        ("echo", False),
        ("parallel_tool_calls", True),
        ("response_format", {"type": "text"}),
        ("service_tier", "default"),
        ("store", False),
        ("stream_options", None),
        ("suffix", None),
        ("tool_choice", "auto"),
        ("response_format", None),
    ],
)
def test_what_is_not_supported_may_be_asked_for_in_vain(key, value):
    """Files made for OpenAI's API hold such keys at values that ask for nothing."""
    plain, spoken = (parse(json.dumps({"prompt": "a", **more}).encode()) for more in ({}, {key: value}))
    assert dataclasses.replace(spoken, digest=plain.digest) == plain


# Bad rows.

BAD = [
    (b"\xff\xfe", "invalid_encoding", None, "byte 0 (0xff)"),
    (b'{"prompt": "a"', "invalid_json", None, "not valid JSON"),
    (b"nonsense", "invalid_json", None, "character 0"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json", None, "NaN"),
    (b'{"prompt": "a", "top_p": 1, "top_p": 0.5}', "invalid_json", "top_p", "twice"),
    (b"[" * 100_000, "invalid_json", None, "nested too deeply"),
    (b'{"prompt": "a", "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 901, "invalid_json", None, "nested too deeply"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json", None, "digits"),
    ([1, 2], "invalid_line", None, "an array"),
    (None, "invalid_line", None, "null"),
    ("text", "invalid_line", None, "a string"),
    (3, "invalid_line", None, "a number"),
    (True, "invalid_line", None, "a boolean"),
    ({}, "invalid_prompt", "messages", "no prompt"),
    ({"custom_id": 1.5, "prompt": "x"}, "invalid_custom_id", "custom_id", "1.5"),
    ({"custom_id": True, "prompt": "x"}, "invalid_custom_id", "custom_id", "True"),
    ({"custom_id": ["a"], "prompt": "x"}, "invalid_custom_id", "custom_id", "list"),
    ({"custom_id": "a", "id": "b", "prompt": "x"}, "invalid_custom_id", "id", "both"),
    (b'{"custom_id": "\\ud800", "prompt": "x"}', "invalid_custom_id", "custom_id", "U+D800"),
    (b'{"prompt": "\\ud800"}', "invalid_encoding", "prompt", "U+D800"),
    (b'{"messages": [{"role": "user", "content": "\\udfff"}]}', "invalid_encoding", "messages[0].content", "U+DFFF"),
    (b'{"prompt": "x", "stop": ["\\ud800"]}', "invalid_encoding", "stop[0]", "U+D800"),
    ({"prompt": "x", "temprature": 1}, "unknown_key", "temprature", "did you mean 'temperature'"),
    ({"prompt": "x", "guided_json": {}}, "unknown_key", "guided_json", "guided_json"),
    ({"prompt": "x", "best_of": 2}, "invalid_value", "best_of", "is not supported: only 1 or null may be given"),
    ({"prompt": "x", "best_of": True}, "invalid_value", "best_of", "got bool True"),
    ({"prompt": "x", "echo": True}, "invalid_value", "echo", "only false or null"),
    (chat(response_format={"type": "json_object"}), "invalid_value", "body.response_format", '{"type": "text"} or'),
    (chat(stream_options={"include_usage": True}), "invalid_value", "body.stream_options", "only null may be given"),
    (chat(tool_choice="required"), "invalid_value", "body.tool_choice", 'only "auto" or null'),
    ({**chat(), "priority": 1}, "unknown_key", "priority", "priority"),
    ({"id": "x", "body": {"messages": USER}}, "unknown_key", "id", "custom_id"),
    ({**chat(), "method": "GET"}, "invalid_value", "method", "GET"),
    ({**chat(), "url": "/v1/embeddings"}, "invalid_value", "url", "/v1/embeddings"),
    ({**chat(), "body": [1]}, "invalid_value", "body", "an array"),
    ({"custom_id": "a", "url": "/v1/completions"}, "invalid_value", "body", "null"),
    ({**chat(), "url": "/v1/completions"}, "invalid_prompt", "body.messages", "does not go with"),
    ({**completion(), "url": "/v1/chat/completions"}, "invalid_prompt", "body.prompt", "does not go with"),
    ({"prompt": "x", "messages": USER}, "invalid_prompt", "prompt", "both"),
    ({"prompt": ["a", "b"]}, "invalid_prompt", "prompt", "several lines"),
    ({"prompt": 3}, "invalid_prompt", "prompt", "3"),
    ({"prompt_token_ids": "ab"}, "invalid_prompt", "prompt_token_ids", "ab"),
    ({"prompt_token_ids": [1, 2.5]}, "invalid_prompt", "prompt_token_ids", "list"),
    ({"prompt_token_ids": [True]}, "invalid_prompt", "prompt_token_ids", "list"),
    (chat(messages=[]), "invalid_prompt", "body.messages", "empty"),
    (chat(messages={}), "invalid_prompt", "body.messages", "list"),
    (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "invalid_prompt",
     "body.messages[0].content[0]", "image_url"),
    (chat(stream=True), "invalid_value", "body.stream", "stream"),
    (chat(model=3), "invalid_value", "body.model", "string"),
    (chat(metadata="x"), "invalid_value", "body.metadata", "object"),
    (chat(tools={}), "invalid_value", "body.tools", "list"),
    (chat(tools=["f"]), "invalid_value", "body.tools[0]", "object"),
    (chat(chat_template_kwargs=[]), "invalid_value", "body.chat_template_kwargs", "object"),
    (chat(chat_template_kwargs={"tools": []}), "invalid_value", "body.chat_template_kwargs", "'tools' cannot be set"),
    (chat(chat_template_kwargs={"enable_thinking": 0}), "invalid_value", "body.chat_template_kwargs", "true or false"),
    (completion(chat_template_kwargs={}), "invalid_value", "body.chat_template_kwargs", "messages"),
    (chat(return_token_ids=1), "invalid_value", "body.return_token_ids", "true or false"),
    (chat(temperature="hot"), "invalid_value", "body.temperature", "hot"),
    (chat(temperature=True), "invalid_value", "body.temperature", "True"),
    (chat(top_p=2), "invalid_value", "body.top_p", "2"),
    (chat(max_tokens=0), "invalid_value", "body.max_tokens", "0"),
    (chat(max_tokens=1.5), "invalid_value", "body.max_tokens", "1.5"),
    (chat(max_completion_tokens=1, max_tokens=2), "invalid_value", "body.max_completion_tokens", "2"),
    (chat(max_completion_tokens=True, max_tokens=1), "invalid_value", "body.max_completion_tokens", "bool True"),
    (chat(max_completion_tokens=1.0, max_tokens=1), "invalid_value", "body.max_completion_tokens", "float 1.0"),
    (chat(n=2), "invalid_value", "body.n", "n=1"),
    (chat(logit_bias={"5": 1}), "invalid_value", "body.logit_bias", "not supported"),
    (chat(logprobs=3), "invalid_value", "body.logprobs", "top_logprobs"),
    (chat(max_completion_tokens=0), "invalid_value", "body.max_completion_tokens", "max_completion_tokens: 0 is out"),
    (chat(max_tokens=0, max_completion_tokens=0), "invalid_value", "body.max_tokens", "max_tokens: 0 is out"),
    (chat(top_logprobs=3), "invalid_value", "body.top_logprobs", "logprobs: true"),
    (chat(logprobs=True, top_logprobs=21), "invalid_value", "body.top_logprobs", "21"),
    (completion(logprobs=True), "invalid_value", "body.logprobs", "integer"),
    ({"prompt": "x", "logprobs": 2, "top_logprobs": 2}, "invalid_value", "top_logprobs", "logprobs: true"),
    (chat(seed="x"), "invalid_value", "body.seed", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "code", "param", "words"), BAD, ids=range(len(BAD)))
def test_a_bad_row_names_what_is_wrong(value, code, param, words):
    row = parse(value)
    assert isinstance(row, BadRow), row
    assert (row.code, row.param) == (code, param)
    assert words in row.message and row.line == 3
    json.loads(dump_line(error_record(row, row.code, row.message, row.param)))


def test_a_bad_row_keeps_its_custom_id():
    assert parse({"custom_id": "a", "prompt": "x", "oops": 1}).custom_id == "a"


@pytest.mark.parametrize("value", [case[0] for case in BAD] + [chat(), completion(), {"id": 3, "prompt": "x"}])
def test_identify_finds_the_id_that_parsing_finds(value):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    assert identify(raw) == (True, parse(raw).custom_id)


def test_keys_and_random_identity():
    assert row_key("7", 1) != row_key(7, 1)
    assert row_key(None, 1) == "line:1" and row_key("line:1", 2) != row_key(None, 1)
    assert rng_id(None, 5) == 5 and rng_id("a", 5) == rng_id("a", 6) != rng_id("b", 5)


# Records of the output.


def output(token_ids=(72, 105), text="Hi", **options):
    completion = CompletionOutput(text=text, token_ids=list(token_ids), finish_reason="stop", **options)
    return RequestOutput("line-3", prompt_token_ids=[1, 2, 3], outputs=[completion])


def record(row, out, tokenizer=None):
    return json.loads(dump_line(response_record(row, out, model="m", created=5, tokenizer=tokenizer)))


def logprobs_of(row, out, tokenizer=None):
    return record(row, out, tokenizer)["response"]["body"]["choices"][0]["logprobs"]


def test_a_chat_record():
    made = record(parse(chat()), output(content="Hi", reasoning="hm", stop_reason="x"))
    assert (made["custom_id"], made["line"], made["error"]) == ("a", 3, None)
    assert made["response"]["status_code"] == 200 and made["response"]["request_id"] == "line-3"
    body = made["response"]["body"]
    assert (body["object"], body["model"], body["created"]) == ("chat.completion", "m", 5)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi", "reasoning_content": "hm"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "x",
        }
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_a_completion_record():
    made = record(parse({"id": 9, "prompt": "x", "return_token_ids": True}), output())
    body = made["response"]["body"]
    assert made["custom_id"] == 9 and body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "Hi" and body["choices"][0]["token_ids"] == [72, 105]
    assert "reasoning_content" not in body["choices"][0]


LOGPROBS = [
    {72: Logprob(-0.5, 1, "H"), 65: Logprob(-1.5, 2, "A")},
    {105: Logprob(-9.0, 7, "i"), 65: Logprob(-0.5, 1, "A"), 66: Logprob(-math.inf, 2, "B")},
]


def test_chat_logprobs():
    row = parse(chat(logprobs=True, top_logprobs=2))
    content = logprobs_of(row, output(logprobs=LOGPROBS), FakeTokenizer())["content"]
    assert [entry["token"] for entry in content] == ["H", "i"]
    assert content[0]["logprob"] == -0.5 and content[0]["bytes"] == [72]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in content] == [["H", "A"], ["A", "B"]]
    assert content[1]["top_logprobs"][1]["logprob"] == -9999.0  # JSON has no -inf


def test_completion_logprobs():
    row = parse({"prompt": "x", "logprobs": 2})
    found = logprobs_of(row, output(logprobs=LOGPROBS), FakeTokenizer())
    assert found["tokens"] == ["H", "i"] and found["token_logprobs"] == [-0.5, -9.0]
    assert found["text_offset"] == [0, 1]
    assert found["top_logprobs"] == [{"H": -0.5, "A": -1.5}, {"i": -9.0, "A": -0.5, "B": -9999.0}]


def test_logprobs_without_a_tokenizer():
    out = output(text="", content="", logprobs=[{72: Logprob(-0.5, 1)}, {105: Logprob(-1.0, 1)}])
    found = logprobs_of(parse({"prompt": "x", "logprobs": 0}), out)
    assert found["tokens"] == ["token_id:72", "token_id:105"] and found["text_offset"] == [0, 0]
    content = logprobs_of(parse(chat(logprobs=True)), out)["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [(None, None), (None, None)]


SHARED = "a漢b"  # a token a byte: three tokens share the middle character


def shared_output():
    ids = list(SHARED.encode())
    # The other half of a character is among the alternatives: both look like U+FFFD.
    found = [{i: Logprob(-0.5, 1, bytes([i]).decode(errors="replace")), 0x80: Logprob(-2.0, 2, "\ufffd")} for i in ids]
    return output(ids, SHARED, content=SHARED, logprobs=found)


def test_bytes_of_tokens_put_a_shared_character_together():
    content = logprobs_of(parse(chat(logprobs=True, top_logprobs=2)), shared_output(), FakeTokenizer())["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == SHARED
    assert [top["bytes"] for top in content[1]["top_logprobs"]] == [[0xE6], [0x80]]


def test_offsets_are_those_of_the_text_and_a_shared_name_is_the_sampled_token_s():
    found = logprobs_of(parse({"prompt": "x", "logprobs": 1}), shared_output(), FakeTokenizer())
    assert found["text_offset"] == [0, 1, 1, 1, 2]
    assert [SHARED[place] for place in found["text_offset"]] == ["a", "漢", "漢", "漢", "b"]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob


@pytest.mark.parametrize(("skip", "offsets"), [(True, [0, 1, 1]), (False, [0, 1, 6])])
def test_tokens_that_are_no_text_take_no_room_in_it(skip, offsets):
    row = parse({"prompt": "x", "logprobs": 0, "ignore_eos": True, "skip_special_tokens": skip})
    found = [{i: Logprob(-0.5, 1, "?")} for i in (65, EOS, 66)]
    assert logprobs_of(row, output((65, EOS, 66), logprobs=found), FakeTokenizer())["text_offset"] == offsets


def test_a_record_is_one_line_to_every_reader():
    row = parse({"custom_id": "a\u2028b", "prompt": "x"})
    out = output(text="a\u2028b\u2029c\x85d\ne\x7ff é 漢")
    data = dump_line(response_record(row, out, model="m", created=5, tokenizer=None))
    assert data.endswith(b"\n") and len(data.decode().splitlines()) == 1
    made = json.loads(data)
    assert made["custom_id"] == "a\u2028b"
    assert made["response"]["body"]["choices"][0]["text"] == "a\u2028b\u2029c\x85d\ne\x7ff é 漢"
    assert "é 漢".encode() in data


def test_an_error_record():
    row = parse({"custom_id": "a", "prompt": "x", "oops": 1})
    made = json.loads(dump_line(error_record(row, row.code, row.message, row.param)))
    assert made["response"] is None and made["custom_id"] == "a" and made["line"] == 3
    assert made["error"] == {"code": "unknown_key", "message": row.message, "line": 3, "param": "oops"}
