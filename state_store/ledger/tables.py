"""The ledger's tables, schema ``tidegate``, for statements of SQLAlchemy: names, types, and what may be NULL.

``schema.sql`` makes them, and says what each column is for; a test compares both. The tables of states and of staging are in
`tidegate.state_store.states.state_tables`. What has happened to a batch is recorded in rows and times; its phase, such as
processed, is derived from them (view ``tidegate.batches``), never stored.
"""

from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import BigInteger, Boolean, Column, Integer, Table, Text
from sqlalchemy.dialects.postgresql import BYTEA, JSONB, OID, UUID

from tidegate.state_store.base.errors import storable

NAMING = {
    "pk": "pk_%(table_name)s",
    "fk": "fk_%(table_name)s_%(referred_table_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
}
LEDGER = "tidegate"
TIME = sa.TIMESTAMP(timezone=True)


class _Message(sa.types.TypeDecorator[str]):
    """A text of a person or an error; what Postgres cannot store of it is escaped."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else storable(value)


MESSAGE = _Message()

ledger = sa.MetaData(schema=LEDGER)


class Null(NamedTuple):
    """The type of a column that may be NULL."""

    type: Any


def _table(name: str, /, **columns: Any) -> Table:
    """Return a table with columns of these types, in their order."""
    return Table(
        name,
        ledger,
        *(
            Column(column, kind.type if isinstance(kind, Null) else kind, nullable=isinstance(kind, Null))
            for column, kind in columns.items()
        ),
    )


pipeline = _table(
    "pipeline",
    pipeline=Text,
    source_kind=Text,
    fingerprint=Text,
    declaration=JSONB,
    in_flight=Integer,
    commits_alone=Boolean,
    registered_at=TIME,
    paused_at=Null(TIME),
    paused_by=Null(Text),
    paused_reason=Null(MESSAGE),
    retired_at=Null(TIME),
    retired_by=Null(Text),
    retired_reason=Null(MESSAGE),
)

IN_SERVICE = pipeline.c.retired_at.is_(None)  # what is retired has no more batches that count (I23)

state_table = _table(
    "state_table",
    state=Text,
    pipeline=Text,
    pruned_txid=BigInteger,
    dropped_at=Null(TIME),
    table_oid=Null(OID),
    columns=Null(JSONB),
    shape=Null(JSONB),
    accepted_shape=JSONB,
)

state_range = _table("state_range", state=Text, partition=Text, lower=Null(Text), upper=Null(Text), every=Text)

cursor = _table(
    "cursor", pipeline=Text, txid=BigInteger, attempt=Null(Integer), source_digest=Null(BYTEA), epoch=Text, history=UUID
)

plan = _table(
    "plan",
    pipeline=Text,
    succeeded=BigInteger,
    succeeded_at=Null(TIME),
    failed=Integer,
    failing_since=Null(TIME),
    failed_at=Null(TIME),
    failed_run=Null(Text),
    error=Null(MESSAGE),
)

batch = _table(
    "batch",
    pipeline=Text,
    txid=BigInteger,
    source_metadata=BYTEA,
    source_digest=BYTEA,
    previous_digest=Null(BYTEA),
    opened_by=Text,
    opened_at=TIME,
    attempt=Integer,
    halted_at=Null(TIME),
    halted_reason=Null(MESSAGE),
    skip_owner=Null(Text),
    skip_reason=Null(MESSAGE),
    tries_after=Integer,
    awaits_ack=Boolean,
    acked_at=Null(TIME),
)

attempt = _table(
    "attempt",
    pipeline=Text,
    txid=BigInteger,
    attempt=Integer,
    owner=Text,
    airflow_run_id=Null(Text),
    airflow_task_id=Null(Text),
    airflow_try=Null(Integer),
    spark_application=Null(Text),
    spark_tag=Null(Text),
    fingerprint=Text,
    source_metadata=Null(BYTEA),
    source_digest=BYTEA,
    previous_digest=Null(BYTEA),
    started_at=TIME,
    seen_at=Null(TIME),
    session=Null(Text),
    staged_at=Null(TIME),
    sealed_at=Null(TIME),
    failed_at=Null(TIME),
    error=Null(MESSAGE),
    is_poison=Null(Boolean),
    source_rows=Null(BigInteger),
    source_hash_sum=Null(BigInteger),
    quarantined_rows=Null(BigInteger),
    transformed_rows=Null(BigInteger),
    transformed_hash_sum=Null(BigInteger),
    staged_bytes=Null(BigInteger),
    dropped_at=Null(TIME),
)

seal = _table(
    "seal",
    pipeline=Text,
    txid=BigInteger,
    attempt=Integer,
    state=Text,
    partition=Integer,
    task_attempt=BigInteger,
    rows=BigInteger,
    digest=BigInteger,
)

commit = _table(
    "commit",
    pipeline=Text,
    txid=BigInteger,
    attempt=Integer,
    source_digest=BYTEA,
    owner=Text,
    key_count=BigInteger,
    committed_at=TIME,
    merged_at=TIME,
    quarantined_rows=BigInteger,
    skipped_reason=Null(MESSAGE),
)

source_file = _table(
    "source_file",
    pipeline=Text,
    name=Text,
    sha256=BYTEA,
    size=BigInteger,
    mtime_ns=BigInteger,
    inode=Null(Text),
    txid=BigInteger,
)

run_batch = _table("run_batch", pipeline=Text, run_id=Text, position=Integer, txid=BigInteger)

quarantine = _table(
    "quarantine",
    pipeline=Text,
    txid=BigInteger,
    number=BigInteger,
    reason=Text,
    origin=Null(Text),
    payload=Text,
    is_raw=Boolean,
    state=Null(Text),
    quarantined_at=TIME,
    replayed_txid=Null(BigInteger),
    mended_payload=Null(Text),
    mended_at=Null(TIME),
    mended_by=Null(Text),
    mended_reason=Null(MESSAGE),
)

undeclared_column = _table("undeclared_column", pipeline=Text, input=Text, name=Text, txid=BigInteger)

check_result = _table("check_result", pipeline=Text, txid=BigInteger, name=Text, found=Null(Text))

watermark = _table(
    "watermark",
    state=Text,
    pipeline=Text,
    txid=BigInteger,
    watermark=Null(TIME),
    previous_watermark=Null(TIME),
    removed_until=Null(TIME),
)

open_commit = _table("open_commit", pipeline=Text)

operator_action = _table(
    "operator_action",
    number=BigInteger,
    pipeline=Text,
    txid=Null(BigInteger),
    action=Text,
    owner=Text,
    reason=MESSAGE,
    acted_at=TIME,
)


batches_view = sa.table(
    "batches",
    *(sa.column(name) for name in ("pipeline", "txid", "phase", "attempt", "source_rows", "key_count", "opened_at")),
    *(sa.column(name) for name in ("started_at", "sealed_at", "committed_at", "owner", "waits_for")),
    schema=LEDGER,
)


def same_batch(one: sa.FromClause, other: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return whether rows of two tables are of the same batch."""
    return sa.and_(one.c.pipeline == other.c.pipeline, one.c.txid == other.c.txid)


def same_attempt(one: sa.FromClause, other: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return whether rows of two tables are of the same attempt at a batch."""
    return sa.and_(same_batch(one, other), one.c.attempt == other.c.attempt)
