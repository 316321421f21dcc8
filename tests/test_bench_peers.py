"""scripts/bench_peers.py: other libraries in the kernels' own run. What they take is measured on a GPU alone."""

from __future__ import annotations

import dataclasses
import json
import sys
from unittest import mock

import jax
import pytest

from pallas_kernels import bench
from pallas_kernels.spec import tiny_specs_of
from scripts import bench_peers

QUICK = ["--calls=1", "--dispatches=1", "--samples=1", "--copy-bytes=65536"]
RAGGED = tiny_specs_of("paged_prefill_attention")["tiny1-ragged"]
DENSE = dataclasses.replace(RAGGED, name="tiny1-dense", lengths=(16, 16), prefixes=None, num_pads=0)


def only(monkeypatch, op: str, *specs):
    found = {spec.name: spec for spec in specs}
    monkeypatch.setattr(bench, "tiny_specs_of", lambda name: found if name == op else {})


def test_a_peer_stands_in_the_record(tmp_path, monkeypatch, capsys):
    output = tmp_path / "kernels.json"
    monkeypatch.setattr(bench_peers, "dense_attention", lambda spec, gated=False: 20.5 if gated else 12.5)
    only(monkeypatch, "paged_prefill_attention", DENSE, RAGGED)
    flags = ["--tiny", "--op=paged_prefill_attention", *QUICK, f"--output={output}"]
    assert bench_peers.main(flags) == 0
    dense, ragged = json.loads(output.read_text())
    assert dense["metrics"]["peer_us"] == 12.5 and dense["settings"]["peer"] == "cuDNN, dense"
    assert dense["metrics"]["peer_gated_us"] == 20.5
    assert dense["command"].startswith("python scripts/bench_peers.py --tiny ")
    assert "peer_us" not in ragged["metrics"], "none does ragged packs over pages"
    assert "cuDNN, dense 12.5 us, 20.5 with the gate" in capsys.readouterr().out


@pytest.mark.parametrize(("module", "package"), bench_peers.FLASH_LINEAR_ATTENTION.items())
def test_a_peer_that_is_not_here_is_told_before_anything_runs(monkeypatch, capsys, module, package):
    for name in bench_peers.FLASH_LINEAR_ATTENTION:  # None: as if it were not installed
        monkeypatch.setitem(sys.modules, name, None if name == module else mock.Mock(__spec__=object()))
    monkeypatch.setattr(bench, "measure_ceilings", mock.Mock(side_effect=AssertionError("already under way")))
    only(monkeypatch, "gdn_prefill", tiny_specs_of("gdn_prefill")["tiny1-ragged"])
    assert bench_peers.main(["--tiny", "--op=gdn_prefill", *QUICK]) == 2
    message = f"error: flash-linear-attention cannot be timed without {module} (package {package})"
    assert message in capsys.readouterr().err


def test_a_peer_that_no_spec_wants_may_be_missing(monkeypatch):
    for name in bench_peers.FLASH_LINEAR_ATTENTION:
        monkeypatch.setitem(sys.modules, name, None)
    bench_peers.check([DENSE, RAGGED])


def test_a_peer_that_does_not_import_is_told(monkeypatch):
    """It is there, but something that it needs is not."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(bench_peers.MissingPeer, match="flash-linear-attention cannot be timed without torch"):
        bench_peers.flash_linear_attention(tiny_specs_of("gdn_prefill")["tiny1-ragged"])


@pytest.mark.parametrize("gated", [False, True])
def test_the_dense_peer_runs_on_a_specs_shapes(gated, monkeypatch):
    gates, sigmoid = [], jax.nn.sigmoid
    monkeypatch.setattr(jax.nn, "sigmoid", lambda gate: gates.append(gate.shape) or sigmoid(gate))
    assert bench_peers.dense_attention(DENSE, implementation="xla", gated=gated) > 0
    model, length = DENSE.model, DENSE.lengths[0]
    shape = (len(DENSE.lengths), length, model.num_heads, model.head_dim)
    assert set(gates) == ({shape} if gated else set())


@pytest.mark.parametrize(
    ("changes", "dense"), [({}, True), ({"prefixes": (1, 0)}, False), ({"lengths": (16, 8)}, False)]
)
def test_what_is_dense(changes, dense):
    assert bench_peers.is_dense(dataclasses.replace(DENSE, **changes)) == dense
