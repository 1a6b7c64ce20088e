"""Reads for programs: one snapshot each, whole batches only, with the txid that they belong to."""

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
import sqlalchemy as sa

from tests.integration.conftest import TALLY, Execute, Tally, contents
from tests.store import LedgerReader, StateReader, ask, get, key_lookup, state_rows
from tidegate.jobs import Count, Files, Pipeline, Query, State
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import PipelinePaused, UnknownPipeline, UsageError

SHOPS = ["north", "south", "São Paulo", "", "NULL"]


@pytest.fixture
def shops(settings: Settings) -> Iterator[StateReader]:
    with StateReader.open(settings, "tally", "per_shop") as reader:
        yield reader


@pytest.fixture
def days(settings: Settings) -> Iterator[StateReader]:
    with StateReader.open(settings, "tally", "per_day") as reader:
        yield reader


def commit(tally: Tally, times: int = 1) -> None:
    """Commit batches in which each shop sells one thing, on ten days."""
    for txid in tally.plan(times, run_id=f"run {tally.store.committed('tally')}"):
        days = [(date(2026, 1, day), 1) for day in range(1, 11)]
        tally.process(txid, [(shop, 1, 5, 5, 5) for shop in SHOPS], days)
        tally.commit(txid)


@pytest.mark.promise(
    "limit:MOST_KEYS", "limit:PAGE_CHARACTERS", "error:USAGE_ERROR", "security:user-of-airflow-on-operator-page"
)
def test_rows_are_read_by_key_in_ranges_and_by_pages(
    tally: Tally, shops: StateReader, days: StateReader, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are text or Python's values; a key without a row is None, and may be requested twice. Ranges include both ends."""
    assert (shops.get_many([["north"]]).txid, shops.get_many([["north"]]).rows) == (0, [None])
    commit(tally, 2)
    before = contents(settings)
    found = shops.get_many([["south"], ["nowhere"], [""], ["south"]])
    south = {"shop": "south", "sold": 2, "cents": 10, "least": 5, "most": 5, "txid": 2}
    assert (found.txid, found.rows) == (2, [south, None, south | {"shop": ""}, south])
    assert days.get_many([[date(2026, 1, 3)], ["2026-01-03"]]).rows == [{"day": date(2026, 1, 3), "sold": 2, "txid": 2}] * 2
    assert shops.get_many([]).rows == []

    assert [row["day"].day for row in days.range(["2026-01-03"], [date(2026, 1, 6)], limit=10).rows if row] == [3, 4, 5, 6]
    assert [row["day"].day for row in days.range(limit=3).rows if row] == [1, 2, 3]
    assert [row["shop"] for row in shops.range(["N"], limit=9).rows if row] == ["NULL", "São Paulo", "north", "south"]
    with shops.scan() as (txid, rows):
        assert (txid, [row["shop"] for row in rows]) == (2, sorted(SHOPS, key=str.encode))

    state = TALLY.spec.state("per_day")
    assert state is not None
    with LedgerReader(settings) as reader, reader.snapshot("reading pages", states=["per_day"]) as connection:
        for characters, lengths in {1: [1] * 10, 40: [3, 3, 3, 1], 10**6: [7, 3]}.items():
            monkeypatch.setattr(state_rows, "PAGE_CHARACTERS", characters)
            pages: list[list[int]] = []
            more_follow, after = True, None
            while more_follow:
                rows, more_follow = state_rows.rows_after(connection, state, after, 7)
                pages.append([row[0].day for row in rows])
                assert len(pages) <= 10, "a page comes again"
                after = [str(rows[-1][0])]
            assert [day for page in pages for day in page] == list(range(1, 11))
            assert [len(page) for page in pages] == lengths

    wrong: list[tuple[list[str], str]] = [
        ([], "is keyed by day: give 1 values, not 0"),
        (["2026-01-01", "b"], "give 1 values, not 2"),
        (["no date"], "has no such key"),
        (["a\0"], "has no such key"),
    ]
    for key, message in wrong:
        with pytest.raises(UsageError, match=message):
            days.get_many([key])
    with pytest.raises(UsageError, match=f"{state_rows.MOST_KEYS + 1} keys are requested; at most {state_rows.MOST_KEYS} "):
        shops.get_many([["north"]] * (state_rows.MOST_KEYS + 1))
    ranges: list[tuple[list[str | None], str]] = [
        (["2026-01-01", "x"], "is keyed by 1 columns, and 2 values are given"),
        (["no date"], "has no such key"),
        ([None], "State per_day has no range from or to NULL"),
    ]
    for first, message in ranges:
        with pytest.raises(UsageError, match=message):
            days.range(first, limit=1)
    with StateReader.open(settings, "nothing", "per_shop") as reader, pytest.raises(UnknownPipeline):
        reader.get_many([])
    with StateReader.open(settings, "tally", "nothing") as reader, pytest.raises(UsageError, match="has no state nothing"):
        reader.get_many([])
    with shops._snapshot() as (connection, _, _):
        assert connection.exec_driver_sql("SELECT current_user").scalar_one() == settings.pg_reader
    assert contents(settings) == before


def test_times_are_in_utc_whatever_zone_the_session_has(
    settings: Settings, register: Callable[..., None], as_role: Execute
) -> None:
    as_role("postgres", f"ALTER DATABASE {settings.pg_database} SET timezone = 'Asia/Tokyo'")
    pipeline = Pipeline(
        "clock",
        Files("clock", format="csv", schema={"at": "timestamp"}),
        {"clock": State(key={"at": "timestamptz"}, aggregates={"n": Count()})},
    )
    register(pipeline)
    at, text = datetime(2026, 1, 1, 20, tzinfo=UTC), "2026-01-01 20:00"
    with StateStore.connect(settings) as store, LedgerReader(settings) as ledger:
        clock = Tally(store, pipeline.spec)
        clock.plan()
        clock.process_states(1, {"clock": [(at.isoformat(), 7)]}, source_rows=7)
        clock.commit(1)
        (state,), row = pipeline.spec.states, {"at": at, "n": 7, "txid": 1}
        assert get(settings, state, [[text]]) == [row]
        reader = StateReader(ledger, "clock", "clock")
        for key in (text, at, at.replace(tzinfo=None)):
            assert reader.get_many([[key]]).rows == [row], key
            assert reader.range([key], [key], limit=9).rows == [row], key
        asked = Query(
            "asked",
            lambda states, at: sa.select(states["clock.clock"].c.at).where(states["clock.clock"].c.at == at),
            reads=["clock.clock"],
            arguments={"at": "timestamptz"},
        )
        (answer,) = ask(ledger, asked, {"at": text}).rows
        assert [str(answer[0]), str(next(store.state_rows(state))["at"])] == ["2026-01-01 20:00:00+00:00"] * 2
        store.pause("clock", "an operator", "x")
        with pytest.raises(PipelinePaused, match=f"on {datetime.now(UTC):%Y-%m-%d %H}:"):
            store.check_not_paused("clock")


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


def test_a_key_is_found_whatever_it_contains(settings: Settings, register: Callable[..., None], store: StateStore) -> None:
    """Other digits than its column has are not rounded to another key."""
    states = {name: state for name, (state, _) in KEYED.items()}
    keyed = Pipeline("keyed", Files("keyed", format="csv", schema={"word": "string"}), states)
    register(keyed)
    tally = Tally(store, keyed.spec)
    tally.plan()
    tally.process_states(1, {name: rows for name, (_, rows) in KEYED.items()})
    tally.commit(1)
    words, prices, _ = keyed.spec.states

    texts = [str(word) for word, _ in KEYED["words"][1]]
    keys = [*texts, *(f"missing {number}" for number in range(key_lookup.KEYS_PER_STATEMENT)), "a", "a "]
    assert [row and row["word"] for row in get(settings, words, [[key] for key in keys])] == [
        key if key in texts else None for key in keys
    ]
    wanted = [(None, "a"), ("1", "a"), (None, None), ("1", None), (None, "b"), ("1.004", "a")]
    assert [row and row["n"] for row in get(settings, prices, wanted)] == [3, 1, 5, 4, None, None]
    with StateReader.open(settings, "keyed", "prices") as reader:
        for first, last, found in (("1.004", "2", [2]), ("0", Decimal("1.006"), [1]), ("0", "1.01", [1, 2])):
            assert [row["n"] for row in reader.range([first], [last], limit=9).rows if row and row["shop"]] == found
    with StateReader.open(settings, "keyed", "blobs") as reader:
        assert [bytes(row["digest"]) for row in reader.get_many([[b"\x01"], [b"b"]]).rows if row] == [b"\x01", b"b"]
        assert [bytes(row["digest"]) for row in reader.range([b"\x01"], [b"b"], limit=9).rows if row] == [b"\x01", b"b"]
