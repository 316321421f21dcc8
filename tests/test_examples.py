"""examples/prompts.jsonl: many real-language lines in every form, all of which run on the demo checkpoint."""

import collections
import json
import pathlib
from typing import Any

import pytest

from qwen35_jax.batch.records import Row, parse_line
from qwen35_jax.sampling_params import SamplingParams
from scripts import summarise_answers

PROMPTS = pathlib.Path(__file__).resolve().parent.parent / "examples" / "prompts.jsonl"
MAX_MODEL_LEN = 1024  # of scripts/quickstart.sh
LANGUAGES = {"en", "de", "fr", "es", "it", "pt", "zh", "ja", "ko", "hi", "th", "ar", "ru", "code"}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    lines = PROMPTS.read_bytes().split(b"\n")
    assert lines.pop() == b"", "the file must end with a newline"
    parsed = [parse_line(number, raw, SamplingParams()) for number, raw in enumerate(lines, start=1)]
    assert [row for row in parsed if not isinstance(row, Row)] == []
    return parsed


@pytest.fixture(scope="module")
def tokenizer(demo_checkpoint: pathlib.Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_checkpoint)


@pytest.fixture(scope="module")
def prompts(rows: list[Row], tokenizer) -> dict[str, list[int]]:
    """The ids of every prompt by custom_id."""
    out = {}
    for row in rows:
        if row.kind == "chat":
            text = tokenizer.apply_chat_template(
                list(row.messages), tokenize=False, add_generation_prompt=True, **row.chat_template_kwargs
            )
            out[row.custom_id] = tokenizer(text)["input_ids"]
        elif isinstance(row.prompt, str):
            out[row.custom_id] = tokenizer(row.prompt)["input_ids"]
        else:
            out[row.custom_id] = list(row.prompt["prompt_token_ids"])
    return out


def objects() -> list[dict[str, Any]]:
    return summarise_answers.read_jsonl(PROMPTS)


def test_there_are_enough_lines_with_ids_of_their_own(rows: list[Row]) -> None:
    assert len(rows) >= 200
    assert len({row.custom_id for row in rows}) == len(rows)


def test_every_form_is_there() -> None:
    forms: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for line in objects():
        body = line.get("body", line)
        key = next(key for key in ("messages", "prompt", "prompt_token_ids") if key in body)
        forms["batch" if "body" in line else "plain", key, type(body[key]).__name__] += 1
    assert set(forms) == {
        ("batch", "messages", "list"),
        ("batch", "prompt", "str"),
        ("batch", "prompt", "list"),
        ("plain", "messages", "list"),
        ("plain", "prompt", "str"),
        ("plain", "prompt_token_ids", "list"),
    }
    assert min(forms.values()) >= 5


def test_languages(rows: list[Row]) -> None:
    found = collections.Counter(str(row.custom_id).split("-")[1] for row in rows)
    assert set(found) == LANGUAGES
    assert min(found.values()) >= 5


def test_prompt_lengths(prompts: dict[str, list[int]]) -> None:
    lengths = sorted(len(ids) for ids in prompts.values())
    assert lengths[0] == 1 and 560 <= lengths[-1] <= 640
    assert {63, 64, 65, 128, 129} <= set(lengths)
    assert sum(length > 100 for length in lengths) >= 25


def test_everything_fits_the_limits_of_the_quickstart(rows: list[Row], prompts: dict[str, list[int]]) -> None:
    for row in rows:
        assert row.params.max_tokens is not None, row.custom_id
        assert len(prompts[row.custom_id]) + row.params.max_tokens <= MAX_MODEL_LEN, row.custom_id
    total = sum(row.params.max_tokens for row in rows)
    assert 4000 <= total <= 9000, "enough to see the scheduler at work, little enough for a CPU"
    assert {row.params.max_tokens for row in rows} >= {1, 64}


def test_token_ids_are_in_the_vocabulary(prompts: dict[str, list[int]], tokenizer) -> None:
    assert max(max(ids) for ids in prompts.values()) < len(tokenizer)


def test_sampling_is_mixed(rows: list[Row]) -> None:
    params = [row.params for row in rows]
    default = SamplingParams()
    assert sum(p.temperature == 0 for p in params) >= 20
    for field in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop"):
        assert sum(getattr(p, field) != getattr(default, field) for p in params) >= 10, field
    for field in ("repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs"):
        assert sum(getattr(p, field) != getattr(default, field) for p in params) >= 8, field
    assert any(p.include_stop_str_in_output for p in params) and any(not p.skip_special_tokens for p in params)
    assert {p.logprobs for p in params} >= {None, 0, 1, 5, 20}
    switches = collections.Counter(row.chat_template_kwargs.get("enable_thinking") for row in rows if row.messages)
    assert min(switches[value] for value in (None, True, False)) >= 5


ANSWER = {
    "custom_id": "a",
    "error": None,
    "response": {
        "body": {
            "choices": [{"text": "Four. \n" + "Yes, " * 10, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        }
    },
}
FAILURE = {"custom_id": "b", "response": None, "error": {"code": "x", "message": "too long", "line": 2}}


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ([ANSWER, {**ANSWER, "custom_id": "b"}], []),
        ([ANSWER], ["b: no record"]),
        ([ANSWER, FAILURE], ["b: too long"]),
        ([ANSWER, ANSWER, {**ANSWER, "custom_id": "b"}], ["a: 2 records"]),
        ([ANSWER, {**ANSWER, "custom_id": "b"}, {**ANSWER, "custom_id": "c"}], ["c: not in the input"]),
    ],
)
def test_summary_finds_what_is_missing_or_wrong(records, found: list[str]) -> None:
    assert summarise_answers.problems([{"custom_id": "a"}, {"custom_id": "b"}], records) == found


def test_summary_of_a_good_and_a_bad_output(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"custom_id": "a", "prompt": "2 + 2 ="}\n')
    output.write_text(json.dumps(ANSWER) + "\n")
    monkeypatch.setattr("sys.argv", ["summarise_answers.py", f"--input={source}", f"--output={output}"])
    assert summarise_answers.main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert "        -> Four." + 10 * " Yes," in printed
    assert printed[-2:] == [
        "1 of 1 lines answered (1 stop); 3 prompt tokens, 2 output tokens",
        f"Answers: {output}",
    ]
    output.write_text("")
    assert summarise_answers.main() == 1
    assert "PROBLEM a: no record" in capsys.readouterr().out
