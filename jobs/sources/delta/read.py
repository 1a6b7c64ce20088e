"""Reads the data files of one batch of a Delta table, as `Files` reads Parquet files: checked before and after Spark."""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from jobs.sources import HIDDEN, Emitter, InputFacts
from jobs.sources.column_types import columns_of, quoted
from jobs.sources.delta.source import CHANGE_COLUMNS, CHANGE_TYPE, COMMIT_VERSION, Delta
from jobs.sources.files.formats.parquet import ParquetReader
from jobs.sources.files.partitions import Partitions
from state_store.declaration import SourceMetadata
from state_store.errors import TidegateError
from state_store.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from state_store.attempts import Attempt


class DeltaReader(Emitter):
    """Reads data files. Those that tell their change row by row have a column more, and a reader of their own."""

    def __init__(self, source: Delta, spark: "SparkSession", settings: Settings) -> None:
        self._source = source
        self._spark = spark
        of_files = CHANGE_COLUMNS if source.changes else {}
        of_rows = {CHANGE_TYPE: CHANGE_COLUMNS[CHANGE_TYPE]}
        files = source.files
        self._whole = ParquetReader(spark, files, settings.home, Partitions({**source.partitions, **of_files}))
        self._by_row = ParquetReader(
            spark,
            replace(files, schema={**source.schema, **of_rows}),
            settings.home,
            Partitions({**source.partitions, COMMIT_VERSION: CHANGE_COLUMNS[COMMIT_VERSION]}),
        )

    @property
    def advice(self) -> str | None:
        """The advice in an error about a file that is not as planned, as that of `FileReader`."""
        return self._whole.advice

    @advice.setter
    def advice(self, advice: str | None) -> None:
        self._whole.advice = self._by_row.advice = advice

    def row_schema(self) -> str:
        """Return the declared columns, with those of the partitions and of the change last."""
        return columns_of(self._columns)

    @property
    def _columns(self) -> Mapping[str, str]:
        of_changes = CHANGE_COLUMNS if self._source.changes else {}
        return {**self._source.schema, **self._source.partitions, **of_changes}

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows of the data files, after checking the files' digests."""
        return self._union([reader.emit_batch(attempt, part) for reader, part in self._readers(metadata)])

    def emit_records(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows with their file as ORIGIN; rows that do not fit the schema are flagged by a REFUSAL."""
        if not metadata["data_files"]:
            return super().emit_records(attempt, metadata)
        return self._union([reader.emit_records(attempt, part) for reader, part in self._readers(metadata)])

    def facts(self, attempt: "Attempt", metadata: SourceMetadata) -> InputFacts:
        """Return the number of data files, their size, and their number of rows."""
        found = [reader.facts(attempt, part) for reader, part in self._readers(metadata)]
        return InputFacts(
            *(sum(each.files for each in found), sum(each.bytes or 0 for each in found)),
            rows=sum(each.rows or 0 for each in found),
            is_verified=True,
        )

    def expected_rows(self, metadata: SourceMetadata) -> int | None:
        """Return the number of rows in the checked files, counted without Spark."""
        return sum(reader.expected_rows(part) or 0 for reader, part in self._readers(metadata))

    def verify_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> None:
        """Check the digests again, to find files that changed during the read.

        Raises: RowsLost, SourceChanged, SourceUnavailable, SourceUnreadable.
        """
        for reader, part in self._readers(metadata):
            reader.verify_batch(attempt, part)

    def explain(self, error: Exception) -> TidegateError | None:
        """Return the error for a changed or unreadable file."""
        return self._whole.explain(error) or self._by_row.explain(error)

    def parse_payloads(self, payloads: "DataFrame") -> "DataFrame":
        """Parse quarantined rows, which were kept as JSON, by today's schema."""
        return self._whole.parse_payloads(payloads)

    def _readers(self, metadata: SourceMetadata) -> list[tuple[ParquetReader, SourceMetadata]]:
        """Return the readers that a batch needs, each with its files."""
        found: dict[ParquetReader, list[dict[str, Any]]] = {self._whole: [], self._by_row: []}
        for file in metadata["data_files"]:
            found[self._whole if "change" in file else self._by_row].append(self._with_change(file))
        return [(reader, {"files": files}) for reader, files in found.items() if files]

    def _with_change(self, file: Mapping[str, Any]) -> dict[str, Any]:
        """Return a file's entry, with its change and version beside the values of its partition."""
        of_changes = {CHANGE_TYPE: file.get("change"), COMMIT_VERSION: str(file["commit_version"])}
        return {**file, "partition": {**file["partition"], **of_changes}}

    def _union(self, parts: "list[DataFrame]") -> "DataFrame":
        """Return the rows of all parts, with their columns in the order of `row_schema`; none for a batch without files."""
        if not parts:
            return self._spark.createDataFrame([], self.row_schema())
        rows = reduce(lambda left, right: left.unionByName(right), parts)
        return rows.select(*map(quoted, self._columns), *(name for name in HIDDEN if name in rows.columns))
