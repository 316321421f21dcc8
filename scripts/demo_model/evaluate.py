"""How many held-out examples of each task a model answers rightly.

    python -m scripts.demo_model.evaluate --model=examples/demo-model [--tasks=recall,sort] [--count=100] [--oracle]

Answers are greedy and go through the engine with the options given; ``--oracle`` takes the plainest path instead:
float32, the kernels' references, one request at a time, no prompt in pieces. ``--outputs`` writes every answer with its
token ids, so that two runs can be compared.
"""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qwen35_jax.cli.common import CommandLine, run_command, run_with_flags
from qwen35_jax.errors import UserInputError
from qwen35_jax.text.reasoning import split_reasoning
from scripts.demo_model import tasks
from scripts.demo_model.tasks import Example

if TYPE_CHECKING:
    from qwen35_jax.llm import LLM

MAX_TOKENS = 384  # the longest right answer is shorter by far
GRID = 64
# Whatever else the engine has is off: one row, references, nothing overlaps, results are read at once.
ORACLE_OPTIONS: Mapping[str, Any] = {
    "dtype": "float32",
    "kernels": "reference",
    "max_num_seqs": 1,
    "scheduler_policy": "off",
    "decode_overlap": "off",
    "decode_steps": 1,
    "overlap_dispatch": False,
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model said to an example.

    Attributes:
        example: the example.
        token_ids: all that was generated.
        text: the same as text, reasoning included.
        right: whether the part after the reasoning is right and ended by itself.
    """

    example: Example
    token_ids: tuple[int, ...]
    text: str
    right: bool


def oracle_options(prompt_tokens: int) -> dict[str, Any]:
    """Engine options of the oracle path for prompts of up to so many tokens: each is one step."""
    budget = -(-max(prompt_tokens, 1) // GRID) * GRID
    return {**ORACLE_OPTIONS, "max_num_batched_tokens": budget, "max_model_len": budget + MAX_TOKENS}


def prompt_ids(tokenizer: Any, example: Example) -> list[int]:
    """The prompt as the model's own chat template and tokenizer make it."""
    return tokenizer.encode_chat(example.messages, enable_thinking=example.thinking)


def answers(
    llm: "LLM", examples: Sequence[Example], *, one_by_one: bool = False, max_tokens: int | None = None
) -> list[Answer]:
    """Greedy answers to examples, in their order.

    Args:
        llm: the model with its tokenizer.
        examples: what to ask.
        one_by_one: wait for each answer before the next question, so that no request has company.
        max_tokens: most tokens of an answer; ``MAX_TOKENS`` when None.

    Raises:
        GenerationError: the engine failed on a request.
    """
    from qwen35_jax import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens or MAX_TOKENS)
    prompts = [{"prompt_token_ids": prompt_ids(llm.tokenizer, example)} for example in examples]
    if one_by_one:
        outputs = [llm.generate(prompt, greedy, use_tqdm=False, raise_on_error=True)[0] for prompt in prompts]
    else:
        outputs = llm.generate(prompts, greedy, use_tqdm=False, raise_on_error=True)
    out = []
    for example, output in zip(examples, outputs, strict=True):
        sample = output.outputs[0]
        _, content = split_reasoning(sample.text, example.thinking)
        right = sample.finish_reason == "stop" and tasks.check(example, content)
        out.append(Answer(example, tuple(sample.token_ids), sample.text, right))
    return out


def accuracy(found: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """By task: ``count``, ``accuracy``, and accuracies with thinking ``on`` and ``off`` and by ``kinds``."""
    by_task: dict[str, list[Answer]] = collections.defaultdict(list)
    for answer in found:
        by_task[answer.example.task].append(answer)
    report = {}
    for task, group in by_task.items():
        kinds = sorted({answer.example.kind for answer in group})
        report[task] = {
            "count": len(group),
            "accuracy": _share(group),
            "on": _share([answer for answer in group if answer.example.thinking]),
            "off": _share([answer for answer in group if not answer.example.thinking]),
            "kinds": {kind: _share([answer for answer in group if answer.example.kind == kind]) for kind in kinds},
        }
    return report


def table(report: Mapping[str, Mapping[str, Any]]) -> str:
    """The report as a Markdown table."""
    lines = ["| task | examples | accuracy | thinking on | thinking off |", "|---|---:|---:|---:|---:|"]
    for task, row in report.items():
        cells = [f"{row[name]:.1%}" if row[name] is not None else "-" for name in ("accuracy", "on", "off")]
        lines.append(f"| {task} | {row['count']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(group: Sequence[Answer]) -> float | None:
    return round(sum(answer.right for answer in group) / len(group), 4) if group else None


def command_line() -> CommandLine:
    """The flags of this command."""
    line = CommandLine("python -m scripts.demo_model.evaluate --model=DIR [--flag=value ...]", __doc__ or "")
    line.group("Evaluation")
    line.define("str", "model", None, "Directory of the model.")
    line.define("str", "tasks", ",".join(tasks.TASKS), "Which tasks, separated by commas.")
    line.define("int", "count", 200, "Held-out examples of each task.")
    line.define("int", "examples_seed", 0, "Seed of the examples.")
    line.define("bool", "oracle", False, "One request at a time on the plainest path, whatever the options below say.")
    line.define("str", "json", None, "File for the report.")
    line.define("str", "outputs", None, "JSONL file for the answers with their token ids.")
    line.define_engine()
    return line


def _run(line: CommandLine) -> int:
    line.require("model")
    names = line.tasks.split(",")
    for name in names:
        if name not in tasks.TASKS:
            raise UserInputError(f"--tasks: {name!r} is not one of {', '.join(tasks.TASKS)}")
    if line.count < 1:
        raise UserInputError(f"--count must be positive, got {line.count}")

    from qwen35_jax import LLM
    from qwen35_jax.text import Tokenizer

    examples = [one for name in names for one in tasks.held_out(name, line.count, seed=line.examples_seed)]
    options = line.engine_options()
    if line.oracle:
        tokenizer = Tokenizer.from_dir(line.model)
        longest = max(len(prompt_ids(tokenizer, example)) for example in examples)
        options |= oracle_options(longest)
    with LLM(line.model, **options) as llm:
        found = answers(llm, examples, one_by_one=line.oracle)
    report = accuracy(found)
    print(table(report))
    if line.json:
        path = pathlib.Path(line.json)
        content = {"options": options, "seed": line.examples_seed, "tasks": report}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if line.outputs:
        with pathlib.Path(line.outputs).open("w", encoding="utf-8") as file:
            for answer in found:
                row = {**dataclasses.asdict(answer.example), "right": answer.right, "text": answer.text}
                file.write(json.dumps({**row, "token_ids": answer.token_ids}, ensure_ascii=False) + "\n")
    return 0


def main(argv: Sequence[str]) -> int:
    return run_with_flags(command_line(), argv, _run)


if __name__ == "__main__":
    run_command(main)
