"""JSON lines: objects are written at random, and read by Python's json module with numbers as written."""

import base64
import binascii
import json
import random
from dataclasses import dataclass
from typing import Any

from tests.fuzz import values
from tests.fuzz.files import END, Damaged, File, text_ends, tuning
from tests.fuzz.harness import Column, Declared, Format, Input, Record, Verdict, strictest
from tests.fuzz.values import COUNTS, EITHER, NOTHING, REFUSED, Meaning
from tidegate.jobs import Files

NAMES = ["name", "amount", "at", "b c", "d.e", "f`g", "\u00fcber", 'q"t', "x\\y", ""]


@dataclass(frozen=True)
class JsonDeclared(Declared):
    zone: str = "UTC"
    may_lack: bool = False


class Number(str):
    __slots__ = ()


class Constant(str):
    """NaN or Infinity, which JSON does not have."""

    __slots__ = ()


class Json(Format):
    name = "json"

    def declare(self, draw: random.Random) -> JsonDeclared:
        file = File.drawn(draw)
        zone = draw.choice(values.ZONES)
        names = draw.sample(NAMES[:-1], draw.choice([1, 2, 3, 4, 5]))
        columns = [values.column(draw, name, values.TYPES) for name in names]
        options = {**file.options, **({} if zone == "UTC" else {"timeZone": zone})}
        schema = {column.name: column.type for column in columns}
        missing = draw.choice(["refuse", "null"])

        def source(inputs: int) -> Files:
            return Files("inbox", format="json", schema=schema, missing=missing, options=options, max_files=inputs)  # type: ignore[arg-type]

        return JsonDeclared(
            source, columns, f"schema={schema} missing={missing} options={options}", file=file,
            zone=zone, may_lack=missing == "null", **tuning(draw),
        )  # fmt: skip

    def make(self, draw: random.Random, declared: JsonDeclared, name: str) -> Input:  # type: ignore[override]
        name += f".json{declared.file.suffix}"
        oddness = draw.choice([0, 0, 0, 0.02, 0.2])
        end = draw.choice(text_ends(draw))
        lines = []
        for _ in range(draw.choice([0, 1, 2, 5, 20])):
            lines.append(_line(draw, declared, oddness))
            if draw.random() < 0.03:
                lines.append(draw.choice(["", "  ", "\t"]))
        text = end.join(lines) + (end if draw.random() < 0.7 else "")
        content = declared.file.packed(draw, text)
        return read(name, content, declared)


def _line(draw: random.Random, declared: JsonDeclared, oddness: float) -> str:
    blank = draw.choice(["", "", " ", "\t "])
    parts = []
    for column in declared.columns:
        if draw.random() < 0.05:
            continue
        value = _odd(draw, column.type) if draw.random() < oddness else _good(draw, column.type)
        parts.append(f"{_text(draw, column.name)}{blank}:{blank}{value}")
    for _ in range(draw.choice([0, 0, 1, 2])):
        parts.append(f"{_text(draw, draw.choice(['extra', 'more', *NAMES[:2]]) + '_')}:{draw.choice(_ANY)}")
    if parts and draw.random() < oddness / 5:
        parts.append(draw.choice(parts))
    draw.shuffle(parts)
    line = f"{blank}{{{blank}" + f"{blank},{blank}".join(parts) + f"{blank}}}{blank}"
    if draw.random() < oddness / 5:
        line += draw.choice(["]", "}", " junk", line, ",", "[]", "\u00a0", "\v"])
    return line


_ANY = ["null", "1", '"x"', '{"name": 1}', "[1, [2]]", "1e400", "true", "{}", '"\\ud800"', "NaN"]


def _text(draw: random.Random, text: str) -> str:
    found = json.dumps(text, ensure_ascii=draw.random() < 0.5)
    if text and draw.random() < 0.05:
        found = (
            '"'
            + "".join(f"\\u{ord(letter):04x}" if ord(letter) < 0xD800 else json.dumps(letter)[1:-1] for letter in text)
            + '"'
        )
    return found


def _good(draw: random.Random, kind: str) -> str:
    if draw.random() < 0.1:
        return "null"
    if kind == "string":
        if draw.random() < 0.3:
            return draw.choice(
                ["1.10", "1.1", "12345678.9", "1E400", "0.10", "-0", "0", "-0.0", "123", "1" * 30, "true", "false", '""']
            )
        return _text(draw, values.text_of(draw, values.LETTERS + "\n\r\b"))
    if kind == "binary":
        return json.dumps(base64.b64encode(values.text_of(draw).encode()).decode())
    text = values.good_text(draw, kind)
    if kind in ("date", "timestamp", "timestamp_ntz"):
        return _text(draw, text)
    if kind.startswith("decimal"):
        sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
        whole, _, part = digits.partition(".")
        return sign + (whole.lstrip("0") or "0") + (f".{part}" if part else "")
    return text


