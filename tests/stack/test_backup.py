"""Ledger and states can be backed up and restored, and commits lost in between are reported."""

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from tests.cli.conftest import check_schema
from tests.conftest import register_pipelines
from tests.integration.conftest import TALLY, Tally
from tests.stack.conftest import Stack
from tests.statements import execute
from tidegate.stack import backup as backups
from tidegate.stack.layout import Layout
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import HoleDetected, SchemaOutOfDate

ROW = [("a", 1, 1, 1, 1)]
CRAFTED = """
    CREATE TABLE said (line text);
    CREATE FUNCTION act() RETURNS int LANGUAGE plpgsql AS
        $$ BEGIN EXECUTE 'COPY public.said FROM PROGRAM ''true'''; RETURN 1; END $$;
    CREATE MATERIALIZED VIEW acted AS SELECT act() AS one;
"""


def administrator(stack: Stack, database: str = "postgres") -> dict[str, Any]:
    return {**stack.settings.conninfo(user="postgres"), "dbname": database}


def commit(tally: Tally, *txids: int) -> None:
    assert tally.plan(len(txids), run_id=f"run {txids}") == list(txids)
    for txid in txids:
        tally.process(txid, ROW)
        tally.commit(txid)


@pytest.mark.promise("verb:backup", "verb:restore", "json:backup", "json:restore")
def test_a_restored_backup_names_the_commits_lost_since(running: Stack, tmp_path: Path) -> None:
    register_pipelines(running.settings, TALLY)
    file, tidegate = tmp_path / "backup", running.tidegate
    with StateStore.connect(running.settings) as store:
        tally = Tally(store)
        commit(tally, 1, 2)
        made = tidegate("backup", str(file), "--json")
        assert made.returncode == 0, made.stderr
        check_schema("backup", json.loads(made.stdout))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert tidegate("backup", str(file)).returncode == 2  # never over another one
        commit(tally, 3)

    assert tidegate("restore", str(file)).returncode == 2  # it needs --yes
    done = tidegate("restore", str(file), "--yes", "--json")
    assert done.returncode == 0, done.stderr
    check_schema("restore", json.loads(done.stdout))
    kept = next(word.rstrip(".") for word in done.stderr.split() if word.startswith("tidegate_before_"))

    with StateStore.connect(running.settings) as store:
        tally = Tally(store)
        assert store.committed("tally") == 2
        assert tally.state() == [("a", 2, 2, 1, 1, 2)]
        with pytest.raises(HoleDetected, match="txid 3 is lost"):
            tally.plan(run_id="next")
        accepted = tidegate("migrate", "--accept-epoch")
        assert accepted.returncode == 0, accepted.stderr
        assert "tally goes on after txid 2; given up:" in accepted.stderr
        assert "txid 3 is lost" in accepted.stderr
        commit(tally, 3, 4)
    with StateStore.connect(replace(running.settings, pg_database=kept), user="tidegate_owner") as store:
        assert store.committed("tally") == 3  # nothing was thrown away
    with pytest.raises(psycopg2.OperationalError, match="permission denied for database"):
        psycopg2.connect(**running.settings.conninfo(user="airflow"))


@pytest.mark.promise("verb:restore")
def test_a_damaged_backup_changes_nothing(running: Stack, tmp_path: Path) -> None:
    file = tmp_path / "backup"
    assert running.tidegate("backup", str(file)).returncode == 0
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    done = running.tidegate("restore", str(file), "--yes")
    assert done.returncode == 1
    assert "pg_restore failed" in done.stderr
    assert execute(administrator(running), "SELECT datname FROM pg_database WHERE datname LIKE 'tidegate_restored%'") == []
    with StateStore.connect(running.settings):
        pass


@pytest.mark.promise("verb:restore")
def test_a_useless_dump_changes_nothing(running: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_pipelines(running.settings, TALLY)
    other, newer = tmp_path / "airflow", tmp_path / "newer"
    with other.open("wb") as output:
        backups._run(Layout.load(running.home).postgres, "pg_dump", ["--format=custom", "--dbname=airflow"], stdout=output)
    assert running.tidegate("backup", str(newer)).returncode == 0

    refused = running.tidegate("restore", str(other), "--yes")
    assert (refused.returncode, "holds no ledger of Tidegate's. Nothing has changed." in refused.stderr) == (2, True)
    monkeypatch.setattr(backups.schema_revision, "DIGEST", "0123456789ab")
    with pytest.raises(SchemaOutOfDate, match=r"made by another revision.*Nothing has changed"):
        backups.restore(running.settings, newer)

    monkeypatch.undo()
    with StateStore.connect(running.settings) as store:
        assert [lag.pipeline for lag in store.lag(["tally"])] == ["tally"]


@pytest.mark.promise("verb:restore")
def test_a_dump_has_no_more_rights_than_the_ledgers_owner(running: Stack, tmp_path: Path) -> None:
    file = tmp_path / "dump"
    execute(administrator(running), "CREATE DATABASE crafted")
    execute(administrator(running, "crafted"), CRAFTED)
    with file.open("wb") as dump:
        backups._run(Layout.load(running.home).postgres, "pg_dump", ["--format=custom", "--dbname=crafted"], stdout=dump)

    done = running.tidegate("restore", str(file), "--yes")
    assert done.returncode != 0
    assert "permission denied to COPY to or from an external program" in done.stderr
