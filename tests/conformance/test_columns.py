"""Columns that states get and lose in place, beside batches, redos, crashes and readers; DuckDB says what they come to."""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import duckdb
import psycopg2
import pyarrow as pa
import pytest

from tests.conformance.conftest import Flow, Stream
from tests.integration.conftest import contents, until
from tests.integration.test_migrations import shape
from tests.store import PipelineSpec, StateSpec, project, range_partitions
from tidegate import migrations
from tidegate.jobs import History, Newest, Pipeline, Ranges, Rows
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import DeclarationChanged, Unprocessed

# A row of the source, by column; columns that a declaration lacks are not staged.
Line = dict[str, Any]
BASE = {"cents": "bigint", "note": "text"}
COME, GONE = {**BASE, "city": "text"}, {"cents": "bigint"}
_TYPES = {"shop": pa.string(), "at": pa.int64(), "cents": pa.int64(), "note": pa.string(), "city": pa.string()}
# For each state: its columns before the value columns, and by which of these the greatest row is the one; NULL is least.
_GREATEST: dict[str, tuple[list[str], list[str], list[str]]] = {
    "log": (["txid", "position", "at"], ["txid", "position"], []),
    "newest": (["shop", "at"], ["shop"], ["at"]),
    "versions": (["shop", "at"], ["shop", "at"], []),
}


def declare(columns: dict[str, str], *, version: int = 1) -> Pipeline:
    """Declare a pipeline with each kind of state that keeps rows as they came, with these value columns."""
    opaque: dict[str, Any] = {"kind": "opaque", "changes": True}
    states = {
        "log": Rows({"at": "bigint", **columns}, range_partitions=Ranges("at", 4)),
        "newest": Newest({"shop": "text"}, columns=columns, order_by={"at": "bigint"}, **opaque),
        "versions": History({"shop": "text"}, columns=columns, order_by={"at": "bigint"}, **opaque),
    }
    return Pipeline("shop", Stream("opaque"), states, version=version)


@dataclass
class Team:
    """A project, whose migrations a test writes and runs, and the lines of each committed batch, with the columns they had."""

    settings: Settings
    batches: dict[int, list[Line]]
    flow: Flow

    def declare(self, columns: dict[str, str], **how: Any) -> None:
        self.flow = Flow(self.flow.settings, declare(columns, **how).spec)

    def migrate(self, columns: dict[str, str], **how: Any) -> None:
        spec = declare(columns, **how).spec
        migrations.new_revision(self.settings, [spec], "columns")
        migrations.upgrade(self.settings, [spec])
        self.declare(columns, **how)

    def prepare(self, lines: Sequence[Line], *, txid: int | None = None) -> int:
        """Plan a batch, unless its txid is given, and seal an attempt at it; return its txid."""
        if txid is None:
            last = self.flow.store.last_opened("shop")
            (txid,) = self.flow.plan(1, run_id=f"run {last.txid if last else 0}")
        attempt = self.flow.start(txid)
        self.flow.seal(attempt, *(self.flow.stage(attempt, state, staged(state, lines)) for state in self.flow.spec.states))
        return txid

    def merge(self, *lines: Line) -> None:
        txid = self.prepare(lines)
        self.flow.commit(txid)
        self.count(txid, lines)

    def count(self, txid: int, lines: Sequence[Line]) -> None:
        names = {"shop", "at", *(value.name for value in self.flow.spec.state("log").values)}
        self.batches[txid] = [{name: value for name, value in line.items() if name in names} for line in lines]

    def check(self) -> None:
        """Compare each state with what DuckDB makes of the committed lines, and each change's row after it."""
        every = [
            {**dict.fromkeys(_TYPES), **line, "txid": txid, "position": place}
            for txid, lines in self.batches.items()
            for place, line in enumerate(lines)
        ]
        schema = pa.schema([*_TYPES.items(), ("txid", pa.int64()), ("position", pa.int64())])
        with duckdb.connect() as database:
            database.register("lines", pa.Table.from_pylist(every, schema))
            for name, (first, key, order) in _GREATEST.items():
                values = [v.name for v in self.flow.spec.state(name).values if v.name != "at"]
                by, desc, shown = quoted(key), quoted([*order, *values], " DESC NULLS LAST"), quoted([*first, *values])
                greatest = f"row_number() OVER (PARTITION BY {by} ORDER BY {desc}) = 1"
                expected = database.sql(f"SELECT {shown} FROM lines QUALIFY {greatest}").fetchall()
                rows = self.flow.rows(name)
                assert sorted(map(repr, expected)) == sorted(repr(tuple(row[c] for c in [*first, *values])) for row in rows)
                if name != "log":
                    self._check_changes(name, [*first, *values], rows)

    def _check_changes(self, name: str, columns: list[str], rows: list[Line]) -> None:
        """The last recorded change of each key has the key's row, but for columns that came after it."""
        key = [column.name for column in self.flow.spec.state(name).keys]
        last = {tuple(row[k] for k in key): row for row in self.flow.store.changes(self.flow.spec.state(name))}
        found = sorted(repr([row[c] for c in columns]) for row in last.values())
        assert found == sorted(repr([row[c] for c in columns]) for row in rows)

    def asked(self, statement: str, user: str | None = None) -> list[tuple[Any, ...]]:
        conninfo = self.settings.conninfo(user=user or self.settings.pg_owner)
        with closing(psycopg2.connect(**conninfo)) as connection, connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []


