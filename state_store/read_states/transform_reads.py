"""States that a transform reads: which they are, whether Spark's tasks may read them, and as of when.

    previous txid   rows are read as the batch before left them (I21 in docs/protocol.md). If the batch itself has already
                    written a row, in an earlier or newer attempt, its previous values are read from an opaque state; in other
                    states, reading it is an error
    latest          rows are read from one snapshot, which the attempt's process keeps for as long as the attempt lasts

So every Spark task reads the same, however often Spark computes the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.base.errors import DeclarationInvalid, SchemaOutOfDate, UnknownPipeline
from tidegate.state_store.connections.statement_text import with_values
from tidegate.state_store.declarations.column_spec import PREVIOUS_TXID, ColumnType, previous_name
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, StateRead, StateSpec
from tidegate.state_store.ledger import cursors
from tidegate.state_store.pipeline_changes import registration
from tidegate.state_store.read_ledger import registered_pipelines
from tidegate.state_store.read_states.executor_lookup import Reading
from tidegate.state_store.states import partitions, state_tables
from tidegate.state_store.states.key_lookup import ROW


@dataclass(frozen=True)
class QueriedState:
    """A state that a transform reads; with the snapshot and its last txid, if it is read as of "latest"."""

    read: StateRead
    spec: StateSpec
    snapshot: str | None = None
    txid: int | None = None

    def reading(self, txid: int, columns: Sequence[str]) -> Reading:
        """Return how a batch's attempt reads these columns of the state."""
        row = state_tables.state_table_of(self.spec).alias(ROW)
        own: dict[str, sa.ColumnElement[Any]] = {column.name: row.c[column.name] for column in self.spec.shown}
        condition: sa.ColumnElement[bool] = sa.true()
        newest = None
        if self.snapshot is None and self.spec.keeps_previous:
            condition, newest = sa.or_(row.c.txid != txid, row.c[PREVIOUS_TXID].is_not(None)), txid
            own |= _before(self.spec, row, txid)
        elif self.snapshot is None:
            newest = txid - 1
        return Reading(
            of=f"state {self.read.of}",
            table=self.spec.name,
            key=tuple((key.name, _sent_as(key.type)) for key in self.spec.keys),
            # Without columns, the answer is only whether there is a row.
            selected=tuple(with_values(_printed(own[name], self.column(name))) for name in columns) or ("true",),
            condition=with_values(condition),
            newest_txid=newest,
            snapshot=self.snapshot,
        )

    def column(self, name: str) -> ColumnType:
        """Return the type of one of the state's shown columns."""
        return next(column.type for column in self.spec.shown if column.name == name)


def find(connection: Connection, spec: PipelineSpec, stager: str) -> dict[str, QueriedState]:
    """Return the states that a pipeline's transform reads, by ``pipeline.state``; `stager` is the role of Spark's tasks.

    For "latest", the connection's transaction has to show one snapshot, and to last as long as the attempt.

    Raises: DeclarationInvalid if there is no such state; SchemaOutOfDate if tasks may not read it, or a partition is missing.
    """
    latest = [query for query in spec.queries if query.as_of == "latest"]
    snapshot = connection.scalar(sa.select(sa.func.pg_export_snapshot())) if latest else None
    states = {}
    for query in spec.queries:
        state = _state(connection, spec, query)
        partitions.check_whole(connection, state.table_name)
        if not registration.is_readable(connection, state.name, stager):
            raise SchemaOutOfDate(
                f"Spark's tasks (role {stager}) may not read state.{state.name} of {query.of}, or it does not exist. "
                "Run: tidegate migrate"
            )
        if query in latest:
            states[query.of] = QueriedState(query, state, snapshot, cursors.committed(connection, query.pipeline))
        else:
            states[query.of] = QueriedState(query, state)
    return states


def _state(connection: Connection, spec: PipelineSpec, query: StateRead) -> StateSpec:
    begin = f"Pipeline {spec.name} queries {query.of}"
    try:
        owner = spec if query.pipeline == spec.name else registered_pipelines.spec_of_pipeline(connection, query.pipeline)
    except UnknownPipeline as error:
        raise DeclarationInvalid(
            f"{begin}, and pipeline {query.pipeline} is not registered. Declare it, then run: tidegate migrate"
        ) from error
    state = owner.state(query.state)
    if state is None or not state.is_by_key:
        known = ", ".join(each.name for each in owner.readable if each.is_by_key) or "none"
        raise DeclarationInvalid(
            f"{begin}, and pipeline {query.pipeline} has no such state with rows by key. It has: {known}. Correct the query."
        )
    return state


def _before(state: StateSpec, row: sa.FromClause, txid: int) -> Mapping[str, sa.ColumnElement[Any]]:
    is_of_txid = row.c.txid == txid
    before: dict[str, sa.ColumnElement[Any]] = {value.name: row.c[previous_name(value.name)] for value in state.values}
    before |= {
        each.name: sa.cast(state_tables.derived_from(each, before), state_tables.sql_type(each.type)) for each in state.derived
    }
    before["txid"] = row.c[PREVIOUS_TXID]
    return {name: sa.case((is_of_txid, value), else_=row.c[name]) for name, value in before.items()}


def _sent_as(kind: ColumnType) -> str:
    """Return the type in which a key's values are sent: wide enough that Postgres never rounds or refuses one."""
    return {"integer": "bigint"}.get(kind.name, kind.name.partition("(")[0])


def _printed(value: sa.ColumnElement[Any], kind: ColumnType) -> sa.ColumnElement[Any]:
    """Return a column as it is fetched: arrays and uuids as text."""
    return sa.cast(value, sa.Text) if kind.element or kind.name == "uuid" else value
