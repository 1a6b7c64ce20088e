"""The acker: every record of a batch was fully processed, checked and not assumed.

Storm's acker XORs the 64-bit id of each tuple when it is made and when it is done with: zero means complete, in whatever
order the acks arrive (SEMANTICS (b), Acker). Here a row's id is its hash, and the sums are taken by Spark, in passing:

    source       count and XOR of the rows that the source emitted; a replay must reproduce them (CONTRACT I11)
    transformed  count and XOR of the rows that the transform returned
    staged       count and XOR of the same rows, summed up again from the partials that COPY wrote

From the transform on, every row is followed one to one: transformed XOR staged is zero, and the counts are equal, or the
attempt fails. Between source and transformed rows nothing can be followed, because a transform may drop and multiply rows.
Two equal rows cancel each other out in an XOR; that is what the count is for.

What Spark sums up in passing it interprets, row by row, and to hash the rows takes time as well. Where one task reads a whole
file that a digest vouches for, groups its rows and hands over the partials, the rows do not move in between: then the file
itself tells how many rows there have to be, and what is followed into staging are the partials, each with a hash of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - the name that PySpark's users know
from pyspark.sql import types as T  # noqa: N812

from jobs.pipeline import Pipeline
from state_store.attempts import Attempt
from state_store.errors import DeclarationInvalid, RowsLost

# A row's id on its way from the transform into a partial; in partials, of how many rows they were made, and the XOR of the
# ids, or an id of their own. All are taken off before COPY.
ID, ROWS, HASH = "_tidegate_id", "_tidegate_rows", "_tidegate_hash"


@dataclass(frozen=True)
class Sums:
    """How many rows passed a place, the XOR of their hashes, None if untracked, and how many of the rows were flagged."""

    rows: int
    hash: int | None = None
    flagged: int = 0


class Observed:
    """The sums at one place of a query, there once its first action has run."""

    def __init__(self, name: str) -> None:
        # Batches share a session, and an observation of the same name would answer for another.
        self._observation = Observation(name)
        self._is_tracked = False

    def attach(
        self, rows: DataFrame, schema: T.StructType, columns: Iterable[str] | None, flag: Column | None = None
    ) -> DataFrame:
        """Return the rows, observed, with the hash over these columns as column ID; None: untracked, and no such column.

        The hash is a column of its own because Spark compiles that, but interprets what it observes: with the hash inside,
        a batch took twice as long.
        """
        sums = [F.count(F.lit(1)).alias("rows")]
        if columns is not None:
            self._is_tracked = True
            rows = rows.select("*", row_id(schema, columns).alias(ID))
            sums.append(F.bit_xor(ID).alias("hash"))
        if flag is not None:
            sums.append(F.count_if(flag).alias("flagged"))
        return self._observe(rows, sums)

    def attach_partials(self, partials: DataFrame, counter: str) -> DataFrame:
        """Return anchored partials, observed: how many rows they were made of, and the XOR of what is in HASH."""
        self._is_tracked = True
        return self._observe(partials, [F.sum(counter).alias("rows"), F.bit_xor(HASH).alias("hash")])

    def _observe(self, rows: DataFrame, sums: list[Column]) -> DataFrame:
        # Batches are never streams; the server would analyse the whole query once more to say so.
        vars(rows)["isStreaming"] = False
        return rows.observe(self._observation, *sums)

    def sums(self) -> Sums:
        """Return what passed; waits for the first action.

        Raises: DeclarationInvalid if the rows took another way than through the DataFrame that was observed.
        """
        found: dict[str, Any] = self._observation.get
        if "rows" not in found:
            raise DeclarationInvalid(
                "The transform returns other rows than what it made of its own. Batches share a Spark session, so it must not "
                "go through views or spark.sql(): write it with selectExpr, where, groupBy and the like."
            )
        return Sums(found["rows"] or 0, (found["hash"] or 0) if self._is_tracked else None, found.get("flagged", 0))


def row_id(schema: T.StructType, columns: Iterable[str]) -> Column:
    """Return the 64-bit hash of those of these columns that rows of this schema have."""
    fields = {field.name: field for field in schema}
    parts: list[Column] = []
    for name in columns:
        if field := fields.get(name):
            column = F.col(f"`{name.replace('`', '``')}`")
            parts.append(_hashable(column, field.dataType))
            if field.nullable:
                parts.append(column.isNull())  # NULL adds nothing to a hash: (1, NULL) would be (NULL, 1)
    return F.xxhash64(*parts) if parts else F.lit(0).cast("bigint")


def used_columns(pipeline: Pipeline) -> list[str] | None:
    """Return the columns by which the pipeline's states know a row; None if its rows are not tracked."""
    if pipeline.tracking == "off" or all(state.unanchored for state in pipeline.states.values()):
        return None
    used: dict[str, None] = {}
    for state in pipeline.states.values():
        used |= dict.fromkeys([*state.key, *(a.column for a in state.aggregates.values() if a.column is not None)])
    return list(used)


def check_complete(attempt: Attempt, place: str, before: Sums, after: Sums) -> None:
    """Refuse an attempt in which not every row arrived at the next place exactly once.

    Raises: RowsLost.
    """
    difference = ((before.hash or 0) ^ (after.hash or 0)) % 2**64
    if difference or before.rows != after.rows:
        raise RowsLost(
            f"{attempt}: of {before.rows} rows {after.rows} arrived in {place} (XOR of their hashes {difference:#x}, which "
            "should be 0). Spark lost or repeated rows, or the transform does not return the same rows each time it runs.",
            pipeline=attempt.pipeline,
            txid=attempt.txid,
            attempt=attempt.number,
        )


def _hashable(column: Column, kind: T.DataType) -> Column:
    """Spark refuses to hash maps: their text stands for them."""
    return F.to_json(column) if "map<" in kind.simpleString() else column
