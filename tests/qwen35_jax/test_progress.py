"""What long work says on a terminal and elsewhere."""

import io

from qwen35_jax import SamplingParams
from qwen35_jax.progress import Progress
from tests.qwen35_jax.fakes import make_llm


def test_plain_lines_where_there_is_no_terminal():
    stream, now = io.StringIO(), [0.0]
    progress = Progress(stream, interval=5, clock=lambda: now[0])
    for done in range(1, 5):
        now[0] += 2
        progress("compiling", done, 4, f"bucket {done}")
    assert stream.getvalue().splitlines() == [
        "compiling: 1 of 4, 2 s, bucket 1",
        "compiling: 4 of 4, 8 s, bucket 4",
    ]


def test_a_stage_that_announces_itself_is_timed_from_there():
    stream, now = io.StringIO(), [0.0]
    progress = Progress(stream, interval=0, clock=lambda: now[0])
    now[0] = 3.0
    progress("loading", 0, 1)
    now[0] = 5.0
    progress("loading", 1, 1)
    assert stream.getvalue().splitlines() == ["loading: 0 of 1, 0 s", "loading: 1 of 1, 2 s"]


def test_rows_are_reported_with_their_rate_and_failures():
    stream, now = io.StringIO(), [0.0]
    bar = Progress(stream, interval=0, clock=lambda: now[0]).rows(3, done=1)
    now[0] = 2.0
    bar.add(rows=1, tokens=40)
    bar.add(rows=1, failed=1)
    assert stream.getvalue().splitlines() == [
        "answering: 2 of 3, 2 s, 20.0 tokens/s",
        "answering: 3 of 3, 2 s, 20.0 tokens/s, 1 failed",
    ]


def test_a_bar_on_a_terminal():
    stream = io.StringIO()
    progress = Progress(stream, terminal=True)
    progress("loading", 1, 2, "layer 0")
    progress.message("note")
    progress("loading", 2, 2)
    assert "loading" in stream.getvalue() and "note" in stream.getvalue() and "2/2" in stream.getvalue()


def test_generate_reports_on_stderr(capsys):
    make_llm().generate(["a", "b"], SamplingParams(max_tokens=30))
    assert "answering: 2 of 2" in capsys.readouterr().err
    make_llm().generate(["a", "b"], SamplingParams(max_tokens=30), use_tqdm=False)
    assert capsys.readouterr().err == ""
