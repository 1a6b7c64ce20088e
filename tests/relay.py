"""A port of this process that leads to a server's: closed, it takes the server away from those alone who come by it."""

import contextlib
import socket
import threading


class Relay:
    """A port on loopback that leads to another one while it is open."""

    def __init__(self, target: int, address: str = "127.0.0.1", port: int = 0) -> None:
        self._target, self._address = target, address
        self._ends: set[socket.socket] = set()
        self._listener = socket.create_server((address, port))
        self.port: int = self._listener.getsockname()[1]
        self._listen()

    @property
    def is_in_use(self) -> bool:
        """Whether there is a connection through it."""
        return bool(self._ends)

    def close(self) -> None:
        """Break all connections, and refuse new ones."""
        _end(self._listener)
        self.cut()
        self._listener.close()

    def cut(self) -> None:
        """Break all connections; new ones reach the server."""
        for end in [*self._ends]:
            _end(end)

    def open(self) -> None:
        self._listener = socket.create_server((self._address, self.port))
        self._listen()

    def _listen(self) -> None:
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._ends |= {client, server}
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=[source, target], daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # one of both has gone
            while data := source.recv(65536):
                target.sendall(data)
        _end(target)
        self._ends.discard(source)
        source.close()


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        end.shutdown(socket.SHUT_RDWR)
