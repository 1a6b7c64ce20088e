"""The stack survives its machine: full disks, taken ports, moved and copied folders, stopped and replaced code."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.checkout import copy_to
from tests.conftest import COMMAND
from tests.examples import copy_examples
from tests.small_disk import fill, mounted
from tests.stack.conftest import Stack, remove
from tests.stack.test_stack import can_query
from tidegate import stack as embedded
from tidegate.stack.components import server_process as components
from tidegate.stack.components.airflow import PROJECT
from tidegate.stack.components.postgres import Cluster, EmbeddedPostgres
from tidegate.stack.components.server_process import is_alive, log_file, wait_until
from tidegate.stack.layout import Layout
from tidegate.state_store.base.errors import PermanentError

TRY_AGAIN = 75


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk() -> Iterator[Path]:
    with mounted("240m") as folder:
        yield folder


@pytest.mark.promise("error:MACHINE_REFUSES")
@pytest.mark.soak
def test_a_stack_recovers_from_a_full_disk(small_disk: Path) -> None:
    """The supervisor lives on, `up` names the file that it cannot write, and dead components return when there is room."""
    stack = Stack(small_disk / "home")
    stack.home.mkdir()
    copy_examples(stack.home)
    try:
        embedded.up(stack.settings, without_airflow=True)
        supervisor, before = stack.supervisor(), stack.statuses()
        ballast = fill(small_disk)
        for name in ("postgres", "spark"):
            psutil.Process(before[name].pid).kill()
        assert wait_until(lambda: stack.statuses()["spark"].state != "up", 10)

        done = stack.tidegate("up", "--without-airflow")

        assert done.returncode == TRY_AGAIN, done.stderr
        assert f"{stack.folder}/" in done.stderr
        assert "No space left on device. Make room there" in done.stderr
        assert "Traceback" not in done.stderr
        assert not wait_until(lambda: not is_alive(supervisor), 5)
        assert stack.statuses()["spark"].state != "up"

        ballast.unlink()

        assert wait_until(lambda: {s.state for s in stack.statuses().values()} == {"up"}, 120), stack.statuses()
        assert stack.supervisor() == supervisor
        assert can_query(stack)
    finally:
        remove(stack)


@pytest.mark.promise("error:NOT_PERMITTED")
def test_a_folder_that_cannot_be_written_is_named(small_disk: Path) -> None:
    """Every verb of the stack says so in a sentence."""
    home = small_disk / "home"
    home.mkdir()
    stack = Stack(home)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)

    for verb in ("up", "down", "status"):
        done = stack.tidegate(verb)
        assert "Traceback" not in done.stderr
        if verb == "up":
            assert done.returncode == 1
            assert f"{home}/.tidegate: Read-only file system." in done.stderr
            assert "TIDEGATE_HOME" in done.stderr


def test_logs_are_truncated_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part is kept in another file, and the writer's next line is in the log."""
    monkeypatch.setattr(components, "LOG_KEPT_BYTES", 1000)
    log = log_file(tmp_path, "spark")
    log.parent.mkdir()
    with log.open("ab", buffering=0) as writer:
        for number in range(300):
            writer.write(b"line %03d\n" % number)
        components.truncate_log(log)
        writer.write(b"the next line\n")
        components.truncate_log(log)  # short now, so unchanged

    assert log.read_bytes() == b"the next line\n"
    kept = log.with_suffix(".log.1").read_bytes()
    assert len(kept) == 1000
    assert kept.endswith(b"line 299\n")


# -- moved, copied and damaged folders ---------------------------------------------------------------------------------


def test_a_ledger_is_never_overwritten_replaced_or_shared(tmp_path: Path) -> None:
    """An empty one in its place would begin all pipelines at txid 1, without their states."""
    home = tmp_path / "home"
    postgres = EmbeddedPostgres(home / ".tidegate", 1)

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
        aside = postgres.data.rename(postgres.data.with_name("aside"))
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
        for folder in tmp_path.glob("*/.tidegate"):
            EmbeddedPostgres(folder, 1).delete()


