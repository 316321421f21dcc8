"""Checks a finished job's output against its input, and prints a summary with a few answers.

    python scripts/summarise_answers.py --input=IN.jsonl --output=OUT.jsonl

Exits with 1 when a line has no record, more than one, or an error. Needs the standard library only.
"""

import argparse
import collections
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

NUM_EXAMPLES = 3
LONG_ANSWER = 40  # characters; shorter ones make poor examples
WIDTH = 100


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


def shorten(text: str) -> str:
    """The text on one line of limited length."""
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks and summarises the output of qwen35-generate.")
    parser.add_argument("--input", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    args = parser.parse_args()
    lines, records = read_jsonl(args.input), read_jsonl(args.output)

    answered = [record for record in records if not record["error"]]
    by_id = {record["custom_id"]: record for record in answered}
    print("Some of the answers (from a demo checkpoint: random weights, so random text):")
    long_enough = [line for line in lines if len(answer_of(by_id.get(line["custom_id"]))) >= LONG_ANSWER]
    for line in long_enough[:NUM_EXAMPLES]:
        print(f"    {line['custom_id']}: {shorten(prompt_of(line))}")
        print(f"        -> {shorten(answer_of(by_id[line['custom_id']]))}")

    usage: collections.Counter[str] = collections.Counter()
    for record in answered:
        usage.update(record["response"]["body"]["usage"])
    reasons = collections.Counter(record["response"]["body"]["choices"][0]["finish_reason"] for record in answered)
    ends = ", ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))
    found = problems(lines, records)
    for problem in found[:10]:
        print(f"PROBLEM {problem}")
    print(
        f"{len(answered)} of {len(lines)} lines answered ({ends}); "
        f"{usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} output tokens"
    )
    print(f"Answers: {args.output}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
