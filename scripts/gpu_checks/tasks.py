"""The section over the demo model: the recorded tokens in float32, and as many right answers in bfloat16."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from qwen35_jax import LLM, SamplingParams
from qwen35_jax.cache import PAGE_SIZE
from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.params import FlatParams
from qwen35_jax.text import Tokenizer
from qwen35_jax.weights import load_params
from scripts.demo_model import evaluate, gate, tasks
from scripts.demo_model.checkpointing import file_digest
from scripts.demo_model.evaluate import Answer
from scripts.demo_model.export import WEIGHTS
from scripts.gpu_checks.report import Section
from tests.engine_kit import Job, Kit, Model, Result, drain, submit_all
from tests.engine_modes import MODES

POINTS = 0.5  # that accuracy in bfloat16 may be away from float32
BATCHED_TOKENS = 2048
PAGES_PER_ROW = 24  # prompts of a thousand tokens and more are few


@dataclasses.dataclass(frozen=True)
class Demo:
    """The demo model as the section needs it.

    Attributes:
        directory: of the model, with its record.
        rows: sequences at once.
        max_model_len: longest prompt + output.
    """

    directory: Path
    rows: int
    max_model_len: int

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_dir(self.directory)

    @functools.cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_hf(self.directory)

    def kit(self, dtype: str, overlap: str) -> Kit:
        """Few programs, the greedy ones alone: all rows, one size of chunk."""
        most = -(-self.max_model_len // PAGE_SIZE)
        options = EngineConfig(
            dtype=dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.rows,
            max_num_batched_tokens=BATCHED_TOKENS,
            decode_overlap=overlap,
            num_kv_pages=max(2 * most, self.rows * PAGES_PER_ROW),
            skip_tokenizer_init=True,
        )
        ends = sorted({*self.config.eos_token_ids, *self.tokenizer.eos_token_ids})
        model = Model(self.config, self._load, ends, self.tokenizer.vocab_limit, variants=("greedy",))
        ladder = {"token_rungs": [BATCHED_TOKENS], "row_rungs": [self.rows], "width_rungs": [most]}
        return Kit(options, ladder, model)

    def _load(self, device: jax.Device, dtype: jnp.dtype) -> FlatParams:
        return load_params(self.directory, self.config, dtype, device=device)

    def answers(self, section: Section, what: str, kit: Kit, examples: Sequence[tasks.Example]) -> list[Answer]:
        """Greedy answers through an ordinary engine, all examples at once."""
        engine = kit.engine(decode_overlap="off")
        with LLM.from_engine(engine, self.config, self.tokenizer) as llm:
            found = evaluate.answers(llm, examples)
            section.equal(f"{what}: compiles after warm-up", engine.compiles_after_warmup, 0, quiet=True)
        return found


def held_out(count: int, seed: int) -> list[tasks.Example]:
    """The first so many held-out examples of every task: those of the record, if its count is the same."""
    return [one for task in tasks.TASKS for one in tasks.held_out(task, count, seed=seed)]


def check_accuracy(
    section: Section, exact: Sequence[Answer], rounded: Sequence[Answer], record: gate.Record, *, same: bool
) -> None:
    """Right answers in bfloat16 against float32, over all tasks, and in float32 against the record, task by task.

    Args:
        section: what to fill.
        exact: answers in float32.
        rounded: answers to the same examples in bfloat16.
        record: what was recorded on the plainest path.
        same: whether the examples are those of the record.
    """
    by_task = {"float32": evaluate.accuracy(exact), "bfloat16": evaluate.accuracy(rounded)}
    for dtype, report in by_task.items():
        section.number(f"accuracy in {dtype}", {task: row["accuracy"] for task, row in report.items()})
    if same:
        section.number("recorded accuracy", {task: row["accuracy"] for task, row in record.tasks.items()})
        # Else a fault that only company brings, in both dtypes alike, would show nowhere.
        for task, row in record.tasks.items():
            off = round(100 * abs(by_task["float32"][task]["accuracy"] - row["accuracy"]), 6)
            section.at_most(f"{task}: points between float32 and the record", off, POINTS)
    else:
        section.skip("the recorded accuracy beside it", f"it is of {record.count} examples of each task")
    shares = [sum(answer.right for answer in found) / len(found) for found in (exact, rounded)]
    equal = sum(a.token_ids == b.token_ids for a, b in zip(exact, rounded, strict=True))
    section.number("answers of the very same tokens in both", f"{equal} of {len(exact)}")
    section.number("right answers in float32 and bfloat16", shares)
    section.at_least("examples", len(exact), len(tasks.TASKS))
    apart = round(100 * abs(shares[0] - shares[1]), 6)
    section.at_most(f"points of accuracy between them, {len(exact)} examples", apart, POINTS)


def check_tokens(section: Section, what: str, found: Mapping[str, Result], kept: Sequence[gate.Kept]) -> None:
    """Exactly the recorded tokens."""
    wrong = [one.name for one in kept if tuple(found[one.name].tokens) != one.token_ids]
    if wrong:
        section.number(f"{what}: other tokens than the record's", wrong)
    section.equal(f"{what}: of {len(kept)} prompts, with other tokens than the record's", len(wrong), 0)


def served_modes() -> dict[str, Mapping[str, object]]:
    """Changes of the registered modes that programs of ``stream`` and one decode step serve."""
    return {name: m.changes for name, m in MODES.items() if m.programs == "main" and m.options.decode_steps == 1}


def tasks_section(section: Section, directory: Path, *, count: int, rows: int) -> None:
    """The gate of the demo model: the same tokens in float32 in every mode, as many right answers in bfloat16.

    Args:
        section: what to fill.
        directory: of the demo model.
        count: held-out examples of each task.
        rows: sequences at once.

    Raises:
        UserInputError: the directory lacks the weights or the record.
    """
    record = gate.read(directory)
    section.equal("the record is of these weights", record.model_sha256, file_digest(directory / WEIGHTS), quiet=True)
    examples = held_out(count, record.examples_seed)
    tokenizer = Tokenizer.from_dir(directory)
    prompts = {one.name: tuple(evaluate.prompt_ids(tokenizer, one.example())) for one in record.kept}
    same = all(gate.digest(prompts[one.name]) == one.prompt_sha256 for one in record.kept)
    section.equal("the recorded prompts are made again", same, True, quiet=True)
    longest = max(len(evaluate.prompt_ids(tokenizer, one)) for one in examples)
    longest = max(longest + evaluate.MAX_TOKENS, max(map(len, prompts.values())) + gate.MAX_TOKENS)
    demo = Demo(directory, rows, -(-longest // PAGE_SIZE) * PAGE_SIZE)

    kit = demo.kit("float32", "stream")
    params = SamplingParams(temperature=0.0, max_tokens=gate.MAX_TOKENS)
    jobs = [Job(name, ids, params) for name, ids in prompts.items()]
    for name, changes in served_modes().items():
        engine = kit.engine(**changes)
        submit_all(engine, jobs)
        check_tokens(section, f"float32, {name}", drain(engine), record.kept)
        section.equal(f"float32, {name}: ran as its name says", MODES[name].shows(engine, kit), True, quiet=True)
        section.equal(f"float32, {name}: compiles after warm-up", engine.compiles_after_warmup, 0, quiet=True)
        engine.close()
    others = ", ".join(name for name in MODES if name not in served_modes())
    section.skip(f"modes {others}", "they need other programs; tests/end_to_end/test_tasks.py runs them")
    exact = demo.answers(section, "float32", kit, examples)
    del kit
    rounded = demo.answers(section, "bfloat16", demo.kit("bfloat16", "off"), examples)
    check_accuracy(section, exact, rounded, record, same=count == record.count)
