"""Transforms that read committed states: the same in every attempt, by key, with the right types, or refused by name."""

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from tests import steps
from tests.integration.conftest import Tally
from tests.jobs.conftest import Tables
from tests.store import Attempt, NotStarted
from tidegate.explain.why import explain
from tidegate.jobs import Avg, Count, Files, Newest, Pipeline, Rows, State, StateQuery, Sum, state_query
from tidegate.jobs.compute.batch_attempt import stage_batch
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.testing import partials
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import AccessRefused, DeclarationInvalid, GuardMismatch, RangeRefused

KEPT = {"lines": Count(), "amount": Sum("amount"), "mean": Avg("amount", digits=3)}
PER_NAME = State({"name": "text"}, KEPT, kind="opaque")
SCHEMA = {"name": "string", "amount": "bigint"}
FIRST, SECOND = [("a", 1), ("b", 2), ("a", 3)], [("b", 6), ("c", 7), ("c", 8)]
LOG = Rows({"name": "text", "amount": "bigint", "before": "bigint", "mean_before": "numeric(38,3)", "since": "bigint"})


def with_before(rows: Any) -> Any:
    columns = {"amount": "before", "mean": "mean_before", "txid": "since"}
    return state_query(rows, "inbox.per_name", on=["name"], columns=columns)


def declare(tables: Tables, **pipeline: Any) -> Pipeline:
    usual = {"states": {"per_name": PER_NAME, "log": LOG}, "queries": [StateQuery("inbox.per_name")], "transform": with_before}
    return tables.declare(Files("inbox", schema=SCHEMA, max_files=1), **usual | pipeline)


def log_of(tables: Tables, pipeline: Pipeline) -> list[tuple[Any, ...]]:
    names = ("txid", "name", "amount", "before", "mean_before", "since")
    return sorted((tuple(row[name] for name in names) for row in steps.rows(tables.settings, pipeline, "log")), key=repr)


@pytest.mark.promise("I21")
def test_a_row_that_is_newer_than_the_batch_is_refused(tables: Tables, store: StateStore) -> None:
    pipeline = declare(tables, states={"per_name": State({"name": "text"}, KEPT), "log": LOG})
    tables.put_rows(SCHEMA, FIRST)
    (txid,) = tables.plan(pipeline, "run")
    overtaken = store.start_attempt(pipeline.spec, txid, "overtaken")
    assert isinstance(overtaken, Attempt)
    steps.complete(tables.settings, pipeline, txid)
    with spark_session(tables.settings, "inbox") as spark, pytest.raises(GuardMismatch, match="may see none after 0"):
        stage_batch(store, pipeline, overtaken, spark)


@pytest.mark.promise("I21")
def test_a_redo_reads_what_was_there_before(tables: Tables) -> None:
    pipeline = declare(tables)
    tables.put_rows(SCHEMA, FIRST, SECOND)
    tables.run(pipeline)
    before = log_of(tables, pipeline), tables.rows(pipeline)
    tables.put_rows(SCHEMA, FIRST)
    tables.plan(pipeline, "next")
    steps.redo(tables.settings, pipeline, 2, owner="an operator", reason="txid 3 is planned, and has not begun")
    assert (log_of(tables, pipeline), tables.rows(pipeline)) == before
    steps.process(tables.settings, pipeline, 3, owner="test")
    with pytest.raises(RangeRefused, match="txid 3 has begun, and reads states that would be taken back"):
        steps.redo(tables.settings, pipeline, 2, owner="an operator", reason="a test")
    steps.commit(tables.settings, pipeline, 3, owner="test")
    nothing = (None, None, None)
    assert log_of(tables, pipeline) == [
        *((1, name, amount, *nothing) for name, amount in sorted(FIRST)),
        *((2, "b", 6, 2, Decimal(2), 1), (2, "c", 7, *nothing), (2, "c", 8, *nothing)),
        *((3, "a", 1, 4, Decimal(2), 1), (3, "a", 3, 4, Decimal(2), 1), (3, "b", 2, 8, Decimal(4), 2)),
    ]


