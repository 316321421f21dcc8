"""Records what the demo model says on the plainest path: the accuracy of every task, and greedy tokens to compare with.

    python -m scripts.demo_model.gate --model=examples/demo-model [--count=200]

Writes DIR/accuracy.json. Every answer is greedy, in float32, through the kernels' references, one request at a time,
no prompt in pieces. The tokens of a few held-out prompts are kept for each task: an engine in float32 must give exactly
these, whatever mode it runs in. So that this is a fair demand, a prompt is passed over where the two most probable
tokens come closer to each other, at any position, than float32 can tell apart in other orders of summation.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qwen35_jax.cli.common import CommandLine, run_command, run_with_flags
from qwen35_jax.errors import UserInputError
from qwen35_jax.text import Tokenizer, TokenizerError
from scripts.demo_model import evaluate, tasks
from scripts.demo_model.checkpointing import file_digest
from scripts.demo_model.export import TOKENIZER_FILES, WEIGHTS
from scripts.demo_model.tasks import Example

if TYPE_CHECKING:
    from qwen35_jax.llm import LLM

RECORD = "accuracy.json"
USEFUL = ("recall", "recall_long", "copy", "sort")
"""Tasks that the model must be good at."""
USEFUL_ACCURACY = 0.95
PROMPTS_SEED = 1  # of the prompts whose tokens are kept: others than those that accuracy is measured on
ANSWER_TOKENS = 48  # longest right answer among them, about
MAX_TOKENS = 64
LEAST_MARGIN = 1e-3  # between the two most probable tokens, in log-probability
FAR = 2500  # tokens from what recall_long asks for to the end of the prompt, at least
IN_PIECES = 600  # and of a prompt that every mode reads in pieces: what is asked for stands in an earlier one
LONG = 1024 - MAX_TOKENS  # longest prompt of those that an engine with small pools runs as well


@dataclasses.dataclass(frozen=True)
class Pick:
    """So many prompts of a task, up to about ``max_tokens`` long.

    What a prompt of a recall task asks for stands at least ``far`` tokens before its end.
    """

    task: str
    max_tokens: int
    count: int
    far: int = 0


PICKS = (
    Pick("recall", 256, 2),
    Pick("recall", 512, 2),
    Pick("recall", 1200, 1, far=IN_PIECES),
    Pick("recall_long", tasks.LONG_TOKENS, 1, far=FAR),
    *(Pick(task, 512, 2) for task in tasks.TASKS if not task.startswith("recall")),
)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A prompt and the tokens of its answer.

    Attributes:
        task, max_tokens, index: which held-out example it is.
        prompt_tokens: length of the prompt.
        prompt_sha256: of its ids, so that a change of the tasks or the tokenizer is noticed.
        token_ids: the greedy answer, up to ``MAX_TOKENS``.
        right: whether it is right and ended by itself.
        margin: least distance between the two most probable tokens, in log-probability.
    """

    task: str
    max_tokens: int
    index: int
    prompt_tokens: int
    prompt_sha256: str
    token_ids: tuple[int, ...]
    right: bool
    margin: float

    @property
    def name(self) -> str:
        return f"{self.task} {self.max_tokens} #{self.index}"

    @property
    def long(self) -> bool:
        """Whether the prompt is one of thousands of tokens."""
        return self.prompt_tokens > LONG

    def example(self) -> Example:
        """The example again."""
        return example_of(self.task, self.max_tokens, self.index)


