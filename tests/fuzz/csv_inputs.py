"""CSV: records are rendered at random, and read by a slow reader, character by character, and by Python's csv module."""

import csv
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.fuzz import values
from tests.fuzz.files import END, Damaged, File, text_ends, tuning
from tests.fuzz.harness import Column, Declared, Format, Input, Record, Verdict, strictest
from tidegate.jobs import Files

NAMES = ["name", "amount", "at", "b c", "d.e", "f`g", "select", "\u00fcber", 'q"t', "x,y"]


@dataclass(frozen=True)
class Dialect:
    separator: str = ","
    header: bool = True
    quote: str = '"'
    escape: str = '"'
    comment: str = ""
    line_end: str | None = None
    null: str = ""
    zone: str = "UTC"

    @property
    def options(self) -> dict[str, str]:
        usual = Dialect()
        pairs = {
            "sep": (self.separator, usual.separator),
            "quote": (self.quote, usual.quote),
            "escape": (self.escape, usual.escape),
            "comment": (self.comment, ""),
            "lineSep": (self.line_end, None),
            "nullValue": (self.null, ""),
            "timeZone": (self.zone, "UTC"),
        }
        return {name: value for name, (value, default) in pairs.items() if value is not None and value != default}


class Broken(Exception):
    """The text is no CSV."""


@dataclass(frozen=True)
class CsvDeclared(Declared):
    dialect: Dialect = field(default=Dialect())


class Csv(Format):
    name = "csv"

    def declare(self, draw: random.Random) -> CsvDeclared:
        file = File.drawn(draw)
        is_usual = draw.random() < 0.5
        dialect = Dialect(header=draw.random() < 0.7) if is_usual else Dialect(
            separator=draw.choice([",", ";", "\t", "|", "\x01", " ", "\u00e9" if file.encoding == "utf-8" else ","]),
            header=draw.random() < 0.7,
            quote=draw.choice(['"', '"', "'"]),
            escape=draw.choice(['"', '"', "\\"]),
            comment=draw.choice(["", "", "#"]),
            line_end=draw.choice([None, None, "\n", "\r\n", "\r"]),
            null=draw.choice(["", "", "NULL", "\\N", "-"]),
            zone=draw.choice(values.ZONES),
        )  # fmt: skip
        names = draw.sample(NAMES, draw.choice([1, 1, 2, 2, 3, 4, 5]))
        columns = [values.column(draw, name, values.TYPES) for name in names]
        options = {**dialect.options, **file.options}
        schema = {column.name: column.type for column in columns}

        def source(inputs: int) -> Files:
            return Files("inbox", format="csv", schema=schema, header=dialect.header, options=options, max_files=inputs)

        return CsvDeclared(
            source, columns, f"schema={schema} header={dialect.header} options={options}",
            dialect=dialect, file=file, **tuning(draw),
        )  # fmt: skip

    def make(self, draw: random.Random, declared: CsvDeclared, name: str) -> Input:  # type: ignore[override]
        name += f".csv{declared.file.suffix}"
        columns, dialect = list(declared.columns), declared.dialect
        names = [column.name for column in columns]
        if dialect.header and draw.random() < 0.4:
            names += [f"extra {number}" for number in range(draw.randint(1, 3))]
            draw.shuffle(names)
        oddness = draw.choice([0, 0, 0, 0.02, 0.2])
        types = {column.name: column.type for column in columns}
        ends = [dialect.line_end] if dialect.line_end else [draw.choice(text_ends(draw))]
        lines = []
        if dialect.header:
            lines.append(dialect.separator.join(_rendered(draw, dialect, text) for text in names))
        for _ in range(draw.choice([0, 1, 2, 5, 20])):
            lines.append(self._line(draw, dialect, [types.get(name, "string") for name in names], oddness))
            if draw.random() < 0.03:
                lines.append(draw.choice(["", "", "   ", f"{dialect.comment}x" if dialect.comment else ""]))
        text = "".join(line + draw.choice(ends) for line in lines)
        if text and draw.random() < 0.3:
            text = text.removesuffix(ends[0])
        if draw.random() < 0.05:
            text = draw.choice(ends) + text
        content = declared.file.packed(draw, text)
        return read(name, content, declared)

    def _line(self, draw: random.Random, dialect: Dialect, types: list[str], oddness: float) -> str:
        parts = []
        for kind in types:
            if draw.random() < 0.1:
                parts.append(dialect.null)
            else:
                is_odd = draw.random() < oddness
                value = values.odd_text(draw, kind) if is_odd else values.good_text(draw, kind, values.LETTERS + "\n\r")
                parts.append(_rendered(draw, dialect, value))
        if draw.random() < oddness / 10:
            draw.choice([parts.pop, lambda: parts.append("z")])()
        return dialect.separator.join(parts)


def _rendered(draw: random.Random, dialect: Dialect, text: str) -> str:
    special = {dialect.separator, dialect.quote, "\n", "\r", dialect.escape}
    needs = not text or any(letter in special for letter in text) or text == dialect.null
    needs = needs or (dialect.comment and text.startswith(dialect.comment)) or "\ufeff" in text
    if not needs and draw.random() < 0.8:
        return text
    if dialect.escape == '"':
        inside = text.replace(dialect.quote, dialect.quote * 2)
    else:
        inside = text.replace(dialect.escape, dialect.escape * 2).replace(dialect.quote, dialect.escape + dialect.quote)
    return f"{dialect.quote}{inside}{dialect.quote}"


