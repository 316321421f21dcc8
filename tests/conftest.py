"""Shared test setup: virtual devices, markers that skip, the account of skipped tests, and the demo checkpoint."""

import os
import pathlib

# Two virtual CPU devices, so that device overlap runs everywhere. Before anything imports jax.
os.environ.setdefault("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
# Compiling is most of the suite's time: no LLVM optimisation, and programs that several tests (and their child
# processes) share are compiled once. Quickstart, which CI runs too, uses the compiler as users do.
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".cache" / "xla-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import collections  # noqa: E402
import importlib.util  # noqa: E402

import pytest  # noqa: E402

# The only reasons for which a test may be skipped. `--fail-unexpected-skips` (scripts/test.sh) fails on any other.
NO_GPU = "needs an NVIDIA GPU (marker gpu)"
NO_TORCH = "needs torch beside transformers (marker parity)"
EXPECTED_SKIPS = (NO_GPU, NO_TORCH)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-unexpected-skips",
        action="store_true",
        help="fail when a test is skipped for another reason than the markers gpu and parity",
    )


def _has_gpu() -> bool:
    import jax

    return jax.default_backend() == "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = {name: [item for item in items if item.get_closest_marker(name)] for name in ("gpu", "parity")}
    if marked["gpu"] and not _has_gpu():
        for item in marked["gpu"]:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
    if importlib.util.find_spec("torch") is None:
        for item in marked["parity"]:
            item.add_marker(pytest.mark.skip(reason=NO_TORCH))


def _skip_reasons(config: pytest.Config) -> collections.Counter[str]:
    """How many tests were skipped for which reason."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reasons: collections.Counter[str] = collections.Counter()
    for report in reporter.stats.get("skipped", ()) if reporter else ():
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    return reasons


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    strict = session.config.getoption("--fail-unexpected-skips")
    if strict and exitstatus == pytest.ExitCode.OK and set(_skip_reasons(session.config)) - set(EXPECTED_SKIPS):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reasons = _skip_reasons(config)
    if reasons:
        terminalreporter.section("skipped")
    for reason, number in sorted(reasons.items()):
        expected = "" if reason in EXPECTED_SKIPS else "UNEXPECTED "
        terminalreporter.write_line(f"{expected}{number}: {reason}")


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The directory of the demo checkpoint, with its tokenizer; tests must not change it."""
    from scripts import make_demo_checkpoint

    directory = tmp_path_factory.mktemp("demo") / "checkpoint"
    make_demo_checkpoint.write_checkpoint(directory)
    return directory
