import bz2
import gzip
import lzma
import os
import threading
import time

import pytest

from qwen35_jax import UserInputError
from qwen35_jax.batch import reader
from qwen35_jax.batch.reader import LineSource, read_ahead

pytestmark = pytest.mark.timeout(60)


def lines_of(tmp_path, content):
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    source = LineSource(path)
    found = [(line.number, line.raw) for line in (source[index] for index in range(len(source)))]
    source.close()
    return found


def test_lines_end_at_newlines_only(tmp_path):
    content = "a\u2028b\x85c\x0bd\x0ce\r\n\n\nf\rg\n".encode()
    assert lines_of(tmp_path, content) == [(1, "a\u2028b\x85c\x0bd\x0ce\r".encode()), (4, b"f\rg")]


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n\n"])
def test_files_without_lines(tmp_path, content):
    assert lines_of(tmp_path, content) == []


@pytest.mark.parametrize("scan", [1, 2, 3, 7, 1 << 20])
def test_the_last_line_may_lack_its_newline_and_blocks_may_cut_anywhere(tmp_path, monkeypatch, scan):
    monkeypatch.setattr(reader, "_SCAN_BYTES", scan)
    assert lines_of(tmp_path, b"one\n\ntwo\nthree") == [(1, b"one"), (3, b"two"), (4, b"three")]
    assert lines_of(tmp_path, b"one\n\ntwo\nthree\n") == [(1, b"one"), (3, b"two"), (4, b"three")]


def test_only_the_beginning_of_an_overlong_line_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 10)
    (tmp_path / "in.jsonl").write_bytes(b"x" * 10 + b"\n" + b"y" * 1000 + b"\nz\n")
    source = LineSource(tmp_path / "in.jsonl")
    assert [source[index].too_long for index in range(3)] == [False, True, False]
    assert len(source[1].raw) == 11 and source[1].length == 1000


def test_unreadable_inputs_are_named(tmp_path):
    with pytest.raises(UserInputError, match=r"cannot read input .*nothing.jsonl: No such file"):
        LineSource(tmp_path / "nothing.jsonl")
    with pytest.raises(UserInputError, match="directory"):
        LineSource(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserInputError, match="not a regular file"):
        LineSource(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b'{"prompt": "a"}\n'), "compressed with gzip"),
        (bz2.compress(b'{"prompt": "a"}\n'), "compressed with bzip2"),
        (lzma.compress(b'{"prompt": "a"}\n'), "compressed with xz"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "compressed with zstd"),
        (b"PK\x03\x04\x14\x00", "a zip archive"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "UTF-16"),
        ('{"prompt": "a"}\n'.encode("utf-32"), "UTF-32"),
    ],
    ids=["gzip", "bzip2", "xz", "zstd", "zip", "utf-16", "utf-32"],
)
def test_a_file_of_another_kind_is_named_as_such(tmp_path, content, words):
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(UserInputError, match=rf"cannot read input .*in.jsonl: it is .*{words}.*; a plain JSONL file"):
        LineSource(tmp_path / "in.jsonl")


def test_a_first_line_that_begins_like_another_kind_is_a_bad_line_alone(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'BZhello\n{"prompt": "a"}\n')
    assert [line.raw for line in LineSource(tmp_path / "in.jsonl")] == [b"BZhello", b'{"prompt": "a"}']


def test_reading_ahead_is_ordered_bounded_and_ends_with_its_context(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"".join(b"%d\n" % number for number in range(1000)))
    source, seen = LineSource(tmp_path / "in.jsonl"), []

    def transform(line):
        seen.append(line.number)
        return None if line.number % 10 == 0 else int(line.raw)

    threads = threading.active_count()
    with read_ahead(source, transform, ahead=8) as rows:
        assert [next(rows) for _ in range(12)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12]
        time.sleep(0.1)
        assert len(seen) <= 13 + 2 * 8
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads
    with read_ahead(source, transform) as rows:
        assert list(rows) == [number for number in range(1000) if (number + 1) % 10]


def test_an_error_of_the_transform_reaches_the_reader(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"1\n2\nx\n")
    with read_ahead(LineSource(tmp_path / "in.jsonl"), lambda line: int(line.raw)) as rows:
        with pytest.raises(ValueError, match="x"):
            list(rows)
