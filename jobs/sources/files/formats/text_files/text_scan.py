"""Scans text files in the driver: checks encoding and header, counts the records, and divides files into ranges for tasks.

Counting here and reading in `text_tasks` split records by the same rules.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from tidegate.jobs.sources.column_types import in_another_case
from tidegate.jobs.sources.files.content import COMPRESSED, UTF8, text_of
from tidegate.jobs.sources.files.formats.file_part_tasks import SHOWN_RECORD_CHARACTERS
from tidegate.jobs.sources.files.formats.records.csv_records import CsvParser
from tidegate.jobs.sources.files.formats.records.json_records import JsonParser, object_of
from tidegate.jobs.sources.files.formats.records.line_records import TextParser
from tidegate.jobs.sources.files.formats.records.text_records import Chunk, Grammar, chunks
from tidegate.jobs.sources.files.partition_columns import IN_THE_FILES
from tidegate.jobs.sources.files.stores.object_places import Place
from tidegate.state_store.base.errors import MalformedRecord

# A task reads about this many bytes, of one file or of several; opening a file costs as much as reading OPEN_BYTES of it.
RANGE_BYTES = 16 * 1024 * 1024
OPEN_BYTES = 64 * 1024

# JSON records are looked at for keys that nobody declared: all of a file of this size, and of each further chunk so many bytes.
LOOKED_AT_FIRST, LOOKED_AT = 256 * 1024, 16 * 1024

Parser = CsvParser | JsonParser | TextParser


@dataclass(frozen=True)
class TextFile:
    """A file to scan.

    `name` is the file's within its source, `within` the folder that it must lie in. `values` are those of its partition
    columns, from the names of its folders. `in_folders` are columns of the schema that folders name too: a JSON file must have
    them, even if it may lack other keys. `advice` is added to the error for a missing column.
    """

    path: Place
    name: str
    encoding: str
    within: Place | None = None
    values: Mapping[str, pa.Array] = field(default_factory=dict)
    in_folders: Collection[str] = ()
    advice: str = ""

    def chunks(self, grammar: Grammar) -> Iterator[Chunk]:
        """Yield the file's records.

        Raises: what `text_of` raises.
        """
        return chunks(text_of(self.path, self.encoding, within=self.within), grammar)


@dataclass(frozen=True)
class FileRange:
    """A range of one file's records: from byte `start`, which is on line `line`, to byte `end`.

    Lines up to `header_line` are the header and blank lines before it; 0 if there is no header.
    """

    path: Place
    name: str
    bytes: int
    start: int = 0
    end: int | None = None
    line: int = 1
    header_line: int = 0
    names: tuple[str, ...] | None = None
    within: Place | None = None
    values: Mapping[str, pa.Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Scan:
    """The result of one pass over a file: its number of records, the bytes of its text, its ranges, and columns that it has.

    These are all columns of a header; of JSON, the keys of the records that were looked at.
    """

    rows: int
    bytes: int
    ranges: list[FileRange]
    columns: frozenset[str]


def scan(file: TextFile, parser: Parser, *, has_header: bool, may_lack: bool) -> Scan:
    """Check a file's encoding and header, and count its records.

    Raises: MalformedRecord if a declared column is not in the header or, in JSON, in no record, unless it `may_lack` keys; the
    errors of `text_of`.
    """
    names, header_line, grammar = _columns(file, parser, has_header)
    lacking = _required_keys(file, parser, may_lack)
    divider = _Divider(file, grammar)
    rows, columns, is_json, has_objects = 0, set(names or ()), isinstance(parser, JsonParser), False
    for chunk in file.chunks(grammar):
        rows += int(np.count_nonzero(chunk.lines > header_line))
        divider.add(chunk)
        if lacking:
            lacking, has_some = _keys_not_in(chunk, lacking)
            has_objects |= has_some
        if is_json and len(chunk):
            columns |= _keys_of_some(chunk, LOOKED_AT if rows > len(chunk) else LOOKED_AT_FIRST)
    if lacking and has_objects:
        raise MalformedRecord(
            f"{file.path}: none of its {rows} record(s) has the key {', '.join(sorted(lacking))} that the schema names"
            f"{in_another_case(lacking, columns)}. "
            f'Correct the schema, or declare missing="null" if the key may be left out everywhere.{file.advice}'
        )
    ranges = [
        FileRange(file.path, file.name, size, start, end, line, header_line, names, file.within, file.values)
        for size, start, end, line in divider.all()
    ]
    return Scan(rows, divider.reached, ranges, frozenset(columns))


def in_tasks(ranges: list[FileRange]) -> list[list[FileRange]]:
    """Divide ranges among tasks of about equal bytes, in order."""
    tasks: list[list[FileRange]] = []
    room = 0
    for each in ranges:
        cost = each.bytes + OPEN_BYTES
        if cost > room or not tasks:
            tasks.append([])
            room = RANGE_BYTES + OPEN_BYTES
        tasks[-1].append(each)
        room -= cost
    return tasks


class _Divider:
    """Divides a file into ranges of about RANGE_BYTES at the ends of records, if its bytes can be read from any place."""

    def __init__(self, file: TextFile, grammar: Grammar) -> None:
        path = file.path
        self._divides = file.encoding == UTF8 and path.suffix not in COMPRESSED and not grammar.whole
        self._mark = 3 if self._divides and _starts_with_mark(path) else 0
        self._done: list[tuple[int, int, int | None, int]] = []
        self._start, self._line = 0, 1
        self.reached = 0

    def add(self, chunk: Chunk) -> None:
        """Add the records of the next chunk, and end the range after them if it is large enough."""
        self.reached = chunk.reached
        end = chunk.reached + self._mark
        if self._divides and end - self._start >= RANGE_BYTES:
            self._done.append((end - self._start, self._start, end, self._line))
            self._start, self._line = end, chunk.next_line

    def all(self) -> list[tuple[int, int, int | None, int]]:
        """Return all ranges: bytes, start, end (None: that of the file) and first line."""
        return [*self._done, (self.reached - self._start, self._start, None, self._line)]


def _starts_with_mark(path: Place) -> bool:
    with path.open("rb") as content:
        return content.read(3) == b"\xef\xbb\xbf"


def _columns(file: TextFile, parser: Parser, has_header: bool) -> tuple[tuple[str, ...] | None, int, Grammar]:
    """Return the columns of a CSV file, the line of its header (0 without one), and the grammar of its records."""
    if not isinstance(parser, CsvParser):
        return None, 0, parser.grammar
    names, line = _header(file, parser) if has_header else (tuple(parser.kinds), 0)
    if twice := [name for name in file.values if name in names]:
        raise MalformedRecord(f"{file.path}: its header has {twice[0]}, and so has the name of a folder. {IN_THE_FILES}")
    return names, line, parser.grammar_of(names or ["one"])


def _header(file: TextFile, parser: CsvParser) -> tuple[tuple[str, ...], int]:
    """Return a CSV file's columns, none if it has no text at all, and the line of its header.

    Raises: MalformedRecord if a declared column is missing, or present twice.
    """
    first = next(file.chunks(parser.grammar), None)
    if first is None or not len(first):
        return (), 0
    names = None if first.bad.get(0) else parser.header(first.record(0))
    where = f"{file.path}, line {int(first.lines[0])}: the header is {first.record(0).decode()[:SHOWN_RECORD_CHARACTERS]}, "
    if names is None:
        raise MalformedRecord(f"{where}which is no CSV record: {first.bad.get(0, 'its quotes do not match')}.")
    declared = list(parser.kinds)
    _check_missing(file, parser, names, where)
    if twice := [name for name in declared if names.count(name) > 1]:
        raise MalformedRecord(f"{where}in which {twice[0]} comes twice. Rename one of them.")
    return tuple(names), int(first.lines[0])


def _check_missing(file: TextFile, parser: CsvParser, names: list[str], where: str) -> None:
    """Refuse a header that lacks a declared column, unless it may; one in another case is not lacking.

    Raises: MalformedRecord.
    """
    missing = [name for name in parser.kinds if name not in names]
    case = in_another_case(missing, names)
    is_refused = not parser.may_lack or case or len(missing) == len(parser.kinds)
    if missing and (is_refused or not set(file.in_folders).isdisjoint(missing)):
        is_older = len(missing) < len(parser.kinds) and not case
        advice = "If the file is older than that, missing='null' makes it NULL. Else correct" if is_older else "Correct"
        raise MalformedRecord(
            f"{where}the schema says {','.join(parser.kinds)}: {', '.join(missing)} is missing{case}. {advice} the schema, the "
            f"separator (options={{'sep': ...}}), or say header=False if the file has none.{file.advice}"
        )


def _required_keys(file: TextFile, parser: Parser, may_lack: bool) -> set[str]:
    """Return the keys that have to appear in at least one record of a JSON file."""
    if not isinstance(parser, JsonParser):
        return set()
    return set(file.in_folders) if may_lack else set(parser.kinds)


def _keys_of_some(chunk: Chunk, most_bytes: int) -> set[str]:
    """Return the keys of records that are evenly spread over a chunk, and have about so many bytes."""
    share = most_bytes / int(chunk.ends[-1] - chunk.starts[0] + 1)
    keys: set[str] = set()
    for number in np.linspace(0, len(chunk) - 1, max(1, int(min(1, share) * len(chunk))), dtype=int).tolist():
        with suppress(ValueError):  # a bad record is reported where it is read
            keys |= object_of(chunk.record(number).decode()).keys()
    return keys


def _keys_not_in(chunk: Chunk, lacking: set[str]) -> tuple[set[str], bool]:
    """Return the keys that no record of the chunk has, and whether a record is an object at all; a bad one has no keys."""
    has_objects = False
    for number in range(len(chunk)):
        with suppress(ValueError):
            lacking = lacking - object_of(chunk.record(number).decode()).keys()
            has_objects = True
        if not lacking:
            break
    return lacking, has_objects
