"""Reads the CSV, JSON or plain text files of one batch; `text_tasks` has the part that runs in Spark's tasks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from jobs.sources import HIDDEN, ORIGIN, PAYLOAD, REFUSAL
from jobs.sources.column_types import quoted
from jobs.sources.files import content
from jobs.sources.files.formats.time_patterns import TimePattern, check_patterns
from jobs.sources.files.objects import Place
from jobs.sources.files.partitions import undeclared
from jobs.sources.files.read import FileReader
from jobs.task_errors import refusal
from state_store.errors import MalformedRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.sources.files.formats.text_scan import Parser, Scan

# Up to this size, text is read in this process and given to Spark as rows, which is faster than starting a Python worker.
HERE_BYTES = 256 * 1024
# The columns of texts that have a pattern: as it reads them, and as moments in the declared zone.
READ, MOMENT = "_tidegate_read ", "_tidegate_moment "


class TextFileReader(FileReader):
    """Reads text files. An error names a record's file and line; all records are counted before Spark reads any."""

    may_lack = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._scans: dict[Place, Scan] = {}
        self._parser = self._make_parser()

    def _make_parser(self) -> "Parser":
        """Return the parser that turns records into columns."""
        raise NotImplementedError

    def parse_payloads(self, payloads: "DataFrame") -> "DataFrame":
        """Parse quarantined records by today's schema."""
        from jobs.sources.files.formats.text_tasks import PayloadsReader, schema_of  # noqa: PLC0415

        schema = schema_of({**self._parser.types, **self._partitions.types}, flagged=True)
        rows = payloads.select(ORIGIN, PAYLOAD).mapInArrow(PayloadsReader(self._parser, self._partitions), schema)
        return self._formatted(rows)

    @property
    def _encoding(self) -> str:
        return encoding_of(self._options)

    def _count_rows(self, path: Place) -> int:
        return self._scans[path].rows

    def _check_content(self, path: Place) -> None:
        from jobs.sources.files.formats.text_scan import TextFile, scan  # noqa: PLC0415

        name = self._names[path]
        file = TextFile(
            path,
            name,
            self._encoding,
            within=self._folder_of(path),
            values=self._values[path],
            in_folders=undeclared(name, self._schema),
            advice=self._partition_advice(name),
        )
        self._scans[path] = scan(file, self._parser, has_header=self._header, may_lack=self.may_lack)

    def _read(self, paths: list[str], *, flagged: bool) -> "DataFrame":
        del paths
        if not flagged and not self._parser.formatted:
            return self._rows(flagged=False)
        rows = self._formatted(self._rows(flagged=True))
        return rows if flagged else self._refusing(rows)

    def _rows(self, *, flagged: bool) -> "DataFrame":
        from jobs.sources.files.formats.text_scan import in_tasks  # noqa: PLC0415 - declaring a pipeline must not load pyarrow
        from jobs.sources.files.formats.text_tasks import RecordsReader, schema_of  # noqa: PLC0415

        scans = [self._scans[path] for _, path in self._files]
        tasks = in_tasks([piece for each in scans for piece in each.pieces])
        reader = RecordsReader(tasks, self._parser, self._encoding, flagged)
        schema = schema_of({**self._parser.types, **self._partitions.types}, flagged=flagged)
        is_small = any(each.rows for each in scans) and sum(each.bytes for each in scans) <= HERE_BYTES
        return self._rows_of(reader, schema, read_here=is_small)

    def _formatted(self, rows: "DataFrame") -> "DataFrame":
        """Convert, by Spark, columns with a pattern of the author's, such as dateFormat; refuse misfits."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        if not self._parser.formatted:
            return rows
        patterns = {name: self._pattern(name) for name in self._schema if name in self._parser.formatted}
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

    def _pattern(self, name: str) -> TimePattern:
        kind = self._parser.kinds[name]  # type: ignore[union-attr]
        return TimePattern(kind.name, kind.family, named(self._options), zone_of(self._options))

    def _refusing(self, rows: "DataFrame") -> "DataFrame":
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        from jobs.sources.files.formats.tasks import MISFIT, SHOWN_RECORD_CHARACTERS  # noqa: PLC0415

        refused = refusal(
            MalformedRecord,
            MISFIT,
            place=F.concat(F.lit(f"{self._folder}/"), F.col(ORIGIN)),
            why=F.col(REFUSAL),
            record=F.substring(F.col(PAYLOAD), 1, SHOWN_RECORD_CHARACTERS),
        )
        return rows.where(F.when(F.col(REFUSAL).isNull(), F.lit(True)).otherwise(refused.cast("boolean"))).drop(*HIDDEN)


def encoding_of(options: Mapping[str, str]) -> str:
    """Return Python's name of the declared encoding; UTF-8 by default."""
    by_name = named(options)
    return content.codec_of(by_name.get("encoding", by_name.get("charset", content.UTF8)))


def named(options: Mapping[str, str]) -> dict[str, str]:
    """Return options by their names in lower case, as Spark compares them."""
    return {name.lower(): str(value) for name, value in options.items()}


def zone_of(options: Mapping[str, str]) -> str:
    """Return the time zone for timestamps without one."""
    zone = named(options).get("timezone", "UTC")
    return "UTC" if zone in ("Z", "GMT") else zone


def line_end_of(options: Mapping[str, str]) -> bytes | None:
    """Return the declared line end; None for all usual ones."""
    line_end = named(options).get("linesep")
    return None if line_end is None else line_end.encode()


def is_true(options: Mapping[str, str], name: str) -> bool:
    """Return whether an option is switched on."""
    return named(options).get(name, "").lower() == "true"


def check_options(format: str, options: Mapping[str, str], known: tuple[str, ...]) -> None:
    """Refuse unknown options, and values that make no sense.

    Raises: ValueError.
    """
    by_name = named(options)
    if unknown := [name for name in options if name.lower() not in known]:
        raise ValueError(f"cannot take the option {unknown[0]} for {format}: use one of {', '.join(known)}.")
    try:
        encoding_of(options)
    except LookupError as error:
        raise ValueError(f"cannot take the option encoding: {error} is not known. Use a name such as latin-1.") from None
    for name in ("quote", "escape", "comment"):
        if len(by_name.get(name, "")) > 1:
            raise ValueError(f"cannot take the option {name}={by_name[name]!r}: use one character, or none.")
    check_patterns(by_name)
    try:
        ZoneInfo(zone_of(options))
    except (ValueError, OSError, LookupError):
        raise ValueError(
            f"cannot take the option timeZone={by_name['timezone']!r}: use a name such as Europe/Berlin."
        ) from None
