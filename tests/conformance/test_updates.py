"""An author's own update: part of the commit, once per txid, and nothing more than that."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa

from tests.conformance.conftest import Flow, Flows, Stream
from tests.jobs.conftest import offenders
from tests.statements import execute as run
from tests.store import UpdateBatch, spec_of
from tidegate.jobs import Count, Pipeline, State, Update
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import DeclarationInvalid, TidegateError

TABLES = """
CREATE SCHEMA shop;
CREATE TABLE shop.outbox (name text, amount bigint, txid bigint);
CREATE TABLE shop.totals (txid bigint PRIMARY KEY, lines bigint);
GRANT USAGE ON SCHEMA shop TO tidegate;
GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA shop TO tidegate;
CREATE PROCEDURE shop.done() LANGUAGE plpgsql AS $$ BEGIN COMMIT; END $$;
"""
# The rows of each batch, as they are staged for the update, and the partials of the state beside it.
BATCHES: list[dict[str, Any]] = [
    {"own": [(0, "a", 1), (1, "b", 2)], "per_name": [("a", 1), ("b", 1)]},
    {"own": [], "per_name": []},
    {"own": [(0, "a", 3)], "per_name": [("a", 1)]},
]


def note_lines(batch: UpdateBatch) -> None:
    batch.execute(sa.text(f"INSERT INTO shop.totals SELECT {batch.txid}, coalesce(sum(lines), 0) FROM state.per_name"))


def to_outbox(batch: UpdateBatch) -> None:
    """Write each row into one table, and what the states have come to into another."""
    columns = ["name", "amount", "txid"]
    rows = sa.select(batch.rows.c.name, batch.rows.c.amount, sa.literal(batch.txid, sa.BigInteger))
    batch.execute(sa.insert(sa.table("outbox", *map(sa.column, columns), schema="shop")).from_select(columns, rows))
    note_lines(batch)


@pytest.fixture
def shop(flows: Flows, settings: Settings) -> Callable[..., Flow]:
    """A function that registers a pipeline with a state and an update; beside it are the author's tables."""
    run(settings.conninfo(user=settings.pg_owner), TABLES)

    def declare(update: Callable[[UpdateBatch], None], **more: Any) -> Flow:
        own = Update({"name": "text", "amount": "bigint"}, update, **more)
        states = {"own": own, "per_name": State(key={"name": "text"}, aggregates={"lines": Count()})}
        return flows(Pipeline("inbox", Stream("transactional"), states))

    return declare


def found(flow: Flow, table: str) -> list[tuple[Any, ...]]:
    return sorted(flow.by_hand(f"SELECT * FROM shop.{table}"))


def test_an_update_runs_once_per_txid_before_or_after_the_states(shop: Callable[..., Flow]) -> None:
    """Also for an empty batch; batches that are ready together are merged one by one, so that each sees its own states."""
    flow = shop(to_outbox)
    txids = [flow.put(flow.next(), **batch).txid for batch in BATCHES]
    while flow.store.committed("inbox") < 3:
        assert flow.store.commit_ready(flow.spec, "test")
    assert [flow.commit(txid).already_committed for txid in txids] == [True] * 3
    assert found(flow, "outbox") == [("a", 1, 1), ("a", 3, 3), ("b", 2, 1)]
    assert found(flow, "totals") == [(1, 2), (2, 2), (3, 3)]


def test_what_comes_before_sees_the_states_without_the_batch(shop: Callable[..., Flow]) -> None:
    flow = shop(lambda batch: batch.execute(sa.text(f"SELECT 1 / (3 - {batch.txid})")) and None, before=note_lines)
    for batch in BATCHES:
        with suppress(TidegateError):
            flow.merge(**batch)
    assert found(flow, "totals") == [(1, 0), (2, 2)]


def execute(text: str) -> Callable[[UpdateBatch], None]:
    return lambda batch: batch.execute(sa.text(text)) and None


def of_the_driver(method: str) -> Callable[[UpdateBatch], None]:
    return lambda batch: getattr(batch._connection.connection.driver_connection, method)()


def twice(batch: UpdateBatch) -> None:
    batch.execute(sa.text(f"INSERT INTO shop.totals VALUES ({batch.txid}, 0)"))


def swallow(batch: UpdateBatch) -> None:
    with suppress(sa.exc.IntegrityError):
        twice(batch)


REFUSED: dict[str, tuple[Callable[[UpdateBatch], None], str]] = {
    "COMMIT": (execute("COMMIT"), "PermanentError.*the commit of a batch of pipeline inbox has not ended"),
    "two": (execute("SELECT 1; COMMIT"), "PermanentError.*the commit of a batch of pipeline inbox has not ended"),
    "ROLLBACK": (execute("ROLLBACK"), "DeclarationInvalid.*The update own .*has ended the transaction of its batch"),
    "and BEGIN": (execute("ROLLBACK; BEGIN"), "DeclarationInvalid.*has ended the transaction of its batch"),
    "SET ROLE": (execute("SET ROLE tidegate_reader"), "AccessRefused.*permission denied to set role"),
    "another writer": (execute("SET tidegate.writer = another"), "DeclarationInvalid.*or changed its role or a setting"),
    "a time zone": (execute("SET TimeZone = 'Asia/Tokyo'"), "DeclarationInvalid.*or changed its role or a setting"),
    # Nor by way of the driver, nor by a procedure.
    "a hidden commit": (of_the_driver("commit"), "PermanentError.*the commit of a batch of pipeline inbox has not ended"),
    "a hidden rollback": (of_the_driver("rollback"), "DeclarationInvalid.*has ended the transaction of its batch"),
    "a procedure": (execute("CALL shop.done()"), "PermanentError.*invalid transaction termination"),
    "an error": (lambda batch: {}[batch.txid], "DeclarationInvalid.*The update own of pipeline inbox failed: KeyError: 1"),
    "a constraint": (twice, "PermanentError.*duplicate key value violates unique constraint"),
    "swallowed": (swallow, "current transaction is aborted"),
}


@pytest.mark.promise("fault:update-ends-transaction:commit", "fault:check-finds-something-update-fails:commit")
@pytest.mark.promise("error:DECLARATION_INVALID")
def test_an_update_that_fails_or_ends_the_transaction_leaves_nothing(shop: Callable[..., Flow]) -> None:
    messages: dict[str, str] = {}
    flow = shop(to_outbox)
    txid = flow.put(flow.next(), **BATCHES[0]).txid
    for name, (update, _) in REFUSED.items():

        def write_first(batch: UpdateBatch, update: Callable[[UpdateBatch], None] = update) -> None:
            to_outbox(batch)
            update(batch)

        flow = shop(write_first)
        with pytest.raises(TidegateError) as refusal:
            flow.commit(txid)
        messages[name] = f"{type(refusal.value).__name__}: {refusal.value}"
        assert (found(flow, "outbox"), found(flow, "totals"), flow.rows("per_name")) == ([], [], []), name
        assert flow.store.committed("inbox") == 0
    assert offenders(messages, {name: message for name, (_, message) in REFUSED.items()}) == {}
    # The code is in the pipeline's module: a declaration from the ledger lacks it, and cannot commit.
    with pytest.raises(DeclarationInvalid, match="commit where the pipeline is declared"):
        flow.store.commit_batch(spec_of(flow.spec.declaration), txid, "test")
    flow = shop(to_outbox)
    flow.commit(txid)
    assert found(flow, "totals") == [(1, 2)]
