import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from qwen35_jax import EngineConfig, SamplingParams, UserInputError
from qwen35_jax.cli import common, generate
from qwen35_jax.cli.common import ENGINE_HELP, SAMPLING_HELP
from tests.oracle import tiny
from tests.qwen35_jax.fakes import FakeEngine, make_llm

pytestmark = pytest.mark.timeout(120)
ROOT = str(pathlib.Path(__file__).resolve().parents[2])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model directory without weights, an input, and the folder that holds both as the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny.hf_config("0.8b-tied")))
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    lines = [{"custom_id": f"r{index}", "prompt": f"text {index}", "max_tokens": 20} for index in range(6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


class Runner:
    """Runs the command on a fake engine and remembers how the model was asked for."""

    def __init__(self, capsys):
        self._capsys = capsys
        self.loads = []
        self.engine = FakeEngine()

    def __call__(self, *flags, defaults=("--model=model", "--input=in.jsonl", "--output=out.jsonl")):
        def make(model, progress, **options):
            self.loads.append((model, options))
            return make_llm(self.engine)

        code = generate.main(["qwen35-generate", *defaults, *flags], make_llm=make)
        self.out, self.err = self._capsys.readouterr()
        return code


@pytest.fixture
def run(capsys):
    return Runner(capsys)


def records(name="out.jsonl"):
    with open(name) as file:
        return [json.loads(line) for line in file]


def test_a_job_ends_with_its_summary_and_the_path_of_the_answers(folder, run):
    assert run() == 0
    assert sorted(record["custom_id"] for record in records()) == [f"r{index}" for index in range(6)]
    assert "6 rows answered, 0 failed" in run.out
    assert run.out.splitlines()[-1] == "output: out.jsonl"
    assert "answering: 6 of 6" in run.err
    assert records()[0]["response"]["body"]["model"] == "model"
    assert run.engine.closed


def test_failed_rows_do_not_fail_the_command_but_are_counted(folder, run):
    with open("in.jsonl", "a") as file:
        file.write("oops\n")
    assert run() == 0
    assert "6 rows answered, 1 failed" in run.out and "1 invalid_json" in run.out and "line 7" in run.out


def test_every_option_of_the_engine_is_a_flag_with_its_default(folder, run):
    assert run() == 0
    assert run.loads == [("model", dataclasses.asdict(EngineConfig()))]
    line = generate.command_line()
    assert set(ENGINE_HELP) == {field.name for field in dataclasses.fields(EngineConfig)}
    line.parse(["x", "--max_num_seqs=3", "--nooverlap_dispatch", "--gpu_memory_utilization=0.5", "--dtype=float32"])
    changed = EngineConfig(max_num_seqs=3, overlap_dispatch=False, gpu_memory_utilization=0.5, dtype="float32")
    assert EngineConfig(**line.engine_options()) == changed


def test_sampling_flags_go_before_generation_config_and_behind_the_row(folder, run):
    with open("in.jsonl", "a") as file:
        file.write('{"custom_id": "own", "prompt": "x", "top_p": 0.3, "max_tokens": 4}\n')
    assert run("--top_p=0.9", "--stop=A", "--stop=B", "--max_tokens=9", "--ignore_eos") == 0
    params = {name: options for name, _, options in run.engine.submitted}
    stop = ("A", "B")
    assert params["line-1"] == SamplingParams(1, 0.6, 0.9, 20, stop=stop, max_tokens=20, ignore_eos=True)
    assert params["line-7"] == SamplingParams(1, 0.6, 0.3, 20, stop=stop, max_tokens=4, ignore_eos=True)
    assert set(SAMPLING_HELP) < {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("flags", "prompt_tokens"),
    [((), 6), (("--enable_thinking",), 14), (("--noenable_thinking",), 6), (('--chat_template_kwargs={"a": 1}',), 10)],
)
def test_template_switches(folder, run, flags, prompt_tokens):
    (folder / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    assert run(*flags) == 0
    assert records()[0]["response"]["body"]["usage"]["prompt_tokens"] == prompt_tokens


# Resume.


def test_resume_after_a_crash(folder, run):
    run.engine = FakeEngine(crash_at_step=9)
    assert run() == 1
    assert "device lost" in run.err and "run the same command again to resume" in run.err
    done = len(records())
    assert 0 < done < 6
    run.engine = FakeEngine()
    assert run() == 0
    assert f"resuming out.jsonl: {done} rows have their record" in run.err
    assert f"{6 - done} rows answered, 0 failed, {done} had their record before" in run.out
    assert len({record["custom_id"] for record in records()}) == len(records()) == 6
    run.loads.clear()
    assert run() == 0
    assert "nothing to do" in run.out and run.loads == []


KILLED = """
import os, signal
from qwen35_jax.cli import common, generate
from tests.qwen35_jax.fakes import FakeEngine, make_llm

engine = FakeEngine(on_step=lambda engine: engine.steps == 11 and os.kill(os.getpid(), signal.SIGKILL))
flags = ["--model=model", "--input=in.jsonl", "--output=out.jsonl"]
generate.main(["qwen35-generate", *flags], make_llm=lambda model, **options: make_llm(engine))
"""


def test_resume_after_being_killed(folder, run):
    result = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, env={**os.environ, "PYTHONPATH": ROOT})
    assert result.returncode == -signal.SIGKILL, result.stderr
    done = len(records())
    assert 0 < done < 6
    assert run() == 0
    assert f"{6 - done} rows answered, 0 failed, {done} had their record before" in run.out
    assert sorted(record["custom_id"] for record in records()) == [f"r{index}" for index in range(6)]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--temperature=0.1", "temperature was 0.6, is 0.1"),
        ("--seed=4", "seed was 0, is 4"),
        ("--enable_thinking", "chat"),
    ],
)
def test_a_resume_with_other_settings_is_refused(folder, run, flag, words):
    assert run() == 0
    assert run(flag) == 2
    assert words in run.err and "--overwrite" in run.err
    assert run("--max_num_seqs=7") == 0  # changes speed, not answers
    assert run(flag, "--overwrite") == 0
    assert len(records()) == 6


