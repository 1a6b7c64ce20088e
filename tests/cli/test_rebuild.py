"""The verb rebuild: a changed aggregate of a pipeline that has committed, in a project of its own, from end to end."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import psycopg2
import pytest

from tests.cli.conftest import CommandLine, write_file
from tidegate.state_store import Settings

SALES = """
from tidegate import Count, Files, Max, Min, Pipeline, Sum, State, Tumbling

PIPELINE = Pipeline(
    name="sales",
    source=Files("data/sales", glob="*.csv", format="csv", max_files=1, schema={schema}),
    version={version},
    on_poison="quarantine",
    check={{"priced": "cents >= {least}"}},
    states={{
        "daily": State(key={key}, aggregates={aggregates}),
        "total": State(key={{}}, aggregates={{"sold": Count()}}),
    }},
)
"""
DAYS = {"day": "date", "shop": "string", "cents": "int"}
SCHEMA = repr(DAYS)
KEY = '{"day": "date", "shop": "text"}'
COUNT = '{"sold": Count()}'
MORE = '{"sold": Count(), "cents": Sum("cents", "bigint"), "dearest": Max("cents", "integer")}'


@pytest.fixture
def project(settings: Settings) -> CommandLine:
    line = CommandLine(settings, {"TIDEGATE_HOME": str(settings.home)})
    (settings.home / "pipelines").mkdir()
    declare(settings.home)
    migrate(line, "sales")
    return line


def declare(home: Path, **changed: Any) -> None:
    usual = {"schema": SCHEMA, "version": 1, "least": 0, "key": KEY, "aggregates": COUNT}
    (home / "pipelines/sales.py").write_text(SALES.format(**usual | changed))


def migrate(project: CommandLine, message: str) -> None:
    project.json("migrate", "--new", message)
    project.json("migrate")


def sell(project: CommandLine, day: int) -> None:
    rows = [f"2026-01-{day:02d},{shop},{cents}" for shop, cents in (("Lisbon", 100 * day), ("Porto", 7), ("Porto", 9 - day))]
    write_file(project.settings.home, f"sales/{day:02d}.csv", "day,shop,cents", *rows)


@contextmanager
def connected(project: CommandLine, user: str) -> Iterator[Any]:
    connection = psycopg2.connect(**project.settings.conninfo(user=user))
    try:
        with connection, connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()


def rows(project: CommandLine, table: str = "daily") -> list[tuple[Any, ...]]:
    with connected(project, project.settings.pg_user) as cursor:
        cursor.execute(f"SELECT * FROM state.{table}")
        names = [column.name for column in cursor.description]
        return sorted(tuple(v for name, v in zip(names, row, strict=True) if name != "txid") for row in cursor.fetchall())


def oracle(project: CommandLine, select: str) -> list[tuple[Any, ...]]:
    files = project.settings.home / "data/sales/*.csv"
    return sorted(duckdb.sql(select.replace("SALES", f"read_csv('{files}')")).fetchall())


def asked(project: CommandLine, statement: str) -> list[tuple[Any, ...]]:
    with connected(project, project.settings.pg_owner) as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


ALL = "SELECT day, shop, count(*), sum(cents)::bigint, max(cents) FROM SALES WHERE cents >= {} GROUP BY ALL"


@pytest.mark.promise("verb:rebuild", "json:rebuild")
def test_an_added_aggregate_counts_from_the_first_batch_on(project: CommandLine) -> None:
    for day in (1, 2, 3):
        sell(project, day)
    assert project.json("run", "sales")["committed"] == [1, 2, 3]
    before = rows(project)
    declare(project.settings.home, aggregates=MORE)

    refused = project.refused("migrate", "--new", "more", exit_code=1)
    assert "Let them be computed again: raise its version, and run: tidegate rebuild sales --yes." in refused
    assert "sales cannot be rebuilt: first raise its version above 1" in project.refused("rebuild", "sales", exit_code=1)
    declare(project.settings.home, aggregates=MORE, version=2)
    unconfirmed = project.refused("rebuild", "sales")
    assert "3 batches of sales would be computed again for version 2, as pipeline sales__v2." in unconfirmed

    sell(project, 4)
    done = project.json("rebuild", "sales", "--yes")
    assert done == {"pipeline": "sales", "rebuild": "sales__v2", "committed": 3, "rebuilt": 3}
    assert rows(project) == before
    assert [row[:3] for row in rows(project, "daily__v2")] == before
    asked(project, "CREATE INDEX by_shop ON state.daily (shop)")
    asked(project, "GRANT SELECT (shop) ON state.daily TO PUBLIC")
    migrate(project, "more")
    assert rows(project) == oracle(project, ALL.format(0) + " HAVING day < '2026-01-04'")
    assert project.json("run", "sales")["committed"] == [4]
    assert rows(project) == oracle(project, ALL.format(0))
    assert rows(project, "total") == oracle(project, "SELECT true, count(*) FROM SALES WHERE cents >= 0")
    names = "SELECT relname FROM pg_class WHERE relnamespace = 'state'::regnamespace ORDER BY 1"
    assert [name for (name,) in asked(project, names)] == ["by_shop", "daily", "pk_daily", "pk_total", "total"]
    granted = "SELECT has_column_privilege('pg_monitor', 'state.daily', 'shop', 'SELECT')"
    assert asked(project, granted) == [(True,)]
    assert "Retired: sales__v2" in project("status").stderr
    staged = "SELECT count(*) FROM pg_class WHERE relnamespace = 'staging'::regnamespace AND relname ~ '__v'"
    assert asked(project, staged) == [(0,)]
    assert project.json("get", "sales", "daily", "2026-01-04", "Lisbon")[0]["row"]["cents"] == 400
