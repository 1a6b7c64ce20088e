"""Lines of JSON as columns. Numbers keep their digits: a decimal or a text never passes through a double."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from jobs.sources.files import typed_values
from jobs.sources.files.column_types import Kind, kind_of
from jobs.sources.files.formats.text_records import Chunk, Grammar
from jobs.sources.files.typed_values import Constant, Number

GRAMMAR = Grammar(blanks=b" \t")
PRETTY = (
    "one record a line is read, but this looks like JSON over several lines, or like a list. "
    "Write one object a line, such as by: jq -c '.[]' (or: jq -c .)"
)
_BLANKS = " \t\r\n"
_BETWEEN = re.compile(r'("(?:[^"\\]|\\.)*+")|[ \t\r\n]+')
_NUMBERS = {"parse_float": Number, "parse_constant": Constant}
_scan = json.JSONDecoder(**_NUMBERS).scan_once  # type: ignore[arg-type,attr-defined]
_scan_exact = json.JSONDecoder(**_NUMBERS, parse_int=Number).scan_once  # type: ignore[arg-type,attr-defined]


@dataclass(frozen=True)
class JsonParser:
    """Turns lines of JSON into columns: one object a line. A key that a record lacks is NULL, one not declared is left out.

    `formatted` are columns whose texts Spark is to read, by the author's pattern. No record may have what stands
    `elsewhere`, in the names of folders.
    """

    kinds: dict[str, Kind]
    grammar: Grammar = GRAMMAR
    zone: str = "UTC"
    formatted: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()

    @cached_property
    def types(self) -> dict[str, pa.DataType]:
        """Return the columns of `parse`."""
        return {name: pa.string() if name in self.formatted else kind.arrow for name, kind in self.kinds.items()}

    def parse(self, chunk: Chunk, names: object = None) -> tuple[dict[str, pa.Array], dict[int, str]]:
        """Return the columns of some records, and why some of these, by their numbers, do not fit; they are NULL there."""
        del names
        bad = dict(chunk.bad)
        records = []
        reached = int(chunk.ends[-1]) if len(chunk) else 0  # behind it may stand a part of a character
        text = chunk.data[:reached].decode()
        is_ascii = len(text) == reached
        for number, (start, end) in enumerate(zip(chunk.starts.tolist(), chunk.ends.tolist(), strict=True)):
            record = None
            if is_ascii and text[start] == "{":
                try:
                    record, reached = _scan(text, start)
                except (ValueError, StopIteration, RecursionError):
                    reached = -1
                if reached != end:
                    record = None
            if record is None:
                try:
                    record = object_of(chunk.data[start:end].decode())
                except ValueError as error:
                    bad[number], record = str(error), {}
            if self.elsewhere and not self.elsewhere.isdisjoint(record):
                twice = min(self.elsewhere & record.keys())
                bad.setdefault(number, f"it has the key {twice}, and so has the name of a folder, by the source's partitions")
            records.append(record)
        columns = {}
        for name, kind in self.kinds.items():
            values = [record.get(name) for record in records]
            if kind.family == "text":
                self._make_texts(chunk, name, values)
            columns[name], refused = typed_values.from_json(_TEXT if name in self.formatted else kind, values, self.zone)
            for number, why in refused.items():
                bad.setdefault(number, f"column {name}: {why}")
        return columns, bad

    def _make_texts(self, chunk: Chunk, name: str, values: list[Any]) -> None:
        """Replace what is no text by the text that stands there."""
        types = set(map(type, values))
        if not types & {bool, int, dict, list, Constant}:
            return
        for number, value in enumerate(values):
            if type(value) is bool:
                values[number] = "true" if value else "false"
            elif type(value) is int and value:
                values[number] = str(value)
            elif type(value) in (int, dict, list, Constant):  # 0 may be written -0
                values[number] = text_of_value(chunk.record(number).decode(), name)


def object_of(line: str) -> dict[str, Any]:
    """Return the object that a line is.

    Raises: ValueError with what is wrong with it.
    """
    text = line.strip(_BLANKS)
    try:
        found, end = _scan(text, 0)
    except (StopIteration, json.JSONDecodeError) as error:
        if text[:1] in ("]", "}") or (text[:1] in ('"', "{", "[") and text.endswith((",", "[", "{"))):
            raise ValueError(PRETTY) from None
        why = f": {error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"it is no JSON{why}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise ValueError("it has a number of thousands of digits") from None
    if end != len(text):
        behind = text[end : end + 20].strip()
        if isinstance(found, str) and behind.startswith(":"):
            raise ValueError(PRETTY)
        raise ValueError(f"something follows the record: {behind!r}")
    if isinstance(found, list):
        raise ValueError(PRETTY)  # noqa: TRY004 - it is the record that is wrong
    if not isinstance(found, dict):
        raise ValueError("it is no object")  # noqa: TRY004
    return found


def text_of_value(line: str, name: str) -> str | None:
    """Return how a value of a record is written, without blanks between its parts."""
    place = line.index("{") + 1
    found = None
    while True:
        place = _behind_blanks(line, place)
        if line[place] == "}":
            return found
        if line[place] == ",":
            place = _behind_blanks(line, place + 1)
        key, place = _scan(line, place)
        start = _behind_blanks(line, _behind_blanks(line, place) + 1)
        _, place = _scan_exact(line, start)
        if key == name:
            found = _BETWEEN.sub(lambda match: match[1] or "", line[start:place])


def has_key(line: str, names: set[str]) -> set[str]:
    """Return which of these names the record on a line has."""
    try:
        return names & object_of(line).keys()
    except ValueError:
        return set()


def _behind_blanks(line: str, place: int) -> int:
    while line[place] in _BLANKS:
        place += 1
    return place


_TEXT = kind_of("string")
