"""The demo model's tasks, batches, tokenizer and evaluation: right answers, disjoint sets, what inference will see."""

import dataclasses
import json
import pathlib
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from transformers import AutoConfig, AutoTokenizer

from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.outputs import CompletionOutput
from qwen35_jax.text import Tokenizer
from scripts.demo_model import chat, corpus, evaluate, tasks
from scripts.demo_model import tokenizer as make_tokenizer
from scripts.demo_model.batches import Batches, Encoder
from scripts.demo_model.languages import LANGUAGES
from scripts.demo_model.lexicon import KINDS, NOUNS, agree
from scripts.demo_model.recall import STYLES
from scripts.demo_model.tasks import Example

DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "examples" / "demo-model"
MEGABYTE = 10**6
ASSISTANT = re.compile(r"<\|im_start\|>assistant\n(?:<think>\n(?:\n</think>\n\n)?)?(.*?<\|im_end\|>)", re.DOTALL)


def examples(task: str, count: int, seed: int = 1) -> list[Example]:
    rng = np.random.default_rng([seed, tasks.TASKS.index(task)])
    return [tasks.generate(task, rng, max_tokens=4096) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(DIRECTORY)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(DIRECTORY)


# Tasks


def damaged(example: Example) -> list[str]:
    """Answers that are nearly right."""
    right = example.answer
    wrong = ["", right[:-1], f"{right} x", "x" + right]
    if example.task == "arithmetic":
        wrong = ["", f"{right}0", f"{right} + 1", "no number"]
    if example.task == "json":
        wrong += [right.replace('"', "'"), f"[{right}]", "{}", "null"]
    if example.task in ("copy", "reverse", "sort") and example.kind != "sentence":
        separator = next(gap for gap in (", ", "; ", "、", "\n", " ") if gap in right)
        items = right.split(separator)
        wrong += [separator.join(items[1:]), separator.join([*items, items[0]]), right.replace(separator, "/")]
        turned = separator.join(items[1:] + items[:1])
        wrong += [turned] * (turned != right)
    return wrong


@pytest.mark.parametrize("task", tasks.TASKS)
def test_checks_accept_right_answers_and_no_others(task: str) -> None:
    for example in examples(task, 20 if task in tasks.LONG_TASKS else 100):
        assert tasks.check(example, example.answer), example
        assert tasks.check(example, f"\n{example.answer} "), example
        for wrong in damaged(example):
            assert not tasks.check(example, wrong), (example, wrong)


def test_json_is_compared_by_value() -> None:
    example = next(one for one in examples("json", 50) if one.kind == "object" and '"age"' in one.answer)
    value = json.loads(example.answer)
    turned = dict(reversed(value.items()))
    assert tasks.check(example, json.dumps(turned, indent=1))
    assert not tasks.check(example, json.dumps(value | {"age": str(value["age"])}))
    assert not tasks.check(example, json.dumps(value | {"age": value["age"] + 1}))
    assert not tasks.check(example, json.dumps(value | {"more": 1}))


def test_answers_are_what_the_task_asks_for() -> None:
    """Worked out again from the text of the question, as a reader would."""
    for example in examples("sort", 100):
        listed = re.split(r"、|, |; |\s", example.messages[-1]["content"].replace("：", ": "))
        words = [word for word in listed if word.isdigit() or (example.kind == "words" and word in NOUNS)]
        order = {"words": sorted, "up": lambda x: sorted(x, key=int), "down": lambda x: sorted(x, key=int)[::-1]}
        assert re.split(r"、|, |; |\s", example.answer) == order[example.kind](words)
    for example in examples("reverse", 100):
        text = example.messages[-1]["content"]
        gap = next(gap for gap in ("、", ", ", "; ", "\n", " ") if gap in example.answer)
        assert text.endswith(gap.join(example.answer.split(gap)[::-1]))
    for example in examples("copy", 50):
        assert example.messages[-1]["content"].endswith(example.answer)
    for example in examples("arithmetic", 200):
        a, sign, b = re.search(r"(\d+) ([+*×-]) (\d+)", example.messages[-1]["content"]).groups()
        result = {"+": int(a) + int(b), "-": int(a) - int(b)}.get(sign, int(a) * int(b))
        assert re.findall(r"\d+", example.answer)[-1] == str(result)
        for line in [*example.reasoning.split("\n"), *([example.answer] if "=" in example.answer else [])]:
            sides = line.replace("×", "*").split(" = ")
            assert len({eval(side) for side in sides}) == 1, line
    for task in ("recall", "recall_long"):
        for example in examples(task, 20):
            text = example.messages[0 if example.messages[0]["role"] == "user" else 1]["content"]
            forms = [form for form, _ in STYLES if form] + [*LANGUAGES[example.language].wording["pair"]]
            for key, value in (pair.split("=") for pair in example.key.split("|")):
                assert any(form.format(k=key, v=value) in text for form in forms)
            last = example.answer.split("\n")[-1].split(": ")[-1]
            assert last == example.key.split("=")[-1]
    for example in examples("qa", 200):
        assert example.answer in example.messages[-1]["content"] and example.answer in example.reasoning


def test_all_modes_languages_and_lengths_occur() -> None:
    found = examples("qa", 300)
    assert {one.language for one in found} == {*LANGUAGES} == {one.kind for one in found}
    assert {one.thinking for one in found} == {True, False}
    assert {one.messages[0]["role"] for one in found} == {"user", "system"}
    assert {one.kind for one in examples("arithmetic", 50)} == {"add", "subtract", "multiply"}
    counts = [one.messages[-1]["content"].count(": ") for one in examples("recall_long", 40) if len(one.messages) == 1]
    assert max(counts) > 150


@pytest.mark.parametrize("task", tasks.TASKS)
def test_held_out_examples_are_never_trained_on(task: str) -> None:
    count = 5 if task in tasks.LONG_TASKS else 40
    held_out = tasks.held_out(task, count)
    assert held_out == tasks.held_out(task, count + 1)[:count], "a longer set begins with a shorter one"
    assert [one.thinking for one in held_out] == [i % 2 == 0 for i in range(count)]
    assert all(tasks.is_held_out(task, one.key) for one in held_out)
    trained = examples(task, 10 * count)
    assert not any(tasks.is_held_out(task, one.key) for one in trained)
    assert not {one.answer + one.messages[-1]["content"] for one in trained} & {
        one.answer + one.messages[-1]["content"] for one in held_out
    }
    if task != "chat":
        assert len({one.key for one in held_out}) > count // 2


def test_two_orders_of_one_sum_are_on_the_same_side() -> None:
    keys = {one.key for one in examples("arithmetic", 500) if one.kind == "add"}
    assert all(int(key.split()[1]) <= int(key.split()[2]) for key in keys)
    assert all(one.key == "|".join(sorted(one.key.split("|"))) for one in examples("sort", 50))


def test_unknown_tasks_and_short_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="'dance' is not one of recall"):
        tasks.generate("dance", np.random.default_rng(0))
    with pytest.raises(ValueError, match="recall_long needs 4096 tokens"):
        tasks.generate("recall_long", np.random.default_rng(0), max_tokens=1024)