def quoted(columns: Sequence[str], then: str = "") -> str:
    return ", ".join(f'"{column}"{then}' for column in columns)


def staged(state: StateSpec, lines: Sequence[Line]) -> list[list[Any]]:
    """Return what a task stages of lines: each, or for each key the greatest one; NULL is least."""
    values = [value.name for value in state.values]
    if state.appends:
        return [[place, *(line.get(name) for name in values)] for place, line in enumerate(lines)]
    keys, found = [key.name for key in state.keys], {}
    for line in lines:
        key, row = tuple(line[name] for name in keys), [line.get(name) for name in values]
        found[key] = max([row, found.get(key, row)], key=lambda each: [(v is not None, v) for v in each])
    return [[*key, *row] for key, row in found.items()]


@pytest.fixture
def team(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    for folder in ("pipelines", "migrations"):
        (settings.home / folder).mkdir()
    monkeypatch.setenv(project.HOME_VARIABLE, str(settings.home))
    spec = declare(BASE).spec
    migrations.new_revision(settings, [spec], "shop")
    migrations.upgrade(settings, [spec])
    monkeypatch.setattr(range_partitions, "TXIDS", 1)
    flow = Flow(settings, spec)
    team = Team(settings, {}, flow)
    team.merge(LINES[0], LINES[1])
    team.merge(LINES[2])
    team.check()
    yield team
    team.flow.close()
    flow.close()


LINES: list[Line] = [
    {"shop": "a", "at": 1, "cents": 1, "note": "x", "city": "Rome"},
    {"shop": "b", "at": 2, "cents": 2, "note": None, "city": None},
    {"shop": "a", "at": 5, "cents": 3, "note": "y", "city": "Oslo"},
    {"shop": "b", "at": 1, "cents": 4, "note": "z", "city": "Bern"},
    {"shop": "c", "at": 9, "cents": 5, "note": "z", "city": "Bern"},
    {"shop": "a", "at": 7, "cents": None, "note": "q", "city": "Rome"},
]


# columns come and go


@pytest.mark.promise("decision:0051")
def test_a_column_comes_without_a_value_in_rows_from_before(team: Team) -> None:
    old, sealed = team.flow, team.prepare(LINES[3:5])
    team.migrate(COME, version=2)
    assert migrations.new_revision(team.settings, [team.flow.spec], "nothing") is None
    team.check()
    with pytest.raises(DeclarationChanged, match="this code's declaration is not the registered one"):
        old.commit(sealed)
    with pytest.raises(Unprocessed, match="computed by another declaration"):
        team.flow.commit(sealed)
    assert team.flow.store.commit_ready(team.flow.spec, "test") == []
    team.prepare(LINES[3:5], txid=sealed)
    team.flow.commit(sealed)
    team.count(sealed, LINES[3:5])
    team.check()
    team.merge(LINES[0], LINES[2])  # the same lines again, with their city
    team.check()
    assert [row["city"] for row in team.flow.rows("newest")] == ["Oslo", None, "Bern"]


# processes of both declarations at once


@pytest.mark.promise("decision:0051")
def test_a_commit_of_old_code_during_the_migration_waits_and_is_refused(team: Team) -> None:
    sealed, old = team.prepare(LINES[3:5]), team.flow
    spec = declare(COME, version=2).spec
    migrations.new_revision(team.settings, [spec], "columns")
    errors: list[BaseException] = []
    register = migrations.registration.register

    def commit() -> None:
        try:
            old.commit(sealed)
        except BaseException as error:  # noqa: BLE001 - what it is, the test says
            errors.append(error)

    thread = threading.Thread(target=commit)

    def begin_commit(*arguments: Any) -> bool:
        thread.start()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        until(lambda: team.asked(waiting, "postgres"))
        return register(*arguments)

    with patch.object(migrations.registration, "register", begin_commit):
        migrations.upgrade(team.settings, [spec])
    thread.join(60)
    assert [type(error) for error in errors] == [DeclarationChanged]
    team.declare(COME, version=2)
    team.prepare(LINES[3:5], txid=sealed)
    team.flow.commit(sealed)
    team.count(sealed, LINES[3:5])
    team.check()


def test_no_migration_leaves_a_registered_pipeline_without_its_column(team: Team) -> None:
    gone: PipelineSpec = declare(GONE, version=2).spec
    migrations.new_revision(team.settings, [gone], "columns")
    before = contents(team.settings), shape(team.settings)
    again = declare({**GONE, "city": "text"}, version=2).spec
    for spec in (gone, again):
        written = migrations.new_revision(team.settings, [spec], "another")
        assert (written is None) == (spec is gone)
        assert (contents(team.settings), shape(team.settings)) == before
    written.unlink()
    unconfirmed = [replace(gone, version=1)]
    with pytest.raises(DeclarationChanged, match=r"loses note.*raise the pipeline's version above 1"):
        migrations.upgrade(team.settings, unconfirmed)
    (why,) = migrations.upgrade_all_but_broken(team.settings, unconfirmed).values()
    assert re.search(r"loses note.*raise the pipeline's version above 1", why)
    assert (contents(team.settings), shape(team.settings)) == before
    assert migrations.upgrade_all_but_broken(team.settings, [gone]) == {}
