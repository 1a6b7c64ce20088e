"""Another account of the same machine gets nothing: no token, no password, no file, no way to stop the stack's user."""

import asyncio
import os
import pwd
import re
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import psutil
import psycopg2
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from tests.conftest import COMMAND
from tests.examples import copy_examples
from tests.stack import neighbour as account
from tidegate import stack as embedded
from tidegate.airflow_client import AirflowClient
from tidegate.jobs.compute.sessions.session import _Channel, spark_session
from tidegate.jobs.spark import port_owner
from tidegate.stack.components.airflow import EmbeddedAirflow
from tidegate.stack.components.airflow_login import ADDRESS_VARIABLE, CONNECT_ARGS, POSTGRES_USER_VARIABLE
from tidegate.stack.components.postgres import EmbeddedPostgres
from tidegate.stack.components.server_process import Identity, RunFolder, is_alive, reserve_port, wait_until
from tidegate.stack.layout import Layout
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import ListenerNotTrusted, PermanentError

BODY = b"a stranger's"
JOINS_SPARK = """
import sys
from dataclasses import replace
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.state_store import Settings
settings = replace(Settings.load(), spark_remote=sys.argv[1])
with spark_session(settings, "neighbours") as session:
    print(session.range(3).count())
"""


@pytest.fixture(scope="module")
def neighbour() -> int:
    return account.account()


def run(command: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, **options)


def call_spark(settings: Settings) -> str:
    """Make a call as a session does after all checks of the port; return its failure."""
    with _Channel(settings, str(uuid.uuid4())).toChannel() as channel, pytest.raises(grpc.RpcError) as failure:
        channel.unary_unary("/anything")(b"", timeout=10)
    return str(failure.value)