@pytest.mark.promise("I21", "decision:0031")
def test_a_batch_waits_for_the_one_before_and_says_so(tables: Tables, store: StateStore, as_owner: Callable[..., Any]) -> None:
    pipeline = declare(tables)
    tables.put_rows(SCHEMA, FIRST, SECOND, FIRST, SECOND)
    assert tables.plan(pipeline, "run") == [1, 2, 3, 4]
    as_owner(sa.text("UPDATE tidegate.pipeline SET in_flight = 16"))
    assert isinstance(store.start_attempt(pipeline.spec, 1, "test"), Attempt)
    assert store.start_attempt(pipeline.spec, 2, "test") is NotStarted.AHEAD
    waits, first = explain(store, pipeline, 3).causes
    assert (waits.code, waits.txid, first.txid) == ("WAITS_FOR_STATE", 3, 1)
    says = "Txid 3 may begin when txid 2 has committed: it reads inbox.per_name as that has left it. Txid 1 commits next."
    assert waits.sentence == says


def test_what_has_counted_is_left_out(tables: Tables) -> None:
    states = {"per_name": PER_NAME, "new": Rows({"name": "text", "amount": "bigint"})}
    new = lambda rows: state_query(rows, "inbox.per_name", on=["name"], how="anti")  # noqa: E731
    pipeline = declare(tables, states=states, transform=new)
    tables.put_rows(SCHEMA, [("a", 1), ("b", 2)], [("a", 3), ("c", 4)])
    tables.run(pipeline)
    found = [(row["name"], row["amount"]) for row in tables.rows(pipeline, "new")]
    assert sorted(found) == [("a", 1), ("b", 2), ("c", 4)]


TIMES = [datetime(2026, 3, 29, 1, 30, 0, 1), datetime(1, 1, 1), datetime(9999, 12, 31)]
# Of each type of a state: Spark's, and values.
TYPES: dict[str, tuple[str, list[Any]]] = {
    "text": ("string", ["", "São Paulo", 'a"\\,{}\n']),
    "boolean": ("boolean", [True, False, True]),
    "integer": ("int", [2**31 - 1, -(2**31), 0]),
    "bigint": ("bigint", [2**63 - 1, -(2**63), 0]),
    "date": ("date", [date(1, 1, 1), date(9999, 12, 31), date(2026, 2, 28)]),
    "timestamptz": ("timestamp", [time.replace(tzinfo=UTC) for time in TIMES]),
    "timestamp": ("timestamp_ntz", TIMES),
    "bytea": ("binary", [b"\x00\xff", b"", b"'\\x"]),
    "numeric(20,4)": ("decimal(20,4)", [Decimal("1234567890123456.7891"), Decimal("-0.0001"), Decimal("0.0000")]),
    "uuid": ("string", [str(UUID(int=1)), str(UUID(int=2**128 - 1)), "00000000-0000-0000-0000-00000000000a"]),
}


def test_keys_and_values_of_every_type_come_back_as_they_are(tables: Tables) -> None:
    places = range(len(TYPES))
    columns = {f"v{place}": kind for place, kind in enumerate(TYPES)}
    renamed = {f"v{place}": f"old{place}" for place in places}
    keys = {f"k{place}": kind for place, kind in enumerate(TYPES)}
    newest = Newest(keys, columns, {"at": "integer"}, null_keys=True, kind="opaque")
    log = Rows({**dict(zip(renamed.values(), TYPES, strict=True)), "at": "integer", "old_at": "integer"})
    schema = {f"k{place}": kind for place, (kind, _) in enumerate(TYPES.values())}

    def transform(rows: Any) -> Any:
        rows = rows.selectExpr("*", *(f"k{place} AS v{place}" for place in places), "1 AS at")
        found = state_query(rows, "inbox.newest", on=[*reversed(keys)], columns={**renamed, "at": "old_at"})
        return found.where("k0 IS NULL OR NOT contains(k0, char(0))")

    states, queries = {"newest": newest, "log": log}, [StateQuery("inbox.newest")]
    pipeline = tables.declare_over(schema, None, transform, states=states, queries=queries)
    rows: list[list[Any]] = [[values[number] for _, values in TYPES.values()] for number in range(3)]
    rows += [[None] * len(TYPES), [*rows[0][:-1], None]]
    tables.put_rows(schema, rows, [*rows, ["with \0", *rows[0][1:]]])
    tables.run(pipeline)
    log_rows = [row for row in steps.rows(tables.settings, pipeline, "log") if row["txid"] == 2]
    assert [row["old_at"] for row in log_rows] == [1] * len(rows)
    found = [[bytes(v) if isinstance(v, memoryview) else v for v in map(row.get, renamed.values())] for row in log_rows]
    assert sorted(found, key=repr) == sorted(([*row[:-1], row[-1] and UUID(row[-1])] for row in rows), key=repr)


