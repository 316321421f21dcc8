import dataclasses
import inspect
import json
import subprocess
import sys

import numpy as np
import pytest

from qwen35_jax import LLM, GenerationError, SamplingParams, UserInputError
from qwen35_jax.llm import default_sampling_params, engine_config
from tests.qwen35_jax.fakes import EOS, FakeEngine, make_llm, texts

pytestmark = pytest.mark.timeout(60)
SHORT = SamplingParams(max_tokens=30)


# Prompts.


def test_every_form_of_prompt_gives_one_output_in_order():
    llm = make_llm()
    prompts = ["ab", [99, 100], {"prompt": "ef"}, {"prompt_token_ids": [103]}, np.array([104, 105])]
    outputs = llm.generate(prompts, SHORT, use_tqdm=False)
    assert texts(outputs) == ["ab", "cd", "ef", "g", "hi"]
    assert [output.prompt for output in outputs] == ["ab", None, "ef", None, None]
    assert outputs[1].prompt_token_ids == [99, 100]
    assert all(output.finished and output.error is None for output in outputs)
    assert len({output.request_id for output in outputs}) == 5


@pytest.mark.parametrize(
    "prompt", ["ab", [97, 98], {"prompt": "ab"}, {"prompt_token_ids": [97, 98]}, np.array([97, 98])]
)
def test_a_single_prompt_gives_a_list_of_one(prompt):
    (output,) = make_llm().generate(prompt, SHORT, use_tqdm=False)
    assert output.outputs[0].text == "ab"
    assert output.outputs[0].token_ids == [97, 98, EOS]
    assert output.finish_reason == "stop"
    assert output.outputs[0].stop_reason is None


def test_no_prompts_give_no_outputs():
    assert make_llm().generate([], SHORT) == []


@pytest.mark.parametrize("prompts", [None, 7, 1.5, b"abc"])
def test_something_that_is_no_prompt_at_all_is_a_type_error(prompts):
    with pytest.raises(TypeError, match="prompts must be"):
        make_llm().generate(prompts, SHORT)


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        ("", "invalid_prompt", "empty"),
        ([], "invalid_prompt", "empty"),
        ({"prompt_token_ids": []}, "invalid_prompt", "empty"),
        ([97, 257], "invalid_token_id", "token id 257 at position 1"),
        ([-1], "invalid_token_id", "-1"),
        ([97, True], "invalid_prompt", "list"),
        ([1.5], "invalid_prompt", "1.5"),
        (None, "invalid_prompt", "null"),
        ({"text": "a"}, "invalid_prompt", "text"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "invalid_prompt", "prompt_token_ids"),
        ({"prompt_token_ids": "ab"}, "invalid_prompt", "ab"),
        ("a\ud800", "invalid_prompt", "U+D800"),
        ("x" * 64, "context_length_exceeded", "64 tokens"),
        ("!", "rejected", "9 pages"),
    ],
)
def test_a_bad_prompt_fails_alone_and_says_why(prompt, code, words):
    outputs = make_llm().generate(["ab", prompt, "cd"], SHORT, use_tqdm=False)
    assert texts(outputs) == ["ab", "", "cd"]
    assert outputs[1].error_code == code
    assert words in outputs[1].error
    assert outputs[1].finish_reason == "error" and outputs[1].finished
    assert outputs[0].error is None and outputs[2].error is None


def test_the_last_id_of_the_tokenizer_is_real_and_the_first_row_of_padding_is_not():
    good, bad = make_llm().generate([[256], [257]], SHORT, use_tqdm=False)
    assert good.error is None and "0 to 256" in bad.error


def test_without_a_tokenizer_ids_go_in_and_out():
    llm = make_llm(tokenizer=False)
    good, bad, padded = llm.generate([[97, 299], "ab", [300]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert good.outputs[0].token_ids == [97, 299] and good.outputs[0].text == ""
    assert "skip_tokenizer_init" in bad.error
    assert "0 to 299" in padded.error
    assert "skip_tokenizer_init" in llm.chat([{"role": "user", "content": "a"}], SHORT, use_tqdm=False)[0].error


# Sampling params.


def test_one_sampling_params_for_each_prompt():
    outputs = make_llm().generate(["abc", "abc"], [SamplingParams(max_tokens=1), SHORT], use_tqdm=False)
    assert texts(outputs) == ["a", "abc"]
    assert [output.finish_reason for output in outputs] == ["length", "stop"]


@pytest.mark.parametrize("params", [[SHORT], [SHORT] * 3])
def test_as_many_sampling_params_as_prompts(params):
    with pytest.raises(ValueError, match=f"{len(params)} entries for 2 prompts"):
        make_llm().generate(["a", "b"], params)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, "greedy", [SHORT, None]])
def test_sampling_params_of_another_type(params):
    with pytest.raises(TypeError, match="sampling_params"):
        make_llm().generate(["a", "b"], params)


def test_max_tokens_defaults_to_the_room_that_is_left_but_at_most_4096():
    llm = make_llm()
    llm.generate(["x" * 10, "x" * 63], SamplingParams(), use_tqdm=False)
    assert [params.max_tokens for _, _, params in llm.engine.submitted] == [54, 1]
    llm = make_llm(max_model_len=100_000)
    llm.generate("x", SamplingParams(), use_tqdm=False)
    assert llm.engine.submitted[0][2].max_tokens == 4096


def test_explicit_max_tokens_beyond_the_context_is_an_error_with_both_numbers():
    (output,) = make_llm().generate("x" * 10, SamplingParams(max_tokens=55), use_tqdm=False)
    assert output.error_code == "context_length_exceeded" and output.error_param == "max_tokens"
    assert all(number in output.error for number in ("10", "55", "64"))


def test_a_default_limit_gives_way_to_the_room_that_is_left():
    """Nobody has asked for it, and a prompt that fits is answered."""
    llm = LLM.from_engine(FakeEngine(), make_llm().model_config, None, default_sampling=SamplingParams(max_tokens=60))
    outputs = llm.generate([[1] * 10, [1]], use_tqdm=False)
    assert [output.error for output in outputs] == [None, None]
    assert [params.max_tokens for _, _, params in llm.engine.submitted] == [54, 60]
    (output,) = llm.generate([[1] * 10], llm.default_sampling_params, use_tqdm=False)
    assert output.error_code == "context_length_exceeded", "given, it is what was asked for"


def test_min_tokens_without_room_is_an_error_of_the_row():
    (output,) = make_llm().generate("x" * 10, SamplingParams(min_tokens=60), use_tqdm=False)
    assert output.error_code == "invalid_sampling" and output.error_param == "min_tokens"


def test_none_takes_the_defaults_of_the_model():
    config = make_llm().model_config
    llm = LLM.from_engine(FakeEngine(), config, None, default_sampling=SamplingParams(top_k=20, max_tokens=3))
    llm.generate([[1]], use_tqdm=False)
    assert llm.engine.submitted[0][2] == SamplingParams(top_k=20, max_tokens=3)


def test_defaults_come_from_generation_config(tmp_path):
    assert default_sampling_params(str(tmp_path)) == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "top_p": 0.95}')
    assert default_sampling_params(str(tmp_path)) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)


@pytest.mark.parametrize("content", ["{", "[]", '{"top_p": 3}', "\xff"])
def test_a_broken_generation_config_is_named(tmp_path, content):
    (tmp_path / "generation_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserInputError, match="generation_config.json"):
        default_sampling_params(str(tmp_path))


def test_options_are_checked_by_name():
    assert engine_config({"max_num_seqs": 3}).max_num_seqs == 3
    with pytest.raises(TypeError, match="max_seqs"):
        engine_config({"max_seqs": 3})
    with pytest.raises(UserInputError, match="scheduler_policy"):
        engine_config({"scheduler_policy": "slo"})
    with pytest.raises(TypeError, match="max_seqs"):
        LLM("/nowhere", max_seqs=3)


# Feeding and order.


def test_random_bits_derive_from_the_index_in_the_call():
    llm = make_llm()
    for _ in range(2):  # not from a counter that goes on
        llm.engine.submitted.clear()
        llm.generate(["a", "", "b", "c"], SHORT, use_tqdm=False)
        assert [rng_id for _, rng_id, _ in llm.engine.submitted] == [0, 2, 3]


def test_many_prompts_are_fed_as_the_engine_has_room():
    seen = []
    llm = make_llm(on_step=lambda engine: seen.append(llm.tokenizer.encoded))
    prompts = [f"{index}" for index in range(300)]
    outputs = llm.generate(prompts, SHORT, use_tqdm=False)
    assert texts(outputs) == prompts
    assert llm.engine.most_inside <= 2 * llm.engine.max_num_seqs
    assert seen[0] <= 2 * llm.engine.max_num_seqs  # the first step did not wait for all of them


def test_results_are_in_input_order_whatever_finishes_first():
    outputs = make_llm().generate(["~slow", "b", "c"], SHORT, use_tqdm=False)
    assert texts(outputs) == ["~slow", "b", "c"]
    assert outputs[0].metrics.finished > outputs[2].metrics.finished
    assert outputs[0].metrics.submitted <= outputs[0].metrics.first_token <= outputs[0].metrics.finished


# Text.


@pytest.mark.parametrize("tokens_per_step", [1, 3, 64])
def test_a_stop_string_ends_text_ids_and_logprobs_and_frees_the_request(tokens_per_step):
    llm = make_llm(tokens_per_step=tokens_per_step, script=lambda prompt, params: list(b"one. two. three"))
    params = SamplingParams(max_tokens=15, stop=[" two"], logprobs=0)
    (output,) = llm.generate("x", params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.text == "one." and completion.stop_reason == " two" and completion.finish_reason == "stop"
    assert bytes(completion.token_ids) == b"one. two"
    assert len(completion.logprobs) == 8 and completion.cumulative_logprob == -4.0
    assert not llm.engine.has_work


def test_the_stop_string_can_be_kept():
    llm = make_llm(script=lambda prompt, params: list(b"one. two."))
    params = SamplingParams(max_tokens=9, stop=["."], include_stop_str_in_output=True)
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert output.outputs[0].text == "one."


def test_a_stop_token_is_in_the_ids_and_not_in_the_text():
    (output,) = make_llm().generate("abc", SamplingParams(max_tokens=9, stop_token_ids=[98]), use_tqdm=False)
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("a", [97, 98], 98)


def test_eos_text_is_left_out_even_where_special_tokens_are_shown():
    (output,) = make_llm().generate("ab", SamplingParams(max_tokens=9, skip_special_tokens=False), use_tqdm=False)
    assert output.outputs[0].text == "ab"


def test_a_character_cut_by_max_tokens():
    (output,) = make_llm().generate("né", SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.outputs[0].text == "n\ufffd"
    (output,) = make_llm().generate("né", SamplingParams(max_tokens=3), use_tqdm=False)
    assert output.outputs[0].text == "né"


def test_logprobs_hold_the_sampled_token_and_as_many_as_asked():
    (plain, none, two) = make_llm().generate(
        ["a", "a", "a"],
        [
            SamplingParams(max_tokens=1),
            SamplingParams(max_tokens=1, logprobs=0),
            SamplingParams(max_tokens=1, logprobs=2),
        ],
        use_tqdm=False,
    )
    assert plain.outputs[0].logprobs is None and plain.outputs[0].cumulative_logprob is None
    assert list(none.outputs[0].logprobs[0]) == [97]
    found = two.outputs[0].logprobs[0]
    assert list(found) == [97, 65]
    assert (found[97].logprob, found[97].rank, found[97].decoded_token) == (-0.5, 1, "a")
    assert found[65].decoded_token == "A"


# Failures.


def test_a_row_with_non_finite_logits_fails_alone_with_what_it_had():
    outputs = make_llm().generate(["abcd", "ab\x07cd", "efgh"], SHORT, use_tqdm=False)
    assert texts(outputs) == ["abcd", "ab", "efgh"]
    assert outputs[1].error_code == "engine_error" and "non-finite" in outputs[1].error
    assert outputs[1].finish_reason == "error"


@pytest.mark.parametrize("bad", ["", "ab\x07cd"])
def test_raise_on_error_raises_and_leaves_the_engine_empty(bad):
    llm = make_llm()
    with pytest.raises(GenerationError, match="failed") as caught:
        llm.generate(["~slow", bad, "c"], SHORT, use_tqdm=False, raise_on_error=True)
    assert caught.value.output.error
    assert not llm.engine.has_work
    assert texts(llm.generate(["ok"], SHORT, use_tqdm=False)) == ["ok"]


def test_an_engine_that_breaks_names_the_requests_in_flight():
    llm = make_llm(crash_at_step=2)
    with pytest.raises(RuntimeError, match="device lost") as caught:
        llm.generate(["abc", "def"], SHORT, use_tqdm=False, request_ids=["first", "second"])
    assert "first, second" in caught.value.__notes__[0]


def test_request_ids_are_counted_and_differ():
    with pytest.raises(ValueError, match="1 entries for 2"):
        make_llm().generate(["a", "b"], SHORT, request_ids=["x"])
    with pytest.raises(ValueError, match="differ"):
        make_llm().generate(["a", "b"], SHORT, request_ids=["x", "x"])


# Chat.


def user(content):
    return {"role": "user", "content": content}


def test_one_conversation_or_a_list_of_them():
    llm = make_llm()
    assert texts(llm.chat([user("hi")], SHORT, use_tqdm=False)) == ["u:hi\na:"]
    outputs = llm.chat(
        [[user("a")], [user("b"), {"role": "assistant", "content": "c"}, user("d")]], SHORT, use_tqdm=False
    )
    assert [output.prompt for output in outputs] == ["u:a\na:", "u:b\na:c\nu:d\na:"]
    assert llm.chat([], SHORT) == []


def test_template_switches_and_tools_reach_the_template():
    (output,) = make_llm().chat(
        [user("a")], SHORT, use_tqdm=False, chat_template_kwargs={"style": "short"}, tools=[{"name": "f"}]
    )
    assert output.prompt == "u:a\ntools=1\nstyle=short\na:"


@pytest.mark.parametrize(
    "switches", [{"tools": 1}, {"messages": []}, {"self": 1}, {1: 2}, ["style"], {"enable_thinking": "false"}]
)
def test_switches_that_are_none_of_the_template_are_refused_by_name(switches):
    (output,) = make_llm().chat([user("a")], SHORT, use_tqdm=False, chat_template_kwargs=switches)
    assert (output.error_code, output.error_param) == ("invalid_value", "chat_template_kwargs")
    assert "chat_template_kwargs" in output.error and str(next(iter(switches))) in output.error


def test_reasoning_is_split_where_the_prompt_opened_it():
    llm = make_llm(script=lambda prompt, params: [*b"hm\n</think>\n\nyes", EOS])
    (thinking,) = llm.chat([user("a")], SHORT, use_tqdm=False, chat_template_kwargs={"enable_thinking": True})
    assert thinking.outputs[0].text == "hm\n</think>\n\nyes"
    assert (thinking.outputs[0].reasoning, thinking.outputs[0].content) == ("hm", "yes")
    llm = make_llm(script=lambda prompt, params: [*b"yes", EOS])
    (plain,) = llm.chat([user("a")], SHORT, use_tqdm=False)
    assert (plain.outputs[0].reasoning, plain.outputs[0].content) == (None, "yes")
    (completion,) = llm.generate("a", SHORT, use_tqdm=False)
    assert completion.outputs[0].content is None


@pytest.mark.parametrize(
    ("conversation", "code", "words"),
    [
        ([], "invalid_prompt", "messages is empty"),
        ("hi", "invalid_prompt", "must be a list"),
        (["hi"], "invalid_prompt", "messages[0]"),
        ([{"content": "a"}], "invalid_prompt", "messages[0].role"),
        ([{"role": "user", "content": 3}], "invalid_prompt", "messages[0].content"),
        ([user([{"type": "image_url", "image_url": "x"}])], "invalid_prompt", "image_url"),
        ([{"role": "boom", "content": "a"}], "template_error", "unexpected role boom"),
        ([user("\udc00")], "invalid_prompt", "U+DC00"),
    ],
)
def test_a_bad_conversation_fails_alone_and_says_why(conversation, code, words):
    outputs = make_llm().chat([[user("a")], conversation, [user("b")]], SHORT, use_tqdm=False)
    assert texts(outputs) == ["u:a\na:", "", "u:b\na:"]
    assert outputs[1].error_code == code and words in outputs[1].error


@pytest.mark.parametrize("conversations", ["hi", user("a"), None])
def test_something_that_is_no_conversation_at_all_is_a_type_error(conversations):
    with pytest.raises(TypeError, match="conversations"):
        make_llm().chat(conversations, SHORT)


# The fakes.


def test_the_fake_engine_keeps_the_contract_of_the_real_one():
    from qwen35_jax import engine
    from tests.qwen35_jax import fakes

    for name in ("EngineOutput", "TokenLogprob"):
        real, fake = ([field.name for field in dataclasses.fields(getattr(home, name))] for home in (engine, fakes))
        assert real == fake
    for name in ("max_model_len", "max_num_seqs", "has_work", "submit", "abort", "stop", "step", "close"):
        assert hasattr(engine.Engine, name)
    real, fake = (list(inspect.signature(home.submit).parameters) for home in (engine.Engine, fakes.FakeEngine))
    assert real == fake


# Life of an LLM.


def test_closing():
    with make_llm() as llm:
        pass
    assert llm.engine.closed
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a", SHORT)


def test_closing_ends_a_stream_that_runs():
    llm = make_llm(max_num_seqs=1)
    running = llm.stream(llm.prepare_prompt("abc", SHORT, str(index), index) for index in range(3))
    assert next(running).request_id == "0"
    llm.close()
    assert list(running) == [] and llm.engine.closed and not llm.engine.has_work


@pytest.mark.parametrize("how", ["drain", "cancel"])
def test_every_prompt_has_an_output_even_where_requests_are_dropped(how):
    engine = FakeEngine(max_num_seqs=1, on_step=lambda engine: engine.steps == 2 and getattr(llm, how)())
    llm = make_llm(engine)
    outputs = llm.generate(["abc", "def", "ghi"], use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["stop" if how == "drain" else "abort", "abort", "abort"]
    assert outputs[2].prompt == "ghi"


def test_one_call_at_a_time():
    llm = make_llm()
    request = llm.prepare_prompt("abc", SHORT, "x", 0)
    running = llm.stream([request])
    assert next(running).outputs[0].text == "abc"
    with pytest.raises(RuntimeError, match="one call at a time"):
        llm.generate("a", SHORT, use_tqdm=False)
    running.close()
    assert texts(llm.generate("a", SHORT, use_tqdm=False)) == ["a"]


def test_importing_the_package_is_cheap():
    code = (
        "import sys, qwen35_jax; qwen35_jax.SamplingParams; "
        "print([name for name in ('jax', 'numpy', 'transformers', 'grain') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names():
    import qwen35_jax

    assert {"LLM", "SamplingParams", "RequestOutput", "CompletionOutput"} <= set(qwen35_jax.__all__)
    assert all(getattr(qwen35_jax, name) is not None and name in dir(qwen35_jax) for name in qwen35_jax.__all__)
    with pytest.raises(AttributeError, match="Nothing"):
        getattr(qwen35_jax, "Nothing")  # noqa: B009


def test_outputs_are_plain_data():
    (output,) = make_llm().generate("ab", SamplingParams(max_tokens=3, logprobs=1), use_tqdm=False)
    json.dumps([output.request_id, output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].text])
