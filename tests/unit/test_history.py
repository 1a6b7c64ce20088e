"""The removal of old logs of Airflow's tasks."""

import os
import time
from pathlib import Path

from tidegate.stack.components import airflow_cleanup


def log(logs: Path, name: str, age: int) -> Path:
    """Write a log that was last modified `age` days ago, in a folder of the same age."""
    file = logs / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("text")
    for path in (file, *file.parents[: len(file.relative_to(logs).parts) - 1]):
        os.utime(path, times=(time.time() - age * airflow_cleanup.DAY_SECONDS,) * 2)
    return file


def test_old_logs_are_removed_with_the_folders_that_they_leave_empty(tmp_path: Path) -> None:
    logs, elsewhere = tmp_path / "logs", log(tmp_path, "elsewhere/precious", 40)
    new = log(logs, "dag_id=a/run_id=2/attempt=2.log", 20)
    old = [log(logs, "dag_id=a/run_id=2/attempt=1.log", 40), log(logs, "dag_id=b/run_id=1/task_id=x/attempt=1.log", 40)]
    (about_to_be_used := logs / "dag_id=a/run_id=3").mkdir()
    (link := logs / "latest").symlink_to(elsewhere.parent)
    assert airflow_cleanup.remove_logs(logs, time.time() - 30 * airflow_cleanup.DAY_SECONDS) == len(old)
    assert not any(file.exists() for file in old)
    assert not (logs / "dag_id=b").exists()
    assert [path.exists() for path in (new, about_to_be_used, link, elsewhere)] == [True] * 4
