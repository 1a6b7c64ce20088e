"""Reads a file's content: its digest, its text, decompressed and decoded, and whether another file took its name (Stamp)."""

import bz2
import codecs
import gzip
import hashlib
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from tidegate.jobs.sources.files.stores.object_places import ObjectPath, Place
from tidegate.jobs.spark.library_internals import is_text_encoding
from tidegate.state_store.base.errors import MalformedRecord, SourceUnreadable

READ_BLOCK_BYTES = 1 << 20
COMPRESSED = re.compile(r"\.(gz|bz2)$", re.IGNORECASE)
UTF8 = "utf-8"
MARKED = ("utf-16", "utf-32")  # Python's decoders of these remove the byte order mark
BYTE_ORDER_MARK = "\ufeff".encode()


def open_file(path: Place, within: Place | None = None) -> IO[bytes]:
    """Open a regular file for reading: no pipe, which would block for ever, no folder, no device; or an object.

    `within` is the folder that the file itself must lie in, after following all links. The open file is checked, not its
    name, because another file may take the name between a check and the opening.

    Raises: SourceUnreadable; OSError if it cannot be opened.
    """
    if isinstance(path, ObjectPath):
        return path.open()
    assert not isinstance(within, ObjectPath)
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_opened(number, path, within)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def _check_opened(number: int, path: Path, within: Path | None) -> None:
    if within is not None and not is_below(real := _place_of(number, path), os.path.realpath(within)):
        raise SourceUnreadable(
            f"{path} leads out of {within}: it is really {real}. Put the file itself there, or declare follow_links=True "
            "if everyone who may write into that folder may also choose what else is read."
        )
    if not stat.S_ISREG(os.fstat(number).st_mode):
        raise SourceUnreadable(f"{path} is no file. Move it away, or let the glob leave it out (**/* reads folders too).")


def _place_of(number: int, path: Path) -> str:
    """Return the real path of an open file; on systems other than Linux, the real path of its name."""
    try:
        return str(Path(f"/proc/self/fd/{number}").readlink())
    except FileNotFoundError:
        return os.path.realpath(path)


def is_below(path: str, folder: str) -> bool:
    """Return whether a path without links is the folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


class Stamp(NamedTuple):
    """What shows without reading a file that it may have changed: another file, or one written to, has another stamp.

    Copying with the same time (cp -p, rsync -t) or moving another file to the name shows in the inode: its number, when it last
    changed, in nanoseconds, and its links, if it has several.
    """

    size: int
    mtime_ns: int
    inode: str

    def is_of(self, file: Mapping[str, Any]) -> bool:
        """Return whether a file in the metadata of a batch had this stamp when it was planned."""
        return self == (file["size"], file["mtime_ns"], file.get("inode"))


def stamp_of(status: os.stat_result) -> Stamp:
    """Return a file's stamp."""
    links = f".{status.st_nlink}" if status.st_nlink > 1 else ""
    return Stamp(status.st_size, status.st_mtime_ns, f"{status.st_ino}.{status.st_ctime_ns}{links}")


def has_links(inode: str | None) -> bool:
    """Return whether a file had other names, hard links, when it got this stamp."""
    return (inode or "").count(".") > 1


def digest_of(content: IO[bytes]) -> str:
    """Return the SHA-256 of an open file's bytes in hex."""
    return hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]


def grown_from(path: Path, size: int, sha256: str, *, within: Path | None = None) -> bool:
    """Return whether a file has grown from content of this size and digest."""
    digest, remaining = hashlib.sha256(), size
    try:
        with open_file(path, within) as content:
            while remaining and (block := content.read(min(READ_BLOCK_BYTES, remaining))):
                digest.update(block)
                remaining -= len(block)
            return not remaining and digest.hexdigest() == sha256 and bool(content.read(1))
    except OSError:
        return False  # the answer only adds detail to a message about a file that is refused anyway


def codec_of(encoding: str) -> str:
    """Return Python's name of an encoding.

    Raises: LookupError if there is none of this name that turns bytes into text.
    """
    codec = codecs.lookup(encoding)
    if not is_text_encoding(codec):
        raise LookupError(encoding)
    # `text_of` removes the byte order mark; Python's decoder for utf-8-sig loses an incomplete mark.
    return UTF8 if codec.name == "utf-8-sig" else codec.name


