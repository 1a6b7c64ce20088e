"""Reads the files of one batch with Spark, and makes sure that they are what was planned and say what was declared.

Spark's readers guess: they turn what does not fit into NULL, round decimals, and drop what follows a JSON record. Here the
first record that does not fit ends the batch, with its file and line.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from jobs.sources import ORIGIN, PAYLOAD, REFUSAL, Emitter, OneFile, file_content
from state_store.declaration import SourceMetadata
from state_store.errors import MalformedRecord, SourceChanged, SourceUnavailable, SourceUnreadable, TidegateError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from state_store.attempts import Attempt

SHOWN_RECORD_CHARACTERS = 200
CORRUPT = "_tidegate_corrupt_record"
MALFORMED_MARK = "TIDEGATE_MALFORMED_RECORD"
NO_FIT = "the record does not fit the schema"
# Stands for NULL inside Spark's CSV reader, so that "" in quotes stays the empty text.
NO_VALUE = "\x01NULL"
DECIMAL = re.compile(r"(?:decimal|dec|numeric)\b\s*(?:\(\s*\d+\s*(?:,\s*(\d+)\s*)?\))?", re.IGNORECASE)


class FileReader(Emitter):
    """Reads the named files of a folder."""

    has_digests = True

    def __init__(
        self,
        spark: "SparkSession",
        folder: Path,
        *,
        done_folder: Path | None,
        is_opaque: bool,
        format: str,
        schema: Mapping[str, str],
        header: bool,
        separator: str,
        options: Mapping[str, str],
    ) -> None:
        self._spark = spark
        self._folder = folder
        self._done_folder = done_folder
        self._is_opaque = is_opaque
        # What the batch reads, and where each file lies; known once it is read.
        self._files: list[tuple[dict[str, Any], Path]] = []
        # By their footers, if they are Parquet.
        self._rows_told: int | None = None
        self._format = format
        self._schema = schema
        self._header = header
        self._options = options
        self._separator = separator
        # Column and scale; read as text, because Spark rounds what has more digits.
        self._decimals = {name: int(kind[1] or 0) for name, text in schema.items() if (kind := DECIMAL.fullmatch(text.strip()))}

    def row_schema(self) -> str:
        """Return the declared columns; text has the one column value."""
        return self._columns(self._schema) if self._schema else "value string"

    def emit_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows of the files, after checking the files' digests and, for text formats, their encoding."""
        paths = self._checked_paths(attempt, metadata)
        if not paths:
            return self._spark.createDataFrame([], self.row_schema())
        if self._format == "text":
            return self._spark.read.options(**self._options).text(paths)
        if self._format == "parquet":
            return self._read_parquet(paths)
        return self._refusing_csv(paths) if self._format == "csv" else self._refusing_json(paths)

    def emit_records(self, attempt: "Attempt", metadata: SourceMetadata) -> "DataFrame":
        """Return the rows of the files with their file as ORIGIN; records that do not fit the schema are flagged.

        What is wrong with a whole file, such as its header or its encoding, still fails the batch.
        """
        from pyspark.sql import functions as F  # noqa: PLC0415, N812 - declaring a pipeline must not load pyspark

        if not metadata["files"]:
            return super().emit_records(attempt, metadata)
        paths = self._checked_paths(attempt, metadata) if self._format in ("csv", "json") else []
        origin = F.element_at(F.split(F.col("_metadata.file_path"), "/"), -1)
        if self._format == "csv":
            return self._flagged_csv(self._read_csv(paths), origin)
        if self._format == "json":
            return self._flagged_json(self._spark.read.text(paths).where(F.trim(F.col("value")) != ""), origin)
        nothing = F.lit(None).cast("string")
        return self.emit_batch(attempt, metadata).select(
            "*", origin.alias(ORIGIN), nothing.alias(REFUSAL), nothing.alias(PAYLOAD)
        )

    def parse_payloads(self, payloads: "DataFrame") -> "DataFrame":
        """Return quarantined records, parsed by the schema of today."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        if self._format == "json":
            return self._flagged_json(payloads.withColumnRenamed(PAYLOAD, "value"), F.col(ORIGIN))
        parsing = {name: str(value) for name, value in self._csv_options().items()}
        record = F.from_csv(F.col(PAYLOAD), f"{self._columns(self._as_read())}, `{CORRUPT}` string", parsing)
        return self._flagged_csv(payloads.select(ORIGIN, record.alias("record")).select(ORIGIN, "record.*"), F.col(ORIGIN))

    def one_file(self, metadata: SourceMetadata) -> OneFile | None:
        """Return its size on disk, and of Parquet how many rows the footer tells; several files may be shared among tasks."""
        files = metadata["files"]
        return OneFile(files[0]["size"], self._rows_told) if len(files) == 1 else None

    def verify_batch(self, attempt: "Attempt", metadata: SourceMetadata) -> None:  # noqa: ARG002 - as it was read
        """Check the digests again: a file that changed during the read is found before the seal."""
        for file, path in self._files:
            self._check_planned(file, path)

    def explain(self, error: Exception) -> TidegateError | None:
        """Return which file and line a Spark error is about."""
        text = str(error)
        if (start := text.find(MALFORMED_MARK)) >= 0:
            finding, _ = json.JSONDecoder().raw_decode(text, text.index("{", start))
            path, shown = self._path_of(finding["file"]), finding["shown"]
            if "column" in finding:
                position = list(self._schema).index(finding["column"])
                line = file_content.line_of_value(path, self._separator, position, shown)
                shown = f"{finding['column']}={shown}"
            else:
                # A header may look like a bad record.
                skip = 1 if self._format == "csv" and self._header else 0
                line = file_content.line_of_digest(path, finding["digest"], skip=skip)
            place = f"{path}, line {line}" if line else str(path)
            return MalformedRecord(
                f"{place}: {NO_FIT}: {shown!r}. Correct the schema and raise the pipeline's "
                "version; a planned file must stay as it is."
            )
        if "FAILED_READ_FILE" in text or "CANNOT_READ_FILE_FOOTER" in text:
            return SourceUnreadable(text.strip().splitlines()[0])
        return None

    def _checked_paths(self, attempt: "Attempt", metadata: SourceMetadata) -> list[str]:
        """Return where the planned files lie, the planned content in them; after their commit that is the done folder."""
        self._files = []
        for file in metadata["files"]:
            path = self._folder / file["name"]
            if self._done_folder and not path.exists():
                done = self._done_folder / str(attempt.txid) / file["name"]
                path = done if done.exists() else path
            self._check_planned(file, path)
            if self._format != "parquet":
                file_content.check_utf8(path)
            self._files.append((file, path))
        return [_literal_path(path) for _, path in self._files]

    def _read_parquet(self, paths: list[str]) -> "DataFrame":
        rows = self._spark.read.options(**self._options).schema(self._columns(self._schema)).parquet(*paths)
        self._check_footers(rows)
        return rows

    def _csv_options(self) -> dict[str, Any]:
        # Spark's own escape is a backslash; everybody else doubles the quote.
        ours = {"header": self._header, "enforceSchema": True, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
        return {"escape": '"', "nullValue": NO_VALUE, **self._options, **ours}

    def _read_csv(self, paths: list[str]) -> "DataFrame":
        if self._header:
            self._check_headers()
        columns = f"{self._columns(self._as_read())}, `{CORRUPT}` string"
        return self._spark.read.options(**self._csv_options()).schema(columns).csv(paths)

    def _refusing_csv(self, paths: list[str]) -> "DataFrame":
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        rows, corrupt = self._read_csv(paths), F.col(CORRUPT)
        found = _or_refuse(corrupt.isNull(), shown=corrupt, digest=F.sha2(corrupt, 256), values=self._all_values())
        rows = rows.where(found)
        for name in self._decimals:
            rows = rows.where(
                _or_refuse(self._fits(F.col(_quoted(name)), name), shown=F.col(_quoted(name)), column=F.lit(name))
            )
        return rows.select(*self._typed(F.col))

    def _flagged_csv(self, rows: "DataFrame", origin: "Column") -> "DataFrame":
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        corrupt = F.col(CORRUPT).isNotNull()
        refusal = F.when(corrupt & (self._all_values() != 0), F.lit(NO_FIT)).when(corrupt, F.lit(NO_FIT))
        for name in self._decimals:
            reason = F.lit(f"{name} does not fit {self._schema[name]}")
            refusal = refusal.when(~self._fits(F.col(_quoted(name)), name), reason)
        as_read = F.struct(*(F.col(_quoted(name)) for name in self._schema))
        again = F.to_csv(as_read, {"sep": self._separator, "nullValue": "", "emptyValue": '""', "escape": '"'})
        payload = F.when(refusal.isNotNull(), F.coalesce(F.col(CORRUPT), again))
        return rows.select(
            *self._typed(F.col, lossy=True), origin.alias(ORIGIN), refusal.alias(REFUSAL), payload.alias(PAYLOAD)
        )

    def _all_values(self) -> "Column":
        """Return something that needs every column: Spark parses no other, and so would not notice a bad value in one."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        return F.xxhash64(*(F.col(_quoted(name)) for name in self._schema))

    def _parsed_json(self, line: "Column") -> "tuple[Column, Column]":
        """Return a line's record and whether it is whole: Spark's own reader drops, in silence, what follows the first one."""
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        parsing = {**self._options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
        record = F.from_json(line, f"{self._columns(self._as_read())}, `{CORRUPT}` string", parsing)
        records = F.from_json(F.concat(F.lit("["), line, F.lit("]")), "array<string>")
        return record, F.size(records) == 1

    def _whole_json(self, is_one: "Column") -> "Column":
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        whole = is_one & F.col("record").isNotNull() & F.col(f"record.{CORRUPT}").isNull()
        for name in self._decimals:
            whole &= self._fits(F.col(f"record.{_quoted(name)}"), name)
        return whole

    def _refusing_json(self, paths: list[str]) -> "DataFrame":
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        line = F.col("value")
        record, is_one = self._parsed_json(line)
        rows = self._spark.read.text(paths).where(F.trim(line) != "")
        rows = rows.select(line, F.col("_metadata.file_path"), record.alias("record"))
        rows = rows.where(_or_refuse(self._whole_json(is_one), shown=line, digest=F.sha2(line, 256), file=F.col("file_path")))
        return rows.select(*self._typed(lambda name: F.col(f"record.{name}")))

    def _flagged_json(self, lines: "DataFrame", origin: "Column") -> "DataFrame":
        from pyspark.sql import functions as F  # noqa: PLC0415, N812

        record, is_one = self._parsed_json(F.col("value"))
        rows = lines.select("value", origin.alias(ORIGIN), record.alias("record"))
        refusal = F.when(self._whole_json(is_one), F.lit(None)).otherwise(F.lit(NO_FIT))
        return rows.select(
            *self._typed(lambda name: F.col(f"record.{name}"), lossy=True),
            F.col(ORIGIN),
            refusal.alias(REFUSAL),
            F.when(refusal.isNotNull(), F.col("value")).alias(PAYLOAD),
        )

    def _as_read(self) -> dict[str, str]:
        return {name: "string" if name in self._decimals else kind for name, kind in self._schema.items()}

    def _typed(self, column: Any, *, lossy: bool = False) -> Iterator["Column"]:
        """Yield the columns in their declared types; `lossy` where the records that do not fit are known already."""
        for name, kind in self._schema.items():
            found = column(_quoted(name))
            typed = found.try_cast(kind) if lossy else found.cast(kind)
            yield (typed if name in self._decimals else found).alias(name)

    def _fits(self, text: "Column", name: str) -> "Column":
        """Tell whether a text is a decimal of the declared type, without losing a digit."""
        digits = rf"^[+-]?[0-9]*(\.[0-9]{{0,{self._decimals[name]}}}0*)?$"
        return text.isNull() | (text.rlike(digits) & text.try_cast(self._schema[name]).isNotNull())

    def _path_of(self, uri: str) -> Path:
        named = [path for _, path in self._files]
        return next((path for path in named if unquote(uri).endswith(str(path))), named[0])

    def _check_planned(self, file: dict[str, Any], path: Path) -> None:
        try:
            size = path.stat().st_size
            digest = file_content.digest_of(path) if size == file["size"] else None
        except FileNotFoundError:
            raise self._changed(f"{path} is gone since its batch was planned.", "Put it back, unchanged.") from None
        except OSError as error:
            raise SourceUnreadable(f"{path} cannot be read: {error.strerror}.") from error
        if digest != file["sha256"]:
            raise self._changed(
                f"{path} changed since its batch was planned ({file['size']} bytes then, {size} now).",
                "Put the planned content back.",
            )

    def _changed(self, what: str, advice: str) -> TidegateError:
        """Return the error for a file that is not as planned; an opaque batch is cut anew, with the file as it is then."""
        return SourceUnavailable(f"{what} The batch is cut anew.") if self._is_opaque else SourceChanged(f"{what} {advice}")

    def _check_headers(self) -> None:
        expected = list(self._schema)
        for _, path in self._files:
            if (header := file_content.csv_header(path, self._separator)) != expected:
                raise MalformedRecord(
                    f"{path}, line 1: the header is {','.join(header or []) or 'missing'}, "
                    f"the schema says {','.join(expected)}."
                )

    def _check_footers(self, rows: "DataFrame") -> None:
        """Compare each file's own schema with the declared one, because Spark reads a missing column as NULL; count rows."""
        import pyarrow as pa  # noqa: PLC0415 - declaring a pipeline must not load pyarrow
        import pyarrow.parquet as pq  # noqa: PLC0415
        from pyspark.errors import PySparkException  # noqa: PLC0415
        from pyspark.sql.pandas.types import from_arrow_type  # noqa: PLC0415

        expected = {column.name: column.dataType for column in rows.schema}
        self._rows_told = 0
        for _, path in self._files:
            try:
                with pq.ParquetFile(path) as file:
                    found = file.schema_arrow
                    self._rows_told += file.metadata.num_rows
            except (pa.ArrowInvalid, OSError) as error:
                raise SourceUnreadable(f"{path} is not a whole Parquet file: {str(error).splitlines()[0]}") from error
            if set(found.names) != set(expected) or len(found.names) != len(expected):
                missing, added = sorted(set(expected) - set(found.names)), sorted(set(found.names) - set(expected))
                raise MalformedRecord(f"{path}: its columns are not those of the schema: missing {missing}, added {added}.")
            for column in found:
                try:
                    kind = from_arrow_type(column.type, prefer_timestamp_ntz=True)
                except PySparkException:
                    kind = None
                if kind != expected[column.name] or (pa.types.is_timestamp(column.type) and column.type.unit == "ns"):
                    raise MalformedRecord(
                        f"{path}: column {column.name} is {column.type}, "
                        f"the schema says {expected[column.name].simpleString()}."
                    )

    @staticmethod
    def _columns(schema: Mapping[str, str]) -> str:
        return ", ".join(f"{_quoted(name)} {kind}" for name, kind in schema.items())


def _or_refuse(fits: "Column", *, shown: "Column", file: "Column | None" = None, **finding: "Column") -> "Column":
    """Return a condition that is true, or ends the query with what `FileReader.explain` reads."""
    from pyspark.sql import functions as F  # noqa: PLC0415, N812

    told = {"file": F.col("_metadata.file_path") if file is None else file, **finding}
    told["shown"] = F.substring(shown, 1, SHOWN_RECORD_CHARACTERS)
    message = F.concat(F.lit(f"{MALFORMED_MARK} "), F.to_json(F.struct(*(value.alias(name) for name, value in told.items()))))
    return F.when(fits, F.lit(True)).otherwise(F.raise_error(message).cast("boolean"))


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _literal_path(path: Path) -> str:
    """Return a path that Spark takes as it is: it would expand *, ?, [] and {} in names."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", str(path))
