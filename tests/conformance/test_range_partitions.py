"""Appended rows that are divided by ranges: each once and in its range, whatever is detached, redone or pruned."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, date, datetime, time, timedelta
from itertools import product
from typing import Any
from unittest.mock import patch

import psycopg2
import pytest
import sqlalchemy as sa

from tests import store as ledger
from tests.conformance.conftest import Flow, Flows, Stream
from tests.integration.conftest import refused
from tests.statements import execute
from tidegate import migrations
from tidegate.jobs import Changes, Count, Pipeline, Ranges, Rows, State
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.jobs.sources.changes import removable
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import BadKey, GuardMismatch, Overflow, SchemaOutOfDate, SourceChanged, UsageError

Row = tuple[Any, ...]


class Sales(Flow):
    def add(self, *rows: Row, txid: int | None = None, redo: bool = False) -> None:
        self.merge(txid, redo=redo, sales=self.placed(*rows))

    def placed(self, *rows: Row) -> list[Row]:
        return [(place, *row) for place, row in enumerate(rows)]

    def stored(self) -> list[Row]:
        names = [value.name for value in self.spec.states[0].values]
        return [tuple(row[name] for name in names) for row in self.rows("sales")]

    def partitions(self, state: str = "sales") -> dict[str, int]:
        """Return the number of rows in each partition, by what follows the $ in its name."""
        counted = self.by_hand(f"SELECT tableoid::regclass::text, count(*) FROM state.{state} GROUP BY 1 ORDER BY 1")
        return {name.strip('"').partition("$")[2]: rows for name, rows in counted}

    def prune(self, before: str, *, detaches: bool = False, without: Sequence[str] = ()) -> ledger.PrunedRanges:
        up_to_txid, _ = removable(self.store, self.spec, self.spec.states[0], 0, without=without)
        removal = ledger.Removal(before, up_to_txid, detaches, is_confirmed=True)
        return self.owner.prune_ranges(self.spec, self.spec.states[0], removal, "an operator", "a year is over")


def declare(kind: str, ranges: Ranges | None) -> Pipeline:
    return Pipeline("shop", Stream("opaque"), {"sales": Rows({"amount": "bigint", "at": kind}, range_partitions=ranges)})


@pytest.fixture
def sales(flows: Flows) -> Callable[..., Sales]:
    """A function that registers rows with an amount and a column that divides them."""
    return lambda kind, every: flows(declare(kind, Ranges("at", every)), Sales)


DAYS = [date(1, 1, 1), date(1969, 12, 31), date(2024, 2, 29), date(2026, 11, 1), date(2026, 11, 30), date(9999, 12, 31)]
STARTS: dict[str, Callable[[date], date]] = {
    "day": lambda day: day,
    "week": lambda day: day - timedelta(days=day.weekday()),
    "month": lambda day: day.replace(day=1),
    "year": lambda day: day.replace(month=1, day=1),
}
NAIVE = [datetime.combine(day, edge) for day in DAYS for edge in (time.min, time.max)]
TIMES: dict[str, list[Any]] = {"date": DAYS, "timestamp": NAIVE, "timestamptz": [at.replace(tzinfo=UTC) for at in NAIVE]}


def partition_of(at: Any, every: Any) -> str:
    if isinstance(at, int):
        return str(at // every * every)
    start = STARTS[every](at.date() if isinstance(at, datetime) else at)
    return f"{start.year:04}{start.month:02}{start.day:02}"


@pytest.mark.promise("decision:0044")
def test_each_row_is_in_the_partition_of_its_time_or_number(flows: Flows, settings: Settings) -> None:
    """Whatever the database's time zone and its way to write dates; each kind and length in a state of its own."""
    for setting in ("timezone = 'Pacific/Kiritimati'", "datestyle = 'SQL, DMY'"):
        execute(settings.conninfo(user="postgres"), f'ALTER DATABASE "{settings.pg_database}" SET {setting}')
    values: dict[tuple[str, Any], list[Any]] = {(kind, every): TIMES[kind] for kind, every in product(TIMES, STARTS)}
    for every, (kind, bits) in product((1, 7, 10**12), (("integer", 31), ("bigint", 63))):
        edges = [-(2**bits), 1 - 2**bits, -every, -1, 0, 1, every - 1, every, 2**bits - 2, 2**bits - 1]
        values[kind, every] = [number for number in edges if -(2**bits) <= number < 2**bits]
    states = {f"{kind}_{every}": Rows({"at": kind}, range_partitions=Ranges("at", every)) for kind, every in values}
    flow = flows(Pipeline("shop", Stream("opaque"), states), Sales)
    for store in (flow.store, flow.owner):
        store.engine.dispose()  # sessions from before do not have these settings
    for _ in range(2):
        flow.merge(**{f"{kind}_{every}": enumerate(own) for (kind, every), own in values.items()})
    for (kind, every), own in values.items():
        name = f"{kind}_{every}"
        stored = flow.by_hand("SET LOCAL timezone = 'UTC'", f"SELECT at FROM state.{name} ORDER BY txid, position")
        assert [at for (at,) in stored] == own * 2
        assert flow.partitions(name) == Counter(partition_of(at, every) for at in own * 2), name


