"""Servers end with the test run that started them, however that ends: by itself, by a signal, by a killed terminal.

Each process that runs tests has a reaper, a process of its own that waits for its end. What carries the run's mark in its
environment is ended then; Postgres' backends, which have no environment, are found by the folder they work in. Should the
reaper be killed as well, the next test run does its work.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tidegate.stack import component as components
from tidegate.stack.airflow import PROJECT
from tidegate.stack.component import Identity
from tidegate.stack.postgres import ROOTS_FOLDER

VARIABLE = "TESTS_OF_TIDEGATE"
PATIENCE_SECONDS = 15
SET_DEATH_SIGNAL = 1  # of prctl(2)


@dataclass(frozen=True)
class Run:
    """A process that runs tests, and the folder below which these write."""

    owner: Identity
    folder: Path

    @property
    def mark(self) -> str:
        """The run as everything that it starts carries it in its environment."""
        return f"{self.owner.pid} {self.owner.started} {self.folder}"

    @classmethod
    def of(cls, mark: str) -> "Run":
        """Return the run that a mark names."""
        pid, boot, ticks, folder = mark.split(" ", 3)
        return cls(Identity(int(pid), f"{boot} {ticks}"), Path(folder))

    def reap(self) -> None:
        """End what the run has started, and remove what root's clusters left outside the run's folder."""
        while marked := [process for process, mark in _marked() if mark == self.mark]:  # a supervisor may start more meanwhile
            components.end(marked, PATIENCE_SECONDS)
        components.end(list(self._backends()), seconds=2)
        for note in ROOTS_FOLDER.glob("*.stack"):
            if Path(note.read_text()).is_relative_to(self.folder):
                shutil.rmtree(note.with_suffix(""), ignore_errors=True)
                note.unlink(missing_ok=True)

    def _backends(self) -> Iterator[psutil.Process]:
        outside = {
            note.with_suffix("") for note in ROOTS_FOLDER.glob("*.stack") if Path(note.read_text()).is_relative_to(self.folder)
        }
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                cwd = Path(process.cwd())
                if Path(process.exe()).name == "postgres" and (cwd.is_relative_to(self.folder) or cwd in outside):
                    yield process


def _marked() -> Iterator[tuple[psutil.Process, str]]:
    """Return the processes that test runs have started; those of other users show no environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (mark := process.environ().get(VARIABLE)) and components.is_alive(process):
                yield process, mark


def reap_the_dead() -> None:
    """Do what reapers of test runs that are over would have done, had they not been killed."""
    for mark in {mark for _, mark in _marked()}:
        run = Run.of(mark)
        if run.owner.process() is None:
            run.reap()
    for note in ROOTS_FOLDER.glob("*.stack"):
        stack = Path(note.read_text())
        if any(part.startswith("pytest-of-") for part in stack.parts) and not stack.exists():
            shutil.rmtree(note.with_suffix(""), ignore_errors=True)
            note.unlink(missing_ok=True)


def die_with_make() -> None:
    """Let `make`, if it runs these tests, take them along when it is killed: they would go on for minutes, unseen."""
    parent = psutil.Process().parent()
    if sys.platform == "linux" and "MAKELEVEL" in os.environ and parent and parent.name() in {"make", "gmake"}:
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent.pid:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="session", autouse=True)
def reaper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """End what these tests start when they are over, and first what dead runs left."""
    reap_the_dead()
    run = Run(Identity.of(os.getpid()), tmp_path_factory.getbasetemp())
    # It must not carry the mark, nor get the terminal's signals, nor keep a pipe open that somebody reads to its end.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    command = [sys.executable, "-m", "tests.reaper", run.mark]
    waiting = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=PROJECT, **quiet)
    os.environ[VARIABLE] = run.mark
    yield
    del os.environ[VARIABLE]
    waiting.communicate()


def main(mark: str) -> None:
    """Wait for the end of a run, then clear up."""
    run = Run.of(mark)
    # The pipe closes with its last holder, and a process that the run has forked may be one: so the owner is looked for too.
    while not select.select([sys.stdin], [], [], 1)[0] and run.owner.process():
        pass
    run.reap()


if __name__ == "__main__":
    main(sys.argv[1])
