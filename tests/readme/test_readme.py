"""Every block of the README runs, in order, in a copy of the project, with the shown output."""

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
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".tidegate", "data", "__pycache__", ".*_cache", "tests", "*.egg-info")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the project, as a clone would be, with this environment's packages."""
    copy = tmp_path_factory.mktemp("readme") / "tidegate"
    shutil.copytree(PROJECT, copy, ignore=NOT_COPIED)
    (copy / ".venv").symlink_to(Path(sys.prefix), target_is_directory=True)
    installed = Path(sys.prefix) / "installed"
    if not installed.exists():
        pytest.skip("the environment was not made by make; run: make setup")
    yield copy
    for folder in filter(Path.exists, (copy / "examples", copy.parent / "shop")):
        subprocess.run([COMMAND, "down", "--delete-data", "--yes"], cwd=folder, check=True, capture_output=True)


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    """A block in another language would go untested; drawings are text, and tests/cluster runs with the settings."""
    assert {language for language, _ in blocks(README)} == {"console", "python", "text", "toml"}


@pytest.mark.promise("verb:demo")
def test_every_block_does_what_it_shows(clone: Path, tmp_path: Path) -> None:
    """Console blocks print the shown output (``...`` stands for anything), Python blocks are the files that they name."""
    environment = {**os.environ, "PYTHONPATH": str(clone)}  # the copy's own modules, not the installed project's
    shell = Shell(clone, environment, tmp_path / "variables")
    for language, content in blocks(README):
        shell.run_block(language, content)
