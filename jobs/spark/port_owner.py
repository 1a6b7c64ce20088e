"""The owner of a loopback port, which is checked before a token or a password is sent there.

Any account of a machine may listen on a port that is free at the moment, so an address proves nothing. The kernel knows the
owner of each socket. The check follows the connection: a process that answers then has a socket at that address, as listener
or as the connection's other end, and it cannot be hidden.
"""

import os
import pwd
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from tidegate.state_store.base.errors import ListenerNotTrusted, SettingsInvalid
from tidegate.state_store.base.project import account_name
from tidegate.state_store.base.settings import Settings

LISTENS, WAITS_FOR_ITS_END = 10, 6  # TCP_LISTEN and TCP_TIME_WAIT; the latter no longer has an owner
LISTENING, ALL = 1 << LISTENS, 0xFFF & ~(1 << WAITS_FOR_ITS_END)
TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, IS_ERROR, IS_DONE = 4, 20, 0x301, 2, 3


class Socket(NamedTuple):
    """A socket at a local port of this machine."""

    address: str
    state: int
    user: int
    number: int


def loopback_address(host: str | None) -> str | None:
    """Return the loopback address of a host, without asking a resolver; None if it is another machine.

    ``localhost`` is 127.0.0.1: a resolver may answer ::1 first, where any account may listen while a server has 127.0.0.1.
    """
    if host and host.rstrip(".").lower() == "localhost":
        return "127.0.0.1"
    with suppress(ValueError):
        address = ip_address(host or "")
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_unspecified:  # a connection to it reaches this machine
            return "127.0.0.1" if address.version == 4 else "::1"
        if address.is_loopback:
            return str(address)
    return None


class Server:
    """A server at a loopback address, and whether a token or a password may be sent to it."""

    def __init__(self, address: str, port: int, secret: str, trusted: Collection[int] | None) -> None:
        """Trust the account of this process, root, and the `trusted` ones; None trusts all."""
        self._address, self._port, self._secret, self._trusted = address, port, secret, trusted
        self._checked: list[Socket] | None = None

    def check(self) -> None:
        """Refuse the address if an untrusted account has a socket there.

        Only a process that has listened there can have a connection. So as long as the listener is the one of the last check,
        the connections are not checked again.

        Raises: ListenerNotTrusted, which names the account.
        """
        if self._trusted is None:
            return
        if not can_see_all():
            self._refuse(_owners_by_psutil(self._address, self._port))
            return
        listening = self._reached_by(_sockets(self._port, LISTENING))
        if listening and listening == self._checked:
            return
        sockets = self._reached_by(_sockets(self._port, ALL))
        self._refuse({sock.user for sock in sockets})
        self._checked = listening if [sock for sock in sockets if sock.state == LISTENS] == listening else None

    def _reached_by(self, sockets: list[Socket]) -> list[Socket]:
        """Return the sockets that connections to the address may lead to."""
        exact = [sock for sock in sockets if sock.address == self._address]
        if any(sock.state == LISTENS for sock in exact):
            return exact  # the listener gets the connections before one that listens at all addresses
        return exact + [sock for sock in sockets if ip_address(sock.address).is_unspecified and sock.state == LISTENS]

    def _refuse(self, owners: set[int]) -> None:
        if strangers := owners - {os.geteuid(), 0, *(self._trusted or ())}:
            names = sorted("*" if user == -1 else account_name(user) for user in strangers)
            raise ListenerNotTrusted(
                f"{self._address}:{self._port} is in the hands of user {' and '.join(names)}, so {self._secret} is not sent "
                f"there. End that process. If it is the server that you mean: export TIDEGATE_TRUSTED_USERS={','.join(names)}"
            )


def trusted_users(settings: Settings) -> set[int] | None:
    """Return the user numbers of the accounts that the settings trust; None for all.

    Raises: SettingsInvalid for an account that does not exist.
    """
    names = [name for name in map(str.strip, settings.trusted_users.split(",")) if name]
    if "*" in names:
        return None
    try:
        return {int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid for name in names}
    except KeyError as error:
        raise SettingsInvalid(f"trusted_users cannot be {settings.trusted_users!r}: {error.args[0]}.") from error


def can_see_all() -> bool:
    """Return whether this system shows the owner of every socket, at little cost."""
    return TABLES[socket.AF_INET].exists()


def _sockets(port: int, states: int) -> list[Socket]:
    """Return the sockets of this machine with this local port, in some states."""
    try:
        sockets = [sock for family in TABLES for sock in _sockets_by_netlink(family, port, states)]
    except OSError:  # a sandbox without sock_diag; the tables are much slower
        sockets = [sock for family in TABLES for sock in _sockets_by_table(family, port) if states & 1 << sock.state]
    return sorted(sockets)


def _sockets_by_netlink(family: socket.AddressFamily, port: int, states: int) -> Iterator[Socket]:
    """Ask the kernel as ss(8) does: sock_diag(7)."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, states) + struct.pack("!H", port) + bytes(46)
        kernel.sendall(struct.pack("=IHHII", 16 + len(request), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0) + request)
        while True:
            answer, start = kernel.recv(1 << 18), 0
            while start < len(answer):
                length, kind = struct.unpack_from("=IH", answer, start)
                if kind == IS_DONE:
                    return
                if kind == IS_ERROR:
                    raise OSError(-struct.unpack_from("=i", answer, start + 16)[0], "sock_diag")
                its_family, state = struct.unpack_from("=BB", answer, start + 16)
                (local,) = struct.unpack_from("!H", answer, start + 20)
                user, number = struct.unpack_from("=II", answer, start + 80)
                if local == port:
                    packed = answer[start + 24 : start + (28 if its_family == socket.AF_INET else 40)]
                    yield Socket(_text(packed), state, user, number)
                start += (length + 3) & ~3


def _sockets_by_table(family: socket.AddressFamily, port: int) -> Iterator[Socket]:
    """Read these sockets from the tables in /proc."""
    with suppress(FileNotFoundError):  # a machine without IPv6
        for line in TABLES[family].read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, user, _, number, *_ = line.split()
            host, _, text = local.partition(":")
            if int(text, 16) == port:
                words = struct.iter_unpack(">I", bytes.fromhex(host))
                packed = b"".join(struct.pack("=I", word) for (word,) in words)  # the table has words as numbers
                yield Socket(_text(packed), int(state, 16), int(user), int(number))


def _text(packed: bytes) -> str:
    address = ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)  # as Java listens


def _owners_by_psutil(address: str, port: int) -> set[int]:
    """Return the listeners' owners, where an account sees only its own sockets; -1 is a hidden owner."""
    import psutil  # noqa: PLC0415 - Linux does without

    def listening() -> Iterator[int]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    at = connection.laddr
                    if connection.status == psutil.CONN_LISTEN and at.port == port and at.ip in {address, "0.0.0.0", "::", "*"}:  # noqa: S104
                        yield process.uids().effective

    return set(listening()) or {-1}
