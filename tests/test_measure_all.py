"""scripts/measure_all.py: its commands are ones that the tools take, and whatever was not measured is told."""

from __future__ import annotations

import datetime
import shlex
import time

import pytest

from pallas_kernels import bench, registry, sanitize
from pallas_kernels.gdn_decode import drift
from qwen35_jax.cli import bench as load_bench
from scripts import bench_peers, bench_products, gpu_check, measure_all, profile_step
from scripts.measure_all import PARTS, Step, main, run_step, run_steps, steps_of

NOW = datetime.datetime(2026, 5, 4, 3, 2, 1, tzinfo=datetime.UTC)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(measure_all, "probe", lambda _: gpu_check.Device("NVIDIA H200", 1, "gpu", "0"))


def everything(*presets: str) -> list[Step]:
    return steps_of(PARTS, presets or ("4b",), "benchmarks", NOW)


def step(name: str = "one", code: str = "pass", limit_s: float = 60.0, files: tuple[str, ...] = ()) -> Step:
    return Step(name, ("-c", code), limit_s, files)


class Parsed(BaseException):
    """A command line was read to its end; no tool takes it for a failure of its own."""


@pytest.mark.parametrize("one", everything(), ids=lambda one: one.name)
def test_every_command_is_one_that_its_tool_takes(one, monkeypatch):
    """Each tool reads its flags and is stopped before it measures."""

    def stop(*_, **__):
        raise Parsed

    monkeypatch.setattr(bench, "measure_ceilings", stop)
    monkeypatch.setattr(bench_peers, "check", stop)
    monkeypatch.setattr(sanitize, "find_tool", stop)
    monkeypatch.setattr(drift, "measure", stop)
    monkeypatch.setattr(profile_step, "make_engine", stop)
    monkeypatch.setattr(bench_products, "make", stop)
    monkeypatch.setattr(gpu_check, "probe", stop)
    monkeypatch.setattr(bench.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(load_bench, "_make_engine", stop)
    head, *flags = one.arguments
    if head == "-m":
        head, *flags = flags
    tools = {
        "qwen35_jax.cli.bench": lambda: load_bench.main(["bench", *flags]),
        "scripts/profile_step.py": lambda: profile_step.main(["profile_step.py", *flags]),
        "pallas_kernels.bench": lambda: bench.main(flags),
        "scripts/bench_products.py": lambda: bench_products.main(["bench_products.py", *flags]),
        "scripts/bench_peers.py": lambda: bench_peers.main(flags),
        "pallas_kernels.gdn_decode.drift": lambda: drift.main(flags),
        "pallas_kernels.sanitize": lambda: sanitize.main(flags),
        "scripts/gpu_check.py": lambda: gpu_check.main(["gpu_check.py", *flags]),
    }
    with pytest.raises(Parsed):
        tools[head]()


def test_parts_are_what_was_asked_for():
    assert {one.name.split()[0] for one in everything()} == set(PARTS)
    assert [one.name for one in steps_of(("long",), ("4b", "9b"), "b", NOW)] == ["long 4b", "long 9b"]
    kernels = steps_of(("kernels",), ("4b",), "b", NOW)
    assert [one.name.split()[-1] for one in kernels] == [op.name for op in registry.all_ops()]
    assert {one.files for one in kernels} == {("b/results/2026-05-04-kernels-4b.json",)}


def test_programs_of_the_cold_start_serve_the_next_parts():
    start, steps, load = steps_of(("start", "steps", "load"), ("4b",), "b", NOW)
    programs = next(flag for flag in start.arguments if flag.startswith("--compilation_cache_dir="))
    assert "20260504T030201" in programs and "--start_cell=cold" in start.arguments
    assert programs in steps.arguments and programs in load.arguments
    assert "--start_cell=warm" in load.arguments
    (alone,) = steps_of(("load",), ("4b",), "b", NOW)
    assert "--start_cell=warm" not in alone.arguments


def test_what_does_not_fit_into_the_time_is_left_out_and_named(capsys):
    times, ran = iter((0.0, 50.0, 50.0, 50.0, 50.0, 55.0)), []
    steps = [step("a", limit_s=60), step("b", limit_s=60), step("c", limit_s=50)]
    run = lambda one: ran.append(one.name) or "done"  # noqa: E731
    outcomes = run_steps(steps, deadline=100.0, run=run, clock=lambda: next(times))
    assert ran == ["a", "c"]
    assert [one.done for one in outcomes] == [True, False, True]
    assert outcomes[1].verdict == "not begun: it may take 60 s, and 50 s were left"
    assert "b: not begun" in capsys.readouterr().err
    assert "b       0 s  not begun" in measure_all.summary(outcomes)


def test_a_failure_is_told_and_the_others_go_on(capfd):
    failing = "import sys; print('said this', flush=True); sys.exit(3)"
    outcomes = run_steps([step("a", failing), step("b")], time.monotonic() + 1000)
    assert [one.verdict for one in outcomes] == ["exit code 3", "done"]
    out, err = capfd.readouterr()
    assert "said this" in out and "a: exit code 3" in err


def test_a_step_that_takes_too_long_is_ended_with_all_it_has_started(tmp_path):
    """The child of the step would go on writing."""
    mark = tmp_path / "mark"
    child = f"import time\nwhile True: open({str(mark)!r}, 'a').write('x'); time.sleep(0.02)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    assert run_step(step(code=code, limit_s=1.5)) == "killed after its limit of 2 s"
    size = mark.stat().st_size
    assert size > 0
    time.sleep(0.2)
    assert mark.stat().st_size == size


def test_steps_run_in_the_checkout_with_its_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import pathlib, pallas_kernels; assert pathlib.Path('WORKSPACE.md').exists()"
    assert run_step(step(code=code)) == "done"


def test_a_dry_run_prints_commands_and_runs_none(capsys):
    def run(one):
        raise AssertionError(one)

    assert main(["measure_all.py", "--dry_run", "--parts=long,check", "--time_scale=2"], run) == 0
    first, command, second, _ = capsys.readouterr().out.splitlines()
    assert first == "# long 4b, at most 360 s" and second.startswith("# check, at most ")
    assert shlex.split(command)[:2] == ["python", "scripts/profile_step.py"]


def test_the_exit_code_and_the_files_that_are_there(tmp_path, capsys):
    folder = str(tmp_path / "b")

    def run(one):
        (tmp_path / one.files[0]).write_text("[]")
        return "done"

    flags = ["measure_all.py", "--parts=drift,sanitize", f"--folder={folder}"]
    assert main(flags, run) == 0
    out = capsys.readouterr().out
    assert f"{folder}/sanitizer/" in out and f"{folder}/results/" in out and "bench_report.py" in out
    assert main(flags, lambda one: "exit code 1") == 1
    assert main([*flags, "--time_limit=0.001"], run) == 1


def test_figures_of_a_cpu_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure_all, "probe", lambda _: gpu_check.Device("cpu", 1, "cpu", "0"))
    assert main(["measure_all.py", f"--folder={tmp_path / 'b'}"], lambda one: "done") == 2
    assert "JAX finds no GPU here" in capsys.readouterr().err and not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--parts=kernel", "--parts: 'kernel' is none of"),
        ("--parts=,", "--parts names no part"),
        ("--presets=5b", "--presets: '5b' is none of"),
        ("--presets=4b,tiny-4b", "--presets: tiny-4b has no part kernels, only 0.8b, 2b, 4b"),
        ("--time_limit=0", "--time_limit must be positive"),
        ("--time_scale=-1", "--time_scale must be positive"),
    ],
)
def test_wrong_flags_exit_with_2(flag, message, capsys):
    assert main(["measure_all.py", flag], lambda one: "done") == 2
    assert message in capsys.readouterr().err
