"""Files of drawn text are read by the parsers, in this process, and by an oracle that shares no code with them.

The oracle's verdict on a record is COUNTS if it is undoubtedly right, so that a refusal is an error too; REFUSED if it has no
exact meaning; EITHER if a strict reader may refuse it, but a reader that accepts it must read the same values.
"""

import bz2
import codecs
import json
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from gzip import compress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.sources.in_process import Folder
from tidegate.jobs import Files
from tidegate.jobs.sources import ORIGIN, PAYLOAD, REFUSAL
from tidegate.jobs.sources.files import content as content_of_files
from tidegate.jobs.sources.files.formats.text_files import text_reader, text_scan
from tidegate.state_store.base.errors import TidegateError

END = re.compile(r"\r\n|\r|\n")
ENDS = st.sampled_from(["\n", "\n", "\r\n", "\r"])
ENCODINGS = ["utf-8"] * 6 + ["latin-1", "utf-16", "utf-16-le", "utf-32", "cp1252", "shift_jis", "utf-8-sig"]
MARKS = {"utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)}
SCRAPS = st.sampled_from([b"", b"", b'"', b"\n", b"\r", b",", b"\\", b"\xff", b"\xc3", b" ", b"{", b"}", b"]"])
LENGTHS = st.sampled_from([0, 0, 1, 2, 10, 10_000])
DAMAGES = st.sampled_from([0] * 8 + [1, 2, 4])
# The reader's block sizes, and whether it reads in the driver or in Spark's tasks.
TUNING = (
    (content_of_files, "READ_BLOCK_BYTES", st.sampled_from([1, 2, 3, 7, 64, 1 << 20])),
    (text_scan, "RANGE_BYTES", st.sampled_from([50, 1000, 1 << 24])),
    (text_reader, "HERE_BYTES", st.sampled_from([0, 1 << 18])),
)


class Verdict(IntEnum):
    COUNTS, EITHER, REFUSED = range(3)


class Broken(ValueError):
    """A file that has to be refused as a whole."""


def draw_inputs(number: int, read: Callable[[Any], object]) -> None:
    """Call a function so many times, each with a function that draws from strategies."""

    @seed(int(os.environ.get("FUZZ_SEED", "1")))
    @settings(max_examples=number, deadline=None, database=None, suppress_health_check=[*HealthCheck], phases=[Phase.generate])
    @given(st.data())
    def each(data: st.DataObject) -> None:
        read(data.draw)

    each()


@dataclass(frozen=True)
class Record:
    """A record as the oracle read it: its place, its values in the order of the columns, and its raw text."""

    origin: str
    verdict: Verdict
    row: tuple = ()
    raw: str | None = None


@dataclass(frozen=True)
class Format:
    """A source's declaration, and how its files are packed. It draws a file's `text`, and reads `records`, or raises Broken."""

    draw: Any = field(repr=False)
    columns: dict[str, str]
    options: dict[str, str]
    encoding: str
    suffix: str
    arguments: dict[str, Any] = field(default_factory=dict)
    name: ClassVar[str]

    @staticmethod
    def packing(draw: Any) -> dict[str, str]:
        return {"encoding": draw(st.sampled_from(ENCODINGS)), "suffix": draw(st.sampled_from(["", "", ".gz", ".bz2"]))}

    def source(self) -> Files:
        options = self.options | ({} if self.encoding == "utf-8" else {"encoding": self.encoding})
        return Files("inbox", format=self.name, options=options, max_files=9, **self.arguments)

    def file(self) -> bytes:
        """Draw the bytes of a file, which are sometimes damaged."""
        content = self.text().encode(self.encoding, "replace")
        if self.encoding == "utf-8" and self.draw(st.integers(0, 9)) == 9:
            content = codecs.BOM_UTF8 + content
        content = self._damaged(content)
        if self.suffix:
            cut, pack = self.draw(st.integers(0, len(content))), compress if self.suffix == ".gz" else bz2.compress
            padding = bytes(self.draw(st.sampled_from([0, 0, 1, 512]))) if self.suffix == ".gz" else b""
            content = self._damaged(pack(content[:cut]) + pack(content[cut:]) + padding)
        return content

    def _damaged(self, content: bytes) -> bytes:
        for _ in range(self.draw(DAMAGES)):
            place = self.draw(st.integers(0, len(content)))
            content = content[:place] + self.draw(SCRAPS) + content[place + self.draw(LENGTHS) :]
        return content

    def text_in(self, content: bytes) -> str:
        """Return a file's text without its byte order mark."""
        if self.suffix:
            content = _unpacked(content, self.suffix == ".gz")
        if content and self.encoding in MARKS and not content.startswith(MARKS[self.encoding]):
            raise Broken("no mark tells the order of its bytes")
        text = content.decode(self.encoding)
        return text if self.encoding in ("utf-16", "utf-32", "utf-8-sig") else text.removeprefix("\ufeff")


def _unpacked(content: bytes, is_gzip: bool) -> bytes:
    text = b""
    while content:
        engine: Any = zlib.decompressobj(31) if is_gzip else bz2.BZ2Decompressor()
        try:
            text += engine.decompress(content)
        except (zlib.error, OSError) as error:
            raise Broken(str(error)) from None
        if not engine.eof:
            raise Broken("it ends within compressed data")
        content = engine.unused_data.lstrip(b"\0" if is_gzip else b"")
    return text


def comparable(value: Any, kind: str) -> Any:
    """Return a value as the oracle writes it: a number as a text of its own, NaN included, but one for both zeros."""
    if value is None or kind not in ("double", "float"):
        return value
    number = value + 0.0 if value else 0.0
    return repr(struct.unpack("f", struct.pack("f", number))[0] if kind == "float" else number)


def check(home: Path, format: Format, files: Sequence[bytes]) -> None:
    """Read files as one batch, first with its bad records set aside, then all or nothing, and compare with the oracle."""
    home.mkdir()
    folder, expected, broken = Folder(home), list[Record](), []
    for number, content in enumerate(files):
        file = folder.write(f"{number}.{format.name}{format.suffix}", content)
        try:
            expected += format.records(file.name, format.text_in(content))
        except (Broken, UnicodeError):
            broken.append(file.name)
    if any(isinstance(value, str) and "\0" in value for record in expected for value in record.row):
        return  # no state takes it: the whole batch is refused, later
    with pytest.MonkeyPatch.context() as patch:
        for module, name, sizes in TUNING:
            patch.setattr(module, name, format.draw(sizes))
        if not broken:
            found = folder.read(format.source(), flagged=True)
            _check_records(format, found, expected)
            bad = [(row[ORIGIN], row[PAYLOAD], row[REFUSAL]) for row in found if row[REFUSAL]]
            again = folder.replayed(format.source(), *(row for row in found if row[REFUSAL]))
            assert [(row[ORIGIN], row[PAYLOAD], row[REFUSAL]) for row in again] == bad, "what is refused is refused again"
        try:
            found = folder.read(format.source())
        except TidegateError as error:
            names = broken + [record.origin for record in expected if record.verdict > Verdict.COUNTS]
            assert any(name in str(error) for name in names), f"{error}, where {names} may be refused"
        else:
            bad_ones = broken + [record.origin for record in expected if record.verdict is Verdict.REFUSED]
            assert not bad_ones, "they were accepted"
            assert _rows(format, found) == Counter(record.row for record in expected)


def _rows(format: Format, found: Iterable[dict[str, Any]]) -> Counter[tuple]:
    return Counter(tuple(comparable(row[name], kind) for name, kind in format.columns.items()) for row in found)


def _check_records(format: Format, found: list[dict[str, Any]], expected: Iterable[Record]) -> None:
    refused, rows = {row[ORIGIN]: row for row in found if row[REFUSAL]}, Counter[tuple]()
    for record in expected:
        if bad := refused.pop(record.origin, None):
            assert record.verdict > Verdict.COUNTS, f"refused, though right: {bad}"
            payload = bad[PAYLOAD]
            raw = json.loads(payload)["_tidegate_record"] if payload.startswith('{"_tidegate_record"') else payload
            assert record.raw in (None, raw)
        else:
            assert record.verdict < Verdict.REFUSED, f"accepted: {record}"
            rows[record.row] += 1
    assert not refused
    assert _rows(format, (row for row in found if not row[REFUSAL])) == rows
