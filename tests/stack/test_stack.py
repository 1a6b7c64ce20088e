"""`tidegate up`, `down` and `status` on a real stack without Airflow: it recovers from every kill, and ends without a trace.

`running` is restored before each test. What a stack with Airflow can bear is in `tests/end_to_end/test_one_airflow.py`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.small_disk import fill, mounted
from tests.stack.conftest import Stack, new_stack_in
from tests.statements import execute
from tests.store import project
from tidegate import stack as embedded
from tidegate.stack import status as status_of
from tidegate.stack.components import spark, spark_class_archive
from tidegate.stack.components.postgres import Cluster, EmbeddedPostgres
from tidegate.stack.components.server_process import Component, is_alive, wait_until
from tidegate.stack.layout import Layout
from tidegate.stack.supervisor import HUNG_AFTER_SECONDS, Supervised
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import PermanentError


def can_query(stack: Stack) -> bool:
    return execute(stack.settings.conninfo(), "SELECT count(*) > 0 FROM tidegate.pipeline") == [(True,)]


@pytest.mark.soak
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

    first, *others = done.stderr.splitlines()
    found = "Java is missing" if version is None else f"{programs}/java is Java"
    assert re.match(f"tidegate: {found}.*Install Java 17", first)
    assert (done.returncode, done.stdout, others) == (1, "", ["More: tidegate error PERMANENT_ERROR"])
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

    assert done.returncode in {1, 75}
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("tidegate:")]
    for part in ("postgres did not come up", f"{stack.folder}/logs/postgres.log", "postgresql.conf"):
        assert part in message
    assert "Traceback" not in done.stderr
    assert_ends(stack)


@pytest.mark.promise("security:another-account-that-leaves-tidegate-toml-or", "security:other-machines")
def test_airflow_listens_on_loopback_and_trusts_what_commands_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as ports:
        airflow = Layout.choose(tmp_path, ports).airflow
    monkeypatch.setenv("AIRFLOW__API__HOST", "0.0.0.0")
    monkeypatch.delenv(project.HOME_VARIABLE, raising=False)
    assert airflow.environment()[project.FOUND_VARIABLE] == "1"
    monkeypatch.setenv(project.HOME_VARIABLE, str(tmp_path))
    assert project.FOUND_VARIABLE not in airflow.environment()
    assert airflow.environment()["AIRFLOW__API__HOST"] == "127.0.0.1"


@pytest.mark.soak
@pytest.mark.promise("json:up")
def test_up_starts_what_has_given_up(running: Stack) -> None:
    def has_given_up() -> bool:
        spark = running.statuses()["spark"]
        if spark.state != "gave up" and spark.pid is not None:
            with suppress(psutil.Error):
                psutil.Process(spark.pid).kill()
        return spark.state == "gave up"

    assert wait_until(has_given_up, 60)
    running.json("up", "--without-airflow")
    assert {status.state for status in running.statuses().values()} == {"up"}


def test_a_component_that_lives_without_a_heartbeat_is_started_again(tmp_path: Path) -> None:
    supervised = Supervised(Component("airflow-scheduler", ["sleep", "60"], lambda: None), tmp_path)
    supervised.keep_alive()
    first, now = supervised.process, time.monotonic()
    try:
        for is_silent, after in ((True, 1), (False, 100), (True, 101), (True, 101 + HUNG_AFTER_SECONDS)):
            supervised.note_silence(is_silent, now + after)
        assert first.poll() is None, "it has not been silent for longer than that"
        supervised.note_silence(True, now + 102 + HUNG_AFTER_SECONDS)
        assert first.wait(10) == -signal.SIGKILL
        assert wait_until(lambda: supervised.keep_alive() is None and supervised.process is not None, 10)
        supervised.note_silence(True, now + 103 + HUNG_AFTER_SECONDS)
        with pytest.raises(subprocess.TimeoutExpired):  # the silence was that of its predecessor
            supervised.process.wait(1)
        assert supervised.restarts == 1
    finally:
        supervised.ask_to_stop()
        supervised.stop()


@pytest.mark.soak
@pytest.mark.promise("json:down")
def test_down_finds_the_processes_of_a_killed_supervisor(running: Stack, bystander: psutil.Process) -> None:
    running.supervisor().kill()
    for file in (running.folder / "run").iterdir():
        file.unlink()

    assert_ends(running)
    assert {status.state for status in running.statuses().values()} == {"stopped"}
    assert is_alive(bystander)


def assert_ends(stack: Stack) -> None:
    processes = stack.processes()
    stack.json("down")
    stack.check_is_over(processes)


@pytest.mark.promise("error:MACHINE_REFUSES")
@pytest.mark.soak
def test_a_stack_recovers_from_a_full_disk() -> None:
    with mounted("240m") as small_disk, new_stack_in(small_disk / "home") as stack:
        embedded.up(stack.settings, without_airflow=True)
        supervisor, before = stack.supervisor(), stack.statuses()
        ballast = fill(small_disk)
        for name in ("postgres", "spark"):
            psutil.Process(before[name].pid).kill()
        assert wait_until(lambda: stack.statuses()["spark"].state != "up", 10)

        done = stack.tidegate("up", "--without-airflow")

        assert done.returncode == 75, done.stderr
        assert re.search(f"{stack.folder}/.*No space left on device. Make room there", done.stderr)
        assert "Traceback" not in done.stderr
        assert not wait_until(lambda: not is_alive(supervisor), 5)
        assert stack.statuses()["spark"].state != "up"

        ballast.unlink()

        assert wait_until(lambda: {s.state for s in stack.statuses().values()} == {"up"}, 120), stack.statuses()
        assert stack.supervisor() == supervisor
        assert can_query(stack)


@pytest.mark.promise("error:NOT_PERMITTED")
def test_a_folder_that_cannot_be_written_is_named() -> None:
    with mounted("240m") as small_disk:
        (home := small_disk / "home").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        done = {verb: Stack(home).tidegate(verb) for verb in ("up", "down", "status")}
    assert all("Traceback" not in each.stderr for each in done.values())
    assert done["up"].returncode == 1
    assert re.search(f"{home}/.tidegate: Read-only file system.*TIDEGATE_HOME", done["up"].stderr)


def test_a_ledger_is_never_overwritten_replaced_or_shared(tmp_path: Path) -> None:
    home = tmp_path / "home"
    postgres = EmbeddedPostgres(home / ".tidegate", 1)
    aside = postgres.data.with_name(f"{postgres.data.name}.aside")  # root's clusters of all tests share a folder

    def refuses(because: str, folder: Path = home) -> None:
        with pytest.raises(PermanentError, match=because):
            EmbeddedPostgres(folder / ".tidegate", 1).initialize()

    try:
        postgres.initialize()
        known = Cluster.at(postgres.data).identifier

        # Its passwords are gone.
        passwords = postgres.passfile.rename(tmp_path / "passwords")
        refuses("holds the ledger and the states of an earlier stack here")
        assert not postgres.passfile.exists()
        passwords.rename(postgres.passfile)

        # Its files are gone.
        postgres.data.rename(aside)
        refuses(f"were in {postgres.data}, and are gone")
        assert not postgres.data.exists()
        aside.rename(postgres.data)

        # Another cluster is in its place.
        record = home / ".tidegate" / "cluster.json"
        content = record.read_text()
        record.write_text(json.dumps({**json.loads(content), "identifier": known + 1}))
        refuses(rf"cluster {known}, but .* were in cluster {known + 1}")
        record.write_text(content)

        # Root's clusters are outside of the project's folder: two stacks would each end the other's server.
        if os.geteuid() == 0:
            shutil.copytree(home, copy := home.with_name("copy"))
            refuses(f"is a copy of {home}/.tidegate", copy)
            of_copy = EmbeddedPostgres(copy / ".tidegate", 1)
            assert of_copy.processes() == []
            of_copy.delete()
            assert postgres.data.exists()

        # Where its files are is recorded, so that the project may move.
        moved = EmbeddedPostgres(home.rename(home.with_name("moved")) / ".tidegate", 1)
        moved.initialize()
        assert Cluster.at(moved.data).identifier == known
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        for folder in tmp_path.glob("*/.tidegate"):
            EmbeddedPostgres(folder, 1).delete()


@pytest.mark.promise("performance:java-classes-are-archived-at-set-up")
def test_sparks_server_maps_the_archive_that_setup_has_made(stack: Settings) -> None:
    archive = spark.class_archive()
    if archive is None:
        pytest.skip("There is no archive of Spark's classes. Make it: python -m tidegate.stack.components.spark_class_archive")
    (server,) = [psutil.Process(status.pid) for status in status_of(stack) if status.name == "spark"]
    if not hasattr(server, "memory_maps"):
        pytest.skip("This system does not show the files that a process has mapped. Linux does.")

    assert archive in {Path(region.path) for region in server.memory_maps()}


@pytest.mark.promise("error:RETRYABLE_ERROR")
def test_a_server_not_up_in_time_leaves_no_archive_and_can_be_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = spark.EmbeddedSpark.component
    monkeypatch.setattr(spark.EmbeddedSpark, "component", lambda server: replace(usual(server), deadline_seconds=0.1))
    monkeypatch.setattr(spark_class_archive, "class_archive_file", lambda: tmp_path / "spark.jsa")

    with pytest.raises(spark_class_archive.RetryableError, match="did not start"):
        spark_class_archive.make()

    assert list(tmp_path.iterdir()) == []
