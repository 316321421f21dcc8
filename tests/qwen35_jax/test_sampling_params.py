"""SamplingParams: normalisation, validation messages, refused options, defaults from a checkpoint."""

import dataclasses

import numpy as np
import pytest

from qwen35_jax.sampling_params import SamplingParams, SamplingParamsError


def test_defaults_are_plain_sampling_without_limits():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert params.max_tokens is None and params.logprobs is None and params.seed is None
    assert params.stop == () and params.stop_token_ids == ()
    assert not params.greedy


def test_frozen_and_hashable():
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=(3,)))


@pytest.mark.parametrize(
    ("given", "field", "stored"),
    [
        ({"stop": "END"}, "stop", ("END",)),
        ({"stop": ["a", "b", "a"]}, "stop", ("a", "b")),
        ({"stop": None}, "stop", ()),
        ({"stop_token_ids": [5, 6, 5]}, "stop_token_ids", (5, 6)),
        ({"stop_token_ids": None}, "stop_token_ids", ()),
        ({"stop_token_ids": np.array([1, 2])}, "stop_token_ids", (1, 2)),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": None}, "top_k", 0),
        ({"temperature": None}, "temperature", 1.0),
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": np.float32(0.5)}, "temperature", 0.5),
        ({"top_p": 1}, "top_p", 1.0),
        ({"min_tokens": None}, "min_tokens", 0),
        ({"ignore_eos": None}, "ignore_eos", False),
        ({"skip_special_tokens": None}, "skip_special_tokens", True),
        ({"logit_bias": {}}, "logit_bias", None),
        ({"n": None}, "n", 1),
        ({"seed": -1}, "seed", -1),
    ],
)
def test_normalisation(given, field, stored):
    value = getattr(SamplingParams(**given), field)
    assert value == stored and type(value) is type(stored)


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"temperature": -0.1}, "temperature", "from 0 to 100"),
        ({"temperature": 101}, "temperature", "from 0 to 100"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"temperature": float("inf")}, "temperature", "inf"),
        ({"temperature": 10**400}, "temperature", "out of range"),
        ({"temperature": "0.7"}, "temperature", "'0.7'"),
        ({"temperature": True}, "temperature", "True"),
        ({"top_p": 0}, "top_p", "over 0 and at most 1"),
        ({"top_p": 1.01}, "top_p", "1.01"),
        ({"top_p": [0.9]}, "top_p", "[0.9]"),
        ({"min_p": -0.5}, "min_p", "from 0 to 1"),
        ({"min_p": 2}, "min_p", "2.0"),
        ({"top_k": -2}, "top_k", "-1 to 2147483647"),
        ({"top_k": 2.0}, "top_k", "integer"),
        ({"top_k": False}, "top_k", "False"),
        ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.001 to 1000"),
        ({"seed": "x"}, "seed", "'x'"),
        ({"seed": 1.5}, "seed", "1.5"),
        ({"seed": 2**64}, "seed", "out of range"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"stop": ["a", 1]}, "stop", "1"),
        ({"stop": b"a"}, "stop", "b'a'"),
        ({"stop": 3}, "stop", "3"),
        ({"stop": {"a": 1}}, "stop", "list of strings"),
        ({"stop_token_ids": 3}, "stop_token_ids", "3"),
        ({"stop_token_ids": "12"}, "stop_token_ids", "'12'"),
        ({"stop_token_ids": [1, None]}, "stop_token_ids", "None"),
        ({"stop_token_ids": [1, True]}, "stop_token_ids", "True"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids", "64"),
        ({"ignore_eos": 1}, "ignore_eos", "true or false"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens", "'no'"),
        ({"include_stop_str_in_output": 0}, "include_stop_str_in_output", "0"),
        ({"max_tokens": 0}, "max_tokens", "1 to"),
        ({"max_tokens": 3.5}, "max_tokens", "3.5"),
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens=8"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"logprobs": -1}, "logprobs", "0 to 20"),
        ({"logprobs": True}, "logprobs", "True"),
    ],
)
def test_wrong_values_name_field_value_and_range(given, field, words):
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**given)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("given", [{"n": 2}, {"logit_bias": {5: 1.0}}, {"prompt_logprobs": 0}, {"prompt_logprobs": 5}])
def test_options_that_do_not_exist_yet_are_refused_by_name(given):
    (field,) = given
    with pytest.raises(SamplingParamsError, match="not supported yet") as caught:
        SamplingParams(**given)
    assert caught.value.field == field


def test_sixty_four_stop_ids_are_accepted():
    assert len(SamplingParams(stop_token_ids=list(range(64))).stop_token_ids) == 64


def test_from_dict_takes_defaults_for_what_is_not_given():
    defaults = SamplingParams(temperature=0.6, top_k=20, stop="x")
    params = SamplingParams.from_dict({"top_k": 5, "temperature": None, "stop": ["y"]}, defaults)
    assert (params.temperature, params.top_k, params.stop) == (0.6, 5, ("y",))
    assert SamplingParams.from_dict({}) == SamplingParams()
    assert SamplingParams.from_dict({"top_k": 0}, defaults).top_k == 0


def test_from_dict_names_an_unknown_key():
    with pytest.raises(SamplingParamsError, match="best_of: unknown sampling option") as caught:
        SamplingParams.from_dict({"temperature": 0.5, "best_of": 3})
    assert caught.value.field == "best_of"
    assert "top_k" in str(caught.value)


def test_from_generation_config():
    content = {
        "eos_token_id": [1, 2],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "transformers_version": "5.0",
    }
    assert SamplingParams.from_generation_config(content) == SamplingParams(top_p=0.95, top_k=20)
    assert SamplingParams.from_generation_config({"max_new_tokens": 7}).max_tokens == 7
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.7}).greedy
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    with pytest.raises(SamplingParamsError, match=r"top_p: in generation_config.json"):
        SamplingParams.from_generation_config({"top_p": 7})


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-4, False), (1, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy
