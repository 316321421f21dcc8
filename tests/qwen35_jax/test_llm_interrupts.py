"""Calls of an LLM that end before they are done: Ctrl-C, other signals, abort."""

import signal
import threading

import pytest

from qwen35_jax import SamplingParams
from tests.qwen35_jax.fakes import make_llm, texts

pytestmark = pytest.mark.timeout(60)
SHORT = SamplingParams(max_tokens=30)


def test_an_interrupted_call_leaves_the_engine_empty():
    def interrupt(engine):
        if engine.steps == 2:
            raise KeyboardInterrupt

    llm = make_llm(on_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"], SHORT, use_tqdm=False)
    assert not llm.engine.has_work
    assert texts(llm.generate(["ok"], SHORT, use_tqdm=False)) == ["ok"]


def test_ctrl_c_within_a_step_acts_when_the_step_is_done(ctrl_c):
    seen = []

    def interrupt(engine):
        if engine.steps == 2:
            signal.raise_signal(signal.SIGINT)
            seen.append("the step went on")

    llm = make_llm(on_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"], SHORT, use_tqdm=False)
    assert seen == ["the step went on"] and not llm.engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert texts(llm.generate(["ok"], SHORT, use_tqdm=False)) == ["ok"]


def test_a_second_ctrl_c_does_not_wait_for_the_step(ctrl_c):
    def interrupt(engine):
        if engine.steps == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second one was held back too")

    with pytest.raises(KeyboardInterrupt):
        make_llm(on_step=interrupt).generate(["abc"], SHORT, use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_of_the_caller_s_own_is_called_between_steps(number):
    caught, in_step = [], []

    def raise_it(engine):
        if engine.steps == 2:
            signal.raise_signal(number)
            in_step.extend(caught)

    before = signal.signal(number, lambda number, frame: caught.append(number))
    own = signal.getsignal(number)
    try:
        assert texts(make_llm(on_step=raise_it).generate(["abc"], SHORT, use_tqdm=False)) == ["abc"]
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)
    assert caught == [number] and not in_step


def test_a_handler_that_installs_another_one_in_the_middle_of_a_step_keeps_it():
    def first(number, frame):
        caught.append("first")
        signal.signal(signal.SIGTERM, second)

    def second(number, frame):
        caught.append("second")

    def raise_them(engine):
        if engine.steps == 2:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    caught = []
    before = signal.signal(signal.SIGTERM, first)
    try:
        make_llm(on_step=raise_them).generate(["abc"], SHORT, use_tqdm=False)
        assert signal.getsignal(signal.SIGTERM) is second and caught == ["first", "first"]
    finally:
        signal.signal(signal.SIGTERM, before)


# Abort.


def test_abort_ends_one_request_and_not_the_others():
    def abort(engine):
        if engine.steps == 3:
            thread = threading.Thread(target=llm.abort, args=(["b"],))
            thread.start()
            thread.join()

    llm = make_llm(on_step=abort)
    outputs = llm.generate(["abcdef", "ghijkl"], SHORT, use_tqdm=False, request_ids=["a", "b"])
    assert texts(outputs) == ["abcdef", "ghi"]
    assert [output.finish_reason for output in outputs] == ["stop", "abort"]
    assert outputs[1].error is None and llm.engine.aborted == ["b"]


def test_abort_of_a_request_that_waits_outside_the_engine():
    llm = make_llm(on_step=lambda engine: llm.abort("r49"))
    prompts = [f"{index}" for index in range(50)]
    outputs = llm.generate(prompts, SHORT, use_tqdm=False, request_ids=[f"r{index}" for index in range(50)])
    assert outputs[49].finish_reason == "abort" and texts(outputs)[:49] == prompts[:49]
    assert "r49" not in [name for name, _, _ in llm.engine.submitted]


def test_an_abort_that_comes_too_late_does_not_hit_the_name_when_it_comes_again():
    llm = make_llm()
    for _ in range(2):
        (output,) = llm.generate("ab", SHORT, use_tqdm=False, request_ids=["row"])
        assert (output.finish_reason, output.outputs[0].text) == ("stop", "ab")
        llm.abort("row")


def test_abort_of_unknown_ids_is_forgotten():
    llm = make_llm(on_step=lambda engine: llm.abort(["x"]))
    llm.generate("a", SHORT, use_tqdm=False, request_ids=["y"])
    llm.engine.on_step = None
    (output,) = llm.generate("a", SHORT, use_tqdm=False, request_ids=["x"])
    assert output.finish_reason == "stop"