def _odd(draw: random.Random, kind: str) -> str:
    chance = draw.random()
    if chance < 0.3:
        return draw.choice(
            [
                *("null", "true", "1", "1.0", "1e2", '""', "{}", '{"a": [1, "b"]}', "[ 1,2 ]", "NaN", "-Infinity", "01"),
                *("1.", "'a'", "1" * 50, "0.1e-7"),
                "1" + "0" * 5000,
                "[" * 50,
                '"\\ud83d"',
                '"\\u0000"',
            ]
        )
    text = values.odd_text(draw, kind)
    return text if chance < 0.5 and text else _text(draw, text)


def read(name: str, content: bytes, declared: JsonDeclared) -> Input:
    try:
        text = declared.file.text_in(content)
    except (Damaged, UnicodeError):
        return Input(name, content, is_whole=False)
    lines = END.split(text)
    records, found, objects = [], set(), 0
    for number, line in enumerate(lines, start=1):
        if line.strip(" \t"):
            record = _record(f"{name}, line {number}", line, declared)
            records.append(record[0])
            if record[1] is not None:
                objects += 1
                found |= record[1].keys()
    is_lacking = objects and any(column.name not in found for column in declared.columns)
    if is_lacking and not declared.may_lack:
        return Input(name, content, is_whole=False)
    return Input(name, content, records)


def _record(origin: str, line: str, declared: JsonDeclared) -> tuple[Record, dict[str, Any] | None]:
    try:
        found = json.loads(line.strip(" \t"), parse_int=Number, parse_float=Number, parse_constant=Constant)
    except (ValueError, RecursionError):
        return Record(origin, REFUSED, raw=line), None
    if not isinstance(found, dict):
        return Record(origin, REFUSED, raw=line), None
    pairs = json.loads(line.strip(" \t"), object_pairs_hook=list, parse_int=Number)
    names = [pair[0] for pair in pairs]
    verdict = EITHER if len(names) > len(set(names)) or _has_huge_number(found) else COUNTS
    row = []
    for column in declared.columns:
        sure, value = _meaning(column, found.get(column.name), declared.zone)
        verdict = strictest(verdict, sure)
        row.append(value)
    return Record(origin, verdict, tuple(row), line), found


def _has_huge_number(found: Any) -> bool:
    """Return whether a number has thousands of digits, which Python's json does not read as an int."""
    if isinstance(found, dict):
        return any(map(_has_huge_number, found.values()))
    return any(map(_has_huge_number, found)) if isinstance(found, list) else isinstance(found, Number) and len(found) > 4000


def _meaning(column: Column, value: Any, zone: str) -> Meaning:
    kind = column.type
    if value is None:
        return COUNTS, None
    if isinstance(value, Number | Constant):
        return _number(kind, value)
    if isinstance(value, bool):
        if kind == "string":
            return COUNTS, str(value).lower()
        return (COUNTS, value) if kind == "boolean" else NOTHING
    if isinstance(value, str):
        return _of_text(kind, value, zone)
    if kind == "string":
        return EITHER, _compact(value)
    return NOTHING


def _of_text(kind: str, text: str, zone: str) -> Meaning:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return NOTHING
    if kind == "binary":
        try:
            return COUNTS, base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            return NOTHING
    verdict, value = values.meaning(kind, text, zone)
    is_text = kind in ("string", "date", "timestamp", "timestamp_ntz")
    return (verdict, value) if is_text or verdict is Verdict.REFUSED else (EITHER, value)


def _number(kind: str, value: str) -> Meaning:
    if kind == "string":
        return (EITHER if isinstance(value, Constant) else COUNTS), str(value)
    if kind in values.BITS or kind.startswith("decimal") or kind in ("double", "float"):
        if isinstance(value, Constant) and kind not in ("double", "float"):
            return NOTHING
        verdict, number = values.meaning(kind, str(value))
        is_plain = kind not in values.BITS or value.lstrip("-").isdigit()
        return (verdict, number) if is_plain else (EITHER if verdict is COUNTS else verdict, number)
    return NOTHING


def _compact(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{_compact(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_compact, value)) + "]"
    return str(value) if isinstance(value, Number | Constant) else json.dumps(value, ensure_ascii=False)
