"""Tracking by count and hash: notices rows that Spark loses or repeats between a batch's source and its staging (ROWS_LOST).

Storm's acker XORs the random 64-bit id of each tuple when it is emitted and when it is processed: zero means complete, in
any order (docs/semantics.md). Here a row's id is its hash. Equal rows have equal ids, which an XOR cannot count, so Spark
adds up the ids, modulo 2^64, while it processes the rows:

    source       count and sum of the rows that the source emitted; a replay must reproduce them (I11)
    transformed  count and sum of the rows that the transform returned
    staged       count and sum of the same rows, added up again from the partials (results per key) that COPY wrote

Transformed and staged must be equal in both, or the attempt fails. Source and transformed cannot be compared, because a
transform may drop and multiply rows. Each of several inputs is tracked by itself: its name is part of its rows' hashes, and
the sums of all inputs are added.

If row x comes d(x) times too often or too seldom, the sums differ by the sum of d(x) hash(x). With evenly distributed hashes
this is 0 modulo 2^64 with a probability of 2^(t-64), where 2^t is the largest power of two that divides all d(x): 2^-63 if
a, a, b, b become a, a, a, a. An XOR misses every change in which all d(x) are even, such as this one.

Spark's sum of bigints fails on overflow, so the lower and the upper 32 bits of the ids are added up separately. That has room
for 2^31 rows at one place; together the two give the sum modulo 2^64.

Hashing rows takes time, and so do observed sums, which Spark interprets row by row. If one task reads and groups whole files
that a digest vouches for, rows do not move between tasks. Then the files themselves say how many rows there must be, and the
partials are followed into staging instead of the rows, each with a hash of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql import types as T

from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.sources import PAYLOAD
from tidegate.jobs.sources.column_types import quoted
from tidegate.jobs.spark.library_internals import note_not_streaming
from tidegate.jobs.states import AnyState
from tidegate.state_store.base.errors import DeclarationInvalid, RowsLost

if TYPE_CHECKING:  # executors import this module, and have no SQLAlchemy
    from tidegate.state_store.attempt.attempts import Attempt

# Columns that are removed before COPY. ID is the hash of a row; in a partial, ROWS is the number of its rows, and HASH the sum
# of their hashes, or the hash of the partial itself.
ID, ROWS, HASH = "_tidegate_id", "_tidegate_rows", "_tidegate_hash"
HALF_BITS = 32
LOW_HALF = 2**HALF_BITS - 1


@dataclass(frozen=True)
class RowSums:
    """The number of rows at one place of a query, the sum of their hashes (None: not hashed), how many are bad."""

    rows: int
    hash: int | None = None
    flagged: int = 0


class Tracker:
    """The sums at one place of a query, available after its first action."""

    def __init__(self, name: str, input_name: str = "") -> None:
        # The name must be unique in the session, which batches share: an observation may otherwise return another's sums.
        self.name = name
        self._observation = Observation(name)
        self._is_hashed = False
        self._input = input_name  # of one of several inputs; part of the hash, so that equal rows of two inputs differ

    def attach(
        self, rows: DataFrame, schema: T.StructType, columns: Iterable[str] | None, flag: Column | None = None
    ) -> DataFrame:
        """Return the rows, observed, with the hash of `columns`, unless None, as column ID. `flag` is true for bad rows.

        The hash is a column because Spark compiles columns, but interprets observed expressions, which is slower.
        """
        sums = [F.count(F.lit(1)).alias("rows")]
        if columns is not None:
            self._is_hashed = True
            rows = with_id(rows, schema, columns, self._input)
            sums += _low_and_high(halves(ID))
        if flag is not None:
            sums.append(F.count_if(flag).alias("flagged"))
        return self._observe(rows, sums)

    def attach_partials(self, partials: DataFrame, counter: str) -> DataFrame:
        """Return the partials, observed: the number of their rows, from column `counter`, and the sum of HASH."""
        self._is_hashed = True
        return self._observe(partials, [F.sum(counter).alias("rows"), *_low_and_high(halves(HASH))])

    def _observe(self, rows: DataFrame, sums: list[Column]) -> DataFrame:
        note_not_streaming(rows)
        return rows.observe(self._observation, *sums)

    def sums(self) -> RowSums:
        """Return the sums; wait until Spark has run the query.

        Raises: DeclarationInvalid if the query did not read the observed DataFrame.
        """
        observed: dict[str, Any] = self._observation.get
        if "rows" not in observed:
            of = f"input {self._input}: each row of each input has to be read" if self._input else "its input"
            raise DeclarationInvalid(
                f"The transform returns rows that it has not made from {of}. Batches share a Spark session, so it must not "
                "go through views or spark.sql(): write it with selectExpr, where, join, groupBy and the like."
            )
        hashes = signed(((observed["high"] or 0) << HALF_BITS) + (observed["low"] or 0)) if self._is_hashed else None
        return RowSums(observed["rows"] or 0, hashes, observed.get("flagged", 0))


def with_id(rows: DataFrame, schema: T.StructType, columns: Iterable[str], input_name: str = "") -> DataFrame:
    """Return the rows with the hash of these columns, and of their input's name, as column ID."""
    return rows.select("*", row_id(schema, columns, input_name).alias(ID))