def test_every_language_brings_everything() -> None:
    english = LANGUAGES["en"]
    only_english = {"words", "wonder", "unknown", "system"}
    for language in LANGUAGES.values():
        assert language.facts.keys() == {*KINDS}
        assert language.wording.keys() >= english.wording.keys() - only_english
        assert not set(language.men) & set(language.women)
        assert len(language.nouns()) >= tasks.MAX_ITEMS
        for fact in language.facts.values():
            assert all("{n}" in text and "{v}" in text for text in fact.statements)
            assert all("{n}" in text and "{v}" not in text for text in fact.questions)
            assert all("[" not in agree(text, woman) for text in fact.values for woman in (True, False))
        story = corpus.story(np.random.default_rng(0), language, 30)
        assert not re.search(r"[{}\[\]|]", story)
    assert len(NOUNS) == len(set(NOUNS)) >= 200


# Chat form and tokenizer


@pytest.mark.parametrize("task", tasks.TASKS)
def test_examples_read_as_the_template_renders_them(task: str, tokenizer: Tokenizer, encoder: Encoder) -> None:
    for example in examples(task, 10 if task in tasks.LONG_TASKS else 30):
        rendered = tokenizer.render_chat(example.messages, enable_thinking=example.thinking)
        assert chat.prompt(example.messages, example.thinking) == rendered
        pieces = chat.pieces(example)
        assert chat.text(example).startswith(rendered)
        answered = {"role": "assistant", "content": example.answer}
        if example.thinking:
            answered["reasoning_content"] = example.reasoning
        whole = tokenizer.render_chat([*example.messages, answered], add_generation_prompt=False)
        assert chat.text(example) == whole.removesuffix("\n")
        # Pieces are encoded one by one in training and the prompt as one text at inference.
        ids, weights = encoder.encode([pieces])[0]
        prompt_ids = evaluate.prompt_ids(tokenizer, example)
        assert ids[: len(prompt_ids)].tolist() == prompt_ids
        assert weights[len(prompt_ids) :].all() and not weights[len(prompt_ids) - 1]
        assert tokenizer.decode(ids[len(prompt_ids) :], skip_special_tokens=False) == pieces[-1][0]
        assert ids[-1] == tokenizer.eos_token_ids[0]


