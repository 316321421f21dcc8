"""Workloads: lengths, ids and arrival times, and files that are refused."""

import json

import numpy as np
import pytest

from qwen35_jax.bench.workload import fixed, from_file, lognormal, poisson_arrivals
from qwen35_jax.errors import UserInputError


def test_fixed_lengths():
    lengths = fixed(3, 10, 4, seed=5)
    assert (lengths.name, lengths.longest) == ("10x4", 14)
    workload = lengths.fill(50)
    assert [(len(item.prompt), item.max_tokens) for item in workload.items] == [(10, 4)] * 3
    again = fixed(3, 10, 4, seed=5).fill(50)
    assert all((a.prompt == b.prompt).all() for a, b in zip(workload.items, again.items, strict=True))
    other = fixed(3, 10, 4, seed=6).fill(50)
    assert any((a.prompt != b.prompt).any() for a, b in zip(workload.items, other.items, strict=True))
    assert (workload.items[0].prompt != workload.items[1].prompt).any()


def test_ids_cover_the_vocabulary_and_nothing_else():
    ids = np.concatenate([item.prompt for item in fixed(20, 100, 1).fill(7).items])
    assert ids.dtype == np.int32
    assert set(ids.tolist()) == set(range(7))


def test_the_lognormal_workload_is_the_defined_one():
    lengths = lognormal()
    rng = np.random.default_rng(0)
    prompts = np.clip(np.exp(rng.normal(6.2, 0.9, 2000)), 16, 8192)
    outputs = np.clip(np.exp(rng.normal(5.0, 0.8, 2000)), 8, 1024)
    assert lengths.name == "lognormal"
    assert np.abs(np.array(lengths.prompts) - prompts).max() <= 0.5
    assert np.abs(np.array(lengths.outputs) - outputs).max() <= 0.5
    assert min(lengths.prompts) == 16 and max(lengths.outputs) == 1024  # both are clipped in this draw
    assert lengths.longest == max(a + b for a, b in zip(lengths.prompts, lengths.outputs, strict=True))


def test_arrivals_are_poisson_at_the_rate():
    times = np.array(poisson_arrivals(4000, 8.0, seed=1))
    gaps = np.diff(times, prepend=0.0)
    assert times[-1] == pytest.approx(4000 / 8.0)
    assert (gaps > 0).all()
    assert gaps.std() == pytest.approx(1 / 8.0, rel=0.1)  # exponential: deviation and mean are equal
    assert poisson_arrivals(4000, 8.0, seed=1) == times.tolist()
    assert poisson_arrivals(4000, 8.0, seed=2) != times.tolist()


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none(rate):
    with pytest.raises(UserInputError, match="rate must be a positive"):
        poisson_arrivals(3, rate)


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_file_gives_lengths_or_ids(tmp_path):
    path = write(
        tmp_path / "My load.jsonl",
        {"custom_id": "a", "input_len": 5, "output_len": 2},
        "",
        {"prompt_token_ids": [3, 1, 4], "output_len": 7},
        {"input_len": 1, "output_len": 1},
    )
    lengths = from_file(path)
    assert (lengths.name, lengths.prompts, lengths.outputs) == ("my-load", (5, 3, 1), (2, 7, 1))
    assert lengths.fill(9).items[1].prompt.tolist() == [3, 1, 4]
    assert from_file(path, 2).prompts == (5, 3)
    with pytest.raises(UserInputError, match=r"request 1 .*id 4 is outside of the vocabulary 0\.\.3"):
        lengths.fill(4)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1"),
        (["[]"], "line 1: a request is an object"),
        (
            [{"input_len": 2, "output_len": 1}, {"input_len": 0, "output_len": 1}],
            "line 2: input_len must be a positive",
        ),
        ([{"input_len": 2}], "line 1: output_len must be a positive integer, got None"),
        ([{"output_len": 2}], "line 1: either input_len or prompt_token_ids"),
        ([{"input_len": 2, "output_len": 1, "prompt_token_ids": [1]}], "either input_len or"),
        ([{"prompt_token_ids": [], "output_len": 1}], "prompt_token_ids must be a list"),
        ([{"prompt_token_ids": [True], "output_len": 1}], "prompt_token_ids must be a list"),
        ([{"input_len": 2, "output_len": 1, "outputlen": 1}], "unknown key 'outputlen'"),
        ([], "has 0 requests"),
    ],
)
def test_a_wrong_file_is_refused_by_line(tmp_path, lines, message):
    with pytest.raises(UserInputError, match=message):
        from_file(write(tmp_path / "load.jsonl", *lines))


def test_a_file_that_is_missing_short_or_badly_named(tmp_path):
    with pytest.raises(UserInputError, match="cannot be read: No such file"):
        from_file(tmp_path / "load.jsonl")
    with pytest.raises(UserInputError, match="has 1 requests, 5 are needed"):
        from_file(write(tmp_path / "load.jsonl", {"input_len": 1, "output_len": 1}), 5)
    with pytest.raises(UserInputError, match="must begin with a letter"):
        from_file(write(tmp_path / "1024x128.jsonl", {"input_len": 1, "output_len": 1}))


def test_numbers_below_one():
    for arguments in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(UserInputError, match="must be at least 1"):
            fixed(*arguments)
    with pytest.raises(UserInputError, match="num_requests must be at least 1"):
        lognormal(0)
