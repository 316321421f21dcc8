"""The command qwen35-bench: flags, cells, output and exit codes, on a real tiny engine."""

import json
import os
import time
import tomllib
from pathlib import Path

import pytest

from qwen35_jax import loading
from qwen35_jax.bench import device_trace, start
from qwen35_jax.bench.device_trace import DeviceEvent, DeviceTrace
from qwen35_jax.bench.records import newest, read_records
from qwen35_jax.cli import bench
from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.engine import Engine
from qwen35_jax.errors import UserInputError
from qwen35_jax.startup import StartReport
from tests import engine_kit

pytestmark = pytest.mark.timeout(200)
QUICK = ("--preset=tiny-4b", "--check_rows=1", "--warm_up_requests=1")


class Runner:
    """Runs the command on an engine of the kit and remembers how it was asked for."""

    def __init__(self, capsys):
        self._capsys = capsys
        self.config = None
        self.engine = None

    def __call__(self, *words):
        self.config = None

        def make(directory, config, progress):
            self.config, self.model = config, ModelConfig.from_hf(directory)
            self.engine = engine_kit.kit("off").engine()
            return self.engine

        code = bench.main(["qwen35-bench", *words], make_engine=make)
        self.out, self.err = self._capsys.readouterr()
        return code

    @property
    def records(self):
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def run(capsys):
    engine_kit.kit("off")  # its programs are there before the command counts what the compilation cache has
    return Runner(capsys)


def test_cells_of_several_kinds_on_one_engine(run, tmp_path):
    path = tmp_path / "new" / "results.json"
    cells = "throughput:20x2:3,closed:20x3:c2:3,open:20x2:qps500:3"
    assert run(*QUICK, f"--cells={cells}", f"--results={path}", "--start_cell=cold", "--workload_seed=4") == 0
    names = [
        "start/tiny-4b@fp32",
        "offline/tiny-4b/20x2@fp32",
        "closed/tiny-4b/c2/20x3@fp32",
        "open/tiny-4b/qps500/20x2@fp32",
    ]
    assert [record["cell"] for record in run.records] == names
    assert [record.to_dict() for record in read_records(path)] == run.records
    assert run.records[1]["settings"]["workload_seed"] == 4
    begin = run.records[0]
    assert 0 < begin["metrics"]["first_token_s"] < begin["metrics"]["cold_s"]
    assert begin["settings"]["clock_from"] == "process start"
    assert all(name in run.err for name in ("output_tok_s", "ttft_mean_ms", *names))
    assert run.config.max_model_len == 64 and run.config.load_format == "random" and run.config.skip_tokenizer_init
    assert run.model == ModelConfig.preset("tiny-4b")
    assert not hasattr(run.engine, "_programs")  # closed
    assert run(*QUICK, "--cells=throughput:20x2:2", f"--results={path}") == 0
    assert [record.cell for record in read_records(path)] == [*names, names[1]]


def test_several_concurrencies(run):
    assert run("closed", *QUICK, "--concurrency=1,2", "--input_len=9", "--output_len=2", "--num_requests=3") == 0
    assert [record["cell"] for record in run.records] == ["closed/tiny-4b/c1/9x2@fp32", "closed/tiny-4b/c2/9x2@fp32"]
    assert [record["settings"]["concurrency"] for record in run.records] == [1, 2]


def test_a_cell_whose_checks_fail_is_printed_and_not_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Engine, "compiles_after_warmup", property(lambda self: self._compiles.count + time.monotonic_ns())
    )
    path = tmp_path / "results.json"
    assert run("throughput", *QUICK, "--input_len=9", "--output_len=2", "--num_requests=2", f"--results={path}") == 1
    assert len(run.records) == 1 and run.records[0]["checks"]["compiles_after_warmup"] > 0
    assert "offline/tiny-4b/9x2@fp32: FAILED: compiles_after_warmup = " in run.err
    assert not path.exists()


PROFILED = ("--cells=throughput:20x8:3", "--profile_seconds=0.01")
EVENTS = DeviceTrace((DeviceEvent("a", "", "", 0, 30), DeviceEvent("b", "", "", 90, 10)))


