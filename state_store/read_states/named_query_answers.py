"""Answers to queries: a named SELECT over states, executed by a read-only role in one snapshot.

With each answer come the last txids that had committed in the snapshot.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from tidegate.state_store.base import process_exits
from tidegate.state_store.base.errors import DeclarationInvalid, StoreUnavailable, TidegateError, UsageError, class_and_text
from tidegate.state_store.declarations.column_spec import ColumnType
from tidegate.state_store.ledger import cursors
from tidegate.state_store.read_ledger import registered_pipelines
from tidegate.state_store.read_ledger.ledger_reader import LedgerReader
from tidegate.state_store.states import partitions, state_tables

_CANCELED = "57014"
_ONLY_READS = ("25001", "25006", "42501")  # a statement changes data or its own transaction, or lacks a privilege
_BAD_DATA, _BAD_STATEMENTS = "22", ("0A", "42")  # classes of SQLSTATE


class _Query(Protocol):
    """A query as its author declares it (`tidegate.jobs.named_queries`)."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> Sequence[str]: ...
    @property
    def arguments(self) -> Mapping[str, str]: ...
    @property
    def answer(self) -> Callable[..., Any]: ...
    @property
    def most_rows(self) -> int: ...
    @property
    def timeout_seconds(self) -> int: ...


@dataclass(frozen=True)
class Answer:
    """The rows of an answer, its columns with their Postgres types, and the last txid of each pipeline in its snapshot."""

    query: str
    txids: Mapping[str, int]
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Any]]


def ask(reader: LedgerReader, query: _Query, given: Mapping[str, str | Sequence[str]]) -> Answer:
    """Return the answer to a query; each argument is given as text, an array as its values in text.

    Raises: UsageError for arguments that are missing, unknown, or not of their types; UnknownPipeline; DeclarationInvalid if
    the author's code fails, reads or changes what it must not, or answers too many rows; StoreUnavailable, also if it takes too
    long; AccessRefused, SchemaOutOfDate.
    """
    _check_names(query, given)
    read = [of.partition(".")[2] for of in query.reads]
    doing = f"answering query {query.name}"
    with reader.snapshot(doing, states=read, timeout_seconds=query.timeout_seconds) as connection:
        states = {of: _table(connection, query, of) for of in query.reads}
        values = {name: _value(connection, query, name, given[name]) for name in query.arguments}
        statement = _statement(query, states, values)
        with _explained(query):
            result = connection.execution_options(stream_results=True, max_row_buffer=query.most_rows + 1).execute(statement)
            cursor: Any = result.cursor
            described = [(each.name, each.type_code) for each in cursor.description]  # gone when it has no more rows
            rows = result.fetchmany(query.most_rows + 1)
            columns = _columns(connection, query, described)
            result.close()
        if len(rows) > query.most_rows:
            raise DeclarationInvalid(
                f"Query {query.name} answers more than {query.most_rows} rows, and nothing is cut. Ask for less; or its author "
                "aggregates, limits, or raises most_rows."
            )
        pipelines = dict.fromkeys(of.partition(".")[0] for of in query.reads)
        txids = {pipeline: cursors.committed(connection, pipeline) for pipeline in pipelines}
    return Answer(query.name, txids, columns, [tuple(row) for row in rows])


def _check_names(query: _Query, given: Mapping[str, Any]) -> None:
    takes = ", ".join(f"{name} ({kind})" for name, kind in query.arguments.items()) or "no arguments"
    if strange := [name for name in given if name not in query.arguments]:
        raise UsageError(f"Query {query.name} has no argument {strange[0]}. It takes {takes}.")
    if missing := [name for name in query.arguments if name not in given]:
        raise UsageError(f"Query {query.name} needs argument {missing[0]}. It takes {takes}.")


def _table(connection: Connection, query: _Query, of: str) -> sa.Table:
    pipeline, _, name = of.partition(".")
    state = registered_pipelines.spec_of_pipeline(connection, pipeline).state(name)
    if state is None or not state.is_table:
        raise DeclarationInvalid(f"Query {query.name} reads {of}, and pipeline {pipeline} has no such state.")
    return partitions.readable_table(connection, state)


