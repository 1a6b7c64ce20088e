"""The set-up names missing prerequisites, and make runs every test."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
JAVA_17, JAVA_11 = 'openjdk version "17.0.9" 2023-10-17', 'openjdk version "11.0.2" 2019-01-15'


@pytest.mark.parametrize(
    ("java", "python", "message"),
    [
        (None, sys.executable, "Java is missing. Install Java 17 or 21"),
        (JAVA_11, sys.executable, "is Java 11. Install Java 17 or 21"),
        (JAVA_17, "no-such-python", "no-such-python is missing or older than 3.11"),
        (JAVA_17, sys.executable, None),
    ],
    ids=["no Java", "old Java", "no Python", "all there"],
)
def test_a_missing_prerequisite_is_named_first_with_advice(
    tmp_path: Path, java: str | None, python: str, message: str | None
) -> None:
    """Before anything is downloaded."""
    for tool in ("sed", "head"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    if java:
        (tmp_path / "java").write_text(f"#!/bin/sh\necho '{java}' >&2\n")
        (tmp_path / "java").chmod(0o755)

    done = subprocess.run(
        ["/bin/sh", PROJECT / ".ci" / "prerequisites"],
        env={"PATH": str(tmp_path), "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )

    first = (done.stderr.splitlines() or [""])[0]
    assert (done.returncode, done.stdout) == (1 if message else 0, "")
    assert (message or "") in first
    assert bool(first) == bool(message)


def test_a_copy_without_links_is_named(tmp_path: Path) -> None:
    """As some archives and systems leave it: its subpackages are texts, and no import would say why."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(PROJECT / ".ci/prerequisites", tmp_path / ".ci")
    (tmp_path / "tidegate").mkdir()
    for name in ("dags", "docs", "migrations", "state_store"):
        (tmp_path / "tidegate" / name).mkdir()
    (tmp_path / "tidegate/jobs").write_text("../jobs")

    done = subprocess.run(
        ["/bin/sh", tmp_path / ".ci/prerequisites"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.startswith(
        "tidegate/jobs is no link to the folder jobs: this copy of the repository has lost its links."
    )


def test_make_help_explains_every_target() -> None:
    """Every target has a line of help."""
    shown = subprocess.run(["make", "help"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout

    targets = {line.split()[0]: line.split()[1:] for line in shown.splitlines()}
    assert {"setup", "demo", "test", "check", "down"} <= targets.keys()
    assert all(targets.values())


def test_no_folder_of_tests_is_forgotten() -> None:
    """Pytest runs the folders and files that pyproject.toml lists; a new one has to be listed too."""
    listed = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]

    files = {f"tests/{file.parent.name}/{file.name}" for file in (PROJECT / "tests").glob("*/test_*.py")}
    assert files == {file for file in files if file in listed or file.rpartition("/")[0] in listed}
    assert all((PROJECT / place).exists() for place in listed)


# A Python that makes environments whose programs only record their calls.
FAKE_PYTHON = f"""#!/bin/sh
[ "$1" = -m ] || exec "{sys.executable}" "$@"
mkdir -p .venv/bin
for program in python uv tidegate; do
    printf '#!/bin/sh\\necho "$0 $@" >> calls\\n' > .venv/bin/$program
    chmod +x .venv/bin/$program
done
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with a difficult name in which `make setup` works, and installs nothing."""
    folder = tmp_path / "Zürich à la carte"
    (folder / ".ci").mkdir(parents=True)
    (folder / ".ci" / "prerequisites").write_text("")
    shutil.copy(PROJECT / "Makefile", folder)
    for file in ("requirements-build.txt", "requirements.txt", "requirements-dev.txt", "pyproject.toml"):
        (folder / file).write_text("")
    (folder / "python").write_text(FAKE_PYTHON)
    (folder / "python").chmod(0o755)
    return folder


def _installs(clone: Path) -> int:
    """Return how often everything was installed."""
    return (clone / "calls").read_text().count("class_archive")


def _setup(clone: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["make", "setup", "PYTHON=./python"], cwd=clone, stdout=subprocess.DEVNULL)


def test_two_set_ups_at_once_are_one(clone: Path) -> None:
    """Two `make test` in a new clone: the second waits for the first, and finds it done."""
    both = [_setup(clone) for _ in range(2)]

    assert [make.wait(60) for make in both] == [0, 0]
    assert _installs(clone) == 1


def test_a_renamed_clone_installs_again(clone: Path) -> None:
    """The programs in .venv name the folder that they were made for; an unchanged clone is left alone."""
    for _ in range(2):
        assert _setup(clone).wait(60) == 0
    assert _installs(clone) == 1
    renamed = clone.rename(clone.with_name("renamed"))

    for _ in range(2):
        assert _setup(renamed).wait(60) == 0

    assert _installs(renamed) == 2
    assert (renamed / ".venv" / "folder").read_text().strip() == str(renamed.resolve() / ".venv")
