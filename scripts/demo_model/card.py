"""Writes the demo model's card from what was recorded: no figure in it is typed by hand.

    python -m scripts.demo_model.card --model=examples/demo-model [--run_dir=DIR]

With --run_dir, the directory of the training run, training.json and loss.png in the model's directory are made first
(settings, legs, the last held-out losses; the picture of the log). The card is README.md there: card.md filled in from
config.json, accuracy.json (``python -m scripts.demo_model.gate``), training.json and the tokenizer.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from qwen35_jax.cli.common import CommandLine, run_command, run_with_flags
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.hf_config import read_json_object
from qwen35_jax.text import Tokenizer, TokenizerError
from scripts.demo_model import architecture, batches, checkpointing, corpus, curves, gate, recall, tasks
from scripts.demo_model.export import WEIGHTS
from scripts.demo_model.gate import Record
from scripts.demo_model.languages import LANGUAGES
from scripts.demo_model.settings import FIXED, Settings

CARD, TRAINING = "README.md", "training.json"
TEMPLATE = pathlib.Path(__file__).with_name("card.md")
PICTURE_DPI = 70
STAGE_FIELDS = ("batch_size", "seq_len", "total_steps")  # what the legs of a run may differ in
SHORT_PROMPT = 420  # characters of a prompt that is shown
DESCRIPTIONS: Mapping[str, str] = {
    "recall": "values of keys out of a list or running text of up to about a thousand tokens",
    "recall_long": "the same out of up to four thousand tokens, nearly always more than one thousand",
    "copy": "a list or a sentence, exactly",
    "reverse": "a list, backwards",
    "sort": "numbers up or down, English words by the alphabet",
    "arithmetic": "two-digit sums, differences and products; with thinking on, the working is shown",
    "json": "named fields out of a text as JSON, an object or a list",
    "qa": "a question about a passage, answered with its words",
    "chat": "greetings, and saying that it knows nothing about a topic",
}


def training_of(run_dir: pathlib.Path) -> dict[str, Any]:
    """What the card says of a training run, out of its checkpoint and its log.

    Raises:
        UserInputError: the run has no checkpoint.
    """
    checkpoint = checkpointing.latest(run_dir)
    if checkpoint is None:
        raise UserInputError(f"{str(run_dir)!r} has no checkpoint")
    found = checkpointing.read_provenance(checkpoint)
    log = curves.read_log(run_dir / curves.LOG)
    evaluated = [record for record in log if record["kind"] == "eval"]
    names = ("step", "settings", "task_names", "tokenizer_sha256", "legs")
    return {
        **{name: found[name] for name in names},
        "mixture": dict(batches.MIXTURE),
        "held_out": evaluated[-1] if evaluated else None,
    }


@dataclasses.dataclass(frozen=True)
class Stage:
    """Legs in a row with batches of one shape and one schedule."""

    batch_size: int
    seq_len: int
    total_steps: int
    first_step: int
    last_step: int
    seconds: float
    devices: tuple[str, ...]

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_size * self.seq_len


def stages(legs: Sequence[Mapping[str, Any]]) -> list[Stage]:
    """The stages of a run. A leg that was run again from an earlier step counts as far as it was kept."""
    found = []
    for shape, group in itertools.groupby(legs, key=lambda leg: tuple(leg[name] for name in STAGE_FIELDS)):
        some = list(group)
        devices = tuple(dict.fromkeys(leg["device"] for leg in some))
        seconds = sum(leg["seconds"] for leg in some)
        found.append(Stage(*shape, some[0]["first_step"], some[-1]["last_step"], seconds, devices))
    return found


def stage_rows(found: Sequence[Stage]) -> str:
    """The rows of the table of stages."""
    return "\n".join(
        f"| {s.first_step:,} to {s.last_step:,} | {s.batch_size} x {s.seq_len:,} | {s.total_steps:,} | "
        f"{s.tokens / 1e6:,.0f} M | {s.seconds / 60:.0f} min | {', '.join(s.devices)} |"
        for s in found
    )


def train_commands(training: Mapping[str, Any]) -> list[str]:
    """The commands of training, one a stage: flags of what decides the result and is not the default."""
    settings, defaults = training["settings"], Settings()
    common = [name for name in FIXED if name not in STAGE_FIELDS]
    changed = {name: settings[name] for name in common if settings[name] != getattr(defaults, name)}
    found, all_stages = [], stages(training["legs"])
    for stage in all_stages:
        flags = changed | {name: getattr(stage, name) for name in STAGE_FIELDS} | {"stop_after_seconds": 0}
        if len(all_stages) > 1:
            flags |= {"max_steps": stage.steps}
            if stage is not all_stages[0]:
                flags |= {"allow_changes": "true"}
        words = [f"--{name}={value}" for name, value in flags.items()]
        command = ["python -m scripts.demo_model.train --tokenizer=examples/demo-model --run_dir=out/demo-run", *words]
        found.append(" ".join(command))
    return found


def accuracy_table(record: Record) -> str:
    """A row a task, and one for all."""
    lines = ["| task | what | examples | right | thinking on | thinking off |", "|---|---|---:|---:|---:|---:|"]
    for task, row in record.tasks.items():
        cells = [f"{row[name]:.1%}" if row[name] is not None else "-" for name in ("accuracy", "on", "off")]
        lines.append(f"| {task} | {DESCRIPTIONS[task]} | {row['count']} | {' | '.join(cells)} |")
    total = sum(row["count"] for row in record.tasks.values())
    lines.append(f"| all | | {total} | {record.accuracy:.1%} | | |")
    return "\n".join(lines)


def samples(record: Record, tokenizer: Tokenizer) -> str:
    """A recorded answer of each task whose prompt is short enough, as it was given."""
    shown: dict[str, str] = {}
    for kept in record.kept:
        example = kept.example()
        question = "\n\n".join(message["content"] for message in example.messages if message["role"] != "system")
        if kept.task in shown or len(question) > SHORT_PROMPT:
            continue
        said = tokenizer.decode(kept.token_ids, skip_special_tokens=True).strip()
        how = f"thinking {'on' if example.thinking else 'off'}, {'right' if kept.right else 'wrong'}"
        shown[kept.task] = f"{kept.task} ({how}):\n\n```text\n{question}\n--\n{said}\n```"
    return "\n\n".join(shown.values())


def card(model_dir: pathlib.Path) -> str:
    """The card's text.

    Raises:
        UserInputError, TokenizerError: a file that it is made from is missing or malformed, or the record is of other
            weights.
    """
    record, training = gate.read(model_dir), read_json_object(model_dir / TRAINING)
    config, tokenizer = ModelConfig.from_hf(model_dir), Tokenizer.from_dir(model_dir)
    if record.model_sha256 != checkpointing.file_digest(model_dir / WEIGHTS):
        raise UserInputError(f"{model_dir / gate.RECORD}: measured on other weights than {WEIGHTS}")
    pack = architecture.training_pack(config)
    found, held_out = stages(training["legs"]), training["held_out"]
    languages = [language.code for language in LANGUAGES.values()]
    return TEMPLATE.read_text("utf-8").format(
        parameters=pack.num_parameters,
        megabytes=(model_dir / WEIGHTS).stat().st_size / 1e6,
        languages=", ".join(languages),
        num_languages=len(languages),
        num_kinds=len(set(tasks.TASKS) - set(tasks.LONG_TASKS)),
        config=config,
        a=config.attention,
        g=config.gdn,
        kinds={kind: config.layer_types.count(kind) for kind in ("linear_attention", "full_attention")},
        ids=tokenizer.vocab_limit,
        record=record,
        record_file=gate.RECORD,
        date=record.date[:10],
        accuracy=accuracy_table(record),
        samples=samples(record, tokenizer),
        least=gate.USEFUL_ACCURACY,
        least_of=", ".join(gate.USEFUL),
        useful=", ".join(
            f"{task} {record.tasks[task]['accuracy']:.1%}" for task in gate.USEFUL if task in record.tasks
        ),
        settings=training["settings"],
        rows=stage_rows(found),
        loss=f" Held-out loss at step {held_out['step']:,}: {held_out['nll']:.3f} nats a token." if held_out else "",
        picture=curves.PICTURE,
        mixture=", ".join(f"{name} {share:.0%}" for name, share in training["mixture"].items()),
        held_out_one_in=tasks.HELD_OUT_ONE_IN,
        prose_one_in=1 / corpus.PROSE_SHARE,
        commands="\n".join(train_commands(training)),
        max_items=tasks.MAX_ITEMS,
        long_rows=tasks.LONG_TOKENS,
        asked=int(tasks.LONG_TOKENS * recall.ROOM),
        longest=max(stage.seq_len for stage in found),
    )


def _run(line: CommandLine) -> int:
    line.require("model")
    directory = pathlib.Path(line.model)
    if line.run_dir:
        run_dir = pathlib.Path(line.run_dir)
        text = json.dumps(training_of(run_dir), indent=1, ensure_ascii=False) + "\n"
        (directory / TRAINING).write_text(text, "utf-8")
        curves.draw(curves.read_log(run_dir / curves.LOG), directory / curves.PICTURE, dpi=PICTURE_DPI)
    (directory / CARD).write_text(card(directory), "utf-8")
    print(f"{directory / CARD}: written")
    return 0


def main(argv: Sequence[str]) -> int:
    line = CommandLine("python -m scripts.demo_model.card --model=DIR [--run_dir=DIR]", __doc__ or "")
    line.group("Card")
    line.define("str", "model", None, "Directory of the model; the card is written there.")
    line.define("str", "run_dir", None, "Directory of the training run, for training.json and loss.png.")
    return run_with_flags(line, argv, _run, TokenizerError)


if __name__ == "__main__":
    run_command(main)
