"""Ledger and states can be backed up and restored, and commits lost in between are reported."""

import re
import stat
from dataclasses import replace
from pathlib import Path

import psycopg2
import pytest

from tests.conftest import register_pipelines
from tests.integration.conftest import TALLY, Tally, commit_next
from tests.servers import Server
from tests.stack.conftest import Stack
from tests.statements import execute
from tidegate.stack import backup as backups
from tidegate.stack.layout import Layout
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import HoleDetected, SchemaOutOfDate

pytestmark = pytest.mark.soak
CRAFTED = """
    CREATE TABLE said (line text);
    CREATE FUNCTION act() RETURNS int LANGUAGE plpgsql AS
        $$ BEGIN EXECUTE 'COPY public.said FROM PROGRAM ''true'''; RETURN 1; END $$;
    CREATE MATERIALIZED VIEW acted AS SELECT act() AS one;
"""


@pytest.mark.promise("verb:backup", "verb:restore", "json:backup", "json:restore")
def test_a_restored_backup_names_the_commits_lost_since(running: Stack, tmp_path: Path) -> None:
    register_pipelines(running.settings, TALLY)
    file, tidegate = tmp_path / "backup", running.tidegate
    assert commit_next(running.settings, 2) == 2
    running.json("backup", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert tidegate("backup", str(file)).returncode == 2  # never over another one
    assert commit_next(running.settings) == 3
    assert tidegate("restore", str(file)).returncode == 2  # it needs --yes
    restored = running.json("restore", str(file), "--yes")

    with StateStore.connect(running.settings) as store:
        tally = Tally(store)
        assert tally.state() == [("a", 2, 2, 1, 1, 2)]
        with pytest.raises(HoleDetected, match="txid 3 is lost"):
            tally.plan(run_id="next")
    accepted = tidegate("migrate", "--accept-epoch")
    assert accepted.returncode == 0, accepted.stderr
    assert re.search("tally goes on after txid 2; given up:.*txid 3 is lost", accepted.stderr)
    assert commit_next(running.settings, 2) == 4
    with StateStore.connect(replace(running.settings, pg_database=restored["kept"]), user="tidegate_owner") as store:
        assert store.committed("tally") == 3  # nothing was thrown away
    with pytest.raises(psycopg2.OperationalError, match="permission denied for database"):
        psycopg2.connect(**running.settings.conninfo(user="airflow"))


@pytest.mark.promise("verb:restore")
def test_a_damaged_or_crafted_dump_changes_nothing(running: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in a dump runs with no more rights than the ledger's owner has."""
    register_pipelines(running.settings, TALLY)
    postgres, backup, administrator = Layout.load(running.home).postgres, tmp_path / "backup", Server(running.settings)
    administrator.execute("CREATE DATABASE crafted")
    execute({**running.settings.conninfo(user="postgres"), "dbname": "crafted"}, CRAFTED)
    for name in ("airflow", "crafted"):
        with (tmp_path / name).open("wb") as dump:
            backups._run(postgres, "pg_dump", ["--format=custom", f"--dbname={name}"], stdout=dump)
    assert running.tidegate("backup", str(backup)).returncode == 0
    (tmp_path / "half").write_bytes(backup.read_bytes()[: backup.stat().st_size // 2])

    for name, code, why in (
        ("half", 1, "pg_restore failed"),
        ("airflow", 2, "holds no ledger of Tidegate's. Nothing has changed."),
        ("crafted", 1, "permission denied to COPY to or from an external program"),
    ):
        done = running.tidegate("restore", str(tmp_path / name), "--yes")
        assert (done.returncode, why in done.stderr) == (code, True), done.stderr
    monkeypatch.setattr(backups.schema_revision, "DIGEST", "0123456789ab")
    with pytest.raises(SchemaOutOfDate, match=r"made by another revision.*Nothing has changed"):
        backups.restore(running.settings, backup)

    monkeypatch.undo()
    assert administrator.execute("SELECT datname FROM pg_database WHERE datname LIKE 'tidegate_restored%'") == []
    with StateStore.connect(running.settings) as store:
        assert [lag.pipeline for lag in store.lag(["tally"])] == ["tally"]
