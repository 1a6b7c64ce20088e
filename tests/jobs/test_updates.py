"""An author's own update: part of the commit, once per txid, and nothing more than that."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg2
import pyarrow as pa
import pytest
import sqlalchemy as sa

from tests import steps
from tests.jobs.conftest import Tables
from tidegate.jobs import Count, Files, Pipeline, State, Update
from tidegate.state_store import StateStore
from tidegate.state_store.base.errors import DeclarationInvalid, PermanentError, TidegateError
from tidegate.state_store.commit.author_updates import UpdateBatch

METADATA = sa.MetaData(schema="shop")
OUTBOX = sa.Table(
    "outbox", METADATA, sa.Column("name", sa.Text), sa.Column("amount", sa.BigInteger), sa.Column("txid", sa.BigInteger)
)
TOTALS = sa.Table("totals", METADATA, sa.Column("txid", sa.BigInteger, primary_key=True), sa.Column("lines", sa.BigInteger))
COLUMNS = {"name": "text", "amount": "bigint"}
BATCHES = [[("a", 1), ("b", 2)], [], [("a", 3)]]


def to_outbox(batch: UpdateBatch) -> None:
    """Write each row into one table, and what the states have come to into another."""
    rows = sa.select(batch.rows.c.name, batch.rows.c.amount, sa.literal(batch.txid, sa.BigInteger))
    batch.execute(sa.insert(OUTBOX).from_select(["name", "amount", "txid"], rows))
    lines = sa.select(sa.func.coalesce(sa.func.sum(sa.column("lines")), 0)).select_from(sa.table("per_name", schema="state"))
    batch.execute(sa.insert(TOTALS).values(txid=batch.txid, lines=lines.scalar_subquery()))


@pytest.fixture
def shop(tables: Tables) -> Tables:
    """The inbox, and the author's tables."""
    with StateStore.connect(tables.settings, user=tables.settings.pg_owner) as store, store.engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema("shop"))
        METADATA.create_all(connection)
        connection.execute(sa.text("GRANT USAGE ON SCHEMA shop TO tidegate"))
        connection.execute(sa.text("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA shop TO tidegate"))
    return tables


def declare(shop: Tables, update: Callable[[UpdateBatch], None], **more: Any) -> Pipeline:
    """Declare a pipeline with a state and an update, a file a batch."""
    states = {"own": Update(COLUMNS, update, **more), "per_name": State(key={"name": "text"}, aggregates={"lines": Count()})}
    return shop.declare(Files("inbox", schema={"name": "string", "amount": "bigint"}), states=states)


def put(shop: Tables, batches: list[Any]) -> None:
    """Write a file for each batch."""
    for rows in batches:
        names, amounts = ([row[place] for row in rows] for place in (0, 1))
        shop.put(pa.table({"name": pa.array(names, pa.string()), "amount": pa.array(amounts, pa.int64())}))


def test_what_comes_before_sees_the_states_without_the_batch(shop: Tables) -> None:
    """In the same commit: if what comes after the states fails, nothing of it is left."""

    def before(batch: UpdateBatch) -> None:
        lines = sa.select(sa.func.coalesce(sa.func.sum(sa.column("lines")), 0)).select_from(
            sa.table("per_name", schema="state")
        )
        batch.execute(sa.insert(TOTALS).values(txid=batch.txid, lines=lines.scalar_subquery()))

    def fails(batch: UpdateBatch) -> None:
        if batch.txid == 3:
            batch.execute(sa.text("SELECT 1 / 0"))

    pipeline = declare(shop, fails, before=before)
    put(shop, BATCHES)
    for txid in shop.plan(pipeline, "run"):
        steps.process(shop.settings, pipeline, txid, owner="test")
        with suppress(TidegateError):
            steps.commit(shop.settings, pipeline, txid, owner="test")
    assert found(shop, TOTALS) == [(1, 0), (2, 2)]


