"""A digest of the code that a process runs.

Processes keep what they have imported: after an update, a running stack runs the old code until it is restarted.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent.parent
# Modules that Airflow's processes import before they fork, or keep. Pipelines and Dags are imported again.
KEPT = ("state_store", "jobs", "tidegate", "dags/batch_dag.py", "dags/dispatch.py", "dags/places.py", "dags/turn_trigger.py")
REIMPORTED = "jobs/pipelines"
DEPENDENCIES = "requirements.txt"


def version(project: Path = PROJECT) -> str:
    """Return a digest of the code on disk that a stack's processes keep in memory, and of the packages that it needs."""
    digest = hashlib.sha256()
    for file in sorted(_files(project)):
        digest.update(f"{file.relative_to(project)}\n".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _files(project: Path) -> Iterator[Path]:
    for name in KEPT:
        place = project / name
        found = place.rglob("*.py") if place.is_dir() else [place] if place.exists() else []
        yield from (file for file in found if not file.is_relative_to(project / REIMPORTED))
    if (project / DEPENDENCIES).exists():
        yield project / DEPENDENCIES
