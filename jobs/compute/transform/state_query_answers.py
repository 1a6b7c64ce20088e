"""Answers a transform's state queries: each Spark task asks Postgres for the keys in its rows, once per Arrow batch.

A query is a function over the key's columns, which Spark calls with Arrow batches: only these columns go to Python, and no row
moves. The function is declared nondeterministic, so that Spark neither calls it twice for a row nor moves it past a filter.
Within an attempt its answers stay the same, because the state does not change meanwhile.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from tidegate.jobs.compute.partials import declared_columns
from tidegate.jobs.sources.column_types import quoted
from tidegate.jobs.spark.task_connections import on_executor
from tidegate.jobs.spark.task_errors import MARK, reporting
from tidegate.jobs.state_queries import How
from tidegate.state_store.base.errors import DeclarationInvalid
from tidegate.state_store.declarations.column_spec import DAYS, TICKS
from tidegate.state_store.read_states.executor_lookup import Reading, connected

if TYPE_CHECKING:  # executors import this module, and have no SQLAlchemy
    from tidegate.state_store.read_states.transform_reads import QueriedState

FOUND, IS_THERE = "_tidegate_found", "_tidegate_is_there"
_UUID = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"


@dataclass(frozen=True)
class StateAnswers:
    """The answers to state queries of one attempt: `txid` is its batch, `tasks` how many Spark tasks may ask at once."""

    states: "Mapping[str, QueriedState]"
    txid: int
    conninfo: dict[str, Any]
    tasks: int

    def look_up(
        self, rows: DataFrame, of: str, on: Mapping[str, str], columns: Mapping[str, str] | None, how: How
    ) -> DataFrame:
        """Return the rows with columns of a state, as `tidegate.jobs.state_queries.state_query` describes.

        Raises: DeclarationInvalid.
        """
        if (state := self.states.get(of)) is None:
            declared = ", ".join(self.states) or "none"
            raise DeclarationInvalid(
                f"The transform queries {of}, which its pipeline does not declare. Add queries=[StateQuery({of!r})]. "
                f"Declared: {declared}."
            )
        schema = rows.schema
        keys = _keys(schema, state, on)
        aliases = _aliases(schema, state, columns, how)
        fields = [T.StructField(name, declared_columns.spark_type(state.column(name))) for name in aliases]
        lookup = Lookup(
            self.conninfo,
            state.reading(self.txid, list(aliases)),
            {field.name: to_arrow_type(field.dataType, timezone="UTC") for field in fields},
            tuple(key.type.name for key in state.spec.keys),
        )
        answer = T.StructType([T.StructField(IS_THERE, T.BooleanType(), nullable=False), *fields])
        # PySpark's stubs lack it.
        ask = F.arrow_udf(lookup.answers, answer).asNondeterministic()  # type: ignore[attr-defined]
        # Each task that asks has a connection of its own.
        answered = rows.coalesce(self.tasks).select("*", ask(*(keys or [F.lit(0)])).alias(FOUND))
        if how != "left":
            is_there = F.col(FOUND).getField(IS_THERE)
            answered = answered.where(is_there if how == "inner" else ~is_there)
        own = [F.col(quoted(name)) for name in schema.names]
        return answered.select(*own, *(F.col(FOUND).getField(name).alias(alias) for name, alias in aliases.items()))


def _keys(schema: T.StructType, state: "QueriedState", on: Mapping[str, str]) -> list[Any]:
    """Return the columns of the rows that are the state's key, in its order and types."""
    begin, names = f"A query of state {state.read.of}", [key.name for key in state.spec.keys]
    if sorted(on) != sorted(names):
        raise DeclarationInvalid(
            f"{begin} has on={sorted(on)}, and the state's key is {', '.join(names) or 'empty'}: name all of it."
        )
    keys = []
    for key in state.spec.keys:
        name = on[key.name]
        if name not in schema.names:
            raise DeclarationInvalid(
                f"{begin} takes {key.name} from column {name}, and the rows have {', '.join(schema.names)}."
            )
        kind = schema[name].dataType
        if isinstance(kind, T.FloatType | T.DoubleType) or not declared_columns.fits(kind, key.type, any_scale=True):
            raise DeclarationInvalid(
                f"{begin}: its key {key.name} is {key.type.name}, column {name} of the rows is {kind.simpleString()}. Cast it."
            )
        column = F.col(quoted(name))
        keys.append(F.lower(column) if key.type.name == "uuid" else column)
    return keys


