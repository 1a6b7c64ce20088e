"""The example project of docs/projects.md is made, and its own test passes."""

import os
import sys
from pathlib import Path

import pytest

from tests.readme.console import Shell, blocks
from tests.store import project

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs/projects.md"


@pytest.mark.soak
def test_the_example_works_as_it_stands(tmp_path: Path) -> None:
    """From `init` to the author's test, which needs no server; images and other servers are not made here."""
    left_out = (project.HOME_VARIABLE, "SPARK_")  # a session of another test of this process marks the environment
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment["PYTHONPATH"] = str(REPOSITORY)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shell = Shell(tmp_path, environment, tmp_path / "variables")
    found = blocks(PAGE)
    assert {language for language, _ in found} == {"console", "python", "dockerfile"}
    for language, content in found:
        shell.run_block(language, content)
    assert shell.folder == tmp_path / "shop"
