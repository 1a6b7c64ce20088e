"""The columns of a state: their types, what they keep and how that is merged; no Spark, no SQLAlchemy, comparable and hashable.

Names of states and columns are plain identifiers of Postgres. A partial is one attempt's result for one key.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
NUMERIC = re.compile(r"numeric\((\d{1,2}),\s?(\d{1,2})\)")
# How a partial is merged into the kept value, and how a column that readers see is derived from kept ones.
Merge = Literal[
    "sum", "min", "max", "bit_and", "bit_or", "bit_xor", "first", "last", "union", "list", "smallest", "largest", "counts",
    "bits", "append", "own",
]  # fmt: skip
Formula = Literal["mean", "variance", "variance_pop", "stddev", "stddev_pop", "distinct", "quantile"]
# Tidegate's own columns, those that every Postgres table has already, and the words that SQLAlchemy does not quote.
SNAPSHOT, PREVIOUS_TXID, POSITION = "snapshot", "previous_txid", "position"
VALID_TO, TO_TXID = "valid_to", "to_txid"
RESERVED_COLUMNS = (
    *("txid", PREVIOUS_TXID, SNAPSHOT, "task_attempt", "ctid", "xmin", "xmax", "cmin", "cmax", "tableoid"),
    *("collation", "concurrently", "lateral", "system_user", "tablesample"),
)
# The range of dates and times that Postgres, Spark and Python share, years 1 to 9999, in days and in microseconds since 1970.
DAYS, TICKS = (-719_162, 2_932_896), (-62_135_596_800_000_000, 253_402_300_799_999_999)
_SIMPLE_TYPES = ("text", "boolean", "integer", "bigint", "date", "timestamptz", "timestamp", "uuid", "bytea")
_ARRAY, _NO_ELEMENTS = "[]", ("boolean", "uuid", "bytea")
ARRAY_MERGES = ("union", "list", "smallest", "largest", "counts", "bits")


@dataclass(frozen=True)
class ColumnType:
    """A column's Postgres type.

    One of text, boolean, integer, bigint, date, timestamptz, timestamp, uuid, bytea, numeric(20,4). Text compares by bytes
    (COLLATE "C"), as in Spark, so that both agree on order and equality. A timestamp is without zone. Not supported: double,
    because its sums depend on the order of the rows (use numeric), and jsonb, which no aggregate merges (use text).

    Aggregates that keep several values have arrays of these types, such as bigint[], but not of boolean, uuid and bytea.
    """

    name: str

    def __post_init__(self) -> None:
        element = self.name.removesuffix(_ARRAY)
        if element in _SIMPLE_TYPES and (element == self.name or element not in _NO_ELEMENTS):
            return
        numeric = NUMERIC.fullmatch(element)
        if not numeric or not (1 <= int(numeric[1]) <= 38 and int(numeric[2]) <= int(numeric[1])):  # 38: Spark's limit
            known = ", ".join([*_SIMPLE_TYPES, "numeric(precision,scale) with precision up to 38"])
            raise ValueError(f"{self.name!r} is not a column type. Choose one of: {known}.")

    @property
    def element(self) -> "ColumnType | None":
        """Return the type of an array's elements, None for any other type."""
        return ColumnType(self.name.removesuffix(_ARRAY)) if self.name.endswith(_ARRAY) else None

    @property
    def has_any_length(self) -> bool:
        """Return whether a value may take any number of bytes."""
        return self.name in ("text", "bytea") or self.element is not None

    @property
    def precision_and_scale(self) -> tuple[int, int] | None:
        """Return a numeric type's precision and scale, None for any other."""
        numeric = NUMERIC.fullmatch(self.name)
        return (int(numeric[1]), int(numeric[2])) if numeric else None


@dataclass(frozen=True)
class KeyColumn:
    """A column of the state's key; if `nullable`, rows with NULL in it are a group of their own."""

    name: str
    type: ColumnType
    nullable: bool = False


TXID = KeyColumn("txid", ColumnType("bigint"))


@dataclass(frozen=True)
class ValueColumn:
    """A value kept per key: how it is computed, such as ``sum(cents)``, and how partials are merged into it.

    `order` names the columns that decide which of two rows is the "first" or "last", the most significant first; `most` is the
    largest number of elements of an array. `combine` is an author's own merge of two values, neither of which is NULL; a spec
    that was read from the ledger lacks this code, and cannot commit.
    """

    name: str
    type: ColumnType
    merge: Merge
    computed: str = ""
    order: tuple[str, ...] = ()
    most: int | None = None
    combine: Callable[[Any, Any], Any] | None = field(default=None, compare=False, repr=False)

    @property
    def nullable(self) -> bool:
        """Return whether there may be no value: sums and counts of nothing are 0, the minimum of nothing is NULL."""
        return self.merge not in ("sum", *ARRAY_MERGES)


@dataclass(frozen=True)
class DerivedColumn:
    """A value that Postgres derives from kept columns of the same row, whenever these change; it is never written.

    A mean is made of a sum and a count; variances and deviations of a sum, a sum of squares and a count. The type is a numeric,
    to whose scale they are rounded. A number of different values and a quantile are estimates: Postgres functions of the ledger
    compute them from a sketch, an array of bounded size, and the numbers in `given`.
    """

    name: str
    type: ColumnType
    formula: Formula
    made_of: tuple[str, ...]
    given: tuple[int | str, ...] = ()


def previous_name(value: str) -> str:
    """Return the column in which an opaque state keeps the value from before its row's txid."""
    return f"previous_{value}"


def check_name(what: str, name: str) -> None:
    """Refuse a name that is not a plain Postgres identifier with room for the txid and attempt of a staging table.

    Raises: ValueError.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be the name of a {what}: use lower case letters, digits and _, a letter first, at most 40."
        )
