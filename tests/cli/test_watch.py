"""`status --watch`: lines and JSON when piped, a picture on a terminal, servers that go and come back, Ctrl-C."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psycopg2
import pytest
from psycopg2 import sql

from tests.cli.conftest import CommandLine
from tests.servers import Server
from tests.store import Attempt, Tracked, encode_metadata
from tidegate.jobs.pipelines import flights
from tidegate.state_store import StateStore

SPEC = flights.PIPELINE.spec
INTERRUPTED, READER_GONE = 130, 1
PATIENCE_SECONDS = 180


def plan(store: StateStore, number: int) -> None:
    """Open batches of flights with no files."""
    after = store.last_opened("flights")
    assert store.open_batches(SPEC, "run", [], after, [encode_metadata({"files": [], "n": n}) for n in range(number)])


def commit(store: StateStore, txid: int) -> None:
    """Commit one batch without rows."""
    attempt = store.start_attempt(SPEC, txid, "test")
    assert isinstance(attempt, Attempt)
    store.seal(attempt, [], Tracked(1000))
    store.commit_batch(SPEC, txid, "test")


class Lines:
    """The lines that a process prints, as they come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.text = descriptor, ""

    def until(self, fragment: str) -> str:
        """Read up to a fragment; return everything since the last call. Fail if it does not come in time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while fragment not in self.text:
            assert time.monotonic() < deadline, f"{fragment!r} did not come; there is {self.text!r}"
            if select.select([self._descriptor], [], [], 0.2)[0]:
                self.text += os.read(self._descriptor, 65536).decode(errors="replace")
        found, _, self.text = self.text.partition(fragment)
        return found + fragment


@contextmanager
def watching(tidegate: CommandLine, *arguments: str) -> Iterator[tuple[subprocess.Popen, Lines]]:
    """Start a watch whose output is piped; end it at the end."""
    process = tidegate.start("status", "--watch", "--interval", "0.2", *arguments)
    assert process.stdout
    try:
        yield process, Lines(process.stdout.fileno())
    finally:
        process.kill()
        process.communicate()


def interrupt(process: subprocess.Popen) -> tuple[int, str]:
    """Interrupt a process as Ctrl-C does; return its exit code and what it says."""
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, said


def test_a_piped_watch_prints_a_line_per_change(tidegate: CommandLine, store: StateStore) -> None:
    """And nothing while nothing changes, although the lag grows; Ctrl-C ends it without a traceback."""
    with watching(tidegate) as (process, lines):
        lines.until("flights: committed 0 of 0\n")
        plan(store, 2)
        lines.until("flights: committed 0 of 2; waits for txid 1: a run that processes it\n")
        commit(store, 1)
        lines.until("flights: committed 1 of 2; waits for txid 2: a run that processes it\n")
        store.pause("flights", "test", "lunch")
        assert lines.until("paused by test: lunch").count("flights: ") == 1
        assert interrupt(process) == (INTERRUPTED, "")


def test_a_watch_for_programs_prints_a_document_a_line(tidegate: CommandLine, store: StateStore) -> None:
    """Each as `status --json` has it; one whenever something has changed."""
    with watching(tidegate, "--json") as (process, lines):
        first = json.loads(lines.until("\n"))
        plan(store, 1)
        second = json.loads(lines.until("\n").splitlines()[0])
        assert interrupt(process)[0] == INTERRUPTED
    opened = [[row["opened"] for row in document["pipelines"] if row["pipeline"] == "flights"] for document in (first, second)]
    assert opened == [[0], [1]]
    assert (second["trouble"], second["page"]) == (None, None)


def test_a_watch_survives_a_database_that_goes_and_comes_back(tidegate: CommandLine, server: Server, store: StateStore) -> None:
    """It says why it knows nothing new, and goes on from what it knew."""
    database = tidegate.settings.pg_database
    away = f"{database}_away"
    with watching(tidegate) as (process, lines):
        lines.until("flights: committed 0 of 0\n")
        store.close()
        _rename(server, database, away)
        lines.until("does not exist")
        _rename(server, away, database)
        assert "flights" not in lines.until("The ledger answers again.\n")
        with StateStore.connect(tidegate.settings) as again:
            plan(again, 1)
        lines.until("flights: committed 0 of 1")
        assert interrupt(process) == (INTERRUPTED, "")


def _rename(server: Server, database: str, name: str) -> None:
    """Rename a database, as soon as its last connection has ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        server.execute(sql.SQL("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"), [database])
        try:
            server.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(*map(sql.Identifier, (database, name))))
        except psycopg2.errors.ObjectInUse:
            assert time.monotonic() < deadline
        else:
            return


def test_a_reader_that_leaves_ends_the_watch_quietly(tidegate: CommandLine, store: StateStore) -> None:
    """As `| head -1` does."""
    with watching(tidegate) as (process, lines):
        lines.until("flights: committed 0 of 0\n")
        assert process.stdout
        process.stdout.close()
        plan(store, 1)
        assert process.wait(PATIENCE_SECONDS) == READER_GONE
        assert process.stderr
        assert process.stderr.read() == ""
        process.stdout = None


@contextmanager
def terminal(
    tidegate: CommandLine, columns: int, *arguments: str, **environment: str
) -> Iterator[tuple[subprocess.Popen, Lines]]:
    """Start a verb on a terminal of this width."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = replace(tidegate, environment={**tidegate.environment, "TERM": "xterm-256color", **environment})
    started = command.command(arguments, {})
    pipes = {"stdin": follower, "stdout": follower, "stderr": follower}
    process = subprocess.Popen(**{**started, **pipes}, start_new_session=True)
    os.close(follower)
    try:
        yield process, Lines(leader)
    finally:
        process.kill()
        process.wait()
        os.close(leader)


ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("columns", "header"), [(79, "flights: committed")])
def test_a_terminal_is_redrawn_and_left_as_it_was(tidegate: CommandLine, store: StateStore, columns: int, header: str) -> None:
    """Whatever its width; what was seen last stays."""
    plan(store, 1)
    with terminal(tidegate, columns, "status", "--watch", "--interval", "0.2") as (process, lines):
        assert ALTERNATE in lines.until(header)
        lines.until(header)
        process.send_signal(signal.SIGINT)
        lines.until(BACK)
        lines.until(header)
        assert process.wait(PATIENCE_SECONDS) == INTERRUPTED
