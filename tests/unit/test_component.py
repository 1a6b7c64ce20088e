"""What a stack has on its machine is its own: processes, files, Java libraries; and it removes old logs of tasks."""

import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from tidegate import stack
from tidegate.stack.components import airflow_cleanup, java_libraries, kafka
from tidegate.stack.components.server_process import Identity, RunFolder
from tidegate.stack.machine.private_files import private
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import PermanentError

OTHERS = "org.example:thing:1.0"


def test_a_process_of_another_boot_or_of_a_copied_stack_is_another_process(tmp_path) -> None:
    run, mine = RunFolder(tmp_path / "stack"), Identity.of(os.getpid())
    run.write("supervisor", mine)
    shutil.copytree(tmp_path / "stack", tmp_path / "copy")
    copy = RunFolder(tmp_path / "copy")
    assert (copy.read("supervisor"), copy.sessions()) == (None, set())
    (tmp_path / "stack").rename(tmp_path / "moved")
    moved = RunFolder(tmp_path / "moved")
    assert moved.sessions() == {os.getpid()}
    moved.write("supervisor", Identity(mine.pid, f"another-boot {mine.started.split()[1]}"))
    (tmp_path / "moved/run/postgres.json").write_text('{"pid": 1, "created": 1.5}')
    assert moved.read("supervisor").process() is None
    assert moved.sessions() == set()
    assert moved.read("postgres") is None


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


def test_old_logs_are_removed_with_the_folders_that_they_leave_empty(tmp_path: Path) -> None:
    def log(name: str, days: int) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("text")
        for path in (file, *file.parents[: len(file.relative_to(tmp_path).parts) - 1]):
            os.utime(path, times=(time.time() - days * airflow_cleanup.DAY_SECONDS,) * 2)
        return file

    logs, elsewhere = tmp_path / "logs", log("elsewhere/precious", 40)
    new = log("logs/dag_id=a/run_id=2/attempt=2.log", 20)
    old = [log(f"logs/dag_id={name}/attempt=1.log", 40) for name in ("a/run_id=2", "b/run_id=1/task_id=x")]
    (about_to_be_used := logs / "dag_id=a/run_id=3").mkdir()
    (link := logs / "latest").symlink_to(elsewhere.parent)
    assert airflow_cleanup.remove_logs(logs, time.time() - 30 * airflow_cleanup.DAY_SECONDS) == len(old)
    assert not any(file.exists() for file in (*old, logs / "dag_id=b"))
    assert [path.exists() for path in (new, about_to_be_used, link, elsewhere)] == [True] * 4


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    sent: dict[str, bytes] = {}

    def resolve(_packages: object, workplace: Path, _target: Path) -> None:
        (workplace / "jars").mkdir()
        for name, content in sent.items():
            (workplace / "jars" / name).write_bytes(content)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(java_libraries, "_resolve", resolve)
    return sent


@pytest.mark.promise("security:package-index-or-maven-repository-that-sends")
def test_a_library_of_the_stack_with_another_checksum_is_deleted(fetched: dict[str, bytes]) -> None:
    for name in (f"{'-'.join(kafka.PACKAGES[0].split(':')[1:])}.jar", "evil-1.0.jar"):  # one is changed, one is added
        fetched.clear()
        fetched[name] = b"something else"
        with pytest.raises(PermanentError, match=r"is not what it has to be: its SHA-256 is [0-9a-f]{64}, jars.sha256 has"):
            java_libraries.fetch(kafka.PACKAGES)
        assert not java_libraries.folder(kafka.PACKAGES).exists()


@pytest.mark.promise("security:another-account-in-file-system")
def test_libraries_that_another_account_could_have_put_there_are_refused(fetched: dict[str, bytes]) -> None:
    fetched["thing-1.0.jar"] = b"anything"
    java_libraries.fetch([OTHERS])
    java_libraries.fetch([OTHERS])
    jar = java_libraries.folder([OTHERS]) / "thing-1.0.jar"
    for path in (jar, jar.parent, jar.parent.parent):
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(PermanentError, match=f"{path} belongs to user"):
            java_libraries.fetch([OTHERS])
        path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(jar, 61_000, 61_000)
        with pytest.raises(PermanentError, match=f"{jar} belongs to user 61000"):
            java_libraries.fetch([OTHERS])


@pytest.mark.promise("verb:down")
def test_the_data_of_a_stack_that_is_linked_to_a_larger_disk_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "disk/secrets").mkdir(parents=True)
    (tmp_path / "disk/stack.lock").touch()
    (tmp_path / ".tidegate").symlink_to(tmp_path / "disk")
    stack.down(Settings(home=tmp_path), delete_data=True)
    assert [list(folder.iterdir()) for folder in (tmp_path, tmp_path / "disk")] == [[tmp_path / "disk"], []]
