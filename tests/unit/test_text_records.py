"""Text is split into records in bounded memory: of a record that is too long, the beginning is kept, and its line is named."""

import random
import tracemalloc

import pytest

from tidegate.jobs.sources.files.formats.records import text_records
from tidegate.jobs.sources.files.formats.records.text_records import Grammar, chunks

MEBIBYTE = 1 << 20
GRAMMARS = {
    "lines": Grammar(blank_lines=True),
    "csv": Grammar(separator=b",", blank_lines=True),
    "csv of its own": Grammar(separator=b",", escape=b"/", blank_lines=True),
    "a longer line end": Grammar(line_end=b"<>", blank_lines=True),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_records_that_are_too_long_are_told_however_blocks_fall(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_records, "MAX_RECORD_BYTES", 20)
    monkeypatch.setattr(text_records, "KEPT_OF_LONGER", 5)
    grammar, dice = GRAMMARS[name], random.Random(1)
    for _ in range(300):
        ends = [grammar.line_end] if grammar.line_end else [b"\n", b"\r\n", b"\r"]
        written = [bytes(dice.choices(b"ab<", k=dice.choice([0, 1, 19, 20, 21, 45, 90]))) for _ in range(dice.randint(1, 6))]
        written = [record.rstrip(b"<") + b"x" for record in written]
        text = b"".join(record + dice.choice(ends) for record in written[:-1]) + written[-1]
        size = dice.randint(1, 30)
        found = list(chunks([text[at : at + size] for at in range(0, len(text), size)], grammar))
        records = [(chunk.record(at), at in chunk.bad, int(chunk.lines[at])) for chunk in found for at in range(len(chunk))]
        is_long = [len(record) > 20 for record in written]
        assert [(bad, line) for _, bad, line in records] == [(bad, line) for line, bad in enumerate(is_long, start=1)], text
        for (record, bad, _), expected in zip(records, written, strict=True):
            assert record in (expected, expected[:5]) if bad else record == expected
        assert found[-1].reached == len(text)


@pytest.mark.promise("limit:MAX_RECORD_BYTES")
@pytest.mark.parametrize("grammar", [Grammar(), Grammar(separator=b","), Grammar(whole=True)], ids=["lines", "csv", "whole"])
def test_a_record_without_an_end_takes_bounded_memory(grammar: Grammar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_records, "MAX_RECORD_BYTES", MEBIBYTE)
    tracemalloc.start()
    found = list(chunks((b"x" * MEBIBYTE for _ in range(64)), grammar))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (chunk,) = found
    assert list(chunk.bad) == [0]
    assert "longer than" in chunk.bad[0]
    assert peak < 10 * MEBIBYTE
