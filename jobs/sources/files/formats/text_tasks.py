"""Scans text files in the driver, and reads them in Spark's tasks, or in the driver if they are small.

Spark's own readers are not used. They list the files once more, drop lines that look blank to them, and misread quotes and
numbers. Here counting and reading split records by the same rules, and each record knows its line.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T  # noqa: N812 - the name that PySpark's users know
from pyspark.sql.pandas.types import from_arrow_type

from jobs.sources import ORIGIN, PAYLOAD, REFUSAL
from jobs.sources.files.content import COMPRESSED, UTF8, text_of
from jobs.sources.files.formats.csv_records import EMPTY_LINE, CsvParser
from jobs.sources.files.formats.json_records import JsonParser, has_key, object_of
from jobs.sources.files.formats.text_records import Chunk, Grammar, chunk_of, chunks
from jobs.sources.files.partitions import IN_THE_FILES, Partitions
from state_store.errors import MalformedRecord, storable

SHOWN_RECORD_CHARACTERS = 200
MALFORMED_MARK = "TIDEGATE_MALFORMED_RECORD"
# A task reads about this many bytes, of one file or of several; opening a file costs as much as reading OPEN_BYTES of it.
PIECE_BYTES = 16 * 1024 * 1024
OPEN_BYTES = 64 * 1024
# The key of a wrapped record, which Postgres' text cannot hold, or which is meaningless without its file's header.
WRAPPED = "_tidegate_record"
# Only the beginning of a longer bad record is kept: Postgres takes 64 MB of text, and a wrapped byte may need six.
KEPT_BYTES, KEPT_BEGINNING = 8 * 1024 * 1024, 64 * 1024


@dataclass(frozen=True)
class TextParser:
    """Turns lines of text into the one column ``value``."""

    grammar: Grammar
    formatted: frozenset[str] = frozenset()

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The Arrow types of the columns that `parse` returns."""
        return {"value": pa.string()}

    def parse(self, chunk: Chunk, names: object = None) -> tuple[dict[str, pa.Array], dict[int, str]]:
        """Return the lines."""
        del names
        lines = [chunk.data[start:end] for start, end in zip(chunk.starts.tolist(), chunk.ends.tolist(), strict=True)]
        return {"value": pa.array(lines, pa.binary()).cast(pa.string())}, dict(chunk.bad)


Parser = CsvParser | JsonParser | TextParser


