"""compute-sanitizer around the ops: its output read, its absence said. A stand-in plays the tool."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import sanitize
from pallas_kernels.spec import tiny_specs_of

CLEAN = """========= COMPUTE-SANITIZER
ran tiny2-rows5 mosaic_sm90
========= ERROR SUMMARY: 0 errors
"""
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at gdn_decode+0x10 in /tmp/build/kernel.py:12
=========     by thread (0,0,0) in block (3,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernel [0x1234] in libcuda.so
ran tiny2-rows5 mosaic_sm90
========= ERROR SUMMARY: 1 error
"""
RACES = """========= COMPUTE-SANITIZER
========= Warning: Race reported between Write access at kv_write+0x20 and Read access at kv_write+0x40 [8 hazards]
ran tiny2-ragged triton
========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)
"""
COPIES = """========= COMPUTE-SANITIZER
========= Host API memory access error at host access to 0x48ed0c8000 of size 76,800 bytes
=========     Uninitialized access to 0x48ed0c8f20 on access by cudaMemcpy source
========= Host API memory access error at host access to 0x48ed0c8000 of size 76,800 bytes
=========     Uninitialized access to 0x48ed0c8f40 on access by cudaMemcpy source
ran tiny2-ragged mosaic_sm90
========= ERROR SUMMARY: 2 errors
"""
READS = COPIES.replace("SUMMARY: 2", "SUMMARY: 3").replace(
    "ran tiny2",
    """========= Uninitialized __global__ memory read of size 4 bytes
=========     at gdn_prefill_scan+0x70 in /tmp/build/kernel.py:3
ran tiny2""",
)
REFUSED = """========= COMPUTE-SANITIZER
========= Error: Device not supported
Traceback (most recent call last):
  File "/srv/tree/pallas_kernels/sanitize.py", line 3
"""


@pytest.mark.parametrize(
    ("tool", "output", "verdict", "errors", "warnings"),
    [
        ("memcheck", CLEAN, "clean", 0, 0),
        ("memcheck", OUT_OF_BOUNDS, "errors", 1, 0),
        ("racecheck", RACES, "errors", 1, 2),
        ("initcheck", COPIES, "clean", 0, 0),
        ("initcheck", READS, "errors", 1, 0),
        ("memcheck", REFUSED, "no verdict", 0, 0),
        ("memcheck", CLEAN.replace("ran ", "was "), "no verdict", 0, 0),  # nothing ran: zero errors mean nothing
    ],
)
def test_verdicts(tool, output, verdict, errors, warnings):
    found = sanitize.read_verdict("gdn_decode", tool, output, 7, re.findall("(?:ran|was) (\\S+)", output))
    assert (found.verdict, found.errors, found.warnings) == (verdict, errors, warnings)
    assert "/" not in "".join(found.messages), "a path of the machine"
    if verdict == "no verdict":
        assert found.messages[0] == "exit code 7"


@pytest.mark.parametrize("output", [CLEAN, COPIES, RACES.replace("1 error,", "0 errors,")])
def test_fewer_workloads_than_wanted_are_no_verdict(output):
    """The child broke off after the first (an output that is not finite, say): no errors until then mean nothing."""
    wanted = ["tiny2-rows5", "tiny2-ragged", "tiny3-rows5"]
    found = sanitize.read_verdict("gdn_decode", "memcheck", f"{output}FloatingPointError: not finite\n", 1, wanted)
    assert found.verdict == "no verdict" and len(found.ran) == 1
    assert found.messages[0] == "exit code 1" and found.messages[-1] == "FloatingPointError: not finite"
    assert sanitize.read_verdict("gdn_decode", "memcheck", OUT_OF_BOUNDS, 1, wanted).verdict == "errors"


def test_copies_of_what_the_copy_engine_wrote_are_counted_by_themselves():
    assert sanitize.read_verdict("gdn_prefill", "initcheck", COPIES, 0, ["tiny2-ragged"]).copies == 2
    found = sanitize.read_verdict("gdn_prefill", "initcheck", READS, 0, ["tiny2-ragged"])
    assert found.copies == 2 and found.messages == (
        "Uninitialized __global__ memory read of size 4 bytes",
        "at gdn_prefill_scan+0x70 in kernel.py:3",
    )


