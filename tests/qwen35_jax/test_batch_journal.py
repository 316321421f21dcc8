import json
import os
import shutil
import subprocess
import sys

import pytest

from qwen35_jax import EngineConfig, SamplingParams, UserInputError
from qwen35_jax.batch import journal as journals
from qwen35_jax.batch import manifest as manifests
from qwen35_jax.batch.journal import (
    Journal,
    KeyBook,
    OutputState,
    check_output,
    iter_records,
    manifest_path,
    pack_key,
    probe_lock,
    read_output,
)
from qwen35_jax.batch.manifest import Manifest, model_digests

pytestmark = pytest.mark.timeout(60)
MANIFEST = Manifest(
    model_files={"config.json": "1"}, options={"seed": 0}, sampling={"top_k": 5}, chat_template_kwargs={}
)


def record(custom_id, line, *, error=None, digest="d"):
    response = None if error else {"status_code": 200}
    error = error and {"code": error}
    return {"custom_id": custom_id, "line": line, "line_digest": digest, "response": response, "error": error}


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "out.jsonl")


def write(out, *records, **options):
    with Journal(out, MANIFEST, **options) as journal:
        for item in records:
            journal.write(item)


def test_every_record_is_in_the_file_as_soon_as_it_is_written(out):
    with Journal(out, MANIFEST) as journal:
        for number in range(3):
            journal.write(record(f"r{number}", number + 1))
            with open(out, "rb") as file:
                assert len(file.read().splitlines()) == number + 1
    assert [item["custom_id"] for item in iter_records(out)] == ["r0", "r1", "r2"]
    assert Manifest.read(manifest_path(out)) == MANIFEST


def test_records_are_synced_every_few_seconds_and_at_the_end(out, monkeypatch):
    now, synced = [0.0], []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(now[0]), real(file)))
    with Journal(out, MANIFEST, clock=lambda: now[0], fsync_seconds=5) as journal:
        synced.clear()
        for number in range(12):
            journal.write(record("r", number))
            now[0] += 1
    assert synced == [5.0, 10.0, 12.0]


@pytest.mark.parametrize("torn", [b"{", b'{"custom_id": "c", "line": 3', b"\x00" * 100, b"garbage\n", b"x\n\x00\n{"])
def test_a_torn_end_is_cut_off(out, torn):
    write(out, record("a", 1), record(None, 2, error="invalid_json"))
    whole = os.path.getsize(out)
    with open(out, "ab") as file:
        file.write(torn)
    state = read_output(out)
    assert (state.end, state.torn, state.failed) == (whole, len(torn), 1)
    assert set(state.done) == {pack_key('id:"a"'), pack_key("line:2")}
    write(out, record("c", 3), keep=state)
    assert [item["line"] for item in iter_records(out)] == [1, 2, 3]
    assert read_output(out).torn == 0


def test_a_whole_record_without_its_newline_is_torn_too(out):
    write(out, record("a", 1))
    with open(out, "ab") as file:
        file.write(json.dumps(record("b", 2)).encode())
    assert len(read_output(out).done) == 1


def test_a_broken_line_in_the_middle_is_not_repaired(out):
    write(out, record("a", 1))
    with open(out, "ab") as file:
        file.write(b"oops\n" + json.dumps(record("b", 2)).encode() + b"\n")
    with pytest.raises(UserInputError, match="line 2 of .*out.jsonl"):
        read_output(out)


@pytest.mark.parametrize("content", [b'{"answer": 1}\n', b"one\ntwo\n"])
def test_a_file_of_other_lines_is_not_taken_for_torn(out, content):
    write(out)
    with open(out, "wb") as file:  # somebody worked on the output in place; its manifest is still there
        file.write(content)
    with pytest.raises(UserInputError, match="line 1 of .*out.jsonl is not a record"):
        read_output(out)


def test_keys_of_records_and_rows_agree(out):
    write(
        out, record("a", 1), record("a", 2, error="duplicate_custom_id"), record(7, 3), record("7", 4), record(None, 5)
    )
    book = KeyBook()
    keys = [book.key(custom_id, line) for custom_id, line in [("a", 1), ("a", 2), (7, 3), ("7", 4), (None, 5)]]
    assert [duplicate for _, duplicate in keys] == [False, True, False, False, False]
    assert set(read_output(out).done) == {pack_key(key) for key, _ in keys}
    assert len({key for key, _ in keys}) == 5


