"""The formats of `Files`: a module for each, with the parts that Spark's tasks run in modules of their own.

A new one is a module here, its name in `Format` and its reader in `reader_of`, and its options in
`tidegate.jobs.sources.files.formats.text_files.text_options`; mypy refuses a name without a reader.
"""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tidegate.jobs.sources.files.read import FileReader

Format = Literal["parquet", "csv", "json", "text"]


def reader_of(format: Format) -> "type[FileReader]":
    """Return the class that reads files of a format."""
    from tidegate.jobs.sources.files.formats import csv, json, parquet, text  # noqa: PLC0415 - declaring a pipeline must not load pyspark

    match format:
        case "parquet":
            return parquet.ParquetReader
        case "csv":
            return csv.CsvReader
        case "json":
            return json.JsonReader
        case "text":
            return text.TextReader
