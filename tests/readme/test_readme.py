"""What README and `docs/` show works as it stands; the set-up of README: `tests/end_to_end/test_one_airflow.py`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import in_process
from tests.conftest import COMMAND
from tests.readme.console import Shell, blocks

PROJECT = Path(__file__).resolve().parents[2]
README = PROJECT / "README.md"
OWN = "## Your own pipeline"  # with this heading, the demo is over
STACK = "### The stack"  # and with this one, all that a stack is for
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".tidegate", "data", "__pycache__", ".*_cache", "tests", "*.egg-info")
PAGES = ["delta", "files", "iceberg", "inputs", "queries", "state-size", "states", "storage", "topologies", "windows"]


@pytest.mark.promise("verb:demo")
@pytest.mark.soak
def test_the_demo_does_what_readme_shows(tmp_path: Path) -> None:
    """In a copy of the project, as a clone would be, with this environment's packages."""
    copy = tmp_path / "tidegate"
    shutil.copytree(PROJECT, copy, ignore=NOT_COPIED)
    (copy / ".venv").symlink_to(Path(sys.prefix), target_is_directory=True)
    if not (Path(sys.prefix) / "installed").exists():
        pytest.skip("the environment was not made by make; run: make setup")
    shell = Shell(copy, {**os.environ, "PYTHONPATH": str(copy)}, tmp_path / "variables")  # its modules, not the installed ones
    try:
        for language, content in blocks(README, end=OWN):
            shell.run_block(language, content)
    finally:
        subprocess.run([COMMAND, "down", "--delete-data", "--yes"], cwd=copy / "examples", check=True, capture_output=True)


@pytest.mark.promise("name:*")
@pytest.mark.parametrize("page", PAGES)
def test_the_declarations_of_a_page_can_be_registered(register: Callable[..., None], page: str) -> None:
    names: dict[str, Any] = {}
    pipelines = {}
    for language, content in blocks(PROJECT / f"docs/{page}.md"):
        if language == "python":
            exec(compile(content, page, "exec"), names)
            if "PIPELINE" in names:
                pipelines[names["PIPELINE"].name] = names["PIPELINE"]
    assert pipelines
    register(*pipelines.values())


@pytest.mark.promise("verb:migrate")
def test_the_script_for_administrators_is_the_printed_one(tmp_path: Path) -> None:
    printed = in_process.run(["migrate", "--print-roles"], {}, tmp_path).stdout
    assert [script for language, script in blocks(PROJECT / "docs/postgres.md") if language == "sql"] == [printed]
