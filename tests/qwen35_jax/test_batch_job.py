import io
import json
import os
import signal
import threading

import pytest

from qwen35_jax import SamplingParams, UserInputError
from qwen35_jax.batch import journal as journals
from qwen35_jax.batch.job import BatchJob, JobSpec
from qwen35_jax.batch.journal import iter_records, manifest_path
from qwen35_jax.batch.manifest import Manifest
from qwen35_jax.progress import Progress
from tests.qwen35_jax.fakes import EOS, make_llm

pytestmark = pytest.mark.timeout(120)
MANIFEST = Manifest(model_files={}, options={}, sampling={}, chat_template_kwargs={})
USER = [{"role": "user", "content": "hi"}]


class Files:
    """An input, an output, and jobs on them."""

    def __init__(self, folder):
        self.input, self.output = str(folder / "in.jsonl"), str(folder / "out.jsonl")

    def put(self, *lines):
        """Write the input: objects, or bytes as they are."""
        with open(self.input, "wb") as file:
            for line in lines:
                file.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")

    def job(self, manifest=MANIFEST, **options):
        options.setdefault("sampling", SamplingParams(max_tokens=40))
        return BatchJob(JobSpec(self.input, self.output, "model", **options), manifest)

    def run(self, llm=None, *, progress=None, **options):
        with self.job(**options) as job:
            return job.run(llm or make_llm(), progress)

    def records(self):
        return list(iter_records(self.output))

    def texts(self):
        """Text of each answered row by custom_id, None for a failed one; every row has exactly one record."""
        found = {}
        for record in self.records():
            key = record["custom_id"] if record["custom_id"] is not None else record["line"]
            assert key not in found
            choice = record["response"] and record["response"]["body"]["choices"][0]
            found[key] = choice and (choice["text"] if "text" in choice else choice["message"]["content"])
        return found


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def rows(number, start=0):
    return [{"custom_id": f"r{index}", "prompt": f"text {index}"} for index in range(start, start + number)]


# One record a row.


def test_every_row_gets_exactly_one_record(files):
    files.put(
        {"custom_id": "a", "prompt": "one"},
        b"\n",
        b"not json\n",
        {"custom_id": "b", "url": "/v1/chat/completions", "method": "POST", "body": {"messages": USER}},
        {"prompt_token_ids": [65, 66]},
        {"custom_id": "a", "prompt": "again"},
        {"custom_id": "c", "prompt": ""},
        {"custom_id": "d", "prompt": "x" * 64},
        {"custom_id": "e", "prompt": "ab\x07cd"},
        {"custom_id": "f", "prompt_token_ids": [257]},
        {"custom_id": "g", "messages": [{"role": "boom", "content": ""}]},
        {"custom_id": "h", "prompt": "!"},
        {"custom_id": 7, "prompt": "seven"},
        [],
        None,
    )
    summary = files.run()
    by_line = {record["line"]: record for record in files.records()}
    assert sorted(by_line) == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    codes = {line: record["error"] and record["error"]["code"] for line, record in by_line.items()}
    assert codes == {
        1: None,
        3: "invalid_json",
        4: None,
        5: None,
        6: "duplicate_custom_id",
        7: "invalid_prompt",
        8: "context_length_exceeded",
        9: "engine_error",
        10: "invalid_token_id",
        11: "template_error",
        12: "rejected",
        13: None,
        14: "invalid_line",
        15: "invalid_line",
    }
    assert all(record["error"] is None or record["error"]["line"] == line for line, record in by_line.items())
    assert by_line[4]["response"]["body"]["choices"][0]["message"]["content"] == "u:hi\na:"
    assert by_line[13]["custom_id"] == 7
    assert (summary.rows, summary.answered, summary.failed, summary.resumed) == (14, 4, 10, 0)
    assert summary.interrupted is None
    text = summary.describe()
    assert "4 rows answered, 10 failed" in text and "2 invalid_line" in text and "first: line 3" in text
    assert text.splitlines()[-1] == f"output: {files.output}"


