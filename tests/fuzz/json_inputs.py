"""JSON lines: objects are written at random, and read by Python's json module with numbers as written."""

import base64
import json
import re
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import values
from tests.fuzz.harness import END, ENDS, Broken, Format, Record
from tests.fuzz.values import COUNTS, EITHER, NOTHING, REFUSED, Meaning

NAMES = ["name", "amount", "at", "b c", "d.e", "f`g", "\u00fcber", 'q"t', "x\\y"]
EXTRA = ["null", "1", '"x"', '{"name": 1}', "[1, [2]]", "1e400", "true", "{}", '"\\ud800"', "NaN"]
AS_TEXT = ["1.10", "1.1", "12345678.9", "1E400", "0.10", "-0", "0", "-0.0", "123", "1" * 30, "true", "false", '""']
ODD = [
    *("null", "true", "1", "1.0", "1e2", '""', "{}", '{"a": [1, "b"]}', "[ 1,2 ]", "NaN", "-Infinity", "01", "1.", "'a'"),
    *("1" * 50, "0.1e-7", "1" + "0" * 5000, "[" * 50, '"\\ud83d"'),
]
JUNK = ["]", "}", " junk", "{}", ",", "[]", "\u00a0", "\v"]
OF_TEXT = ("string", "date", "timestamp", "timestamp_ntz")
BLANKS = st.sampled_from(["", "", " ", "\t "])


class Number(str):
    """A number as it is written."""


class Constant(str):
    """NaN or Infinity, which JSON does not have."""


class Object(dict):
    """An object, and whether a name is in it twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.has_twice = len(self) < len(pairs)


@st.composite
def written(draw: Any, text: str) -> str:
    if draw(st.integers(0, 9)):
        return json.dumps(text, ensure_ascii=draw(st.booleans()))
    return '"' + re.sub("....", r"\\u\g<0>", text.encode("utf-16-be").hex()) + '"'


def good(kind: str) -> st.SearchStrategy[str]:
    texts = values.good(kind, values.TEXT_OF_LINES)
    if kind == "binary":
        return texts.map(lambda text: json.dumps(base64.b64encode(text.encode()).decode()))
    if kind not in OF_TEXT:
        return texts
    return st.sampled_from(AS_TEXT) | texts.flatmap(written) if kind == "string" else texts.flatmap(written)


def odd(kind: str) -> st.SearchStrategy[str]:
    return st.sampled_from(ODD) | values.odd(kind).flatmap(lambda text: written(text) | st.just(text or "null"))


class Json(Format):
    name = "json"

    @classmethod
    def drawn(cls, draw: Any) -> "Json":
        columns = draw(st.dictionaries(st.sampled_from(NAMES), values.TYPES, min_size=1, max_size=5))
        missing = draw(st.sampled_from(["refuse", "null"]))
        options = {"timeZone": draw(values.ZONES)}
        return cls(draw, columns, options, **cls.packing(draw), arguments={"schema": columns, "missing": missing})

    def text(self) -> str:
        draw, is_odd, end = self.draw, self.draw(st.booleans()), self.draw(ENDS)
        row, lines = values.row(list(self.columns.values()), is_odd, good, odd), []
        for texts in draw(st.lists(row, max_size=20)):
            blank, names = draw(BLANKS), [draw(written(name)) for name in self.columns]
            parts = [f"{name}{blank}:{blank}{text or 'null'}" for name, text in zip(names, texts, strict=True)]
            parts += [f'"extra":{text}' for text in draw(st.lists(st.sampled_from(EXTRA), max_size=1))]
            parts += draw(st.lists(st.sampled_from(parts), max_size=1)) if is_odd and not draw(st.integers(0, 9)) else []
            parts = parts[1:] if draw(st.integers(0, 19)) == 19 else parts
            line = f"{blank}{{{blank}" + f"{blank},{blank}".join(draw(st.permutations(parts))) + f"{blank}}}{blank}"
            lines.append(line + (draw(st.sampled_from(JUNK)) if is_odd and draw(st.integers(0, 19)) == 19 else ""))
            lines += draw(st.lists(st.sampled_from(["", "  ", "\t"]), max_size=1)) if is_odd else []
        return end.join(lines) + draw(st.sampled_from([end, ""]))

    def records(self, name: str, text: str) -> Iterable[Record]:
        lines = [(number, line) for number, line in enumerate(END.split(text), start=1) if line.strip(" \t")]
        objects = [_object(line) for _, line in lines]
        names = [set(found) for found in objects if found is not None]
        if self.arguments["missing"] == "refuse" and names and not set.union(*names).issuperset(self.columns):
            raise Broken("no record has this column")
        for (number, line), found in zip(lines, objects, strict=True):
            if found is None:
                yield Record(f"{name}, line {number}", REFUSED, raw=line)
                continue
            read = [_meaning(kind, found.get(column), self.options["timeZone"]) for column, kind in self.columns.items()]
            sure = EITHER if found.has_twice or _has_huge_number(found) else COUNTS
            verdict = max(sure, *(of_value for of_value, _ in read))
            yield Record(f"{name}, line {number}", verdict, tuple(value for _, value in read), line)


def _object(line: str) -> Object | None:
    try:
        found = json.loads(
            line.strip(" \t"), parse_int=Number, parse_float=Number, parse_constant=Constant, object_pairs_hook=Object
        )
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, Object) else None


def _has_huge_number(found: Any) -> bool:
    """Return whether a number has thousands of digits, which Python's json does not read as an int."""
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else []
    return any(map(_has_huge_number, parts)) or (isinstance(found, Number) and len(found) > 4000)


def _meaning(kind: str, value: Any, zone: str) -> Meaning:
    if value is None:
        return COUNTS, None
    if isinstance(value, Number | Constant):
        return _of_number(kind, value)
    if isinstance(value, bool):
        return (COUNTS, str(value).lower()) if kind == "string" else (COUNTS, value) if kind == "boolean" else NOTHING
    if isinstance(value, str):
        return _of_text(kind, value, zone)
    return (EITHER, _compact(value)) if kind == "string" else NOTHING


def _of_text(kind: str, text: str, zone: str) -> Meaning:
    try:
        text.encode()  # half of a surrogate pair has no meaning
        if kind == "binary":
            return COUNTS, base64.b64decode(text, validate=True)
    except ValueError:
        return NOTHING
    verdict, value = values.meaning(kind, text, zone)
    return (verdict if kind in OF_TEXT else max(verdict, EITHER)), value


def _of_number(kind: str, value: str) -> Meaning:
    if kind == "string":
        return (EITHER if isinstance(value, Constant) else COUNTS), str(value)
    if kind not in values.BITS and kind.partition("(")[0] not in ("decimal", "double", "float"):
        return NOTHING
    verdict, number = values.meaning(kind, str(value))
    return (verdict if kind not in values.BITS or value.lstrip("-").isdigit() else max(verdict, EITHER)), number


def _compact(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{_compact(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_compact, value)) + "]"
    return str(value) if isinstance(value, Number | Constant) else json.dumps(value, ensure_ascii=False)