def _value(connection: Connection, query: _Query, name: str, given: str | Sequence[str]) -> Any:
    """Return an argument as Python's value, converted by Postgres."""
    kind = ColumnType(query.arguments[name])
    is_one = isinstance(given, str)
    if is_one == bool(kind.element):
        raise UsageError(
            f"Query {query.name}: argument {name} is {kind.name}, so it takes {'one value' if not is_one else 'a list'}."
        )
    one = kind.element or kind
    # Without precision and scale, to which a cast would round.
    type_ = sa.Numeric() if one.precision_and_scale else state_tables.sql_type(one)
    sent = sa.bindparam("given", given, sa.Text if is_one else sa.ARRAY(sa.Text))
    try:
        with connection.begin_nested():
            return connection.scalar(sa.select(sa.cast(sent, type_ if is_one else sa.ARRAY(type_))))
    except (DBAPIError, ValueError) as error:
        if isinstance(error, DBAPIError) and not _state_of(error).startswith(_BAD_DATA):
            raise
        cause = str(error.orig if isinstance(error, DBAPIError) else error).splitlines()[0].rstrip(".")
        raise UsageError(f"Query {query.name}: argument {name} is not of type {kind.name}: {cause}.") from error


def _statement(
    query: _Query, states: Mapping[str, sa.Table], values: Mapping[str, Any]
) -> sa.Select[Any] | sa.CompoundSelect[Any]:
    begin = f"The answer of query {query.name}"
    try:
        with process_exits.as_errors():
            statement = query.answer(states, **values)
    except (TidegateError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise DeclarationInvalid(f"{begin} failed: {class_and_text(error)}") from error
    if not isinstance(statement, sa.Select | sa.CompoundSelect):
        raise DeclarationInvalid(f"{begin} returns {type(statement).__name__}; it has to return a SELECT of SQLAlchemy.")
    known = {table.fullname for table in states.values()}
    for part in sa.sql.visitors.iterate(statement):
        if isinstance(part, sa.TableClause) and part.fullname not in known:
            raise DeclarationInvalid(
                f"{begin} reads {part.fullname}, which its `reads` do not name: who may ask depends on them."
            )
    return statement


def _columns(connection: Connection, query: _Query, described: Sequence[tuple[str, int]]) -> list[tuple[str, str]]:
    names = [name for name, _ in described]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DeclarationInvalid(f"The answer of query {query.name} has two columns {twice[0]}: give one of them a label.")
    codes = sa.bindparam("codes", [code for _, code in described], sa.ARRAY(sa.BigInteger))
    one = sa.func.unnest(codes).table_valued("code").render_derived()
    kinds = connection.execute(
        sa.select(one.c.code, sa.func.format_type(sa.cast(one.c.code, sa.dialects.postgresql.OID), None))
    )
    known = dict(map(tuple, kinds))
    return [(name, known[code]) for name, code in described]


@contextmanager
def _explained(query: _Query) -> Iterator[None]:
    """Translate Postgres' errors about a query; the ledger reader translates all others."""
    try:
        yield
    except DBAPIError as error:
        state, cause = _state_of(error), str(error.orig).splitlines()[0].rstrip(".")
        if state == _CANCELED:
            raise StoreUnavailable(
                f"Query {query.name} took longer than {query.timeout_seconds} s. Ask for less; or its author allows more time."
            ) from error
        if state in _ONLY_READS:
            raise DeclarationInvalid(f"Query {query.name} may only read the states that it names: {cause}.") from error
        if state.startswith(_BAD_DATA):
            raise UsageError(f"Query {query.name} has no answer for these arguments: {cause}.") from error
        if state.startswith(_BAD_STATEMENTS):
            raise DeclarationInvalid(f"Postgres cannot execute the answer of query {query.name}: {cause}.") from error
        raise


def _state_of(error: DBAPIError) -> str:
    return getattr(error.orig, "pgcode", None) or ""