def test_a_partition_has_one_writer_and_no_readers_of_its_own(sales: Callable[..., Sales], settings: Settings) -> None:
    flow = sales("date", "month")
    flow.add((1, date(2026, 11, 27)))
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
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match=refusal):
            execute(settings.conninfo(user=user), sql)
    assert execute(settings.conninfo(user=settings.pg_reader), "SELECT amount FROM state.sales") == [(1,)]
    assert flow.by_hand("SELECT count(*) FROM tidegate.state_range") == [(1,)]
    flow.by_hand('ALTER TABLE state."sales$20261101" DISABLE TRIGGER single_writer')
    with pytest.raises(GuardMismatch, match=r'single_writer of table state\."sales\$20261101" is disabled'):
        flow.add((1, date(2026, 11, 27)))


@pytest.mark.promise("decision:0044")
def test_a_reader_of_the_table_does_not_hold_up_a_commit_that_makes_a_partition(sales: Callable[..., Sales]) -> None:
    flow = sales("date", "day")
    flow.add((1, date(2026, 11, 27)))
    with flow.owner.engine.connect().execution_options(isolation_level="REPEATABLE READ") as reader:
        assert reader.scalar(sa.text("SELECT count(*) FROM state.sales")) == 1
        flow.add((2, date(2026, 11, 28)))
        assert reader.scalar(sa.text("SELECT count(*) FROM state.sales")) == 1
    assert len(flow.stored()) == 2


@pytest.mark.promise("limit:MOST_AT_ONCE")
def test_rows_without_a_value_or_in_too_many_ranges_are_refused(sales: Callable[..., Sales], settings: Settings) -> None:
    flow = sales("date", "day")
    days = [(number, date(2026, 1, 1) + timedelta(days=number)) for number in range(ledger.range_partitions.MOST_AT_ONCE + 1)]
    refusals = {
        (Overflow, r"more than 400 new ranges, from 2026-01-01 to 2027-02-05"): days,
        (BadKey, "column at, by which its rows are divided, is NULL or infinite"): [(1, None), days[0]],
    }
    txid = flow.next()
    for (error, message), rows in refusals.items():
        flow.put(txid, mode="restage", sales=flow.placed(*rows))
        with refused(settings, error, message):
            flow.commit(txid)
    flow.put(txid, mode="restage", sales=flow.placed(*days[:-1]))
    flow.put(flow.next(), sales=flow.placed(*days[-1:]))
    with refused(settings, Overflow, "more than 400 new ranges"):
        flow.store.commit_ready(flow.spec, "together")
    flow.commit(txid)
    flow.commit(txid + 1)
    assert flow.stored() == days


DETACH = 'ALTER TABLE state.sales DETACH PARTITION state."sales$20260101"'
ATTACH = "ALTER TABLE state.sales ATTACH PARTITION state.\"sales$20260101\" FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')"
LACKS = r"Table state.sales lacks 1 of the partitions.*: sales\$20260101\."


