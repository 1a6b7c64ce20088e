"""Reads the data files of one batch of an Iceberg table, as `Files` reads Parquet files: checked before and after Spark."""

from typing import TYPE_CHECKING

from jobs.sources import Emitter, InputFacts
from jobs.sources.column_types import columns_of
from jobs.sources.files.formats.parquet import ParquetReader
from jobs.sources.files.partitions import Partitions
from jobs.sources.iceberg.source import Iceberg
from state_store.declaration import SourceMetadata
from state_store.errors import TidegateError
from state_store.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from state_store.attempts import Attempt


class IcebergReader(Emitter):
    """Reads data files with the reader of Parquet files that belongs to their place, which the metadata say."""

    def __init__(self, source: Iceberg, spark: "SparkSession", settings: Settings) -> None:
        self._source = source
        self._spark = spark
        self._home = settings.home
        self._readers: dict[str, ParquetReader] = {}
        self.advice: str | None = None  # as that of `FileReader`

    def row_schema(self) -> str:
        """Return the declared columns."""
        return columns_of(self._source.schema)

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows of the data files, after checking the files' digests."""
        return self._reader(metadata).emit_batch(attempt, _files(metadata))

    def emit_records(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows with their file as ORIGIN; rows that do not fit the schema are flagged by a REFUSAL."""
        return self._reader(metadata).emit_records(attempt, _files(metadata))

    def facts(self, attempt: "Attempt", metadata: SourceMetadata) -> InputFacts:
        """Return the number of data files, their size, and their number of rows."""
        return self._reader(metadata).facts(attempt, _files(metadata))

    def expected_rows(self, metadata: SourceMetadata) -> int | None:
        """Return the number of rows in the checked files, counted without Spark."""
        return self._reader(metadata).expected_rows(_files(metadata))

    def verify_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> None:
        """Check the digests again, to find files that changed during the read.

        Raises: RowsLost, SourceChanged, SourceUnavailable, SourceUnreadable.
        """
        self._reader(metadata).verify_batch(attempt, _files(metadata))

    def explain(self, error: Exception) -> TidegateError | None:
        """Return the error for a changed or unreadable file."""
        found = (reader.explain(error) for reader in self._readers.values())
        return next((explained for explained in found if explained), None)

    def parse_payloads(self, payloads: "DataFrame") -> "DataFrame":
        """Parse quarantined rows, which were kept as JSON, by today's schema."""
        return self._at(".").parse_payloads(payloads)

    def _reader(self, metadata: SourceMetadata) -> ParquetReader:
        return self._at(metadata["root"])

    def _at(self, root: str) -> ParquetReader:
        if root not in self._readers:
            self._readers[root] = ParquetReader(self._spark, self._source.files(root), self._home, Partitions({}))
            self._readers[root].advice = self.advice
        return self._readers[root]


def _files(metadata: SourceMetadata) -> SourceMetadata:
    return {"files": metadata["data_files"]}
