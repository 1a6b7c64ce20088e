"""Restores and copies of the database are harmless, or noticed before any batch is planned or processed."""

import fcntl
import json
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.conftest import register_pipelines
from tests.integration.conftest import TALLY, Tally, commit_next
from tests.postgres_versions import AnyPostgres, running
from tests.servers import Server
from tests.statements import execute
from tests.store import Mark, Witness, commit_witness, cursors, errors
from tidegate import migrations
from tidegate.state_store import Settings, StateStore


class Machine(AnyPostgres):
    def copy(self, source: Path, target: Path) -> None:
        """Copy a data folder while the server stands still; what is at the target goes."""
        self.stop()
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", source, target], check=True)
        self.start()


@pytest.fixture
def machine(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Machine]:
    """A server with pipeline tally, whose txids 1 and 2 have committed."""
    with running(Machine(tmp_path, free_port())) as postgres:
        migrations.upgrade(postgres.settings, [])
        register_pipelines(postgres.settings, TALLY)
        commit_next(postgres.settings, 2)
        yield postgres


def assert_halted(settings: Settings, message: str) -> None:
    with StateStore.connect(settings) as store:
        tally, next_txid = Tally(store), store.committed("tally") + 1
        steps = [
            partial(tally.plan, run_id="next"),
            partial(tally.commit, next_txid),
            tally.commit_ready,
            partial(store.skip_batch, TALLY.spec, next_txid, "test", "x"),
            partial(store.replay_quarantined, TALLY.spec, "test", "x"),
            *(partial(tally.start, txid) for txid in store.uncommitted("tally", 1)),
        ]
        tally.refuses(errors.HoleDetected, message, *steps)


@pytest.mark.promise("I9", "fault:database-is-restored-copied-or-promoted:after", "decision:0023")
def test_an_older_copy_in_the_place_of_the_database_is_noticed(machine: Machine, tmp_path: Path) -> None:
    """System identifier, timeline and database are the same: only the witness knows of later commits, and of other ones."""
    settings = machine.settings

    def lose_a_commit(txid: int) -> None:
        machine.copy(machine.data, tmp_path / "backup")
        assert commit_next(settings) == txid
        machine.copy(tmp_path / "backup", machine.data)

    with StateStore.connect(settings) as store:
        assert Tally(store).plan() == [3]
    lose_a_commit(3)
    (file,) = settings.marks_folder.glob("tally.*.json")
    assert_halted(
        settings,
        rf"stands at txid 2, but {file} says that txid 3 committed at .*, so txid 3 is lost\. Put back a newer backup\. "
        r"Or give that up: .*files in a done folder.*tidegate migrate --accept-epoch",
    )
    migrations.upgrade(settings, [])
    assert_halted(settings, "txid 3 is lost")  # an ordinary migration accepts nothing

    (story,) = migrations.accept_epoch(settings, "an operator").values()
    assert re.match("goes on after txid 2; given up: it stands at txid 2.*txid 3 is lost", story)
    assert migrations.accept_epoch(settings, "an operator") == {}
    assert commit_next(settings, 2) == 4
    actions = execute(settings.conninfo(), "SELECT pipeline, txid, action, owner, reason FROM tidegate.operator_action")
    assert actions == [("tally", 2, "accept", "an operator", story)]

    lose_a_commit(5)
    other_machine = replace(settings, witness_folder=tmp_path / "other machine")
    assert commit_next(other_machine, 2) == 6  # a machine that never committed has no marks
    assert_halted(settings, r"its txid 5 committed at .*, but .* says that txid 5 committed at .*, and those")
    migrations.accept_epoch(settings, "an operator")
    assert [commit_next(settings), commit_next(other_machine)] == [7, 8]


@pytest.mark.promise("fault:database-is-restored-copied-or-promoted:processing")
def test_a_promoted_standby_is_noticed(machine: Machine, tmp_path: Path) -> None:
    standby = tmp_path / "standby"
    machine.copy(machine.data, standby)
    (standby / "standby.signal").touch()
    assert commit_next(machine.settings) == 3
    machine.copy(standby, machine.data)  # the primary is gone, so no further commits reach it
    machine.execute("SELECT pg_promote()")
    assert_halted(machine.settings, "txid 3 is lost|restored, promoted or copied")
    machine.settings.stack_folder.joinpath("witness").rename(tmp_path / "lost")
    assert_halted(machine.settings, "restored, promoted or copied.*commits after txid 2 may be lost")


