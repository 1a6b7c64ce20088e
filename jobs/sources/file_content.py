"""What is in a file: its digest, its lines, whether it is text. Compressed files are looked into."""

import bz2
import codecs
import csv
import gzip
import hashlib
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from state_store.errors import MalformedRecord, SourceUnreadable

READ_BLOCK_BYTES = 1 << 20
# By the ending, as Hadoop, and so Spark, knows them.
OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def check_utf8(path: Path) -> None:
    """Refuse bytes that are not UTF-8, which Spark would replace silently, and compressed files that are not whole.

    Raises: MalformedRecord with the line, SourceUnreadable.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = 1
    try:
        with _opened(path) as content:
            for block in iter(partial(content.read, READ_BLOCK_BYTES), b""):
                decoder.decode(block)
                lines += block.count(b"\n")
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        line = lines + error.object[: error.start].count(b"\n")
        raise MalformedRecord(f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8.") from None
    except (EOFError, OSError) as error:
        raise SourceUnreadable(f"{path} cannot be read to its end: {error}.") from error


def csv_header(path: Path, separator: str) -> list[str] | None:
    """Return the names in a CSV file's first record, None if there is none."""
    with _opened(path) as content:
        return next(csv.reader(io.TextIOWrapper(content, "utf-8-sig"), delimiter=separator), None)


def line_of_value(path: Path, separator: str, position: int, value: str) -> int | None:
    """Return the line on which a CSV file's first record ends that has this value in this place."""
    with _opened(path) as content:
        records = csv.reader(io.TextIOWrapper(content, "utf-8-sig", newline=""), delimiter=separator)
        return next((records.line_num for record in records if record[position : position + 1] == [value]), None)


def line_of_digest(path: Path, digest: str, *, skip: int) -> int | None:
    """Return the number of the first line with this SHA-256, as Spark splits lines; the first `skip` are not looked at."""
    return next((number for number, found in _line_digests(path) if number > skip and found == digest), None)


def _line_digests(path: Path) -> Iterator[tuple[int, str]]:
    with _opened(path) as content:
        for number, line in enumerate(io.TextIOWrapper(content, "utf-8-sig"), start=1):
            yield number, hashlib.sha256(line.rstrip("\n").encode()).hexdigest()


def _opened(path: Path) -> IO[bytes]:
    opened: IO[bytes] = OPENERS.get(path.suffix, open)(path, "rb")
    return opened
