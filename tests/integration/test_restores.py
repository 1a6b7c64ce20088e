"""Restores and copies of the database are harmless, or noticed before any batch is planned or processed."""

import fcntl
import json
import logging
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import register_pipelines
from tests.integration.conftest import TALLY, Execute, Tally, refused
from tests.postgres_versions import AnyPostgres, running
from tests.servers import Server
from tests.store import Mark, Witness, commit_witness, cursors
from tidegate import migrations
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import HoleDetected

ROW = [("a", 1, 1, 1, 1)]


class Machine(AnyPostgres):
    """A server of a test's own, whose data folder can be copied and put back."""

    def back_up(self, backup: Path) -> None:
        self.stop()
        subprocess.run(["cp", "-a", self.data, backup], check=True)
        self.start()

    def put_back(self, backup: Path) -> None:
        self.stop()
        shutil.rmtree(self.data)
        subprocess.run(["cp", "-a", backup, self.data], check=True)
        self.start()


@pytest.fixture
def machine(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Machine]:
    """A server with pipeline tally, whose txids 1 and 2 have committed."""
    with running(Machine(tmp_path, free_port())) as postgres:
        assert isinstance(postgres, Machine)
        migrations.upgrade(postgres.settings, [])
        register_pipelines(postgres.settings, TALLY)
        commit_next(postgres.settings, 2)
        yield postgres


def plan_next(settings: Settings) -> int:
    with StateStore.connect(settings) as store:
        return Tally(store).plan(run_id=f"run {time.monotonic_ns()}")[-1]


def commit_next(settings: Settings, number: int = 1) -> int:
    """Commit planned batches, or new ones, as separate processes would; return the last txid."""
    with StateStore.connect(settings) as store:
        tally = Tally(store)
        txids = store.uncommitted("tally", number)
        if number > len(txids):
            txids += tally.plan(number - len(txids), run_id=f"run {time.monotonic_ns()}")
        for txid in txids:
            tally.process(txid, ROW)
            assert not tally.commit(txid).already_committed
    return txids[-1]


def assert_halted(settings: Settings, message: str) -> None:
    """Check that every step of a batch is refused with this message, and nothing is written."""
    with StateStore.connect(settings) as store:
        tally = Tally(store)
        next_txid = store.committed("tally") + 1
        steps: list[Callable[[], object]] = [
            lambda: tally.plan(run_id="next"),
            lambda: tally.commit(next_txid),
            lambda: store.commit_ready(TALLY.spec, "test"),
            lambda: store.skip_batch(TALLY.spec, next_txid, "test", "x"),
            lambda: store.replay_quarantined(TALLY.spec, "test", "x"),
        ]
        if store.uncommitted("tally", 1):
            steps.append(lambda: tally.start(next_txid))
        for step in steps:
            with refused(settings, HoleDetected, message):
                step()


# older copies in the place of the database


@pytest.mark.promise("I9", "fault:database-is-restored-copied-or-promoted:after", "decision:0023")
def test_an_older_copy_in_the_place_of_the_database_is_noticed(machine: Machine, tmp_path: Path) -> None:
    """System identifier, timeline and database are the same: only the witness knows of the third commit."""
    assert plan_next(machine.settings) == 3
    machine.back_up(tmp_path / "backup")
    assert commit_next(machine.settings) == 3
    machine.put_back(tmp_path / "backup")

    (file,) = machine.settings.marks_folder.glob("tally.*.json")
    assert_halted(
        machine.settings,
        rf"stands at txid 2, but {file} says that txid 3 committed at .*, so txid 3 is lost\. Put back a newer backup\. "
        r"Or give that up: .*files in a done folder.*tidegate migrate --accept-epoch",
    )
    migrations.upgrade(machine.settings, [])
    assert_halted(machine.settings, "txid 3 is lost")  # an ordinary migration accepts nothing

    (story,) = migrations.accept_epoch(machine.settings, "an operator").values()
    assert story.startswith("goes on after txid 2; given up: it stands at txid 2")
    assert "txid 3 is lost" in story
    assert migrations.accept_epoch(machine.settings, "an operator") == {}
    assert commit_next(machine.settings, 2) == 4
    with migrations.connected(machine.settings) as connection:
        actions = connection.exec_driver_sql("SELECT pipeline, txid, action, owner, reason FROM tidegate.operator_action").all()
    assert [tuple(action) for action in actions] == [("tally", 2, "accept", "an operator", story)]


def test_a_copy_that_went_on_elsewhere_is_noticed_by_its_other_commits(machine: Machine, tmp_path: Path) -> None:
    machine.back_up(tmp_path / "backup")
    assert commit_next(machine.settings) == 3
    machine.put_back(tmp_path / "backup")
    other_machine = replace(machine.settings, witness_folder=tmp_path / "other machine")
    assert commit_next(other_machine, 2) == 4  # a machine that never committed has no marks
    assert_halted(machine.settings, r"its txid 3 committed at .*, but .* says that txid 3 committed at .*, and those")
    migrations.accept_epoch(machine.settings, "an operator")
    assert commit_next(machine.settings) == 5
    assert commit_next(other_machine) == 6


@pytest.mark.promise("fault:database-is-restored-copied-or-promoted:processing")
def test_a_promoted_standby_is_noticed(machine: Machine, tmp_path: Path) -> None:
    """Commits that had not reached it may be lost, so a person decides; the message has what the witness knows."""
    standby = tmp_path / "standby"
    machine.back_up(standby)
    (standby / "standby.signal").touch()
    assert commit_next(machine.settings) == 3
    machine.put_back(standby)  # the primary is gone, so no further commits reach it
    machine.execute("SELECT pg_promote()")
    assert_halted(machine.settings, "txid 3 is lost|restored, promoted or copied")
    machine.settings.stack_folder.joinpath("witness").rename(tmp_path / "lost")
    assert_halted(machine.settings, "restored, promoted or copied.*commits after txid 2 may be lost")


