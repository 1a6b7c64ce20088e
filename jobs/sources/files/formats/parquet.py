"""Reads Parquet files; the module `parquet_files.parquet_footers` decides which stored type may be read as which."""

from collections.abc import Iterable
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from tidegate.jobs.sources import HIDDEN, ORIGIN, PAYLOAD, REFUSAL
from tidegate.jobs.sources.column_types import columns_of, parse_type, quoted
from tidegate.jobs.sources.files.formats.parquet_files.parquet_footers import Footer, arrow_types, count_rows, read_footer
from tidegate.jobs.sources.files.formats.parquet_files.parquet_tasks import RowGroups, RowsReader
from tidegate.jobs.sources.files.formats.records.json_records import JsonParser
from tidegate.jobs.sources.files.formats.text_files.text_tasks import PayloadsReader, schema_of
from tidegate.jobs.sources.files.partition_columns import PartitionColumns, advice_on, undeclared
from tidegate.jobs.sources.files.read import BatchFile, FileReader, literal_path
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, Place, hadoop_options

# Up to this size, rows are read in this process and given to Spark, which is faster than starting a Python worker.
HERE_BYTES, HERE_ROWS = 256 * 1024, 10_000
# With more values beside files than this, our tasks read them: 100 such groups took Spark 7 s longer, and 300 nearly a minute.
MOST_GROUPS = 30
# One of our tasks reads about this many bytes.
TASK_BYTES = 16 * 1024 * 1024
# Hadoop's default file system looks for a checksum beside each file, under a name that it cannot form if there is a colon.
RAW_FILES = {"fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem", "fs.file.impl.disable.cache": "true"}


