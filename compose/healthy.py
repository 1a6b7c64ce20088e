"""Exit with 0 if Airflow's health page calls the given part healthy; as in tidegate/stack/components/airflow.py.

    python healthy.py metadatabase|scheduler|dag_processor|triggerer

Compose starts a container again when its process has ended, but not when it is unhealthy. So a part that lives and has long
sent no heartbeat is killed here. Standard library only: it runs every ten seconds in four containers.
"""

import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

HUNG_AFTER_SECONDS = 180  # as tidegate/stack/supervisor.py has it
SILENT_SINCE = Path("/run/tidegate/silent")
OF_INIT = Path("/proc/1/task/1/children")  # the container's own process is the first; others are orphans


def main(part: str) -> None:
    """Exit with a message unless the part is healthy; kill it if it is silent for too long."""
    is_silent = False
    try:
        url = f"{os.environ['TIDEGATE_AIRFLOW_URL']}/api/v2/monitor/health"
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
            statuses = {name: (found or {}).get("status") for name, found in json.load(answer).items()}
        is_silent = statuses["metadatabase"] == "healthy" and statuses.get(part) == "unhealthy"
    finally:
        if not is_silent:
            SILENT_SINCE.unlink(missing_ok=True)
    if is_silent and _has_long_been_silent():
        SILENT_SINCE.unlink()
        os.kill(int(OF_INIT.read_text().split()[0]), signal.SIGKILL)
    if statuses.get(part) != "healthy":
        sys.exit(f"Airflow's health page says that {part} is {statuses.get(part)}")


def _has_long_been_silent() -> bool:
    if not SILENT_SINCE.exists():
        SILENT_SINCE.touch()
    return time.time() - SILENT_SINCE.stat().st_mtime > HUNG_AFTER_SECONDS


if __name__ == "__main__":
    main(sys.argv[1])