def test_text_of_every_language_survives(tokenizer: Tokenizer) -> None:
    plain = tokenizers.Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(DIRECTORY)
    texts = [*corpus.prose(), "สวัสดี 👩‍👩‍👧‍👦 1234567\r\n\n  x", "<|im_start|>user\n<think>\n</think>\n\n<tool_call>"]
    texts += [corpus.story(np.random.default_rng(1), language) for language in LANGUAGES.values()]
    texts += [text for language in LANGUAGES.values() for lines in language.wording.values() for text in lines]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert ids == plain.encode(text).ids == theirs(text)["input_ids"]
    assert len(tokenizer.encode("2026")) == 4
    assert max(len(tokenizer.encode(f" {noun}")) for noun in NOUNS) == 1


def test_directory_is_what_the_sources_write(tmp_path: pathlib.Path) -> None:
    plain = tokenizers.Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    make_tokenizer.write_directory(tmp_path, plain)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (DIRECTORY / path.name).read_bytes(), path.name
    assert {path.name for path in tmp_path.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_sizes_and_ids(tokenizer: Tokenizer) -> None:
    config = ModelConfig.from_hf(DIRECTORY)
    parameters, size = make_tokenizer.weight_bytes(config)
    assert parameters <= 5.6e6 and size <= 11.5 * MEGABYTE
    files = sum(path.stat().st_size for path in DIRECTORY.iterdir() if path.suffix != ".safetensors")
    assert files + size <= 12 * MEGABYTE and files <= 0.3 * MEGABYTE
    assert config.vocab_size <= 3072 and config.vocab_size % 64 == 0 and config.tie_word_embeddings
    assert tokenizer.vocab_limit == make_tokenizer.NUM_IDS < config.vocab_size
    ends = {tokenizer.encode(text)[0] for text in ("<|im_end|>", "<|endoftext|>")}
    assert set(tokenizer.eos_token_ids) == set(config.eos_token_ids) == ends
    assert AutoConfig.from_pretrained(DIRECTORY).text_config.num_hidden_layers == config.num_layers == 8
    assert (config.attention.head_dim, config.gdn.head_k_dim, config.gdn.num_v_heads) == (256, 128, 2)


# Batches


def test_batches_depend_on_seed_step_and_split_alone() -> None:
    def make(seed: int = 0, split: str = "train") -> Batches:
        return Batches(DIRECTORY, seed, 3, 512, split=split)

    first = make()
    batch = first.batch(7)
    first.batch(8)
    for again in (first.batch(7), make().batch(7)):
        assert all(np.array_equal(batch[name], again[name]) for name in batch)
    for other in (first.batch(8), make(seed=1).batch(7), make(split="held_out").batch(7)):
        assert not np.array_equal(batch["tokens"], other["tokens"])


@pytest.mark.parametrize(("rows", "seq_len", "split"), [(8, 512, "train"), (2, 4096, "train"), (2, 512, "held_out")])
def test_rows_are_whole_segments_and_weights_lie_on_the_assistant(
    tokenizer: Tokenizer, rows: int, seq_len: int, split: str
) -> None:
    source = Batches(DIRECTORY, 3, rows, seq_len, split=split)
    batch = source.batch(0)
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int32",
        "weights": "float32",
        "segments": "int32",
        "tasks": "int32",
    }
    assert all(array.shape == (rows, seq_len) for array in batch.values())
    seen = set()
    for row in range(rows):
        tokens, weights, segments, numbers = (batch[name][row] for name in ("tokens", "weights", "segments", "tasks"))
        assert segments[0] == 0 and set(np.diff(segments)) <= {0, 1}
        for segment in range(segments[-1] + 1):
            inside = segments == segment
            ids, weight = tokens[inside], weights[inside]
            (number,) = set(numbers[inside])
            name = source.task_names[number]
            seen.add(name)
            assert weight[0] == 0 and ids.max() < tokenizer.vocab_limit
            text = tokenizer.decode(ids, skip_special_tokens=False)
            if name == "text":
                assert weight[1:].all() and "<|im_start|>" not in text
                continue
            assert text.startswith("<|im_start|>") and text.endswith("<|im_end|>")
            written = tokenizer.decode(ids[weight > 0], skip_special_tokens=False)
            assert written == "".join(ASSISTANT.findall(text))
    assert seen >= {"recall", "sort", "qa"} | ({"text"} if rows == 8 else set())
    assert ("recall_long" in seen) == (seq_len >= tasks.LONG_TOKENS)