@pytest.mark.promise("decision:0044")
def test_a_detached_partition_is_missed(sales: Callable[..., Sales], settings: Settings) -> None:
    """By each way to read and by migrations, until it is attached again or removed by `prune`; a commit adds none beside it."""
    flow = sales("date", "month")
    rows = [(1, date(2026, 1, 5)), (2, date(2026, 2, 5))]
    flow.add(*rows)
    flow.by_hand(DETACH)
    spec = flow.spec.states[0]
    with ledger.StateReader.open(settings, "shop", "sales") as reader:
        for read in (
            lambda: flow.rows("sales"),
            lambda: reader.get_many([(1, 0)]),
            lambda: reader.range(limit=10),
            lambda: reader.scan().__enter__(),
            lambda: ledger.key_lookup.get(settings, spec, [("1", "0")]),
            lambda: flow.add(txid=1, redo=True),
            lambda: coordinator_of(Changes("shop.sales"), settings).initialize_transaction(1, None, None),
        ):
            with pytest.raises(SchemaOutOfDate, match=f"{LACKS} .*tidegate prune"):
                read()
    assert ledger.key_lookup.get(settings, spec, [("1", "1")])[0]["amount"] == 2  # type: ignore[index]
    with migrations.connected(settings) as connection, pytest.raises(SchemaOutOfDate, match=LACKS):
        ledger.partitions.check_complete(connection, [flow.spec])
    flow.start(1, mode="redo")
    with pytest.raises(SchemaOutOfDate, match="partition is missing"):
        flow.add((3, date(2026, 1, 6)))
    flow.by_hand(ATTACH)
    flow.commit(2)
    assert flow.stored() == [*rows, (3, date(2026, 1, 6))]
    flow.by_hand(DETACH)
    assert flow.prune("2026-02-01").partitions == ["sales$20260101"]
    assert flow.stored() == rows[1:]
    with pytest.raises(SchemaOutOfDate, match=r"A table is in the way .*\"sales\$20260101\" already"):
        flow.add((4, date(2026, 1, 7)))
    flow.by_hand('DROP TABLE state."sales$20260101"')
    flow.commit(3)
    assert flow.partitions() == {"20260101": 1, "20260201": 1}


def test_a_partition_whose_detaching_was_broken_off_is_missing(sales: Callable[..., Sales]) -> None:
    """No query finds its rows any more, though it is still listed."""
    flow = sales("date", "month")
    flow.add((1, date(2026, 1, 5)), (2, date(2026, 2, 5)))
    with flow.store.engine.connect() as reader:
        reader.execute(sa.text("SELECT FROM state.sales"))
        impatient = {**flow.settings.conninfo(user=flow.settings.pg_owner), "options": "-c statement_timeout=1s"}
        with pytest.raises(psycopg2.errors.QueryCanceled):
            execute(impatient, f"{DETACH} CONCURRENTLY")
    with pytest.raises(SchemaOutOfDate, match=LACKS):
        flow.rows("sales")
    flow.by_hand(f"{DETACH} FINALIZE")
    flow.by_hand(ATTACH)
    assert len(flow.stored()) == 2


@pytest.mark.promise("limit:MOST_AT_ONCE")
def test_many_partitions_are_removed_by_several_transactions(sales: Callable[..., Sales]) -> None:
    """Together, some thousands would fill Postgres' table of locks, which all sessions share."""
    flow = sales("integer", 1)
    flow.add(*((number, number) for number in range(8)))
    with patch.object(ledger.range_partitions, "MOST_AT_ONCE", 3):
        done = [flow.prune("7") for _ in range(4)]
    assert [[name.partition("$")[2] for name in each.partitions] for each in done] == [[*"012"], [*"345"], ["6"], []]
    assert [each.are_more for each in done] == [True, True, False, False]
    assert flow.stored() == [(7, 7)]


def test_a_function_of_the_owner_takes_no_types_of_its_caller(sales: Callable[..., Sales], settings: Settings) -> None:
    """The check of such a type would run as the owner, who may do everything."""
    sales("integer", 1)
    with closing(psycopg2.connect(**settings.conninfo())) as connection, connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION pg_temp.note(value anyelement) RETURNS boolean LANGUAGE plpgsql AS "
            "'BEGIN RAISE NOTICE ''checked by %'', current_user; RETURN true; END';"
            "CREATE DOMAIN pg_temp.text AS pg_catalog.text CHECK (pg_temp.note(value));"
            "SELECT set_config('tidegate.writer', 'shop', true)"
        )
        for call in ("tidegate.epoch()", "tidegate.add_range('sales', 'sales$1', '1', '2', 'month')"):
            cursor.execute(f"SELECT {call}")
            assert connection.notices == []


