"""The two ways of reading CSV, blocks at once by Arrow and record by record, give the same records and values.

Texts are short and made of the characters that matter, so that nearly every combination of them comes up. FUZZ_TEXTS is their
number, more with ``SOAK`` set. A failure prints FUZZ_SEED.
"""

import os
import random
from collections import Counter
from itertools import product

import pytest

from tidegate.jobs.sources.column_types import parse_type
from tidegate.jobs.sources.files.formats.records import text_records
from tidegate.jobs.sources.files.formats.records.csv_records import CsvParser
from tidegate.jobs.sources.files.formats.records.text_records import Grammar, chunks

LETTERS = ["a", '"', ",", "\n", "\r", " ", '""', "\t", "\u00e9", "\ufeff", "\0", "'", "\\", "\v", "\u2028", "\x85", "#", "\r\n"]
KINDS = {"x": parse_type("string"), "y": parse_type("string")}
SEED = int(os.environ.get("FUZZ_SEED", "1"))
TEXTS = int(os.environ.get("FUZZ_TEXTS", "1000000" if os.environ.get("SOAK") else "3000"))
GRAMMARS = [
    Grammar(separator=separator, quote=quote, escape=quote, line_end=line_end)
    for separator, quote, line_end in product([b",", b"\t"], [b'"', b""], [None, b"\n", b"\r"])
]


@pytest.mark.promise("decision:0018")
def test_both_ways_of_reading_csv_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(SEED)
    at_once = text_records._Splitter._split_at_once
    ways: Counter[bool] = Counter()
    for _ in range(TEXTS):
        grammar = draw.choice(GRAMMARS)
        text = _text(draw, grammar)
        monkeypatch.setattr(text_records._Splitter, "_split_at_once", lambda *_, **__: None)
        expected = _read([text], grammar, ways=None)
        monkeypatch.setattr(text_records._Splitter, "_split_at_once", at_once)
        for blocks in ([text], _cut(draw, text)):
            assert _read(blocks, grammar, ways=ways) == expected, f"{blocks} {grammar}, seed {SEED}"
    print(f"{ways.total()} chunks, {ways[True]} of them by Arrow, seed {SEED}")  # noqa: T201 - the figures of a long run
    assert min(ways[True], ways[False]) > TEXTS / 20


def _text(draw: random.Random, grammar: Grammar) -> bytes:
    """Draw a text of any characters, or of records with as many values as there are columns."""
    if draw.random() < 0.3:
        return "".join(draw.choices(LETTERS, k=draw.randint(1, 14))).encode()
    ends = [(grammar.line_end or b"\n").decode(), "\n", "\r\n", "\r"]
    text = ""
    for _ in range(draw.randint(1, 5)):
        text += f"{_value(draw, grammar)}{(grammar.separator or b'').decode()}{_value(draw, grammar)}"
        text += draw.choice(ends[: draw.randint(1, len(ends))])
    return text.encode()


def _value(draw: random.Random, grammar: Grammar) -> str:
    text = "".join(draw.choices(LETTERS, k=draw.randint(0, 3)))
    if draw.random() < 0.3:
        return '"' + text.replace('"', '""') + '"'
    special = f'"\n{(grammar.separator or b"").decode()}'
    return "".join(letter for letter in text if letter not in special)


def _cut(draw: random.Random, text: bytes) -> list[bytes]:
    places = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 4)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def _read(blocks: list[bytes], grammar: Grammar, ways: Counter[bool] | None) -> list[tuple]:
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
