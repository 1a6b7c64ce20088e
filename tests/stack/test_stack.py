"""`tidegate up`, `down` and `status` on a real stack without Airflow: it recovers from every kill, and ends without a trace.

`running` is restored before each test. What a stack with Airflow can bear is in `tests/end_to_end/test_one_airflow.py`.
"""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import psycopg2
import pytest

from tests.cli.conftest import check_schema
from tests.stack.conftest import Stack
from tests.statements import execute
from tests.store import project
from tidegate.commands.setup.pipeline_verbs import settings
from tidegate.stack.components import postgres
from tidegate.stack.components.airflow import PROJECT
from tidegate.stack.components.postgres import EmbeddedPostgres
from tidegate.stack.components.server_process import Component, is_alive, wait_until
from tidegate.stack.layout import Layout
from tidegate.stack.supervisor import HUNG_AFTER_SECONDS, Supervised


def can_query(stack: Stack) -> bool:
    return execute(stack.settings.conninfo(), "SELECT count(*) > 0 FROM tidegate.pipeline") == [(True,)]


# -- starting ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("verb:up")
def test_two_operators_start_one_stack(small: Stack, bystander: psutil.Process) -> None:
    """Two simultaneous `up` both succeed, and there is one supervisor with one process per component.

    Neither trusts a pid file whose number another process has by now, or that is truncated.
    """
    assert {status.state for status in small.statuses().values()} == {"up"}
    assert [len(small.sessions_of(name)) for name in ("supervisor", "postgres", "spark")] == [1, 1, 1]
    assert can_query(small)
    assert is_alive(bystander)
    assert bystander.pid not in {status.pid for status in small.statuses().values()}


NO_JAVA = {"nothing": None, "too old": 'openjdk version "11.0.2"', "too new": 'openjdk version "25" 2025-09-16'}


@pytest.mark.promise("error:PERMANENT_ERROR")
@pytest.mark.parametrize("version", NO_JAVA.values(), ids=NO_JAVA.keys())
def test_a_missing_java_is_reported_first(version: str | None, new_stack: Callable[[str], Stack]) -> None:
    """Without a suitable Java, the first line says so and what to install; nothing is started or written."""
    stack = new_stack("without-java")
    programs = stack.home / "programs"
    programs.mkdir()
    if version:
        (programs / "java").write_text(f"#!/bin/sh\necho '{version}' >&2\n")
        (programs / "java").chmod(0o755)

    done = stack.tidegate("up", PATH=str(programs), JAVA_HOME="")

    first, more, *others = done.stderr.splitlines()
    assert more == "More: tidegate error PERMANENT_ERROR"
    assert first.startswith("tidegate: Java is missing" if version is None else f"tidegate: {programs}/java is Java")
    assert "Install Java 17" in first
    assert (done.returncode, done.stdout, others) == (1, "", [])
    assert not stack.folder.exists()


@pytest.mark.soak
@pytest.mark.promise("error:STACK_UNAVAILABLE")
def test_a_component_that_cannot_start_is_named_with_its_log(new_stack: Callable[[str], Stack]) -> None:
    """When Postgres cannot start, one line says so, names its log and quotes the reason; `down` still leaves nothing."""
    stack = new_stack("broken")
    with ExitStack() as ports:
        postgres = Layout.choose(stack.home, ports).postgres
    postgres.initialize()
    (postgres.data / "postgresql.conf").write_text("this is = no 'configuration\n")

    done = stack.tidegate("up", "--without-airflow")

    log = stack.folder / "logs" / "postgres.log"
    messages = [line for line in done.stderr.splitlines() if line.startswith("tidegate:")]
    assert done.returncode in {1, 75}
    assert len(messages) == 1
    assert "postgres did not come up" in messages[0]
    assert str(log) in messages[0]
    assert "postgresql.conf" in messages[0]
    assert "Traceback" not in done.stderr
    assert_ends(stack)


