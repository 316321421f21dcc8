"""examples/prompts.jsonl: questions and stories in every form, all of which run on the demo model."""

import collections
import json
import pathlib
import re
from typing import Any

import pytest

from qwen35_jax.batch.records import Row, parse_line
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.text import Tokenizer
from scripts import summarise_answers
from scripts.demo_model import example_job, tasks
from scripts.demo_model.languages import LANGUAGES

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PROMPTS, EXPECTED, MODEL = EXAMPLES / "prompts.jsonl", EXAMPLES / "expected.jsonl", EXAMPLES / "demo-model"
MAX_MODEL_LEN = 1024  # of scripts/quickstart.sh


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    lines = PROMPTS.read_bytes().split(b"\n")
    assert lines.pop() == b"", "the file must end with a newline"
    parsed = [parse_line(number, raw, SamplingParams()) for number, raw in enumerate(lines, start=1)]
    assert [row for row in parsed if not isinstance(row, Row)] == []
    return parsed


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


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


def test_files_are_what_the_sources_write() -> None:
    lines, expected = example_job.job(Tokenizer.from_dir(MODEL))
    assert PROMPTS.read_text("utf-8") == example_job.as_text(lines)
    assert EXPECTED.read_text("utf-8") == example_job.as_text(expected)


def test_there_are_enough_lines_with_ids_of_their_own(rows: list[Row]) -> None:
    assert len(rows) >= 200
    assert len({row.custom_id for row in rows}) == len(rows)
    assert all(re.fullmatch(r"[a-z]+-[a-z]{2}-\d{3}", str(row.custom_id)) for row in rows)


def test_questions_are_of_every_task_and_have_their_answers(rows: list[Row], prompts: dict[str, list[int]], tokenizer):
    """The right answers are marked right and others wrong; each fits its line's max_tokens, its end included."""
    expected = {one["custom_id"]: one for one in summarise_answers.read_jsonl(EXPECTED)}
    by_task = collections.Counter(one["task"] for one in expected.values())
    assert set(by_task) == set(tasks.TASKS) - {"recall_long"} and min(by_task.values()) >= 8
    assert {row.custom_id for row in rows} - set(expected) == {
        row.custom_id for row in rows if str(row.custom_id).startswith("story-")
    }
    thinking = collections.Counter(one["thinking"] for one in expected.values())
    assert min(thinking[True], thinking[False]) >= 60
    for row in rows:
        if row.custom_id in expected:
            wanted = expected[row.custom_id]
            assert str(row.custom_id).split("-")[0] == wanted["task"]
            assert tasks.right(wanted["task"], wanted["answer"], wanted["answer"])
            assert row.params.max_tokens > len(tokenizer(wanted["answer"])["input_ids"])
            opened = tokenizer.decode(prompts[row.custom_id][-3:]).endswith("<think>\n")
            assert opened == wanted["thinking"], "the prompt's end says whether there will be reasoning"


def test_questions_are_asked_with_options_that_do_not_mislead(rows: list[Row]) -> None:
    """Nearly greedy (the model's own default is greedy), no penalties, nothing that ends or prolongs an answer."""
    bodies = {line["custom_id"]: line.get("body", line) for line in objects()}
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "stop_token_ids")
    for row in rows:
        if not str(row.custom_id).startswith("story-"):
            assert bodies[row.custom_id].get("temperature", 0) <= 0.3
            assert not set(names) & set(bodies[row.custom_id])


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
    assert set(found) == set(LANGUAGES)
    assert min(found.values()) >= 5


def test_prompt_lengths(prompts: dict[str, list[int]]) -> None:
    lengths = sorted(len(ids) for ids in prompts.values())
    assert lengths[0] == 1 and 560 <= lengths[-1] <= 640
    assert {63, 64, 65, 128, 129} <= set(lengths)
    assert sum(length > 100 for length in lengths) >= 20


