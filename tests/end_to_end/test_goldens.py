"""The model against the float64 oracle and against what transformers computed (tests/goldens)."""

from __future__ import annotations

import pytest

from tests import golden_kit
from tests.golden_kit import MAX_LAYER_ERROR
from tests.oracle import goldens, tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    yield tmp_path_factory.mktemp("models")
    golden_kit.forget()


@pytest.mark.parametrize("case", tiny.CASES)
def test_the_oracle_agrees_with_transformers(case):
    for length in goldens.LENGTHS:
        golden, exact = goldens.load_golden(case, length), golden_kit.oracle_outputs(case)[length, 0]
        top, mean, _ = goldens.distance(exact.logprobs[golden.positions], golden.logprobs)
        errors = goldens.relative_error(golden.layer_outputs, exact.layer_outputs[:, golden.positions])
        assert top <= 2e-4 and mean <= 1e-5, (length, top, mean)
        assert errors.max() <= MAX_LAYER_ERROR, (length, errors)


@pytest.mark.parametrize("case", tiny.CASES)
def test_float32_is_exact_to_rounding(case, root):
    """One-shot prefill and decode; then the same with every prompt in two pieces, which tying has no part in."""
    for split in (False, True) if case.endswith("-untied") else (False,):
        for found in golden_kit.float32_distances(case, root, split=split):
            print(f"{case} split {split} {found}")
            assert found.within_bars, (split, found)


@pytest.mark.parametrize("case", tiny.CASES)
def test_bfloat16_is_as_close_as_transformers(case, root):
    found = golden_kit.bfloat16_distances(case, root)
    print("\n".join(f"{case} {line}" for line in found))
    assert not [line for line in found if not line.within_bars]