def test_messages_and_table():
    found = [
        sanitize.read_verdict("gdn_decode", "memcheck", OUT_OF_BOUNDS, 0, ["tiny2-rows5"]),
        sanitize.read_verdict("gdn_decode", "racecheck", RACES, 0, ["tiny2-ragged"]),
    ]
    assert found[0].messages[0] == "Invalid __global__ read of size 4 bytes"
    assert found[0].messages[1] == "at gdn_decode+0x10 in kernel.py:12" and len(found[0].messages) == 3
    lines = sanitize.table(found).splitlines()
    assert lines[0].split() == ["op", "implementation", "memcheck", "racecheck"]
    assert lines[1].split() == ["gdn_decode", "mosaic_sm90,", "triton", *"1 errors 1 errors, 2 warnings".split()]


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A program in place of compute-sanitizer: it runs the child and reports an error for racecheck."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo Version 1.2; exit; }\nwanted=$1\n'
        'while [ "${1#--}" != "$1" ]; do shift; done; "$@"\n'
        'case $wanted in *racecheck) n=1;; *) n=0;; esac\necho "========= ERROR SUMMARY: $n errors"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize, "find_tool", lambda: str(tool))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.host
def test_a_run(stand_in, tmp_path, capsys):
    path = tmp_path / "deep/kernels.json"
    assert sanitize.main(["--ops=kv_write", "--tools=memcheck,racecheck", f"--output={path}"]) == 1
    kept = json.loads(path.read_text())
    assert kept["tool"] == "Version 1.2" and kept["jax"] == jax.__version__
    runs = {run["tool"]: run for run in kept["runs"]}
    assert runs["memcheck"]["verdict"] == "clean" and runs["racecheck"]["errors"] == 1
    assert kept["to_come"] == []
    assert set(runs["memcheck"]["ran"].values()) == {"reference"} and len(runs["memcheck"]["ran"]) == 4
    assert "kv_write" in capsys.readouterr().out


@pytest.mark.host
def test_a_run_that_is_cut_keeps_its_verdicts(stand_in, tmp_path, monkeypatch):
    path, plain = tmp_path / "kernels.json", sanitize.check

    def check(sanitizer, op, *how):
        if op == "swiglu_product":
            raise KeyboardInterrupt
        return plain(sanitizer, op, *how)

    monkeypatch.setattr(sanitize, "check", check)
    with pytest.raises(KeyboardInterrupt):
        sanitize.main(["--ops=kv_write,swiglu_product", "--tools=memcheck", "--processes=1", f"--output={path}"])
    kept = json.loads(path.read_text())
    assert [run["op"] for run in kept["runs"]] == ["kv_write"]
    assert kept["to_come"] == [["swiglu_product", "memcheck"]], "not to be taken for clean"


@pytest.mark.host
@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_the_run_and_all_that_it_started(tmp_path, sign, code):
    """Tool and child are groups of their own: whoever ends the run would leave them on the device."""
    tool, started = tmp_path / "compute-sanitizer", tmp_path / "started"
    tool.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ echo Version 1.2; exit; }}\n'
        f"echo $$ > {started}.new && mv {started}.new {started}\nsleep 600\n"
    )
    tool.chmod(0o755)
    source = (
        "import signal, sys, jax; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pallas_kernels import sanitize\n"
        "sanitize.find_tool, jax.default_backend = lambda: sys.argv[1], lambda: 'gpu'\n"
        "sanitize.main(['--ops=kv_write,causal_conv', '--tools=memcheck', '--processes=1'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", source, str(tool)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not started.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(started.read_text())
    process.send_signal(sign)
    _, told = process.communicate(timeout=30)
    assert process.returncode == code, told.decode()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert int(started.read_text()) == child, "no other was begun"


@pytest.mark.parametrize(
    ("op", "spec", "kernels"),
    [
        ("kv_write", "tiny2-ragged", ("mosaic_sm90", "triton")),  # few tokens: auto leaves them to the other kernel
        ("swiglu_product", "tiny2-rows200", ("mosaic_sm90",)),  # or to the reference, which is no kernel
        ("gdn_decode", "tiny2-rows5", ("mosaic_sm90",)),
    ],
)
def test_what_is_run_on_an_h200(op, spec, kernels):
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    case = tiny_specs_of(op)[spec].case()
    arguments = {name: jnp.asarray(array) for name, array in case.arguments.items()} | case.options
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert sanitize.kernels_of(op, arguments) == kernels


def test_a_hang_is_stopped(stand_in, tmp_path, monkeypatch):
    children = sanitize.Children()
    verdict = sanitize.check(sanitize.find_tool(), "kv_write", "memcheck", None, 0.2, children)
    assert verdict.verdict == "no verdict" and "stopped after 0 s" in verdict.messages[-1]


def test_what_is_missing_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
    assert sanitize.main([]) == 2 and "compute-sanitizer is neither on PATH" in capsys.readouterr().err
    monkeypatch.setattr(sanitize, "find_tool", lambda: "/bin/true")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert sanitize.main([]) == 2 and "needs a GPU, the backend is cpu" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sanitize.main(["--tools=memcheck,valgrind"])
    assert "'valgrind' is none of memcheck" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sanitize.main([f"--output={tmp_path}"])
    assert "is a directory, it must be a file" in capsys.readouterr().err
