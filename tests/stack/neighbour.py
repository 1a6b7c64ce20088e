"""Another account of the same machine: processes with an unused user number, and without our rights."""

import os
import pwd
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

UNUSED_NUMBERS = range(61_000, 62_000)
# It gives up its rights by itself, with its modules loaded, because it may not reach the Python of the testing account.
BECOME = """
import encodings.idna, encodings.latin_1, fcntl, http.server, json, os, pathlib, socket, stat, struct, subprocess, sys
os.umask(0o022); os.setgroups([]); os.setgid({0}); os.setuid({0})
"""


def account() -> int:
    """Return a user number without an account; skip the test where processes cannot be started under it."""
    if os.geteuid() != 0:
        pytest.skip("only root can start processes of another account: run the tests as root")
    known = {user.pw_uid for user in pwd.getpwall()}
    return next(number for number in UNUSED_NUMBERS if number not in known)


def command_as(user: int, program: str, *arguments: object, imports: str = "") -> list[str]:
    """Return the command that runs a Python program as another user; `imports` run before the change of user."""
    return [sys.executable, "-c", imports + BECOME.format(user) + program, *map(str, arguments)]


@dataclass(frozen=True)
class Server:
    """A program that keeps a port, given as address and number, and prints what it receives; `end` ends it."""

    program: str
    end: bytes = b"END"
    imports: str = ""


# Keeps a port and prints what it receives, one line per connection.
LISTENER = Server("""
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
print("listens", flush=True)
while True:
    connection, _ = server.accept()
    connection.settimeout(2)
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
            if received == b"END":
                sys.exit()
    except TimeoutError:
        pass
    print(received, flush=True)
""")
# Takes one connection and gives its port away, but not the connection.
HOLDER = """
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
connection, _ = server.accept()
server.close()
print("holds", flush=True)
sys.stdin.read()
"""
# A Spark server that prints the login of each call.
SPARK = Server(
    """
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
""",
    end=b"",  # by a call of /END
    imports="import grpc, threading, concurrent.futures.thread",
)
# A Postgres that asks for the password in clear, which libpq sends by default.
ASKS_FOR_PASSWORD = Server(
    """
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
while True:
    connection, _ = server.accept()
    if not (length := connection.recv(4)):
        continue
    packet = connection.recv(struct.unpack("!i", length)[0] - 4)
    if packet == b"END":
        sys.exit()
    if struct.unpack("!i", packet[:4])[0] in (80877103, 80877104):  # TLS, GSS: no
        connection.sendall(b"N")
        length = struct.unpack("!i", connection.recv(4))[0]
        packet = connection.recv(length - 4)
    connection.sendall(b"R" + struct.pack("!ii", 8, 3))  # AuthenticationCleartextPassword
    print(connection.recv(4096), flush=True)
    connection.close()
""",
    struct.pack("!i", 7) + b"END",
)
# An Airflow that prints what it receives.
WEB_PAGE = Server(
    """
class Page(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        if self.path == "/END":
            os._exit(0)
        print(self.rfile.read(int(self.headers["content-length"])), dict(self.headers), flush=True)
        self.send_response(401)
        self.end_headers()
    def do_GET(self):
        print(dict(self.headers), flush=True)
        self.send_response(401)
        self.end_headers()
    def log_message(self, *arguments):
        pass
server = http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Page)
print("listens", flush=True)
server.serve_forever()
""",
    b"POST /END HTTP/1.0\r\n\r\n",
)


@contextmanager
def impostor(user: int, server: Server, address: str, port: int) -> Iterator[Callable[[], list[str]]]:
    """Run a server as another user; yield what ends it, and returns what each connection before has sent."""
    command = command_as(user, server.program, address, port, imports=server.imports)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:

        def received() -> list[str]:
            if server.end:
                with socket.create_connection((address, port), 10) as last:
                    last.sendall(server.end)
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
    for flags, key in ((os.O_RDONLY, "opened"), (os.O_WRONLY, "written")):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK))
            found[key].append(path)
        except OSError:
            pass
    try:
        os.listdir(path)
        found["listed"].append(path)
    except OSError:
        pass
    try:
        os.mkdir(path + "/neighbour")
        found["written"].append(path)
    except OSError:
        pass
def note(place, content):
    found["texts"][place] = [name for name, secret in request["secrets"].items() if secret.encode() in content]
for number in filter(str.isdigit, os.listdir("/proc")):
    for name in ("cmdline", "environ", "stat", "maps", "io", "fd", "cwd", "root", "exe", "mem"):
        try:
            with open(f"/proc/{number}/{name}", "rb") as file:
                note(f"/proc/{number}/{name}", file.read(1_000_000))
        except OSError:
            pass
for shared in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/var/lib/tidegate"):
    for folder, _, names in os.walk(shared):
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and status.st_mtime >= request["since"] and status.st_size < 2_000_000:
                    with open(path, "rb") as file:
                        note(path, file.read())
            except OSError:
                pass
for address, port in request["listeners"]:
    for question in (b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\0\\0\\0\\x08\\x04\\xd2\\x16\\x2f", b"stats\\n"):
        try:
            with socket.create_connection((address, port), 5) as connection:
                connection.settimeout(1)
                connection.sendall(question)
                note(f"{address}:{port} {question}", connection.recv(65536))
        except OSError:
            pass
print(json.dumps(found))
"""
