"""The ledger's own tests on each supported version of Postgres."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.managed_postgres import LONG
from tests.postgres_versions import VERSIONS

REPOSITORY = Path(__file__).resolve().parents[2]
# Migrations and grants, the commit and what it refuses, all kinds of states and sources, windows, totals, sketches.
CHOSEN = (
    "tests/integration/test_migrations.py",
    "tests/integration/test_schema.py",
    "tests/integration/test_roles.py",
    "tests/integration/test_ordered_commit.py",
    "tests/integration/test_commit_ready.py",
    "tests/integration/test_attempts.py",
    "tests/integration/test_measures.py",
    "tests/integration/test_checks.py",
    "tests/conformance",
    "tests/jobs/test_sketches.py",
)


@LONG
@pytest.mark.parametrize("version", VERSIONS)
def test_the_ledger_works_on_each_version(version: int, tmp_path: Path) -> None:
    options = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *CHOSEN],
        cwd=REPOSITORY,
        env={**os.environ, "POSTGRES_OF_TESTS": str(version)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