def test_a_default_limit_gives_way_to_the_room_of_a_row_and_its_own_does_not(files):
    files.put(
        {"prompt": "x" * 10},
        {"prompt": "x" * 10, "max_tokens": 60},
        {"messages": USER, "max_completion_tokens": 63},
        {"messages": USER, "max_tokens": None},
    )
    files.run(sampling=SamplingParams(max_tokens=60, temperature=0))
    errors = {record["line"]: record["error"] and record["error"]["param"] for record in files.records()}
    assert errors == {1: None, 2: "max_tokens", 3: "max_completion_tokens", 4: None}


def test_line_ends_marks_and_separators(files):
    files.put(
        b'\xef\xbb\xbf{"custom_id": "a", "prompt": "1"}\r\n',
        b"\r\n \n",
        '{"custom_id": "b", "prompt": "x\u2028y\u2029z\x85"}\n'.encode(),
        b'{"custom_id": "c", "prompt": "\xff"}\n',
        b'{"custom_id": "d", "prompt": "\\ud800"}\n',
        b'{"custom_id": "e", "prompt": "last"}',
    )
    files.run()
    assert files.texts() == {"a": "1", "b": "x\u2028y\u2029z\x85", 5: None, "d": None, "e": "last"}
    codes = {record["error"]["code"] for record in files.records() if record["error"]}
    assert codes == {"invalid_encoding"}


def test_an_overlong_line_is_a_record(files, monkeypatch):
    monkeypatch.setattr("qwen35_jax.batch.reader.MAX_LINE_BYTES", 100)
    monkeypatch.setattr("qwen35_jax.batch.job.MAX_LINE_BYTES", 100)
    files.put({"custom_id": "a", "prompt": "x" * 200}, {"custom_id": "b", "prompt": "ok"})
    files.run()
    assert files.texts() == {1: None, "b": "ok"}
    assert [record["error"]["code"] for record in files.records() if record["error"]] == ["line_too_long"]


def test_errors_name_the_key_by_its_path_in_the_line(files):
    chats, completions = {"url": "/v1/chat/completions"}, {"url": "/v1/completions"}
    files.put(
        {**completions, "body": {"prompt": "x" * 64}},
        {**completions, "body": {"prompt": "x", "max_tokens": 64}},
        {**completions, "body": {"prompt": "x", "max_completion_tokens": 64}},
        {**completions, "body": {"prompt": [257]}},
        {**completions, "body": {"prompt_token_ids": []}},
        {**chats, "body": {"messages": [{"role": "boom", "content": ""}]}},
        {**chats, "body": {"messages": [{"role": "user", "content": "x" * 64}]}},
        {"prompt_token_ids": [65] * 64},
        {"prompt": "x", "min_tokens": 64},
    )
    files.run(sampling=SamplingParams())
    errors = {record["line"]: record["error"] for record in files.records()}
    assert [errors[line]["param"] for line in range(1, 10)] == [
        "body.prompt",
        "body.max_tokens",
        "body.max_completion_tokens",
        "body.prompt",
        "body.prompt_token_ids",
        "body.messages",
        "body.messages",
        "prompt_token_ids",
        "min_tokens",
    ]


def test_an_input_that_becomes_shorter_ends_the_job_and_loses_nothing(files):
    files.put(*rows(300))
    with open(files.input, "rb") as file:
        content = file.read()

    def cut(engine):
        if engine.steps == 3:
            os.truncate(files.input, len(content) - 20)

    with pytest.raises(OSError, match=r"in.jsonl has become shorter since the job began: line 300"):
        files.run(make_llm(on_step=cut))
    assert None not in files.texts().values()  # half a line is no bad row
    with open(files.input, "wb") as file:
        file.write(content)
    assert files.run().resumed > 0
    assert len(files.texts()) == 300 and None not in files.texts().values()