def test_airflow_has_its_operators_environment_but_for_what_the_stack_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The project's modules come first on the path, and addresses, folders and keys are the stack's; settings are shown.

    A project that no person has named is not trusted more in its stack than at the command line.
    """
    with ExitStack() as ports:
        airflow = Layout.choose(tmp_path, ports).airflow
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv(project.HOME_VARIABLE, raising=False)
    alone = airflow.environment()
    ours = alone["PYTHONPATH"].split(os.pathsep)
    monkeypatch.setenv(project.HOME_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/srv/authors", "/srv/others"]))
    monkeypatch.setenv("AIRFLOW__CORE__PARALLELISM", "3")
    monkeypatch.setenv("AIRFLOW__API__HOST", "0.0.0.0")

    found = airflow.environment()

    assert (alone[project.FOUND_VARIABLE], project.FOUND_VARIABLE in found) == ("1", False)
    assert ours[0] == str(PROJECT)
    assert found["PYTHONPATH"].split(os.pathsep) == [*ours, "/srv/authors", "/srv/others"]
    assert (found["AIRFLOW__CORE__PARALLELISM"], found["AIRFLOW__API__HOST"]) == ("3", "127.0.0.1")
    settings.callback(as_json=True)
    shown = {row["setting"]: row for row in json.loads(capsys.readouterr().out)}
    assert (shown["AIRFLOW__CORE__PARALLELISM"]["value"], shown["AIRFLOW__CORE__PARALLELISM"]["from"]) == ("3", "environment")
    assert "AIRFLOW__API__HOST" not in shown


# -- staying up --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("json:up")
def test_up_starts_what_has_given_up(running: Stack) -> None:
    """And all other components again."""

    def has_given_up() -> bool:
        spark = running.statuses()["spark"]
        if spark.state != "gave up" and spark.pid is not None:
            with suppress(psutil.Error):
                psutil.Process(spark.pid).kill()
        return spark.state == "gave up"

    assert wait_until(has_given_up, 60)
    done = running.tidegate("up", "--without-airflow", "--json")

    assert done.returncode == 0, done.stderr
    check_schema("up", json.loads(done.stdout))
    assert {status.state for status in running.statuses().values()} == {"up"}


def test_a_component_that_lives_without_a_heartbeat_is_started_again(tmp_path: Path) -> None:
    """Silence counts from the first look at it; a heartbeat in between, or a start, ends it."""
    supervised = Supervised(Component("airflow-scheduler", ["sleep", "60"], lambda: None), tmp_path)
    supervised.keep_alive()
    first, now = supervised.process, time.monotonic()
    assert first is not None
    try:
        for is_silent, after in ((True, 1), (False, 100), (True, 101), (True, 101 + HUNG_AFTER_SECONDS)):
            supervised.note_silence(is_silent, now + after)
        assert first.poll() is None, "it has not been silent for longer than that"
        supervised.note_silence(True, now + 102 + HUNG_AFTER_SECONDS)
        assert first.wait(10) == -signal.SIGKILL
        assert wait_until(lambda: supervised.keep_alive() is None and supervised.process is not None, 10)
        supervised.note_silence(True, now + 103 + HUNG_AFTER_SECONDS)
        assert supervised.process is not None
        with pytest.raises(subprocess.TimeoutExpired):  # the silence was that of its predecessor
            supervised.process.wait(1)
        assert supervised.restarts == 1
    finally:
        supervised.ask_to_stop()
        supervised.stop()


@pytest.fixture
def computing(running: Stack) -> Iterator[psutil.Process]:
    """A busy backend of the stack's Postgres, which does not notice the death of its server."""
    settings = running.settings
    query = "SELECT sum(a) FROM generate_series(1, 100000) a, generate_series(1, 10000000) b"
    program = f"import psycopg2; psycopg2.connect(**{settings.conninfo()!r}).cursor().execute({query!r})"
    client = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL, start_new_session=True)
    with closing(psycopg2.connect(**settings.conninfo())) as connection, connection.cursor() as cursor:

        def backend() -> int | None:
            cursor.execute("SELECT pid FROM pg_stat_activity WHERE query = %s AND state = 'active'", [query])
            connection.rollback()
            return next((pid for (pid,) in cursor.fetchall()), None)

        assert wait_until(lambda: backend() is not None, 30)
        pid = backend()
    yield psutil.Process(pid)
    client.kill()
    client.wait()