def test_mixture_sets_the_shares() -> None:
    source = Batches(DIRECTORY, 0, 16, 512, mixture={"sort": 3, "copy": 1, "text": 0})
    share = np.mean([np.bincount(source.batch(i)["tasks"].ravel(), minlength=10) for i in range(2)], axis=0) / (
        16 * 512
    )
    sort, copy, text = (share[source.task_names.index(name)] for name in ("sort", "copy", "text"))
    assert 0.65 < sort < 0.8 and 0.15 < copy < 0.3 and text < 0.1
    assert sort + copy + text == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "'test' is not one of train, held_out"),
        ({"mixture": {"dance": 1}}, "'dance' is not one of recall"),
        ({"mixture": {"sort": -1.0}}, "sort must not be negative"),
        ({"mixture": {"recall_long": 1}}, "nothing is left for rows of 512 tokens"),
        ({"batch_size": 0}, "batch_size >= 1"),
        ({"tokenizer_dir": DIRECTORY / "nowhere"}, "nowhere"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        Batches(**{"tokenizer_dir": DIRECTORY, "seed": 0, "batch_size": 1, "seq_len": 512} | arguments)


# Evaluation


class Reciter:
    """Stands in for an LLM: knows the answers, but not those of one task, and never ends those of another."""

    def __init__(self, tokenizer: Tokenizer, known: list[Example]):
        self.tokenizer = tokenizer
        self._known = {tuple(evaluate.prompt_ids(tokenizer, one)): one for one in known}
        self.calls = 0

    def generate(self, prompts, params, **options):
        assert params.temperature == 0 and options["raise_on_error"]
        self.calls += 1
        outputs = []
        for prompt in prompts if isinstance(prompts, list) else [prompts]:
            example = self._known[tuple(prompt["prompt_token_ids"])]
            text = f"{example.reasoning}\n</think>\n\n{example.answer}" if example.thinking else example.answer
            if example.task == "copy":
                text = example.reasoning
            ids = self.tokenizer.encode(text)
            reason = "length" if example.task == "sort" else "stop"
            outputs.append(SimpleNamespace(outputs=[CompletionOutput(text=text, token_ids=ids, finish_reason=reason)]))
        return outputs


@pytest.mark.parametrize("one_by_one", [False, True])
def test_evaluation_counts_right_answers_that_end(tokenizer: Tokenizer, one_by_one: bool) -> None:
    asked = [one for task in ("qa", "json", "copy", "sort") for one in tasks.held_out(task, 6)]
    asked = [dataclasses.replace(one, reasoning="...") for one in asked]
    llm = Reciter(tokenizer, asked)
    found = evaluate.answers(llm, asked, one_by_one=one_by_one)
    assert llm.calls == (len(asked) if one_by_one else 1)
    assert [answer.example for answer in found] == asked
    report = evaluate.accuracy(found)
    assert {task: row["accuracy"] for task, row in report.items()} == {"qa": 1, "json": 1, "copy": 0, "sort": 0}
    assert report["qa"]["count"] == 6 and report["qa"]["on"] == report["qa"]["off"] == 1
    assert set(report["qa"]["kinds"]) == {one.kind for one in asked if one.task == "qa"}
    assert evaluate.table(report).split("\n")[2:] == [
        "| qa | 6 | 100.0% | 100.0% | 100.0% |",
        "| json | 6 | 100.0% | 100.0% | 100.0% |",
        "| copy | 6 | 0.0% | 0.0% | 0.0% |",
        "| sort | 6 | 0.0% | 0.0% | 0.0% |",
    ]


def test_the_oracle_path_is_alone_and_in_one_piece() -> None:
    from qwen35_jax.llm import engine_config

    config = engine_config(evaluate.oracle_options(3001))
    assert config.max_num_batched_tokens == 3008 and config.max_model_len == 3008 + evaluate.MAX_TOKENS
    assert (config.dtype, config.max_num_seqs, config.kernels, config.decode_steps) == ("float32", 1, "reference", 1)
    assert not config.overlap_dispatch and config.decode_overlap == config.scheduler_policy == "off"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=x", "--tasks=dance"], "--tasks: 'dance' is not one of"),
        (["--model=x", "--count=0"], "--count must be positive"),
        ([], "--model is needed"),
        (["--model=x", "--oracel"], "oracel"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["evaluate", *flags]) == 2
    assert message in capsys.readouterr().err
