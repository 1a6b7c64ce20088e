"""The stack survives its machine: full disks, folders that cannot be written, and that were moved, copied or replaced."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.examples import copy_examples
from tests.small_disk import fill, mounted
from tests.stack.conftest import Stack, remove
from tests.stack.test_stack import can_query
from tidegate import stack as embedded
from tidegate.stack.components.postgres import Cluster, EmbeddedPostgres
from tidegate.stack.components.server_process import is_alive, wait_until
from tidegate.state_store.base.errors import PermanentError

TRY_AGAIN = 75


@pytest.fixture
def small_disk() -> Iterator[Path]:
    with mounted("240m") as folder:
        yield folder


@pytest.mark.promise("error:MACHINE_REFUSES")
@pytest.mark.soak
def test_a_stack_recovers_from_a_full_disk(small_disk: Path) -> None:
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
