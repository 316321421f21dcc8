"""The demo model on its tasks: useful, and the same greedy tokens in every mode of the engine.

Accuracy and tokens of the plainest path are recorded beside the weights (``python -m scripts.demo_model.gate``). The
environment's ``QWEN35_DEMO_MODEL`` names another directory to run the same tests on.
"""

import functools
import os
import pathlib

import jax
import pytest

from qwen35_jax.config import ModelConfig
from qwen35_jax.sampling_params import SamplingParams
from qwen35_jax.text import Tokenizer
from qwen35_jax.text.reasoning import split_reasoning
from qwen35_jax.weights import load_params
from scripts.demo_model import card, curves, evaluate, gate, tasks
from scripts.demo_model.checkpointing import file_digest
from scripts.demo_model.export import WEIGHTS
from tests import engine_kit, engine_modes
from tests.engine_kit import Job, Kit
from tests.engine_modes import MODES, PROGRAMS

SHIPPED = pathlib.Path(__file__).resolve().parents[2] / "examples" / "demo-model"
DIRECTORY = pathlib.Path(os.environ.get("QWEN35_DEMO_MODEL", SHIPPED))


@functools.cache
def record() -> gate.Record:
    return gate.read(DIRECTORY)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(DIRECTORY)


@functools.cache
def jobs() -> dict[str, Job]:
    """The kept prompts as requests, by name."""
    greedy = SamplingParams(temperature=0.0, max_tokens=gate.MAX_TOKENS)
    prompts = {kept.name: evaluate.prompt_ids(tokenizer(), kept.example()) for kept in record().kept}
    return {name: Job(name, tuple(ids), greedy) for name, ids in prompts.items()}


@functools.cache
def kit(name: str) -> Kit:
    config = ModelConfig.from_hf(DIRECTORY)
    ends = sorted({*config.eos_token_ids, *tokenizer().eos_token_ids})
    params = functools.cache(lambda device, dtype: load_params(DIRECTORY, config, dtype, device=device))
    model = engine_kit.Model(config, params, ends, tokenizer().vocab_limit, variants=("greedy",))
    return Kit(PROGRAMS[name].options, PROGRAMS[name].ladder, model)


MOST_IN_A_STEP = max(mode.options.max_num_batched_tokens for mode in MODES.values())
# Modes that share programs and kinds of dispatches: neither may be taken for the other.
OTHERWISE = {
    "off": ("results at once", "auto"),
    "results at once": ("off", "auto"),
    "auto": ("results at once",),
    "stream": ("stream auto", "auto"),
    "stream auto": ("auto", "off"),
}


def in_pieces() -> list[gate.Kept]:
    """The kept prompts that every mode runs, and none in one step."""
    return [one for one in record().kept if one.prompt_tokens > MOST_IN_A_STEP and not one.long]


# The record


def test_the_record_is_of_these_files() -> None:
    assert file_digest(DIRECTORY / WEIGHTS) == record().model_sha256
    assert file_digest(DIRECTORY / "tokenizer.json") == record().tokenizer_sha256


def test_the_model_is_useful() -> None:
    assert set(record().tasks) == set(tasks.TASKS)
    assert {row["count"] for row in record().tasks.values()} == {record().count} and record().count >= 100
    for task in gate.USEFUL:
        assert record().tasks[task]["accuracy"] >= gate.USEFUL_ACCURACY, (task, record().tasks[task])


def test_recorded_prompts_and_answers_hold_together() -> None:
    """Prompts are what tasks and tokenizer make today, of every task, long ones among them; answers read as noted."""
    kept = record().kept
    counts = {
        pick: sum((one.task, one.max_tokens) == (pick.task, pick.max_tokens) for one in kept) for pick in gate.PICKS
    }
    assert counts == {pick: pick.count for pick in gate.PICKS}
    assert max(one.prompt_tokens for one in kept) > 2800 and min(one.prompt_tokens for one in kept) < 64
    assert in_pieces() and all(2 * MOST_IN_A_STEP < one.prompt_tokens for one in in_pieces())
    for one in kept:
        job, example = jobs()[one.name], one.example()
        assert (len(job.prompt), gate.digest(job.prompt)) == (one.prompt_tokens, one.prompt_sha256), one.name
        assert one.prompt_tokens + gate.MAX_TOKENS <= engine_modes.MAX_MODEL_LEN
        assert one.margin >= gate.LEAST_MARGIN
        assert tasks.is_held_out(one.task, example.key)
        text = tokenizer().decode(one.token_ids, skip_special_tokens=True)
        _, content = split_reasoning(text, example.thinking)
        ended = one.token_ids[-1] in tokenizer().eos_token_ids
        assert one.right == (ended and tasks.check(example, content)), one.name


# The modes


def test_every_option_of_the_engine_has_a_mode() -> None:
    assert list(engine_modes.missing()) == [], "an engine accepts this: register a mode in tests/engine_modes.py"
    assert engine_modes.accepted("decode_overlap") == ("off", "stream", "device")
    assert {mode.programs for mode in MODES.values()} == set(PROGRAMS)


def test_an_option_without_a_mode_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    overlapping = {name: mode for name, mode in MODES.items() if mode.options.decode_overlap != "device"}
    monkeypatch.setattr(engine_modes, "MODES", overlapping)
    assert list(engine_modes.missing()) == [("decode_overlap", "device")]


@pytest.mark.parametrize("name", sorted(MODES, key=lambda name: list(PROGRAMS).index(MODES[name].programs)))
def test_greedy_tokens_are_those_of_the_plain_path(name: str) -> None:
    mode = MODES[name]
    assert len(jax.local_devices()) >= PROGRAMS[mode.programs].devices
    short = [one for one in record().kept if one.prompt_tokens <= MOST_IN_A_STEP]
    asked = {one.name: one for one in (*in_pieces(), *short[:: mode.every])}
    if mode.long:
        asked |= {one.name: one for one in record().kept if one.long}
    engine = kit(mode.programs).engine(**mode.changes)
    engine_kit.submit_all(engine, [jobs()[one] for one in asked])
    found = engine_kit.drain(engine)
    assert engine.compiles_after_warmup == 0
    assert mode.shows(engine, kit(mode.programs)), f"{name}: did not run as its name says"
    for other in OTHERWISE.get(name, ()):
        assert not MODES[other].shows(engine, kit(mode.programs)), f"{name} would pass for {other}"
    engine.close()
    wrong = [one for one, kept in asked.items() if tuple(found[one].tokens) != kept.token_ids]
    assert wrong == []
    for one, kept in asked.items():
        ended = kept.token_ids[-1] in tokenizer().eos_token_ids
        assert found[one].ending[0] == ("stop" if ended else "length"), one


def test_modes_are_what_their_options_say() -> None:
    """Changes that an engine made of shared programs would not see are no modes."""
    for name, mode in MODES.items():
        engine = kit(mode.programs).engine(**mode.changes)
        limits, options = engine.scheduler.config, mode.options
        seen = (limits.policy, limits.overlap, limits.decode_steps, limits.max_num_seqs, limits.max_num_batched_tokens)
        wanted = (options.scheduler_policy, options.decode_overlap, options.decode_steps)
        assert seen == (*wanted, options.max_num_seqs, options.max_num_batched_tokens), name
        assert engine.config == options, name
        engine.close()


# What else ships


def test_the_card_is_what_the_files_say() -> None:
    assert (DIRECTORY / card.CARD).read_text("utf-8") == card.card(DIRECTORY)
    assert (DIRECTORY / curves.PICTURE).is_file()


def test_the_directory_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 12 * 10**6
