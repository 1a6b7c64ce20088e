"""Another account of the same machine: processes with an unused user number, and without our rights."""

import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

UNUSED_NUMBERS = range(61_000, 62_000)
# It gives up its rights by itself, with its modules loaded, because it may not reach the Python of the testing account.
BECOME = """
import encodings.idna, encodings.latin_1, json, os, pathlib, socket, stat, struct, sys
from contextlib import suppress
os.umask(0o022); os.setgroups([]); os.setgid({0}); os.setuid({0})
"""


def account() -> int:
    """Return a user number without an account; skip the test where processes cannot be started under it."""
    if os.geteuid() != 0:
        pytest.skip("only root can start processes of another account: run the tests as root")
    return next(number for number in UNUSED_NUMBERS if number not in {user.pw_uid for user in pwd.getpwall()})


def command_as(user: int, program: str, *arguments: object, imports: str = "") -> list[str]:
    """Return the command that runs a Python program as another user; `imports` run before the change of user."""
    return [sys.executable, "-c", imports + BECOME.format(user) + program, *map(str, arguments)]


# A server that takes one connection after another and prints what `talk` received on it, until that is END.
SERVE = """
def heard(connection):
    received = b""
    with suppress(OSError):  # it says no more
        while received != b"END" and (part := connection.recv(65536)):
            received += part
    return received
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
print("listens", flush=True)
while True:
    connection, _ = server.accept()
    connection.settimeout(1)
    received = talk(connection)
    if received == b"END":
        sys.exit()
    print(received, flush=True)
    connection.close()
"""
# An Airflow that refuses everyone.
WEB_PAGE = (
    r"""
def talk(connection):
    received = heard(connection)
    if received != b"END":
        connection.sendall(b"HTTP/1.0 401 No\r\nContent-Length: 0\r\n\r\n")
    return received
"""
    + SERVE
)
# A Postgres that asks for the password in clear, which libpq sends by default.
ASKS_FOR_PASSWORD = (
    """
def talk(connection):
    packet = connection.recv(4096)
    while packet[4:] in (struct.pack("!i", 80877103), struct.pack("!i", 80877104)):  # TLS, GSS: no
        connection.sendall(b"N")
        packet = connection.recv(4096)
    if packet == b"END":
        return packet
    connection.sendall(b"R" + struct.pack("!ii", 8, 3))  # AuthenticationCleartextPassword
    return heard(connection)
"""
    + SERVE
)
# Takes one connection and gives its port away, but not the connection.
HOLDER = """
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
connection, _ = server.accept()
server.close()
print("holds", flush=True)
sys.stdin.read()
"""
OF_SPARK = "import grpc, threading, concurrent.futures.thread"
# A Spark server that prints the login of each call, until the call of /END.
SPARK = """
class Calls(grpc.GenericRpcHandler):
    def service(self, details):
        print(dict(details.invocation_metadata).get("authorization"), flush=True)
        if details.method == "/END":
            ended.set()
        return None
ended = threading.Event()
server = grpc.server(concurrent.futures.thread.ThreadPoolExecutor(2), [Calls()])
server.add_insecure_port(f"{sys.argv[1]}:{sys.argv[2]}")
server.start()
print("listens", flush=True)
ended.wait()
"""


@contextmanager
def impostor(user: int, program: str, address: str, port: int) -> Iterator[Callable[[], list[str]]]:
    """Run a server as another user; yield what ends it, and returns what each connection before has sent."""
    command = command_as(user, program, address, port, imports=OF_SPARK if program is SPARK else "")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:

        def received() -> list[str]:
            if program is SPARK:
                with grpc.insecure_channel(f"ipv4:{address}:{port}") as channel, suppress(grpc.RpcError):
                    channel.unary_unary("/END")(b"", timeout=10)
            else:
                with socket.create_connection((address, port), 10) as last:
                    last.sendall(b"END")
            return process.communicate(timeout=30)[0].splitlines()

        try:
            assert process.stdout.readline() == "listens\n", "the neighbour's server did not start"
            yield received
        finally:
            process.kill()


def with_hosts(tmp_path: Path, hosts: str, command: list[str]) -> list[str]:
    """Return a command that sees another /etc/hosts; skip the test where there are no mount namespaces."""
    (tmp_path / "hosts").write_text(hosts)
    bind = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'
    private = ["unshare", "--mount", "sh", "-ec", bind, "sh", str(tmp_path / "hosts")]
    try:
        subprocess.run([*private, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a process cannot be given an /etc/hosts of its own here: unshare --mount is refused")
    return [*private, *command]


# In the stack's folder, as if all folders above it could be entered: opens each requested path, and reads all processes, the
# folders that all accounts share, and the answers of the stack's ports. Prints what it could read.
SCAN = """
request = json.load(sys.stdin)
found = {"opened": [], "listed": [], "written": [], "texts": {}}
for path in request["paths"]:
    for key, attempt in (
        ("opened", lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))),
        ("written", lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))),
        ("listed", lambda: os.listdir(path)),
        ("written", lambda: os.mkdir(path + "/neighbour")),
    ):
        with suppress(OSError):
            attempt()
            found[key].append(path)
def note(place, content):
    found["texts"][place] = [name for name, secret in request["secrets"].items() if secret.encode() in content]
def read(path, size):
    with suppress(OSError), open(path, "rb") as file:
        note(path, file.read(size))
for number in filter(str.isdigit, os.listdir("/proc")):
    for name in ("cmdline", "environ", "stat", "maps", "io", "fd", "cwd", "root", "exe", "mem"):
        read(f"/proc/{number}/{name}", 1_000_000)
for shared in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/var/lib/tidegate"):
    for path in (os.path.join(folder, name) for folder, _, names in os.walk(shared) for name in names):
        with suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and status.st_mtime >= request["since"] and status.st_size < 2_000_000:
                read(path, -1)
for address, port in request["listeners"]:
    for question in (b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\0\\0\\0\\x08\\x04\\xd2\\x16\\x2f", b"stats\\n"):
        with suppress(OSError), socket.create_connection((address, port), 5) as connection:
            connection.settimeout(1)
            connection.sendall(question)
            note(f"{address}:{port} {question}", connection.recv(65536))
print(json.dumps(found))
"""