def halves(column: str) -> tuple[Column, Column]:
    """Return the sums of the lower and the upper 32 bits of a column of hashes, the upper ones signed."""
    return F.sum(F.col(column).bitwiseAND(F.lit(LOW_HALF))), F.sum(F.shiftright(column, HALF_BITS))


def hash_sum(column: str) -> Column:
    """Return the sum of a column of hashes modulo 2^64, as a signed number; NULL without rows."""
    low, high = halves(column)
    return F.shiftleft(high + F.shiftright(low, HALF_BITS), HALF_BITS).bitwiseOR(low.bitwiseAND(F.lit(LOW_HALF)))


def signed(number: int) -> int:
    """Return a number modulo 2^64 as a signed bigint, as Spark and Postgres store it."""
    return (number + 2**63) % 2**64 - 2**63


def _low_and_high(sums: tuple[Column, Column]) -> list[Column]:
    return [column.alias(name) for column, name in zip(sums, ("low", "high"), strict=True)]


def total(sums: Sequence[RowSums]) -> RowSums:
    """Return the total of several sums, modulo 2^64."""
    hashes = [each.hash for each in sums]
    added = None if None in hashes else signed(sum(number or 0 for number in hashes))
    return RowSums(sum(each.rows for each in sums), added, sum(each.flagged for each in sums))


def row_id(schema: T.StructType, columns: Iterable[str], input_name: str = "") -> Column:
    """Return the 64-bit hash of those columns that the schema has, and of the input's name, if given.

    PAYLOAD, the raw text of a bad record, is NULL in good rows and leaves their hash unchanged.
    """
    fields = {field.name: field for field in schema}
    parts: list[Column] = [F.lit(input_name)] if input_name else []
    for name in columns:
        if field := fields.get(name):
            column = F.col(quoted(name))
            parts.append(_hashable(column, field.dataType))
            if field.nullable and name != PAYLOAD:
                parts.append(column.isNull())  # the hash skips NULL: (1, NULL) would equal (NULL, 1)
    return F.xxhash64(*parts) if parts else F.lit(0).cast("bigint")


def is_followed(pipeline: Pipeline, state: AnyState) -> bool:
    """Return whether rows are followed from the transform into a state's staging."""
    return pipeline.tracking != "off" and not state.unanchored


def is_tracked(pipeline: Pipeline) -> bool:
    """Return whether rows are followed into the staging of any state."""
    return any(is_followed(pipeline, state) for state in pipeline.states.values())


def used_columns(pipeline: Pipeline) -> list[str]:
    """Return the columns that the pipeline's states use."""
    used: dict[str, None] = {}
    for state in pipeline.states.values():
        used |= dict.fromkeys([*state.keyed_by, *(part.column for part in state.parts if part.column is not None)])
    return list(used)


def check_complete(attempt: "Attempt", place: str, before: RowSums, after: RowSums) -> None:
    """Refuse an attempt if row counts or hash sums differ between two places.

    Raises: RowsLost.
    """
    difference = 0 if before.hash is None or after.hash is None else (before.hash - after.hash) % 2**64
    if difference or before.rows != after.rows:
        hashes = f" (the sums of their hashes differ by {difference:#x})" if difference else ""
        raise RowsLost(
            f"{attempt}: of {before.rows} rows {after.rows} arrived in {place}{hashes}. Spark lost or repeated rows, or the "
            "transform does not return the same rows each time it runs."
        )


def _hashable(column: Column, kind: T.DataType) -> Column:
    """Return an expression that Spark can hash: it refuses maps, so a map is hashed as JSON text."""
    return F.to_json(column) if "map<" in kind.simpleString() else column
