"""scripts/gpu_check.py without a GPU: nothing that went wrong is hidden, and its judge judges."""

import dataclasses
import json
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from qwen35_jax.config import ModelConfig
from qwen35_jax.engine import TokenLogprob
from qwen35_jax.weights import load_params
from scripts import gpu_check
from scripts.gpu_check import SECTIONS, Device, Plan, main, run_tasks, summarise, tasks_of, variables_of
from scripts.gpu_checks import answers, job, rig, suites
from scripts.gpu_checks.report import Section, added_up
from scripts.gpu_checks.worker import Results, Task, once
from tests import engine_kit
from tests.engine_kit import Job, Result
from tests.golden_kit import BF16_RATIO, family_bar
from tests.oracle import goldens, tiny
from tests.oracle.qwen35_numpy import Oracle

CPU = Device("cpu", 2, "cpu", "0")
GPU = Device("NVIDIA H200", 1, "gpu", "0")


@pytest.fixture
def section():
    return Section("s")


def test_sections_that_run_tests_are_refused_without_pytest(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_check, "probe", lambda _: pytest.fail("already under way"))
    assert main(["gpu_check.py", "--sections=sampler,nan"]) == 2
    assert "--sections: sampler runs tests, which need pytest" in capsys.readouterr().err


# --- findings -------------------------------------------------------------------------------------------------------


def test_a_section_passes_only_when_figures_were_held_to_bars(section):
    assert not section.passed, "nothing was checked"
    section.at_most("a", 1.0, 1.0)
    section.equal("b", 3, 3)
    section.at_least("c", 2, 1)
    assert section.passed
    section.at_most("nan", float("nan"), 1.0)
    assert not section.passed
    told = json.loads(json.dumps(section.to_dict(), allow_nan=False))
    assert told["passed"] is False and told["checks"][3]["value"] == "nan"
    assert Section.from_dict(told).to_dict() == told


def test_an_error_is_a_failure_whatever_was_checked(section):
    section.at_most("a", 0, 1)
    section.fail("broke")
    assert not section.passed


def test_quiet_figures_are_told_when_they_miss():
    told = []
    section = Section("s", "p", say=told.append)
    section.at_most("good", 1, 2, quiet=True)
    section.at_most("bad", 3.14159, 2, quiet=True)
    assert told == ["s [p]: FAIL bad: 3.142 <= 2"]


def test_counts_of_parts_are_added_up():
    parts = [Section("s", name, numbers={"passed": 2, "text": name}) for name in ("a", "b")]
    assert added_up(parts) == {"passed": 4, "text": "a", "text [b]": "b"}


def test_once_keeps_a_failure():
    calls = []

    def make():
        calls.append(1)
        raise ValueError("no")

    get = once(make)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            get()
    assert len(calls) == 1


# --- processes ------------------------------------------------------------------------------------------------------


def test_every_section_has_its_tasks_and_a_budget():
    for device in (CPU, GPU, dataclasses.replace(GPU, count=2)):
        tasks = tasks_of(Plan(SECTIONS), device)
        assert {name for task in tasks for name in task.sections} == set(SECTIONS)
        assert all(task.limit_s > 0 for task in tasks)
        assert ("engine_device" in {task.kind for task in tasks}) == (device.count > 1)
    for name in SECTIONS:
        tasks = tasks_of(Plan((name,)), GPU)
        assert {name} == {section for task in tasks for section in task.sections}
    # The job reads the peak of memory, so it comes first.
    assert tasks_of(Plan(SECTIONS), GPU)[0].sections[0] == "job"


def test_only_the_conformance_suite_is_compiled_without_a_search():
    shared = {"XLA_FLAGS": "--xla_gpu_cuda_data_dir=/x"}
    for task in tasks_of(Plan(SECTIONS), GPU):
        flags = variables_of(task, shared)["XLA_FLAGS"].split()
        assert flags[0] == shared["XLA_FLAGS"]
        assert flags[1:] == (["--xla_gpu_autotune_level=0"] if task.kind == "kernels" else [])
    own = {"XLA_FLAGS": "--xla_gpu_autotune_level=3"}
    assert variables_of(Task("kernels", "", ("kernels",), 1.0), own) == own


