"""Drawn files of every text format are read as by an independent reader, or refused with place and reason."""

import base64
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import strategies as st

from tests.fuzz import values
from tests.fuzz.harness import END, ENDS, Broken, Format, Record, Verdict, check, draw_inputs
from tests.fuzz.values import COUNTS, EITHER, NOTHING, REFUSED, Meaning
from tidegate.jobs.sources.column_types import parse_type
from tidegate.jobs.sources.files.formats.records.csv_records import CsvParser
from tidegate.jobs.sources.files.formats.records.text_records import Grammar, _Splitter, chunks

INPUTS = 5000 if os.environ.get("SOAK") else 150
NAMES = ["name", "amount", "at", "b c", "d.e", "f`g", "select", "\u00fcber", 'q"t', "x,y"]
USUAL = {"sep": ",", "quote": '"', "escape": '"', "comment": "", "lineSep": "", "nullValue": "", "timeZone": "UTC"}


class Text(Format):
    """Each line is a record, or the whole file is one."""

    name = "text"

    @classmethod
    def drawn(cls, draw: Any) -> "Text":
        end = draw(st.sampled_from([None, None, "\n", "\r\n", "\r", "--"]))
        options = {**({"lineSep": end} if end else {}), **({"wholetext": "true"} if draw(st.integers(0, 4)) == 4 else {})}
        return cls(draw, {"value": "string"}, options, **cls.packing(draw))

    def text(self) -> str:
        ends = st.just(self.options["lineSep"]) if "lineSep" in self.options else ENDS
        return "".join(self.draw(st.lists(st.tuples(values.TEXT, ends).map("".join)))) + self.draw(values.TEXT)

    def records(self, name: str, text: str) -> Iterable[Record]:
        """Text after the last line end is a line, unless it is empty."""
        end = self.options.get("lineSep")
        lines = [text] if "wholetext" in self.options else text.split(end) if end else END.split(text)
        for number, line in enumerate(lines if lines[-1] else lines[:-1], start=1):
            yield Record(f"{name}, line {number}", Verdict.COUNTS, (line,), line)


class Line(NamedTuple):
    """A record: the number of its first line, its raw text, and each value with whether it was quoted."""

    number: int
    raw: str
    parts: list[tuple[str, bool]]


