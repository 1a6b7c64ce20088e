"""Every installed package is pinned by hash."""

import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.checkout import PACKAGES
from tests.unit.test_imports import imports

PROJECT = Path(__file__).resolve().parents[2]
LOCKS = ("requirements-build.txt", "requirements-lowest.txt", "requirements.txt", "requirements-dev.txt")
# Imported where a source, a login or a listener asks for them: messages say what to install.
OPTIONAL = {"boto3", "obstore", "openlineage", "pyiceberg", "requests_gssapi"}


def versions(lock: str) -> dict[str, str]:
    """Return the versions of a lock by the names of packages; with markers, the last one."""
    found = re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", (PROJECT / lock).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.promise("security:package-index-or-maven-repository-that-sends")
@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_has_its_version_and_hashes(name: str) -> None:
    text = re.sub(r"^\s*#.*\n", "", (PROJECT / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    requirements = [line for line in text.splitlines() if line.strip()]
    assert requirements
    assert [line for line in requirements if not re.match(r"[\w.\[\],-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line)] == []


@pytest.mark.promise("security:package-index-or-maven-repository-that-sends")
@pytest.mark.parametrize("place", ["Makefile", "compose/Dockerfile"])
def test_nothing_is_installed_but_by_hash(place: str) -> None:
    text = (PROJECT / place).read_text().replace("\\\n", " ")
    commands = [re.split("&&|\n", command)[0] for command in text.split("pip install ")[1:]]
    assert len(commands) == 3
    for command in commands:
        assert "--require-hashes" in command or ("--no-deps" in command and "--editable ." in command), command
        assert "requirements-build.txt" in command or "--no-build-isolation" in command, command


def test_what_is_imported_comes_with_the_wheel() -> None:
    distributions, installed = packages_distributions(), versions("requirements-lowest.txt").keys()
    files = [file for package in PACKAGES for file in sorted((PROJECT / package).rglob("*.py"))]
    names = {name for file in files for _, name in imports(file.relative_to(PROJECT).as_posix())}
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - OPTIONAL - {"tidegate"}
    assert {"airflow", "pyspark", "sqlalchemy"} <= packages
    assert [name for name in sorted(packages) if installed.isdisjoint(map(canonicalize_name, distributions[name]))] == []