def found(shop: Tables, table: sa.Table) -> list[tuple[Any, ...]]:
    """Return the rows of an author's table."""
    with StateStore.connect(shop.settings) as store, store.engine.connect() as connection:
        return sorted(tuple(row) for row in connection.execute(sa.select(table)))


def test_an_update_runs_once_per_txid_after_the_states(shop: Tables) -> None:
    """Also for an empty batch; batches that are ready together are merged one by one, so that each sees its own states."""
    pipeline = declare(shop, to_outbox)
    put(shop, BATCHES)
    txids = shop.plan(pipeline, "run")
    for txid in txids:
        steps.process(shop.settings, pipeline, txid, owner="test", commit_ready=txid == txids[-1])
    for txid in txids:
        assert steps.commit(shop.settings, pipeline, txid, owner="test").already_committed
    assert found(shop, OUTBOX) == [("a", 1, 1), ("a", 3, 3), ("b", 2, 1)]
    assert found(shop, TOTALS) == [(1, 2), (2, 2), (3, 3)]


def test_an_update_means_the_same_whatever_time_zone_its_process_has(shop: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's PGTZ, a role, the database or the server may set one, by which Postgres finds the day of a time."""
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")

    def update(batch: UpdateBatch) -> None:
        at = sa.cast(sa.literal("2026-01-01 20:00+00", sa.Text), sa.TIMESTAMP(timezone=True))
        batch.execute(sa.insert(OUTBOX).from_select(["name"], sa.select(sa.cast(sa.cast(at, sa.Date), sa.Text))))

    pipeline = declare(shop, update)
    put(shop, BATCHES[:1])
    shop.run(pipeline)
    assert [name for name, *_ in found(shop, OUTBOX)] == ["2026-01-01"]


def refused(shop: Tables, update: Callable[[UpdateBatch], None], error: type[TidegateError], message: str) -> None:
    """Commit a batch whose update does something wrong after writing; check that nothing of the batch is left."""

    def write_first(batch: UpdateBatch) -> None:
        to_outbox(batch)
        update(batch)

    pipeline = declare(shop, write_first)
    put(shop, BATCHES[:1])
    (txid,) = shop.plan(pipeline, "run")
    steps.process(shop.settings, pipeline, txid, owner="test")
    with pytest.raises(error, match=message):
        steps.commit(shop.settings, pipeline, txid, owner="test")
    assert (found(shop, OUTBOX), found(shop, TOTALS), shop.rows(pipeline)) == ([], [], [])
    with StateStore.connect(shop.settings) as store:
        assert store.committed("inbox") == 0
    settings = shop.settings
    psycopg2.connect(**settings.conninfo()).close()  # only the update was cut off
    corrected = declare(shop, to_outbox)
    steps.process(settings, corrected, txid, owner="test", mode="restage")
    steps.commit(settings, corrected, txid, owner="test")
    assert found(shop, TOTALS) == [(1, 2)]


@pytest.mark.promise("fault:update-ends-transaction:commit")
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("COMMIT", "executes COMMIT: the transaction belongs to the commit"),
        ("  commit ;", "executes COMMIT"),
        ("/* a */ -- b\n ROLLBACK", "executes ROLLBACK"),
        ("END", "executes END"),
        ("SAVEPOINT a", "executes SAVEPOINT"),
        ("SET ROLE tidegate_owner", "executes SET"),
        ("SELECT 1; COMMIT", "executes 2 statements as one text"),
        ("ROLLBACK; INSERT INTO shop.totals VALUES (9, 9)", "executes 2 statements as one text"),
    ],
)
def test_an_update_cannot_end_the_transaction(shop: Tables, statement: str, message: str) -> None:
    """Such a statement is not sent at all."""
    refused(shop, lambda batch: batch.execute(sa.text(statement)) and None, DeclarationInvalid, message)


@pytest.mark.promise("fault:update-ends-transaction:commit")
def test_a_hidden_commit_is_refused_by_postgres(shop: Tables) -> None:
    """Even by way of the driver: the transaction cannot be ended before the batch is complete."""

    def sneak(batch: UpdateBatch) -> None:
        batch._connection.connection.driver_connection.commit()

    refused(shop, sneak, PermanentError, "the commit of a batch of pipeline inbox has not ended")