def fake_worker(monkeypatch, body):
    """Workers that run ``body`` (Python, with ``argv`` set) in place of the real ones."""
    real = subprocess.Popen

    def popen(command, **options):
        source = f"import json, os, sys, time; argv = {command[2:]!r}\n{body}"
        return real([sys.executable, "-c", source], **options)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", popen)


def run_one(plan=None, limit_s=20.0, deadline=20.0):
    task = Task("engine", "4b", ("job", "nan"), limit_s)
    return run_tasks([task], plan or Plan(("job", "nan")), {}, time.monotonic() + deadline)


DONE = (
    'part = {"part": "4b", "passed": True, "seconds": 1, "error": None, "numbers": {}, "skipped": [], '
    '"checks": [{"name": "a", "value": 1, "relation": "==", "bar": 1, "passed": True}]}\n'
    'write = lambda *found: open(argv[-1], "w").write(json.dumps(found))\n'
)


def test_a_worker_that_ends_well(monkeypatch):
    fake_worker(monkeypatch, DONE + 'write({"name": "job"} | part, {"name": "nan"} | part)')
    assert [(section.name, section.passed) for section in run_one()] == [("job", True), ("nan", True)]


@pytest.mark.parametrize(
    ("body", "errors"),
    [
        ("sys.exit(3)", ["nothing came back: its process ended with exit code 3"] * 2),
        ('write({"name": "job"} | part); sys.exit(3)', [None, "nothing came back: its process ended with exit code 3"]),
        ('write({"name": "job"} | part)', [None, "nothing came back: None"]),
        (
            'write({"name": "job"} | part, {"name": "nan"} | part | {"error": "it did not end"}); os.abort()',
            [None, "it did not end: its process ended with exit code -6"],
        ),
        # All figures were good and then the process broke: still a failure.
        ('write({"name": "job"} | part, {"name": "nan"} | part); sys.exit(1)', [None, "its process ended with exit"]),
    ],
)
def test_a_worker_that_breaks_fails_its_sections(monkeypatch, capfd, body, errors):
    fake_worker(monkeypatch, DONE + "print('the reason', file=sys.stderr)\n" + body)
    found = run_one()
    assert [section.passed for section in found] == [error is None for error in errors]
    for section, error in zip(found, errors, strict=True):
        assert (section.error or "").startswith(error or "")
    assert "engine 4b | the reason" in capfd.readouterr().out


def test_a_worker_that_hangs_is_killed(monkeypatch):
    fake_worker(monkeypatch, DONE + 'write({"name": "job"} | part); time.sleep(60)')
    found = run_one(limit_s=1.0)
    assert [section.passed for section in found] == [True, False]
    assert "killed after its budget of 1 s" in found[1].error


def test_what_was_not_begun_in_time_has_failed(monkeypatch):
    fake_worker(monkeypatch, "time.sleep(60)")
    tasks = [Task("engine", "4b", ("job",), 50), Task("sampler", "", ("sampler",), 50)]
    plan = Plan(("job", "sampler"), processes=1, time_limit=1)
    found = {section.name: section.error for section in run_tasks(tasks, plan, {}, time.monotonic() + 1)}
    assert "time limit of the whole run (1 s) was over" in found["job"]
    assert "not begun within the time limit" in found["sampler"]


def test_a_real_worker_keeps_what_it_had_found(tmp_path):
    results = Results(tmp_path / "r.json")

    def body(section):
        section.equal("a", 1, 1)
        results.save()
        kept = json.loads((tmp_path / "r.json").read_text())
        assert [(s["name"], s["error"], len(s["checks"])) for s in kept] == [("nan", "it did not end", 1)]
        raise RuntimeError("boom")

    results.fill("nan", "", body)
    (section,) = json.loads((tmp_path / "r.json").read_text())
    assert section["error"] == "RuntimeError: boom" and not section["passed"]


