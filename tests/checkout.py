"""The packages of this checkout: their files, names and copies."""

import shutil
import subprocess
import sys
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


def copy_to(folder: Path) -> Path:
    """Copy the packages, with what they read of the documents, so that a program with this folder on its path runs the copy."""
    for name in (*PACKAGES, "docs/errors", "docs/json"):
        shutil.copytree(
            REPOSITORY / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "frontend")
        )
    return folder


def tracked() -> list[str]:
    """Return the names of the files in Git that are no links."""
    names = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (REPOSITORY / name).is_file() and not (REPOSITORY / name).is_symlink()]


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder, from a copy of what is in Git, as building writes files of its own beside the packages."""
    copy = folder / "copy"
    for name in tracked():
        if name.startswith((*PACKAGES, "docs", "pyproject.toml", "README.md")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, copy / name)
    for link in (REPOSITORY / "tidegate").iterdir():
        if link.is_symlink():
            (copy / "tidegate" / link.name).symlink_to(link.readlink())
    built = subprocess.run([sys.executable, "-c", BUILD, folder], cwd=copy, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    shutil.rmtree(copy)
    return folder / built.stdout.splitlines()[-1]
