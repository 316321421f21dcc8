"""What the shell scripts and the shared test setup promise: finding Python, reusing .venv, counting skips."""

import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ("bash", "basename", "cat", "dirname", "env", "grep", "rm", "tail", "tee", "wc")


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with the scripts' shared part and a PATH that holds a few tools and no Python."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "venv.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def write_program(path: pathlib.Path, body: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return path


def shell(checkout: pathlib.Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(checkout / "bin"), "HOME": str(checkout), **variables}
    script = f"set -euo pipefail; source {checkout}/scripts/venv.sh; {command}"
    return subprocess.run(
        [str(checkout / "bin" / "bash"), "-c", script, "job.sh"], env=environment, capture_output=True, text=True
    )


def test_without_python_it_says_what_to_install(checkout: pathlib.Path) -> None:
    write_program(checkout / "bin" / "python3", "echo 'pyenv: python3: command not found' >&2; exit 127")
    result = shell(checkout, "ensure_venv")
    assert result.returncode == 1
    assert "no Python >= 3.12 found" in result.stderr and "apt-get install python3.12" in result.stderr
    assert not (checkout / ".venv").exists()


def test_finds_python_on_the_path_past_a_shim_that_does_not_run(checkout: pathlib.Path) -> None:
    write_program(checkout / "bin" / "python3.12", "exit 127")
    (checkout / "bin" / "python3").symlink_to(sys.executable)
    result = shell(checkout, "find_python")
    assert result.returncode == 0 and is_recent(result.stdout.strip())


def test_finds_python_among_pyenv_versions(checkout: pathlib.Path) -> None:
    old = write_program(checkout / "versions" / "3.11.7" / "bin" / "python", "exit 1")
    new = checkout / "versions" / "3.12.1" / "bin" / "python"
    new.parent.mkdir(parents=True)
    new.symlink_to(sys.executable)
    result = shell(checkout, "find_python", PYENV_ROOT=str(checkout))
    assert result.returncode == 0 and is_recent(result.stdout.strip())
    assert result.stdout.strip() != str(old)


def test_finds_python_through_uv(checkout: pathlib.Path) -> None:
    write_program(checkout / "bin" / "uv", '[ "$*" = "python find >=3.12" ] && echo /opt/uv/python')
    assert shell(checkout, "find_python").stdout == "/opt/uv/python\n"


def is_recent(python: str) -> bool:
    command = [python, "-c", "import sys; print(sys.version_info >= (3, 12))"]
    return subprocess.run(command, capture_output=True, text=True).stdout == "True\n"


@pytest.fixture
def fake_venv(checkout: pathlib.Path) -> pathlib.Path:
    """A .venv whose pip writes down how it is called; everything else goes to the real interpreter."""
    write_program(
        checkout / ".venv" / "bin" / "python",
        f'case "$*" in\n"-m pip --version") ;;\n'
        f'"-m pip install"*) echo "$*" >>"{checkout}/calls"\n'
        f'    [ ! -e "{checkout}/broken" ] || {{ echo no space left; exit 1; }} ;;\n'
        f'*) exec "{sys.executable}" "$@" ;;\nesac',
    )
    return checkout


def calls(checkout: pathlib.Path) -> list[str]:
    path = checkout / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_installs_once_and_again_when_pyproject_changes(fake_venv: pathlib.Path) -> None:
    assert shell(fake_venv, "ensure_venv").returncode == 0
    assert "Using .venv as it is" in shell(fake_venv, "ensure_venv").stdout
    assert len(calls(fake_venv)) == 1 and calls(fake_venv)[0].endswith(f"--editable {fake_venv}")
    assert shell(fake_venv, "ensure_venv dev").returncode == 0
    assert len(calls(fake_venv)) == 2 and calls(fake_venv)[1].endswith(f"--editable {fake_venv}[dev]")
    (fake_venv / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    shell(fake_venv, "ensure_venv")
    assert len(calls(fake_venv)) == 3


def test_failed_installation_is_an_error_and_is_tried_again(fake_venv: pathlib.Path) -> None:
    (fake_venv / "broken").touch()
    result = shell(fake_venv, "ensure_venv")
    assert result.returncode == 1
    assert "no space left" in result.stderr and "installing failed" in result.stderr
    (fake_venv / "broken").unlink()
    assert shell(fake_venv, "ensure_venv").returncode == 0
    assert len(calls(fake_venv)) == 2


def run_pytest(directory: pathlib.Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", directory)
    (directory / "test_it.py").write_text(textwrap.dedent(source))
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n    parity: x\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


SKIPS = """
    import pytest

    @pytest.mark.parity
    def test_beside_torch():
        raise AssertionError("ran without torch")

    def test_that_gives_up():
        pytest.skip("no luck today")

    def test_plain():
        pass
"""


def test_unexpected_skips_fail_only_when_asked(tmp_path: pathlib.Path) -> None:
    lenient, strict = run_pytest(tmp_path, SKIPS), run_pytest(tmp_path, SKIPS, "--fail-unexpected-skips")
    assert lenient.returncode == 0 and strict.returncode == 1
    for result in (lenient, strict):
        assert "UNEXPECTED 1: no luck today" in result.stdout
        assert "\n1: needs torch beside transformers (marker parity)" in result.stdout
        assert "1 passed, 2 skipped" in result.stdout


def test_expected_skips_pass(tmp_path: pathlib.Path) -> None:
    source = SKIPS.replace('pytest.skip("no luck today")', "pass")
    result = run_pytest(tmp_path, source, "--fail-unexpected-skips")
    assert result.returncode == 0 and "2 passed, 1 skipped" in result.stdout
