"""Reads the data files of one batch of an Iceberg table."""

from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from tidegate.jobs.sources.column_types import columns_of
from tidegate.jobs.sources.data_files_read import DataFilesReader
from tidegate.jobs.sources.files.formats.parquet import ParquetReader
from tidegate.jobs.sources.files.partition_columns import PartitionColumns
from tidegate.jobs.sources.iceberg.source import Iceberg
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata


class IcebergReader(DataFilesReader):
    """Has a reader for each place of data files, which the metadata say."""

    USUAL = "."

    def __init__(self, source: Iceberg, spark: SparkSession, settings: Settings) -> None:
        super().__init__(spark, settings)
        self._source = source

    def _make_reader(self, name: str) -> ParquetReader:
        return ParquetReader(self._spark, self._source.files(name), self._home, PartitionColumns({}))

    def _reader_of(self, file: Mapping[str, Any], metadata: SourceMetadata) -> str:
        del file
        root: str = metadata["root"]
        return root

    def row_schema(self) -> str:
        """Return the declared columns."""
        return columns_of(self._source.schema)
