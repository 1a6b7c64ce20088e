"""The project in the folder `examples`: this process has its pipelines, and tests get copies of it."""

import shutil
from pathlib import Path

import tidegate.jobs.pipelines

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PARTS = ("pipelines", "dags", "migrations", "tidegate.toml")

# As if the tests ran in its folder, not in the repository's.
tidegate.jobs.pipelines.__path__[:] = [str(EXAMPLES / "pipelines")]


def copy_examples(home: Path, *parts: str) -> None:
    """Copy the project, or these parts of it, into a folder; its data and its stack stay where they are."""
    for part in parts or PARTS:
        if (EXAMPLES / part).is_dir():
            shutil.copytree(EXAMPLES / part, home / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(EXAMPLES / part, home / part)
