"""Drawn files of every text format are read as by an independent reader, or refused with place and reason."""

import os
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.fuzz import values
from tests.fuzz.csv_inputs import Csv
from tests.fuzz.harness import END, ENDS, Format, Record, Verdict, check, draw_inputs
from tests.fuzz.json_inputs import Json

INPUTS = 5000 if os.environ.get("SOAK") else 150


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


@pytest.mark.parametrize("format", [Csv, Json, Text])
def test_parsers_read_inputs_as_an_independent_reader_does(tmp_path: Path, format: Any) -> None:
    homes = count()

    def read(draw: Any) -> None:
        declared = format.drawn(draw)
        check(tmp_path / str(next(homes)), declared, [declared.file() for _ in range(draw(st.integers(1, 3)))])

    draw_inputs(INPUTS, read)
