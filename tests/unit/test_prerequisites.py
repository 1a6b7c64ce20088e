"""The set-up names missing prerequisites, and make runs every test."""

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
        (JAVA_11, sys.executable, "is Java 11. Install Java 17 or 21"),
        (JAVA_17, sys.executable, None),
    ],
    ids=["old Java", "all there"],
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
