"""Reads for programs, rows and queries: one snapshot each, whole batches only, with the txid that they belong to."""

import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.conftest import TALLY, Tally, TallyOf, contents
from tests.store import LedgerReader, StateReader, ask, errors, get, key_lookup, state_rows
from tidegate.jobs import Count, Files, Pipeline, Query, State
from tidegate.state_store import Settings, StateStore

SHOPS = ["north", "south", "São Paulo", "", "NULL"]


@pytest.mark.promise("limit:MOST_KEYS", "error:USAGE_ERROR", "security:user-of-airflow-on-operator-page")
def test_rows_are_read_by_key_and_in_ranges(tally: Tally, settings: Settings) -> None:
    with LedgerReader(settings) as ledger:
        shops, days = StateReader(ledger, "tally", "per_shop"), StateReader(ledger, "tally", "per_day")
        assert (shops.get_many([["north"]]).txid, shops.get_many([["north"]]).rows) == (0, [None])
        rows = {"shops": [(shop, 1, 5, 5, 5) for shop in SHOPS], "days": [(date(2026, 1, day), 1) for day in range(1, 11)]}
        tally.having(2, 2, 2, **rows)
        before = contents(settings)
        found = shops.get_many([["south"], ["nowhere"], [""], ["south"]])
        south = {"shop": "south", "sold": 2, "cents": 10, "least": 5, "most": 5, "txid": 2}
        assert (found.txid, found.rows) == (2, [south, None, south | {"shop": ""}, south])
        assert days.get_many([[date(2026, 1, 3)], ["2026-01-03"]]).rows == [{"day": date(2026, 1, 3), "sold": 2, "txid": 2}] * 2
        assert shops.get_many([]).rows == []

        some, first = days.range(["2026-01-03"], [date(2026, 1, 6)], limit=10), days.range(limit=3)
        assert [[row["day"].day for row in found.rows] for found in (some, first)] == [[3, 4, 5, 6], [1, 2, 3]]
        assert [row["shop"] for row in shops.range(["N"], limit=9).rows if row] == ["NULL", "São Paulo", "north", "south"]
        with shops.scan() as (txid, scanned):
            assert (txid, [row["shop"] for row in scanned]) == (2, sorted(SHOPS, key=str.encode))
        most, first_day_from = state_rows.MOST_KEYS, partial(days.range, limit=1)
        for read, given, message in (
            (days.get_many, [[]], "is keyed by day: give 1 values, not 0"),
            (days.get_many, [["2026-01-01", "b"]], "give 1 values, not 2"),
            (days.get_many, [["no date"]], "has no such key"),
            (days.get_many, [["a\0"]], "has no such key"),
            (first_day_from, ["2026-01-01", "x"], "is keyed by 1 columns, and 2 values are given"),
            (first_day_from, ["no date"], "has no such key"),
            (first_day_from, [None], "State per_day has no range from or to NULL"),
            (shops.get_many, [["north"]] * (most + 1), f"{most + 1} keys are requested; at most {most} "),
            (StateReader(ledger, "tally", "nothing").get_many, [], "has no state nothing"),
        ):
            with pytest.raises(errors.UsageError, match=message):
                read(given)
        with pytest.raises(errors.UnknownPipeline):
            StateReader(ledger, "nothing", "per_shop").get_many([])
        with shops._snapshot() as (connection, _, _):
            assert connection.exec_driver_sql("SELECT current_user").scalar_one() == settings.pg_reader
    assert contents(settings) == before


def test_times_are_in_utc_whatever_zone_the_session_has(settings: Settings, tally_of: TallyOf) -> None:
    files = Files("clock", format="csv", schema={"at": "timestamp"})
    clock = tally_of(Pipeline("clock", files, {"clock": State(key={"at": "timestamptz"}, aggregates={"n": Count()})}))
    clock.sql(f"ALTER DATABASE {settings.pg_database} SET timezone = 'Asia/Tokyo'", role="postgres")
    clock.store.engine.dispose()  # connections from before the setting
    at, text = datetime(2026, 1, 1, 20, tzinfo=UTC), "2026-01-01 20:00"
    clock.having(1, 1, 1, clock=[(at.isoformat(), 7)])
    (state,), row = clock.spec.states, {"at": at, "n": 7, "txid": 1}
    assert get(settings, state, [[text]]) == [row]
    how = {"reads": ["clock.clock"], "arguments": {"at": "timestamptz"}}
    asked = query(lambda states, at: sa.select(states["clock.clock"].c.at).where(states["clock.clock"].c.at == at), **how)
    with LedgerReader(settings) as ledger:
        reader = StateReader(ledger, "clock", "clock")
        for key in (text, at, at.replace(tzinfo=None)):
            assert reader.get_many([[key]]).rows == [row], key
            assert reader.range([key], [key], limit=9).rows == [row], key
        (answer,) = ask(ledger, asked, {"at": text}).rows
    assert [str(answer[0]), str(next(clock.store.state_rows(state))["at"])] == ["2026-01-01 20:00:00+00:00"] * 2


