"""Reads the data files of one batch of a table, whose source is a `tidegate.jobs.sources.data_files.DataFilesSource`."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar

from pyspark.sql import DataFrame, SparkSession

from tidegate.jobs.sources import Emitter, InputFacts
from tidegate.jobs.sources.files.formats.parquet import ParquetReader
from tidegate.state_store.base.errors import TidegateError
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.seal.attempts import Attempt


class DataFilesReader(Emitter):
    """Reads the data files of one batch as `Files` reads Parquet files: checked before and after Spark."""

    USUAL: ClassVar[str]  # the reader of payloads, and of batches without files

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._spark = spark
        self._home = settings.home
        self._readers: dict[str, ParquetReader] = {}

    @abstractmethod
    def _make_reader(self, name: str) -> ParquetReader:
        """Return a reader of this name, as `_reader_of` gives it."""

    @abstractmethod
    def _reader_of(self, file: Mapping[str, Any], metadata: SourceMetadata) -> str:
        """Return the name of the reader that a data file needs."""

    def _entry(self, file: dict[str, Any]) -> dict[str, Any]:
        """Return a data file as its reader expects it."""
        return file

    def _united(self, parts: Sequence[DataFrame]) -> DataFrame:
        """Return the rows of all readers."""
        return reduce(lambda left, right: left.unionByName(right), parts)

    def _reader(self, name: str) -> ParquetReader:
        if name not in self._readers:
            self._readers[name] = self._make_reader(name)
            self._readers[name].advice = self.advice
        return self._readers[name]

    def _shares(self, metadata: SourceMetadata) -> list[tuple[ParquetReader, SourceMetadata]]:
        """Return the readers that a batch needs, each with its files."""
        files: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for file in metadata["data_files"]:
            files[self._reader_of(file, metadata)].append(self._entry(file))
        return [(self._reader(name), {"files": share}) for name, share in (files or {self.USUAL: []}).items()]

    def emit_batch(self, attempt: Attempt, metadata: SourceMetadata) -> DataFrame:
        """Return the rows of the data files, after checking the files' digests."""
        return self._united([reader.emit_batch(attempt, share) for reader, share in self._shares(metadata)])

    def emit_records(self, attempt: Attempt, metadata: SourceMetadata) -> DataFrame:
        """Return the rows with their file as ORIGIN; rows that do not fit the schema are flagged by a REFUSAL."""
        return self._united([reader.emit_records(attempt, share) for reader, share in self._shares(metadata)])

    def facts(self, attempt: Attempt, metadata: SourceMetadata) -> InputFacts:
        """Return the number of data files, their size, and their number of rows."""
        facts = [reader.facts(attempt, share) for reader, share in self._shares(metadata)]
        return InputFacts(
            files=sum(each.files for each in facts),
            bytes=sum(each.bytes or 0 for each in facts),
            rows=sum(each.rows or 0 for each in facts),
            is_verified=True,
        )

    def expected_rows(self, metadata: SourceMetadata) -> int | None:
        """Return the number of rows in the checked files, counted without Spark."""
        return sum(reader.expected_rows(share) or 0 for reader, share in self._shares(metadata))

    def verify_batch(self, attempt: Attempt, metadata: SourceMetadata) -> None:
        """Check the digests again, to find files that changed during the read.

        Raises: RowsLost, SourceChanged, SourceUnavailable, SourceUnreadable.
        """
        for reader, share in self._shares(metadata):
            reader.verify_batch(attempt, share)

    def undeclared(self) -> Mapping[str, Sequence[str]]:
        """Return the columns of data files that are neither declared nor ignored."""
        return {"": sorted({name for reader in self._readers.values() for name in reader.undeclared()[""]})}

    def explain(self, error: Exception) -> TidegateError | None:
        """Return the error for a changed or unreadable file."""
        return next((cause for reader in self._readers.values() if (cause := reader.explain(error))), None)

    def parse_payloads(self, payloads: DataFrame) -> DataFrame:
        """Parse quarantined rows, which were kept as JSON, by today's schema."""
        return self._reader(self.USUAL).parse_payloads(payloads)