@pytest.mark.promise("error:DECLARATION_INVALID")
def test_a_hidden_rollback_is_noticed(shop: Tables) -> None:
    """The transaction is not the same any more."""

    def sneak(batch: UpdateBatch) -> None:
        batch._connection.connection.driver_connection.rollback()

    refused(shop, sneak, DeclarationInvalid, "has ended the transaction of its batch")


@pytest.mark.promise("fault:update-ends-transaction:commit")
def test_a_procedure_that_commits_is_refused_by_postgres(shop: Tables) -> None:
    """Postgres itself does not let a procedure end a transaction that was begun outside of it."""
    with StateStore.connect(shop.settings, user=shop.settings.pg_owner) as store, store.engine.begin() as connection:
        connection.execute(sa.text("CREATE PROCEDURE shop.done() LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$"))
    refused(
        shop,
        lambda batch: batch.execute(sa.text("CALL shop.done()")) and None,
        PermanentError,
        "invalid transaction termination",
    )


def test_an_update_cannot_open_connections(shop: Tables) -> None:
    """Neither to this Postgres nor to anything else; another thread meanwhile can."""
    settings = shop.settings

    def reach_out(batch: UpdateBatch) -> None:
        del batch
        other = threading.Thread(target=lambda: psycopg2.connect(**settings.conninfo()).close())
        other.start()
        other.join()
        for attempt in (
            lambda: psycopg2.connect(**settings.conninfo()),
            lambda: sa.create_engine("postgresql+psycopg2://", connect_args=settings.conninfo()).connect(),
            lambda: socket.create_connection((settings.pg_host, settings.pg_port)),
        ):
            with pytest.raises(DeclarationInvalid, match="opens a connection"):
                attempt()
        psycopg2.connect(**settings.conninfo())

    refused(shop, reach_out, DeclarationInvalid, "The update own of pipeline inbox opens a connection")


@pytest.mark.promise("fault:check-finds-something-update-fails:commit")
def test_an_update_that_fails_leaves_nothing(shop: Tables) -> None:
    """Its error is named, as that of the author's code."""

    def fail(batch: UpdateBatch) -> None:
        raise KeyError(batch.txid)

    refused(shop, fail, DeclarationInvalid, "The update own of pipeline inbox failed: KeyError: 1")


def test_a_refused_statement_leaves_nothing(shop: Tables) -> None:
    """A constraint of the author's tables holds for the whole batch."""

    def twice(batch: UpdateBatch) -> None:
        batch.execute(sa.insert(TOTALS).values(txid=batch.txid, lines=0))

    refused(shop, twice, PermanentError, "duplicate key value violates unique constraint")


def test_a_swallowed_error_of_postgres_leaves_nothing(shop: Tables) -> None:
    """Postgres refuses everything after it, so the batch does not count without what failed."""

    def swallow(batch: UpdateBatch) -> None:
        with suppress(sa.exc.IntegrityError):
            batch.execute(sa.insert(TOTALS).values(txid=batch.txid, lines=0))

    refused(shop, swallow, TidegateError, "current transaction is aborted")


def test_what_the_ledger_knows_of_an_update_cannot_commit(shop: Tables) -> None:
    """The code is in the pipeline's module; a declaration from the ledger lacks it."""
    from tidegate.state_store.declarations.pipeline_spec import spec_of  # noqa: PLC0415

    pipeline = declare(shop, to_outbox)
    put(shop, BATCHES[:1])
    (txid,) = shop.plan(pipeline, "run")
    steps.process(shop.settings, pipeline, txid, owner="test")
    with (
        StateStore.connect(shop.settings) as store,
        pytest.raises(DeclarationInvalid, match="commit where the pipeline is declared"),
    ):
        store.commit_batch(spec_of(pipeline.spec.declaration), txid, "test")
    assert found(shop, OUTBOX) == []
