"""A pipeline with two states, whose batches go through the real ledger without Spark: tests stage the rows."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cached_property, partial
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa

from tests.batches import Row, stage, staging_cursor
from tests.statements import execute
from tests.store import Attempt, Commit, Mode, PipelineSpec, StagedPartition, Tracked, encode_metadata
from tidegate.jobs import Count, Files, Max, Min, Pipeline, State, Sum
from tidegate.state_store import Settings, StateStore

SALES = {"sold": Count(), "cents": Sum("cents"), "least": Min("cents"), "most": Max("cents")}
TALLY = Pipeline(
    name="tally",
    source=Files("tally", glob="*.csv", format="csv", schema={"shop": "string", "day": "date", "cents": "int"}),
    states={"per_shop": State({"shop": "text"}, SALES), "per_day": State({"day": "date"}, {"sold": Count()})},
)
ROW = [("a", 1, 1, 1, 1)]  # of per_shop
PATIENCE_SECONDS = 60
BIGINT_MAX = 2**63 - 1

Step = Callable[[], object]
Rows = Iterable[Row]


class Tally:
    """Moves batches through the real ledger; a partial is a tuple of a state's columns in their order."""

    def __init__(self, store: StateStore, spec: PipelineSpec = TALLY.spec) -> None:
        self.store = store
        self.spec = spec

    def plan(self, number: int = 1, *, run_id: str = "run") -> list[int]:
        after = self.store.last_opened(self.spec.name)
        last = after.txid if after else 0
        return self.store.open_batches(self.spec, run_id, [], after, frozen(*range(last + 1, last + 1 + number)))

    def having(self, planned: int, processed: int = 0, committed: int = 0, **rows: Rows) -> "Tally":
        """Plan batches, process the first of them, all with the same rows, and commit the first of those."""
        self.plan(planned)
        for txid in range(1, processed + 1):
            self.process(txid, **{"shops": ROW} | rows)
        for txid in range(1, committed + 1):
            self.commit(txid)
        return self

    def start(self, txid: int, *, mode: Mode = "resume") -> Attempt:
        attempt = self.store.start_attempt(self.spec, txid, "test", mode=mode)
        assert isinstance(attempt, Attempt)
        return attempt

    def stage(self, attempt: Attempt, state: str, rows: Rows, *, partition: int = 0) -> StagedPartition:
        return stage(self._staging, attempt, self.spec.state(state), rows, partition)

    @cached_property
    def _staging(self) -> Any:
        return staging_cursor(self.store.settings)

    def close(self) -> None:
        self._staging.connection.close()
        self.store.close()

    def seal_empty(self, *txids: int) -> None:
        for txid in txids:
            self.store.seal(self.start(txid), [], Tracked(0))

    def process(self, txid: int, shops: Rows = (), days: Rows = (), *, mode: Mode = "resume", **states: Rows) -> Attempt:
        """Start, stage and seal: rows of both states, or of these."""
        attempt = self.start(txid, mode=mode)
        rows = states or {"per_shop": shops, "per_day": days}
        self.store.seal(attempt, [self.stage(attempt, state, partials) for state, partials in rows.items()], Tracked(0))
        return attempt

    def fail(self, txid: int, error: str = "MALFORMED_RECORD: a.csv, line 3.", *, is_poison: bool = True) -> int:
        return self.store.fail_attempt(self.start(txid), error, is_poison=is_poison)

    def commit(self, txid: int) -> Commit:
        return self.store.commit_batch(self.spec, txid, "test")

    def commit_ready(self, **how: Any) -> list[int]:
        return [commit.txid for commit in self.store.commit_ready(self.spec, "test", **how)]

    def complete(self, txid: int, *rows: Rows) -> Commit:
        self.process(txid, *rows)
        return self.commit(txid)

    def state(self, name: str = "per_shop") -> list[tuple]:
        """Return a state's rows in key order: its columns, then the txid that wrote the row last."""
        return [tuple(row.values()) for row in self.store.state_rows(self.spec.state(name))]

    def sql(self, statement: str, parameters: object = None, *, role: str = "tidegate_owner") -> list[tuple]:
        return execute(self.store.settings.conninfo(user=role), statement, parameters)

    def next_steps(self, txid: int) -> list[Step]:
        """Return what a pipeline does next, if this txid waits for its commit."""
        return [partial(self.plan, run_id="next"), partial(self.commit, txid), self.commit_ready, partial(self.start, txid + 1)]

    def refuses(self, error: type[Exception] | tuple[type[Exception], ...], match: str, *steps: Step) -> str:
        """Check that steps are refused, and have changed neither ledger nor states; return what the last one says."""
        before = contents(self.store.settings)
        for step in steps:
            with pytest.raises(error, match=match or None) as refusal:
                step()
        assert contents(self.store.settings) == before
        return str(refusal.value)


