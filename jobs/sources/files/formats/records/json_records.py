"""Parses JSON lines to columns. Numbers keep their digits: a decimal or text never passes through a double."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidegate.jobs.sources.column_types import in_another_case, parse_type
from tidegate.jobs.sources.files.formats.records import typed_values
from tidegate.jobs.sources.files.formats.records.record_parser import RecordParser
from tidegate.jobs.sources.files.formats.records.text_records import Chunk, Grammar
from tidegate.jobs.sources.files.formats.records.typed_values import Constant, Number, Whole

GRAMMAR = Grammar(blanks=b" \t")
PRETTY = (
    "one record a line is read, but this looks like JSON over several lines, or like a list. "
    "Write one object a line, such as by: jq -c '.[]' (or: jq -c .)"
)
_BLANKS = " \t\r\n"
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
_BETWEEN = re.compile(r'("(?:[^"\\]|\\.)*+")|[ \t\r\n]+')
_NUMBERS = {"parse_float": Number, "parse_constant": Constant}
_scan = json.JSONDecoder(**_NUMBERS).scan_once  # type: ignore[arg-type,attr-defined]
_scan_exact = json.JSONDecoder(**_NUMBERS, parse_int=Whole).scan_once  # type: ignore[arg-type,attr-defined]
_MINUS_ZERO = re.compile(rb"-0(?!\d)")


@dataclass(frozen=True)
class JsonParser(RecordParser):
    """Turns lines of JSON into columns, one object a line. A missing key is NULL, an undeclared key is ignored.

    A record is refused that has a key in another case instead, unless it is `ignored`, as a column that the author names.
    `elsewhere` are columns in the names of folders, which no record may have. Records that are `by_spark`, which wrote a row,
    have texts for NaN and the infinities.
    """

    grammar: Grammar = GRAMMAR
    elsewhere: frozenset[str] = frozenset()
    by_spark: bool = False
    ignored: frozenset[str] = frozenset()

    def parse(self, chunk: Chunk, names: Sequence[str] | None = None) -> tuple[dict[str, pa.Array], dict[int, str]]:
        """Return the columns of some records, and the errors by record index; a value with an error is NULL."""
        del names
        bad = dict(chunk.bad)
        records = []
        reached = int(chunk.ends[-1]) if len(chunk) else 0  # a part of a character may follow
        text = chunk.data[:reached].decode()
        is_ascii = len(text) == reached
        for number, (start, end) in enumerate(zip(chunk.starts.tolist(), chunk.ends.tolist(), strict=True)):
            record = _plain_object(text, start, end) if is_ascii else None
            if record is None:
                try:
                    record = object_of(chunk.data[start:end].decode())
                except ValueError as error:
                    bad[number], record = str(error), {}
            if self.elsewhere and not self.elsewhere.isdisjoint(record):
                twice = min(self.elsewhere & record.keys())
                bad.setdefault(number, f"it has the key {twice}, and so has the name of a folder, by the source's partitions")
            records.append(record)
        bad = self._in_another_case(records) | bad
        columns = {}
        for name, kind in self.kinds.items():
            values = self._prepared(chunk, name, [record.get(name) for record in records])
            columns[name], refused = typed_values.from_json(_TEXT if name in self.formatted else kind, values, self.zone)
            for number, reason in refused.items():
                bad.setdefault(number, f"column {name}: {reason}")
        return columns, bad

    def _in_another_case(self, records: list[dict[str, Any]]) -> dict[int, str]:
        """Return the errors of records that lack a column, and have a key that differs from its name by case alone."""
        lower = {name.lower(): name for name in self.kinds}
        others = {key for key in set().union(*records) - self.kinds.keys() - self.ignored if key.lower() in lower}
        return {
            number: f"it has no key {lower[key.lower()]}{in_another_case([key], [key])}, and ignored_columns do not name {key}"
            for key in sorted(others)
            for number, record in enumerate(records)
            if key in record and lower[key.lower()] not in record
        }

    def _prepared(self, chunk: Chunk, name: str, values: list[Any]) -> list[Any]:
        """Return a column's values as `typed_values.from_json` takes them."""
        family = self.kinds[name].family
        if family == "text":
            self._make_texts(chunk, name, values)
        elif "string" in self.kinds[name].name and _MINUS_ZERO.search(chunk.data):
            for number, value in enumerate(values):
                if value and _MINUS_ZERO.search(record := chunk.record(number)):  # an int would lose its sign
                    values[number] = _scan_exact(record.decode().strip(_BLANKS), 0)[0][name]
        if family == "float" and self.by_spark:
            return [Constant(value) if value in _NO_NUMBERS else value for value in values]
        return values

    def _make_texts(self, chunk: Chunk, name: str, values: list[Any]) -> None:
        """Replace values that are not texts by their JSON text."""
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


def _plain_object(text: str, start: int, end: int) -> dict[str, Any] | None:
    """Return the object between two places of a text; None if there is not exactly one."""
    if text[start] != "{":
        return None
    try:
        record, reached = _scan(text, start)
    except (ValueError, StopIteration, RecursionError):
        return None
    return record if reached == end else None


def object_of(line: str) -> dict[str, Any]:
    """Parse a line to its object.

    Raises: ValueError that says what is wrong with the line.
    """
    text = line.strip(_BLANKS)
    try:
        value, end = _scan(text, 0)
    except (StopIteration, json.JSONDecodeError) as error:
        if text[:1] in ("]", "}") or (text[:1] in ('"', "{", "[") and text.endswith((",", "[", "{"))):
            raise ValueError(PRETTY) from None
        reason = (
            f": {error.msg.removesuffix(' at')} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        )
        raise ValueError(f"it is no JSON{reason}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise ValueError("it has a number of thousands of digits") from None
    if end != len(text):
        rest = text[end : end + 20].strip()
        if isinstance(value, str) and rest.startswith(":"):
            raise ValueError(PRETTY)
        raise ValueError(f"something follows the record: {rest!r}")
    if isinstance(value, list):
        raise ValueError(PRETTY)  # noqa: TRY004 - it is the record that is wrong
    if not isinstance(value, dict):
        raise ValueError("it is no object")  # noqa: TRY004
    return value


def text_of_value(line: str, name: str) -> str | None:
    """Return the JSON text of a record's value, without blanks between its parts."""
    place = line.index("{") + 1
    text = None
    while True:
        place = _skip_blanks(line, place)
        if line[place] == "}":
            return text
        if line[place] == ",":
            place = _skip_blanks(line, place + 1)
        key, place = _scan(line, place)
        start = _skip_blanks(line, _skip_blanks(line, place) + 1)
        _, place = _scan_exact(line, start)
        if key == name:
            text = _BETWEEN.sub(lambda match: match[1] or "", line[start:place])


def _skip_blanks(line: str, place: int) -> int:
    while line[place] in _BLANKS:
        place += 1
    return place


_TEXT = parse_type("string")
