"""The set-up names missing prerequisites, and make runs every test."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("java", "message"),
    [('openjdk version "11.0.2" 2019-01-15', "is Java 11. Install Java 17 or 21"), ('openjdk version "17.0.9" 2023-10-17', "")],
)
def test_a_missing_prerequisite_is_named_first_with_advice(tmp_path: Path, java: str, message: str) -> None:
    for tool in ("sed", "head"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    (tmp_path / "java").write_text(f"#!/bin/sh\necho '{java}' >&2\n")
    (tmp_path / "java").chmod(0o755)
    command, environ = ["/bin/sh", PROJECT / ".ci" / "prerequisites"], {"PATH": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, bool(done.stderr)) == (1 if message else 0, "", bool(message))
    assert message in done.stderr.partition("\n")[0]


def test_no_folder_of_tests_is_forgotten() -> None:
    listed = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    files = {f"tests/{file.parent.name}/{file.name}" for file in (PROJECT / "tests").glob("*/test_*.py")}
    assert files == {file for file in files if file in listed or file.rpartition("/")[0] in listed}
    assert all((PROJECT / place).exists() for place in listed)
