"""A digest of the code that a process runs.

Processes keep what they have imported: after an update, a running stack runs the old code until it is restarted.
"""

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
# Modules that Airflow's processes import before they fork, or keep. A project's pipelines and Dags are imported again.
KEPT = (".", "state_store", "jobs", "dags/batch_dag.py", "dags/dispatch.py", "dags/waiting_tasks.py", "dags/batch_trigger.py")
DEPENDENCIES = "requirements.txt"


def version(package: Path = PACKAGE) -> str:
    """Return a digest of the code on disk that a stack's processes keep in memory, and of the packages that it needs."""
    digest = hashlib.sha256()
    for name, file in sorted(_files(package).items()):
        digest.update(f"{name}\n".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _files(package: Path) -> dict[str, Path]:
    """Return files by their names in the package; in a checkout, the subpackages are links, which `rglob` does not follow."""
    places = [package / name for name in KEPT]
    found = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
    kept = {file.relative_to(package).as_posix(): file for file in found}
    dependencies = package.parent / DEPENDENCIES  # not in a wheel
    return kept | ({DEPENDENCIES: dependencies} if dependencies.exists() else {})
