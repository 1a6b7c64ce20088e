"""Turn a batch's rows into a state's partials: one row per key, or per row, with columns in their declared types."""

from collections.abc import Mapping
from typing import Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from tidegate.jobs.aggregates import Part
from tidegate.jobs.compute.partials import array_values, declared_columns, window_pieces
from tidegate.jobs.compute.stage.row_tracking import HASH, ID, ROWS, hash_sum
from tidegate.jobs.compute.transform.transform_purity import check_combiners
from tidegate.jobs.states import AnyState
from tidegate.state_store.declarations.column_spec import POSITION, ColumnType
from tidegate.state_store.declarations.pipeline_spec import StateSpec
from tidegate.state_store.declarations.window_spec import WINDOW_START


def aggregate(
    rows: DataFrame,
    schema: T.StructType,
    state: AnyState,
    spec: StateSpec,
    *,
    follow: Literal["rows", "partials"] | None = None,
) -> DataFrame:
    """Return the partials of one state: a row per key, or per row, with the state's columns, in their declared types.

    With windows, a row per key and stretch of time that belongs to the same windows.

    `schema` is the rows' own: asking the DataFrame for it costs a round trip each time. With `follow`, each partial also has
    the number of rows that it was made of, and the sum of their hashes ("rows") or a hash of its own ("partials").

    Raises: DeclarationInvalid if a column is missing, its type does not fit the declared one without loss, or a combiner is
    impure.
    """
    counted = bool(follow) and counter_of(state) == ROWS
    anchors = {ROWS: F.count(F.lit(1)), HASH: hash_sum(ID)}
    if spec.appends:
        anchors = {ROWS: F.lit(1), HASH: F.col(ID)}
    anchor_names = [name for name, is_needed in ((ROWS, counted), (HASH, follow == "rows")) if is_needed]
    values = [*_values(schema, state, spec), *(anchors[name].alias(name) for name in anchor_names)]
    if spec.appends:
        partials = rows.select(F.monotonically_increasing_id().alias(POSITION), *values)
    else:
        partials = rows.groupBy(*_keys(schema, spec)).agg(*values)
        if any(part.combiner for part in state.parts):
            check_combiners(spec.name, rows, partials, schema.names)
    types = {column.name: declared_columns.spark_type(column.type) for column in spec.columns}
    if counted:
        types[ROWS] = T.LongType()
    if follow == "partials":
        partials = partials.withColumn(HASH, F.xxhash64(*types))
    if follow:
        types[HASH] = T.LongType()
    # The types stay the same; but without a given schema, mapInArrow would ask the server for it: one more analysis.
    return partials.to(T.StructType([T.StructField(name, kind) for name, kind in types.items()]))


def _keys(schema: T.StructType, spec: StateSpec) -> list[Column]:
    own = [key for key in spec.keys if spec.window is None or key.name != WINDOW_START]
    keys = [declared_columns.column_of(schema, spec, key.name, key.type).alias(key.name) for key in own]
    return keys if spec.window is None else [*keys, window_pieces.grouped_by(spec.window, _time(schema, spec))]


def _time(schema: T.StructType, spec: StateSpec) -> Column:
    assert spec.window is not None, "only windows have an event time"
    return declared_columns.column_of(schema, spec, spec.window.column, ColumnType(spec.window.type))


def _values(schema: T.StructType, state: AnyState, spec: StateSpec) -> list[Column]:
    start = [window_pieces.session_start(_time(schema, spec))] if spec.window and spec.window.is_session else []
    inputs = {part.name: _input(schema, spec, part) for part in state.parts}

    def partial(part: Part) -> Column:
        if spec.window and part.function in ("window_end", "no_corrections"):
            return window_pieces.partial(spec.window, part, inputs[part.name])
        return _partial(part, inputs, f"State {spec.name}: {part.name}")

    return start + [
        partial(part).cast(declared_columns.spark_type(value.type)).alias(part.name)
        for part, value in zip(state.parts, spec.values, strict=True)
    ]


def counter_of(state: AnyState) -> str:
    """Return the column that counts a partial's rows: the state's own Count(), or ROWS."""
    return next((part.name for part in state.parts if part.function == "count" and part.column is None), ROWS)


def _input(schema: T.StructType, spec: StateSpec, part: Part) -> Column:
    """Return the input column of a part, in the type that the part reads."""
    if part.column is None:
        return F.lit(1)
    read_as = None if part.function == "count" else ColumnType(part.read_as or part.type)
    return declared_columns.column_of(schema, spec, part.column, read_as)


def _partial(part: Part, inputs: Mapping[str, Column], place: str) -> Column:
    """Return a part's value over the rows of a key, or of a single row."""
    column = inputs[part.name]
    if part.function == "none":
        return column
    if part.function == "sum":
        return F.coalesce(F.sum(column), F.lit(0))
    if part.function == "sum_of_squares":
        return F.coalesce(F.sum(column * column), F.lit(0))
    if part.function in ("first", "last"):
        return _from_one_row(part, inputs)
    if part.combiner:
        # Some of Spark's functions make a value of NULLs: least and greatest leave them out.
        return F.when(F.count(column) > 0, part.combiner.partial(column)).otherwise(F.lit(part.combiner.zero))
    if part.value_column.type.element:
        return array_values.partial(part, column, place)
    value: Column = getattr(F, part.function)(column)
    return value


def _from_one_row(part: Part, inputs: Mapping[str, Column]) -> Column:
    """Return a column of the first or last row, in which NULL never wins over a value.

    Spark computes that row once for all columns that are ordered alike.
    """
    columns = {f"v_{number}": inputs[name] for number, name in enumerate(part.order)}
    if part.function == "last":
        row = F.max(F.struct(*(column.alias(name) for name, column in columns.items())))
    else:
        # Spark takes NULL for the smallest value: a boolean before each column puts rows with a value first.
        fields = ((column.isNull().alias(f"no_{name}"), column.alias(name)) for name, column in columns.items())
        row = F.min(F.struct(*(field for both in fields for field in both)))
    return row.getField(f"v_{part.order.index(part.name)}")