def test_a_damaged_state_file_stops_neither_up_nor_down(running: Stack) -> None:
    """After a power cut `down` ends the stack, `up` makes a new file, and other verbs say what is wrong."""
    file = running.folder / "stack.json"
    for content in ('{"ports": {"post', "[]", '"text"', '{"ports": {"spark": "x"}}', '{"ports": [1]}', ""):
        file.write_text(content)

        done = running.tidegate("down")

        assert done.returncode == 0, done.stderr
        assert "Traceback" not in running.tidegate("status").stderr

    message = running.tidegate("get", "flights", "daily", "UA", "2013-01-01").stderr
    assert f"{file} cannot be read" in message
    assert "tidegate up" in message
    up = running.tidegate("up", "--without-airflow")
    assert up.returncode == 0, up.stderr
    assert can_query(running)


@pytest.mark.soak
def test_a_deleted_stack_folder_ends_the_stack(new_stack: Callable[[str], Stack]) -> None:
    """Its processes could not be found by their records; `down` still finds those that have not ended."""
    stack = new_stack("deleted")
    embedded.up(stack.settings, without_airflow=True)
    data = Layout.load(stack.home).postgres.data
    processes = stack.processes()
    folder = stack.folder.rename(stack.home / "elsewhere")
    try:
        assert wait_until(lambda: not any(map(is_alive, processes)), 60), [p for p in processes if is_alive(p)]
        assert stack.tidegate("down").returncode == 0
    finally:
        shutil.rmtree(stack.folder, ignore_errors=True)
        folder.rename(stack.folder)
    assert data.exists()


# -- ports -------------------------------------------------------------------------------------------------------------


def test_a_port_that_another_process_took_is_named_and_waited_for(running: Stack) -> None:
    """If a port is taken between a component's death and its restart, `up` after `down` chooses another one."""
    before, supervisor = running.statuses(), running.supervisor()
    port = Layout.load(running.home).ports["spark"]
    spark = psutil.Process(before["spark"].pid)
    supervisor.suspend()
    spark.kill()
    assert wait_until(lambda: components.is_free(port), 10)
    with socket.create_server(("127.0.0.1", port)):
        supervisor.resume()
        assert wait_until(
            lambda: f"port {port} belongs to process {os.getpid()}" in (running.statuses()["spark"].reason or ""), 10
        )
        running.tidegate("down")
        done = running.tidegate("up", "--without-airflow")
        assert done.returncode == 0, done.stderr

    assert Layout.load(running.home).ports["spark"] != port
    assert running.settings.spark_remote == f"sc://127.0.0.1:{Layout.load(running.home).ports['spark']}"
    assert can_query(running)


# -- stopped and replaced ----------------------------------------------------------------------------------------------


def test_a_stopped_supervisor_is_ended(running: Stack) -> None:
    """By `down`."""
    running.supervisor().suspend()

    done = subprocess.run([COMMAND, "down"], env=running.environ, check=False, timeout=60)

    assert done.returncode == 0
    assert running.marked() == []


def test_old_code_in_memory_is_noticed(running: Stack, tmp_path: Path) -> None:
    """`status`, `up` and `migrate` of newer code say that the stack has to be restarted; new pipelines need no restart."""
    copy_to(tmp_path)
    for file in ("pyproject.toml", "requirements.txt"):
        shutil.copy(PROJECT / file, tmp_path)

    def newer(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from tidegate.cli import main; main()", *arguments],
            cwd=tmp_path,
            env=running.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )

    def advice() -> str | None:
        return json.loads(newer("status", "--json").stdout)["advice"]

    (running.home / "pipelines/another.py").write_text("")
    assert advice() is None
    (running.home / "pipelines/another.py").unlink()
    with (tmp_path / "jobs/engine/worker.py").open("a") as module:
        module.write("# newer\n")
    assert "Restart it: tidegate down && tidegate up" in advice()
    for verb in (["up", "--without-airflow"], ["migrate"], ["status"]):
        assert "Restart it: tidegate down && tidegate up" in newer(*verb).stderr
