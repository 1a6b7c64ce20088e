"""Point lookups find the rows of the requested keys, in that order, whatever a key contains."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal

import psycopg2
import pytest

from tests.integration.conftest import Tally
from tests.servers import Server
from tests.store import StateReader, key_lookup, prepare_times, registration, state_tables
from tidegate import migrations
from tidegate.jobs import Count, Files, Max, Pipeline, State
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import AccessRefused, SchemaOutOfDate, StoreUnavailable, UsageError

KEYED = Pipeline(
    name="keyed",
    source=Files("keyed", glob="*.csv", format="csv", schema={"word": "string"}),
    states={
        "words": State(key={"word": "text"}, aggregates={"seen": Count(), "longest": Max("word", "text")}),
        "pairs": State(key={"carrier": "text", "day": "date"}, aggregates={"seen": Count()}),
        "times": State(key={"at": "timestamptz"}, aggregates={"seen": Count()}),
        "amounts": State(key={"amount": "numeric(10,2)"}, aggregates={"seen": Count()}),
        "numbers": State(key={"number": "integer"}, aggregates={"seen": Count()}),
        "big_numbers": State(key={"number": "bigint"}, aggregates={"seen": Count()}),
        "days": State(key={"day": "date"}, aggregates={"last": Max("at", "timestamptz")}),
        "flags": State(key={"flag": "boolean"}, aggregates={"seen": Count()}),
        "blobs": State(key={"digest": "bytea"}, aggregates={"seen": Count()}),
        "prices": State(key={"price": "numeric(10,2)", "shop": "text"}, aggregates={"seen": Count()}, null_keys=True),
    },
)
TEXTS = ["plain", "", " ", "'", '"', "a'b\"c", "'; DROP TABLE state.words; --", "%s", "%(word)s", "{}", "\\", "a,b\nc"]
MORE_TEXTS = ["São Paulo", "e\u0301", "\u00e9", "\U0001f6a2", "NULL", "\\N", "A", "a"]
ROWS = {
    "words": [(text, number, text) for number, text in enumerate([*TEXTS, *MORE_TEXTS])],
    "pairs": [("UA", "2013-01-01", 165), ("UA", "2012-02-29", 1), ("O'Hare", "0001-01-01", 2), ("", "9999-12-31", 3)],
    "times": [("2013-01-01T05:30:00.123456Z", 1)],
    "amounts": [("1.00", 1), ("1.01", 2), ("-0.05", 3)],
    "numbers": [("-2147483648", 1), ("42", 2)],
    "big_numbers": [("9223372036854775807", 1)],
    # By hand.
    "days": [
        ("0044-03-15 BC", "2013-01-01T00:00:00Z"),
        ("2013-01-01", "2013-01-01T01:00:00Z"),
        ("12000-02-03", "20000-01-01T00:00:00Z"),
    ],
    "flags": [("true", 1), ("false", 2)],
    "blobs": [(r"\x00ff", 1), (r"\x01", 1), (r"\x62", 1)],
    "prices": [("1.00", "a", 1), ("1.01", "a", 2), (None, "a", 3), ("1.00", None, 4), (None, None, 5)],
}
MISSES = [
    ("words", ("a ",)),
    ("words", ("PLAIN",)),
    ("words", ("x" * 100_000,)),
    ("pairs", ("UA", "2013-01-02")),
    ("pairs", ("ua", "2013-01-01")),
    ("numbers", ("43",)),
    ("amounts", ("1.02",)),
    ("amounts", ("1.005",)),  # would be found if it were rounded to the column's scale
    ("times", ("2013-01-01T05:30:00.123457Z",)),
]
NO_VALUES = [
    ("pairs", ("UA", "yesterday-ish"), "yesterday-ish"),
    ("pairs", ("UA", "2013-02-29"), "2013-02-29"),
    ("pairs", ("UA", ""), '""'),
    ("numbers", ("forty",), "forty"),
    ("numbers", ("4.5",), "4.5"),
    ("numbers", ("2147483648",), "2147483648"),
    ("big_numbers", ("9223372036854775808",), "9223372036854775808"),
    ("amounts", ("1,00",), "1,00"),
    ("flags", ("maybe",), "maybe"),
    ("times", ("noonish",), "noonish"),
    ("words", ("nul \0 inside",), "NUL"),
    ("words", ("lone \udce9 surrogate",), "surrogates not allowed"),
]
Get = Callable[..., list[Mapping[str, object] | None]]


@pytest.fixture(scope="module")
def filled(server: Server, template: str) -> Iterator[Settings]:
    """Settings with a database whose states one committed batch has filled; lookups do not change it."""
    name = server.create_database(template)
    settings = replace(server.settings, pg_database=name)
    with migrations.connected(settings) as connection:
        state_tables.metadata_of((KEYED.spec,)).create_all(connection)
        registration.register(connection, KEYED.spec)
    with StateStore.connect(settings) as store:
        tally = Tally(store, KEYED.spec)
        tally.plan()
        tally.process_states(1, ROWS, source_rows=1)
        tally.commit(1)
    yield settings
    server.drop_database(name)


@pytest.fixture
def get(filled: Settings) -> Get:
    def look_up(state: str, *keys: tuple[str, ...]) -> list[Mapping[str, object] | None]:
        spec = KEYED.spec.state(state)
        assert spec is not None
        return key_lookup.get(filled, spec, keys)

    return look_up


def test_keys_of_every_type_are_found(get: Get) -> None:
    assert get("pairs", ("UA", "2013-01-01")) == [{"carrier": "UA", "day": date(2013, 1, 1), "seen": 165, "txid": 1}]
    assert get("pairs", ("O'Hare", "0001-01-01"), ("", "9999-12-31")) == [
        {"carrier": "O'Hare", "day": date(1, 1, 1), "seen": 2, "txid": 1},
        {"carrier": "", "day": date(9999, 12, 31), "seen": 3, "txid": 1},
    ]
    (same, instant) = get("times", ("2013-01-01 05:30:00.123456+00",), ("2013-01-01T06:30:00.123456+01:00",))
    assert same == instant
    assert same is not None
    assert same["at"] == datetime(2013, 1, 1, 5, 30, 0, 123456, tzinfo=UTC)
    assert [row and row["amount"] for row in get("amounts", ("1",), ("1.010",), ("-.05",))] == [
        Decimal("1.00"),
        Decimal("1.01"),
        Decimal("-0.05"),
    ]
    assert [row and row["seen"] for row in get("numbers", ("-2147483648",), ("042",))] == [1, 2]
    assert [row and row["seen"] for row in get("big_numbers", ("9223372036854775807",))] == [1]
    assert [row and row["seen"] for row in get("flags", ("true",), ("f",))] == [1, 2]


def test_any_text_finds_its_own_row(get: Get) -> None:
    texts = [*TEXTS, *MORE_TEXTS]
    assert get("words", *((text,) for text in texts)) == [
        {"word": text, "seen": number, "longest": text, "txid": 1} for number, text in enumerate(texts)
    ]
    assert [found for state, key in MISSES for found in get(state, key)] == [None] * len(MISSES)
    keys = [("a",), ("missing",), ("A",), ("a",), ("missing",), ("plain",)]
    assert [row and row["word"] for row in get("words", *keys)] == ["a", None, "A", "a", None, "plain"]
    assert get("words") == []
    count = 2 * key_lookup.KEYS_PER_STATEMENT + 1
    keys = [("a",) if number % 7 == 0 else (f"missing {number}",) for number in range(count)]
    found = get("words", *keys)
    assert len(found) == count
    assert [number for number, row in enumerate(found) if row] == list(range(0, count, 7))


def test_bytes_are_keys_and_bounds(filled: Settings) -> None:
    with StateReader.open(filled, "keyed", "blobs") as reader:
        assert [bytes(row["digest"]) for row in reader.get_many([[b"\x01"], [b"b"]]).rows if row] == [b"\x01", b"b"]
        assert [bytes(row["digest"]) for row in reader.range([b"\x01"], [b"b"], limit=9).rows if row] == [b"\x01", b"b"]


def test_a_key_of_null_and_bounds_of_more_digits(filled: Settings) -> None:
    with StateReader.open(filled, "keyed", "prices") as reader:
        keys = [(None, "a"), ("1.00", "a"), (None, None), ("1", None), (None, "b"), ("1.004", "a")]
        assert [row and row["seen"] for row in reader.get_many(keys).rows] == [3, 1, 5, 4, None, None]
        for first, last, found in (("1.004", "2", [2]), ("0", "1.006", [1]), ("0", "1.01", [1, 2])):
            rows_found = reader.range([first], [last], limit=9).rows
            assert [row["seen"] for row in rows_found if row and row["shop"]] == found, (first, last)
        with pytest.raises(UsageError, match="has no such key"):
            reader.range(["1", "a\0"], limit=1)


def test_a_value_that_its_column_cannot_hold_is_a_usage_error(get: Get) -> None:
    for state, key, value in NO_VALUES:
        with pytest.raises(UsageError) as refused:
            get(state, *([ROWS[state][0][: len(key)]] * 3), key)
        assert value in str(refused.value)
        assert "\n" not in str(refused.value)
    for key in ((), ("UA",), ("UA", "2013-01-01", "more")):
        with pytest.raises(UsageError, match=f"State pairs is keyed by carrier, day: give 2 values, not {len(key)}"):
            get("pairs", ("UA", "2013-01-01"), key)


def test_a_database_that_cannot_answer_says_why(settings: Settings, store: StateStore) -> None:
    (state,) = (state for state in KEYED.spec.states if state.name == "words")
    with pytest.raises(SchemaOutOfDate, match=r'relation "state\.words" does not exist.*Run: tidegate migrate'):
        key_lookup.get(settings, state, [("a",)])
    with pytest.raises(AccessRefused, match="tidegate settings"):
        key_lookup.get(replace(settings, pg_user="unknown_user"), state, [("a",)])
    with pytest.raises(AccessRefused, match='database "gone" does not exist'):
        key_lookup.get(replace(settings, pg_database="gone"), state, [("a",)])
    with pytest.raises(StoreUnavailable, match="tidegate up"):
        key_lookup.get(replace(settings, pg_port=1), state, [("a",)])


def test_a_time_that_python_cannot_represent_is_read_as_text(filled: Settings) -> None:
    days = KEYED.spec.state("days")
    assert days is not None
    far = {"day": "12000-02-03", "last": "20000-01-01 00:00:00+00", "txid": 1}
    assert key_lookup.get(filled, days, [("12000-02-03",), ("0044-03-15 BC",), ("13000-01-01",)]) == [
        far,
        {"day": "0044-03-15 BC", "last": datetime(2013, 1, 1, tzinfo=UTC), "txid": 1},
        None,
    ]
    with StateStore.connect(filled) as reading:
        rows = list(reading.state_rows(days))
    assert [row["day"] for row in rows] == ["0044-03-15 BC", date(2013, 1, 1), "12000-02-03"]
    assert rows[-1] == far
    with closing(psycopg2.connect(**filled.conninfo())) as connection, connection.cursor() as cursor:
        prepare_times(connection)
        cursor.execute("SELECT 'infinity'::date, '-infinity'::timestamp, 'infinity'::timestamptz, '9999-12-31'::date")
        assert cursor.fetchone() == ("infinity", "-infinity", "infinity", date(9999, 12, 31))
