"""The acker checks that every record of a batch was fully processed.

Storm's acker XORs the 64-bit id of each tuple when it is made and when it is done with: zero means complete, in any order of
the acks (docs/semantics.md). There an id is drawn for each tuple. Here a row's id is its hash, so equal rows have equal ids,
which an XOR cannot count; so Spark adds up the ids, modulo 2^64, while it processes the rows:

    source       count and sum of the rows that the source emitted; a replay must reproduce them (I11)
    transformed  count and sum of the rows that the transform returned
    staged       count and sum of the same rows, added up again from the partials that COPY wrote

From the transform on, every row is followed one to one: transformed and staged are equal in both, or the attempt fails.
Between source and transformed rows nothing can be followed, because a transform may drop and multiply rows. Several inputs are
tracked each by itself, their sums are added, and the input's name is part of its rows' hashes.

If row x comes d(x) times too often or too seldom, the sums differ by the sum of d(x) hash(x). With evenly distributed hashes
this is 0 modulo 2^64 with a probability of 2^(t-64), where 2^t divides all d(x): 2^-63 if two rows take the place of two
others. An XOR misses every change in which all d(x) are even, such as a, a, a, a for a, a, b, b.

Spark's sum of a bigint fails when it exceeds 64 bits. So Spark adds up the two halves of the ids, of 32 bits each, which has
room for 2^31 rows at one place; together they give the sum modulo 2^64.

Spark interprets observed sums, row by row, and hashing the rows takes time as well. Where one task reads a whole file that a
digest vouches for, groups its rows and passes on the partials, the rows do not move in between: then the file itself says how
many rows there have to be, and the partials are followed into staging, each with a hash of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql import types as T

from jobs.library_internals import note_not_streaming
from jobs.pipeline import Pipeline
from jobs.sources import PAYLOAD
from jobs.sources.column_types import quoted
from state_store.errors import DeclarationInvalid, RowsLost

if TYPE_CHECKING:  # executors import this module, and have no SQLAlchemy
    from state_store.attempts import Attempt

# A row's id on its way from the transform into a partial; in partials, the number of their rows, and the sum of the ids, or an
# id of their own. All are removed before COPY.
ID, ROWS, HASH = "_tidegate_id", "_tidegate_rows", "_tidegate_hash"
HALF_BITS = 32
LOW_HALF = 2**HALF_BITS - 1


@dataclass(frozen=True)
class RowSums:
    """The number of rows that passed a place, the sum of their hashes (None: not hashed), and the number of bad rows."""

    rows: int
    hash: int | None = None
    flagged: int = 0


class Tracker:
    """The sums at one place of a query, available once its first action has run."""

    def __init__(self, name: str, of: str = "") -> None:
        # Batches share a session, and an observation of the same name would answer for another.
        self.name = name
        self._observation = Observation(name)
        self._is_tracked = False
        self._of = of  # the input whose rows these are, if a batch has several: equal rows of two inputs get different ids

    def attach(
        self, rows: DataFrame, schema: T.StructType, columns: Iterable[str] | None, flag: Column | None = None
    ) -> DataFrame:
        """Return the rows, observed, with the hash over these columns as column ID; without hash and column if None.

        The hash is a column of its own because Spark compiles columns, but interprets observed expressions, which is slower.
        """
        sums = [F.count(F.lit(1)).alias("rows")]
        if columns is not None:
            self._is_tracked = True
            rows = with_id(rows, schema, columns, self._of)
            sums += _low_and_high(halves(ID))
        if flag is not None:
            sums.append(F.count_if(flag).alias("flagged"))
        return self._observe(rows, sums)

    def attach_partials(self, partials: DataFrame, counter: str) -> DataFrame:
        """Return the partials, observed: the number of rows, by column `counter`, and the sum of column HASH."""
        self._is_tracked = True
        return self._observe(partials, [F.sum(counter).alias("rows"), *_low_and_high(halves(HASH))])

    def _observe(self, rows: DataFrame, sums: list[Column]) -> DataFrame:
        note_not_streaming(rows)
        return rows.observe(self._observation, *sums)

    def sums(self) -> RowSums:
        """Return the sums of the rows that passed; wait until Spark has run the query.

        Raises: DeclarationInvalid if the rows did not pass through the observed DataFrame.
        """
        observed: dict[str, Any] = self._observation.get
        if "rows" not in observed:
            of = f"input {self._of}: each row of each input has to be read" if self._of else "its input"
            raise DeclarationInvalid(
                f"The transform returns rows that it has not made from {of}. Batches share a Spark session, so it must not "
                "go through views or spark.sql(): write it with selectExpr, where, join, groupBy and the like."
            )
        hashes = signed(((observed["high"] or 0) << HALF_BITS) + (observed["low"] or 0)) if self._is_tracked else None
        return RowSums(observed["rows"] or 0, hashes, observed.get("flagged", 0))


def with_id(rows: DataFrame, schema: T.StructType, columns: Iterable[str], of: str = "") -> DataFrame:
    """Return the rows with the hash over these columns, and over the name of their input, as column ID."""
    return rows.select("*", row_id(schema, columns, of).alias(ID))


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
    """Return the sums of rows that passed several places, modulo 2^64."""
    hashes = [each.hash for each in sums]
    added = None if None in hashes else signed(sum(number or 0 for number in hashes))
    return RowSums(sum(each.rows for each in sums), added, sum(each.flagged for each in sums))


def row_id(schema: T.StructType, columns: Iterable[str], of: str = "") -> Column:
    """Return the 64-bit hash of these columns, as far as the schema has them, and of the input's name if there is one.

    The raw text of a bad record comes last and is NULL for a good one, whose hash is the same without this column.
    """
    fields = {field.name: field for field in schema}
    parts: list[Column] = [F.lit(of)] if of else []
    for name in columns:
        if field := fields.get(name):
            column = F.col(quoted(name))
            parts.append(_hashable(column, field.dataType))
            if field.nullable and name != PAYLOAD:
                parts.append(column.isNull())  # NULL adds nothing to a hash: (1, NULL) would be (NULL, 1)
    return F.xxhash64(*parts) if parts else F.lit(0).cast("bigint")


def used_columns(pipeline: Pipeline) -> list[str] | None:
    """Return the columns that the pipeline's states use; None if its rows are not tracked."""
    if pipeline.tracking == "off" or all(state.unanchored for state in pipeline.states.values()):
        return None
    used: dict[str, None] = {}
    for state in pipeline.states.values():
        used |= dict.fromkeys([*state.keyed_by, *(part.column for part in state.parts if part.column is not None)])
    return list(used)


def check_complete(attempt: "Attempt", place: str, before: RowSums, after: RowSums) -> None:
    """Refuse an attempt if the rows' number or hash sum differ between two places.

    Raises: RowsLost.
    """
    difference = ((before.hash or 0) - (after.hash or 0)) % 2**64
    if difference or before.rows != after.rows:
        raise RowsLost(
            f"{attempt}: of {before.rows} rows {after.rows} arrived in {place} (the sums of their hashes differ by "
            f"{difference:#x}). Spark lost or repeated rows, or the transform does not return the same rows each time it runs.",
            **attempt.identity,
        )


def _hashable(column: Column, kind: T.DataType) -> Column:
    """Return an expression that Spark can hash: it refuses maps, so a map is hashed as JSON text."""
    return F.to_json(column) if "map<" in kind.simpleString() else column
