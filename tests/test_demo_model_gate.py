"""The record of the demo model's answers and the gpu_check section that holds to it, on a model of two layers."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from qwen35_jax.errors import UserInputError
from qwen35_jax.text import Tokenizer
from scripts.demo_model import architecture, evaluate, export, gate, tasks
from scripts.demo_model.evaluate import Answer
from scripts.demo_model.gate import Pick
from scripts.gpu_checks import tasks as section_of_tasks
from scripts.gpu_checks.report import Section
from tests.engine_kit import Result
from tests.engine_modes import MODES

TOKENIZER = pathlib.Path(__file__).resolve().parent.parent / "examples" / "demo-model"
PICKS = (Pick("recall", 256, 2), Pick("sort", 512, 2))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Random weights, wide apart in their logits."""
    output = tmp_path_factory.mktemp("demo") / "model"
    config = architecture.config_of_tokenizer(TOKENIZER, intermediate_size=64)
    config = dataclasses.replace(config, layer_types=("linear_attention", "full_attention"))
    pack = architecture.training_pack(config)
    leaves = architecture.initial_params(pack, seed=5)
    leaves = {name: 10 * value if value.ndim > 1 and value.std() < 0.03 else value for name, value in leaves.items()}
    export.write_hf_dir(output, config, leaves, TOKENIZER)
    return output


@pytest.fixture(scope="module")
def record(directory: pathlib.Path) -> gate.Record:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "MAX_TOKENS", 8)
        patch.setattr(gate, "MAX_TOKENS", 12)
        told: list[str] = []
        found = gate.measure(directory, 1, 0, say=told.append, picks=PICKS)
        found.write(directory / gate.RECORD)
    assert [line.partition(":")[0] for line in told].count("sort") == 2, "prompts and accuracy of every task"
    return found


def test_record_comes_back_from_its_file(directory: pathlib.Path, record: gate.Record) -> None:
    assert gate.read(directory) == record
    assert record.model_sha256 == gate.file_digest(directory / export.WEIGHTS)
    assert set(record.tasks) == {"recall", "sort"}
    assert len((directory / gate.RECORD).read_text().splitlines()) < 30, "a line for each task and prompt"


def test_kept_prompts_are_what_was_asked_for(record: gate.Record) -> None:
    assert [(one.task, one.max_tokens) for one in record.kept] == [
        *[("recall", 256)] * 2,
        *[("sort", 512)] * 2,
    ]
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    for one in record.kept:
        ids = evaluate.prompt_ids(tokenizer, one.example())
        assert (len(ids), gate.digest(ids)) == (one.prompt_tokens, one.prompt_sha256)
        assert 0 < len(one.token_ids) <= 12 and one.margin >= gate.LEAST_MARGIN
        assert not one.long


def test_long_prompts_are_long_and_ask_for_what_is_far_away() -> None:
    (pick,) = (pick for pick in gate.PICKS if pick.task == "recall_long")
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    for index, example in gate.candidates(tokenizer, pick, 2):
        assert example == gate.example_of(pick.task, pick.max_tokens, index)
        assert gate.FAR < gate.distance(tokenizer, example) < len(evaluate.prompt_ids(tokenizer, example)) < 3700


def test_distance_is_counted_from_the_value() -> None:
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    fillers = "The sun was shining. " * 50
    example = dataclasses.replace(
        gate.example_of("recall", 256, 1),
        messages=({"role": "user", "content": f"{fillers}cat: 12\nrope: 7\n{fillers}What is the value of cat?"},),
        key="rope=7|cat=12",
    )
    after = len(tokenizer.encode(f"cat: 12\nrope: 7\n{fillers}What is the value of cat?"))
    assert gate.distance(tokenizer, example) == after


def test_a_record_that_is_missing_or_broken_is_a_user_error(tmp_path: pathlib.Path, directory, record) -> None:
    with pytest.raises(UserInputError, match="python -m scripts.demo_model.gate --model=.* writes it"):
        gate.read(tmp_path)
    values = json.loads((directory / gate.RECORD).read_text())
    for broken in ("{", json.dumps(values | {"more": 1}), json.dumps({**values, "kept": [{}]})):
        (tmp_path / gate.RECORD).write_text(broken)
        with pytest.raises(UserInputError, match="malformed"):
            gate.read(tmp_path)


