"""A state's columns: transformed rows get the declared types exactly, or the batch is refused.

A double becomes the shortest decimal that stands for it, such as 0.1; if that does not fit, the batch is refused. A uuid is a
text in Spark, in upper or lower case.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from tidegate.jobs.sources.column_types import quoted
from tidegate.jobs.spark.task_errors import refusal
from tidegate.state_store.base.errors import DeclarationInvalid, MalformedRecord
from tidegate.state_store.declarations.column_spec import ColumnType
from tidegate.state_store.declarations.pipeline_spec import StateSpec

SHOWN_CHARACTERS = 200
_WHOLE = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_FLOATS = (T.FloatType, T.DoubleType)
# For each type of a state's column, the Spark type in which it is computed and staged.
_SPARK_TYPES: dict[str, T.DataType] = {
    "text": T.StringType(),
    "boolean": T.BooleanType(),
    "integer": T.IntegerType(),
    "bigint": T.LongType(),
    "date": T.DateType(),
    "timestamptz": T.TimestampType(),
    "timestamp": T.TimestampNTZType(),
    "uuid": T.StringType(),  # in lower case its order and equality are those of Postgres' uuid
    "bytea": T.BinaryType(),
}
_UUID = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\z"  # $ would allow a line break at the end

# Of a product or quotient whose scale Spark has cut already, as it would need more digits.
_MOST_DIGITS = 38
_OF_DECIMALS = (
    " If it is computed of decimals, cast what it is computed of: Spark has no more than 38 digits, and rounds the result to "
    "fewer decimal places if its type could need more."
)


def column_of(schema: T.StructType, state: StateSpec, name: str, declared: ColumnType | None) -> Column:
    """Return a column of the rows in its declared type; None leaves the type as it is.

    Raises: DeclarationInvalid if it is missing, or its type does not fit the declared one without loss.
    """
    field = next((field for field in schema if field.name == name), None)
    if field is None:
        raise DeclarationInvalid(
            f"State {state.name} needs column {name}, but the transform returns {', '.join(schema.names)}. Add it there."
        )
    column = F.col(quoted(name))
    if declared is None:
        return column
    kind = field.dataType
    if not fits(kind, declared):
        raise DeclarationInvalid(
            f"State {state.name}: column {name} is declared {declared.name}, but the transform returns {kind.simpleString()}. "
            f"Cast it to {spark_type(declared).simpleString()} in the transform, where what is lost is your decision."
            f"{_OF_DECIMALS if isinstance(kind, T.DecimalType) and kind.precision == _MOST_DIGITS else ''}"
        )
    if isinstance(kind, _FLOATS):
        decimal = column.cast("string").try_cast(spark_type(declared))
        return _convert_or_refuse(state, name, declared, column, decimal, decimal.cast(kind) == column)
    if declared.name == "uuid":
        return _convert_or_refuse(state, name, declared, column, F.lower(column), F.lower(column).rlike(_UUID))
    return column.cast(spark_type(declared))


def spark_type(declared: ColumnType) -> T.DataType:
    """Return the Spark type in which a state's column is computed and staged."""
    if numeric := declared.precision_and_scale:
        return T.DecimalType(*numeric)
    if declared.element:
        return T.StringType()  # as Postgres writes an array
    return _SPARK_TYPES[declared.name]


def fits(kind: T.DataType, declared: ColumnType, *, any_scale: bool = False) -> bool:
    """Return whether a column takes a Spark type without loss; with `any_scale`, a numeric column takes any decimal type."""
    numeric = declared.precision_and_scale
    if numeric is None:
        return isinstance(kind, _WHOLE if declared.name in ("integer", "bigint") else type(_SPARK_TYPES[declared.name]))
    if any_scale and isinstance(kind, T.DecimalType):
        return True
    precision, scale = numeric
    return isinstance(kind, (*_WHOLE, *_FLOATS)) or (
        isinstance(kind, T.DecimalType) and kind.scale <= scale and kind.precision - kind.scale <= precision - scale
    )


def _convert_or_refuse(
    state: StateSpec, name: str, declared: ColumnType, value: Column, converted: Column, is_right: Column
) -> Column:
    """Return the converted value, NULL for NULL; unless `is_right`, the query fails with MalformedRecord."""
    refused = refusal(
        MalformedRecord,
        "State {state}: column {column}, declared {type}, has the value {value}, and nothing is rounded or repaired. Round or "
        "repair it in the transform, where what is lost is your decision, or declare another type.",
        state=F.lit(state.name),
        column=F.lit(name),
        type=F.lit(declared.name),
        value=F.substring(value.cast("string"), 1, SHOWN_CHARACTERS),
    )
    return F.when(value.isNull() | F.coalesce(is_right, F.lit(False)), converted).otherwise(refused.cast(spark_type(declared)))
