"""Shared parts of the text formats: encodings, compression, damage."""

import bz2
import codecs
import gzip
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

END = re.compile(r"\r\n|\r|\n")
ENCODINGS = ["utf-8"] * 6 + ["latin-1", "utf-16", "utf-16-le", "utf-32", "cp1252", "shift_jis", "utf-8-sig"]
SUFFIXES = ["", "", "", "", ".gz", ".bz2"]


MARKS = {"utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)}


class Damaged(Exception):
    """The file does not decompress to its end."""


@dataclass(frozen=True)
class File:
    """Encoding and compression of the files of a round."""

    encoding: str = "utf-8"
    suffix: str = ""

    @classmethod
    def drawn(cls, draw: random.Random) -> "File":
        return cls(draw.choice(ENCODINGS), draw.choice(SUFFIXES))

    @property
    def options(self) -> dict[str, str]:
        return {} if self.encoding == "utf-8" else {"encoding": self.encoding}

    def packed(self, draw: random.Random, text: str) -> bytes:
        """Return a text as the bytes of a file, which are sometimes damaged."""
        content = text.encode(self.encoding, "replace")
        if self.encoding == "utf-8" and draw.random() < 0.1:
            content = b"\xef\xbb\xbf" + content
        if draw.random() < 0.15:
            content = damaged(draw, content)
        if self.suffix:
            content = self._compressed(draw, content)
            if draw.random() < 0.1:
                content = damaged(draw, content)
        return content

    def text_in(self, content: bytes) -> str:
        """Return a file's text without its byte order mark.

        Raises: Damaged, UnicodeError.
        """
        found = unpacked(content, self.suffix)
        if found and self.encoding in MARKS and not found.startswith(MARKS[self.encoding]):
            raise Damaged("no mark tells the order of its bytes")
        text = found.decode(self.encoding)
        return text if self.encoding in ("utf-16", "utf-32", "utf-8-sig") else text.removeprefix("\ufeff")

    def _compressed(self, draw: random.Random, content: bytes) -> bytes:
        cuts = sorted(draw.randint(0, len(content)) for _ in range(draw.choice([0, 0, 1, 3])))
        parts = [content[start:end] for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True)]
        compress = gzip.compress if self.suffix == ".gz" else bz2.compress
        packed = b"".join(compress(part) for part in parts)
        if self.suffix == ".gz" and draw.random() < 0.2:
            packed += bytes(draw.choice([1, 7, 512, 1000]))
        return packed


def tuning(draw: random.Random) -> dict[str, int]:
    """Draw the reader's block sizes, and whether it reads in the driver or in Spark's tasks."""
    return {
        "block_bytes": draw.choice([1, 2, 3, 7, 64, 1 << 20]),
        "piece_bytes": draw.choice([50, 1000, 1 << 24, 1 << 24, 1 << 24]),
        "here_bytes": draw.choice([0, 1 << 18, 1 << 18]),
    }


def text_ends(draw: random.Random) -> list[str]:
    return draw.choice([["\n"], ["\n"], ["\r\n"], ["\r"]])


def damaged(draw: random.Random, content: bytes) -> bytes:
    """Return the bytes with a few of them changed, lost, repeated or added."""
    found = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 4])):
        place = draw.randint(0, len(found))
        end = min(len(found), place + draw.choice([1, 1, 2, 10]))
        damage = draw.randint(0, 4)
        if damage == 0:
            found[place:place] = draw.choice(
                [b'"', b"\n", b"\r", b",", b"\\", b"\xff", b"\x00", b"\xc3", b" ", b"{", b"}", b"]"]
            )
        elif damage == 1:
            del found[place:end]
        elif damage == 2:
            found[place:place] = found[place:end]
        elif damage == 3:
            del found[place:]
        elif place < len(found):
            found[place] ^= 1 << draw.randint(0, 7)
    return bytes(found)


def unpacked(content: bytes, suffix: str) -> bytes:
    """Return the bytes in a compressed file.

    Raises: Damaged.
    """
    try:
        if suffix == ".gz":
            return _read_members(content, lambda: zlib.decompressobj(31), b"\0")
        return _read_members(content, bz2.BZ2Decompressor, b"") if suffix == ".bz2" else content
    except (zlib.error, OSError, EOFError, ValueError) as error:
        raise Damaged(str(error)) from None


def _read_members(content: bytes, engine_of: Callable[[], Any], padding: bytes) -> bytes:
    text = b""
    while content:
        engine = engine_of()
        text += engine.decompress(content)
        if not engine.eof:
            raise Damaged("it ends within compressed data")
        content = engine.unused_data.lstrip(padding)
    return text
