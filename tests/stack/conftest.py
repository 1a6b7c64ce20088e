"""Real embedded stacks, each in a folder of its own, and the operating system's view of their processes.

Tests that a stack with Airflow can bear are in `tests/end_to_end/test_one_airflow.py`, on its one stack; those that need
another one run in `make soak`: a stack costs 25 core seconds at each start, and Spark after each kill 10.
"""

import json
import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.conftest import check_schema, verb_of
from tests.conftest import COMMAND
from tests.examples import copy_examples
from tidegate import stack as embedded
from tidegate.stack.components.postgres import EmbeddedPostgres
from tidegate.stack.components.server_process import COMPONENT_VARIABLE, STACK_VARIABLE, is_alive, reserve_port, wait_until
from tidegate.stack.layout import USUAL_PORTS, Layout
from tidegate.state_store import Settings


@dataclass(frozen=True)
class Stack:
    home: Path

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "TIDEGATE_HOME": str(self.home)}

    @property
    def settings(self) -> Settings:
        return Settings.load(self.environ)

    @property
    def folder(self) -> Path:
        return self.settings.stack_folder

    def tidegate(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "timeout": 200}
        return subprocess.run([COMMAND, *arguments], env=self.environ | environ, check=False, **options)

    def json(self, *arguments: str) -> Any:
        """Run a verb with --json and return its output, which has to be as its schema says."""
        done = self.tidegate(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        check_schema(verb_of(arguments), found := json.loads(done.stdout))
        return found

    def statuses(self) -> dict[str, embedded.ComponentStatus]:
        return {status.name: status for status in embedded.status(self.settings)}

    def supervisor(self) -> psutil.Process:
        (process,) = [process for process in self.marked() if marker(process)[1] == "supervisor"]
        return process

    def marked(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if marker(process)[0] == str(self.folder)]

    def processes(self) -> list[psutil.Process]:
        """Return all processes: those with the marker, and those that share a session with them.

        Postgres and Airflow overwrite the environment of their children with titles, which hides the marker.
        """
        leaders = {session(process) for process in self.marked()} | {status.pid for status in self.statuses().values()}
        return [process for process in psutil.process_iter() if session(process) in leaders - {None} and is_alive(process)]

    def check_is_over(self, processes: list[psutil.Process]) -> None:
        """Check that none of these processes lives, nor another one, by marker or working folder."""
        assert [process for process in processes if is_alive(process)] == self.marked() == []
        folders, seen = (self.folder, Layout.load(self.home).postgres.data), psutil.process_iter(["cwd"])
        places = [Path(each.info["cwd"] or "/") for each in seen]  # of another account's, none
        assert [place for place in places if any(map(place.is_relative_to, folders))] == []

    def texts(self) -> dict[str, str]:
        """Return what others may come to see, by place: logs, notes, and the arguments and environments of processes."""
        files = [*self.folder.rglob("*.log*"), self.folder / "stack.json", self.folder / "run/stack.status"]
        texts = {str(file.relative_to(self.folder)): file.read_text(errors="replace") for file in files if file.is_file()}
        for process in self.processes():
            with suppress(psutil.Error):
                texts[f"process {process.pid}"] = "\0".join([*process.cmdline(), *process.environ().values()])
        return texts

    def check_secret(self, secrets: dict[str, str], texts: dict[str, str]) -> None:
        """Check that secrets are long, in private files, and in none of these texts."""
        folder = self.folder / "secrets"
        assert {file.name for file in folder.iterdir() if stat.S_IMODE(file.stat().st_mode) != 0o600} == set()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert min(len(secret) for secret in secrets.values()) >= 20
        assert [(name, place) for name, secret in secrets.items() for place, text in texts.items() if secret in text] == []

    def sessions_of(self, component: str) -> set[int | None]:
        return {session(process) for process in self.marked() if marker(process)[1] == component}


def marker(process: psutil.Process) -> tuple[str | None, str | None]:
    with suppress(psutil.Error):
        if is_alive(process):
            environ = process.environ()
            return environ.get(STACK_VARIABLE), environ.get(COMPONENT_VARIABLE)
    return None, None


def session(process: psutil.Process) -> int | None:
    with suppress(OSError):
        return os.getsid(process.pid)
    return None


@contextmanager
def new_stack_in(home: Path) -> Iterator[Stack]:
    """A stack of the examples that was never started; it is removed at the end, with a cluster that is elsewhere."""
    home.mkdir()
    copy_examples(home)
    stack = Stack(home)
    try:
        yield stack
    finally:
        embedded.down(stack.settings)
        EmbeddedPostgres(stack.folder, 0).delete()


@pytest.fixture(scope="module")
def new_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Stack]]:
    with ExitStack() as cleanup:
        yield lambda name: cleanup.enter_context(new_stack_in(tmp_path_factory.mktemp("home") / name))


@pytest.fixture(scope="module")
def bystander() -> Iterator[psutil.Process]:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def small(new_stack: Callable[[str], Stack], bystander: psutil.Process) -> Stack:
    """A stack without Airflow, started by two operators at once, with stale files of a machine that was switched off."""
    stack = new_stack("small")
    run = stack.folder / "run"
    run.mkdir(parents=True)
    for name in ("supervisor", "postgres", "spark"):
        (run / f"{name}.json").write_text(json.dumps({"pid": bystander.pid, "started": "another boot 4711"}))
    (run / "airflow-scheduler.json").write_text('{"pid": 12')  # the disk was full
    both = [subprocess.Popen([COMMAND, "up", "--without-airflow"], env=stack.environ) for _ in range(2)]
    assert [up.wait(200) for up in both] == [0, 0]
    return stack


@pytest.fixture
def running(small: Stack) -> Stack:
    """The stack without Airflow, restored if the previous test has changed it."""
    embedded.up(small.settings, without_airflow=True)
    return small


@pytest.fixture(scope="module")
def occupied() -> Iterator[set[int]]:
    """The usual ports that this fixture listens on; another test may have reserved the others, and free them at any time."""
    with ExitStack() as listeners:
        taken: set[int] = set()

        def some_are_taken() -> bool:
            for port in USUAL_PORTS.values():
                with ExitStack() as claim:
                    if reserve_port(port, claim) == port:
                        listeners.enter_context(socket.create_server(("127.0.0.1", port)))
                        taken.add(port)
            return bool(taken)

        # Where a developer's own stack holds them all, they are taken, too.
        yield taken if wait_until(some_are_taken, 30) else set(USUAL_PORTS.values())
