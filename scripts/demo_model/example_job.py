"""Writes the example job: questions that the demo model can answer, with the answers, and beginnings of stories.

    python -m scripts.demo_model.example_job --tokenizer=examples/demo-model --output=examples

prompts.jsonl is the job: chats and completions, as batch lines and plain ones, thinking on and off, in the model's
languages, with sampling options of every kind. expected.jsonl has the right answers to its questions, which are held
out from training; stories have none. A custom_id is task, language and number. The same sources give the same files.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qwen35_jax.cli.common import CommandLine, run_command, run_with_flags
from qwen35_jax.errors import UserInputError
from qwen35_jax.text import Tokenizer, TokenizerError
from scripts.demo_model import chat, corpus, evaluate, tasks
from scripts.demo_model.languages import LANGUAGES
from scripts.demo_model.tasks import Example

PROMPTS, EXPECTED = "prompts.jsonl", "expected.jsonl"
MODEL = "qwen3.5-demo"
SEED = 2
STORY = "story"
# Questions of each task. recall_long would need a longer context than the job's.
NUMBERS = {"recall": 28, "copy": 16, "reverse": 16, "sort": 20, "arithmetic": 20, "json": 16, "qa": 24, "chat": 8}
STORIES = 56
LENGTHS = (63, 64, 65, 128, 129, 600)  # of prompts that must be there: around the 64-token grid, and a long one
LONGEST = 640
SHORT = 160  # most prompts are: a CPU answers all this
SLACK = 16  # tokens beyond the right answer that a line may use

# Questions are answered with options under which a sure model still gives its best answer,
SURE: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0},
    {},
    {"temperature": 0.2, "top_p": 0.8},
    {"temperature": 0, "logprobs": 0},
    {"temperature": 0.3, "top_k": 5, "seed": 1},
    {"temperature": 0, "min_tokens": 1},
    {"temperature": 0.3, "min_p": 0.2},
    {"temperature": 0, "stop": ["\n\n\n", "###"]},
    {"temperature": 0.2, "top_p": 0.9, "top_k": 20, "logprobs": 1},
    {"temperature": 0, "stop": "<|endoftext|>", "logprobs": 5},
    {"temperature": 0.2, "min_p": 0.1, "seed": 2},
)
# stories with any.
FREE: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5},
    {"temperature": 1.0, "top_p": 0.95, "seed": 3},
    {"temperature": 0.8, "frequency_penalty": 0.5, "stop": [".", "!", "?"], "include_stop_str_in_output": True},
    {"temperature": 0, "repetition_penalty": 1.2, "min_tokens": 6},
    {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 20},
    {"temperature": 0.6, "ignore_eos": True, "seed": 4},
    {"temperature": 0.8, "repetition_penalty": 1.1, "top_p": 0.9, "skip_special_tokens": False},
    {"temperature": 1.2, "top_k": 50, "min_p": 0.02, "stop_token_ids": True, "presence_penalty": 0.3},
    {"temperature": 0.8, "frequency_penalty": 0.3, "stop": ["\n\n"], "min_tokens": 4},
    {"temperature": 0, "ignore_eos": True, "stop_token_ids": True},
)
STORY_TOKENS = (1, 12, 24, 32, 40, 48, 64)


def questions(tokenizer: Tokenizer) -> list[Example]:
    """The examples that are asked, held out from training; thinking is on in half of them."""
    found = []
    for task, number in NUMBERS.items():
        # Of more than are needed, so that prompts of wanted lengths are among them.
        some = tasks.held_out(task, (20 if task == "recall" else 3) * number, seed=SEED)
        tried = [(one, len(evaluate.prompt_ids(tokenizer, one))) for one in some]
        chosen = []
        if task == "recall":
            chosen = [next(one for one, length in tried if length == wanted) for wanted in LENGTHS[:-1]]
            chosen += [one for one, length in tried if LENGTHS[-1] <= length <= LONGEST][:2]
        seen = {one.key for one in chosen}
        for one, length in tried:
            if len(chosen) < number and length <= SHORT and (one.key not in seen or task == "chat"):
                chosen.append(one)
                seen.add(one.key)
        if len(chosen) < number:
            raise ValueError(f"{task}: {len(chosen)} prompts of fitting lengths, {number} are needed")
        found += chosen
    return found


def _batch(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"method": "POST", "url": url, "body": {"model": MODEL, **body}}


def _for_chat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a chat's body has them: log-probabilities by two keys."""
    out = dict(options)
    if (number := out.pop("logprobs", None)) is not None:
        out |= {"logprobs": True, "top_logprobs": number}
    return out


def _chat_body(example: Example, number: int, options: Mapping[str, Any], limit: int) -> dict[str, Any]:
    messages = [dict(message) for message in example.messages]
    if number % 7 == 3:  # content in parts
        messages[-1]["content"] = [{"type": "text", "text": messages[-1]["content"]}]
    body: dict[str, Any] = {"messages": messages, **options}
    body["max_completion_tokens" if number % 5 == 2 else "max_tokens"] = limit
    if not (example.thinking and number % 3 == 0):  # the template thinks unless told otherwise
        body["chat_template_kwargs"] = {"enable_thinking": example.thinking}
    return body


