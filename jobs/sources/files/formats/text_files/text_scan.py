"""Scans text files in the driver: checks encoding and header, counts the records, and divides files into ranges for tasks.

Counting here and reading in `text_tasks` split records by the same rules.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from tidegate.jobs.sources.column_types import in_another_case
from tidegate.jobs.sources.files.content import BYTE_ORDER_MARK, COMPRESSED, UTF8, open_file, text_of
from tidegate.jobs.sources.files.formats.file_part_tasks import SHOWN_RECORD_CHARACTERS
from tidegate.jobs.sources.files.formats.records.csv_records import CsvParser
from tidegate.jobs.sources.files.formats.records.json_records import JsonParser, object_of
from tidegate.jobs.sources.files.formats.records.record_parser import RecordParser
from tidegate.jobs.sources.files.formats.records.text_records import Chunk, chunks
from tidegate.jobs.sources.files.partition_columns import IN_THE_FILES, advice_on
from tidegate.jobs.sources.files.read import BatchFile
from tidegate.state_store.base.errors import MalformedRecord

# A task reads about this many bytes, of one file or of several; opening a file costs as much as reading OPEN_BYTES of it.
RANGE_BYTES = 16 * 1024 * 1024
OPEN_BYTES = 64 * 1024

# JSON records are looked at for keys that nobody declared: all of a file of this size, and of each further chunk so many bytes.
LOOKED_AT_FIRST, LOOKED_AT = 256 * 1024, 16 * 1024


@dataclass(frozen=True)
class FileRange:
    """A range of one file's records: from byte `start`, which is on line `line`, to byte `end`, None for the file's own.

    Lines up to `header_line` are the header and blank lines before it; 0 if there is no header. `names` are the columns of
    a CSV file, None if they are the declared ones.
    """

    file: BatchFile
    bytes: int
    start: int = 0
    end: int | None = None
    line: int = 1
    header_line: int = 0
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Scan:
    """The result of one pass over a file: its number of records, the bytes of its text, its ranges, and columns that it has.

    These are all columns of a header; of JSON, the keys of the records that were looked at.
    """

    rows: int
    bytes: int
    ranges: list[FileRange]
    columns: frozenset[str]


def scan(file: BatchFile, parser: RecordParser, encoding: str, in_folders: Mapping[str, str]) -> Scan:
    """Check a file's encoding and header, and count its records.

    `in_folders` are columns of the schema that folders name too: the file must have them, even if it may lack others.

    Raises: MalformedRecord if a declared column is not in the header or, in JSON, in no record, unless it may be lacking; the
    errors of `text_of`.
    """
    names, header_line = _columns(file, parser, encoding, in_folders) if isinstance(parser, CsvParser) else (None, 0)
    grammar, rows = parser.grammar_of(names), 0
    divides = encoding == UTF8 and not COMPRESSED.search(file.path.name) and not grammar.whole
    ranges = _Ranges(FileRange(file, 0, header_line=header_line, names=names), divides=divides)
    keys = _Keys(parser, in_folders)
    for chunk in chunks(text_of(file.path, encoding, within=file.within, line_end=grammar.line_end), grammar):
        rows += int(np.count_nonzero(chunk.lines > header_line))
        ranges.add(chunk)
        if isinstance(parser, JsonParser) and len(chunk):
            keys.look_into(chunk)
    if keys.lacking and keys.has_objects:
        raise MalformedRecord(
            f"{file.path}: none of its {rows} record(s) has the key {', '.join(sorted(keys.lacking))} that the schema names"
            f"{in_another_case(keys.lacking, keys.found)}. Correct the schema, or declare "
            f'missing="null" if the key may be left out everywhere.{advice_on(in_folders)}'
        )
    return Scan(rows, ranges.reached, ranges.all(), frozenset(names or keys.found))


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


class _Ranges:
    """Divides a file into ranges of about RANGE_BYTES at the ends of records, if its bytes can be read from any place."""

    def __init__(self, rest: FileRange, *, divides: bool) -> None:
        self._done: list[FileRange] = []
        self._rest = rest  # the range that is not at its end yet
        self._divides = divides
        self._mark = 0
        if divides:
            with open_file(rest.file.path, rest.file.within) as content:
                self._mark = len(BYTE_ORDER_MARK) if content.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0
        self.reached = 0

    def add(self, chunk: Chunk) -> None:
        """Add the records of the next chunk, and end the range after them if it is large enough."""
        self.reached, end = chunk.reached, chunk.reached + self._mark
        if self._divides and (size := end - self._rest.start) >= RANGE_BYTES:
            self._done.append(replace(self._rest, bytes=size, end=end))
            self._rest = replace(self._rest, start=end, line=chunk.next_line)

    def all(self) -> list[FileRange]:
        """Return all ranges, once the file has been read."""
        return [*self._done, replace(self._rest, bytes=self.reached - self._rest.start)]


class _Keys:
    """Which keys records of JSON have: those that were `found`, and those that have to be in one of them and are `lacking`."""

    def __init__(self, parser: RecordParser, in_folders: Mapping[str, str]) -> None:
        self.lacking = set(in_folders if parser.may_lack else parser.kinds)
        self.found: set[str] = set()
        self.has_objects = False
        self._share = LOOKED_AT_FIRST

    def look_into(self, chunk: Chunk) -> None:
        """Look for lacking keys, and at records that are evenly spread over the chunk; a bad record is reported elsewhere."""
        for number in range(len(chunk) if self.lacking else 0):
            with suppress(ValueError):
                self.lacking = self.lacking - object_of(chunk.record(number).decode()).keys()
                self.has_objects = True
            if not self.lacking:
                break
        share = min(1, self._share / int(chunk.ends[-1] - chunk.starts[0] + 1))
        self._share = LOOKED_AT
        for number in np.linspace(0, len(chunk) - 1, max(1, int(share * len(chunk))), dtype=int).tolist():
            with suppress(ValueError):
                self.found |= object_of(chunk.record(number).decode()).keys()


def _columns(file: BatchFile, parser: CsvParser, encoding: str, in_folders: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """Return the columns of a CSV file, none if it should have a header and has no text at all; and the line of its header.

    Raises: MalformedRecord if a declared column is missing or present twice, or folders name one that is there.
    """
    names, line = tuple(parser.kinds), 0
    if parser.has_header:
        text = text_of(file.path, encoding, within=file.within, line_end=parser.grammar.line_end)
        first = next(chunks(text, parser.grammar), None)
        if first is None or not len(first):
            return (), 0
        line, record = int(first.lines[0]), first.record(0)
        found = None if first.bad.get(0) else parser.header(record)
        where = f"{file.path}, line {line}: the header is {record.decode()[:SHOWN_RECORD_CHARACTERS]}, "
        if found is None:
            raise MalformedRecord(f"{where}which is no CSV record: {first.bad.get(0, 'its quotes do not match')}.")
        _check_missing(parser, found, where, in_folders)
        if twice := [name for name in parser.kinds if found.count(name) > 1]:
            raise MalformedRecord(f"{where}in which {twice[0]} comes twice. Rename one of them.")
        names = tuple(found)
    if twice := [name for name in file.values if name in names]:
        raise MalformedRecord(f"{file.path}: its header has {twice[0]}, and so has the name of a folder. {IN_THE_FILES}")
    return names, line


def _check_missing(parser: CsvParser, names: list[str], where: str, in_folders: Mapping[str, str]) -> None:
    """Refuse a header that lacks a declared column, unless it may; one in another case is not lacking."""
    missing = [name for name in parser.kinds if name not in names]
    case = in_another_case(missing, names)
    is_refused = not parser.may_lack or case or len(missing) == len(parser.kinds)
    if missing and (is_refused or not in_folders.keys().isdisjoint(missing)):
        is_older = len(missing) < len(parser.kinds) and not case
        advice = "If the file is older than that, missing='null' makes it NULL. Else correct" if is_older else "Correct"
        raise MalformedRecord(
            f"{where}the schema says {','.join(parser.kinds)}: {', '.join(missing)} is missing{case}. {advice} the schema, the "
            f"separator (options={{'sep': ...}}), or say header=False if the file has none.{advice_on(in_folders)}"
        )
