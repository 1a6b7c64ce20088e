"""A disk that is full, under Postgres: nothing of the step is left, the error names the disk, and with room it goes on."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest
from psycopg2 import sql

from tests.integration.conftest import Tally, contents
from tests.small_disk import fill, mounted
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import StoreUnavailable

ROWS = [(f"shop {number}", 1, 1, 1, 1) for number in range(50)]


@pytest.fixture
def disk(settings: Settings) -> Iterator[Path]:
    """A disk on which the tables are that a test makes."""
    with mounted("2m") as disk, closing(psycopg2.connect(**settings.conninfo(user="postgres"))) as administrator:
        administrator.autocommit = True
        with administrator.cursor() as cursor:
            cursor.execute("SHOW data_directory")
            owner = Path(cursor.fetchall()[0][0]).stat()
            (place := disk / "tables").mkdir()
            os.chown(place, owner.st_uid, owner.st_gid)
            database = sql.Identifier(settings.pg_database)
            cursor.execute("CREATE TABLESPACE small LOCATION %s", [str(place)])
            cursor.execute("GRANT CREATE ON TABLESPACE small TO PUBLIC")
            cursor.execute(sql.SQL("ALTER DATABASE {} SET default_tablespace = small").format(database))
            try:
                yield disk
            finally:
                cursor.execute(sql.SQL("ALTER DATABASE {} RESET default_tablespace").format(database))
                for kind in ("TABLE", "INDEX"):
                    move = sql.SQL("ALTER {} ALL IN TABLESPACE small SET TABLESPACE pg_default")
                    cursor.execute(move.format(sql.SQL(kind)))
                cursor.execute("DROP TABLESPACE small")


@pytest.mark.promise("fault:disk-is-full:processing", "fault:disk-is-full:commit")
@pytest.mark.parametrize("step", ["processing", "commit"])
def test_what_finds_the_disk_full_leaves_nothing_and_is_tried_again(
    disk: Path, tally: Tally, settings: Settings, step: str
) -> None:
    tally.plan(1)
    if step == "commit":
        tally.process(1, ROWS)
    before = contents(settings)
    ballast = fill(disk)

    with pytest.raises(StoreUnavailable, match="No space left on device"):
        tally.commit(1) if step == "commit" else tally.process(1, ROWS)

    if step == "commit":
        assert contents(settings) == before
    ballast.unlink()
    if step == "processing":
        tally.process(1, ROWS)
    assert tally.commit(1).key_count == len(ROWS)
    assert len(tally.state()) == len(ROWS)