def text_of(
    path: Place,
    encoding: str = UTF8,
    start: int = 0,
    end: int | None = None,
    *,
    within: Place | None = None,
    line_end: bytes | None = None,
) -> Iterator[bytes]:
    """Yield a file's text in blocks of UTF-8, decompressed by its ending, without the byte order mark.

    `start` and `end` select bytes of a file that is neither compressed nor in another encoding, `within` is the folder it
    must lie in. Lines end with `line_end`; None stands for all usual ones.

    Raises: MalformedRecord with the line for bytes that are no text in this encoding; SourceUnreadable for a file that cannot
    be read, or decompressed, to its end.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    lines, is_first = _Lines(line_end), start == 0
    mark = b"" if encoding in MARKED else BYTE_ORDER_MARK
    try:
        with open_file(path, within) as content:
            for block in _blocks(path, content, start, end):
                decoded = decoder.decode(block)
                # Bytes before the first character, such as a part of the mark, are no text yet.
                text = block if encoding == UTF8 and not is_first else decoded.encode()
                if is_first and decoded:
                    is_first = False
                    text = text.removeprefix(mark)
                    if encoding == UTF8:
                        text += decoder.getstate()[0]  # the start of a character that the next block completes
                lines.add(text)
                yield text
            yield decoder.decode(b"", final=True).encode()
    except UnicodeDecodeError as error:
        good = error.object[: error.start]
        lines.add(good if encoding == UTF8 else good.decode(encoding, "replace").encode())
        name = "UTF-8" if encoding == UTF8 else encoding
        raise MalformedRecord(f"{path}, line {lines.number}: byte 0x{error.object[error.start]:02x} is not {name}.") from None
    except UnicodeError as error:
        raise MalformedRecord(f"{path}, line {lines.number}: it is not {encoding}: {error}.") from None
    except (EOFError, OSError, zlib.error) as error:
        raise SourceUnreadable(f"{path} cannot be read to its end: {error}.") from error


class _Lines:
    """Counts the lines of a text that comes in blocks; `number` is that of the line it has reached."""

    def __init__(self, end: bytes | None) -> None:
        self._end, self._before, self.number = end, b"", 1

    def add(self, text: bytes) -> None:
        """Count the line ends in the next block, of which one may have begun in the block before."""
        joined = self._before + text
        self.number += self._ends_in(joined) - self._ends_in(self._before)
        self._before = joined[-max(1, len(self._end or b"") - 1) :]

    def _ends_in(self, text: bytes) -> int:
        if self._end:
            return text.count(self._end)
        ends = text.count(b"\n")
        return ends + text.count(b"\r") - text.count(b"\r\n") if b"\r" in text else ends  # to look is quicker than to count


def _blocks(path: Place, content: IO[bytes], start: int, end: int | None) -> Iterator[bytes]:
    kind = COMPRESSED.search(path.name)
    if kind and kind[1].lower() == "gz":
        with gzip.open(content) as unpacked:  # several members may follow one another; zeros after the last are no data
            yield from iter(partial(unpacked.read, READ_BLOCK_BYTES), b"")
    elif kind:
        yield from _unpacked_bz2(content)
    else:
        content.seek(start)
        remaining = float("inf") if end is None else end - start
        while remaining > 0 and (block := content.read(int(min(READ_BLOCK_BYTES, remaining)))):
            remaining -= len(block)
            yield block


def _unpacked_bz2(content: IO[bytes]) -> Iterator[bytes]:
    """Unpack all streams of a file, because Python's own reader takes a damaged second stream for the end of the file."""
    engine = bz2.BZ2Decompressor()
    is_started = False
    while True:
        packed = b""
        if engine.eof:
            packed = engine.unused_data or content.read(READ_BLOCK_BYTES)
            if not packed:
                return
            engine = bz2.BZ2Decompressor()
        elif engine.needs_input:
            packed = content.read(READ_BLOCK_BYTES)
            if not packed:
                if is_started:
                    raise EOFError("the file ends within compressed data")
                return
        is_started = True
        if unpacked := engine.decompress(packed, READ_BLOCK_BYTES):
            yield unpacked