def test_accuracy_of_all_is_weighted_by_counts(record: gate.Record) -> None:
    rows = {"copy": {"count": 3, "accuracy": 1.0}, "sort": {"count": 1, "accuracy": 0.0}}
    assert dataclasses.replace(record, tasks=rows).accuracy == 0.75


@pytest.mark.parametrize(
    ("flags", "message"),
    [([], "--model is needed"), (["--model=x", "--count=0"], "--count must be"), (["--model=/no/such"], "/no/such")],
)
def test_wrong_flags_are_named(flags: list[str], message: str, capsys) -> None:
    assert gate.main(["gate", *flags]) == 2
    assert message in capsys.readouterr().err


# The section of gpu_check


def test_section_passes_on_its_own_record(directory, record, monkeypatch) -> None:
    """Float32 gives the recorded tokens in every mode that its programs serve; both dtypes answer the examples."""
    monkeypatch.setattr(evaluate, "MAX_TOKENS", 8)
    monkeypatch.setattr(gate, "MAX_TOKENS", 12)
    monkeypatch.setattr(section_of_tasks, "BATCHED_TOKENS", 128)
    section = Section("tasks")
    section_of_tasks.tasks_section(section, directory, count=1, rows=4)
    failed = [str(check) for check in section.checks if not check.passed]
    assert section.error is None and failed == []
    served = section_of_tasks.served_modes()
    assert {"off", "stream", "stream auto", "stream small budget", "one at a time"} <= set(served)
    names = {check.name for check in section.checks}
    assert {f"float32, {mode}: of 4 prompts, with other tokens than the record's" for mode in served} <= names
    assert "points of accuracy between them, 9 examples" in names
    assert set(section.numbers["accuracy in bfloat16"]) == set(tasks.TASKS)
    (skipped,) = (what for what, _ in section.skipped)
    assert all(name in skipped for name in MODES if name not in served)


def answers(number: int, right: int) -> list[Answer]:
    example = gate.example_of("sort", 512, 0)
    return [Answer(example, (i,), "", i < right) for i in range(number)]


@pytest.mark.parametrize(("right", "passed"), [(980, True), (975, True), (985, True), (974, False), (986, False)])
def test_accuracy_may_be_half_a_point_away(record, right: int, passed: bool) -> None:
    section = Section("tasks")
    section_of_tasks.check_accuracy(section, answers(1000, 980), answers(1000, right), record, same=False)
    assert section.passed == passed
    assert section.numbers["answers of the very same tokens in both"] == "1000 of 1000"


@pytest.mark.parametrize(("right", "passed"), [(980, True), (974, False), (0, False)])
def test_float32_is_held_to_the_record(record, right: int, passed: bool) -> None:
    """What only company spoils, it spoils in both dtypes alike."""
    record = dataclasses.replace(record, tasks={"sort": record.tasks["sort"] | {"accuracy": 0.98}})
    section = Section("tasks")
    section_of_tasks.check_accuracy(section, answers(1000, right), answers(1000, right), record, same=True)
    assert section.passed == passed


def test_one_other_token_is_a_failure(record) -> None:
    section = Section("tasks")
    found = {one.name: Result(list(one.token_ids)) for one in record.kept}
    section_of_tasks.check_tokens(section, "float32, off", found, record.kept)
    assert section.passed
    found[record.kept[1].name].tokens[-1] += 1
    section_of_tasks.check_tokens(section, "float32, off", found, record.kept)
    assert not section.passed
    assert section.numbers["float32, off: other tokens than the record's"] == [record.kept[1].name]


def test_another_model_than_the_recorded_one_is_noticed(directory, record, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(section_of_tasks, "held_out", lambda count, seed: (_ for _ in ()).throw(RuntimeError("enough")))
    section = Section("tasks")
    with pytest.raises(RuntimeError, match="enough"):
        section_of_tasks.tasks_section(section, directory, count=1, rows=4)
    assert section.passed
    other = tmp_path / "other"
    other.mkdir()
    for path in directory.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / export.WEIGHTS).write_bytes(np.zeros(8, np.uint8).tobytes())
    with pytest.raises(RuntimeError, match="enough"):
        section_of_tasks.tasks_section(section, other, count=1, rows=4)
    assert not section.passed
