"""Appended rows that are divided by ranges: each once and in its range, whatever is detached, redone or pruned."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any
from unittest.mock import patch

import psycopg2
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from tests.conformance.conftest import Flow, Stream
from tests.integration.conftest import contents
from tests.store import (
    PrunedRanges,
    Redo,
    Removal,
    SourceMetadata,
    StateReader,
    encode_metadata,
    key_lookup,
    partitions,
    range_partitions,
    registration,
)
from tidegate import migrations
from tidegate.jobs import Changes, Count, Pipeline, Ranges, Rows, State
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.jobs.sources.changes import removable
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import BadKey, GuardMismatch, Overflow, SchemaOutOfDate, SourceChanged, UsageError

AsOwner = Callable[[sa.Executable], sa.CursorResult]


class Sales(Flow):
    def merge(self, txid: int, rows: Sequence[tuple[Any, ...]], *, redo: bool = False) -> None:
        """Process a batch of these rows, and commit it or redo the committed one."""
        attempt = self.start(txid, mode="redo" if redo else "resume")
        self.seal(attempt, self.stage(attempt, "sales", [(place, *row) for place, row in enumerate(rows)]))
        if redo:
            self.owner.redo_batch(self.spec, txid, Redo("an operator", "it was wrong"))
        else:
            self.commit(txid)

    def stored(self) -> list[tuple[Any, ...]]:
        """Return the rows in the order of txid and position, without these."""
        names = [value.name for value in self.spec.states[0].values]
        return [tuple(row[name] for name in names) for row in self.rows("sales")]

    def partitions(self) -> dict[str, int]:
        """Return the number of rows in each partition, without the table's name."""
        statement = sa.text("SELECT tableoid::regclass::text, count(*) FROM state.sales GROUP BY 1 ORDER BY 1")
        with self.store.engine.connect() as connection:
            return {name.strip('"').partition("$")[2]: rows for name, rows in connection.execute(statement)}

    def prune(self, before: str, *, detaches: bool = False, without: Sequence[str] = ()) -> PrunedRanges:
        up_to_txid, _ = removable(self.store, self.spec, self.spec.states[0], 0, without=without)
        removal = Removal(before, up_to_txid, detaches, is_confirmed=True)
        return self.owner.prune_ranges(self.spec, self.spec.states[0], removal, "an operator", "a year is over")


@pytest.fixture
def sales(settings: Settings, register: Callable[..., None]) -> Iterator[Callable[..., Sales]]:
    """A function that registers rows with an amount and a column that divides them, and plans some batches."""
    opened: list[Sales] = []

    def begin(kind: str, every: str | int, batches: int = 1) -> Sales:
        rows = Rows({"amount": "bigint", "at": kind}, range_partitions=Ranges("at", every))
        pipeline = Pipeline("shop", Stream("opaque"), {"sales": rows})
        register(pipeline)
        opened.append(Sales(settings, pipeline.spec))
        opened[-1].plan(*[1] * batches)
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


def counted(settings: Settings) -> dict[str, list[str]]:
    attempts = ("tidegate.attempt", "tidegate.seal", "tidegate.batch")
    return {table: rows for table, rows in contents(settings).items() if table not in attempts}


DAYS = [date(1, 1, 1), date(1969, 12, 31), date(2024, 2, 29), date(2026, 11, 1), date(2026, 11, 30), date(9999, 12, 31)]
STARTS: dict[str, Callable[[date], date]] = {
    "day": lambda day: day,
    "week": lambda day: day - timedelta(days=day.weekday()),
    "month": lambda day: day.replace(day=1),
    "year": lambda day: day.replace(month=1, day=1),
}


