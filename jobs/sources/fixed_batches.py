"""A source of lists in memory, one batch each, for tests, examples and the conformance suite."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.jobs.sources import Coordinator, Emitter, Source
from tidegate.jobs.sources.column_types import columns_of
from tidegate.state_store.base.errors import SourceChanged
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceKind, SourceMetadata

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidegate.state_store.attempt.attempts import Attempt

Row = Sequence[Any]


@dataclass(frozen=True)
class FixedBatches(Source):
    """Batch n has the rows of the n-th list. After the last list the source ends.

    `schema` maps columns to Spark types. The lists must not change: metadata names a list by its place and its content, so
    that a changed list is noticed. Plan and processing have to see the same lists, so they belong in the module that
    declares the pipeline. `kind` is the promise that the source claims to keep; lists could keep any.
    """

    batches: Sequence[Sequence[Row]]
    schema: Mapping[str, str]
    kind: SourceKind = "transactional"

    def __post_init__(self) -> None:
        if not self.schema:
            raise ValueError("FixedBatches needs a schema, such as {'word': 'string'}.")
        for number, batch in enumerate(self.batches, start=1):
            if wrong := [row for row in batch if len(row) != len(self.schema)]:
                raise ValueError(f"FixedBatches: row {wrong[0]!r} of batch {number} does not have {len(self.schema)} values.")

    @property
    def identity(self) -> str:
        """Return the columns; not the lists, because more may be added."""
        return f"fixed batches of {json.dumps(list(self.schema.items()))}"

    def coordinator(self, settings: Settings) -> "FixedCoordinator":
        """Return a coordinator that goes through the lists."""
        del settings
        return FixedCoordinator(self)

    def emitter(self, spark: "SparkSession", settings: Settings) -> "FixedEmitter":
        """Return an emitter that makes rows of a list."""
        del settings
        return FixedEmitter(self, spark)

    def list_at(self, position: int) -> Sequence[Row] | None:
        """Return a list by its place, None after the last one."""
        return self.batches[position] if position < len(self.batches) else None


class FixedCoordinator(Coordinator):
    """Goes through the lists."""

    def __init__(self, source: FixedBatches) -> None:
        self._source = source

    def initialize_transaction(
        self,
        txid: int,  # noqa: ARG002 - batches of quarantined records take txids too
        previous_metadata: SourceMetadata | None,
        current_metadata: SourceMetadata | None,
    ) -> SourceMetadata | None:
        """Return the place of the next list and the digest of its content."""
        if current_metadata is not None and self._source.kind == "transactional":
            return current_metadata
        position = previous_metadata["position"] + 1 if previous_metadata else 0
        rows = self._source.list_at(position)
        return None if rows is None else {"position": position, "rows": len(rows), "sha256": _digest(rows)}


class FixedEmitter(Emitter):
    """Makes rows of a list."""

    def __init__(self, source: FixedBatches, spark: "SparkSession") -> None:
        self._source = source
        self._spark = spark

    def row_schema(self) -> str:
        """Return the declared columns."""
        return columns_of(self._source.schema)

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows of the list.

        Raises: SourceChanged if the list of a transactional source has changed.
        """
        rows = self._source.list_at(metadata["position"]) or []
        if self._source.kind == "transactional" and _digest(rows) != metadata["sha256"]:
            raise SourceChanged(f"{attempt}: list {metadata['position']} of FixedBatches is not what was planned.")
        return self._spark.createDataFrame([tuple(row) for row in rows], self.row_schema())


def _digest(rows: Sequence[Row]) -> str:
    return hashlib.sha256(json.dumps([list(row) for row in rows], default=str).encode()).hexdigest()