def test_pruning_waits_for_followers_and_stops_later_ones(
    sales: Callable[..., Sales], flows: Flows, settings: Settings
) -> None:
    flow = sales("date", "month")
    flow.add((1, date(2026, 1, 5)), (2, date(2026, 2, 5)))
    flow.add((3, date(2026, 2, 6)), (4, date(2026, 3, 6)))
    source = Changes("shop.sales", max_txids=1)
    following = flows(Pipeline("follower", source, {"seen": State(aggregates={"rows": Count()})}))
    assert flow.prune("2026-04-01") == ledger.PrunedRanges([], "sales$20260101", [])
    metadata: Any = None
    for txid in (1, 2):
        metadata = coordinator_of(source, settings).initialize_transaction(txid, metadata, None)
        after = following.store.last_opened("follower")
        following.store.open_batches(following.spec, f"run {txid}", [], after, [ledger.encode_metadata(metadata)])
        following.merge(txid, seen=[(metadata["rows"],)])
    assert flow.prune("2026-04-01") == ledger.PrunedRanges(["sales$20260101"], "sales$20260201", [])
    with pytest.raises(SourceChanged, match="some up to txid 1 were removed"):
        coordinator_of(source, settings).initialize_transaction(1, None, None)
    assert flow.prune("2026-04-01", without=["follower"]).partitions == ["sales$20260201", "sales$20260301"]
    assert flow.stored() == []
    with pytest.raises(UsageError, match="'soon' is no value of column at of state sales: its type is date"):
        flow.prune("soon")


def test_a_detached_partition_stays_as_a_table(sales: Callable[..., Sales]) -> None:
    flow = sales("bigint", 100)
    flow.add((1, 5), (2, 105))
    assert flow.prune("100", detaches=True) == ledger.PrunedRanges(["sales$0"], None, ["sales$0$kept"])
    assert flow.stored() == [(2, 105)]
    flow.add((3, 6))
    assert flow.stored() == [(2, 105), (3, 6)]
    assert flow.prune("100", detaches=True).kept == ["sales$0$kept1"]
    kept = ('state."sales$0$kept"', 'state."sales$0$kept1"')
    assert [flow.by_hand(f"SELECT amount FROM {table}") for table in kept] == [[(1,)], [(3,)]]
    flow.add((4, 7))
    assert flow.stored() == [(2, 105), (4, 7)]


DIVIDED: list[tuple[Ranges | None, set[str]]] = [
    (Ranges("at", "month"), {"20260101", "20260201"}),
    (Ranges("at", "week"), {"20260105", "20260202"}),
    (Ranges("amount", 2), {"0", "2"}),
    (None, {""}),
]


def test_a_table_is_divided_otherwise_with_all_its_rows(flows: Flows, settings: Settings) -> None:
    """Until the migration, a commit by the new declaration waits."""
    flow, found = flows(declare("timestamptz", None), Sales), None
    rows = [(1, datetime(2026, 1, 5, tzinfo=UTC)), (2, datetime(2026, 2, 5, tzinfo=UTC))]
    waits = r"divided by ranges of month, and this process would add one of week\. .*run"
    flow.add(*rows)
    for times, (declared, parts) in enumerate(DIVIDED, start=1):
        flow.spec = declare("timestamptz", declared).spec
        txid = flow.next()
        flow.put(txid, sales=flow.placed(*rows))
        if "20260105" in parts:
            with pytest.raises(SchemaOutOfDate, match=waits):
                flow.commit(txid)
        with migrations.connected(settings) as connection:
            divided = ledger.range_partitions.divided_otherwise(connection, [flow.spec])
            assert divided == [(flow.spec.states[0], found)]
            ledger.registration.register(connection, flow.spec)
            assert ledger.range_partitions.divided_otherwise(connection, [flow.spec]) == []
        assert flow.stored() == rows * times
        assert set(flow.partitions()) == parts
        flow.commit(txid)
        found = declared and declared.column
    assert flow.stored() == rows * 5
