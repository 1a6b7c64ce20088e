"""Processes that a test run starts end with it, and an interrupt reaches its target."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.reaper import VARIABLE, Run, reap_the_dead
from tidegate.stack.components.airflow import PROJECT
from tidegate.stack.components.server_process import Identity, is_alive, wait_until


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


def test_an_interrupt_reaches_processes_of_a_background_run() -> None:
    """A script's background job ignores SIGINT, and so do its children; tests that interrupt a process would wait for ever."""
    child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    parent = f"import subprocess, sys, tests.conftest; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run([sys.executable, "-c", parent], cwd=PROJECT, capture_output=True, text=True, check=True)
    finally:
        signal.signal(signal.SIGINT, inherited)

    assert done.stdout.strip() == "False"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_tests_end_with_a_killed_make(tmp_path: Path) -> None:
    """They would go on unseen and keep the cores busy."""
    pid_file = tmp_path / "pid"
    waits = "import os, time, pathlib; from tests.reaper import die_with_make; die_with_make(); "
    waits += f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    (tmp_path / "Makefile").write_text(f'test:\n\t@exec {sys.executable} -c "{waits}"\n')
    make = subprocess.Popen(["make", "-f", tmp_path / "Makefile"], cwd=PROJECT)
    try:
        assert wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", 60)
        tests = psutil.Process(int(pid_file.read_text()))
    finally:
        make.kill()
        make.wait()

    assert wait_until(lambda: not is_alive(tests), 10)
