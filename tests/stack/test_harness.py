"""Processes that a test run starts end with it."""

import os
import signal
import subprocess
from pathlib import Path

from tests.reaper import VARIABLE, Run, reap_the_dead
from tidegate.stack.components.server_process import Identity


def test_the_next_run_ends_the_processes_of_a_dead_one(tmp_path: Path) -> None:
    """They remain if its reaper was killed too; those of a live run stay."""
    dead = subprocess.Popen(["true"])
    owner = Identity.of(dead.pid)
    dead.wait()
    marks = [Run(identity, tmp_path).mark for identity in (owner, Identity.of(os.getpid()))]
    orphan, living = (subprocess.Popen(["sleep", "600"], env={VARIABLE: mark}, start_new_session=True) for mark in marks)
    try:
        reap_the_dead()

        assert orphan.wait(10) == -signal.SIGTERM
        assert living.poll() is None
    finally:
        for process in (orphan, living):
            process.kill()
            process.wait()
