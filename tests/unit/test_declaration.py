"""Declarations are checked at once, with clear messages, and the fingerprint changes with their meaning."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import datetime
from typing import Any

import pytest

from tests.store import spec_of
from tidegate import jobs as j

SOURCE = j.Files("inbox", format="csv", schema={"name": "string", "amount": "int", "price": "decimal(10,2)"})
STATE = j.State(key={"name": "text"}, aggregates={"lines": j.Count(), "amount": j.Sum("amount")})
Declare = Callable[[], Any]


def declare(**changes: Any) -> j.Pipeline:
    return j.Pipeline(**{"name": "inbox", "source": SOURCE, "states": {"per_name": STATE}, **changes})


def declare_state(**changes: Any) -> j.Pipeline:
    return declare(states={"per_name": replace(STATE, **changes)})


def state(**aggregates: Any) -> Any:
    return j.State(aggregates=aggregates).spec("s")


def rows(ranges: j.Ranges | None) -> j.Rows:
    return j.Rows({"at": "date", "n": "bigint"}, range_partitions=ranges)


def history(**changes: Any) -> Any:
    parts = {"key": {"name": "text"}, "columns": {"label": "text", "n": "bigint"}, "order_by": {"at": "timestamptz"}}
    return j.History(**parts | changes).spec("versions")


def files(folder: str = "inbox", **source: Any) -> j.Files:
    return j.Files(folder, **{"format": "csv", "schema": {"name": "string"}, **source})


def table(**changes: Any) -> j.PostgresTable:
    schema = {"id": "bigint", "name": "string", "at": "timestamp"}
    return j.PostgresTable(**{"table": "orders", "key": "id", "schema": schema, **changes})


def merged(sources: dict[str, Any], *, wait_for_all: bool = False, **pipeline: Any) -> j.Pipeline:
    return declare(source=j.Inputs(sources, wait_for_all=wait_for_all), **pipeline)


def asks(*queries: j.StateQuery, **changes: Any) -> j.Pipeline:
    newest = j.Newest({"name": "text"}, {}, {"n": "integer"}, kind="non-transactional")
    states = {"by_name": STATE, "plane": newest, "report": j.Rows({"name": "text"})}
    usual = {"states": states, "queries": queries, "transform": lambda rows: rows, "guarantee": "at_least_once"}
    return declare(**usual | changes)


def query(**changes: Any) -> j.Query:
    usual = {"name": "total", "answer": lambda states, words: (states, words), "reads": ["inbox.per_name"]}
    return j.Query(**usual | {"arguments": {"words": "text[]"}} | changes)


PLANE = j.History({"name": "text"}, {"n": "bigint"}, {"at": "timestamptz"})
HOURLY = j.Tumbling("at", "1 hour", final_after="1 hour", emit_final=True)
KEPT = replace(STATE, window=j.Tumbling("at", "1 hour", final_after="1 hour", keep="1 day"))
ALIKE = {"id": "int", "Id": "int"}
PLANES = j.Reference(j.Files("planes", format="csv", schema={"tail": "string"}))
UNSURE = j.StateQuery("ships.by_name", as_of="latest")
A, B, OPAQUE = files("a"), files("b"), files("o", kind="opaque")
BOTH = {"a": A, "b": B}
DATED = files(schema={"name": "string", "at": "timestamp"})
# What holds for a record at one time, or beside others.
IMPURE = (
    *("at <= Now()", "`rand` /* it's */ () < 0.5", "name = r'\\' OR rand() < 0.5 OR name = '\\''", "at <= current_date"),
    *("at < 'today'", "'now' > at", "at between 'yesterday' and 'tomorrow'", "at = 'today'", "at IN ('2020-01-01', 'today')"),
    *("date'today' > at", "at < cast(' Now UTC' AS timestamp)", "'now'::timestamp > at", "datediff(at, 'today') < 9"),
    *("first(at) OVER (ORDER BY name) = at", "hex(aes_encrypt(name, 'key')) > ''", "_metadata.file_size > 0", "uuid() > name"),
)
PURE = """`now` = 'rand()' AND name IN ('a', 'today') AND 'now' <> name AND 'now' <=> name -- it's now() 'today' < 1
    AND aes_encrypt(name, concat(at, 'k'), 'CBC', 'DEFAULT', name) = if(name > '', 'now', 'then')
    AND cast('now' AS string) < at AND at < timestamp'2020-01-01' AND `current_date` > unix_timestamp(at)"""
TWICE = "differ by case at most, and are one name to Spark"
NO_TYPE = "is not a column type. Choose one of: text, boolean"
NAMED: list[tuple[Callable[[str], Any], str]] = [
    (lambda name: declare(name=name), "a pipeline"),
    (lambda name: declare(states={name: STATE}), "a state"),
    (lambda name: declare_state(key={name: "text"}), "a column of state per_name"),
    (lambda name: declare_state(aggregates={name: j.Count()}), "a column of state per_name"),
]

REFUSED: dict[str, list[tuple[Declare, str]]] = {
    "a name that is no plain identifier": [
        (lambda make=make, name=name: make(name), f"cannot be the name of {what}")
        for name in ("Flights", "semi;colon", "zürich", "a" * 41)
        for make, what in NAMED
    ],
    "a topic": [
        (lambda: j.Kafka("orders", start=datetime(2026, 11, 1)), "Add tzinfo"),
        (lambda: j.Kafka("orders", when_expired="continue"), "a transactional source leaves none out"),
    ],
    "a table": [
        (lambda: table(key=("id", "name")), "a key of two columns is a timestamp"),
        (lambda: table(key=("at", "id"), key_is_drawn=True), "key_is_drawn is not for a key that begins with a time"),
        (lambda: table(schema={"id": "double"}), "id is double, which puts nothing in order"),
        (lambda: table(schema={"id": "date"}), "depends on the writer's time zone"),
        (lambda: table(connection="host=a dbname=b user=c password=hidden"), "connection holds a password"),
        (lambda: table(connection={"hots": "hidden"}), "neither a libpq connection string"),
    ],
    "a pipeline": [
        (lambda: declare(window=0), "window of 0; it must be at least 1"),
        (lambda: declare(states={"plane": PLANE, "plane_versions": PLANE}), "two tables named plane_versions"),
        *((lambda check=check: declare(source=DATED, check={"known": check}), "the check 'known' uses") for check in IMPURE),
        (lambda: declare(name="inbox__v2", states={"per_name__v2": STATE}), "as only a rebuild's does"),
    ],
    "columns that are one to Spark": [
        *((lambda of=of: files(format=of, schema=ALIKE), f"id and Id {TWICE}") for of in ("csv", "json", "parquet")),
        (lambda: files(format="json", schema={"id": "int"}, partitions={"day": "int", "Day": "int"}), f"day and Day {TWICE}"),
        (lambda: files(format="json", schema={"v": "array<struct<id: int, Id: int>>"}), f"id and Id {TWICE}"),
        (lambda: j.Delta("t", schema=ALIKE), f"id and Id {TWICE}"),
        (lambda: j.Iceberg("a.b.c", schema=ALIKE), f"id and Id {TWICE}"),
        (lambda: j.PostgresTable(table="t", key="id", schema=ALIKE), f"id and Id {TWICE}"),
    ],
    "a state": [
        *((lambda kind=kind: declare_state(key={"name": kind}), NO_TYPE) for kind in ("float", "char(3)", "TEXT")),
        (lambda: j.State(key={"a": "bigint[]"}, aggregates={"n": j.Count()}).spec("s"), "cannot keep an array in a"),
        (lambda: j.Newest({}, {}, {"at": "date"}), "needs a key"),
    ],
    "an aggregate": [
        *((lambda kind=kind: j.Sum("name", kind), f"cannot be kept as {kind}") for kind in ("text", "boolean", "timestamp")),
        *((lambda of=of: state(x=of("amount", "TEXT")), "is not a column type") for of in (j.Min, j.Max)),
        (lambda: state(x=j.Avg("a"), x_sum=j.Count()), "two columns named x_sum"),
        (lambda: state(x=j.CollectSet("a", "bytea")), "is not a column type"),
        (lambda: state(x=j.CollectSet("a", "text", most=0)), "use 1 to 10000"),
        (lambda: j.Histogram("a", [2, 1]), "bounds in ascending order"),
        (lambda: j.Histogram("a", [0.1]), "write a bound with decimals as text"),  # type: ignore[list-item]
    ],
    "a sketch": [
        (lambda: j.ApproxDistinct("a", "text", error=0.001), "must be from 0.01 to 0.3"),
        (lambda: j.ApproxDistinct("a", "text[]"), "not arrays"),
        (lambda: j.ApproxQuantiles("a", 1000, "text"), "cannot read text"),
        (lambda: j.ApproxQuantiles("a", 10**9, error=0.001), "counts per key; at most 10000"),
        (lambda: j.ApproxQuantiles("a", 1000, probabilities=[0.5, 1]), "needs probabilities between 0 and 1"),
    ],
    "a history": [
        (lambda: history(order_by={"name": "text"}), "has name in its key and in order_by"),
        (lambda: history(columns={"valid_to": "date"}), "two columns named valid_to"),
        (lambda: history(changes=True), "declare kind='opaque'"),
    ],
    "rows": [
        (lambda: j.Rows({"txid": "bigint"}).spec("log"), "cannot have a column named txid"),
        (lambda: j.Rows({"position": "bigint"}).spec("log"), "two columns named position"),
        (lambda: j.Rows({"a": "text[]"}).spec("log"), "cannot keep an array in a"),
        (lambda: rows(j.Ranges("n", "day")).spec("log"), "column n, a bigint: its type has to be date or timestamptz"),
    ],
    "a window": [
        (lambda: j.Tumbling("at", "1 month"), "Tumbling('at'): '1 month' is no duration"),
        (lambda: j.Tumbling("at", "1 hour", emit_final=True), "emit_final needs final_after"),
        (lambda: j.Sliding("at", "1 hour", "25 minutes"), "has to be a multiple of `every`, 25 minutes"),
        (lambda: j.Sliding("at", "1 day", "1 second"), "each row would be in 86400 windows; 1000 are possible"),
        (lambda: j.Tumbling("at", "1 hour", keep="1 day"), "keep needs final_after. A late row would begin a removed"),
        (lambda: j.Session("at", "1 hour", final_after="2 days", keep="1 day"), "keep is 1 day, less than final_after"),
        (lambda: declare_state(window=j.Session("at", "1 hour"), kind="opaque"), "cannot have sessions and be opaque"),
        (lambda: declare_state(window=HOURLY, kind="opaque", changes=True), "record both its changes and its final windows"),
        (lambda: declare_state(window=HOURLY, key={"window_start": "text"}), "has two columns named window_start"),
    ],
    "a query of a state": [
        (lambda: j.StateQuery("by_name"), "'by_name' has to name pipeline and state, as in flights.daily"),
        (lambda: asks(j.StateQuery("inbox.gone")), "and has no such state. It has by_name, plane, report."),
        (lambda: asks(j.StateQuery("inbox.report")), "only a State or a Newest has rows by key"),
        (lambda: asks(j.StateQuery("inbox.plane")), "does not know which txid wrote a row"),
        (lambda: asks(j.StateQuery("inbox.kept"), states={"kept": KEPT}), "miss those that its batch has removed"),
        (lambda: asks(j.StateQuery("ships.by_name")), 'the txids of another pipeline are others. Say as_of="latest".'),
        (lambda: asks(j.StateQuery("inbox.by_name"), window=4), "a window of 4, and its batches read what the one before"),
        (lambda: asks(UNSURE, states={"s": STATE}, guarantee="exactly_once"), "another attempt at a batch may read other"),
    ],
    "a query": [
        (lambda: query(reads=[]), 'has to list the states that it reads: reads=["pipeline.state"]'),
        (lambda: query(arguments={"words": "text[]", "most": "integer"}), "only the last argument can be an array"),
        (lambda: query(arguments={}), "answer(states), which does not fit: missing a required argument: 'words'"),
        (lambda: query(most_rows=0), "needs most_rows and timeout_seconds of at least 1"),
    ],
    "files": [
        (lambda: files(glob="*.{json,jsonl"), "Files('inbox'): the glob *.{json,jsonl has a brace without its partner"),
        *((lambda pattern=pattern: files(glob=pattern), 'write "*"') for pattern in ("", "/data/*.json", "{/etc,x}/*")),
        (lambda: files(marker=""), "cannot have the marker ''"),
        (lambda: files(glob="*.csv", marker="done.csv"), "would read the marker done.csv as data: *.csv matches it"),
        (lambda: files(partitions={"name": "int"}), "has the column name in schema and in partitions"),
        (lambda: files(partitions={"p": "array<int>"}), "which no folder's name can be"),
    ],
    "files of a store": [
        (lambda: files("s3a://lake/in/*.parquet"), "there is a * in the place. Write a pattern as glob="),
        (lambda: files("s3a://key:secret@lake/in"), "Files('s3a://***@lake/in'): a URL must not have a password"),
        (lambda: files("s3a://key:sec/ret@lake/in"), "Files('s3a://***@lake/in'): a URL must not have a password"),
        (lambda: files("s3a://lake/in", follow_links=True), "has no links to follow"),
        (lambda: files("s3a://lake/in", names_grow=True, kind="opaque"), "cannot be opaque with names_grow"),
        (lambda: files("in", manifests="lists"), "is a folder on a disk: manifests is for a store"),
        (lambda: files("s3a://lake/in", versions=True, kind="opaque"), "cannot be opaque with versions"),
        (lambda: files("in", versions=True), "is a folder on a disk: versions is for a store"),
    ],
    "several inputs": [
        (lambda: j.Inputs({"a": A, "b": A}), "Inputs a and b are the same source, so each row would come twice"),
        (lambda: j.Inputs({"a": files("a", done_folder="b/done"), "b": B}), "Inputs a and b share a folder, b/done and b"),
        (lambda: j.Inputs({"a": A, "b": replace(PLANES, keep_folder="a/kept")}), "Inputs a and b share a folder"),
        (lambda: merged({"a": A, "planes": PLANES}), "needs a transform that joins with planes"),
        (lambda: merged({"a": A, "b": files("b", partitions={"dt": "date"})}), "different columns: only one of them has dt"),
        (lambda: merged(BOTH, transform=len, check={"known": "name > ''"}), 'is for: check={"a"'),
        (lambda: declare(source=A, check={"known": {"a": "true"}}), "checks for input 'known', which its source does not have"),
        (lambda: merged(BOTH, wait_for_all=True, transform=len, on_poison="quarantine"), "aside and have wait_for_all"),
        (lambda: j.Inputs({"a": A, "o": OPAQUE}, kind="best"), "Inputs cannot be 'best': one of them is opaque"),
        (lambda: j.Inputs({"o": OPAQUE, "b": B}, kind="transactional"), "cannot be 'transactional': one of them is opaque"),
        (lambda: merged({"a": A, "b": j.Changes("inbox.per_name")}, transform=len), "Pipeline inbox follows itself"),
    ],
}


@pytest.mark.promise("limit:MOST_PER_ROW", "limit:MOST_ELEMENTS", "decision:0008")
@pytest.mark.parametrize("cases", REFUSED.values(), ids=REFUSED.keys())
def test_a_declaration_that_cannot_work_is_refused_when_it_is_made(cases: list[tuple[Declare, str]]) -> None:
    for made, message in cases:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)) as refusal:
            made()
        assert "hidden" not in str(refusal.value)


def test_a_check_of_what_a_record_has_only_looks_impure() -> None:
    assert declare(source=DATED, check={"known": PURE}).conditions == {"known": PURE}


def test_the_same_declaration_has_the_same_fingerprint() -> None:
    again = j.Pipeline(name="inbox", source=replace(SOURCE), states={"per_name": replace(STATE)})
    assert declare().spec == again.spec
    undivided, divided = (declare(states={"log": rows(ranges)}).spec for ranges in (None, j.Ranges("n", 10)))
    assert undivided.fingerprint == divided.fingerprint
    changed = declare(description="for people", window=9, concurrency=2, transform=lambda rows: rows)
    assert changed.spec.fingerprint == again.spec.fingerprint


KINDS = {
    "usual": declare(),
    "name": declare(name="other"),
    "version": declare(version=2),
    "source": declare(source=replace(SOURCE, folder="elsewhere")),
    "a state's name": declare(states={"other": STATE}),
    "NULL keys": declare_state(null_keys=True),
    "a key's type": declare_state(key={"name": "date"}),
    "a value's type": declare_state(aggregates={"lines": j.Count(), "amount": j.Sum("amount", "integer")}),
    "another merge": declare_state(aggregates={"lines": j.Count(), "amount": j.Max("amount")}),
    "the sum of another column": declare_state(aggregates={"lines": j.Count(), "amount": j.Sum("price")}),
    "the count of a column": declare_state(aggregates={"lines": j.Count("amount"), "amount": j.Sum("amount")}),
    "a window": declare_state(window=j.Tumbling("at", "1 hour")),
    "its size": declare_state(window=j.Tumbling("at", "2 hours")),
    "its offset": declare_state(window=j.Tumbling("at", "1 hour", offset="1 minute")),
    "its type": declare_state(window=j.Tumbling("at", "1 hour", type="timestamp")),
    "when it is final": declare_state(window=j.Tumbling("at", "1 hour", final_after="1 hour")),
    "what is recorded": declare_state(window=HOURLY),
    "a session": declare_state(window=j.Session("at", "1 hour")),
    "sliding ones": declare_state(window=j.Sliding("at", "1 hour", "30 minutes", type="timestamp", final_after="0 hours")),
    "sliding by their length": declare_state(window=j.Sliding("at", "1 hour", "1 hour")),
    "no query": asks(),
    "a query": asks(j.StateQuery("inbox.by_name"), window=1),
    "queries of the latest": asks(j.StateQuery("inbox.by_name", as_of="latest"), j.StateQuery("inbox.plane", as_of="latest")),
}


@pytest.mark.promise("I16")
def test_every_change_of_a_values_meaning_changes_the_fingerprint_and_the_ledger_has_it() -> None:
    specs = [pipeline.spec for pipeline in KINDS.values()]
    assert len({spec.fingerprint for spec in specs}) == len(specs)
    for spec in specs:
        read = spec_of(spec.declaration)
        assert (read.states, read.fingerprint, read.tables) == (spec.states, spec.fingerprint, spec.tables)


def test_batches_that_depend_on_the_one_before_are_merged_one_by_one() -> None:
    specs = {name: pipeline.spec for name, pipeline in KINDS.items()}
    alone = [specs[name].commits_alone for name in ("a window", "a session", "when it is final")]
    assert alone == [False, True, True]
    of_queries = [specs[name] for name in ("no query", "a query", "queries of the latest")]
    assert [(spec.window, spec.awaits_previous) for spec in of_queries] == [(16, False), (1, True), (16, False)]
    assert asks(j.StateQuery("inbox.by_name")).spec.window == 1
    accepted = replace(UNSURE, allow_not_repeatable=True)
    assert asks(accepted, guarantee="exactly_once", states={"s": STATE}).spec.queries == (accepted.read,)


@pytest.mark.promise("decision:0053")
def test_a_state_by_key_is_one_table() -> None:
    found = [field.name for state in (j.State, j.Rows) for field in fields(state) if "partition" in field.name]
    assert found == ["range_partitions"]