KEYED: dict[str, tuple[State, list[tuple[object, ...]]]] = {
    "words": (
        State(key={"word": "text"}, aggregates={"n": Count()}),
        [(word, 1) for word in ("", "'", "'; DROP TABLE state.words; --", "%(x)s", "\\", "\\N", "e\u0301", "\u00e9", "a", "A")],
    ),
    "prices": (
        State(key={"price": "numeric(10,2)", "shop": "text"}, aggregates={"n": Count()}, null_keys=True),
        [("1.00", "a", 1), ("1.01", "a", 2), (None, "a", 3), ("1.00", None, 4), (None, None, 5)],
    ),
    "blobs": (State(key={"digest": "bytea"}, aggregates={"n": Count()}), [(r"\x01", 1), (r"\x62", 1)]),
}


def test_a_key_is_found_whatever_it_contains(settings: Settings, tally_of: TallyOf) -> None:
    """Other digits than its column has are not rounded to another key."""
    states = {name: state for name, (state, _) in KEYED.items()}
    tally = tally_of(Pipeline("keyed", Files("keyed", format="csv", schema={"word": "string"}), states))
    tally.having(1, 1, 1, **{name: rows for name, (_, rows) in KEYED.items()})
    words, prices, _ = tally.spec.states

    texts = [str(word) for word, _ in KEYED["words"][1]]
    keys = [*texts, *(f"missing {number}" for number in range(key_lookup.KEYS_PER_STATEMENT)), "a", "a "]
    expected = [key if key in texts else None for key in keys]
    assert [row and row["word"] for row in get(settings, words, [[key] for key in keys])] == expected
    wanted = [(None, "a"), ("1", "a"), (None, None), ("1", None), (None, "b"), ("1.004", "a")]
    assert [row and row["n"] for row in get(settings, prices, wanted)] == [3, 1, 5, 4, None, None]
    with StateReader.open(settings, "keyed", "prices") as reader:
        for first, last, found in (("1.004", "2", [2]), ("0", Decimal("1.006"), [1]), ("0", "1.01", [1, 2])):
            assert [row["n"] for row in reader.range([first], [last], limit=9).rows if row and row["shop"]] == found
    with StateReader.open(settings, "keyed", "blobs") as reader:
        for answer in (reader.get_many([[b"\x01"], [b"b"]]), reader.range([b"\x01"], [b"b"], limit=9)):
            assert [bytes(row["digest"]) for row in answer.rows if row] == [b"\x01", b"b"]


@pytest.fixture
def reader(tally: Tally, settings: Settings) -> Iterator[LedgerReader]:
    tally.having(2, 2, 2, shops=[("north", 1, 5, 5, 5)], days=[(date(2026, 1, 1), 1)])
    with LedgerReader(settings) as made:
        yield made


def query(answer: Callable[..., Any], **changes: Any) -> Query:
    return Query("question", answer, **{"reads": ["tally.per_shop", "tally.per_day"], **changes})


ARGUMENTS: dict[str, tuple[str, Any]] = {
    "text": ("São \"Paulo', %(x)s; --", "São \"Paulo', %(x)s; --"),
    "boolean": ("true", True),
    "integer": (" 7 ", 7),
    "bigint": (str(2**63 - 1), 2**63 - 1),
    "date": ("2026-02-28", date(2026, 2, 28)),
    "timestamptz": ("2026-01-01 12:00+02", datetime(2026, 1, 1, 10, tzinfo=UTC)),
    "timestamp": ("2026-01-01T12:00", datetime(2026, 1, 1, 12)),
    "numeric(6,2)": ("1.23456789", Decimal("1.23456789")),
    "bytea": ("\\x00ff", b"\x00\xff"),
}
NO_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({}, "needs argument least. It takes least (integer), days (date[])"),
    ({"least": "1", "days": [], "most": "2"}, "has no argument most. It takes least (integer), days (date[])"),
    ({"least": "1.5", "days": []}, 'argument least is not of type integer: invalid input syntax for type integer: "1.5"'),
    ({"least": "1", "days": ["2026-02-29"]}, "argument days is not of type date[]: date/time field value out of range"),
    ({"least": "1\0", "days": []}, "argument least is not of type integer"),
    ({"least": ["1"], "days": []}, "argument least is integer, so it takes one value"),
    ({"least": "1", "days": "2026-01-01"}, "argument days is date[], so it takes a list"),
]