@pytest.mark.promise("fault:database-is-restored-copied-or-promoted:processing", "decision:0023")
@pytest.mark.promise("fault:database-is-restored-copied-or-promoted:commit")
def test_a_copy_within_the_server_is_noticed(tally: Tally, settings: Settings, server: Server) -> None:
    tally.having(3, 2, 2)
    tally.close()
    with server.database(settings.pg_database) as name:
        copy = replace(settings, pg_database=name)
        assert_halted(copy, "restored, promoted or copied.*commits after txid 2 may be lost.*--accept-epoch")
        assert commit_next(settings) == 3  # the original was never halted
        assert_halted(copy, "txid 3 is lost")

        # Once accepted, the copy has its own history, and neither database disturbs the other.
        assert "txid 3 is lost" in migrations.accept_epoch(copy, "an operator")["tally"]
        assert [commit_next(copy, 2), commit_next(settings)] == [4, 4]


def test_a_database_does_not_disturb_its_successor_or_another_with_the_same_folder(
    tally: Tally, settings: Settings, server: Server, template: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Same pipeline name and folder, different databases; or a pipeline that is registered again: it begins a new history."""
    commit_next(settings, 3)
    with server.database(template) as name:
        other = replace(settings, pg_database=name)
        register_pipelines(other, TALLY)
        assert [commit_next(other), commit_next(settings), commit_next(other)] == [1, 4, 2]

    for schema in ("tidegate", "state", "staging"):
        tally.sql(f"DROP SCHEMA {schema} CASCADE")
    migrations.upgrade(settings, [])
    register_pipelines(settings, TALLY)
    assert commit_next(settings) == 1

    (tmp_path / "file").touch()
    blocked = replace(settings, witness_folder=tmp_path / "file" / "witness")
    assert commit_next(blocked, 2) == 3
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert re.search(rf"{blocked.witness_folder} cannot be used \(Not a directory\).*TIDEGATE_WITNESS_FOLDER", warning)


def test_the_next_plan_repairs_the_witness(tally: Tally, settings: Settings) -> None:
    tally.having(3, 3, 2)
    (file,) = settings.marks_folder.glob("tally.*.json")

    def marked() -> int:
        return int(json.loads(file.read_text())["txid"])

    with patch.object(Witness, "advance", side_effect=AttributeError), pytest.raises(AttributeError):
        tally.commit(3)  # as if the process died there
    assert marked() == 2
    assert tally.commit(3).already_committed
    assert marked() == 3
    file.unlink()
    tally.plan(run_id="after the crash")
    assert marked() == 3

    whole = file.read_text()
    changed = [whole.replace('"version": 1', '"version": 2'), whole.replace('"tally"', '"other"')]
    assert whole not in changed
    for damage in ("", "{", "[]", '{"version": 1}', *changed):
        file.write_text(damage)
        assert_halted(settings, rf"{file}.* is damaged.*remove this file")
    file.unlink()
    assert commit_next(settings) == 4

    with migrations.connected(settings) as connection:
        tally.store.witness.advance(replace(cursors.mark(connection, "tally"), attempt=2))
    assert_halted(settings, "txid 4 is that of attempt 1, but .* a redo has put attempt 2 in its place, so the redo is lost")


def test_marks_only_go_forward_and_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Witness(tmp_path / "witness", trusts_promotions=False)

    def place_after(txid: int, attempt: int = 1) -> tuple[int, int]:
        folder.advance(Mark("tally", "h", "e", txid, attempt, "2026-01-01T00:00:00+00:00"))
        return folder.mark_of("tally", "h").place

    for written, expected in [((3, 1), (3, 1)), ((2, 9), (3, 1)), ((3, 2), (3, 2)), ((3, 1), (3, 2)), ((4, 1), (4, 1))]:
        assert place_after(*written) == expected
    assert stat.S_IMODE(folder.file_of("tally", "h").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda first: [place_after(txid) for txid in range(first, 200, 8)], range(1, 9)))
    assert place_after(1) == (199, 1)
    monkeypatch.setattr(commit_witness, "LOCK_PATIENCE_SECONDS", 0.2)
    with (folder.folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert place_after(200) == (199, 1)
    assert place_after(201) == (201, 1)