TallyOf = Callable[[Pipeline], Tally]


def commit_next(settings: Settings, number: int = 1) -> int:
    """Commit planned batches of tally, or new ones, each with one sale in shop a; return the last txid that has committed."""
    with StateStore.connect(settings) as store:
        tally, txids = Tally(store), store.uncommitted("tally", number)
        if number > len(txids):
            txids += tally.plan(number - len(txids), run_id=f"run {time.monotonic_ns()}")
        for txid in txids:
            tally.process(txid, ROW, mode="restage")  # an earlier try may have sealed it
            tally.commit(txid)
        return store.committed("tally")


def frozen(*numbers: int) -> list[bytes]:
    return [encode_metadata({"files": [], "number": number}) for number in numbers]


def contents(settings: Settings) -> dict[str, list[str]]:
    """Return every row of the ledger and of the state tables, for comparison."""
    ours = "relkind IN ('r', 'p') AND relnamespace::regnamespace::text IN ('tidegate', 'state')"
    with closing(psycopg2.connect(**settings.conninfo(user=settings.pg_owner))) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT oid::regclass::text FROM pg_class WHERE {ours}")
        found: dict[str, list[str]] = {name: [] for (name,) in cursor}
        cursor.execute(" UNION ALL ".join(f"SELECT '{name}', t::text FROM {name} AS t" for name in found))
        for name, row in cursor:
            found[name].append(row)
    return {name: sorted(rows) for name, rows in found.items()}


@contextmanager
def refused(settings: Settings, error: type[Exception], match: str | None = None) -> Iterator[pytest.ExceptionInfo[Exception]]:
    before = contents(settings)
    with pytest.raises(error, match=match) as refusal:
        yield refusal
    assert contents(settings) == before


@contextmanager
def holding(settings: Settings, statement: str, user: str = "postgres") -> Iterator[psycopg2.extensions.connection]:
    """Run a statement in a session that calls itself psql, and leave its transaction open."""
    with closing(psycopg2.connect(**settings.conninfo(user=user), application_name="psql")) as holder:
        holder.cursor().execute(statement)
        yield holder
        holder.rollback()  # closing alone would not wait until the server has released the lock


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def listening(store: StateStore, event: str, listener: Callable[..., None], **how: Any) -> Iterator[None]:
    sa.event.listen(store.engine, event, listener, **how)
    try:
        yield
    finally:
        sa.event.remove(store.engine, event, listener)


def until(condition: Callable[[], Any], what: str = "it", seconds: float = PATIENCE_SECONDS, every: float = 0.01) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(every)
    return found


@pytest.fixture
def tally(tally_of: TallyOf) -> Tally:
    """Pipeline tally, registered, which has no batch yet."""
    return tally_of(TALLY)


@pytest.fixture
def tally_of(store: StateStore, register: Callable[..., None]) -> TallyOf:
    def registered(pipeline: Pipeline) -> Tally:
        register(pipeline)
        return Tally(store, pipeline.spec)

    return registered


@pytest.fixture
def owner(settings: Settings) -> Iterator[StateStore]:
    with StateStore.connect(settings, user=settings.pg_owner) as store:
        yield store


@pytest.fixture
def waiting(settings: Settings) -> Callable[[], int]:
    statement = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return lambda: execute(settings.conninfo(user="postgres"), statement)[0][0]


def merge_steps(tally: Tally, commit: Step, statement_with: str = "INTO state.per_shop") -> list[dict[str, Any]]:
    """Commit, and return the steps of Postgres' plan for the statement with this text, last step first."""
    plans: list[dict[str, Any]] = []

    def explain(_connection: object, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if statement_with in statement:
            cursor.execute(f"EXPLAIN (VERBOSE, SETTINGS, FORMAT json) {statement}", parameters)
            ((explained,),) = cursor.fetchone()
            plans.append(explained["Plan"] | {"Settings": explained.get("Settings", {})})  # that differ from the server's

    with listening(tally.store, "before_cursor_execute", explain):
        commit()
    (plan,) = plans
    steps = [plan]
    for step in steps:
        steps += step.get("Plans", ())
    return steps