def test_everything_fits_the_limits_of_the_quickstart(rows: list[Row], prompts: dict[str, list[int]]) -> None:
    for row in rows:
        assert row.params.max_tokens is not None, row.custom_id
        assert len(prompts[row.custom_id]) + row.params.max_tokens <= MAX_MODEL_LEN, row.custom_id
    total = sum(row.params.max_tokens for row in rows)
    assert 4000 <= total <= 10000, "enough to see the scheduler at work, little enough for a CPU"
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


def answered(custom_id: str, content: str, *, text: bool = False) -> dict[str, Any]:
    choice: dict[str, Any] = {"finish_reason": "stop"}
    choice |= {"text": content} if text else {"message": {"reasoning_content": "Hm.", "content": content}}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return {"custom_id": custom_id, "error": None, "response": {"body": {"choices": [choice], "usage": usage}}}


def perfect_answers() -> list[dict[str, Any]]:
    """What a model that is always right answers to the example job."""
    expected = {one["custom_id"]: one for one in summarise_answers.read_jsonl(EXPECTED)}
    out = []
    for line in objects():
        name, chat = line["custom_id"], "messages" in line.get("body", line)
        wanted = expected.get(name, {"answer": "and so on, " * 5, "thinking": False})
        thoughts = "Hm.\n</think>\n\n" if wanted["thinking"] and not chat else ""
        out.append(answered(name, thoughts + wanted["answer"], text=not chat))
    return out


def summarise(tmp_path: pathlib.Path, monkeypatch, capsys, records: list[dict[str, Any]], *flags: str):
    output = tmp_path / "out.jsonl"
    output.write_text("".join(json.dumps(record) + "\n" for record in records))
    argv = ["summarise_answers.py", f"--input={PROMPTS}", f"--output={output}", f"--expected={EXPECTED}", *flags]
    monkeypatch.setattr("sys.argv", argv)
    return summarise_answers.main(), capsys.readouterr().out


def test_summary_counts_right_answers(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    records = perfect_answers()
    code, printed = summarise(tmp_path, monkeypatch, capsys, records, "--min_right=1")
    assert code == 0
    assert f"    recall        {example_job.NUMBERS['recall']} of {example_job.NUMBERS['recall']}" in printed
    number = sum(example_job.NUMBERS.values())
    assert f"{number} of {number} answers that can be checked are right (100.0%)" in printed
    assert printed.count(", right)") == len(example_job.NUMBERS) and "WRONG" not in printed
    assert "Some of the other answers:" in printed

    wrong = next(record for record in records if record["custom_id"].startswith("sort-"))
    choice = wrong["response"]["body"]["choices"][0]
    if "text" in choice:
        choice["text"] += " 7"
    else:
        choice["message"]["content"] += " 7"
    code, printed = summarise(tmp_path, monkeypatch, capsys, records, "--min_right=1")
    assert code == 1 and f"PROBLEM {number - 1} of {number} answers are right, fewer than 100%" in printed
    assert f"    sort          {example_job.NUMBERS['sort'] - 1} of {example_job.NUMBERS['sort']}" in printed
    code, _ = summarise(tmp_path, monkeypatch, capsys, records, "--min_right=0.9")
    assert code == 0
    (tmp_path / "nothing.jsonl").write_text("")
    nothing = f"--expected={tmp_path / 'nothing.jsonl'}"
    code, printed = summarise(tmp_path, monkeypatch, capsys, records, nothing, "--min_right=0.9")
    assert code == 1 and "no answer could be compared" in printed


def test_reasoning_is_no_answer(tmp_path: pathlib.Path, monkeypatch, capsys) -> None:
    """An answer that was cut in its thoughts is wrong though they hold the value."""
    expected = [{"custom_id": "a", "task": "qa", "thinking": True, "answer": "Rome"}]
    for text, right in (("Rome", False), ("It is Rome.\n</think>\n\nRome.", True), ("x\n</think>\n\nParis", False)):
        (marked,) = summarise_answers.mark(expected, {"a": answered("a", text, text=True)})
        assert marked.right == right
    (marked,) = summarise_answers.mark(expected, {"a": answered("a", "Rome")})
    assert marked.right
    assert not summarise_answers.mark(expected, {})[0].right