@pytest.mark.parametrize("name", ["postgres", "spark"])
def test_a_killed_component_comes_back(name: str, running: Stack, computing: psutil.Process) -> None:
    """At the same address, and counted; a backend that computes, which keeps a new server from starting, is ended first."""
    before = running.statuses()
    remnant = running.folder / "spark" / "tmp" / "blockmgr-of-the-killed" / "rows"
    remnant.parent.mkdir(parents=True)
    remnant.write_text("rows")

    after = running.kill(name)

    assert remnant.exists() is (name != "spark")
    shutil.rmtree(remnant.parent, ignore_errors=True)
    assert after.restarts == before[name].restarts + 1
    assert after.address == before[name].address
    assert len(running.sessions_of(name)) == 1
    others = {other: status for other, status in before.items() if other != name}
    assert {other: running.statuses()[other] for other in others} == others
    assert is_alive(computing) is (name != "postgres")
    assert can_query(running)


@pytest.mark.promise("json:down")
def test_down_finds_the_processes_of_a_killed_supervisor(running: Stack, bystander: psutil.Process) -> None:
    """`down` ends every process of the stack, even if its supervisor was killed and its pid files are gone; no other."""
    supervisor = running.supervisor()
    supervisor.kill()
    for file in (running.folder / "run").iterdir():
        file.unlink()

    assert_ends(running)
    assert {status.state for status in running.statuses().values()} == {"stopped"}
    assert is_alive(bystander)


def assert_ends(stack: Stack) -> None:
    """Stop a stack; check that none of its processes lives, by marker, session or working folder."""
    processes = stack.processes()

    done = stack.tidegate("down", "--json")

    assert done.returncode == 0, done.stderr
    check_schema("down", json.loads(done.stdout))
    assert [process for process in processes if is_alive(process)] == []
    assert stack.marked() == []
    data = Layout.load(stack.home).postgres.data
    assert stack.working_in(stack.folder, data) == []


@pytest.mark.parametrize("verb", ["up", "down"])
def test_a_backend_that_outlives_supervisor_and_server_is_found(verb: str, running: Stack, computing: psutil.Process) -> None:
    """If both are killed at once, `down` leaves nothing, and `up` recovers by itself."""
    server = psutil.Process(running.statuses()["postgres"].pid)
    supervisor, settings = running.supervisor(), running.settings
    for process in (supervisor, server):
        process.kill()
    assert wait_until(lambda: not is_alive(server), 10)
    assert is_alive(computing)

    done = running.tidegate(verb, *(["--without-airflow"] if verb == "up" else []))

    assert done.returncode == 0, done.stderr
    assert not is_alive(computing)
    if verb == "up":
        assert running.settings == settings
        assert is_alive(running.supervisor())
        assert [len(running.sessions_of(name)) for name in ("postgres", "spark")] == [1, 1]
        assert can_query(running)


def test_roots_cluster_keeps_the_account_that_it_was_made_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A better account that is created later does not separate a cluster from its files."""
    if os.geteuid() != 0:
        pytest.skip("only root's cluster runs under another account: run the tests as root")
    monkeypatch.setattr(postgres, "ACCOUNTS", ("nobody-has-this-name", "daemon", "nobody"))
    cluster = EmbeddedPostgres(tmp_path / ".tidegate", 1)
    cluster.initialize()
    daemon = pwd.getpwnam("daemon").pw_uid
    monkeypatch.setattr(postgres, "ACCOUNTS", ("nobody",))

    assert cluster.data.stat().st_uid == daemon
    assert EmbeddedPostgres(tmp_path / ".tidegate", 1).user == daemon
    assert EmbeddedPostgres(tmp_path / "another", 1).user == pwd.getpwnam("nobody").pw_uid
    cluster.delete()
