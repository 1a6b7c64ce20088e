"""Answers to queries: one snapshot with its txids, arguments of their types, and nothing but reading."""

import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.conftest import TALLY, Tally
from tests.store import LedgerReader, ask
from tidegate.jobs import Query
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import DeclarationInvalid, StoreUnavailable, TidegateError, UnknownPipeline, UsageError

SHOPS, DAYS = "tally.per_shop", "tally.per_day"
READS = [SHOPS, DAYS]


@pytest.fixture
def reader(tally: Tally, settings: Settings) -> Iterator[LedgerReader]:
    for txid in tally.plan(2):
        days = [(date(2026, 1, day), 1) for day in (1, txid + 1)]
        tally.process(txid, [("north", 1, 5, 5, 5), (f"new {txid}", 2, 7, 3, 4)], days)
        tally.commit(txid)
    with LedgerReader(settings) as made:
        yield made


def query(answer: Callable[..., Any], **changes: Any) -> Query:
    """Declare a query of the tally."""
    return Query("question", answer, **{"reads": READS, **changes})


def sold(states: Any, shops: list[str], least: int = 0) -> Any:
    """Answer what some shops have sold."""
    shop = states[SHOPS].c
    return sa.select(shop.shop, shop.sold).where(shop.shop.in_(shops), shop.sold >= least).order_by(shop.shop)


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


@pytest.mark.promise("security:user-who-asks-query")
def test_an_argument_is_a_value_of_its_type(reader: LedgerReader) -> None:
    """Postgres converts its text, and nothing is rounded. What is none is named with its type, before the query is made."""
    given: list[Any] = []

    def answer(_states: Any, value: Any) -> Any:
        given.append(bytes(value) if isinstance(value, memoryview) else value)
        return sa.select(sa.literal(1).label("one"))

    for kind, (text, _) in ARGUMENTS.items():
        assert ask(reader, query(answer, arguments={"value": kind}), {"value": text}).rows == [(1,)]
    assert given == [value for _, value in ARGUMENTS.values()]

    asked = query(lambda states, least, days: (states, least, days), arguments={"least": "integer", "days": "date[]"})
    for arguments, message in NO_ARGUMENTS:
        with pytest.raises(UsageError, match=re.escape(message)):
            ask(reader, asked, arguments)
    with pytest.raises(UnknownPipeline, match="Pipeline ships is not registered"):
        ask(reader, query(lambda _: sa.select(1), reads=["ships.by_name"]), {})
    with pytest.raises(DeclarationInvalid, match=r"reads tally\.gone, and pipeline tally has no such state"):
        ask(reader, query(lambda _: sa.select(1), reads=["tally.gone"]), {})


NO_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({}, "needs argument least. It takes least (integer), days (date[])"),
    ({"least": "1", "days": [], "most": "2"}, "has no argument most. It takes least (integer), days (date[])"),
    ({"least": "1.5", "days": []}, 'argument least is not of type integer: invalid input syntax for type integer: "1.5"'),
    ({"least": "1", "days": ["2026-02-29"]}, "argument days is not of type date[]: date/time field value out of range"),
    ({"least": "1\0", "days": []}, "argument least is not of type integer"),
    ({"least": ["1"], "days": []}, "argument least is integer, so it takes one value"),
    ({"least": "1", "days": "2026-01-01"}, "argument days is date[], so it takes a list"),
]


def insert(states: Any) -> Any:
    """Try to insert a row in the course of reading."""
    table = states[SHOPS]
    added = sa.insert(table).values(shop="x", sold=1, cents=1, txid=1).returning(table.c.shop).cte("added")
    return sa.select(added.c.shop)


def unlock(states: Any) -> Any:
    """Try to make the transaction one that may write."""
    return sa.select(sa.func.set_config("transaction_read_only", "off", True)).select_from(states[SHOPS])


LEDGER = sa.table("commit", sa.column("txid"), schema="tidegate")
WRONG: dict[str, tuple[Callable[..., Any], type[TidegateError], str]] = {
    "insert": (insert, DeclarationInvalid, "must not contain data-modifying statements in WITH"),
    "lock": (lambda states: sa.select(states[SHOPS].c.sold).with_for_update(), DeclarationInvalid, "may only read"),
    "unlock": (unlock, DeclarationInvalid, "transaction read-write mode must be set before any query"),
    "text": (lambda _: "SELECT 1", DeclarationInvalid, "returns str; it has to return a SELECT"),
    "exits": (lambda _: sys.exit(), DeclarationInvalid, "failed: SystemExit"),
    "other table": (lambda _: sa.select(LEDGER.c.txid), DeclarationInvalid, "reads tidegate.commit, which its `reads` do not"),
    "hidden": (
        lambda states: sa.select(states[SHOPS]).where(sa.exists(sa.select(LEDGER.alias("x").c.txid))),
        DeclarationInvalid,
        "reads tidegate.commit, which its `reads` do not",
    ),
    "two names": (
        lambda states: sa.select(states[SHOPS].c.sold, states[SHOPS].c.least.label("sold")),
        DeclarationInvalid,
        "two columns sold",
    ),
    "zero": (lambda states: sa.select(1 / (states[DAYS].c.sold * 0)), UsageError, "division by zero"),
    "slow": (lambda _: sa.select(sa.func.pg_sleep(60)), StoreUnavailable, "took longer than 1 s"),
    "many": (lambda _: sa.select(sa.func.generate_series(1, 10**9)), DeclarationInvalid, "answers more than 5 rows"),
}


@pytest.mark.promise("security:user-who-asks-query")
def test_an_answer_that_is_more_than_reading_is_refused(reader: LedgerReader, tally: Tally) -> None:
    """And changes nothing: the role cannot, the transaction does not, and only a SELECT over what is named is executed."""
    before = tally.state()
    for name, (answer, error, message) in WRONG.items():
        with pytest.raises(error) as refusal:
            ask(reader, query(answer, most_rows=5, timeout_seconds=1), {})
        assert message in str(refusal.value), name
    assert tally.state() == before
    numbers = sa.select(sa.func.generate_series(1, 5).label("n"))
    assert [row for (row,) in ask(reader, query(lambda _: numbers, most_rows=5), {}).rows] == [1, 2, 3, 4, 5]


def test_an_answer_is_of_one_moment(reader: LedgerReader, tally: Tally, settings: Settings) -> None:
    (txid,) = tally.plan(run_id="next")
    tally.process(txid, [("north", 100, 1, 1, 1)])

    def answer(states: Any) -> Any:
        with StateStore.connect(settings) as store:
            store.commit_batch(TALLY.spec, txid, "another")
        return sa.select(states[SHOPS].c.sold).where(states[SHOPS].c.shop == "north")

    found = ask(reader, query(answer), {})
    assert (found.txids, found.rows) == ({"tally": 2}, [(2,)])
    assert next(row for row in tally.state() if row[0] == "north")[1] == 102