@pytest.mark.promise("testing:GivenStates")
def test_a_query_outside_of_a_transform_says_where_it_belongs(tables: Tables) -> None:
    """In a test of an author's, the states are given; they need not be in Postgres."""
    with spark_session(tables.settings, "inbox") as spark:
        rows = spark.createDataFrame([("a", 1), ("b", 2)], "name string, amount bigint")
        with pytest.raises(DeclarationInvalid, match="is not called by a transform while a batch is computed"):
            with_before(rows)
        pipeline = declare(tables)
        known = spark.createDataFrame([("a", 5, "2.5", 7)], "name string, amount bigint, mean string, txid bigint")
        typed = known.selectExpr("name", "amount", "cast(mean AS decimal(38,3)) mean", "txid")
        log = partials(pipeline, rows, states={"inbox.per_name": typed})["log"]
        assert sorted((row["name"], row["before"], row["since"]) for row in log) == [("a", 5, 7), ("b", None, None)]
        with pytest.raises(DeclarationInvalid, match="no rows of it are given"):
            partials(pipeline, rows)


@pytest.mark.promise("decision:0031")
def test_the_latest_is_one_snapshot_for_an_attempt(tables: Tables, store: StateStore, register: Callable[..., None]) -> None:
    states = {"up": State(key={"name": "text"}, aggregates={"amount": Sum("amount")})}
    register(upstream := Pipeline("upstream", Files("upstream", format="csv", schema=SCHEMA), states))
    flow = Tally(store, upstream.spec)

    def commit(amount: int) -> None:
        (txid,) = flow.plan(run_id=f"run {store.committed('upstream')}")
        flow.process(txid, up=[("a", amount)])
        flow.commit(txid)

    def transform(rows: Any) -> Any:
        found = state_query(rows, "upstream.up", on=["name"], columns={"amount": "before"})
        commit(10)  # after the attempt has begun, and before anything is read
        return found

    commit(1)
    both = {name: Rows({"name": "text", "amount": "bigint", "before": "bigint"}) for name in ("log", "same")}
    latest = StateQuery("upstream.up", as_of="latest", allow_not_repeatable=True)
    pipeline = declare(tables, states=both, queries=[latest], transform=transform)
    tables.put_rows(SCHEMA, [("a", 1), ("b", 2)])
    (txid,) = tables.plan(pipeline, "run")
    assert pipeline.spec.window == 16
    for mode in ("resume", "restage"):
        steps.process(tables.settings, pipeline, txid, owner=mode, mode=mode)  # type: ignore[arg-type]
    steps.commit(tables.settings, pipeline, txid, owner="test")
    for name in both:
        found = sorted((row["name"], row["amount"], row["before"]) for row in tables.rows(pipeline, name))
        # Each attempt calls the transform once for the first state, and once for all others.
        assert found == [("a", 1, 1 + 2 * 10), ("b", 2, None)]


def test_rows_that_a_policy_hides_are_not_taken_for_missing(tables: Tables, as_owner: Callable[..., Any]) -> None:
    """Row-level security would hide them from the role of Spark's tasks without an error."""
    pipeline = declare(tables)
    policy = "CREATE POLICY of_commits ON state.per_name TO tidegate USING (true)"
    as_owner(sa.text(f"ALTER TABLE state.per_name ENABLE ROW LEVEL SECURITY; {policy}"))
    tables.put_rows(SCHEMA, FIRST)
    tables.plan(pipeline, "run")
    assert "row-level security" in tables.refused(pipeline, AccessRefused)
