"""Reads the CSV, JSON or plain text files of one batch; `text_tasks` has the part that runs in Spark's tasks."""

from dataclasses import replace
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidegate.jobs.sources import HIDDEN, ORIGIN, PAYLOAD, REFUSAL
from tidegate.jobs.sources.column_types import parse_type, quoted
from tidegate.jobs.sources.files.formats.file_part_tasks import MISFIT, SHOWN_RECORD_CHARACTERS
from tidegate.jobs.sources.files.formats.records.csv_records import CsvParser
from tidegate.jobs.sources.files.formats.records.json_records import GRAMMAR, JsonParser
from tidegate.jobs.sources.files.formats.records.record_parser import RecordParser, TextParser
from tidegate.jobs.sources.files.formats.records.text_records import Grammar
from tidegate.jobs.sources.files.formats.text_files.text_options import (
    PATTERNS,
    encoding_of,
    is_true,
    line_end_of,
    named,
    zone_of,
)
from tidegate.jobs.sources.files.formats.text_files.text_scan import Scan, in_tasks, scan
from tidegate.jobs.sources.files.formats.text_files.text_tasks import PayloadsReader, RecordsReader, schema_of
from tidegate.jobs.sources.files.formats.text_files.time_patterns import TimePattern
from tidegate.jobs.sources.files.partition_columns import undeclared
from tidegate.jobs.sources.files.read import BatchFile, FileReader
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores.object_places import Place
from tidegate.jobs.spark.task_errors import refusal
from tidegate.state_store.base.errors import MalformedRecord

# Up to this size, text is read in this process and given to Spark as rows, which is faster than starting a Python worker.
HERE_BYTES = 256 * 1024
# The columns of texts that have a pattern: as it reads them, and as moments in the declared zone.
READ, MOMENT = "_tidegate_read ", "_tidegate_moment "


class TextFileReader(FileReader):
    """Reads text files. An error names a record's file and line; all records are counted before Spark reads any."""

    def __init__(self, spark: SparkSession, source: Files, home: Path) -> None:
        super().__init__(spark, source, home)
        self._scans: dict[Place, Scan] = {}
        self._encoding = encoding_of(source.options)
        self._parser = parser_of(source)

    def parse_payloads(self, payloads: DataFrame) -> DataFrame:
        """Parse quarantined records by today's schema."""
        schema = schema_of({**self._parser.types, **self._partitions.types}, flagged=True)
        rows = payloads.select(ORIGIN, PAYLOAD).mapInArrow(PayloadsReader(self._parser, self._partitions), schema)
        return self._formatted(rows)

    def _count_rows(self, file: BatchFile) -> int:
        return self._scans[file.path].rows

    def _check_content(self, file: BatchFile) -> None:
        found = scan(file, self._parser, self._encoding, undeclared(file.name, self._schema))
        self._scans[file.path] = found
        self._note_columns(file.path, found.columns)

    def _read(self, *, flagged: bool) -> DataFrame:
        if not flagged and not self._parser.formatted:
            return self._rows(flagged=False)
        rows = self._formatted(self._rows(flagged=True))
        return rows if flagged else self._refusing(rows)

    def _rows(self, *, flagged: bool) -> DataFrame:
        scans = [self._scans[file.path] for file in self._files]
        tasks = in_tasks([part for each in scans for part in each.ranges])
        reader = RecordsReader(tasks, self._parser, self._encoding, flagged)
        schema = schema_of({**self._parser.types, **self._partitions.types}, flagged=flagged)
        is_small = any(each.rows for each in scans) and sum(each.bytes for each in scans) <= HERE_BYTES
        return self._rows_of(reader, schema, read_here=is_small)

    def _formatted(self, rows: DataFrame) -> DataFrame:
        """Convert, by Spark, columns with a pattern of the author's, such as dateFormat; refuse misfits."""
        if not self._parser.formatted:
            return rows
        kinds, options, zone = self._parser.kinds, named(self._source.options), zone_of(self._source.options)
        formatted = {name: kind for name, kind in kinds.items() if name in self._parser.formatted}
        patterns = {name: TimePattern(kind.name, kind.family, options, zone) for name, kind in formatted.items()}
        texts = {name: F.col(quoted(name)) for name in self._schema}
        # In steps of their own, because Spark repeats an expression where it is used, and seldom a column.
        reads = {name: F.col(quoted(READ + name)) for name in patterns}
        rows = rows.select("*", *(pattern.read(texts[name]).alias(READ + name) for name, pattern in patterns.items()))
        moments = {name: F.col(quoted(MOMENT + name)) for name, pattern in patterns.items() if pattern.needs_moments}
        rows = rows.select("*", *(patterns[name].moment(texts[name], reads[name]).alias(MOMENT + name) for name in moments))
        refusal = F.when(F.col(REFUSAL).isNotNull(), F.col(REFUSAL))
        columns = {**texts, **moments}
        for name, pattern in patterns.items():
            begin = F.concat(F.lit(f"column {name}: '"), texts[name], F.lit("' is no "))
            is_text, fits = texts[name].isNotNull(), pattern.fits(texts[name], reads[name])
            refusal = refusal.when(is_text & ~fits, F.concat(begin, F.lit(pattern.form)))
            if name not in moments:
                columns[name] = F.when(fits, reads[name])
            else:
                refusal = refusal.when(is_text & moments[name].isNull(), F.concat(begin, F.lit(pattern.one_moment)))
        payload = F.when(refusal.isNotNull(), F.col(PAYLOAD))
        return rows.select(
            *(column.alias(name) for name, column in columns.items()),
            *map(quoted, self._partitions.schema),
            *(ORIGIN, refusal.alias(REFUSAL), payload.alias(PAYLOAD)),
        )

    def _refusing(self, rows: DataFrame) -> DataFrame:
        refused = refusal(
            MalformedRecord,
            MISFIT,
            place=F.concat(F.lit(f"{self._folder}/"), F.col(ORIGIN)),
            why=F.col(REFUSAL),
            record=F.substring(F.col(PAYLOAD), 1, SHOWN_RECORD_CHARACTERS),
        )
        return rows.where(F.when(F.col(REFUSAL).isNull(), F.lit(True)).otherwise(refused.cast("boolean"))).drop(*HIDDEN)


def parser_of(source: Files) -> RecordParser:
    """Return the parser of a source's records, by its format and options."""
    options = named(source.options)
    kinds = {name: parse_type(text) for name, text in source.schema.items()}
    formatted = frozenset(name for name, kind in kinds.items() if PATTERNS.get(kind.family) in options)
    zone, line_end, may_lack = zone_of(source.options), line_end_of(source.options), source.missing == "null"
    match source.format:
        case "text":
            whole = is_true(source.options, "wholetext")
            return TextParser({"value": parse_type("string")}, Grammar(blank_lines=True, line_end=line_end, whole=whole))
        case "json":
            elsewhere, ignored = frozenset(source.partitions), frozenset(source.ignored_columns)
            grammar = replace(GRAMMAR, line_end=line_end)
            return JsonParser(kinds, grammar, zone, formatted, may_lack, elsewhere=elsewhere, ignored=ignored)
    quote, escape = options.get("quote", '"'), options.get("escape", '"')
    grammar = Grammar(
        separator=source.separator.encode(),
        quote=quote.encode(),
        # Spark's default escape is a backslash; other writers double the quote.
        escape=(escape if escape != '"' else quote).encode() if quote else b"",
        comment=options.get("comment", "").encode(),
        line_end=line_end,
    )
    null = options.get("nullvalue", "")
    return CsvParser(kinds, grammar, zone, formatted, may_lack, null=null, has_header=source.header)