class Broken(io.StringIO):
    """A pipe without a reader."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_that_nobody_reads_does_not_end_the_job(files, terminal):
    files.put(*rows(30))
    llm = make_llm(on_step=lambda engine: engine.steps == 10 and signal.raise_signal(signal.SIGINT))
    summary = files.run(llm, progress=Progress(Broken(), terminal=terminal, interval=0))
    assert summary.interrupted == "SIGINT"  # said to nobody, and heeded
    assert files.run(progress=Progress(Broken(), terminal=terminal, interval=0)).recorded == 30
    assert len(files.texts()) == 30


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_input_without_rows(files, content):
    files.put(content)
    assert files.run().rows == 0
    assert os.path.getsize(files.output) == 0


def test_records_are_written_as_rows_finish(files):
    seen = []
    llm = make_llm(on_step=lambda engine: seen.append(len(files.records())))
    files.put({"custom_id": "slow", "prompt": "~" * 8}, *rows(20))
    files.run(llm)
    order = [record["custom_id"] for record in files.records()]
    assert order[-1] == "slow" and [record["line"] for record in files.records()][-1] == 1
    assert seen[-1] >= 20  # the others were on the disk while the slow one ran


def test_many_rows_pass_a_window_of_a_few(files):
    files.put(*rows(500))
    llm = make_llm()
    summary = files.run(llm)
    assert summary.answered == 500 and len(files.texts()) == 500
    assert llm.engine.most_inside <= 2 * llm.engine.max_num_seqs
    assert summary.completion_tokens == sum(len(f"text {index}") + 1 for index in range(500))


def test_random_bits_derive_from_the_custom_id_or_the_line(files):
    def identities(*lines):
        files.put(*lines)
        llm = make_llm()
        files.run(llm, overwrite=True)
        return [rng_id for _, rng_id, _ in llm.engine.submitted]

    a, b, c = {"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "x"}, {"prompt": "x"}
    forward, backward = identities(a, b, c), identities(b, b"\n", a, c)
    assert forward[0] == backward[1] and forward[1] == backward[0] and forward[0] != forward[1]
    assert forward[2] == 3 and backward[2] == 4


def test_defaults_of_the_job_reach_the_rows(files):
    files.put({"messages": USER, "top_k": 3}, {"messages": USER, "chat_template_kwargs": {"style": "b"}})
    llm = make_llm()
    files.run(llm, sampling=SamplingParams(top_k=9, max_tokens=2), chat_template_kwargs={"style": "a"})
    assert [(params.top_k, params.max_tokens) for _, _, params in llm.engine.submitted] == [(3, 2), (9, 2)]
    assert [record["response"]["body"]["usage"]["prompt_tokens"] for record in files.records()] == [15, 15]


def test_reasoning_and_token_ids_in_the_answer(files):
    files.put({"custom_id": "a", "messages": USER, "return_token_ids": True})
    script = [*b"hm</think>\n\nyes", EOS]
    files.run(make_llm(script=lambda prompt, params: script), chat_template_kwargs={"enable_thinking": True})
    (choice,) = files.records()[0]["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert choice["token_ids"] == script


def test_progress_counts_rows_and_tokens(files):
    files.put(*rows(5), b"bad\n")
    stream = io.StringIO()
    files.run(progress=Progress(stream, interval=0))
    lines = stream.getvalue().splitlines()
    assert lines[-1].startswith("answering: 6 of 6") and "1 failed" in lines[-1] and "tokens/s" in lines[-1]


# Crash and resume.


@pytest.mark.parametrize("torn", [b"", b'{"id": "batch_req_1", "custom'])
@pytest.mark.parametrize("crash_at_step", [1, 9, 30])
def test_a_crash_loses_nothing_and_doubles_nothing(files, crash_at_step, torn):
    lines = [*rows(12), {"prompt": "no id"}, b"bad\n", {"custom_id": "r3", "prompt": "twice"}, *rows(12, start=20)]
    files.put(*lines)
    with pytest.raises(RuntimeError, match="device lost"):
        files.run(make_llm(crash_at_step=crash_at_step))
    before = len(files.records())
    with open(files.output, "ab") as file:
        file.write(torn)
    llm = make_llm()
    summary = files.run(llm)
    assert summary.resumed == before and summary.rows == 27 and summary.recorded == 27
    assert len(llm.engine.submitted) == 25 - sum(record["error"] is None for record in files.records()[:before])
    assert sorted(record["line"] for record in files.records()) == list(range(1, 28))
    assert [record["error"]["code"] for record in files.records() if record["line"] in (14, 15)]
    with open(files.output, "rb") as file:
        assert all(json.loads(line) for line in file)


def test_a_finished_job_has_nothing_to_do(files):
    files.put(*rows(3), b"bad\n")
    files.run()
    with open(files.output, "rb") as file:
        before = file.read()
    with files.job() as job:
        assert job.finished and job.resumes == 4
        assert (job.summary().resumed, job.summary().resumed_failed) == (4, 1)
    llm = make_llm()
    summary = files.run(llm)
    assert llm.engine.submitted == [] and summary.recorded == 4
    with open(files.output, "rb") as file:
        assert file.read() == before


def test_rows_added_to_the_input_are_run(files):
    files.put(*rows(3))
    files.run()
    files.put(*rows(5, start=-2))  # two more in front: lines move, ids stay
    summary = files.run()
    assert (summary.answered, summary.resumed) == (2, 3)
    assert len(files.texts()) == 5


def test_changed_rows_are_noticed(files):
    files.put(*rows(4))
    files.run()
    edited = rows(4)
    edited[2]["prompt"] = "edited"
    files.put(*edited)
    with pytest.raises(UserInputError, match=r"1 rows .* have changed .*line 3, custom_id 'r2'.*--rerun_changed"):
        files.job()
    assert files.texts()["r2"] == "text 2"
    assert files.run(rerun_changed=True).answered == 1
    assert files.texts()["r2"] == "edited" and len(files.texts()) == 4


def test_rows_without_custom_id_are_matched_by_line_and_content(files):
    files.put({"prompt": "a"}, {"prompt": "b"})
    files.run()
    files.put({"prompt": "new"}, {"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(UserInputError, match=r"2 rows .* have changed .*first: line 1"):
        files.job()
    files.put(b'\xef\xbb\xbf{"prompt": "a"}\r\n', b' {"prompt": "b"} \n')  # a mark, line ends, blanks: the same rows
    assert files.run().resumed == 2


def test_a_line_that_is_repaired_replaces_its_error(files):
    files.put(*rows(2), b'{"custom_id": "r2", "prompt": \n')
    files.run()
    files.put(*rows(3))
    with pytest.raises(UserInputError, match=r"have changed .*line 3"):
        files.job()
    files.run(rerun_changed=True)
    assert files.texts() == {"r0": "text 0", "r1": "text 1", "r2": "text 2"}


def test_a_repeated_custom_id_that_becomes_the_only_one(files):
    lines = [{"custom_id": "a", "prompt": "first"}, {"custom_id": "a", "prompt": "second"}]
    files.put(*lines)
    assert files.run().errors == {"duplicate_custom_id": 1}
    lines[0]["custom_id"] = "b"
    files.put(*lines)
    with pytest.raises(UserInputError, match=r"2 rows .* have changed"):
        files.job()
    summary = files.run(rerun_changed=True)
    assert (summary.answered, summary.failed, summary.resumed) == (2, 0, 0)
    assert files.texts() == {"a": "second", "b": "first"}
    with files.job() as job:
        assert job.finished


def test_failed_rows_run_again_when_asked(files):
    files.put(*rows(2), {"custom_id": "b", "prompt": "x" * 60})
    files.run(make_llm(max_model_len=50))
    assert files.run().resumed_failed == 1
    summary = files.run(make_llm(max_model_len=200), rerun_failed=True)
    assert (summary.answered, summary.resumed) == (1, 2)
    assert files.texts()["b"] == "x" * 40


def test_records_of_other_rows_are_not_taken_for_these(files):
    files.put(*rows(3))
    files.run()
    files.put(*rows(3, start=1))
    with pytest.raises(UserInputError, match="1 of its 3 records belong to no row"):
        files.job()
    assert files.run(overwrite=True).answered == 3
    assert set(files.texts()) == {"r1", "r2", "r3"}


def test_another_model_or_sampling_is_refused_by_name(files):
    files.put(*rows(3))
    files.run()
    other = Manifest({"model.safetensors": "2"}, {"seed": 1}, {"top_p": 0.5}, {})
    with pytest.raises(UserInputError, match=r"model.safetensors is new; seed was None, is 1; .*top_p.*--overwrite"):
        files.job(manifest=other)
    assert len(files.texts()) == 3
    files.run(manifest=other, overwrite=True)
    assert Manifest.read(manifest_path(files.output)) == other


def test_a_job_that_wrote_nothing_yet_may_change_its_settings(files):
    files.put(*rows(3))
    with pytest.raises(RuntimeError, match="device lost"):
        files.run(make_llm(crash_at_step=1))
    other = Manifest({"model.safetensors": "2"}, {}, {}, {})
    assert files.run(manifest=other).answered == 3
    assert Manifest.read(manifest_path(files.output)) == other


def test_nothing_is_written_before_the_job_runs(files, tmp_path):
    files.put(*rows(3))
    files.job().close()
    assert os.listdir(tmp_path) == ["in.jsonl"]
    for options in ({"also_used": (files.output,)}, {}):
        if not options:
            files.output = files.input
        with pytest.raises(UserInputError, match="same file"):
            files.job(**options)
    with open(files.input) as file:
        assert len(file.readlines()) == 3


def test_a_full_disk_ends_the_job_and_it_can_be_resumed(files, monkeypatch):
    files.put(*rows(30))
    real, written = os.write, [0]

    def write(file, data):
        written[0] += 1
        if written[0] == 5:
            return real(file, data[:40])  # a short write, then no space
        if written[0] == 6:
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(journals.os, "write", write)
    with pytest.raises(OSError, match="No space left.*out.jsonl"):
        files.run()
    monkeypatch.undo()
    assert len(files.records()) == 4
    assert files.run().resumed == 4
    assert len(files.texts()) == 30


# Signals.


@pytest.fixture
def handlers():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_what_has_begun(files, handlers, number):
    files.put({"custom_id": "slow", "prompt": "~~~~"}, *rows(40))
    llm = make_llm(on_step=lambda engine: engine.steps == 10 and signal.raise_signal(number))
    stream = io.StringIO()
    summary = files.run(llm, progress=Progress(stream, interval=0))
    assert summary.interrupted == number.name
    assert f"interrupted by {number.name}" in summary.describe() and "same command" in summary.describe()
    assert "finishing 4 rows that have begun" in stream.getvalue()
    assert "slow" in files.texts() and 4 <= len(files.texts()) < 15
    assert not llm.engine.has_work
    first = len(files.texts())
    assert files.run().resumed == first
    assert len(files.texts()) == 41


def test_a_second_signal_stops_at_once(files, handlers):
    files.put({"custom_id": "slow", "prompt": "~" * 20}, *rows(40))
    llm = make_llm(on_step=lambda engine: engine.steps in (10, 12) and signal.raise_signal(signal.SIGINT))
    summary = files.run(llm)
    assert summary.interrupted == "SIGINT" and llm.engine.steps < 20
    assert "slow" not in files.texts() and not llm.engine.has_work
    files.run()
    assert len(files.texts()) == 41


def test_a_signal_after_the_last_row_is_no_interruption(files, handlers):
    files.put(*rows(3))
    llm = make_llm(on_step=lambda engine: engine.steps == 7 and signal.raise_signal(signal.SIGINT))
    summary = files.run(llm)
    assert summary.recorded == 3 and summary.interrupted is None


def test_a_job_on_another_thread_leaves_signals_alone(files):
    files.put(*rows(3))
    result = []
    thread = threading.Thread(target=lambda: result.append(files.run()))
    thread.start()
    thread.join()
    assert result[0].answered == 3


def test_an_aborted_row_stays_to_be_done(files):
    files.put(*rows(3))
    llm = make_llm(on_step=lambda engine: llm.abort("line-2"))
    summary = files.run(llm)
    assert summary.interrupted == "abort" and set(files.texts()) == {"r0", "r2"}
    files.run()
    assert len(files.texts()) == 3
