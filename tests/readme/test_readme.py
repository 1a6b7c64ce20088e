"""Every block of the README runs, in order, in a copy of the project, with the shown output."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import COMMAND

PROJECT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".tidegate", "data", "__pycache__", ".*_cache", "tests", "*.egg-info")
SECONDS_PER_COMMAND = 900


@dataclass(frozen=True)
class Command:
    """A line of a console block and the output shown below it."""

    line: str
    shown: list[str]


def blocks() -> list[tuple[str, str]]:
    """Return the README's blocks with their languages."""
    return BLOCK.findall((PROJECT / "README.md").read_text(encoding="utf-8"))


def commands(block: str) -> list[Command]:
    """Split a console block at its prompts."""
    _, *parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
    return [Command(lines[0], lines[1:]) for part in parts if (lines := part.splitlines())]


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
    subprocess.run([COMMAND, "down", "--delete-data", "--yes"], cwd=copy, check=True, capture_output=True)


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    """A block in another language would go untested; drawings are text, and tests/cluster runs with the settings."""
    assert {language for language, _ in blocks()} == {"console", "python", "text", "toml"}


def test_every_block_does_what_it_shows(clone: Path) -> None:
    """Console blocks print the shown output (``...`` stands for anything), Python blocks are the files that they name."""
    environment = {**os.environ, "PYTHONPATH": str(clone)}  # the copy's own modules, not the installed project's
    for language, content in blocks():
        if language == "python":
            name = content.splitlines()[0].removeprefix("# ")
            (clone / name).write_text(content, encoding="utf-8")
        elif language == "console":
            for command in commands(content):
                environment = _run(command, clone, environment)


def _run(command: Command, clone: Path, environment: dict[str, str]) -> dict[str, str]:
    """Run one command; return the environment after it, as in a shell."""
    script = f"{command.line} && env -0 > {clone}/.environment"
    started = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS_PER_COMMAND,
        check=False,
    )
    print(f"$ {command.line}  # {time.monotonic() - started:.1f} s\n{done.stdout}")  # noqa: T201 - shown if a test fails
    assert done.returncode == 0, f"$ {command.line}\n{done.stdout}"
    assert _fits(command.shown, done.stdout.splitlines()), f"$ {command.line}\nshown: {command.shown}\nprinted: {done.stdout}"
    variables = (clone / ".environment").read_text().split("\0")
    return dict(variable.split("=", 1) for variable in variables if "=" in variable)


def _fits(shown: list[str], printed: list[str]) -> bool:
    """Return whether the shown lines occur in this order; within a line, ``...`` stands for anything."""
    patterns = [re.escape(" ".join(line.split())).replace(r"\.\.\.", ".*") for line in shown if line.strip() != "..."]
    lines = iter(" ".join(line.split()) for line in printed)
    return all(any(re.fullmatch(pattern, line) for line in lines) for pattern in patterns)
