"""A pipeline with two states, whose batches go through the real ledger without Spark: tests stage the rows."""

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa
from psycopg2 import sql

from tests import in_process
from tests.batches import Row, stage
from tests.store import Attempt, Commit, Mode, PipelineSpec, StagedPartition, Tracked, encode_metadata, state_tables, tables
from tidegate import migrations
from tidegate.jobs import Count, Files, Max, Min, Pipeline, State, Sum
from tidegate.state_store import Settings, StateStore

TALLY = Pipeline(
    name="tally",
    source=Files("tally", glob="*.csv", format="csv", schema={"shop": "string", "day": "date", "cents": "int"}),
    states={
        "per_shop": State(
            key={"shop": "text"},
            aggregates={"sold": Count(), "cents": Sum("cents"), "least": Min("cents"), "most": Max("cents")},
        ),
        "per_day": State(key={"day": "date"}, aggregates={"sold": Count()}),
    },
)
PATIENCE_SECONDS = 60
WAITS = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND {} AND "
    "pid <> pg_backend_pid()"
)
# Commits wait for a session that holds this lock after everything else, in the COMMIT itself.
IN_COMMIT = """
CREATE FUNCTION public.waits() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON tidegate.commit DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION public.waits()
"""
BIGINT_MAX = 2**63 - 1

Execute = Callable[..., list[tuple]]


class Tally:
    """Moves batches through the real ledger; a partial is a tuple of a state's columns in their order."""

    def __init__(self, store: StateStore, spec: PipelineSpec = TALLY.spec) -> None:
        self.store = store
        self.spec = spec

    def plan(self, number: int = 1, *, run_id: str = "run") -> list[int]:
        after = self.store.last_opened(self.spec.name)
        last = after.txid if after else 0
        txids = self.store.open_batches(self.spec, run_id, [], after, frozen(*range(last + 1, last + 1 + number)))
        assert txids is not None
        return txids

    def start(self, txid: int, *, mode: Mode = "resume") -> Attempt:
        attempt = self.store.start_attempt(self.spec, txid, "test", mode=mode)
        assert isinstance(attempt, Attempt)
        return attempt

    def stage(self, attempt: Attempt, state: str, rows: Iterable[Row], *, partition: int = 0) -> StagedPartition:
        """Copy rows into staging as a Spark task would."""
        spec = self.spec.state(state)
        assert spec is not None
        return stage(self.store.settings, attempt, spec, rows, partition)

    def process(self, txid: int, shops: Iterable[Row] = (), days: Iterable[Row] = (), *, mode: Mode = "resume") -> Attempt:
        return self.process_states(txid, {"per_shop": shops, "per_day": days}, mode=mode)

    def process_states(
        self, txid: int, rows: Mapping[str, Iterable[Row]], *, source_rows: int = 0, mode: Mode = "resume"
    ) -> Attempt:
        attempt = self.start(txid, mode=mode)
        staged = [self.stage(attempt, state, partials) for state, partials in rows.items()]
        self.store.seal(attempt, staged, Tracked(source_rows))
        return attempt

    def commit(self, txid: int) -> Commit:
        return self.store.commit_batch(self.spec, txid, "test")

    def state(self, name: str = "per_shop") -> list[tuple]:
        """Return a state's rows in key order: its columns, then the txid that wrote the row last."""
        spec = self.spec.state(name)
        assert spec is not None
        return [tuple(row.values()) for row in self.store.state_rows(spec)]


TallyOf = Callable[[Pipeline], Tally]


def run_verb(settings: Settings, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | in_process.environment_of(replace(settings, home=folder))
    return in_process.run(arguments, environment, folder)


def frozen(*numbers: int) -> list[bytes]:
    return [encode_metadata({"files": [], "number": number}) for number in numbers]


def contents(settings: Settings) -> dict[str, list[str]]:
    """Return every row of the ledger and of the state tables, for comparison."""
    with migrations.connected(settings) as connection:
        found = sa.inspect(connection)
        rows = sa.select(sa.column("t").cast(sa.Text))
        return {
            f"{schema}.{name}": sorted(connection.scalars(rows.select_from(sa.table(name, schema=schema).alias("t"))))
            for schema in (tables.LEDGER, state_tables.STATE)
            for name in found.get_table_names(schema=schema)
        }


@contextmanager
def refused(settings: Settings, error: type[Exception], match: str | None = None) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Check that a step is refused, and has changed neither ledger nor states."""
    before = contents(settings)
    with pytest.raises(error, match=match) as refusal:
        yield refusal
    assert contents(settings) == before


@contextmanager
def holding(settings: Settings, statement: str) -> Iterator[psycopg2.extensions.connection]:
    with closing(psycopg2.connect(**settings.conninfo(user="postgres"))) as holder:
        holder.cursor().execute(statement)
        yield holder


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not true within {PATIENCE_SECONDS} s"
        time.sleep(0.01)
    return found


@pytest.fixture
def tally(store: StateStore, register: Callable[..., None]) -> Tally:
    """Register pipeline tally, which has no batch yet."""
    register(TALLY)
    return Tally(store)


@pytest.fixture
def tally_of(store: StateStore, register: Callable[..., None]) -> TallyOf:
    def registered(pipeline: Pipeline) -> Tally:
        register(pipeline)
        return Tally(store, pipeline.spec)

    return registered


@pytest.fixture
def as_role(settings: Settings) -> Execute:
    """A function that runs one statement as a role, on a separate connection, and commits it."""

    def execute(role: str, statement: str, parameters: object = None) -> list[tuple]:
        with closing(psycopg2.connect(**settings.conninfo(user=role))) as connection, connection, connection.cursor() as cursor:
            cursor.execute(sql.SQL(statement), parameters)
            return cursor.fetchall() if cursor.description else []

    return execute


@pytest.fixture
def waiting(as_role: Execute) -> Callable[[], int]:
    statement = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return lambda: as_role("postgres", statement)[0][0]


def merge_steps(
    tally: Tally, commit: Callable[[], object], statement_with: str = "INTO state.per_shop"
) -> list[dict[str, Any]]:
    """Commit, and return the steps of Postgres' plan for the statement with this text, last step first.

    The plan is requested right before the statement; its first step lists the settings that differ from the server's.
    """
    plans: list[dict[str, Any]] = []

    def explain(_connection: object, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if statement_with in statement:
            cursor.execute(f"EXPLAIN (VERBOSE, SETTINGS, FORMAT json) {statement}", parameters)
            ((explained,),) = cursor.fetchone()
            plans.append(explained["Plan"] | {"Settings": explained.get("Settings", {})})

    sa.event.listen(tally.store.engine, "before_cursor_execute", explain)
    try:
        commit()
    finally:
        sa.event.remove(tally.store.engine, "before_cursor_execute", explain)
    (plan,) = plans
    steps = [plan]
    for step in steps:
        steps += step.get("Plans", ())
    return steps
