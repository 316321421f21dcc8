#!/usr/bin/env bash
# Checks and tests: .venv with the test extra, the tokenizer that some tests need, ruff, pytest.
# Arguments go to pytest: scripts/test.sh tests/schedulers -k budget
# A test that is skipped for a reason that tests/conftest.py does not expect is a failure.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$ROOT"
export HF_HUB_OFFLINE=1
# The oracle multiplies small matrices: OpenBLAS threads would mostly spin (five times the CPU time on two cores).
export OPENBLAS_NUM_THREADS=1

ensure_venv dev

step "Fetching a real tokenizer for the tests"
if ! scripts/fetch_test_tokenizer.sh; then
    echo "Going on without it: the tests that need it will be skipped, and that counts as a failure." >&2
fi

step "Checking style"
.venv/bin/ruff check .
.venv/bin/ruff format --check .

step "Running the tests"
# Two processes, a file in one of them: fixtures that compile programs are shared by the tests of a file.
.venv/bin/python -m pytest --fail-unexpected-skips --numprocesses=2 --dist=loadfile --durations=15 "$@"