def _aliases(schema: T.StructType, state: "QueriedState", columns: Mapping[str, str] | None, how: How) -> dict[str, str]:
    """Return the requested columns of the state, each with its name in the rows."""
    begin = f"A query of state {state.read.of}"
    if how == "anti":
        if columns:
            raise DeclarationInvalid(
                f'{begin} with how="anti" keeps rows that the state does not have: it has no columns for them.'
            )
        return {}
    names_there = [column.name for column in state.spec.shown]
    aliases = dict(columns) if columns is not None else {value.name: value.name for value in state.spec.results}
    if strange := [name for name in aliases if name not in names_there]:
        raise DeclarationInvalid(f"{begin} asks for column {strange[0]}, and the state has {', '.join(names_there)}.")
    names = [name.lower() for name in (*schema.names, *aliases.values())]  # to Spark, Seats and seats are the same
    if twice := [name for name in aliases.values() if names.count(name.lower()) > 1]:
        raise DeclarationInvalid(
            f"{begin} would give the rows a second column {twice[0]}. Give it another name: "
            f'columns={{"{next(name for name, alias in aliases.items() if alias == twice[0])}": "..."}}.'
        )
    return aliases


@dataclass(frozen=True)
class Lookup:
    """Finds the rows of keys in a Spark task, for `pyspark.sql.functions.arrow_udf`.

    It is a class, which Spark pickles by name; for an inner function, it would look through all imported modules.
    """

    conninfo: dict[str, Any]
    reading: Reading
    result: Mapping[str, pa.DataType]
    kinds: tuple[str, ...]
    mark: str = MARK

    def answers(self, batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Yield for each batch of keys a struct: whether the state has the key, and the columns of its row.

        The parameter's type makes Spark pass all batches of a task to one call; a single column comes without the tuple.
        """
        if (first := next(batches, None)) is None:
            return  # a task without rows needs no connection
        with reporting(self.mark), connected(on_executor(self.conninfo), self.reading.of) as connection:
            for batch in chain([first], batches):
                columns = batch if isinstance(batch, tuple) else (batch,)
                yield self._answer(connection, [_one_array(column) for column in columns])

    def _answer(self, connection: Any, columns: list[pa.Array]) -> pa.StructArray:
        """Return what the state has for each key; Postgres is asked for each different key once."""
        size, columns = len(columns[0]), columns[: len(self.kinds)]
        is_possible: Any = pa.repeat(pa.scalar(value=True), size)
        for column, kind in zip(columns, self.kinds, strict=True):
            is_possible = pc.and_(is_possible, _can_be_stored(column, kind))
        rows_of_keys = zip(*(_values(column, is_possible) for column in columns), strict=True) if columns else [()] * size
        # Impossible values became NULL, as a stored key may have: such a key is None, so that it matches no row.
        keys = [key if can_exist else None for key, can_exist in zip(rows_of_keys, is_possible.to_pylist(), strict=True)]
        distinct = list(dict.fromkeys(key for key in keys if key is not None))
        place: dict[tuple[Any, ...], int] = {}
        state_rows: list[tuple[Any, ...]] = []
        for position, row in self.reading.rows(connection, distinct):
            place[distinct[position]] = len(state_rows)
            state_rows.append(row)
        places = [None if key is None else place.get(key) for key in keys]
        indices = pa.array(places, pa.int64())
        columns_found = [
            pa.array([_plain(row[number]) for row in state_rows], kind).take(indices)
            for number, kind in enumerate(self.result.values())
        ]
        return pa.StructArray.from_arrays([indices.is_valid(), *columns_found], [IS_THERE, *self.result])


def _one_array(column: Any) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _can_be_stored(column: pa.Array, kind: str) -> Any:
    """Return for each value whether a column of this type could hold it; NULL could. A state cannot have other keys."""
    if kind == "text":
        possible = pc.invert(pc.match_substring(column, "\0"))
    elif kind == "uuid":
        possible = pc.match_substring_regex(column, _UUID)
    elif pa.types.is_date32(column.type) or pa.types.is_timestamp(column.type):
        is_date = pa.types.is_date32(column.type)
        ticks, (first, last) = column.view(pa.int32() if is_date else pa.int64()), DAYS if is_date else TICKS
        possible = pc.and_(pc.greater_equal(ticks, first), pc.less_equal(ticks, last))
    else:
        return pa.repeat(pa.scalar(value=True), len(column))
    return pc.fill_null(possible, True)


def _values(column: pa.Array, is_possible: Any) -> list[Any]:
    """Return a key column's values as Python objects; None for impossible values, because Python lacks some of them."""
    values: list[Any] = pc.if_else(is_possible, column, pa.scalar(None, column.type)).to_pylist()
    return values


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value
