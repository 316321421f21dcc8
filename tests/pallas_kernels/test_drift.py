"""What a bfloat16 state costs over many steps: against the oracle of this suite, and as a record."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gdn_decode import drift
from pallas_kernels.gdn_decode.specs import GdnDecodeSpec
from pallas_kernels.spec import TINY_MODELS
from tests.pallas_kernels import oracle

SPEC = GdnDecodeSpec(name="tiny2-rows2", model=TINY_MODELS["tiny2"], num_rows=2)


def test_marks():
    assert drift.marks_of(1) == (1,)
    marks = drift.marks_of(2000)
    assert marks[0] == 1 and marks[-2:] == (1778, 2000) and {10, 100, 1000} <= set(marks)


def test_gates_of_an_untrained_model():
    arguments, _ = drift.arguments_of(SPEC, "initial", 3)
    rate, step = np.exp(arguments["A_log"]), np.logaddexp(0, np.asarray(arguments["dt_bias"], np.float64))
    assert (rate >= 1).all() and (rate <= 16).all() and (step > 0.9e-3).all() and (step < 0.11).all()
    assert not arguments["state_pool"].any() and not arguments["conv_pool"].any()


def test_the_exact_recurrence_is_the_oracles():
    """Three steps of both, from the same tokens."""
    spec = dataclasses.replace(SPEC, dtype="float32")
    arguments, options = drift.arguments_of(spec, "mixed", 1)
    slots = np.asarray(arguments["slot_ids"])
    pools = {name: np.asarray(arguments.pop(name)) for name in spec.pools}
    plain = {name: np.asarray(array) for name, array in arguments.items()}
    with jax.enable_x64(True):
        tail = jnp.zeros((2, 3, spec.model.conv_dim), jnp.float32)
        state = jnp.zeros((2, *pools["state_pool"].shape[2:]), jnp.float64)
    step = jax.jit(lambda *args: drift.exact_step(spec, arguments, *args, eps=1e-6))
    for number in range(3):
        tokens = drift.tokens_of(spec, 1, jnp.int32(number))
        want, *new, _ = oracle.gdn_decode(np.asarray(tokens), **plain, **pools, **options)
        pools = {
            name: array.astype(np.float32 if name == "conv_pool" else np.float64)
            for name, array in zip(spec.pools, new, strict=True)
        }
        with jax.enable_x64(True):
            same = drift.tokens_of(spec, 1, jnp.int32(number))
            np.testing.assert_array_equal(same, tokens)
            out, tail, state = step(same, tail, state)
        np.testing.assert_allclose(state, pools["state_pool"][0, slots], rtol=1e-5, atol=1e-6)  # the convolution's
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.host
def test_records(tmp_path, capsys):
    path = tmp_path / "drift.json"
    argv = ["--model=tiny1", "--rows=2", "--steps=40", "--gates=none", f"--output={path}"]
    assert drift.main(argv) == 0
    (record,) = json.loads(path.read_text())
    assert record["cell"] == "drift/gdn_decode/tiny1-rows2-none"
    metrics, curves = record["metrics"], record["metrics"]["curves"]
    assert metrics["steps"] == list(drift.marks_of(40)) and len(curves["bfloat16"]["output"]) == len(metrics["steps"])
    assert max(curves["float32"]["state"]) < 1e-6 < 1e-3 < curves["bfloat16"]["state"][0]
    assert curves["bfloat16"]["state"][-1] == metrics["state_error"] > 1.5 * curves["bfloat16"]["state"][0]
    assert metrics["state_error"] <= metrics["worst_head_error"] < 0.1
    assert metrics["float32_output_error"] < metrics["output_error"] < 0.1
    assert record["settings"]["implementation"] == "reference" and record["settings"]["steps"] == 40
    assert record["checks"] == {"rows_compared": 2, "first_mismatch": None, "skipped": 0}
    printed = capsys.readouterr().out
    assert "tiny1-rows2, gates none, reference on" in printed and "\n    40  " in printed


def test_a_wrong_float32_state_fails():
    good = drift.Drift((1, 2), (1e-3, 2e-3), (1e-3, 2e-3), (1e-3, 2e-3), "reference")
    wrong = dataclasses.replace(good, state=(1e-7, 0.5))
    right = dataclasses.replace(good, state=(1e-7, 2e-7))
    endless = dataclasses.replace(good, state=(1e-3, float("nan")))
    for full, low, found in ((right, good, None), (wrong, good, [2, 0.5])):
        record = drift.record(SPEC, "none", {"float32": full, "bfloat16": low}, "a command", "abc", 0)
        assert record["checks"]["first_mismatch"] == found
    record = drift.record(SPEC, "none", {"float32": right, "bfloat16": endless}, "a command", "abc", 0)
    assert record["checks"]["first_mismatch"] == [2, "nan"] and record["metrics"]["state_error"] == "nan"


@pytest.mark.host
def test_records_are_appended_as_they_come(tmp_path, monkeypatch):
    """Gates that were followed to the end are kept when the next ones are not."""
    path, good = tmp_path / "drift.json", drift.measure

    def measure(spec, gates, *how):
        if gates == "mixed":
            raise KeyboardInterrupt
        return good(spec, gates, *how)

    argv = ["--model=tiny1", "--rows=2", "--steps=3", f"--output={path}"]
    assert drift.main([*argv, "--gates=none", "--dtype=float32", "--implementation=reference"]) == 0
    monkeypatch.setattr(drift, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        drift.main([*argv, "--gates=initial,mixed"])
    cells = [record["cell"].removeprefix("drift/gdn_decode/tiny1-rows2-") for record in json.loads(path.read_text())]
    assert cells == ["none@fp32@reference", "initial"]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--gates=some", "'some' is none of initial"),
        ("--rows=0", "positive"),
        ("--output=tests", "tests is a directory"),
    ],
)
def test_refuses_by_name(flag, words, capsys, monkeypatch):
    monkeypatch.chdir(pathlib.Path(__file__).parents[2])
    with pytest.raises(SystemExit):
        drift.main(["--model=tiny1", flag])
    assert words in capsys.readouterr().err
