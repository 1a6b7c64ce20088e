"""Reads the data files of one batch of a Delta table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tidegate.jobs.sources import HIDDEN
from tidegate.jobs.sources.column_types import columns_of, quoted
from tidegate.jobs.sources.data_files_read import DataFilesReader
from tidegate.jobs.sources.delta.source import CHANGE_COLUMNS, CHANGE_TYPE, COMMIT_VERSION, Delta
from tidegate.jobs.sources.files.formats.parquet import ParquetReader
from tidegate.jobs.sources.files.partition_columns import PartitionColumns
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

BY_ROW = "files that tell their change row by row"


class DeltaReader(DataFilesReader):
    """Has a reader for files of one kind of change, and one for files that have a column with the change of each row."""

    USUAL = "files of one change"

    def __init__(self, source: Delta, spark: SparkSession, settings: Settings) -> None:
        super().__init__(spark, settings)
        self._source = source
        self._columns = {**source.schema, **source.partitions, **(CHANGE_COLUMNS if source.changes else {})}

    def _make_reader(self, name: str) -> ParquetReader:
        """Return a reader that takes the change and its version for partition columns, as far as they are not in the file."""
        source, files = self._source, self._source.files
        of_change = CHANGE_COLUMNS if source.changes else {}
        if name == BY_ROW:
            files = replace(files, schema={**source.schema, CHANGE_TYPE: CHANGE_COLUMNS[CHANGE_TYPE]})
            of_change = {COMMIT_VERSION: CHANGE_COLUMNS[COMMIT_VERSION]}
        return ParquetReader(self._spark, files, self._home, PartitionColumns({**source.partitions, **of_change}))

    def _reader_of(self, file: Mapping[str, Any], metadata: SourceMetadata) -> str:
        del metadata
        return self.USUAL if "change" in file else BY_ROW

    def _entry(self, file: dict[str, Any]) -> dict[str, Any]:
        """Return a file's entry, with its change and version beside the values of its partition."""
        of_change = {CHANGE_TYPE: file.get("change"), COMMIT_VERSION: str(file["commit_version"])}
        return {**file, "partition": {**file["partition"], **of_change}}

    def _united(self, parts: Sequence[DataFrame]) -> DataFrame:
        """Return the rows with their columns in the order of `row_schema`, which is not that of files by row."""
        rows = super()._united(parts)
        return rows.select(*map(quoted, self._columns), *(name for name in HIDDEN if name in rows.columns))

    def row_schema(self) -> str:
        """Return the declared columns, with those of the partitions and of the change last."""
        return columns_of(self._columns)