class ParquetReader(FileReader):
    """Reads the declared columns of Parquet files with Spark's reader or, where it is inexact, with our own tasks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rows: dict[Place, int] = {}  # by the files' footers

    def _count_rows(self, file: BatchFile) -> int:
        if file.path not in self._rows:
            self._rows[file.path] = count_rows(file.path)
        return self._rows[file.path]

    def _read(self, *, flagged: bool) -> DataFrame:
        """Return the rows of some files, by our own tasks if one of them needs these."""
        groups, first = self._groups(), self.columns_in(self._files[0])
        columns = {**first, **{name: kind for file in self._files for name, kind in self.columns_in(file).items()}}
        # Spark looks at the present objects only, and one may be gone.
        is_replaced = any(isinstance(file.path, ObjectPath) and file.path.version for file in self._files)
        has_schema = not is_replaced and first == columns
        rows = groups[0][1] if has_schema else self._spark.createDataFrame([], columns_of(columns))
        declared = rows.schema
        footers = self._read_footers(arrow_types(declared))
        if is_replaced or len(groups) > MOST_GROUPS or any(footer.needs_care for footer in footers):
            return self._read_exactly(declared, footers, flagged=flagged)
        parts = [self._read_natively(values, native, flagged=flagged) for values, native in groups]
        return reduce(lambda left, right: left.unionAll(right), parts)

    def _groups(self) -> list[tuple[dict[str, Any], DataFrame]]:
        """Return the values of columns that are not in the files, and the rows, as Spark reads them, of files with the same."""
        alike: dict[tuple[Any, ...], list[BatchFile]] = {}
        for file in self._files:
            alike.setdefault(tuple((name, value[0].as_py()) for name, value in file.values.items()), []).append(file)
        if isinstance(self._folder, ObjectPath):
            filesystem = hadoop_options(self._folder)
        else:
            filesystem = RAW_FILES if any(":" in str(file.path) for file in self._files) else {}
        reader, groups = self._spark.read.options(**filesystem), []
        for values, files in alike.items():
            columns = columns_of(self.columns_in(files[0]))
            groups.append((dict(values), reader.schema(columns).parquet(*(literal_path(file.path) for file in files))))
        return groups

    def columns_in(self, file: BatchFile) -> dict[str, str]:
        """Return the declared columns, with types, that a file itself should have: the schema's, and those without a value."""
        return {name: kind for name, kind in self._columns.items() if name not in file.values}

    def _read_footers(self, types: dict[str, pa.DataType]) -> list[Footer]:
        footers = []
        for file in self._files:
            declared, has_values = self.columns_in(file), "partition" in file.entry
            in_folders = {} if has_values else undeclared(file.name, self._schema)
            footer = read_footer(
                *(file.path, {name: types[name] for name in declared}, declared, () if has_values else self._partitions.schema),
                advice_on(in_folders),
                # A column that is misplaced in the names of folders is not NULL.
                may_lack=()
                if self._source.missing == "refuse"
                else set(file.entry.get("may_lack", declared)) - in_folders.keys(),
            )
            self._note_columns(file.path, set(footer.names) - declared.keys())
            self._rows[file.path] = sum(footer.rows)
            footers.append(footer)
        return footers

    def _read_natively(self, values: dict[str, Any], rows: DataFrame, *, flagged: bool) -> DataFrame:
        """Return the rows as Spark's reader returns them, all of them good, with the values of a group."""
        origin, nothing = F.element_at(F.split(F.col("_metadata.file_path"), "/"), -1), F.lit(None).cast("string")
        hidden = (origin.alias(ORIGIN), nothing.alias(REFUSAL), nothing.alias(PAYLOAD)) if flagged else ()
        columns = [
            F.lit(None if (value := values[name]) is None else str(value)).cast(kind).alias(name)
            if name in values
            else F.col(quoted(name))
            for name, kind in self._columns.items()
        ]
        return rows.select(*columns, *hidden) if values or hidden else rows

    def _read_exactly(self, declared: T.StructType, footers: list[Footer], *, flagged: bool) -> DataFrame:
        tasks = self._tasks(zip(self._files, footers, strict=True))
        beside = schema_of(self._partitions.types, flagged=flagged)
        fields = {field.name: field for field in (*beside, *declared)}
        schema = T.StructType([fields[name] for name in (*self._columns, *(HIDDEN if flagged else ()))])
        reader = RowsReader(tasks, arrow_types(T.StructType(schema.fields[: len(self._columns)])), self._columns, flagged)
        has_rows = any(part.rows for parts in tasks for part in parts)
        is_small = sum(self._rows.values()) <= HERE_ROWS and sum(file.entry["size"] for file in self._files) <= HERE_BYTES
        return self._rows_of(reader, schema, read_here=has_rows and is_small)

    def _tasks(self, files: Iterable[tuple[BatchFile, Footer]]) -> list[list[RowGroups]]:
        """Divide row groups among tasks, in the files' order; tasks never share a row group."""
        tasks: list[list[RowGroups]] = [[]]
        room = float(TASK_BYTES)
        for file, footer in files:
            row, cost = 1, file.entry["size"] / max(1, len(footer.rows))
            for group, count in enumerate(footer.rows):
                if room < cost and tasks[-1]:
                    tasks.append([])
                    room = TASK_BYTES
                facts = count, footer.bytes[group], footer.int96, footer.legacy
                tasks[-1].append(RowGroups(file.path, file.name, file.values, (group,), row, *facts))
                room -= cost
                row += count
        return tasks

    def parse_payloads(self, payloads: DataFrame) -> DataFrame:
        """Parse quarantined rows, which were kept as JSON, by today's schema; those that JSON cannot hold stay there."""
        try:
            parser = JsonParser({name: parse_type(text) for name, text in self._columns.items()})
        except ValueError as error:
            nothing = [F.lit(None).cast(kind).alias(name) for name, kind in self._columns.items()]
            refusal = F.lit(f"it cannot be read from JSON: {error}").alias(REFUSAL)
            return payloads.select(*nothing, ORIGIN, refusal, PAYLOAD)
        return payloads.select(ORIGIN, PAYLOAD).mapInArrow(
            PayloadsReader(parser, PartitionColumns({})), schema_of(parser.types, flagged=True)
        )
