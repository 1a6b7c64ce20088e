"""The network between the processes of a stack and its Postgres, which knows what each connection is doing.

A driver sets a trap for a phase of a batch's life: the next connection that gets there waits, at a statement, at its COMMIT
before the server has it, or between the COMMIT and its answer, until the driver has done what it wants to its two ends.
"""

import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Literal

PHASES = ("planning", "processing", "sealing", "commit", "after")
Moment = Literal["statement", "COMMIT", "answer"]
MOMENTS: tuple[Moment, ...] = ("statement", "COMMIT", "answer")
TASK, STAGER = "tidegate", "tidegate_stager"  # the roles of Airflow's tasks, and of Spark's
# A statement like this tells the phase. What follows a commit on its connection is after it.
MARKS = {
    "planning": re.compile(rb"tidegate\.plan\b|INSERT INTO tidegate\.(batch|run_batch) "),
    "processing": re.compile(rb'INSERT INTO tidegate\.attempt |UPDATE tidegate\.attempt SET seen_at|COPY "staging"'),
    "sealing": re.compile(rb"INSERT INTO tidegate\.seal |UPDATE tidegate\.attempt SET .*\bsealed_at=", re.DOTALL),
    "commit": re.compile(rb"FROM tidegate\.cursor\b.*FOR UPDATE|INSERT INTO tidegate\.commit ", re.DOTALL),
}
# The COMMIT of a transaction without one of these decides nothing.
DECIDES = re.compile(
    rb'INSERT INTO tidegate\.(run_batch|attempt|commit) |COPY "staging"|UPDATE tidegate\.attempt SET .*\bsealed_at=', re.DOTALL
)
PROTOCOL_3 = b"\0\3"
LONGEST_HOLD_SECONDS = 60.0


@dataclass
class Trap:
    """Catches the next connection of a role that gets to a moment of a phase, after `passed_over` others that did."""

    phase: str
    moment: Moment
    role: str = TASK
    passed_over: int = 0
    is_raced: bool = False  # caught as soon as the COMMIT is on its way, whether or not the server has answered
    link: "Link | None" = None
    caught: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def takes(self, link: "Link", statement: bytes) -> bool:
        is_commit = statement == b"COMMIT"
        at_moment = not is_commit if self.moment == "statement" else is_commit and (link.decides or self.phase == "after")
        if link.role != self.role or link.phase != self.phase or not at_moment:
            return False
        self.passed_over -= 1
        return self.passed_over < 0