def question_line(example: Example, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """A line that asks an example; ``number`` decides its form and options."""
    right = chat.pieces(example)[-1][0]
    limit = len(tokenizer.encode(right)) + SLACK
    options, ids = dict(SURE[number % len(SURE)]), evaluate.prompt_ids(tokenizer, example)
    form = number % 12
    if form < 6:
        return _batch("/v1/chat/completions", _chat_body(example, number, _for_chat(options), limit))
    if form < 9:
        return _chat_body(example, number, options, limit)
    text = chat.prompt(example.messages, example.thinking)
    match form:
        case 9:
            return _batch(
                "/v1/completions", {"prompt": text if number % 24 < 12 else ids, **options, "max_tokens": limit}
            )
        case 10:
            return {"prompt": text, **options, "max_tokens": limit}
    return {"prompt_token_ids": ids, **options, "max_tokens": limit}


def story_line(number: int, tokenizer: Tokenizer) -> tuple[str, dict[str, Any]]:
    """Language and line of a story's beginning, to be continued."""
    language = list(LANGUAGES.values())[number % len(LANGUAGES)]
    rng = np.random.default_rng([SEED, number])
    text = corpus.story(rng, language)
    cut = (0.1, 0.25, 0.5)[number // len(LANGUAGES) % 3]
    ids = tokenizer.encode(text)
    ids = ids[: max(1, int(cut * len(ids)))] if number else ids[:1]
    begun = tokenizer.decode(ids, skip_special_tokens=False)
    options = dict(FREE[number % len(FREE)])
    if options.get("stop_token_ids"):
        options["stop_token_ids"] = [tokenizer.encode(text)[0] for text in ("\n", "!", "?")]
    options["max_tokens"] = STORY_TOKENS[number % len(STORY_TOKENS)]
    if "min_tokens" in options:
        options["min_tokens"] = min(options["min_tokens"], options["max_tokens"])
    broken = "\ufffd" in begun  # cut within a character: only ids can say that
    if number % 4 == 0 or broken:
        return language.code, {"prompt_token_ids": ids, **options}
    if number % 4 == 1:
        return language.code, _batch("/v1/completions", {"prompt": begun, **options})
    if number % 8 == 2:
        return language.code, _batch("/v1/completions", {"prompt": ids, **options})
    return language.code, {"prompt": begun, **options}


def job(tokenizer: Tokenizer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of the job, tasks and stories mixed, and the right answers in the same order."""
    lines, expected = [], []
    rows: list[tuple[str, str, Callable[[str], None]]] = []

    def ask(example: Example, number: int, custom_id: str) -> None:
        lines.append({"custom_id": custom_id, **question_line(example, number, tokenizer)})
        answer = {"task": example.task, "thinking": example.thinking, "answer": example.answer}
        expected.append({"custom_id": custom_id, **answer})

    def tell(line: dict[str, Any], custom_id: str) -> None:
        lines.append({"custom_id": custom_id, **line})

    for number, example in enumerate(questions(tokenizer)):
        # Forms and options go round within a task, too: numbers of tasks are no multiples of theirs.
        rows.append((example.task, example.language, lambda name, e=example, n=number: ask(e, n, name)))
    for number in range(STORIES):
        language, line = story_line(number, tokenizer)
        rows.append((STORY, language, lambda name, line=line: tell(line, name)))
    for count, place in enumerate(np.random.default_rng(SEED).permutation(len(rows)).tolist(), start=1):
        task, language, add = rows[place]
        add(f"{task}-{language}-{count:03d}")
    return lines, expected


def as_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """JSON lines."""
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _run(line: CommandLine) -> int:
    line.require("tokenizer", "output")
    lines, expected = job(Tokenizer.from_dir(line.tokenizer))
    output = pathlib.Path(line.output)
    if not output.is_dir():
        raise UserInputError(f"--output: {output} is no directory")
    (output / PROMPTS).write_text(as_text(lines), "utf-8")
    (output / EXPECTED).write_text(as_text(expected), "utf-8")
    print(f"{output / PROMPTS}: {len(lines)} lines, {len(expected)} of them with a right answer")
    return 0


def main(argv: Sequence[str]) -> int:
    line = CommandLine("python -m scripts.demo_model.example_job --tokenizer=DIR --output=DIR", __doc__ or "")
    line.group("Example job")
    line.define("str", "tokenizer", None, "Directory of the demo model's tokenizer.")
    line.define("str", "output", None, "Directory for prompts.jsonl and expected.jsonl.")
    return run_with_flags(line, argv, _run, TokenizerError)


if __name__ == "__main__":
    run_command(main)