def insert(table: Any) -> Any:
    """Try to insert a row in the course of reading."""
    added = sa.insert(table).values(shop="x", sold=1, cents=1, txid=1).returning(table.c.shop).cte("added")
    return sa.select(added.c.shop)


LEDGER = sa.table("commit", sa.column("txid"), schema="tidegate")
UNLOCKED = sa.func.set_config("transaction_read_only", "off", True)  # tries to make the transaction one that may write
INVALID, USAGE, SLOW = errors.DeclarationInvalid, errors.UsageError, errors.StoreUnavailable
# What a query answers from the table per_shop, and how that is refused.
WRONG: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (insert, INVALID, "must not contain data-modifying statements in WITH"),
    (lambda shops: sa.select(shops.c.sold).with_for_update(), INVALID, "may only read"),
    (lambda shops: sa.select(UNLOCKED).select_from(shops), INVALID, "transaction read-write mode must be set before any query"),
    (lambda _: "SELECT 1", INVALID, "returns str; it has to return a SELECT"),
    (lambda _: sys.exit(), INVALID, "failed: SystemExit"),
    (lambda _: sa.select(LEDGER.c.txid), INVALID, "reads tidegate.commit, which its `reads` do not"),
    (lambda shops: sa.select(shops).where(sa.exists(LEDGER.alias("x").select())), INVALID, "reads tidegate.commit, which"),
    (lambda shops: sa.select(shops.c.sold, shops.c.least.label("sold")), INVALID, "two columns sold"),
    (lambda shops: sa.select(1 / (shops.c.sold * 0)), USAGE, "division by zero"),
    (lambda _: sa.select(sa.func.pg_sleep(60)), SLOW, "took longer than 1 s"),
    (lambda _: sa.select(sa.func.generate_series(1, 10**9)), INVALID, "answers more than 5 rows"),
]


@pytest.mark.promise("security:user-who-asks-query")
def test_an_answer_that_is_more_than_reading_is_refused(reader: LedgerReader, tally: Tally) -> None:
    """And changes nothing. Postgres converts an argument's text, and nothing is rounded."""
    given: list[Any] = []

    def answer(_states: Any, value: Any) -> Any:
        given.append(bytes(value) if isinstance(value, memoryview) else value)
        return sa.select(sa.literal(1).label("one"))

    for kind, (text, _) in ARGUMENTS.items():
        assert ask(reader, query(answer, arguments={"value": kind}), {"value": text}).rows == [(1,)]
    assert given == [value for _, value in ARGUMENTS.values()]

    asked = query(lambda states, least, days: (states, least, days), arguments={"least": "integer", "days": "date[]"})
    for arguments, message in NO_ARGUMENTS:
        with pytest.raises(errors.UsageError, match=re.escape(message)):
            ask(reader, asked, arguments)

    before = tally.state()
    for answer, error, message in WRONG:
        asked = query(lambda states, answer=answer: answer(states["tally.per_shop"]), most_rows=5, timeout_seconds=1)
        with pytest.raises(error, match=re.escape(message)):
            ask(reader, asked, {})
    assert tally.state() == before
    with pytest.raises(errors.UnknownPipeline, match="Pipeline ships is not registered"):
        ask(reader, query(lambda _: sa.select(1), reads=["ships.by_name"]), {})
    with pytest.raises(INVALID, match=r"reads tally\.gone, and pipeline tally has no such state"):
        ask(reader, query(lambda _: sa.select(1), reads=["tally.gone"]), {})
    numbers = sa.select(sa.func.generate_series(1, 5).label("n"))
    assert [row for (row,) in ask(reader, query(lambda _: numbers, most_rows=5), {}).rows] == [1, 2, 3, 4, 5]


def test_an_answer_is_of_one_moment(reader: LedgerReader, tally: Tally, settings: Settings) -> None:
    tally.plan(run_id="next")
    tally.process(3, [("north", 100, 1, 1, 1)])

    def answer(states: Any) -> Any:
        with StateStore.connect(settings) as store:
            store.commit_batch(TALLY.spec, 3, "another")
        return sa.select(states["tally.per_shop"].c.sold)

    found = ask(reader, query(answer), {})
    assert (found.txids, found.rows) == ({"tally": 2}, [(2,)])
    assert [row[1] for row in tally.state()] == [102]