@dataclasses.dataclass(frozen=True)
class Record:
    """The content of the file.

    Attributes:
        model_sha256: of the weights that it was measured on.
        tokenizer_sha256: of tokenizer.json.
        command, date, commit, jax, device: of the measurement.
        examples_seed, count: which held-out examples: the first so many of each task.
        tasks: by task, see :func:`scripts.demo_model.evaluate.accuracy`.
        kept: prompts with their tokens.
        passed_over: prompts that were not kept because of a small margin.
    """

    model_sha256: str
    tokenizer_sha256: str
    command: str
    date: str
    commit: str
    jax: str
    device: str
    examples_seed: int
    count: int
    tasks: Mapping[str, Mapping[str, Any]]
    kept: tuple[Kept, ...]
    passed_over: int

    @property
    def accuracy(self) -> float:
        """Right answers of all."""
        counts = sum(row["count"] for row in self.tasks.values())
        return sum(row["accuracy"] * row["count"] for row in self.tasks.values()) / counts

    def write(self, path: pathlib.Path) -> None:
        """Writes the file, a line for every task and every prompt."""
        values = dataclasses.asdict(self)
        tables = {"tasks": values.pop("tasks"), "kept": values.pop("kept")}
        lines = [f'"{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in values.items()]
        rows = [f'  "{name}": {json.dumps(row)}' for name, row in tables["tasks"].items()]
        lines.append('"tasks": {\n' + ",\n".join(rows) + "\n }")
        lines.append('"kept": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in tables["kept"]) + "\n ]")
        path.write_text("{\n " + ",\n ".join(lines) + "\n}\n", "utf-8")


def read(model_dir: pathlib.Path) -> Record:
    """The record of a model's directory.

    Raises:
        UserInputError: there is none, or it is malformed; says how one is made.
    """
    path = model_dir / RECORD
    try:
        values = json.loads(path.read_text("utf-8"))
        kept = tuple(Kept(**row | {"token_ids": tuple(row["token_ids"])}) for row in values.pop("kept"))
        return Record(**values, kept=kept)
    except OSError as error:
        how = f"python -m scripts.demo_model.gate --model={model_dir} writes it"
        raise UserInputError(f"{path}: {error.strerror} ({how})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserInputError(f"{path}: malformed ({error})") from error


def example_of(task: str, max_tokens: int, index: int) -> Example:
    """Held-out example number ``index`` of the prompts that are kept."""
    return tasks.held_out(task, index + 1, seed=PROMPTS_SEED, max_tokens=max_tokens)[index]


def digest(ids: Sequence[int]) -> str:
    """SHA-256 of a prompt's ids."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def candidates(tokenizer: Any, pick: Pick, count: int) -> list[tuple[int, Example]]:
    """The first ``count`` held-out examples with short answers and the distance asked for, with their numbers."""
    found: list[tuple[int, Example]] = []
    tried = 12 * count
    for index, example in enumerate(tasks.held_out(pick.task, tried, seed=PROMPTS_SEED, max_tokens=pick.max_tokens)):
        right = example.reasoning + example.answer if example.thinking else example.answer
        far = not pick.far or distance(tokenizer, example) >= pick.far
        if far and len(tokenizer.encode(right)) <= ANSWER_TOKENS and len(found) < count:
            found.append((index, example))
    if len(found) < count:
        raise ValueError(f"{pick.task}: {len(found)} of the first {tried} examples will do, need {count}")
    return found


def distance(tokenizer: Any, example: Example) -> int:
    """Tokens between the first place where the value that a recall example asks for stands, and the end."""
    text = "".join(message["content"] for message in example.messages)
    key, _, value = example.key.rpartition("|")[2].partition("=")
    place = next((i for i in _places(text, key) if value in text[i : i + 60]), len(text))
    return len(tokenizer.encode(text[place:]))


def _places(text: str, key: str) -> Iterator[int]:
    place = text.find(key)
    while place >= 0:
        yield place
        place = text.find(key, place + 1)


def kept_of(llm: LLM, pick: Pick, index: int, example: Example) -> Kept:
    """Runs one prompt, and once more with log-probabilities for the margin.

    Raises:
        ValueError: the two runs differ.
    """
    from qwen35_jax import SamplingParams

    (answer,) = evaluate.answers(llm, [example], one_by_one=True, max_tokens=MAX_TOKENS)
    ids = evaluate.prompt_ids(llm.tokenizer, example)
    told = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2)
    (output,) = llm.generate({"prompt_token_ids": ids}, told, use_tqdm=False, raise_on_error=True)
    sample = output.outputs[0]
    if tuple(sample.token_ids) != answer.token_ids or sample.logprobs is None:
        raise ValueError(f"{pick.task} #{index}: other tokens with log-probabilities asked for")
    margins = []
    for entry in sample.logprobs:
        best, second = sorted((one.logprob for one in entry.values()), reverse=True)[:2]
        margins.append(best - second)
    return Kept(
        pick.task,
        pick.max_tokens,
        index,
        len(ids),
        digest(ids),
        answer.token_ids,
        answer.right,
        round(min(margins), 6),
    )


def measure(
    model_dir: pathlib.Path, count: int, seed: int, *, say: Any = print, picks: Sequence[Pick] = PICKS, **options: Any
) -> Record:
    """Runs everything.

    Args:
        model_dir: of the model.
        count: examples a task.
        seed: of the examples.
        say: told of every task.
        picks: which prompts are kept.
        **options: of the engine, beside those of the oracle path.
    """
    import jax

    from pallas_kernels.provenance import current_commit
    from qwen35_jax import LLM
    from qwen35_jax.bench.records import own_command

    tokenizer = Tokenizer.from_dir(model_dir)
    table: dict[str, Any] = {}
    kept: list[Kept] = []
    passed_over = 0
    names = {pick.task for pick in picks}
    # Two engines: the prompts of most tasks are short, and each is padded to the longest of its engine.
    for group in _groups([task for task in tasks.TASKS if task in names]):
        examples = {task: tasks.held_out(task, count, seed=seed) for task in group}
        chosen = [(pick, candidates(tokenizer, pick, 2 * pick.count)) for pick in picks if pick.task in group]
        asked = [one for some in examples.values() for one in some] + [one for _, some in chosen for _, one in some]
        longest = max(len(evaluate.prompt_ids(tokenizer, one)) for one in asked)
        with LLM(model_dir, **options | evaluate.oracle_options(longest)) as llm:
            for pick, some in chosen:
                found = [kept_of(llm, pick, index, example) for index, example in some]
                good = [one for one in found if one.margin >= LEAST_MARGIN][: pick.count]
                passed_over += len(found) - sum(one.margin >= LEAST_MARGIN for one in found)
                if len(good) < pick.count:
                    raise UserInputError(f"{pick.task}: {len(good)} of {len(found)} prompts have margins wide enough")
                kept += good
                say(f"{pick.task}: {len(good)} prompts kept, least margin {min(one.margin for one in good):.3g}")
            for task, some in examples.items():
                started = time.monotonic()
                table |= evaluate.accuracy(evaluate.answers(llm, some, one_by_one=True))
                say(f"{task}: {table[task]['accuracy']:.1%} of {count} ({time.monotonic() - started:.0f} s)")
    return Record(
        model_sha256=file_digest(model_dir / WEIGHTS),
        tokenizer_sha256=file_digest(model_dir / TOKENIZER_FILES[0]),
        command=own_command(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=current_commit(),
        jax=jax.__version__,
        device=jax.devices()[0].device_kind,
        examples_seed=seed,
        count=count,
        tasks={task: table[task] for task in tasks.TASKS if task in table},
        kept=tuple(kept),
        passed_over=passed_over,
    )


def _groups(names: Sequence[str]) -> Iterator[list[str]]:
    for long in (False, True):
        group = [task for task in names if (task in tasks.LONG_TASKS) == long]
        if group:
            yield group


def _run(line: CommandLine) -> int:
    line.require("model")
    if line.count < 1:
        raise UserInputError(f"--count must be positive, got {line.count}")
    directory = pathlib.Path(line.model)
    record = measure(
        directory,
        line.count,
        line.examples_seed,
        say=lambda text: print(text, flush=True),
        compilation_cache_dir=line.compilation_cache_dir,
    )
    record.write(directory / RECORD)
    print(evaluate.table(record.tasks))
    print(f"{directory / RECORD}: {len(record.kept)} prompts kept, {record.passed_over} passed over")
    return 0


def main(argv: Sequence[str]) -> int:
    line = CommandLine("python -m scripts.demo_model.gate --model=DIR [--count=N]", __doc__ or "")
    line.group("Record")
    line.define("str", "model", None, "Directory of the model; the record is written there.")
    line.define("int", "count", 200, "Held-out examples of each task.")
    line.define("int", "examples_seed", 0, "Seed of the examples.")
    line.define("str", "compilation_cache_dir", None, "Where compiled programs are kept.")
    return run_with_flags(line, argv, _run, TokenizerError)


if __name__ == "__main__":
    run_command(main)