class Csv(Format):
    name = "csv"

    @classmethod
    def drawn(cls, draw: Any) -> "Csv":
        packing, header = cls.packing(draw), draw(st.booleans())
        options: dict[str, str] = {} if draw(st.booleans()) else {
            "sep": draw(st.sampled_from(",;\t|\x01 " + "\u00e9" * (packing["encoding"] == "utf-8"))),
            "quote": draw(st.sampled_from(['"', '"', "'"])),
            "escape": draw(st.sampled_from(['"', '"', "\\"])),
            "comment": draw(st.sampled_from(["", "", "#"])),
            "lineSep": draw(st.sampled_from(["", "", "\n", "\r\n", "\r"])),
            "nullValue": draw(st.sampled_from(["", "", "NULL", "\\N", "-"])),
            "timeZone": draw(values.ZONES),
        }  # fmt: skip
        options = {name: value for name, value in options.items() if value != USUAL[name]}
        columns = draw(st.dictionaries(st.sampled_from(NAMES), values.TYPES, min_size=1, max_size=5))
        return cls(draw, columns, options, **packing, arguments={"schema": columns, "header": header})

    def option(self, name: str) -> str:
        return self.options.get(name, USUAL[name])

    @property
    def escape(self) -> str:
        return self.option("quote") if self.option("escape") == '"' else self.option("escape")

    def text(self) -> str:
        names, draw, separator = list(self.columns), self.draw, self.option("sep")
        if self.arguments["header"]:
            names = draw(st.permutations([*names, *["extra 1", "extra 2"][: draw(st.integers(0, 2))]]))
        kinds, is_odd = [self.columns.get(name, "string") for name in names], draw(st.booleans())
        lines = [names] if self.arguments["header"] else []
        row = values.row(kinds, is_odd, partial(values.good, text=values.TEXT_OF_LINES), values.odd)
        lines += draw(st.lists(row, max_size=20))
        end, text = self.option("lineSep") or draw(ENDS), ""
        for line in lines:
            text += separator.join(map(self._written, line))
            text += (f"{separator}z" if is_odd and draw(st.integers(0, 30)) == 30 else "") + end
            text += draw(st.sampled_from(["", end, f"   {end}", f"{self.option('comment') or 'a'}x{end}"])) if is_odd else ""
        return text if draw(st.booleans()) else text.removesuffix(end)

    def _written(self, text: str | None) -> str:
        if text is None:
            return self.option("nullValue")
        quote, escape = self.option("quote"), self.escape
        special = [self.option("sep"), *([self.option("lineSep")] if self.option("lineSep") else "\n\r")]
        is_special = any(part in text for part in special) or text.startswith((quote, self.option("comment") or quote))
        if text and not is_special and text != self.option("nullValue") and self.draw(st.integers(0, 4)):
            return text
        return quote + re.sub(f"[{re.escape(quote + escape)}]", lambda found: escape + found[0], text) + quote

    def records(self, name: str, text: str) -> Iterable[Record]:
        names = list(self.columns)
        # Which lines are blank depends on how many columns there are, which the header tells.
        if self.arguments["header"]:
            header = next(self._lines(text, has_one=False), None)
            if header is None:
                return
            names = [value for value, _ in header.parts]
            if any(names.count(column) != 1 for column in self.columns):
                raise Broken("the header lacks a column, or has it twice")
        lines = list(self._lines(text, has_one=len(names) == 1))
        if self.arguments["header"]:
            while not lines.pop(0).raw:
                pass  # blank lines before the header
        for line in lines:
            is_bad = len(line.parts) != len(names) or not line.raw
            parts = dict(zip(names, line.parts, strict=False))
            found = [] if is_bad else [self._value(kind, *parts[column]) for column, kind in self.columns.items()]
            verdict = max((sure for sure, _ in found), default=Verdict.REFUSED)
            yield Record(f"{name}, line {line.number}", verdict, tuple(value for _, value in found), line.raw)

    def _value(self, kind: str, text: str, is_quoted: bool) -> values.Meaning:
        """An unquoted empty value is NULL, and so is the declared text for NULL; a quoted empty value is an empty text."""
        null = self.option("nullValue")
        if null and text == null:
            return (Verdict.EITHER if is_quoted else Verdict.COUNTS), None  # whether "NULL" is NULL is the reader's choice
        return values.meaning(kind, text, self.option("timeZone")) if text or is_quoted else (Verdict.COUNTS, None)

    def _lines(self, text: str, *, has_one: bool) -> Iterator[Line]:
        quote, escape, separator = map(re.escape, (self.option("quote"), self.escape, self.option("sep")))
        end = re.escape(self.option("lineSep")) or r"\r\n|\r|\n"
        quoted, plain = f"(?:{escape}[{quote}{escape}]|[^{quote}])*+", rf"(?!{quote})(?:(?!{separator}|{end}).)*"
        value = re.compile(rf"(?s:{quote}({quoted}){quote}|({plain}))({separator}|{end}|\Z)")
        comment = re.compile(rf"(?s:{re.escape(self.option('comment'))}(?:(?!{end}).)*(?:{end}|\Z))")
        place, number = 0, 1
        while place < len(text):
            start, parts, after = place, [], self.option("sep")
            if self.option("comment") and (found := comment.match(text, place)):
                place, after = found.end(), ""
            while after == self.option("sep"):
                if not (found := value.match(text, place)):
                    raise Broken("a quote is open, or text follows it")
                inner, outer, after = found.groups()
                is_quoted = inner is not None
                parts.append((re.sub(f"{escape}([{quote}{escape}])", r"\1", inner) if is_quoted else outer, is_quoted))
                place = found.end()
            if parts and ((raw := text[start : place - len(after)]) or has_one):
                yield Line(number, raw, parts)
            number += len(re.findall(end, text[start:place]))


KEYS = ["name", "amount", "at", "b c", "d.e", "f`g", "\u00fcber", 'q"t', "x\\y"]
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


def good_json(kind: str) -> st.SearchStrategy[str]:
    texts = values.good(kind, values.TEXT_OF_LINES)
    if kind == "binary":
        return texts.map(lambda text: json.dumps(base64.b64encode(text.encode()).decode()))
    if kind not in OF_TEXT:
        return texts
    return st.sampled_from(AS_TEXT) | texts.flatmap(written) if kind == "string" else texts.flatmap(written)


def odd_json(kind: str) -> st.SearchStrategy[str]:
    return st.sampled_from(ODD) | values.odd(kind).flatmap(lambda text: written(text) | st.just(text or "null"))


