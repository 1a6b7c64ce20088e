"""A plugin of pytest for a run with a planted fault: checks whose code is tested, and writes down which tests fail."""

import json
import os
from pathlib import Path

import pytest

import tidegate

REPORT = "MUTANT_REPORT"  # the variable that names the file, which gets a line of JSON for each failure
FOLDER = "MUTANT_FOLDER"  # the copy that has the fault


def pytest_configure() -> None:
    """Refuse to test any other code than the copy's."""
    folder, loaded = Path(os.environ[FOLDER]), Path(tidegate.__file__).resolve()
    if not loaded.is_relative_to(folder):
        raise pytest.UsageError(f"these tests would test {loaded}, and not the copy in {folder}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down a failure: its test, and the first line that says why."""
    if not report.failed:
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    why = (crash.message if crash else str(report.longrepr)).strip().splitlines() or [""]
    with Path(os.environ[REPORT]).open("a") as file:
        file.write(json.dumps({"test": report.nodeid, "why": f"{report.when}: {why[0][:200]}"}) + "\n")
