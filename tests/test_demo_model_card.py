"""The demo model's card says what the files beside it say, and how to train again."""

import dataclasses
import hashlib
import json
import pathlib
import shutil

import pytest

from qwen35_jax.text import Tokenizer
from scripts.demo_model import card, checkpointing, curves, evaluate, gate, tasks, train
from scripts.demo_model.export import TOKENIZER_FILES, WEIGHTS
from scripts.demo_model.settings import FIXED, Settings

TOKENIZER = pathlib.Path(__file__).resolve().parent.parent / "examples" / "demo-model"
SETTINGS = Settings(seed=7, learning_rate=0.004, total_steps=900)


def leg(first: int, last: int, seq_len: int) -> dict:
    shape = {"batch_size": 64, "seq_len": seq_len, "total_steps": 900 if seq_len > 2000 else 1800}
    return {"first_step": first, "last_step": last, "seconds": 120.0, "device": "NVIDIA H200", **shape}


TRAINING = {
    "step": 900,
    "settings": dataclasses.asdict(SETTINGS),
    "task_names": list(tasks.TASKS),
    "tokenizer_sha256": "0",
    "legs": [leg(0, 300, 1024), leg(300, 500, 1024), leg(500, 900, 4096)],
    "mixture": {"recall": 0.75, "text": 0.25},
    "held_out": {"kind": "eval", "step": 900, "nll": 0.123},
}


def kept(task: str, max_tokens: int, index: int) -> gate.Kept:
    """A right answer."""
    tokenizer, example = Tokenizer.from_dir(TOKENIZER), gate.example_of(task, max_tokens, index)
    ids = evaluate.prompt_ids(tokenizer, example)
    said = f"{example.reasoning}\n</think>\n\n{example.answer}" if example.thinking else example.answer
    answer = (*tokenizer.encode(said), tokenizer.eos_token_ids[0])
    return gate.Kept(task, max_tokens, index, len(ids), gate.digest(ids), answer, True, 0.5)


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    for name in (*TOKENIZER_FILES, "config.json", "generation_config.json"):
        shutil.copy(TOKENIZER / name, tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"weights")
    shares = dict(zip(tasks.TASKS, (0.991, 0.952, 0.983, 0.874, 0.965, 0.716, 0.847, 0.938, 0.999), strict=True))
    rows = {task: {"count": 50, "accuracy": x, "on": x, "off": None, "kinds": {}} for task, x in shares.items()}
    gate.Record(
        model_sha256=hashlib.sha256(b"weights").hexdigest(),
        tokenizer_sha256="0",
        command="python -m scripts.demo_model.gate --model=examples/demo-model",
        date="2026-01-02T03:04:05Z",
        commit="abc",
        jax="0.11",
        device="some device",
        examples_seed=0,
        count=50,
        tasks=rows,
        kept=(kept("recall", 512, 0), kept("sort", 512, 0), kept("sort", 512, 1), kept("recall_long", 4096, 3)),
        passed_over=0,
    ).write(tmp_path / gate.RECORD)
    (tmp_path / card.TRAINING).write_text(json.dumps(TRAINING))
    return tmp_path


def test_card_states_what_was_recorded(directory: pathlib.Path) -> None:
    text = card.card(directory)
    for figure in ("99.1%", "95.2%", "71.6%", "| all | | 450 | 91.8% |", "2026-01-02, some device", "0.123 nats"):
        assert figure in text, figure
    assert set(card.DESCRIPTIONS) == set(tasks.TASKS)
    assert "| 0 to 500 | 64 x 1,024 | 1,800 | 33 M | 4 min | NVIDIA H200 |\n" in text
    assert "| 500 to 900 | 64 x 4,096 | 900 | 105 M | 2 min |" in text
    assert "5,595,160 parameters" in text and "recall 75%, text 25%" in text and "learning rate of 0.004" in text
    assert "{" not in text.replace('{"', ""), "nothing left to fill in"
    record = gate.read(directory)
    example = record.kept[1].example()
    assert f"sort (thinking on, right):\n\n```text\n{example.messages[-1]['content']}\n--\n{example.reasoning}" in text
    assert text.count("\n--\n") == 2, "one of a task, and none whose prompt is long"


def test_card_of_other_weights_is_refused(directory: pathlib.Path, capsys) -> None:
    assert card.main(["card", f"--model={directory}"]) == 0
    assert (directory / card.CARD).read_text("utf-8") == card.card(directory)
    (directory / WEIGHTS).write_bytes(b"other")
    assert card.main(["card", f"--model={directory}"]) == 2
    assert "measured on other weights" in capsys.readouterr().err


@pytest.mark.parametrize("missing", [gate.RECORD, card.TRAINING, "tokenizer.json", "config.json"])
def test_a_missing_file_is_named(directory: pathlib.Path, missing: str, capsys) -> None:
    (directory / missing).unlink()
    assert card.main(["card", f"--model={directory}"]) == 2
    assert missing in capsys.readouterr().err


def test_commands_train_the_same_model_again(capsys) -> None:
    commands = card.train_commands(TRAINING)
    assert [command.split()[:3] for command in commands] == [["python", "-m", "scripts.demo_model.train"]] * 2
    first, second = (dict(word[2:].split("=") for word in command.split()[3:]) for command in commands)
    for flags, seq_len, steps in ((first, 1024, 500), (second, 4096, 400)):
        given = {name: type(getattr(SETTINGS, name))(flags[name]) for name in FIXED if name in flags}
        wanted = dataclasses.replace(SETTINGS, seq_len=seq_len, total_steps=900 if seq_len > 2000 else 1800)
        assert {name: getattr(dataclasses.replace(Settings(), **given), name) for name in FIXED} == {
            name: getattr(wanted, name) for name in FIXED
        }
        assert (flags["max_steps"], flags["stop_after_seconds"]) == (str(steps), "0")
    assert "allow_changes" in second and "allow_changes" not in first
    (one,) = card.train_commands(TRAINING | {"legs": [leg(0, 900, 4096)]})
    assert "max_steps" not in one and "allow_changes" not in one
    for command in commands:
        assert train.main([*command.split()[2:], "--seq_len=0"]) == 2
        assert "--seq_len must be positive" in capsys.readouterr().err, "the other flags exist"


def test_training_is_read_from_the_run(tmp_path: pathlib.Path, directory: pathlib.Path) -> None:
    run = tmp_path / "run"
    provenance = {name: TRAINING[name] for name in ("step", "settings", "task_names", "tokenizer_sha256", "legs")}
    checkpointing.save(run, 900, {"x": 1}, provenance | {"model_config": {}})
    figures = {"nll": 1.0, "accuracy": 0.5, "nll_by_task": {"recall": 1.0}, "accuracy_by_task": {"recall": 0.5}}
    for step in (1, 2):
        curves.append_log(run / curves.LOG, {"kind": "train", "step": step, **figures})
    curves.append_log(run / curves.LOG, {"kind": "eval", "step": 2, **figures})
    assert card.main(["card", f"--model={directory}", f"--run_dir={run}"]) == 0
    training = json.loads((directory / card.TRAINING).read_text())
    assert training["held_out"]["step"] == 2 and training["legs"] == TRAINING["legs"]
    assert (directory / curves.PICTURE).stat().st_size > 1000
    assert "Held-out loss at step 2: 1.000" in (directory / card.CARD).read_text()
