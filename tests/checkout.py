"""The packages of this checkout: their files, names and copies."""

import shutil
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Folders at the top level that are subpackages of `tidegate`, by links.
SUBPACKAGES = ("dags", "jobs", "migrations", "state_store")
PACKAGES = (*SUBPACKAGES, "tidegate")


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