@pytest.mark.promise("decision:0044")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["date", "timestamp", "timestamptz"])
@pytest.mark.parametrize("every", STARTS)
def test_each_row_is_in_the_partition_of_its_time(
    sales: Callable[..., Sales], as_owner: AsOwner, settings: Settings, kind: str, every: str
) -> None:
    as_owner(sa.text(f"ALTER DATABASE \"{settings.pg_database}\" SET timezone = 'Pacific/Kiritimati'"))
    as_owner(sa.text(f"ALTER DATABASE \"{settings.pg_database}\" SET datestyle = 'SQL, DMY'"))
    flow = sales(kind, every, batches=2)
    if kind == "date":
        values: list[Any] = DAYS
    else:
        zone = UTC if kind == "timestamptz" else None
        edges = [(0, 0, 0, 0), (23, 59, 59, 999_999)]
        values = [datetime(day.year, day.month, day.day, *edge, tzinfo=zone) for day in DAYS for edge in edges]
    rows = list(enumerate(values))
    flow.merge(1, rows)
    flow.merge(2, rows)
    with flow.store.engine.begin() as connection:
        connection.execute(sa.text("SET LOCAL timezone = 'UTC'"))
        stored = connection.execute(sa.text("SELECT amount, at FROM state.sales ORDER BY txid, position"))
        assert [tuple(row) for row in stored] == [*rows, *rows]
    starts = [STARTS[every](value.date() if isinstance(value, datetime) else value) for value in values * 2]
    assert flow.partitions() == Counter(f"{start.year:04}{start.month:02}{start.day:02}" for start in starts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("every", [1, 7, 1000, 10**12])
@pytest.mark.parametrize(("kind", "bits"), [("integer", 31), ("bigint", 63)])
def test_each_row_is_in_the_partition_of_its_number(sales: Callable[..., Sales], kind: str, bits: int, every: int) -> None:
    numbers = [-(2**bits), 1 - 2**bits, -every, -1, 0, 1, every - 1, every, 2**bits - 2, 2**bits - 1]
    rows = [(place, number) for place, number in enumerate(numbers) if -(2**bits) <= number < 2**bits]
    flow = sales(kind, every)
    flow.merge(1, rows)
    assert flow.stored() == rows
    assert flow.partitions() == Counter(str(number // every * every) for _, number in rows)


def test_a_partition_has_one_writer_and_no_readers_of_its_own(
    sales: Callable[..., Sales], settings: Settings, as_owner: AsOwner
) -> None:
    flow = sales("date", "month", batches=2)
    flow.merge(1, [(1, date(2026, 11, 27))])
    direct = 'UPDATE state."sales$20261101" SET amount = 0'
    statement = "SELECT tidegate.add_range('sales', 'sales$x', '2027-01-01', '2027-02-01', 'month')"
    for user, sql, refusal in (
        (settings.pg_user, direct, "permission denied"),
        (settings.pg_user, "UPDATE state.sales SET amount = 0", "by the commits of pipeline shop only"),
        (settings.pg_owner, direct, "by the commits of pipeline shop only"),
        (settings.pg_user, statement, "by the commits of its pipeline only"),
        (settings.pg_reader, direct, "permission denied"),
        (settings.pg_reader, 'SELECT amount FROM state."sales$20261101"', "permission denied"),
        (settings.pg_reader, statement, "permission denied"),
        (settings.pg_stager, statement, "permission denied"),
    ):
        with (
            closing(psycopg2.connect(**settings.conninfo(user=user))) as connection,
            connection.cursor() as cursor,
            pytest.raises(psycopg2.errors.InsufficientPrivilege, match=refusal),
        ):
            cursor.execute(sql)
    with closing(psycopg2.connect(**settings.conninfo(user=settings.pg_reader))) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT amount FROM state.sales")
        assert cursor.fetchall() == [(1,)]
    other = as_owner(sa.text("SELECT count(*) FROM tidegate.state_range"))
    assert other.scalar_one() == 1
    as_owner(sa.text('ALTER TABLE state."sales$20261101" DISABLE TRIGGER single_writer'))
    with pytest.raises(GuardMismatch, match=r'single_writer of table state\."sales\$20261101" is disabled'):
        flow.merge(2, [(1, date(2026, 11, 27))])


@pytest.mark.promise("decision:0044")
def test_a_reader_of_the_table_does_not_hold_up_a_commit_that_makes_a_partition(sales: Callable[..., Sales]) -> None:
    flow = sales("date", "day", batches=2)
    flow.merge(1, [(1, date(2026, 11, 27))])
    with flow.owner.engine.connect().execution_options(isolation_level="REPEATABLE READ") as reader:
        assert reader.scalar(sa.text("SELECT count(*) FROM state.sales")) == 1
        flow.merge(2, [(2, date(2026, 11, 28))])
        assert reader.scalar(sa.text("SELECT count(*) FROM state.sales")) == 1
    assert len(flow.stored()) == 2


@pytest.mark.promise("limit:MOST_AT_ONCE")
def test_rows_without_a_value_or_in_too_many_ranges_are_refused(sales: Callable[..., Sales], settings: Settings) -> None:
    flow = sales("date", "day", batches=2)
    before = counted(settings)
    days = [(number, date(2026, 1, 1) + timedelta(days=number)) for number in range(range_partitions.MOST_AT_ONCE + 1)]
    with pytest.raises(Overflow, match=r"more than 400 new ranges, from 2026-01-01 to 2027-02-05"):
        flow.merge(1, days)
    assert counted(settings) == before
    attempt = flow.start(1, mode="restage")
    flow.seal(attempt, flow.stage(attempt, "sales", [(0, 1, None), (1, 2, date(2026, 1, 1))]))
    with pytest.raises(BadKey, match="column at, by which its rows are divided, is NULL or infinite"):
        flow.commit(1)
    assert counted(settings) == before
    attempt = flow.start(1, mode="restage")
    flow.seal(attempt, flow.stage(attempt, "sales", [(place, *row) for place, row in enumerate(days[:-1])]))
    flow.commit(1)
    flow.merge(2, days[-1:])
    assert flow.stored() == days


DETACH = 'ALTER TABLE state.sales DETACH PARTITION state."sales$20260101"'
ATTACH = "ALTER TABLE state.sales ATTACH PARTITION state.\"sales$20260101\" FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')"
LACKS = r"Table state.sales lacks 1 of the partitions.*: sales\$20260101\."


@pytest.mark.promise("decision:0044")
def test_a_detached_partition_is_missed(sales: Callable[..., Sales], settings: Settings, as_owner: AsOwner) -> None:
    """By each way to read and by migrations, until it is attached again or removed by `prune`; a commit adds none beside it."""
    flow = sales("date", "month", batches=3)
    rows = [(1, date(2026, 1, 5)), (2, date(2026, 2, 5))]
    flow.merge(1, rows)
    as_owner(sa.text(DETACH))
    spec = flow.spec.states[0]
    with StateReader.open(settings, "shop", "sales") as reader:
        for read in (
            lambda: flow.rows("sales"),
            lambda: reader.get_many([(1, 0)]),
            lambda: reader.range(limit=10),
            lambda: reader.scan().__enter__(),
            lambda: key_lookup.get(settings, spec, [("1", "0")]),
            lambda: flow.merge(1, [], redo=True),
            lambda: coordinator_of(Changes("shop.sales"), settings).initialize_transaction(1, None, None),
        ):
            with pytest.raises(SchemaOutOfDate, match=f"{LACKS} .*tidegate prune"):
                read()
    assert key_lookup.get(settings, spec, [("1", "1")])[0]["amount"] == 2  # type: ignore[index]
    with migrations.connected(settings) as connection, pytest.raises(SchemaOutOfDate, match=LACKS):
        partitions.check_complete(connection, [flow.spec])
    flow.start(1, mode="redo")
    with pytest.raises(SchemaOutOfDate, match="partition is missing"):
        flow.merge(2, [(3, date(2026, 1, 6))])
    as_owner(sa.text(ATTACH))
    flow.commit(2)
    assert flow.stored() == [*rows, (3, date(2026, 1, 6))]
    as_owner(sa.text(DETACH))
    assert flow.prune("2026-02-01").partitions == ["sales$20260101"]
    assert flow.stored() == rows[1:]
    with pytest.raises(SchemaOutOfDate, match=r"A table is in the way .*\"sales\$20260101\" already"):
        flow.merge(3, [(4, date(2026, 1, 7))])
    as_owner(sa.text('DROP TABLE state."sales$20260101"'))
    flow.commit(3)
    assert flow.partitions() == {"20260101": 1, "20260201": 1}


def test_a_partition_whose_detaching_was_broken_off_is_missing(sales: Callable[..., Sales], as_owner: AsOwner) -> None:
    """No query finds its rows any more, though it is still listed."""
    flow = sales("date", "month")
    flow.merge(1, [(1, date(2026, 1, 5)), (2, date(2026, 2, 5))])
    with flow.store.engine.connect() as reader, flow.owner.engine.connect() as connection:
        reader.execute(sa.text("SELECT FROM state.sales"))
        connection.execution_options(isolation_level="AUTOCOMMIT")
        connection.execute(sa.text("SET statement_timeout = '1s'"))
        with pytest.raises(OperationalError, match="statement timeout"):
            connection.execute(sa.text(f"{DETACH} CONCURRENTLY"))
        connection.invalidate()
    with pytest.raises(SchemaOutOfDate, match=LACKS):
        flow.rows("sales")
    as_owner(sa.text(f"{DETACH} FINALIZE"))
    as_owner(sa.text(ATTACH))
    assert len(flow.stored()) == 2


@pytest.mark.promise("limit:MOST_AT_ONCE")
def test_many_partitions_are_removed_by_several_transactions(sales: Callable[..., Sales]) -> None:
    """Together, some thousands would fill Postgres' table of locks, which all sessions share."""
    flow = sales("integer", 1)
    flow.merge(1, [(number, number) for number in range(8)])
    with patch.object(range_partitions, "MOST_AT_ONCE", 3):
        done = [flow.prune("7") for _ in range(4)]
    assert [[name.partition("$")[2] for name in each.partitions] for each in done] == [[*"012"], [*"345"], ["6"], []]
    assert [each.are_more for each in done] == [True, True, False, False]
    assert flow.stored() == [(7, 7)]


@pytest.mark.parametrize("call", ["tidegate.epoch()", "tidegate.add_range('sales', 'sales$1', '1', '2', 'month')"])
def test_a_function_of_the_owner_takes_no_types_of_its_caller(
    sales: Callable[..., Sales], settings: Settings, call: str
) -> None:
    """The check of such a type would run as the owner, who may do everything."""
    sales("integer", 1)
    with closing(psycopg2.connect(**settings.conninfo())) as connection, connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION pg_temp.note(value anyelement) RETURNS boolean LANGUAGE plpgsql AS "
            "'BEGIN RAISE NOTICE ''checked by %'', current_user; RETURN true; END'"
        )
        cursor.execute("CREATE DOMAIN pg_temp.text AS pg_catalog.text CHECK (pg_temp.note(value))")
        cursor.execute("SELECT set_config('tidegate.writer', 'shop', true)")
        cursor.execute(f"SELECT {call}")
        assert connection.notices == []


def test_pruning_waits_for_followers_and_is_known_to_later_ones(
    sales: Callable[..., Sales], settings: Settings, register: Callable[..., None]
) -> None:
    flow = sales("date", "month", batches=3)
    flow.merge(1, [(1, date(2026, 1, 5)), (2, date(2026, 2, 5))])
    flow.merge(2, [(3, date(2026, 2, 6)), (4, date(2026, 3, 6))])
    source = Changes("shop.sales", max_txids=1)
    follower = Pipeline("follower", source, {"seen": State(aggregates={"rows": Count()})})
    register(follower)
    assert flow.prune("2026-04-01") == PrunedRanges([], "sales$20260101", [])
    following = Flow(settings, follower.spec)
    planned: list[SourceMetadata] = []
    for txid in (1, 2):
        metadata = coordinator_of(source, settings).initialize_transaction(txid, planned[-1] if planned else None, None)
        assert metadata is not None
        planned.append(metadata)
        after = following.store.last_opened("follower")
        following.store.open_batches(follower.spec, f"run {txid}", [], after, [encode_metadata(metadata)])
        attempt = following.start(txid)
        following.seal(attempt, following.stage(attempt, "seen", [(metadata["rows"],)]))
        following.commit(txid)
    following.close()
    assert flow.prune("2026-04-01") == PrunedRanges(["sales$20260101"], "sales$20260201", [])
    with pytest.raises(SourceChanged, match="some up to txid 1 were removed"):
        coordinator_of(source, settings).initialize_transaction(1, None, None)
    assert flow.prune("2026-04-01", without=["follower"]).partitions == ["sales$20260201", "sales$20260301"]
    assert flow.stored() == []
    with pytest.raises(UsageError, match="'soon' is no value of column at of state sales: its type is date"):
        flow.prune("soon")


def test_a_detached_partition_stays_as_a_table(sales: Callable[..., Sales], as_owner: AsOwner) -> None:
    flow = sales("bigint", 100, batches=3)
    flow.merge(1, [(1, 5), (2, 105)])
    assert flow.prune("100", detaches=True) == PrunedRanges(["sales$0"], None, ["sales$0$kept"])
    assert flow.stored() == [(2, 105)]
    flow.merge(2, [(3, 6)])
    assert flow.stored() == [(2, 105), (3, 6)]
    assert flow.prune("100", detaches=True).kept == ["sales$0$kept1"]
    tables = ('state."sales$0$kept"', 'state."sales$0$kept1"')
    assert [as_owner(sa.text(f"SELECT amount FROM {table}")).scalar_one() for table in tables] == [1, 3]
    flow.merge(3, [(4, 7)])
    assert flow.stored() == [(2, 105), (4, 7)]


def test_ranges_that_were_declared_otherwise_wait_for_the_migration(sales: Callable[..., Sales]) -> None:
    flow = sales("date", "month", batches=2)
    flow.merge(1, [(1, date(2026, 1, 5))])
    by_month = flow.spec.states[0]
    flow.spec = replace(flow.spec, states=(replace(by_month, ranges=Ranges("at", "week")),))
    attempt = flow.start(2)
    flow.seal(attempt, flow.stage(attempt, "sales", [(0, 2, date(2026, 1, 6)), (1, 3, date(2026, 2, 6))]))
    with pytest.raises(
        SchemaOutOfDate, match=r"divided by ranges of month, and this process would add one of week\. .*run: tidegate migrate;"
    ):
        flow.commit(2)
    flow.spec = replace(flow.spec, states=(by_month,))
    flow.commit(2)
    assert flow.partitions() == {"20260101": 2, "20260201": 1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("found", "declared", "parts"),
    [
        (None, Ranges("at", "month"), ["20260101", "20260201"]),
        (Ranges("at", "month"), Ranges("at", "week"), ["20260105", "20260202"]),
        (Ranges("at", "month"), Ranges("amount", 2), ["0", "2"]),
        (Ranges("at", "month"), None, []),
    ],
)
def test_a_table_is_divided_otherwise_with_all_its_rows(
    settings: Settings, register: Callable[..., None], found: Ranges | None, declared: Ranges | None, parts: list[str]
) -> None:
    rows = Rows({"amount": "bigint", "at": "timestamptz"}, range_partitions=found)
    pipeline = Pipeline("shop", Stream("opaque"), {"sales": rows})
    register(pipeline)
    flow = Sales(settings, pipeline.spec)
    flow.plan(1, 1)
    before = [(1, datetime(2026, 1, 5, tzinfo=UTC)), (2, datetime(2026, 2, 5, tzinfo=UTC))]
    flow.merge(1, before)
    flow.close()
    again = replace(pipeline, states={"sales": replace(rows, range_partitions=declared)})
    with migrations.connected(settings) as connection:
        assert range_partitions.divided_otherwise(connection, [again.spec]) == [
            (again.spec.states[0], found.column if found else None)
        ]
        registration.register(connection, again.spec)
        assert range_partitions.divided_otherwise(connection, [again.spec]) == []
    flow = Sales(settings, again.spec)
    assert flow.stored() == before
    assert sorted(name for name in flow.partitions() if name) == parts
    flow.merge(2, before)
    assert flow.stored() == [*before, *before]
    flow.close()
