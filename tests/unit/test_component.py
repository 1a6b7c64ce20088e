"""How a stack recognizes its own processes."""

import os
import resource
import shutil
import stat
from pathlib import Path

import psutil
import pytest

from tidegate.stack.components.postgres import write_secret
from tidegate.stack.components.server_process import Identity, RunFolder, unfinished_name


def test_a_process_is_known_again_after_the_clock_was_set(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of boot moves with the clock or a resumed machine, so it is no part of a process's identity."""
    run = RunFolder(tmp_path)
    run.write("spark", Identity.of(os.getpid()))
    boot = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot - 86_400)

    identity = run.read("spark")

    assert identity is not None
    assert identity.process() == psutil.Process()
    assert run.sessions() == {os.getpid()}


def test_a_process_of_another_boot_is_another_process(tmp_path) -> None:
    """The same number at the same tick of another boot, and a file without what is expected, identify no process."""
    run = RunFolder(tmp_path)
    mine = Identity.of(os.getpid())
    run.write("spark", Identity(mine.pid, f"another-boot {mine.started.split()[1]}"))
    (tmp_path / "run" / "postgres.json").write_text('{"pid": 1, "created": 1.5}')

    assert run.read("spark").process() is None
    assert run.sessions() == set()
    assert run.read("postgres") is None


def test_a_copy_of_a_stack_does_not_know_the_processes_of_the_other(tmp_path) -> None:
    """`down` in the copy would end them; a moved stack keeps its own."""
    RunFolder(tmp_path / "stack").write("supervisor", Identity.of(os.getpid()))
    shutil.copytree(tmp_path / "stack", tmp_path / "copy")

    copy = RunFolder(tmp_path / "copy")

    assert (copy.read("supervisor"), copy.sessions()) == (None, set())
    (tmp_path / "stack").rename(tmp_path / "moved")
    assert RunFolder(tmp_path / "moved").sessions() == {os.getpid()}


def test_a_secret_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    """An empty one would be taken for the password; what a killed process has left is no obstacle."""
    file = tmp_path / "password"
    write_secret(file, "old")
    unfinished_name(file).write_text("left by a killed process")
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as on a full disk
        try:
            write_secret(file, "new")
        except OSError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert file.read_text() == "old"

    write_secret(file, "new")

    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o600)
    assert list(tmp_path.iterdir()) == [file]
