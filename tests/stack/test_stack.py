"""`tidegate up`, `down` and `status` on a real stack without Airflow: it recovers from every kill, and ends without a trace.

`running` is restored before each test. What a stack with Airflow can bear is in `tests/end_to_end/test_one_airflow.py`.
"""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import check_schema
from tests.stack.conftest import Stack
from tests.statements import execute
from tests.store import project
from tidegate.stack.components.server_process import Component, is_alive, wait_until
from tidegate.stack.layout import Layout
from tidegate.stack.supervisor import HUNG_AFTER_SECONDS, Supervised


def can_query(stack: Stack) -> bool:
    return execute(stack.settings.conninfo(), "SELECT count(*) > 0 FROM tidegate.pipeline") == [(True,)]


@pytest.mark.promise("verb:up")
def test_two_operators_start_one_stack(small: Stack, bystander: psutil.Process) -> None:
    assert {status.state for status in small.statuses().values()} == {"up"}
    assert [len(small.sessions_of(name)) for name in ("supervisor", "postgres", "spark")] == [1, 1, 1]
    assert can_query(small)
    assert is_alive(bystander)
    assert bystander.pid not in {status.pid for status in small.statuses().values()}


NO_JAVA = {"nothing": None, "too old": 'openjdk version "11.0.2"', "too new": 'openjdk version "25" 2025-09-16'}


@pytest.mark.promise("error:PERMANENT_ERROR")
@pytest.mark.parametrize("version", NO_JAVA.values(), ids=NO_JAVA.keys())
def test_a_missing_java_is_reported_first(version: str | None, new_stack: Callable[[str], Stack]) -> None:
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


@pytest.mark.promise("security:another-account-that-leaves-tidegate-toml-or", "security:other-machines")
def test_airflow_trusts_a_project_no_more_than_the_command_line_and_listens_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as ports:
        airflow = Layout.choose(tmp_path, ports).airflow
    monkeypatch.setenv("AIRFLOW__API__HOST", "0.0.0.0")
    monkeypatch.delenv(project.HOME_VARIABLE, raising=False)
    assert airflow.environment()[project.FOUND_VARIABLE] == "1"
    monkeypatch.setenv(project.HOME_VARIABLE, str(tmp_path))
    assert project.FOUND_VARIABLE not in airflow.environment()
    assert airflow.environment()["AIRFLOW__API__HOST"] == "127.0.0.1"


@pytest.mark.promise("json:up")
def test_up_starts_what_has_given_up(running: Stack) -> None:
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


@pytest.mark.promise("json:down")
def test_down_finds_the_processes_of_a_killed_supervisor(running: Stack, bystander: psutil.Process) -> None:
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