def read(name: str, content: bytes, declared: CsvDeclared) -> Input:
    dialect, columns = declared.dialect, declared.columns
    try:
        text = declared.file.text_in(content)
    except (Damaged, UnicodeError):
        return Input(name, content, is_whole=False)
    names = [column.name for column in columns]
    try:
        # Which lines are blank depends on how many columns there are, which the header tells.
        if dialect.header:
            first = next(_records(text, dialect, has_one=False), None)
            if first is None:
                return Input(name, content)
            names = [value or "" for value, _ in first[2]]
            if any(names.count(column.name) != 1 for column in columns):
                return Input(name, content, is_whole=False)
        found = list(_records(text, dialect, has_one=len(names) == 1))
    except Broken:
        return Input(name, content, is_whole=False)
    _compare_with_python(text, dialect, found)
    if dialect.header:
        while not found.pop(0)[1]:
            pass  # blank lines before the header
    return Input(name, content, [_record(name, line, raw, parts, names, columns, dialect) for line, raw, parts in found])


def _record(
    name: str, line: int, raw: str, parts: list[tuple[str, bool]], names: list[str], columns: "list[Column]", dialect: Dialect
) -> Record:
    origin = f"{name}, line {line}"
    if len(parts) != len(names) or not raw:
        return Record(origin, Verdict.REFUSED, raw=raw)
    verdict, row = Verdict.COUNTS, []
    for column in columns:
        text, is_quoted = parts[names.index(column.name)]
        # An unquoted empty value is NULL, and so is the declared NULL text; a quoted empty value is an empty text.
        if (not text and not is_quoted) or (dialect.null and text == dialect.null):
            if is_quoted:
                verdict = strictest(verdict, Verdict.EITHER)  # whether "NULL" is NULL is the reader's choice
            row.append(None)
            continue
        sure, value = values.meaning(column.type, text, dialect.zone)
        verdict = strictest(verdict, sure)
        row.append(value)
    return Record(origin, verdict, tuple(row), raw)


def _records(text: str, dialect: Dialect, *, has_one: bool) -> Iterator[tuple[int, str, list[tuple[str, bool]]]]:
    """Yield line, raw text and values of each record; a value is its text, and whether it was quoted.

    Raises: Broken.
    """
    place, line = 0, 1
    while place < len(text):
        if dialect.comment and text.startswith(dialect.comment, place):
            while place < len(text) and not _end_at(text, place, dialect):
                place += 1
        else:
            start, parts = place, []
            while True:
                value, is_quoted, place = _value(text, place, dialect)
                parts.append((value, is_quoted))
                if not text.startswith(dialect.separator, place):
                    break
                place += len(dialect.separator)
            raw = text[start:place]
            if raw or has_one:
                yield line, raw, parts
            line += _lines_in(raw, dialect)
        place += _end_at(text, place, dialect)
        line += 1


def _value(text: str, place: int, dialect: Dialect) -> tuple[str, bool, int]:
    value = ""
    if not text.startswith(dialect.quote, place):
        while place < len(text) and not text.startswith(dialect.separator, place) and not _end_at(text, place, dialect):
            value += text[place]
            place += 1
        return value, False, place
    place += 1
    escape = dialect.quote if dialect.escape == '"' else dialect.escape
    while place < len(text):
        letter, following = text[place], text[place + 1 : place + 2]
        if letter == escape and following in (dialect.quote, escape) and following:
            value += following
            place += 2
        elif letter == dialect.quote:
            place += 1
            is_ended = place == len(text) or text.startswith(dialect.separator, place) or _end_at(text, place, dialect)
            if not is_ended:
                raise Broken("text follows a quote")
            return value, True, place
        else:
            value += letter
            place += 1
    raise Broken("a quote is open")


def _end_at(text: str, place: int, dialect: Dialect) -> int:
    """Return the length of the line end at this place; 0 if there is none."""
    if dialect.line_end is not None:
        return len(dialect.line_end) if text.startswith(dialect.line_end, place) else 0
    return 2 if text.startswith("\r\n", place) else int(text[place : place + 1] in ("\n", "\r"))


def _lines_in(raw: str, dialect: Dialect) -> int:
    if dialect.line_end is not None:
        return raw.count(dialect.line_end)
    return len(END.findall(raw))


def _compare_with_python(text: str, dialect: Dialect, found: list[tuple[int, str, list[tuple[str, bool]]]]) -> None:
    """Check that the slow reader agrees with Python's, where Python's supports the dialect."""
    if dialect.escape != '"' or dialect.comment or dialect.line_end is not None or len(dialect.quote) != 1:
        return
    reader = csv.reader(
        io.StringIO(text, newline=""), strict=True, delimiter=dialect.separator, quotechar=dialect.quote, skipinitialspace=False
    )
    assert [record for record in reader if record] == [[value for value, _ in parts] for _, raw, parts in found if raw], text
