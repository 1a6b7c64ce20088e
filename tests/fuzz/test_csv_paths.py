"""The two ways of reading CSV, blocks at once by Arrow and record by record, give the same records and values.

Texts are short and made of the characters that matter, so that nearly every combination of them comes up.
"""

import os
import re
from collections import Counter
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import strategies as st

from tests.fuzz.harness import draw_inputs
from tidegate.jobs.sources.column_types import parse_type
from tidegate.jobs.sources.files.formats.records.csv_records import CsvParser
from tidegate.jobs.sources.files.formats.records.text_records import Grammar, _Splitter, chunks

LETTERS = ["a", '"', ",", "\n", "\r", " ", '""', "\t", "\u00e9", "\ufeff", "\0", "'", "\\", "\v", "\u2028", "\x85", "#", "\r\n"]
WORDS = st.lists(st.sampled_from(LETTERS), max_size=3).map("".join)
KINDS = {"x": parse_type("string"), "y": parse_type("string")}
TEXTS = 200_000 if os.environ.get("SOAK") else 2000
GRAMMARS = [
    Grammar(separator=separator, quote=quote, escape=quote, line_end=line_end)
    for separator, quote, line_end in product([b",", b"\t"], [b'"', b""], [None, b"\n", b"\r"])
]


@pytest.mark.promise("decision:0018")
def test_both_ways_of_reading_csv_agree() -> None:
    ways: Counter[bool] = Counter()

    def agree(draw: Any) -> None:
        grammar = draw(st.sampled_from(GRAMMARS))
        text = drawn_text(draw, grammar)
        with patch.object(_Splitter, "_split_at_once", lambda *_, **__: None):
            expected = read([text], grammar, ways=None)
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
        for blocks in ([text], [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]):
            assert read(blocks, grammar, ways=ways) == expected, f"{blocks} {grammar}"

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


def read(blocks: list[bytes], grammar: Grammar, ways: Counter[bool] | None) -> list[tuple]:
    """Return line, text, values and error of each record; `ways` counts chunks by whether Arrow reads them, None forbids it."""
    parser = CsvParser(KINDS, grammar)
    rows = []
    for chunk in chunks(blocks, grammar):
        if ways is None:
            texts, bad = parser._texts_one_by_one(chunk, list(KINDS))
        else:
            texts, bad = parser.parse(chunk)
            ways[parser._table_by_arrow(chunk, list(KINDS)) is not None] += 1
        values = zip(*(texts[name].to_pylist() for name in KINDS), strict=True)
        for number, (line, value) in enumerate(zip(chunk.lines.tolist(), values, strict=True)):
            rows.append((line, chunk.record(number), value, bad.get(number)))
    return rows