# copies within the server


@pytest.mark.promise("fault:database-is-restored-copied-or-promoted:processing", "decision:0023")
def test_a_copy_within_the_server_is_noticed(tally: Tally, settings: Settings, server: Server) -> None:
    """Two databases must not share a history: the one that acks a file takes it from the other."""
    commit_next(settings, 2)
    plan_next(settings)
    tally.store.close()
    copy = replace(settings, pg_database=server.create_database(settings.pg_database))
    try:
        assert_halted(copy, "restored, promoted or copied.*commits after txid 2 may be lost.*--accept-epoch")
        assert commit_next(settings) == 3  # the original was never halted
        assert_halted(copy, "txid 3 is lost")

        # Once accepted, the copy has its own history, and neither database disturbs the other.
        assert "txid 3 is lost" in migrations.accept_epoch(copy, "an operator")["tally"]
        assert commit_next(copy, 2) == 4
        assert commit_next(settings) == 4
    finally:
        server.drop_database(copy.pg_database)


# no false alarms


def test_a_database_does_not_disturb_its_successor_or_another_with_the_same_folder(
    tally: Tally,
    settings: Settings,
    server: Server,
    as_role: Execute,
    template: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Same pipeline name and folder, different databases; or a pipeline that is registered again: it begins a new history."""
    commit_next(settings, 3)
    other = replace(settings, pg_database=server.create_database(template))
    try:
        register_pipelines(other, TALLY)
        assert [commit_next(other), commit_next(settings), commit_next(other)] == [1, 4, 2]
    finally:
        server.drop_database(other.pg_database)

    for schema in ("tidegate", "state", "staging"):
        as_role("tidegate_owner", f"DROP SCHEMA {schema} CASCADE")
    migrations.upgrade(settings, [])
    register_pipelines(settings, TALLY)
    assert commit_next(settings) == 1

    (tmp_path / "file").touch()
    blocked = replace(settings, witness_folder=tmp_path / "file" / "witness")
    with caplog.at_level(logging.WARNING):
        assert commit_next(blocked, 2) == 3
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert f"{blocked.witness_folder} cannot be used (Not a directory)" in warning
    assert "TIDEGATE_WITNESS_FOLDER" in warning


def test_the_next_plan_repairs_the_witness_after_a_crash(
    tally: Tally, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_next(settings, 2)

    class Died(BaseException):
        pass

    def die(_witness: Witness, _mark: Mark) -> None:
        raise Died

    tally.plan(run_id="crashing")
    tally.process(3, ROW)
    with monkeypatch.context() as patched:
        patched.setattr(Witness, "advance", die)
        with pytest.raises(Died):
            tally.commit(3)
    assert marked(settings) == 2
    assert tally.commit(3).already_committed
    assert marked(settings) == 3

    (file,) = tally.store.witness.folder.glob("tally.*.json")
    file.unlink()
    tally.plan(run_id="after the crash")
    assert marked(settings) == 3

    whole = file.read_text()
    changed = [whole.replace('"version": 1', '"version": 2'), whole.replace('"tally"', '"other"')]
    assert whole not in changed
    for damage in ("", "{", "[]", '{"version": 1}', *changed):
        file.write_text(damage)
        assert_halted(settings, rf"{file}.* is damaged.*remove this file")
    file.unlink()
    assert commit_next(settings) == 4

    with migrations.connected(settings) as connection:
        done = cursors.mark(connection, "tally")
    assert done is not None
    tally.store.witness.advance(replace(done, attempt=2))
    assert_halted(settings, "txid 4 is that of attempt 1, but .* a redo has put attempt 2 in its place, so the redo is lost")


# the file


def marked(settings: Settings) -> int:
    (file,) = settings.marks_folder.glob("tally.*.json")
    return int(json.loads(file.read_text())["txid"])


def mark(txid: int, attempt: int = 1, history: str = "h") -> Mark:
    return Mark("tally", history, "e", txid, attempt, "2026-01-01T00:00:00+00:00")


def test_marks_only_go_forward_and_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Witness(tmp_path / "witness", trusts_promotions=False)

    def place() -> tuple[int, int]:
        found = folder.mark_of("tally", "h")
        assert found is not None
        return found.place

    for written, expected in [((3, 1), (3, 1)), ((2, 9), (3, 1)), ((3, 2), (3, 2)), ((3, 1), (3, 2)), ((4, 1), (4, 1))]:
        folder.advance(mark(*written))
        assert place() == expected
    assert stat.S_IMODE(folder.file_of("tally", "h").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: [folder.advance(mark(txid)) for txid in range(n, 200, 8)], range(1, 9)))
    assert place() == (199, 1)

    monkeypatch.setattr(commit_witness, "LOCK_PATIENCE_SECONDS", 0.2)
    with (folder.folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        folder.advance(mark(200))
        assert place() == (199, 1)
    folder.advance(mark(201))
    assert place() == (201, 1)

    folder.file_of("tally", "h").unlink()
    folder.advance(replace(mark(1), pipeline="tally_2"))
    for number in range(50):
        folder.advance(mark(1, history=f"h{number}"))
    assert len(list(folder.folder.glob("*.json"))) == 51, "fresh databases of a test push no other's mark out"