def test_an_interrupted_command_says_so_in_its_exit_code(folder, run):
    run.engine = FakeEngine(
        max_num_seqs=1, on_step=lambda engine: engine.steps == 3 and signal.raise_signal(signal.SIGTERM)
    )
    assert run() == 128 + signal.SIGTERM
    assert "interrupted by SIGTERM" in run.out
    assert run() == 0 and len(records()) == 6


# Wrong commands: one line, exit code 2, nothing written, no model loaded.


def broken_config(folder):
    (folder / "model" / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')


def no_config(folder):
    os.remove(folder / "model" / "config.json")


def broken_generation_config(folder):
    (folder / "model" / "generation_config.json").write_text('{"top_p": 7}')


def foreign_output(folder):
    (folder / "out.jsonl").write_text("precious\n")


def linked_output(folder):
    os.link(folder / "in.jsonl", folder / "out.jsonl")


def soft_output(folder):
    os.symlink(folder / "in.jsonl", folder / "out.jsonl")


def unreadable_input(folder):
    os.remove(folder / "in.jsonl")


def nothing(folder):
    pass


WRONG = [
    (nothing, ["--model=nowhere"], "nowhere"),
    (nothing, ["--model="], "--model is needed"),
    (nothing, ["--model=in.jsonl"], "in.jsonl"),
    (no_config, [], "config.json"),
    (broken_config, [], "llama"),
    (broken_generation_config, [], "top_p"),
    (unreadable_input, [], "in.jsonl"),
    (nothing, ["--input=model"], "directory"),
    (nothing, ["--output=in.jsonl"], "same file"),
    (nothing, ["--output=./model/../in.jsonl", "--overwrite"], "same file"),
    (linked_output, ["--overwrite"], "same file"),
    (soft_output, ["--overwrite"], "same file"),
    (nothing, ["--output=model"], "not a regular file"),
    (nothing, ["--output=new/"], "name of a directory"),
    (nothing, [f"--output={'x' * 250}"], "too long"),
    (nothing, ["--output=nowhere/out.jsonl"], "nowhere"),
    (foreign_output, [], "not written by this command"),
    (nothing, ["--trace_output=out.jsonl"], "same file"),
    (nothing, ["--trace_output=in.jsonl"], "is the input"),
    (nothing, ["--trace_output=nowhere/t"], "nowhere"),
    (nothing, ["--trace_output=model"], "directory"),
    (nothing, ["--max_num_seq=3"], "max_num_seq"),
    (nothing, ["--undefok=max_num_seq", "--max_num_seq=3"], "--undefok is not supported"),
    (nothing, ["--max_num_seqs=many"], "max_num_seqs"),
    (nothing, ["--max_num_seqs=0"], "max_num_seqs"),
    (nothing, ["--overwrite=perhaps"], "overwrite"),
    (nothing, ["--scheduler_policy=slo"], "slo"),
    (nothing, ["--decode_overlap=sometimes"], "sometimes"),
    (nothing, ["--tensor_parallel_size=2"], "tensor_parallel_size"),
    (nothing, ["--enable_prefix_caching"], "enable_prefix_caching"),
    (nothing, ["--temperature=-1"], "--temperature"),
    (nothing, ["--top_p=high"], "top_p"),
    (nothing, ["--chat_template_kwargs={"], "chat_template_kwargs"),
    (nothing, ["--chat_template_kwargs=[]"], "chat_template_kwargs"),
    (nothing, ['--chat_template_kwargs={"a": NaN}'], "NaN"),
    (nothing, ['--chat_template_kwargs={"tools": []}'], "'tools' cannot be set"),
    (nothing, ['--chat_template_kwargs={"enable_thinking": "no"}'], "enable_thinking must be true or false"),
    (nothing, ["stray"], "stray"),
    (nothing, ["--input"], "input"),
]


@pytest.mark.parametrize(("prepare", "flags", "words"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_command_says_what_and_writes_nothing(folder, run, prepare, flags, words):
    prepare(folder)

    def state():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = state()
    assert run(*flags) == 2
    assert state() == before
    assert run.loads == [] and run.out == ""
    assert len(run.err.splitlines()) == 1 and run.err.startswith("error: ") and words in run.err


@pytest.mark.parametrize("missing", ["--model=model", "--input=in.jsonl", "--output=out.jsonl"])
def test_a_missing_flag_is_named(folder, run, missing):
    given = [flag for flag in ("--model=model", "--input=in.jsonl", "--output=out.jsonl") if flag != missing]
    assert run(defaults=given) == 2
    assert missing.split("=")[0] in run.err


# The console command.


def console(*flags, cwd=None):
    command = [sys.executable, "-c", "from qwen35_jax.cli.generate import run; run()", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "PYTHONPATH": ROOT})


def test_help_names_every_flag_and_loads_nothing_heavy():
    code = (
        "import sys; from qwen35_jax.cli import generate\n"
        "assert generate.main(['x', '--help']) == 0\n"
        "assert generate.main(['x', '--nonsense']) == 2\n"
        "assert not {'jax', 'transformers', 'grain'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("model", "input", "output", "trace_output", "enable_thinking", *ENGINE_HELP, *SAMPLING_HELP):
        assert f"--{name}\n" in result.stdout or f"--[no]{name}\n" in result.stdout
    assert "usage: qwen35-generate" in result.stdout and "Exit codes" in result.stdout


def test_the_entry_point(tmp_path):
    result = console("--model=nowhere", "--input=a", "--output=b")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "error: model directory 'nowhere' does not exist (models are not downloaded by name)\n"


def test_weights_that_are_missing_leave_no_output(folder):
    command = [
        sys.executable,
        "-m",
        "qwen35_jax.cli.generate",
        "--model=model",
        "--input=in.jsonl",
        "--output=out.jsonl",
    ]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ROOT})
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert sorted(os.listdir(folder)) == ["in.jsonl", "model"]


def test_a_trace_of_every_step(folder, run):
    @dataclasses.dataclass
    class Record:
        kind: str

    class Trace:
        records = (Record("prefill"), Record("decode"))

    run.engine.trace = Trace()
    assert run("--trace_output=trace.jsonl") == 0
    assert records("trace.jsonl") == [{"kind": "prefill"}, {"kind": "decode"}]


def test_a_trace_that_cannot_be_written_does_not_fail_the_job(folder, run):
    run.engine = FakeEngine(on_step=lambda engine: engine.steps == 2 and os.mkdir("trace.jsonl"))
    assert run("--trace_output=trace.jsonl") == 0
    assert "warning: --trace_output trace.jsonl cannot be written: Is a directory" in run.err
    assert len(records()) == 6


def test_a_job_that_is_refused_late_writes_no_trace(folder, run, monkeypatch):
    def refuse(*args, **options):
        raise UserInputError("another job is writing")

    monkeypatch.setattr("qwen35_jax.batch.job.Journal", refuse)
    assert run("--trace_output=trace.jsonl") == 2
    assert sorted(os.listdir()) == ["in.jsonl", "model"]


@pytest.mark.parametrize("place", ["in.jsonl", "in.jsonl/cache"])
def test_a_cache_directory_that_cannot_be(folder, capsys, place):
    flags = ["--model=model", "--input=in.jsonl", "--output=out.jsonl", f"--compilation_cache_dir={place}"]
    assert generate.main(["qwen35-generate", *flags]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and err[0].startswith(f"error: compilation_cache_dir '{place}'")
    assert sorted(os.listdir()) == ["in.jsonl", "model"]


NARROW = """
import sys
from qwen35_jax.cli import common, generate
from tests.qwen35_jax.fakes import make_llm

flags = ["--model=model", "--input=in.jsonl", "--output=\u51fa\u529b.jsonl"]
common.run_command(lambda argv: generate.main(["x", *flags], make_llm=lambda model, **options: make_llm()))
"""


def test_a_terminal_that_cannot_show_the_path_does_not_fail_the_job(folder):
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", NARROW], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert "output: \\u51fa\\u529b.jsonl" in result.stdout
    assert len(records("\u51fa\u529b.jsonl")) == 6


@pytest.mark.parametrize(
    ("flags", "raised", "code", "said"),
    [
        ((), None, 7, ""),
        (("--number=3",), UserInputError("of two\n  lines"), 2, "error: of two lines\n"),
        ((), OverflowError("too many"), 2, "error: too many\n"),
        ((), KeyboardInterrupt(), 130, "interrupted\n"),
        (("--number=x",), None, 2, "error: flag --number=x"),
        (("stray",), None, 2, "error: unexpected argument 'stray'"),
    ],
)
def test_the_frame_of_every_command(flags, raised, code, said, capsys):
    def body(line):
        if raised is not None:
            raise raised
        return 7

    line = common.CommandLine("x [--number=N]", "Does nothing.")
    line.group("All")
    line.define("int", "number", 1, "A number.")
    assert common.run_with_flags(line, ["x", *flags], body, OverflowError) == code
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(said) and bool(shown.err) == bool(said)


def test_help_runs_nothing_and_other_exceptions_are_no_exit_codes(capsys):
    line = common.CommandLine("x", "Does nothing.")
    assert common.run_with_flags(line, ["x", "--stray", "-h"], lambda line: pytest.fail("ran")) == 0
    assert capsys.readouterr().out.startswith("usage: x\n\nDoes nothing.")
    with pytest.raises(ZeroDivisionError):
        common.run_with_flags(line, ["x"], lambda line: 1 // 0)


def test_a_terminated_command_ends_what_it_has_started_and_removes_what_it_has_made(tmp_path):
    mark = tmp_path / "mark"
    script = (
        "import pathlib, time\n"
        "from qwen35_jax.cli.common import run_command\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "def main(argv):\n"
        "    mark.touch()\n"
        "    try:\n"
        "        print('made', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        mark.unlink()\n"
        "run_command(main)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "made\n" and mark.exists()
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert not mark.exists()