class Json(Format):
    name = "json"

    @classmethod
    def drawn(cls, draw: Any) -> "Json":
        columns = draw(st.dictionaries(st.sampled_from(KEYS), values.TYPES, min_size=1, max_size=5))
        missing = draw(st.sampled_from(["refuse", "null"]))
        options = {"timeZone": draw(values.ZONES)}
        return cls(draw, columns, options, **cls.packing(draw), arguments={"schema": columns, "missing": missing})

    def text(self) -> str:
        draw, is_odd, end = self.draw, self.draw(st.booleans()), self.draw(ENDS)
        row, lines = values.row(list(self.columns.values()), is_odd, good_json, odd_json), []
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


@pytest.mark.parametrize("format", [Csv, Json, Text])
def test_parsers_read_inputs_as_an_independent_reader_does(tmp_path: Path, format: Any) -> None:
    homes = count()

    def read(draw: Any) -> None:
        declared = format.drawn(draw)
        check(tmp_path / str(next(homes)), declared, [declared.file() for _ in range(draw(st.integers(1, 3)))])

    draw_inputs(INPUTS, read)


# Two ways of reading CSV, blocks at once by Arrow and record by record. Texts are of the characters that matter, and short.

LETTERS = ["a", '"', ",", "\n", "\r", " ", '""', "\t", "\u00e9", "\ufeff", "\0", "'", "\\", "\v", "\u2028", "\x85", "#", "\r\n"]
WORDS = st.lists(st.sampled_from(LETTERS), max_size=3).map("".join)
KINDS = {"x": parse_type("string"), "y": parse_type("string")}
TEXTS = 50_000 if os.environ.get("SOAK") else 1000
GRAMMARS = [
    Grammar(separator=separator, quote=quote, escape=quote, line_end=line_end)
    for separator, quote, line_end in product([b",", b"\t"], [b'"', b""], [None, b"\n", b"\r"])
]


@pytest.mark.promise("decision:0018")
def test_both_ways_of_reading_csv_agree() -> None:
    ways, by_arrow = Counter[bool](), CsvParser._table_by_arrow

    def counted(*arguments: Any) -> Any:
        table = by_arrow(*arguments)
        ways[table is not None] += 1
        return table

    def agree(draw: Any) -> None:
        grammar = draw(st.sampled_from(GRAMMARS))
        text = drawn_text(draw, grammar)
        with patch.object(_Splitter, "_split_at_once", lambda *_, **__: None):
            expected = read([text], grammar, may_use_arrow=False)
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
        for blocks in ([text], [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]):
            assert read(blocks, grammar, may_use_arrow=True) == expected, f"{blocks} {grammar}"

    with patch.object(CsvParser, "_table_by_arrow", counted):
        draw_inputs(TEXTS, agree)
    assert min(ways[True], ways[False]) > TEXTS / 20


def drawn_text(draw: Any, grammar: Grammar) -> bytes:
    """Draw a text of any characters, or of records with as many values as there are columns."""
    if draw(st.integers(0, 3)) == 3:
        return "".join(draw(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=14))).encode()
    separator, end = (grammar.separator or b"").decode(), (grammar.line_end or b"\n").decode()
    plain = WORDS.map(lambda text: re.sub(f'["\n{separator}]', "", text))
    value = plain | plain | WORDS.map(lambda text: '"' + text.replace('"', '""') + '"')
    ends = st.sampled_from(draw(st.sampled_from([[end], [end, "\n"], [end, "\n", "\r\n", "\r"]])))
    line = st.tuples(value, st.just(separator), value, ends).map("".join)
    return "".join(draw(st.lists(line, min_size=1, max_size=5))).encode()


def read(blocks: list[bytes], grammar: Grammar, *, may_use_arrow: bool) -> list[tuple]:
    """Return line, text, values and error of each record."""
    parser = CsvParser(KINDS, grammar)
    parse = parser.parse if may_use_arrow else parser._texts_one_by_one
    rows = []
    for chunk in chunks(blocks, grammar):
        texts, bad = parse(chunk, list(KINDS))
        values = zip(*(texts[name].to_pylist() for name in KINDS), strict=True)
        for number, (line, value) in enumerate(zip(chunk.lines.tolist(), values, strict=True)):
            rows.append((line, chunk.record(number), value, bad.get(number)))
    return rows
