"""Removes Airflow's old history: runs in its database and logs of tasks. Neither holds any state.

    python -m tidegate.stack.components.airflow_cleanup           removes what is older than the setting `airflow_history_days`
    python -m tidegate.stack.components.airflow_cleanup --daily   does so now, and again each day

It runs with the environment of Airflow's processes.
"""

import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tidegate.state_store.base.settings import Settings

DAY_SECONDS = 24 * 60 * 60
# Not `dag`: Airflow would forget that a person has paused a Dag whose file was not there to be parsed, as during an outage.
TABLES = (
    "asset_event",
    "dag_run",
    "dag_version",
    "import_error",
    "job",
    "log",
    "revoked_token",
    "task_instance",
    "task_instance_history",
    "task_reschedule",
    "xcom",
)


def marker(airflow_home: Path) -> Path:
    """Return the file whose modification time is that of the last removal."""
    return airflow_home / "logs" / ".history"


def is_due(airflow_home: Path) -> bool:
    """Return whether a day has passed since the last removal; in a new Airflow the first day begins now."""
    file = marker(airflow_home)
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(0o600)
    return abs(time.time() - file.stat().st_mtime) > DAY_SECONDS  # also due if the clock was put back


def remove_logs(logs: Path, before: float) -> int:
    """Remove files unchanged since a time, and the folders that become empty; return the number of files."""
    folders = []
    for place, _, names in os.walk(logs):
        folders.append((Path(place), Path(place).stat().st_mtime, names))
    removed = 0
    for folder, changed, names in reversed(folders):
        for file in (folder / name for name in names):
            if not file.is_symlink() and file.stat().st_mtime < before:
                file.unlink()
                removed += 1
        if changed < before and folder != logs and not any(folder.iterdir()):  # a task may be about to write into a newer one
            folder.rmdir()
    return removed


def remove(airflow_home: Path, days: int) -> None:
    """Remove runs and logs that are older than `days`.

    Raises: OSError, subprocess.CalledProcessError.
    """
    marker(airflow_home).touch(0o600)
    before = datetime.now(UTC) - timedelta(days=days)
    removed = remove_logs(airflow_home / "logs", before.timestamp())
    print(f"Removed {removed} logs of tasks from before {before:%Y-%m-%d %H:%M} UTC.", flush=True)  # noqa: T201 - into its log
    command = [sys.executable, "-m", "airflow", "db", "clean", "--clean-before-timestamp", before.isoformat()]
    options = ["--tables", ",".join(TABLES), "--skip-archive", "--batch-size", "10000", "--error-on-cleanup-failure", "--yes"]
    subprocess.run([*command, *options], check=True)  # noqa: S603 - our own command, no shell


def main(*, daily: bool) -> None:
    """Remove old history once, or each day."""
    while True:
        remove(Path(os.environ["AIRFLOW_HOME"]), Settings.load().airflow_history_days)
        if not daily:
            return
        time.sleep(DAY_SECONDS)


if __name__ == "__main__":
    main(daily="--daily" in sys.argv[1:])