def test_records_can_be_taken_out(out):
    write(out, record("a", 1), record("b", 2, error="x"), record("c", 3))
    state = read_output(out)
    os.chmod(out, 0o640)
    write(out, record("b", 2), keep=state, drop=frozenset([pack_key('id:"b"')]))
    assert [(item["custom_id"], item["error"]) for item in iter_records(out)] == [("a", None), ("c", None), ("b", None)]
    assert os.stat(out).st_mode & 0o777 == 0o640
    assert sorted(os.listdir(os.path.dirname(out))) == ["out.jsonl", "out.jsonl.manifest.json"]


def test_starting_anew_throws_old_records_away(out):
    write(out, record("a", 1))
    write(out, record("b", 1))
    assert [item["custom_id"] for item in iter_records(out)] == ["b"]


def test_an_output_that_grew_meanwhile_is_left_alone(out):
    write(out, record("a", 1))
    with pytest.raises(UserInputError, match="was changed"):
        write(out, keep=OutputState())
    assert len(list(iter_records(out))) == 1


def test_an_output_that_was_replaced_meanwhile_is_left_alone(out, monkeypatch):
    write(out, record("a", 1))
    state = read_output(out)
    locked = journals._lock

    def lock_late(file, path):  # between opening and locking, another job has rewritten the file
        shutil.copyfile(path, f"{path}.new")
        os.replace(f"{path}.new", path)
        locked(file, path)

    monkeypatch.setattr(journals, "_lock", lock_late)
    with pytest.raises(UserInputError, match="was replaced"):
        write(out, record("b", 2), keep=state)


def test_an_output_that_cannot_be_made_is_named(out):
    with pytest.raises(UserInputError, match="out.jsonl cannot be written: Not a directory"):
        Journal(f"{__file__}/out.jsonl", MANIFEST)