@pytest.mark.promise("security:another-account-that-takes-port-while-its", "decision:0019")
def test_a_listener_on_the_other_loopback_address_sees_nothing(stack: Settings, neighbour: int, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1: no process can listen there")
    port = int(stack.spark_remote.rpartition(":")[2])
    joins = [sys.executable, "-c", JOINS_SPARK, f"sc://localhost:{port}"]
    command = account.with_hosts(tmp_path, "::1 localhost\n127.0.0.1 localhost\n", joins)
    environ = {"TIDEGATE_HOME": str(stack.home), "PATH": "/usr/bin:/bin"}

    with account.impostor(neighbour, account.WEB_PAGE, "::1", port) as received:
        done = run(command, env=environ)
        assert received() == []
    assert done.stdout == "3\n", done.stderr[-3000:]


@pytest.mark.promise("error:LISTENER_NOT_TRUSTED", "security:another-account-that-takes-port-while-its", "decision:0019")
def test_a_neighbour_on_sparks_port_gets_no_token(stack: Settings, neighbour: int, free_port: Callable[[], int]) -> None:
    port = free_port()
    settings = replace(stack, spark_remote=f"sc://localhost:{port}")

    with account.impostor(neighbour, account.SPARK, "127.0.0.1", port) as received:
        with (
            pytest.raises(ListenerNotTrusted, match=f"127.0.0.1:{port} is in the hands of user {neighbour}"),
            spark_session(settings, "neighbours"),
        ):
            pass
        failures = [call_spark(settings), call_spark(replace(settings, trusted_users=str(neighbour)))]
        logins = received()

    token = stack.spark_token_file.read_text()
    assert "is in the hands of" in failures[0]
    assert logins == [f"Bearer {token}", "None"]  # to a trusted account, and none from the call that ends it


def is_trusted(server: port_owner.Server) -> bool:
    with suppress(ListenerNotTrusted):
        server.check()
        return True
    return False


@pytest.mark.promise("security:another-account-that-takes-port-while-its")
@pytest.mark.parametrize("way", ["by netlink", "by table"])
def test_a_connection_to_a_neighbour_is_refused_though_the_port_is_ours_again(
    way: str, neighbour: int, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "by table":  # where a sandbox forbids the query
        monkeypatch.setattr(port_owner, "_sockets_by_netlink", Mock(side_effect=PermissionError))
    port = free_port()
    server = port_owner.Server("127.0.0.1", port, "the token", [])
    command = account.command_as(neighbour, account.HOLDER, "127.0.0.1", port)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "listens\n"
        with pytest.raises(ListenerNotTrusted, match=f"user {neighbour}"):
            server.check()
        with socket.create_connection(("127.0.0.1", port)) as ours:
            assert holder.stdout.readline() == "holds\n"
            with socket.create_server(("127.0.0.1", port)):
                with pytest.raises(ListenerNotTrusted, match=f"user {neighbour}"):
                    server.check()
                holder.stdin.close()
                assert ours.recv(1) == b""
                holder.wait()
                assert wait_until(lambda: is_trusted(server), 70)  # the kernel closes its end within 60 s
                program = f"tidegate.jobs.spark.port_owner.Server('127.0.0.1', {port}, 'the token', []).check()"
                checked = run(account.command_as(neighbour, program, imports="import tidegate.jobs.spark.port_owner\n"))
                assert checked.stderr == ""  # all accounts trust root's, and the check needs no right


@pytest.mark.promise("security:another-account-of-same-machine-at-ports")
def test_sparks_own_ports_refuse_clients_without_the_secret(stack: Settings) -> None:
    (status,) = [status for status in embedded.status(stack) if status.name == "spark"]
    listening = {c.laddr.port for c in psutil.Process(status.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    others = listening - {int(stack.spark_remote.rpartition(":")[2])}
    assert len(others) >= 2, "Spark's driver and its block manager listen"
    for port in others:
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            # A request of Spark's protocol: its length, the byte 3, its number, the length of its body.
            connection.sendall(struct.pack("!qbqi", 21 + len(BODY), 3, 1, len(BODY)) + BODY)
            assert b"Expected SaslMessage" in connection.recv(65536)


@pytest.mark.promise("security:another-account-that-takes-port-while-its")
def test_an_impostor_of_postgres_does_not_get_the_password(
    stack: Settings, neighbour: int, free_port: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, layout = free_port(), Layout.load(stack.home)
    copy_examples(tmp_path)
    environ = {**os.environ, "TIDEGATE_HOME": str(tmp_path), "PGPORT": str(port), "PGPASSFILE": str(stack.pg_passfile)}
    postgres = EmbeddedPostgres(layout.folder, port)
    airflow = EmbeddedAirflow(layout.folder, {**layout.ports, "postgres": port}, postgres).environment()
    monkeypatch.setenv(ADDRESS_VARIABLE, airflow[ADDRESS_VARIABLE])
    monkeypatch.delenv(POSTGRES_USER_VARIABLE, raising=False)

    with account.impostor(neighbour, account.ASKS_FOR_PASSWORD, "127.0.0.1", port) as received:
        done = run([COMMAND, "get", "flights", "daily", "UA", "2013-01-01"], env=environ)
        assert done.returncode == 1
        assert re.search("does not prove that it is the right one.*PGREQUIREAUTH", done.stderr, re.DOTALL)
        # Those of its superusers are sent to no stranger either.
        assert postgres.component().check() == f"it does not listen on 127.0.0.1:{port}"
        with pytest.raises(psycopg2.OperationalError, match="server requested a cleartext password"):
            postgres.bootstrap()
        with pytest.raises(sa.exc.OperationalError, match="server requested a cleartext password"):
            sa.create_engine(airflow["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]).connect()
        engine = create_async_engine(airflow[ADDRESS_VARIABLE], connect_args=CONNECT_ARGS)  # as Airflow does
        with pytest.raises(ListenerNotTrusted, match=f"in the hands of user {neighbour}"):
            asyncio.run(engine.connect().start())
        monkeypatch.setenv(POSTGRES_USER_VARIABLE, str(neighbour))
        with pytest.raises(Exception, match="connection"):
            asyncio.run(engine.connect().start())
        *unanswered, last = received()

    assert set(unanswered) == {"b''"}
    passwords = dict(line.split(":")[3:] for line in postgres.passfile.read_text().splitlines())
    assert passwords["airflow"] in last  # a trusted server gets it


@pytest.mark.promise("security:another-account-that-takes-port-while-its")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_impostor_of_airflow_does_not_get_the_password(
    host: str, neighbour: int, free_port: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    (tmp_path / "password").write_text("correct horse")
    settings = Settings(airflow_url=f"http://{host}:{port}", airflow_password_file=tmp_path / "password")
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")

    with account.impostor(neighbour, account.WEB_PAGE, "127.0.0.1", port) as received:
        with pytest.raises(ListenerNotTrusted, match=f"user {neighbour}, so Airflow's password is not sent there"):
            AirflowClient(settings)
        with pytest.raises(PermanentError, match="refuses the user or password"):
            AirflowClient(replace(settings, trusted_users=str(neighbour)))
        to_stranger, to_trusted = received()

    assert to_stranger == "b''"
    assert "correct horse" in to_trusted


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder for temporary files like /tmp: all may write, but remove only their own files."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


LAYS_OUT = """
folder = pathlib.Path(sys.argv[1], f"tidegate-ports-{sys.argv[2]}")
folder.mkdir()
folder.joinpath(sys.argv[3]).symlink_to(sys.argv[4])
folder.chmod(0o777)
"""


@pytest.mark.promise("security:another-account-in-file-system")
def test_a_claim_to_a_port_follows_no_link_and_empties_no_file(
    shared: Path, neighbour: int, free_port: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious, port = tmp_path / "precious.txt", free_port() + 1_000
    precious.write_text("her text")
    run(account.command_as(neighbour, LAYS_OUT, shared, os.geteuid(), port, precious)).check_returncode()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))  # else claims are below this account's home
    with ExitStack() as until, pytest.raises(PermanentError, match="belongs to user"):
        reserve_port(port, until)
    assert precious.read_text() == "her text"


@pytest.mark.promise("security:another-account-in-file-system")
@pytest.mark.parametrize("verb", [["up", "--without-airflow"], ["down"]], ids=["up", "down"])
def test_a_neighbours_stack_is_left_alone(verb: list[str], neighbour: int, shared: Path, bystander: psutil.Process) -> None:
    folder = shared / ".tidegate" / "run"
    folder.mkdir(parents=True)
    RunFolder(folder.parent).write("supervisor", Identity.of(bystander.pid))
    for path in (folder.parent, folder, *folder.iterdir()):
        os.chown(path, neighbour, neighbour)

    done = run([COMMAND, *verb], cwd=shared, env={name: os.environ[name] for name in os.environ if name != "TIDEGATE_HOME"})

    assert is_alive(bystander)
    assert (done.returncode, f"belongs to user {neighbour}" in done.stderr) == (1, True), done.stderr
    assert "Traceback" not in done.stderr