# --- the command ----------------------------------------------------------------------------------------------------


def command(monkeypatch, tmp_path, sections, *flags, device=GPU):
    monkeypatch.setattr(gpu_check, "probe", lambda variables: device)
    report = tmp_path / "report.json"
    code = main(["gpu_check.py", f"--report={report}", *flags], run=lambda *_: sections)
    return code, json.loads(report.read_text())


def test_the_report_and_the_exit_code(monkeypatch, tmp_path, capsys):
    good, bad = Section("job", "4b"), Section("nan", "4b")
    good.at_most("|peak / plan - 1|", 0.01, 0.05)
    good.skip("something", "a reason")
    bad.equal("neighbours", 1, 0)
    code, report = command(monkeypatch, tmp_path, [good, bad], "--sections=job,nan")
    assert code == 1 and report["passed"] is False
    assert report["sections"]["job"]["passed"] and not report["sections"]["nan"]["passed"]
    assert report["sections"]["job"]["parts"][0]["checks"][0]["bar"] == 0.05
    assert {"device", "device_count", "commit", "jax", "command", "date", "plan", "seconds"} <= report.keys()
    printed = capsys.readouterr().out
    assert "FAIL neighbours: 1, bar == 0" in printed and "skipped something: a reason" in printed
    assert "not run: kernels, goldens, batching, overlap, sampler, tasks" in printed
    code, report = command(monkeypatch, tmp_path, [good], "--sections=job")
    assert code == 0 and report["passed"] is True


def test_a_section_without_an_answer_has_failed(monkeypatch, tmp_path):
    code, report = command(monkeypatch, tmp_path, [], "--sections=job")
    assert code == 1 and not report["sections"]["job"]["passed"]


def test_a_gpu_run_without_a_pallas_kernel_has_failed():
    part = Section("kernels", "1 of 1", numbers={"passed": 9, "passed with reference": 9})
    part.equal("failed tests", 0, 0)
    plan = Plan(("kernels",))
    assert not summarise(plan, GPU, [part], 1)["passed"]
    assert summarise(plan, CPU, [part], 1)["passed"]
    part.numbers["passed with triton"] = 1
    assert summarise(plan, GPU, [part], 1)["passed"]
    part.numbers["passed"] = 0
    assert not summarise(plan, CPU, [part], 1)["passed"], "no test ran"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--sections=job,speed", "'speed' is none of"),
        ("--sections=", "names no section"),
        ("--preset=5b", "'5b' is none of"),
        ("--rows=0", "--rows must be at least 1"),
        ("--num_layers=2", "--num_layers must be at least 4"),
        ("--report=/no/such/folder/r.json", "no directory"),
        ("--sectoins=job", "sectoins"),
    ],
)
def test_wrong_flags_are_user_errors(flag, message, capsys):
    assert main(["gpu_check.py", flag]) == 2
    assert message in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "probe", lambda variables: CPU)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert main(["gpu_check.py"]) == 2
    assert "no GPU" in capsys.readouterr().err


# --- suites ---------------------------------------------------------------------------------------------------------


def test_shards_are_whole_groups_of_even_size():
    groups = ["a"] * 10 + ["b"] * 3 + ["c"] * 2 + ["d"]
    shards = suites.assign(groups, 2)
    assert sorted(shards) == [0] * 8 + [1] * 8
    for name in "bcd":
        assert len({shard for shard, group in zip(shards, groups, strict=True) if group == name}) == 1
    assert suites.assign(groups, 1) == [0] * 16
    assert suites.assign([], 3) == []


