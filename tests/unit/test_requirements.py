"""Every installed package is pinned by hash."""

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
LOCKS = ("requirements-build.txt", "requirements.txt", "requirements-dev.txt")


@pytest.mark.promise("security:package-index-or-maven-repository-that-sends")
@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_has_its_version_and_hashes(name: str) -> None:
    """Another file from a package index under the same version is refused."""
    text = re.sub(r"^\s*#.*\n", "", (PROJECT / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    requirements = [line for line in text.splitlines() if line.strip()]

    assert requirements
    assert [line for line in requirements if not re.match(r"[\w.\[\],-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line)] == []


@pytest.mark.parametrize("place", ["Makefile", "compose/Dockerfile"])
def test_nothing_is_installed_but_by_hash(place: str) -> None:
    """Every installing command requires hashes, or installs only this project, and builds with pinned packages."""
    text = (PROJECT / place).read_text().replace("\\\n", " ")
    commands = [re.split("&&|\n", command)[0] for command in text.split("pip install ")[1:]]

    assert len(commands) == 3
    for command in commands:
        assert "--require-hashes" in command or ("--no-deps" in command and "--editable ." in command), command
        assert "requirements-build.txt" in command or "--no-build-isolation" in command, command
