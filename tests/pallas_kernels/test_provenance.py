"""The commit that results files name."""

import subprocess

from pallas_kernels import bench, records
from pallas_kernels.provenance import COMMIT_VARIABLE, current_commit


def test_commits(tmp_path, monkeypatch):
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    assert current_commit(tmp_path) == "unknown"
    (tmp_path / "pallas_kernels").mkdir()
    (tmp_path / "benchmarks").mkdir()
    code, results = tmp_path / "pallas_kernels" / "__init__.py", tmp_path / "benchmarks" / "a.json"

    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    code.write_text("")
    results.write_text("[]")
    assert current_commit(tmp_path) == "unknown", "the repository does not hold the code"
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    assert current_commit(tmp_path) == head
    results.write_text("[1]")
    (tmp_path / "untracked.py").write_text("")
    assert current_commit(tmp_path) == head
    code.write_text("x = 1")
    assert current_commit(tmp_path) == head + "+dirty"
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    assert current_commit(tmp_path) == "abc"


def test_kernel_records_name_it(monkeypatch, tmp_path):
    monkeypatch.setenv(COMMIT_VARIABLE, "abc+dirty")
    output = tmp_path / "kernels.json"
    quick = ["--calls=2", "--dispatches=1", "--samples=2", "--copy-bytes=1048576", f"--output={output}"]
    assert bench.main(["--tiny", "--op=causal_conv", "--spec=tiny1-ragged", *quick]) == 0
    assert [record["commit"] for record in records.records_in(str(output))] == ["abc+dirty"]