def test_a_record_is_written_before_the_profile_and_replaced_after_it(run, tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    assert run(*QUICK, "--cells=throughput:20x8:2,throughput:9x2:2", f"--results={path}") == 0
    before = read_records(path)
    early = []

    def profile(window):
        early.extend(read_records(path))  # what a run that is killed here leaves
        window()
        return EVENTS

    monkeypatch.setattr(device_trace, "profile", profile)
    assert run(*QUICK, *PROFILED, f"--results={path}") == 0
    assert early[:2] == before and len(early) == 3
    left = early[-1]
    assert left.checks["profile"] == "not finished" and "idle_share" not in left.metrics
    assert (left.metrics["requests"], left.checks["rows_compared"], left.faults()) == (3, 1, ("measured on a CPU",))
    assert newest(early)[left.cell] is left
    after = read_records(path)
    assert [record.to_dict() for record in after] == [*(record.to_dict() for record in before), *run.records]
    fuller = after[-1]
    assert fuller.checks == left.checks | {"profile": "done"} and fuller.date == left.date
    assert fuller.metrics.keys() - left.metrics.keys() == {"idle_share", "profile_s"}
    assert left.metrics.items() <= fuller.metrics.items()


@pytest.mark.parametrize(("error", "code"), [(OSError("no space"), 1), (KeyboardInterrupt(), 130)])
def test_a_run_that_ends_while_it_profiles_keeps_its_cell(run, tmp_path, monkeypatch, error, code):
    def profile(window):
        raise error

    monkeypatch.setattr(device_trace, "profile", profile)
    path = tmp_path / "results.json"
    assert run(*QUICK, *PROFILED, f"--results={path}") == code
    (record,) = read_records(path)
    assert run.records == [record.to_dict()]
    assert record.checks["profile"] == "not finished" and record.metrics["requests"] == 3
    assert not hasattr(run.engine, "_programs")  # closed


def test_a_compile_while_profiling_fails_the_cell_and_keeps_what_was_measured(run, tmp_path, monkeypatch):
    def profile(window):
        run.engine._compiles.count += 1
        window()
        return EVENTS

    monkeypatch.setattr(device_trace, "profile", profile)
    path = tmp_path / "results.json"
    assert run(*QUICK, *PROFILED, f"--results={path}") == 1
    assert run.records[0]["checks"]["compiles_after_warmup"] == 1 and "FAILED: compiles_after_warmup = 1" in run.err
    (record,) = read_records(path)
    assert record.checks["compiles_after_warmup"] == 0 and record.checks["profile"] == "not finished"


def test_a_start_that_is_not_what_it_claims_fails(run, tmp_path):
    words = ("--cells=throughput:9x1:1", "--start_cell=warm", f"--compilation_cache_dir={tmp_path}")
    assert run(*QUICK, *words) == 1  # the kit's programs come from no cache
    assert "start/tiny-4b@fp32: FAILED: not a warm start: 5 of 5 programs were compiled" in run.err


def test_a_cold_start_needs_an_empty_store_and_a_warm_one_a_directory(run, tmp_path):
    words = (*QUICK, "--cells=throughput:9x1:1", f"--compilation_cache_dir={tmp_path}")
    (tmp_path / "programs").mkdir()
    assert run(*words, "--start_cell=cold") == 0
    (tmp_path / "programs" / "ab.program").touch()
    assert run(*words, "--start_cell=cold") == 2 and run.config is None
    assert f"--start_cell=cold needs an empty store of programs; {tmp_path / 'programs'} has 1" in run.err
    assert run(*words[:-1], "--start_cell=warm") == 2 and run.config is None
    assert "--start_cell=warm needs --compilation_cache_dir" in run.err


def test_an_engine_that_breaks_is_one_line_and_exit_code_1(run, monkeypatch):
    def broken(self):
        raise RuntimeError("device lost")

    monkeypatch.setattr(Engine, "step", broken)
    assert run(*QUICK, "--cells=throughput:9x1:1") == 1
    assert "error: the run broke off: device lost" in run.err
    assert run.records == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a kind of load is needed first: throughput, closed or open"),
        (("serve", "--preset=4b"), "a kind of load is not 'serve'"),
        (("throughput",), "either --preset or --model is needed"),
        (("throughput", "--preset=4b", "--model=x"), "either --preset or --model is needed"),
        (("throughput", "--preset=5b"), "unknown preset '5b'"),
        (("throughput", "--model=nowhere"), "nowhere"),
        (("throughput", "stray", "--preset=4b"), "unexpected argument 'stray'"),
        (("throughput", "--preset=4b", "--input_length=3"), "Unknown command line flag 'input_length'"),
        (("throughput", "--preset=4b", "--input_len=0"), "input_len must be at least 1"),
        (("throughput", "--preset=4b", "--num_requests=0"), "num_requests must be at least 1"),
        (("throughput", "--preset=4b", "--lengths=nothing"), "nothing: cannot be read"),
        (("throughput", "--preset=4b", "--rate=3"), "--rate does not belong to 'throughput'"),
        (("open", "--preset=4b", "--rate=3", "--concurrency=3"), "--concurrency does not belong to 'open'"),
        (("open", "--preset=4b"), "--rate is needed for 'open'"),
        (("open", "--preset=4b", "--rate=fast"), "--rate must be a number or several"),
        (("open", "--preset=4b", "--rate=3,0"), "rate must be a positive"),
        (("closed", "--preset=4b"), "--concurrency is needed for 'closed'"),
        (("closed", "--preset=4b", "--concurrency=1.5"), "--concurrency must be a number or several"),
        (("closed", "--preset=4b", "--concurrency=0"), "concurrency must be at least 1"),
        (("--preset=4b", "--cells=closed:4x4"), "cell 'closed:4x4'"),
        (("open", "--preset=4b", "--cells=throughput:4x4"), "--cells says kind, concurrency and rate"),
        (("--preset=4b", "--cells=throughput:4x4", "--rate=2"), "--cells says kind, concurrency and rate"),
        (
            ("throughput", "--preset=4b", "--max_model_len=1000"),
            "--max_model_len=1000 is less than the longest request",
        ),
        (("throughput", "--preset=4b", "--tensor_parallel_size=2"), "tensor_parallel_size=2 is not supported yet"),
        (("throughput", "--preset=4b", "--start_cell=hot"), "--start_cell must be cold or warm, got 'hot'"),
        (("throughput", "--preset=4b", "--check_rows=-1"), "check_rows must not be negative"),
        (("throughput", "--preset=4b", "--size=My Model"), "--size is needed"),
        (("throughput", "--preset=4b", "--results=pyproject.toml"), "pyproject.toml: not JSON"),
        (("throughput", "--preset=4b", "--results=benchmarks/results"), "--results=benchmarks/results is a directory"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(run, monkeypatch, words, message):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert run(*words) == 2
    assert run.config is None  # nothing was loaded
    assert run.out == "" and len(run.err.splitlines()) == 1
    assert run.err.startswith("error: ") and message in run.err


def test_help(run):
    assert run("--help") == 0
    for flag in ("--preset", "--cells", "--concurrency", "--rate", "--profile_seconds", "--max_num_seqs"):
        assert flag in run.out


def test_a_preset_becomes_a_directory_that_the_engine_reads(monkeypatch):
    asked = {}

    def build(config, model_config, load, **options):
        asked.update(config=config, model_config=model_config, **options)
        return "engine"

    monkeypatch.setattr(loading, "build_engine", build)
    preset = ModelConfig.preset("tiny-27b")
    config = EngineConfig(load_format="random", skip_tokenizer_init=True)
    with bench._model_dir(None, preset) as directory:
        assert bench._make_engine(directory, config, lambda *_: None) == "engine"
        assert os.listdir(directory) == ["config.json"]
    assert not os.path.exists(directory)
    assert asked["model_config"] == preset and asked["config"] == config
    assert asked["num_valid"] == preset.vocab_size


def test_a_model_that_does_not_fit_is_the_user_s_error(monkeypatch):
    monkeypatch.setattr("qwen35_jax.runtime.memory_limit", lambda device, share: 1 << 20)
    config = EngineConfig(load_format="random", skip_tokenizer_init=True, max_model_len=64)
    with (
        bench._model_dir(None, ModelConfig.preset("tiny-4b")) as directory,
        pytest.raises(UserInputError, match="does not fit"),
    ):
        bench._make_engine(directory, config, lambda *_: None)


def test_the_age_of_a_process():
    before = start.process_age()
    time.sleep(0.05)
    after = start.process_age()
    assert 0 < before < after < 24 * 3600
    assert after - before < 5


def test_a_cache_counter_counts_until_it_is_closed():
    import jax

    cache = start.CacheCounter()
    for event in ("cache_hits", "cache_misses", "cache_misses", "something_else"):
        jax.monitoring.record_event(f"/jax/compilation_cache/{event}")
    cache.close()
    jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
    assert (cache.hits, cache.misses) == (1, 2)


@pytest.mark.parametrize(
    ("kind", "loaded", "hits", "message"),
    [
        ("warm", 5, 0, None),
        ("warm", 4, 9, "not a warm start: 1 of 5 programs were compiled"),
        ("warm", 0, 9, "not a warm start: 5 of 5 programs were compiled"),
        ("cold", 0, 2, None),
        ("cold", 1, 0, "not a cold start: 1 of 5 programs are from an earlier start"),
        ("cold", 0, 3, "not a cold start: 3 programs came from the compilation cache"),
    ],
)
def test_a_start_is_of_the_kind_that_it_claims(kind, loaded, hits, message):
    report = StartReport(None, 0, 1.0, 1.0, 1.0, num_programs=5, num_loaded=loaded)
    cache = start.CacheCounter()
    cache.close()
    cache.hits, cache.misses = hits, 2
    assert start.start_failure(kind, report, cache) == message
    assert "has no report of its start" in start.start_failure(kind, None, cache)


def test_the_command_is_installed():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["qwen35-bench"] == "qwen35_jax.cli.bench:run"
