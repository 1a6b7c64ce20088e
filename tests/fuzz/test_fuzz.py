"""Drawn files of every text format are read as by an independent reader, or refused with place and reason."""

import os
import re
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from tests.fuzz import values
from tests.fuzz.harness import END, ENDS, Broken, Format, Record, Verdict, check, draw_inputs
from tests.fuzz.json_inputs import Json

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


def good(kind: str) -> st.SearchStrategy[str]:
    return values.good(kind, values.TEXT_OF_LINES)


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
        row = values.row(kinds, is_odd, good, values.odd)
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


@pytest.mark.parametrize("format", [Csv, Json, Text])
def test_parsers_read_inputs_as_an_independent_reader_does(tmp_path: Path, format: Any) -> None:
    homes = count()

    def read(draw: Any) -> None:
        declared = format.drawn(draw)
        check(tmp_path / str(next(homes)), declared, [declared.file() for _ in range(draw(st.integers(1, 3)))])

    draw_inputs(INPUTS, read)