def test_records_are_taken_out_of_a_file_behind_a_link(out, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "target.jsonl"
    target.touch()
    os.symlink(target, out)
    write(out, record("a", 1), record("b", 2, error="x"))
    opened, real = [], open
    with pytest.MonkeyPatch.context() as patch:  # the new file must lie beside the old one: on the same file system
        patch.setattr("builtins.open", lambda path, *args, **kw: opened.append(str(path)) or real(path, *args, **kw))
        write(out, keep=read_output(out), drop=frozenset([pack_key('id:"b"')]))
    assert f"{target}.tmp" in opened and f"{out}.tmp" not in opened
    assert os.path.islink(out) and [item["custom_id"] for item in iter_records(out)] == ["a"]


def test_one_job_at_a_time(out):
    probe_lock(out)
    assert not os.path.exists(out)
    with Journal(out, MANIFEST) as journal:
        journal.write(record("a", 1))
        with pytest.raises(UserInputError, match="another job is writing"):
            Journal(out, MANIFEST)
        with pytest.raises(UserInputError, match="another job is writing"):
            probe_lock(out)
    probe_lock(out)
    assert len(list(iter_records(out))) == 1


# Which outputs are accepted.


def test_a_new_output_and_one_of_an_earlier_job(out):
    check_output(out, overwrite=False)
    open(out, "w").close()
    check_output(out, overwrite=False)
    os.remove(out)
    write(out, record("a", 1))
    check_output(out, overwrite=False)


def test_the_output_must_not_be_the_input(tmp_path, out):
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    os.symlink(source, tmp_path / "soft")
    os.link(source, tmp_path / "hard")
    os.symlink(tmp_path, tmp_path / "folder")
    for name in ("in.jsonl", "soft", "hard", "folder/in.jsonl", "../" + tmp_path.name + "/in.jsonl"):
        with pytest.raises(UserInputError, match="same file"):
            check_output(str(tmp_path / name), overwrite=True, inputs=[str(source)])
    for taken in (manifest_path(out), f"{manifest_path(out)}.tmp", f"{out}.tmp"):
        with pytest.raises(UserInputError, match="same file"):
            check_output(out, overwrite=True, inputs=[taken])


def test_files_of_others_are_not_touched(tmp_path, out):
    with open(out, "w") as file:
        file.write("precious\n")
    with pytest.raises(UserInputError, match="was not written by this command"):
        check_output(out, overwrite=False)
    check_output(out, overwrite=True)
    with pytest.raises(UserInputError, match="output -: answers go into a file"):
        check_output("-", overwrite=True)
    with pytest.raises(UserInputError, match="not a regular file"):
        check_output(str(tmp_path), overwrite=True)
    with pytest.raises(UserInputError, match="new/ is the name of a directory"):
        check_output(str(tmp_path / "new") + "/", overwrite=True)
    with pytest.raises(UserInputError, match="aaa cannot be written: File name too long"):
        check_output(str(tmp_path / ("a" * 245)), overwrite=True)  # 245 fits, but not with .manifest.json
    with pytest.raises(UserInputError, match=r"directory .*nowhere does not exist"):
        check_output(str(tmp_path / "nowhere" / "out.jsonl"), overwrite=False)
    os.symlink(tmp_path / "gone", tmp_path / "dangling")
    with pytest.raises(UserInputError, match="symbolic link"):
        check_output(str(tmp_path / "dangling"), overwrite=False)


def test_the_output_is_not_where_messages_go(tmp_path):
    code = (
        "import sys; from qwen35_jax.batch.journal import check_output\n"
        "try: check_output(sys.argv[1], overwrite=True)\n"
        "except ValueError as error: sys.exit(str(error))"
    )
    answers = tmp_path / "answers.jsonl"
    for path in (str(answers), "/dev/stdout"):
        with open(answers, "w") as file:
            run = subprocess.run([sys.executable, "-c", code, path], stdout=file, stderr=subprocess.PIPE, text=True)
        assert run.stderr.startswith(f"output {path} is where this command's standard output goes")


def test_an_output_without_permissions_is_named(out, monkeypatch):
    open(out, "w").close()
    denied = {os.R_OK: "cannot be read, which a resume needs", os.W_OK: "cannot be written"}
    for mode, words in denied.items():
        monkeypatch.setattr(journals.os, "access", lambda path, asked, mode=mode: path != out or asked != mode)
        with pytest.raises(UserInputError, match=f"{words}: permission denied"):
            check_output(out, overwrite=False)


# The manifest.


def test_a_manifest_survives_the_disk(tmp_path):
    path = str(tmp_path / "m.json")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    manifest = Manifest.of_job(
        str(tmp_path / "model"), EngineConfig(), SamplingParams(stop=["x"]), {"enable_thinking": False}, "in.jsonl"
    )
    manifest.write(path)
    assert Manifest.read(path).differences(manifest) == []
    assert os.listdir(tmp_path).count("m.json.tmp") == 0


def test_what_changes_answers_is_compared_and_what_does_not_is_not(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def make(config=EngineConfig(), sampling=SamplingParams(), switches={}):  # noqa: B006, B008
        return Manifest.of_job(str(tmp_path), config, sampling, switches, "in.jsonl")

    base = make()
    for same in (
        EngineConfig(max_num_seqs=3),
        EngineConfig(decode_overlap="stream"),
        EngineConfig(kernels="reference"),
    ):
        assert make(same).differences(base) == []
    assert make(EngineConfig(seed=1)).differences(base) == ["seed was 0, is 1"]
    assert make(EngineConfig(dtype="float32")).differences(base) == ["dtype was 'auto', is 'float32'"]
    assert make(sampling=SamplingParams(top_k=7)).differences(base) == ["sampling default top_k was 0, is 7"]
    assert make(switches={"a": 1}).differences(base) == ["chat_template_kwargs.a was None, is 1"]
    (tmp_path / "config.json").write_text("{ }")
    (tmp_path / "new.json").write_text("{ }")
    assert make().differences(base) == ["model file config.json differs", "model file new.json is new"]
    os.remove(tmp_path / "config.json")
    assert make().differences(base) == ["model file config.json is gone", "model file new.json is new"]


def test_large_files_are_told_apart_without_reading_them(tmp_path, monkeypatch):
    data = bytearray(os.urandom(1 << 20))
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "README.md").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("x")
    (tmp_path / "cache").mkdir()
    for own in ("in.jsonl", "out.jsonl", "out.jsonl.manifest.json", "trace.jsonl", "cache/program"):
        (tmp_path / own).write_text("x")  # a job that works in the model's directory does not change the model
    (tmp_path / "params" / "0000").mkdir(parents=True)
    (tmp_path / "params" / "0000" / "data").write_text("x")
    before = model_digests(str(tmp_path))
    assert list(before) == ["model.safetensors", "params/0000/data"]
    (tmp_path / "model.safetensors").write_bytes(os.urandom(1 << 20))
    assert model_digests(str(tmp_path)) != before
    (tmp_path / "model.safetensors").write_bytes(data)
    assert model_digests(str(tmp_path)) == before
    assert manifests._SAMPLES * manifests._BLOCK < (1 << 20) / 4


BROKEN_MANIFESTS = ["", "{", "[]", "{}", '{"format": 1}', '{"format": 99}', '{"format": 1, "x": 2}']
BROKEN_MANIFESTS += ['{"format": 1, "model_files": [], "options": {}, "sampling": {}, "chat_template_kwargs": {}}']


@pytest.mark.parametrize("content", BROKEN_MANIFESTS)
def test_a_broken_manifest_is_named(tmp_path, content):
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(UserInputError, match=r"m.json is not a job's manifest"):
        Manifest.read(str(tmp_path / "m.json"))