@dataclass(frozen=True)
class Piece:
    """A range of one file's records: from byte `start`, which is on line `line`, to byte `end`.

    Lines up to `header_line` are the header and blank lines before it; 0 if there is no header.
    """

    path: Path
    name: str
    bytes: int
    start: int = 0
    end: int | None = None
    line: int = 1
    header_line: int = 0
    names: tuple[str, ...] | None = None
    within: Path | None = None
    values: Mapping[str, pa.Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Scan:
    """The result of one pass over a file: its number of records, the bytes of its text, and its pieces."""

    rows: int
    bytes: int
    pieces: list[Piece]


def scan(
    path: Path,
    name: str,
    parser: Parser,
    encoding: str,
    *,
    has_header: bool,
    may_lack: bool,
    within: Path | None = None,
    values: Mapping[str, pa.Array] | None = None,
    must_have: Collection[str] = (),
    advice: str = "",
) -> Scan:
    """Check a file's encoding and header, and count its records.

    `values` are the partition values from the names of its folders. `must_have` are columns of the schema
    that these names have too, so that no file lacks them by intent; `advice` is added to the error for a missing column.

    Raises: MalformedRecord if a declared column is not in the header, or in no record of JSON unless it `may_lack`; what
    `text_of` raises.
    """
    names: tuple[str, ...] | None = None
    header_line = 0
    grammar = parser.grammar
    if isinstance(parser, CsvParser):
        names, header_line = _header(path, parser, encoding, advice) if has_header else (tuple(parser.kinds), 0)
        if twice := [name for name in values or () if name in names]:
            raise MalformedRecord(f"{path}: its header has {twice[0]}, and so has the name of a folder. {IN_THE_FILES}")
        grammar = parser.grammar_of(names or ["one"])
    lacking = set() if not isinstance(parser, JsonParser) else set(must_have) if may_lack else set(parser.kinds)
    can_be_cut = encoding == UTF8 and path.suffix not in COMPRESSED and not grammar.whole
    mark = 3 if can_be_cut and path.stat().st_size >= 3 and _starts_with_mark(path) else 0
    rows = reached = 0
    start, line = 0, 1
    cuts: list[tuple[int, int | None, int]] = []
    for chunk in chunks(text_of(path, encoding, within=within), grammar):
        rows += int(np.count_nonzero(chunk.lines > header_line))
        reached = chunk.reached
        if lacking and len(chunk):
            lacking = _still_lacking(chunk, lacking)
        if can_be_cut and reached + mark - start >= PIECE_BYTES:
            cuts.append((start, reached + mark, line))
            start, line = reached + mark, chunk.next_line
    if lacking and rows and (lacking := _lacking_however_written(path, parser, encoding, lacking)):
        raise MalformedRecord(
            f"{path}: none of its {rows} record(s) has the key {', '.join(sorted(lacking))} that the schema names. Correct the "
            f'schema, or declare missing="null" if the key may be left out everywhere.{advice}'
        )
    cuts.append((start, None, line))
    pieces = [
        Piece(path, name, (end or reached) - start, start, end, line, header_line, names, within, values or {})
        for start, end, line in cuts
    ]
    return Scan(rows, reached, pieces)


def _starts_with_mark(path: Path) -> bool:
    with path.open("rb") as content:
        return content.read(3) == b"\xef\xbb\xbf"


def _header(path: Path, parser: CsvParser, encoding: str, advice: str = "") -> tuple[tuple[str, ...], int]:
    """Return a CSV file's columns, none if it has no text at all, and the line of its header.

    Raises: MalformedRecord if a declared column is missing, or present twice.
    """
    first = next(chunks(text_of(path, encoding), parser.grammar), None)
    if first is None or not len(first):
        return (), 0
    found = None if first.bad.get(0) else parser.header(first.record(0))
    where = f"{path}, line {int(first.lines[0])}: the header is {first.record(0).decode()[:SHOWN_RECORD_CHARACTERS]}, "
    if found is None:
        raise MalformedRecord(f"{where}which is no CSV record: {first.bad.get(0, 'its quotes do not match')}.")
    declared = list(parser.kinds)
    if missing := [name for name in declared if name not in found]:
        raise MalformedRecord(
            f"{where}the schema says {','.join(declared)}: {', '.join(missing)} is missing. Correct the schema, the separator "
            f"(options={{'sep': ...}}), or say header=False if the file has none.{advice}"
        )
    if twice := [name for name in declared if found.count(name) > 1]:
        raise MalformedRecord(f"{where}in which {twice[0]} comes twice. Rename one of them.")
    return tuple(found), int(first.lines[0])


def _still_lacking(chunk: Chunk, lacking: set[str]) -> set[str]:
    """Return the keys that no record of the chunk has; only records that seem to have one are parsed."""
    left = lacking - has_key(chunk.record(0).decode(), lacking)
    for name in list(left):
        written = re.compile(re.escape(json.dumps(name, ensure_ascii=False).encode()) + rb"\s*:")
        for match in written.finditer(chunk.data):
            number = int(np.searchsorted(chunk.starts, match.start(), "right")) - 1
            if number >= 0 and name in has_key(chunk.record(number).decode(), {name}):
                left.discard(name)
                break
    return left


def _lacking_however_written(path: Path, parser: Parser, encoding: str, lacking: set[str]) -> set[str]:
    """Return the keys that no record has, even written with escapes; none if no line is an object."""
    left, has_objects = set(lacking), False
    for chunk in chunks(text_of(path, encoding), parser.grammar):
        for number in range(len(chunk)):
            record = chunk.record(number)
            if has_objects and b"\\u" not in record:
                continue
            try:
                left -= object_of(record.decode()).keys()
                has_objects = True
            except ValueError:
                continue
    return left if has_objects else set()


def schema_of(types: dict[str, pa.DataType], *, flagged: bool) -> T.StructType:
    """Return the columns as a Spark schema, with those of `Emitter.emit_records` if rows are flagged."""
    fields = [T.StructField(name, from_arrow_type(kind, prefer_timestamp_ntz=True)) for name, kind in types.items()]
    return T.StructType([*fields, *(T.StructField(name, T.StringType()) for name in HIDDEN if flagged)])


HIDDEN = (ORIGIN, REFUSAL, PAYLOAD)


@dataclass(frozen=True)
class RecordsReader:
    """Reads pieces of files as Arrow batches; refuses the first record that does not fit, or flags all such records.

    Spark's tasks call it with their numbers, through `DataFrame.mapInArrow`. It is a class because it is pickled by name.
    """

    tasks: list[list[Piece]]
    parser: Parser
    encoding: str
    flagged: bool

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the pieces of some tasks.

        Raises: ValueError with a message that `explained` parses.
        """
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                for piece in self.tasks[number]:
                    yield from self.read(piece)

    def read(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Read one piece."""
        grammar = self.parser.grammar
        if isinstance(self.parser, CsvParser):
            grammar = self.parser.grammar_of(piece.names or ["one"])
        for chunk in chunks(
            text_of(piece.path, self.encoding, piece.start, piece.end, within=piece.within), grammar, piece.line
        ):
            if len(found := chunk.only(chunk.lines > piece.header_line)):
                yield self._batch(piece, found)

    def _batch(self, piece: Piece, chunk: Chunk) -> pa.RecordBatch:
        columns, bad = self.parser.parse(chunk, piece.names)
        columns |= {name: pa.repeat(value[0], len(chunk)) for name, value in piece.values.items()}
        if not self.flagged:
            if bad:
                first = min(bad)
                line, shown = int(chunk.lines[first]), chunk.record(first)[: 4 * SHOWN_RECORD_CHARACTERS]
                raise malformed(piece.path, line, bad[first], shown.decode(errors="ignore"))
            return pa.RecordBatch.from_pydict(columns)
        origins = [f"{piece.name}, line {line}" for line in chunk.lines.tolist()]
        names = piece.names if piece.names and list(piece.names) != list(self.parser.types) else None

        def payload(number: int) -> str:
            return payload_of(chunk.record(number), names)

        return flagged_batch(columns, bad, origins, payload, self.parser)


@dataclass(frozen=True)
class PayloadsReader:
    """Reads raw records from quarantine (ORIGIN and PAYLOAD) as `RecordsReader` read them."""

    parser: Parser
    partitions: Partitions

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Parse records one at a time, because their files' columns may differ."""
        for batch in batches:
            for origin, payload in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
                try:
                    columns, bad = self._parse(*record_of(payload))
                    columns |= self.partitions.values_of(origin.rpartition(", line ")[0])
                except ValueError as error:
                    bad = {0: str(error)}
                    columns = self._nothing | {name: pa.nulls(1, kind) for name, kind in self.partitions.types.items()}
                except MalformedRecord as too_long:
                    bad = {0: str(too_long)}
                    columns = self._nothing | self.partitions.values_of(origin.rpartition(", line ")[0])
                yield flagged_batch(columns, bad, [origin], [payload].__getitem__, self.parser)

    @property
    def _nothing(self) -> dict[str, pa.Array]:
        return {name: pa.nulls(1, kind) for name, kind in self.parser.types.items()}

    def _parse(self, record: bytes, names: list[str] | None) -> tuple[dict[str, pa.Array], dict[int, str]]:
        parser = self.parser
        if names is not None and (missing := [name for name in parser.types if name not in names]):
            return self._nothing, {0: f"its file has no column {missing[0]}"}
        if isinstance(parser, CsvParser) and not record:
            return self._nothing, {0: EMPTY_LINE}  # there is no text left to split
        if isinstance(parser, CsvParser):
            cut = list(chunks([record], parser.grammar_of(names or list(parser.kinds))))
            if [len(chunk) for chunk in cut] != [1]:
                return self._nothing, {0: "its quotes do not make one record"}
            if cut[0].bad:
                return self._nothing, {0: cut[0].bad[0]}
        return parser.parse(chunk_of([record]), names)


def flagged_batch(
    columns: dict[str, pa.Array], bad: dict[int, str], origins: list[str], payload: Callable[[int], str], parser: Parser
) -> pa.RecordBatch:
    """Return columns with ORIGIN, REFUSAL and PAYLOAD; the values of a bad record are NULL."""
    count = len(origins)
    refusals: list[str | None] = [None] * count
    payloads: list[str | None] = [payload(number) for number in range(count)] if parser.formatted else [None] * count
    is_good = np.ones(count, np.bool_)
    for number, why in bad.items():
        refusals[number], payloads[number], is_good[number] = storable(why), payload(number), False
    if bad:
        places = pa.array(np.where(is_good, np.arange(count), 0), mask=~is_good)
        columns = {name: column.take(places) for name, column in columns.items()}
    hidden = [pa.array(values, pa.string()) for values in (origins, refusals, payloads)]
    return pa.RecordBatch.from_pydict({**columns, **dict(zip(HIDDEN, hidden, strict=True))})


def payload_of(record: bytes, names: Iterable[str] | None) -> str:
    """Return a record as quarantine keeps it: raw, or wrapped if it needs its columns, has a NUL, or is too long."""
    if len(record) > KEPT_BYTES:
        beginning = record[:KEPT_BEGINNING].decode(errors="ignore")
        summary = {"bytes": len(record), "sha256": hashlib.sha256(record).hexdigest(), "beginning": beginning}
        return json.dumps({WRAPPED: None, "columns": None, **summary})
    text = record.decode()
    if names is None and "\0" not in text and not text.startswith(f'{{"{WRAPPED}"'):
        return text
    return json.dumps({WRAPPED: text, "columns": None if names is None else list(names)})


def record_of(payload: str) -> tuple[bytes, list[str] | None]:
    """Return the record in a payload, and its file's columns if they are not the declared ones.

    Raises: MalformedRecord if it was too long to be kept.
    """
    if not payload.startswith(f'{{"{WRAPPED}"'):
        return payload.encode(), None
    found = json.loads(payload)
    if found[WRAPPED] is None:
        raise MalformedRecord(f"it was too long to be kept: only the beginning of its {found['bytes']} bytes is here")
    return found[WRAPPED].encode(), found["columns"]


def malformed(path: Path, line: int, why: str, record: str) -> ValueError:
    """Return the error with which a task reports a bad record."""
    report = {"path": str(path), "line": line, "why": why, "record": record[:SHOWN_RECORD_CHARACTERS]}
    return ValueError(f"{MALFORMED_MARK} {json.dumps(report)}")


def explained(text: str) -> MalformedRecord | None:
    """Return a task's error about a bad record, None if it is another error."""
    start = text.find(f"{MALFORMED_MARK} {{")
    if start < 0:
        return None
    found, _ = json.JSONDecoder().raw_decode(text, text.index("{", start))
    place = found["origin"] if "origin" in found else f"{found['path']}, line {found['line']}"
    return MalformedRecord(
        f"{place}: the record does not fit the schema: {found['why']}. It is {found['record']!r}. Correct the schema and raise "
        "the pipeline's version; a planned file must stay as it is."
    )


def in_tasks(pieces: list[Piece]) -> list[list[Piece]]:
    """Divide pieces among tasks of about equal bytes, in order."""
    tasks: list[list[Piece]] = []
    left = 0
    for piece in pieces:
        cost = piece.bytes + OPEN_BYTES
        if cost > left or not tasks:
            tasks.append([])
            left = PIECE_BYTES + OPEN_BYTES
        tasks[-1].append(piece)
        left -= cost
    return tasks
