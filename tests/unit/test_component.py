"""How a stack recognizes its own processes, and keeps its files to itself."""

import os
import shutil
import stat

import pytest

from tidegate.stack.components.server_process import Identity, RunFolder
from tidegate.stack.machine.private_files import private


def test_a_process_of_another_boot_is_another_process(tmp_path) -> None:
    run = RunFolder(tmp_path)
    mine = Identity.of(os.getpid())
    run.write("spark", Identity(mine.pid, f"another-boot {mine.started.split()[1]}"))
    (tmp_path / "run" / "postgres.json").write_text('{"pid": 1, "created": 1.5}')
    assert run.read("spark").process() is None
    assert run.sessions() == set()
    assert run.read("postgres") is None


def test_a_copy_of_a_stack_does_not_know_the_processes_of_the_other(tmp_path) -> None:
    RunFolder(tmp_path / "stack").write("supervisor", Identity.of(os.getpid()))
    shutil.copytree(tmp_path / "stack", tmp_path / "copy")
    copy = RunFolder(tmp_path / "copy")
    assert (copy.read("supervisor"), copy.sessions()) == (None, set())
    (tmp_path / "stack").rename(tmp_path / "moved")
    assert RunFolder(tmp_path / "moved").sessions() == {os.getpid()}


def test_a_stacks_file_is_private_under_any_umask_and_is_no_link(tmp_path) -> None:
    before = os.umask(0)
    try:
        with open(tmp_path / "password", "w", opener=private) as file:
            file.write("secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "password").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "password")
    with pytest.raises(OSError, match="symbolic links"), open(tmp_path / "link", "w", opener=private):
        pass