def test_a_suite_is_counted(tmp_path):
    """In a process of its own, as a worker does it: pytest does not nest well."""
    (tmp_path / "conftest.py").write_text("")  # none of the folders above
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('implementation', ['reference', 'triton'])\n"
        "def test_good(implementation): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_declined(): pytest.skip('declined: too small')\n"
        "def test_other(): assert False\n"
    )
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    source = (
        "import sys, json; from scripts.gpu_checks import suites; from scripts.gpu_checks.report import Section\n"
        "found = [Section('kernels', str(shard)) for shard in range(3)]\n"
        "for shard in range(2):\n"
        "    suites.run_suite(found[shard], [sys.argv[1]], keyword='not other', shard=shard, shards=2)\n"
        "suites.run_suite(found[2], [sys.argv[2]])\n"
        "print(json.dumps([section.to_dict() for section in found]))\n"
    )
    command = [sys.executable, "-c", source, str(tmp_path / "test_it.py"), str(tmp_path / "test_broken.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=gpu_check.ROOT)
    assert "test_bad" in done.stderr and len(done.stdout.splitlines()) == 1, "pytest's own account is in the log"
    *parts, broken = [Section.from_dict(values) for values in json.loads(done.stdout)]
    numbers = added_up(parts)
    assert [numbers[name] for name in ("passed", "failed", "error", "skipped")] == [2, 1, 0, 1]
    assert numbers["passed with triton"] == numbers["passed with reference"] == 1
    assert [pair for part in parts for pair in part.skipped] == [("1 tests", "declined: too small")]
    assert [part.passed for part in parts].count(False) == 1
    assert any("assert 1 == 2" in failure for part in parts for failure in part.numbers["failures"])
    assert not broken.passed and "exit code 2" in broken.error and broken.numbers["error"] == 1


# --- the judge ------------------------------------------------------------------------------------------------------


def test_the_judge_agrees_with_the_oracle(tmp_path):
    case = "4b-tied"
    directory = tiny.write_hf_dir(tmp_path / case, case, dtype="float32")
    config = dataclasses.replace(ModelConfig.from_hf(directory), dtype="float32")
    params = load_params(directory, config, "float32")
    made = types.SimpleNamespace(
        config=config,
        dtype="float32",
        shapes=rig.Shapes(max_model_len=128),
        num_valid=500,
        programs=types.SimpleNamespace(params=params),
    )
    judge = rig.Judge(made, max_tokens=8)
    tokens = tiny.token_ids(case, 75, seed=3)
    exact = Oracle(tiny.hf_config(case), tiny.weights(case)).forward(tokens).logits[:, :500]
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    for prompt, length in ((1, 8), (67, 8), (70, 1)):
        output = tokens[prompt : prompt + length].tolist()
        top = tuple((i, 0.0, i + 1) for i in range(rig.TOP))
        said = Result(output, [TokenLogprob(token, 0.0, 1, top) for token in output])
        found = judge(Job("a", tuple(tokens[:prompt].tolist()), answers.GREEDY), said)
        want = exact[prompt - 1 : prompt - 1 + length]
        real = [i for i, token in enumerate(output) if token < 500]
        np.testing.assert_allclose(found.chosen[real, 0], want[real, np.array(output)[real]], atol=5e-4)
        np.testing.assert_allclose(found.chosen[:, 1:], want[:, : rig.TOP], atol=5e-4)
        ordered = np.sort(want, axis=1)
        np.testing.assert_allclose(found.margins, ordered[:, -1] - ordered[:, -2], atol=1e-3)


def test_large_steps_are_those_of_the_fused_product():
    """On a Hopper, for the model that gpu_check takes: its own steps are smaller than what the kernel is chosen for."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    config = ModelConfig.preset("4b")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        kernels = [answers.swiglu_kernel(config, "bfloat16", tokens) for tokens in (answers.LARGE_STEP, 512)]
    assert kernels == ["mosaic_sm90", "reference"]


def test_distances_and_differences():
    found = [np.zeros((2, 1 + rig.TOP)), np.zeros((1, 1 + rig.TOP))]
    wanted = [np.full((2, 1 + rig.TOP), 0.5), np.full((1, 1 + rig.TOP), -1.0)]
    distance = rig.Distance.between(found, wanted)
    assert (distance.positions, distance.max, distance.top_max) == (3, 1.0, 1.0)
    assert distance.mean == distance.top_mean == pytest.approx(2 / 3)
    wanted[1][0, 3] = np.nan
    assert np.isnan(rig.Distance.between(found, wanted).mean)

    forced = rig.Forced(np.zeros((3, 21)), np.zeros((3, 2), int), np.array([[-1.0, -2], [-1, -1.25], [-1, -1]]))
    say = lambda *tokens: Result(list(tokens))  # noqa: E731
    same = rig.first_differences({"a": say(1, 2, 3)}, {"a": say(1, 2, 3)}, {"a": forced})
    (other,) = rig.first_differences({"a": say(1, 2, 3)}, {"a": say(1, 9, 3)}, {"a": forced})
    (short,) = rig.first_differences({"a": say(1, 2, 3)}, {"a": say(1, 2)}, {"a": forced})
    (long,) = rig.first_differences({"a": say(1, 2, 3)}, {"a": say(1, 2, 3, 4)}, {"a": forced})
    assert same == [] and (other.position, other.margin) == (1, 0.25) and short.position == 2
    assert long.margin == float("inf"), "an answer that goes on is no near tie"


def test_a_wide_margin_is_a_failure(section):
    bar = answers.Bar(0.04, 0.15, "here")
    forced = rig.Forced(np.zeros((2, 21)), np.zeros((2, 2), int), np.array([[-1.0, -1.1], [-1, -2]]))
    near, far = rig.Difference("r0", 3, 0.1), rig.Difference("r1", 3, 0.2)
    answers.hold_margins(section, "a", 4, [near], {"r0": forced}, bar)
    assert section.passed and section.numbers["a: share of all positions with so small a margin"] == 0.5
    answers.hold_margins(section, "b", 4, [near, far], {"r0": forced}, bar)
    assert not section.passed and section.numbers["b: rows equal"] == "2 of 4"


def test_a_wrong_logprob_is_a_failure(section):
    chosen = np.zeros((40, 1 + rig.TOP))
    forced = {"r0": rig.Forced(chosen, np.zeros((40, 2), int), np.zeros((40, 2)))}
    top = tuple((i, 0.0, i + 1) for i in range(rig.TOP))
    right = [TokenLogprob(0, 0.01, 1, top)] * 40
    bar = answers.Bar(0.04, 0.15, "here")
    answers.hold_to_bar(section, "right", {"r0": Result([0] * 40, right)}, forced, bar)
    assert section.passed
    wrong = [*right[:-1], TokenLogprob(0, 3.0, 1, top)]  # one position of forty
    answers.hold_to_bar(section, "wrong", {"r0": Result([0] * 40, wrong)}, forced, bar)
    assert not section.passed


def test_the_bar_of_a_family_is_that_of_its_miniature():
    for preset, case in (("0.8b", "0.8b-tied"), ("4b", "4b-tied"), ("9b", "4b-untied"), ("27b", "27b-untied")):
        bar = family_bar(ModelConfig.preset(preset))
        assert bar.case == case
        mean = np.mean([goldens.load_golden(case, length).bf16_mean for length in goldens.LENGTHS])
        assert bar.mean == pytest.approx(BF16_RATIO * mean)
        assert bar.mean < bar.p99 < 0.25


# --- the job --------------------------------------------------------------------------------------------------------


def answer(line, finish="length", tokens=None, code=None):
    if code:
        return {"custom_id": line["custom_id"], "response": None, "error": {"code": code}}
    usage = {"prompt_tokens": len(line["prompt_token_ids"])}
    usage["completion_tokens"] = line["max_tokens"] if tokens is None else tokens
    choice = {"finish_reason": finish} | ({"logprobs": {"tokens": []}} if "logprobs" in line else {})
    return {"custom_id": line["custom_id"], "response": {"body": {"choices": [choice], "usage": usage}}, "error": None}


def test_lines_that_should_run_can():
    for line in job.job_lines(400, 1000, 256):
        assert (
            line["custom_id"].startswith("bad-")
            or 1 <= line["max_tokens"]
            and line.get("min_tokens", 0) <= line["max_tokens"]
        )


def test_the_faults_of_a_job_are_found():
    lines = job.job_lines(60, 1000, 256, {(1, 2): 3})
    assert len(lines) == 60 == len({line["custom_id"] for line in lines})
    bad = [line for line in lines if line["custom_id"].startswith("bad-")]
    assert len(bad) == 3 and all(len(line["prompt_token_ids"]) <= 256 for line in lines if line not in bad)
    good = [
        answer(line, code=job.BAD.get(line["custom_id"].partition("-")[2]) if line in bad else None) for line in lines
    ]
    assert job.faults_of(lines, good) == {}
    assert job.faults_of(lines, good[1:]) == {"lines without a record": 1}
    assert job.faults_of(lines, [*good, good[0]]) == {"records too many": 1}
    assert job.faults_of(lines, [*good, {"custom_id": "x"}]) == {"records of no line": 1}
    for index, line in enumerate(lines):
        wrong = list(good)
        if line in bad:
            wrong[index] = answer(line, code="engine_error")
            assert job.faults_of(lines, wrong) == {"bad lines with another end": 1}
        elif line["custom_id"].startswith("row-"):
            wrong[index] = answer(line, code="engine_error")
            assert job.faults_of(lines, wrong) == {"failed: engine_error: None": 1}
            wrong[index] = answer(line, tokens=line["max_tokens"] - 1)
            assert job.faults_of(lines, wrong) == {"answers of another length": 1}
            wrong[index] = answer(line, finish="stop")
            assert bool(job.faults_of(lines, wrong)) == line["ignore_eos"]


# --- the engine sections, once, as small as they go -----------------------------------------------------------------


def test_the_sections_over_one_rig(section, monkeypatch):
    """Float32, in the programs of the engine's own tests: the same answers in any company, to rounding."""
    monkeypatch.setattr(answers, "MAX_TOKENS", 10)
    monkeypatch.setattr(answers, "LIVE_SIZES", (3, 33))
    shapes = rig.Shapes(max_num_seqs=8, max_model_len=512, max_num_batched_tokens=128, row_rungs=(8,))
    made = rig.Rig(engine_kit.MODEL, "float32", shapes, num_valid=engine_kit.NUM_VALID)
    assert made.plan.weights == sum(x.nbytes for x in made.programs.params)
    batched = answers.Batched(made, 10, exact=False)
    answers.batching(section, batched, solo_rows=1)
    answers.large_steps(section, batched)
    answers.overlap_bfloat16(section, batched, "stream")
    answers.nan_containment(section, made)
    assert section.passed, [str(check) for check in section.checks if not check.passed]
    skipped = {what for what, _ in section.skipped}
    large = f"2 layers, steps of {answers.LARGE_STEP} tokens"
    assert skipped == {"33 live rows", "2 layers: distance to float32", f"{large}: a fused swiglu_product"}
    assert section.numbers[f"{large}: swiglu_product"] == "reference"
    figures = {check.name: check.value for check in section.checks}
    assert 0 < figures[f"{large}: p99 |delta logprob|"] < 1e-4
    assert 0 < figures["2 layers, 10 rows: p99 |delta logprob|"] < 1e-4
    assert figures["2 layers, solo and batched: widest margin at a first difference"] == 0
    with pytest.raises(ValueError, match="no programs for overlap 'device'"):
        made.engine("device")
    # One row of ten loses its recurrent state after three tokens: finite, plausible, and noticed.
    engine = made.engine("off")
    engine_kit.submit_all(engine, batched.jobs)
    lost = []

    def lose(results):
        if not lost and len(results.get("r5", Result()).tokens) >= 3:
            slot = engine.scheduler._decoding["r5"].slot
            engine._state = engine.programs.fill(engine._state, 0.0, slot, ())
            lost.append(slot)

    results = engine_kit.drain(engine, after_step=lose)
    engine.close()
    wrong = Section("wrong")
    answers.hold_to_bar(wrong, "a lost state", results, batched.judge(batched.jobs, results), batched.bar)
    assert lost and not wrong.passed, wrong.checks
