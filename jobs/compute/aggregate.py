"""Aggregate a batch's rows into a state's partials: one row per key, with columns in their declared types."""

from typing import Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name that PySpark's users know
from pyspark.sql import types as T  # noqa: N812

from jobs.compute import state_columns
from jobs.compute.tracking import HASH, ID, ROWS, hash_sum
from jobs.pipeline import State
from state_store.declaration import StateSpec


def aggregate(
    rows: DataFrame, schema: T.StructType, state: State, spec: StateSpec, *, follow: Literal["rows", "partials"] | None = None
) -> DataFrame:
    """Return the partials of one state: a row per key with the state's columns, in their declared types.

    `schema` is the rows' own: asking the DataFrame for it costs a round trip each time. With `follow`, each partial also has
    the number of rows that it was made of, and the sum of their hashes ("rows") or a hash of its own ("partials").

    Raises: DeclarationInvalid if a column is missing or has a type that would lose something.
    """
    keys = [state_columns.column_of(schema, spec, key.name, key.type).alias(key.name) for key in spec.keys]
    values = []
    for value in spec.values:
        declared = state.aggregates[value.name]
        if declared.column is None:
            values.append(F.count(F.lit(1)).alias(value.name))
            continue
        exact = declared.function != "count"
        column = state_columns.column_of(schema, spec, declared.column, value.type if exact else None)
        result: Column = getattr(F, declared.function)(column)
        if declared.function == "sum":
            result = F.coalesce(result, F.lit(0))
        values.append(result.cast(state_columns.spark_type(value.type)).alias(value.name))
    types = {column.name: state_columns.spark_type(column.type) for column in spec.columns}
    if follow and counter_of(state) == ROWS:
        values.append(F.count(F.lit(1)).alias(ROWS))
        types[ROWS] = T.LongType()
    if follow == "rows":
        values.append(hash_sum(ID).alias(HASH))
    partials = rows.groupBy(*keys).agg(*values)
    if follow == "partials":
        partials = partials.withColumn(HASH, F.xxhash64(*types))
    if follow:
        types[HASH] = T.LongType()
    # Nothing is converted; but without this, mapInArrow would ask the server for the columns: one more analysis of the query.
    return partials.to(T.StructType([T.StructField(name, kind) for name, kind in types.items()]))


def counter_of(state: State) -> str:
    """Return the column that counts a partial's rows: one of the state's own, if it counts them."""
    return next((name for name, a in state.aggregates.items() if a.function == "count" and a.column is None), ROWS)
