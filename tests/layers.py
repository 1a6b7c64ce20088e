"""What is left to `make soak`, and where the time of a run went: printed at its end, for CONTRIBUTING.md."""

import os
from collections import defaultdict

import pytest

_LEFT_OUT = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make soak` runs: what is marked `soak`, and of a test that is `sampled(n)`, all but n parameters."""
    if os.environ.get("SOAK"):
        return
    left_out = {item for item in items if item.get_closest_marker("soak")}
    sampled: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if item not in left_out and (marker := item.get_closest_marker("sampled")):
            sampled.setdefault((item.nodeid.partition("[")[0], *marker.args), []).append(item)
    for (_, most), of_a_test in sampled.items():
        kept = {of_a_test[round(number * (len(of_a_test) - 1) / max(most - 1, 1))] for number in range(most)}
        left_out.update(set(of_a_test) - kept)
    config.stash[_LEFT_OUT] = len(left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that prints the summary how many tests this one has left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take the number from the last process that ends: all collect the same."""
    output, config = getattr(node, "workeroutput", {}), node.config  # type: ignore[attr-defined]
    config.stash[_LEFT_OUT] = output.get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print tests and minutes by folder, and how many tests are left to `make soak`."""
    tests: dict[str, set[str]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = report.nodeid.split("/")[1] if report.nodeid.startswith("tests/") else "elsewhere"
                tests[folder].add(report.nodeid)
                seconds[folder] += report.duration
    if sum(map(len, tests.values())) > 1:
        terminalreporter.section("layers")
        terminalreporter.write_line("| folder | tests | minutes of a process |\n|---|---|---|")
        for folder in sorted(tests, key=lambda name: -seconds[name]):
            terminalreporter.write_line(f"| {folder} | {len(tests[folder])} | {seconds[folder] / 60:.1f} |")
    if left_out := config.stash.get(_LEFT_OUT, 0):
        terminalreporter.write_line(f"{left_out} tests or parameters are left to make soak.")
