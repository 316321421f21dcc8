"""Checks a finished job's output against its input, and prints a summary with a few answers.

    python scripts/summarise_answers.py --input=IN.jsonl --output=OUT.jsonl [--expected=EXPECTED.jsonl]

With --expected (``python -m scripts.demo_model.example_job`` writes such a file) it also counts the right answers of
each task and prints one question of each with its answer. Exits with 1 when a line has no record, more than one, or an
error, or when fewer answers are right than --min_right (a share of those that can be).
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

NUM_EXAMPLES = 3
LONG_ANSWER = 40  # characters; shorter ones make poor examples
WIDTH = 100
READABLE = 240  # characters of a question that is shown whole
INDENT = " " * 8


def read_jsonl(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; lines end at a newline and nowhere else."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]


def prompt_of(line: dict[str, Any]) -> str:
    """What a line asks, for people."""
    body = line.get("body", line)
    if "messages" in body:
        content = body["messages"][-1]["content"]
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    prompt = body.get("prompt", body.get("prompt_token_ids"))
    return prompt if isinstance(prompt, str) else f"{len(prompt)} token ids"


def answer_of(record: dict[str, Any] | None) -> str:
    """The text of an answer: reasoning and content of a chat, or the continuation of a prompt; empty if none."""
    if record is None:
        return ""
    choice = record["response"]["body"]["choices"][0]
    if "text" in choice:
        return choice["text"]
    message = choice["message"]
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


def content_of(record: dict[str, Any] | None, thinking: bool) -> str:
    """The answer without the reasoning; empty if there is none."""
    if record is None:
        return ""
    choice = record["response"]["body"]["choices"][0]
    if "text" not in choice:
        return choice["message"].get("content") or ""
    text = choice["text"]
    return text.partition("</think>")[2].lstrip("\n") if thinking else text


def problems(lines: Iterable[dict[str, Any]], records: Iterable[dict[str, Any]]) -> list[str]:
    """What is wrong with the records as answers to the lines; empty when nothing is."""
    wanted = collections.Counter(line["custom_id"] for line in lines)
    records = list(records)
    found = collections.Counter(record["custom_id"] for record in records)
    out = [f"{custom_id}: no record" for custom_id in wanted if custom_id not in found]
    out += [f"{custom_id}: {number} records" for custom_id, number in found.items() if number > 1]
    out += [f"{custom_id}: not in the input" for custom_id in found if custom_id not in wanted]
    out += [f"{record['custom_id']}: {record['error']['message']}" for record in records if record["error"]]
    return out


@dataclasses.dataclass(frozen=True)
class Marked:
    """An answer that could be checked.

    Attributes:
        custom_id, task: of its line.
        content: what was answered, reasoning left out.
        right: whether that is right.
    """

    custom_id: str
    task: str
    content: str
    right: bool


def mark(expected: Iterable[Mapping[str, Any]], by_id: Mapping[str, dict[str, Any]]) -> list[Marked]:
    """Checks answers; one that is missing is wrong."""
    from scripts.demo_model import tasks

    out = []
    for wanted in expected:
        content = content_of(by_id.get(wanted["custom_id"]), wanted["thinking"])
        right = tasks.right(wanted["task"], wanted["answer"], content)
        out.append(Marked(wanted["custom_id"], wanted["task"], content, right))
    return out


def shorten(text: str) -> str:
    """The text on one line of limited length."""
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def show_marked(marked: Sequence[Marked], lines: Mapping[str, dict[str, Any]]) -> None:
    """A question with its answer for each task, and how many answers are right."""
    by_task: dict[str, list[Marked]] = collections.defaultdict(list)
    for one in marked:
        by_task[one.task].append(one)
    print("One question of each task, as asked and answered:")
    for task, group in by_task.items():
        chats = [one for one in group if "messages" in lines[one.custom_id].get("body", lines[one.custom_id])]
        fitting = [one for one in chats if len(prompt_of(lines[one.custom_id])) <= READABLE] or chats or group
        one = max(fitting, key=lambda one: one.right)
        question = prompt_of(lines[one.custom_id]).replace("\n", f"\n{INDENT}")
        answer = one.content.strip().replace("\n", f"\n{INDENT}   ")
        print(f"    {task} ({one.custom_id}, {'right' if one.right else 'WRONG'})")
        print(f"{INDENT}{question}\n{INDENT}-> {answer}")
    print("Right answers:")
    for task, group in by_task.items():
        print(f"    {task:<12} {sum(one.right for one in group):>3} of {len(group)}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks and summarises the output of qwen35-generate.")
    parser.add_argument("--input", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--expected", type=pathlib.Path, help="right answers")
    parser.add_argument("--min_right", type=float, default=0.0, help="least share of them for exit code 0")
    args = parser.parse_args()
    lines, records = read_jsonl(args.input), read_jsonl(args.output)

    answered = [record for record in records if not record["error"]]
    by_id = {record["custom_id"]: record for record in answered}
    marked = mark(read_jsonl(args.expected), by_id) if args.expected else []
    if marked:
        show_marked(marked, {line["custom_id"]: line for line in lines})
    checked = {one.custom_id for one in marked}
    free = [line for line in lines if line["custom_id"] not in checked]
    long_enough = [line for line in free if len(answer_of(by_id.get(line["custom_id"]))) >= LONG_ANSWER]
    readable = [line for line in long_enough if not prompt_of(line).endswith("token ids")] or long_enough
    if readable:
        print("Some of the other answers:" if marked else "Some of the answers:")
    for line in readable[:NUM_EXAMPLES]:
        print(f"    {line['custom_id']}: {shorten(prompt_of(line))}")
        print(f"        -> {shorten(answer_of(by_id[line['custom_id']]))}")

    usage: collections.Counter[str] = collections.Counter()
    for record in answered:
        usage.update(record["response"]["body"]["usage"])
    reasons = collections.Counter(record["response"]["body"]["choices"][0]["finish_reason"] for record in answered)
    ends = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))
    found = problems(lines, records)
    right = sum(one.right for one in marked)
    if args.min_right and not marked:
        found.append("--min_right, but no answer could be compared with an expected one")
    elif right < args.min_right * len(marked):
        found.append(f"{right} of {len(marked)} answers are right, fewer than {args.min_right:.0%}")
    for problem in found[:10]:
        print(f"PROBLEM {problem}")
    if marked:
        print(f"{right} of {len(marked)} answers that can be checked are right ({right / len(marked):.1%})")
    print(
        f"{len(answered)} of {len(lines)} lines answered ({ends}); "
        f"{usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} output tokens"
    )
    print(f"Answers: {args.output}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
