"""Objects of a store, by their place: how it is written, and how planner, tasks and Spark open what is there."""

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from tidegate.jobs.sources.files.stores import ObjectInfo, Pin, buckets, gone, overwritten

READ_BYTES = 4 * 1024 * 1024  # of one request


@dataclass(frozen=True)
class ObjectPath:
    """The place of an object, or of the objects whose keys it begins.

    With an `etag`, only an object that still has it is opened; with a `version`, that version of it.
    """

    store: str
    key: str
    etag: str | None = None
    version: str | None = None

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.store}/{self.key}" if self.key else self.store

    @property
    def name(self) -> str:
        """Return the last part of the key."""
        return self.key.rpartition("/")[2]

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open the object for reading; its bytes are requested as they are read.

        Raises: SourceChanged if it is gone or has another ETag; SourceUnreadable, SourceUnavailable.
        """
        assert mode == "rb"
        try:
            info = describe(self)
        except FileNotFoundError:
            raise gone(str(self)) from None
        if self.etag not in (None, info.etag):
            raise overwritten(str(self))
        return io.BufferedReader(_Content(self, info.size), READ_BYTES)


Place = Path | ObjectPath


def is_url(folder: str) -> bool:
    """Return whether a source's folder is a place in a store, rather than on a disk."""
    return "://" in folder


def without_password(place: str) -> str:
    """Return a place as a message shows it."""
    return re.sub(r"(?<=://)[^/@]*:.*(?=@)", "***", place)  # a password may have a / in it


def check_url(folder: str) -> None:
    """Check the place of a source's objects.

    Raises: ValueError that says what is wrong with it.
    """
    parts = urlsplit(folder)
    if parts.scheme not in buckets.SCHEMES:
        raise ValueError(
            f"{parts.scheme}:// is not read: use one of {', '.join(f'{each}://' for each in buckets.SCHEMES)}, or a folder"
        )
    if ":" in parts.netloc or (parts.username and not parts.scheme.startswith("abfs")):
        raise ValueError("a URL must not have a password or port in it: the ledger shows it. Both come from the environment")
    if not parts.netloc or parts.query or parts.fragment or "//" in parts.path or parts.path.startswith("/."):
        raise ValueError("a place is written s3a://bucket/prefix, without ?, # and //")
    if match := re.search(r"[*\[\]{}]", folder):
        raise ValueError(f"there is a {match[0]} in the place. Write a pattern as glob=..., such as glob='*.parquet'")


def place_of(home: Path, folder: str) -> Place:
    """Return the place of a source's files; a relative folder starts at the project's."""
    if not is_url(folder):
        return home / folder
    parts = urlsplit(folder)
    return ObjectPath(f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"))


def listed(place: ObjectPath, after: str | None = None) -> Iterator[list[ObjectInfo]]:
    """Yield the objects below a place in pages, in the order of their keys; those after the name `after`, if it is given.

    Raises: SourceUnreadable, SourceUnavailable.
    """
    return _store(place.store).pages(place.key, after)


def describe(path: ObjectPath) -> ObjectInfo:
    """Ask the store what an object is at present or, for the path of a version, what that is.

    Raises: FileNotFoundError if there is none; SourceUnreadable, SourceUnavailable.
    """
    return _store(path.store).describe(path.key, path.version)


def hadoop_options(place: ObjectPath) -> dict[str, str]:
    """Return the options with which Spark reads from the same store as this process; credentials are Spark's own."""
    return buckets.hadoop_options(place.store)


def for_spark(place: Place) -> str:
    """Return a place as Spark calls it: Hadoop knows S3 as s3a, and may have a store for paths without a scheme."""
    return url_for_spark(str(place)) if isinstance(place, ObjectPath) else f"file:{place}"


def url_for_spark(url: str) -> str:
    """Return the URL of an object as Spark calls it."""
    return re.sub("^s3://", "s3a://", url)


def for_arrow(place: Place) -> Any:
    """Return what pyarrow opens: a path, or an object's bytes as a file."""
    return place.open() if isinstance(place, ObjectPath) else place


def dataset_of(place: Place) -> tuple[str, str]:
    """Return the namespace and the name of a place for OpenLineage."""
    if not isinstance(place, ObjectPath):
        return "file", str(place)
    return re.sub("^s3a://", "s3://", place.store), place.key or "/"


def libraries_of(folder: str) -> tuple[str, ...]:
    """Return the libraries by which our tasks read from the store of a place; none for a folder on a disk."""
    return ("obstore",) if is_url(folder) else ()


def pinned(path: ObjectPath, file: Mapping[str, Any]) -> ObjectPath:
    """Return where a planned object's content is: in the present object or, if that is another, in the planned version.

    It opens only if the ETag is the planned one.

    Raises: SourceUnreadable, SourceUnavailable.
    """
    present = replace(path, etag=file.get("etag"))
    if "version" not in file:
        return present
    try:
        info = describe(present)
    except FileNotFoundError:
        return replace(present, version=file["version"])
    is_planned = (info.size, info.identity) == (file["size"], file["sha256"])
    return present if is_planned else replace(present, version=file["version"])


def exists(path: Place, file: Mapping[str, Any]) -> bool:
    """Return whether there is a file, or an object, at the place of a planned one; or its planned version.

    Raises: SourceUnreadable, SourceUnavailable.
    """
    if not isinstance(path, ObjectPath):
        return path.exists()
    try:
        describe(pinned(path, file))
    except FileNotFoundError:
        return False
    return True


class _Content(io.RawIOBase):
    """The bytes of one object, as a file."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        super().__init__()
        self._path = path
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readall(self) -> bytes:
        content = bytearray(max(0, self._size - self._at))
        return bytes(content[: self.readinto(content)])

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._size, self._at + len(view))
        if end <= self._at:
            return 0
        try:
            content = _store(self._path.store).read(self._path.key, self._at, end, Pin(self._path.etag, self._path.version))
        except FileNotFoundError:
            raise gone(str(self._path)) from None
        count = len(content)
        view[:count] = memoryview(content)
        self._at += count
        return count


@cache
def _store(url: str) -> buckets.Bucket:
    """Return the client of a store, one per process.

    Raises: SettingsInvalid if the environment has settings that it cannot use.
    """
    return buckets.Bucket(url)
