"""The types as which columns of Postgres may be read, without loss."""

from tidegate.jobs.sources.column_types import SparkType, parse_type

_INTEGERS = ("smallint", "integer", "bigint")
# Postgres types, by name, that Spark's families of types, and its two floats, take without loss. A text takes any type, as
# Postgres prints it.
_ACCEPTED: dict[str, tuple[str, ...]] = {
    "integer": _INTEGERS,
    "decimal": (*_INTEGERS, "numeric", "real", "double precision"),  # the latter by the digits that Postgres prints
    "float": ("smallint", "real"),  # 24 bits hold each smallint
    "double": ("smallint", "integer", "real", "double precision"),  # 53 bits hold each integer, and not each bigint
    "boolean": ("boolean",),
    "date": ("date",),
    "timestamp": ("timestamp with time zone",),
    "timestamp_ntz": ("timestamp without time zone",),
    "binary": ("bytea",),
}
_READABLE = "tinyint, smallint, int, bigint, decimal, float, double, boolean, date, timestamp, timestamp_ntz, binary, string"


def readable_type(text: str) -> SparkType:
    """Return the Spark type of this name, which a column of Postgres is read as.

    Raises: ValueError if no column can become it without loss.
    """
    advice = (
        f"Use one of {_READABLE}; declare anything else string, which is how Postgres prints it, and parse it in the transform."
    )
    try:
        declared = parse_type(text)
    except ValueError as error:
        raise ValueError(f"{error}. {advice}") from None
    if declared.parts:
        raise ValueError(f"{text!r} is not read from Postgres. {advice}")
    return declared


def takes(declared: SparkType, postgres_type: str) -> bool:
    """Return whether every value of a Postgres type that fits a declared type arrives unchanged."""
    name = declared.alias if declared.family == "float" else declared.family
    return name == "text" or postgres_type in _ACCEPTED[name]
