"""The ledger's tables, schema ``tidegate``, for statements of SQLAlchemy: names, types, and what may be NULL.

They are read from ``schema.sql``, which makes them, and says what each column is for. The tables of states and of staging are
in `tidegate.state_store.states.state_tables`. What has happened to a batch is recorded in rows and times; its phase, such as
processed, is derived from them (view ``tidegate.batches``), never stored.
"""

import re
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Column, Table
from sqlalchemy.dialects.postgresql import BYTEA, JSONB, OID, UUID

from tidegate.state_store.base.errors import storable

LEDGER = "tidegate"
# Read when the module is imported. While a process runs, another version may be installed in the same place: its files say
# nothing about the running code.
SCHEMA = Path(__file__).with_name("schema.sql").read_text()


class _Message(sa.types.TypeDecorator[str]):
    """A text of a person or an error; what Postgres cannot store of it is escaped."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else storable(value)


_TYPES: dict[str, Any] = {
    "text": sa.Text(),
    "boolean": sa.Boolean(),
    "integer": sa.Integer(),
    "bigint": sa.BigInteger(),
    "timestamptz": sa.TIMESTAMP(timezone=True),
    "bytea": BYTEA(),
    "jsonb": JSONB(),
    "oid": OID(),
    "uuid": UUID(),
}
_MESSAGE = _Message()
_TABLES = dict(re.findall(rf"^CREATE TABLE {LEDGER}\.(\w+) \(\n(.*?)^\);", SCHEMA, re.MULTILINE | re.DOTALL))
_COLUMN = re.compile(r"^    ([a-z]\w*) ([a-z]+)(.*)", re.MULTILINE)  # what begins with a capital is a constraint
ledger = sa.MetaData(schema=LEDGER)


def _table(name: str) -> Table:
    """Return a table as ``schema.sql`` makes it: the columns, without keys and defaults."""
    columns = (
        Column(
            column,
            _MESSAGE if column == "error" or column.endswith("reason") else _TYPES[kind],
            nullable="NOT NULL" not in more,
        )
        for column, kind, more in _COLUMN.findall(_TABLES[name])
    )
    return Table(name, ledger, *columns)


pipeline = _table("pipeline")
state_table = _table("state_table")
state_range = _table("state_range")
cursor = _table("cursor")
plan = _table("plan")
batch = _table("batch")
attempt = _table("attempt")
seal = _table("seal")
commit = _table("commit")
source_file = _table("source_file")
run_batch = _table("run_batch")
quarantine = _table("quarantine")
undeclared_column = _table("undeclared_column")
check_result = _table("check_result")
watermark = _table("watermark")
open_commit = _table("open_commit")
operator_action = _table("operator_action")
IN_SERVICE = pipeline.c.retired_at.is_(None)  # what is retired has no more batches that count (I23)
# A pipeline without its states, such as a rebuild whose states have taken the place of others, cannot be reinstated.
HAS_DROPPED = (
    sa.exists().where(state_table.c.pipeline == pipeline.c.pipeline, state_table.c.dropped_at.is_not(None)).correlate(pipeline)
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
