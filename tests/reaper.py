"""Ends the servers of a test run when the run ends: by itself, by a signal, or with a killed terminal.

Each run has a reaper, a process of its own that waits for the end of the process that started the run. The reaper then ends
every process with the run's mark in its environment; Postgres' backends, which have no environment, are found by their working
folder. If the reaper is killed as well, the next test run does its work.
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

from tidegate.stack.components import server_process as components
from tidegate.stack.components.airflow import PROJECT
from tidegate.stack.components.postgres import ROOTS_FOLDER
from tidegate.stack.components.server_process import Identity

VARIABLE = "TESTS_OF_TIDEGATE"
PATIENCE_SECONDS = 15
SET_DEATH_SIGNAL = 1  # of prctl(2)
_HELD = pytest.StashKey[contextlib.ExitStack]()


@dataclass(frozen=True)
class Run:
    """The process that started some tests, and the folder below which they write."""

    owner: Identity
    folder: Path

    @property
    def mark(self) -> str:
        """The run's mark in the environment of every process that it starts."""
        return f"{self.owner.pid} {self.owner.started} {self.folder}"

    @property
    def shared(self) -> Path:
        """The folder of what all processes of the run share; it goes with the run."""
        return self.folder / "shared"

    @classmethod
    def of(cls, mark: str) -> "Run":
        pid, boot, ticks, folder = mark.split(" ", 3)
        return cls(Identity(int(pid), f"{boot} {ticks}"), Path(folder))

    def reap(self) -> None:
        """End the run's processes, and remove root's clusters outside the run's folder."""
        while marked := [process for process, mark in _marked() if mark == self.mark]:  # a supervisor may start more meanwhile
            components.end(marked, PATIENCE_SECONDS)
        components.end(list(self._backends()), seconds=2)
        for note, stack in _notes():
            if stack.is_relative_to(self.folder):
                shutil.rmtree(note.with_suffix(""), ignore_errors=True)
                note.unlink(missing_ok=True)
        shutil.rmtree(self.shared, ignore_errors=True)

    def _backends(self) -> Iterator[psutil.Process]:
        outside = {note.with_suffix("") for note, stack in _notes() if stack.is_relative_to(self.folder)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                cwd = Path(process.cwd())
                if Path(process.exe()).name == "postgres" and (cwd.is_relative_to(self.folder) or cwd in outside):
                    yield process


def _notes() -> Iterator[tuple[Path, Path]]:
    """Yield the notes of root's clusters and the stack of each; other runs, which reap as well, may remove any meanwhile."""
    for note in ROOTS_FOLDER.glob("*.stack"):
        with contextlib.suppress(FileNotFoundError):
            yield note, Path(note.read_text())


def _marked() -> Iterator[tuple[psutil.Process, str]]:
    """Yield the processes of test runs with their marks; the environment of other users' processes is hidden."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (mark := process.environ().get(VARIABLE)) and components.is_alive(process):
                yield process, mark


def reap_the_dead() -> None:
    """Do the work of killed reapers for test runs that have ended."""
    for mark in {mark for _, mark in _marked()}:
        run = Run.of(mark)
        if run.owner.process() is None:
            run.reap()
    for note, stack in _notes():
        if any(part.startswith("pytest-of-") for part in stack.parts) and not stack.exists():
            shutil.rmtree(note.with_suffix(""), ignore_errors=True)
            note.unlink(missing_ok=True)


def die_with_parent() -> None:
    """Let the system end this process when the one that started it ends, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)


def die_with_make() -> None:
    """End these tests when the `make` that runs them is killed: they would go on unseen."""
    parent = psutil.Process().parent()
    if sys.platform == "linux" and "MAKELEVEL" in os.environ and parent and parent.name() in {"make", "gmake"}:
        die_with_parent()
        if os.getppid() != parent.pid:
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def reaped(folder: Path) -> Iterator[None]:
    """End the processes of dead test runs first, and at the end those that this process has started, below a folder."""
    reap_the_dead()
    run = Run(Identity.of(os.getpid()), folder)
    # It must not carry the mark, nor get the terminal's signals, nor keep a pipe open that is read to its end.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    waiting = subprocess.Popen([sys.executable, "-m", "tests.reaper", run.mark], stdin=subprocess.PIPE, cwd=PROJECT, **quiet)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, run.mark)  # over that of a run that this one is within
        try:
            yield
        finally:
            waiting.communicate()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Begin the run, in the process that starts the others."""
    if not hasattr(config, "workerinput"):
        folder: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        config.stash[_HELD] = contextlib.ExitStack()
        config.stash[_HELD].enter_context(reaped(folder))


def pytest_unconfigure(config: pytest.Config) -> None:
    if held := config.stash.get(_HELD, None):
        held.close()


def main(mark: str) -> None:
    run = Run.of(mark)
    # The pipe closes with its last holder, which may be a forked process of the run, so the owner is checked too.
    while not select.select([sys.stdin], [], [], 1)[0] and run.owner.process():
        pass
    run.reap()


if __name__ == "__main__":
    main(sys.argv[1])
