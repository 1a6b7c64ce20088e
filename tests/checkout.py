"""The packages of this checkout: their files and names, their wheel, and programs that import them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Folders at the top level that are subpackages of `tidegate`, by links.
SUBPACKAGES = ("dags", "jobs", "migrations", "state_store")
PACKAGES = (*SUBPACKAGES, "tidegate")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def module_of(path: str) -> str:
    """Return the name of a file's module: `tidegate.jobs.states` for `jobs/states.py`."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"tidegate.{name}" if name.split(".")[0] in SUBPACKAGES else name


def in_git() -> list[str]:
    names = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if os.path.lexists(REPOSITORY / name)]


def tracked() -> list[str]:
    return [name for name in in_git() if not (REPOSITORY / name).is_symlink()]


def copy_to(folder: Path, *beginnings: str) -> Path:
    """Copy what is in Git and has such a name, so that a program with this folder on its path runs it."""
    for name in in_git():
        if name.startswith(beginnings):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name, follow_symlinks=False)
    return folder


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder, from a copy of what is in Git, as building writes files of its own beside the packages."""
    copy = copy_to(folder / "copy", *PACKAGES, "docs", "pyproject.toml", "README.md")
    built = subprocess.run([sys.executable, "-c", BUILD, folder], cwd=copy, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    shutil.rmtree(copy)
    return folder / built.stdout.splitlines()[-1]


def write_package(folder: Path, **pipelines: str) -> Path:
    """Let a folder hold a package of authors, whose pipelines are found by these entry points once it is on the path."""
    metadata = folder / "authors-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: authors\nVersion: 1\n")
    points = "".join(f"{name} = {place}\n" for name, place in pipelines.items())
    (metadata / "entry_points.txt").write_text(f"[tidegate.pipelines]\n{points}")
    return folder


def python(code: str, folder: Path, *arguments: str, path: Sequence[Path] = (REPOSITORY,)) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter in a folder; of the packages, those on this path, as in no project's environment."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "TIDEGATE_", "PYTHON"))}
    airflow = {"AIRFLOW_HOME": str(folder), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    environ = {**usual, **airflow, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400, check=False)
