"""The demo of README runs as it is shown. Its other blocks are the set-up of `tests/end_to_end/test_one_airflow.py`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import COMMAND
from tests.readme.console import Shell, blocks

PROJECT = Path(__file__).resolve().parents[2]
README = PROJECT / "README.md"
OWN, STACK = (
    "## Your own pipeline",
    "### The stack",
)  # headings: with the first, the demo is over; then, all that a stack is for
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".tidegate", "data", "__pycache__", ".*_cache", "tests", "*.egg-info")


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """A copy of the project, as a clone would be, with this environment's packages."""
    copy = tmp_path / "tidegate"
    shutil.copytree(PROJECT, copy, ignore=NOT_COPIED)
    (copy / ".venv").symlink_to(Path(sys.prefix), target_is_directory=True)
    if not (Path(sys.prefix) / "installed").exists():
        pytest.skip("the environment was not made by make; run: make setup")
    yield copy
    subprocess.run([COMMAND, "down", "--delete-data", "--yes"], cwd=copy / "examples", check=True, capture_output=True)


@pytest.mark.promise("verb:demo")
@pytest.mark.soak
def test_the_demo_does_what_readme_shows(clone: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(clone)}  # the copy's own modules, not the installed project's
    shell = Shell(clone, environment, tmp_path / "variables")
    for language, content in blocks(README, end=OWN):
        shell.run_block(language, content)
