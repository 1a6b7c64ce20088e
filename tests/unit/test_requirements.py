"""Every installed package is pinned by hash."""

import re
import sys
from importlib.metadata import packages_distributions

import pytest
from packaging.utils import canonicalize_name

from tests.checkout import REPOSITORY
from tests.unit.test_imports import FILES, imports

# Imported where a source, a login or a listener asks for them: messages say what to install.
OPTIONAL = {"boto3", "obstore", "openlineage", "pyiceberg", "requests_gssapi"}


@pytest.mark.promise("security:package-index-or-maven-repository-that-sends")
def test_nothing_is_installed_but_by_version_and_hash() -> None:
    for name in ("requirements-build.txt", "requirements-lowest.txt", "requirements.txt", "requirements-dev.txt"):
        text = re.sub(r"^\s*#.*\n", "", (REPOSITORY / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
        requirements = [line for line in text.splitlines() if line.strip()]
        assert requirements, name
        assert [line for line in requirements if not re.match(r"[\w.\[\],-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line)] == []
    for place in ("Makefile", "compose/Dockerfile"):
        text = (REPOSITORY / place).read_text().replace("\\\n", " ")
        commands = [re.split("&&|\n", command)[0] for command in text.split("pip install ")[1:]]
        assert len(commands) == 3
        for command in commands:
            assert "--require-hashes" in command or ("--no-deps" in command and "--editable ." in command), command
            assert "requirements-build.txt" in command or "--no-build-isolation" in command, command


def test_what_is_imported_comes_with_the_wheel() -> None:
    lowest = (REPOSITORY / "requirements-lowest.txt").read_text()
    installed = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)(?:\[.*\])?==", lowest, re.MULTILINE)}
    packages = {name.partition(".")[0] for path in FILES for _, name in imports(path)}
    packages -= sys.stdlib_module_names | OPTIONAL | {"tidegate"}
    assert {"airflow", "pyspark", "sqlalchemy"} <= packages
    distributions = packages_distributions()
    assert [name for name in sorted(packages) if installed.isdisjoint(map(canonicalize_name, distributions[name]))] == []
