"""Processes that a test run starts end with it, and an interrupt reaches its target."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.reaper import VARIABLE, Run, reap_the_dead
from tidegate.stack.components.airflow import PROJECT
from tidegate.stack.components.server_process import Identity, is_alive, wait_until

KILLED_RUN = """
import os, signal, subprocess, sys
import psycopg2
from tidegate.stack.components import server_process as components
from tidegate.stack.components.postgres import EmbeddedPostgres

def test_that_is_killed(tmp_path):
    postgres = EmbeddedPostgres(tmp_path / ".tidegate", {port})
    postgres.initialize()
    started = postgres.component()
    server = components.start(started, tmp_path / ".tidegate")
    assert components.wait_until(lambda: started.check() is None, 60), started.check()
    computing = "import psycopg2, sys; c = psycopg2.connect(sys.argv[1]).cursor(); "
    computing += "c.execute('SELECT sum(a) FROM generate_series(1, 100000) a, generate_series(1, 10000000) b')"
    dsn = f"host=127.0.0.1 port={{postgres.port}} user=postgres dbname=postgres passfile={{postgres.passfile}}"
    subprocess.Popen([sys.executable, "-c", computing, dsn], start_new_session=True, env={{}})
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    cursor = connection.cursor()
    def computes():
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT sum(a)%' AND state = 'active'")
        return cursor.fetchone()[0] == 1
    assert components.wait_until(computes, 30)
    server.kill()  # its backends have no environment, and this one does not notice
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("DATA", postgres.data, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_servers_end_with_a_killed_test_run(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """After kill -9 of pytest no process of its tests lives, not even an orphan of a killed Postgres."""
    (tmp_path / "test_killed.py").write_text(KILLED_RUN.format(port=free_port()))
    base = tmp_path / "base"
    plugins = ["-p", "no:cacheprovider", "-p", "tests.reaper"]
    command = [sys.executable, "-m", "pytest", "-q", "-s", *plugins, "--rootdir", tmp_path, "--basetemp", base]
    environment = {name: value for name, value in os.environ.items() if name not in {VARIABLE, "PYTEST_ADDOPTS"}}

    done = subprocess.run(
        [*map(str, command), str(tmp_path)],
        cwd=PROJECT,
        env={**environment, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert done.returncode == -signal.SIGKILL, done.stdout
    data = Path(done.stdout.partition("DATA ")[2].strip())

    def remaining() -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if _is_of(p, base, data)]

    assert wait_until(lambda: not remaining(), 60), remaining()
    assert data.is_relative_to(base) or wait_until(lambda: not data.exists(), 10)


def _is_of(process: psutil.Process, base: Path, data: Path) -> bool:
    try:
        cwd = Path(process.cwd())
        return str(base) in process.environ().get(VARIABLE, "") or cwd == data or cwd.is_relative_to(base)
    except (psutil.Error, OSError):
        return False


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