class Wire:
    """Listens on a port of its own for connections to a server, whose address may change, and passes them on."""

    def __init__(self, server: Callable[[], tuple[str, int]], address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._server, self._address = server, address
        self._lock = threading.Lock()
        self._traps: Sequence[Trap] = ()
        self._sprung = threading.Event()
        self.links: set[Link] = set()
        self.open()
        self.port: int = self._listener.getsockname()[1]

    def open(self) -> None:
        self._listener = socket.create_server(self._address, backlog=100)
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it was closed
            while True:
                client = listener.accept()[0]
                try:
                    server = socket.create_connection(self._server(), timeout=5)
                    server.settimeout(None)
                    Link(self, client, server).start()
                except OSError:  # the client sees what it would see without the wire: nobody answers
                    client.close()

    def catch(self, traps: Sequence[Trap], seconds: float) -> Trap | None:
        """Wait for a connection in any of these traps; it waits too, until the trap is released. None if none came in time."""
        self._sprung.clear()
        with self._lock:
            self._traps = traps
        self._sprung.wait(seconds)
        with self._lock:
            self._traps = ()
        trap = next((trap for trap in traps if trap.link), None)
        if trap:
            trap.caught.wait(LONGEST_HOLD_SECONDS)  # its COMMIT may still wait for the answer
        return trap

    def trap_at(self, link: "Link", statement: bytes) -> Trap | None:
        """Return the trap that takes this connection now; no other takes one from then on."""
        with self._lock:
            trap = next((trap for trap in self._traps if trap.takes(link, statement)), None)
            if trap:
                self._traps, trap.link = (), link
                self._sprung.set()
            return trap

    def phases(self) -> set[str]:
        """Return the phases that tasks are in: they compute, or have an open transaction."""
        links = [link for link in self.links.copy() if link.role in (TASK, STAGER)]
        return {link.phase for link in links if link.phase and (link.is_open or link.phase == "processing")}

    def close(self) -> None:
        """Break all connections, and refuse new ones."""
        _shut(self._listener)
        self.cut()

    def cut(self) -> None:
        """Break all connections; new ones reach the server."""
        for link in self.links.copy():
            link.cut()


class Link:
    """One connection: bytes travel both ways, and its statements say in which phase it is."""

    def __init__(self, wire: Wire, client: socket.socket, server: socket.socket) -> None:
        self._wire, self._client, self._server = wire, client, server
        self._answered, self._passes = threading.Event(), threading.Event()
        self._passes.set()
        self.client_port: int = client.getpeername()[1]
        self.server_port: int = server.getsockname()[1]  # of this end
        self.role = ""
        self.phase: str | None = None
        self.is_open = self.decides = False

    def start(self) -> None:
        self._wire.links.add(self)
        for target in (self._upwards, self._downwards):
            threading.Thread(target=target, daemon=True).start()

    def _upwards(self) -> None:
        with suppress(OSError), self._client.makefile("rb") as stream:
            for kind, message in self._messages(stream):
                statement = message[5:].rstrip(b"\0") if kind == b"Q" else None
                if statement is not None:
                    self._note(statement)
                    if trap := self._wire.trap_at(self, statement):
                        self._meet(trap, message)
                        continue
                self._server.sendall(message)
        self.cut()

    def _messages(self, stream: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield each message whole, with its kind; those until the startup message have none."""
        while len(size := stream.read(4)) == 4:
            body = stream.read(int.from_bytes(size) - 4)
            if body.startswith(PROTOCOL_3):
                parameters = body[4:].split(b"\0")
                self.role = dict(zip(parameters[::2], parameters[1::2], strict=False)).get(b"user", b"").decode()
            yield b"", size + body
            if self.role:
                break
        while len(head := stream.read(5)) == 5:
            yield head[:1], head + stream.read(int.from_bytes(head[1:]) - 4)

    def _note(self, statement: bytes) -> None:
        if self.phase == "commit" and not self.is_open and self.decides:
            self.phase = "after"
        if not self.is_open:
            self.is_open, self.decides = statement.startswith(b"BEGIN"), False
        self.phase = next((phase for phase, mark in MARKS.items() if mark.search(statement)), self.phase)
        self.decides = self.decides or bool(DECIDES.search(statement))

    def _meet(self, trap: Trap, message: bytes) -> None:
        if trap.moment == "answer":
            self._passes.clear()
            self._answered.clear()
            self._server.sendall(message)
            if not trap.is_raced:
                self._answered.wait(LONGEST_HOLD_SECONDS)
        trap.caught.set()
        trap.released.wait(LONGEST_HOLD_SECONDS)
        self._passes.set()
        if trap.moment != "answer":
            self._server.sendall(message)

    def _downwards(self) -> None:
        with suppress(OSError):
            while content := self._server.recv(1 << 16):
                self._answered.set()
                self._passes.wait()
                # The byte after the last ReadyForQuery says whether a transaction is open.
                if content[-6:-1] == b"Z\0\0\0\5":
                    self.is_open = content[-1:] != b"I"
                self._client.sendall(content)
        self._answered.set()
        self.cut()

    def cut(self) -> None:
        """Break the connection: neither end gets what is on its way."""
        self._wire.links.discard(self)
        self._passes.set()
        _shut(self._client)
        _shut(self._server)


def _shut(end: socket.socket) -> None:
    """Close an end, also while another thread reads from it."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
