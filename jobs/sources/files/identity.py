"""Identifies a file or an object that was listed: whether it is whole, and how the metadata of a batch names it.

    entry = {"name", "size", "mtime_ns", "sha256"}, and "inode" of a file, "etag" and "version" of an object, if it has them

`sha256` is the digest of the content or, of an object with an ETag, of that.
"""

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidegate.jobs.sources import OF_ANOTHER_SOURCE
from tidegate.jobs.sources.files.content import digest_of, open_file, stamp_of
from tidegate.jobs.sources.files.listing import is_young, printable
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, Place, describe
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata

# Python's surrogates for bytes of a name that are not UTF-8.
NOT_UTF8 = re.compile("[\udc80-\udcff]")
LONGEST_NAME_BYTES = 2000  # certain to fit into the ledger's index
# Endings of what is not unpacked here, and would be read as it lies there.
PACKED = re.compile(r"\.(zstd?|lz4|lzo|snappy|deflate|xz|br|z|zip|7z|tar|tgz|tar\.(gz|bz2))$", re.IGNORECASE)


def with_identity(source: Files, path: ObjectPath, listed: ObjectInfo) -> ObjectInfo | None:
    """Return an object with its ETag and version, which a listing may lack; None if it is gone, or no object at all.

    Where a marker completes its folder, the object is that from after the marker, which may be newer than the listing.

    Raises: SourceUnreadable, SourceUnavailable.
    """
    if listed.size and listed.identity is not None and not source.versions and not source.marker:
        return listed
    try:  # a listing may also show an empty object that stands for a folder, under the folder's name
        return replace(describe(path), key=listed.key)
    except FileNotFoundError:
        return None


def entry_of(source: Files, place: ObjectPath, name: str, info: ObjectInfo) -> dict[str, Any] | None:
    """Return a completed object's entry in the metadata; None if it is gone.

    Raises: SourceUnreadable, SourceUnavailable.
    """
    path = place / name
    _check_name(source, path)
    entry = {"name": name, "size": info.size, "mtime_ns": info.mtime_ns}
    if info.identity is None:
        try:
            with path.open() as content:
                return {**entry, "sha256": digest_of(content)}
        except SourceChanged:
            return None
    entry = {**entry, "sha256": info.identity, "etag": info.etag}
    if not source.versions:
        return entry
    if info.version is None:
        raise SourceUnreadable(
            f"{path} has no version: the bucket does not keep them. Let its administrator turn versioning on, or leave "
            "versions out of Files(...)."
        )
    return {**entry, "version": info.version}


def file_identity(source: Files, folder: Path, name: str, min_age_seconds: int) -> dict[str, Any] | None:
    """Return the identity of a file in a folder; None while it may still be written.

    Raises: SourceUnreadable if it is no file, lies outside the folder, or cannot be read.
    """
    path = folder / name
    if NOT_UTF8.search(name):
        raise SourceUnreadable(f"{printable(path)}: the name is not in UTF-8, so no ledger can keep it. Rename the file.")
    if len(name.encode()) > LONGEST_NAME_BYTES:
        raise SourceUnreadable(f"{path} has a name of more than {LONGEST_NAME_BYTES} bytes. Rename it.")
    _check_name(source, path)
    try:
        with open_file(path, None if source.follow_links else folder) as content:
            before = os.fstat(content.fileno())
            digest = digest_of(content)
        after = path.stat()
    except OSError as error:
        raise SourceUnreadable(f"{path} cannot be read: {error.strerror}. Make it readable, or move it away.") from error
    if stamp_of(before) != stamp_of(after) or is_young(after.st_mtime_ns, min_age_seconds):
        return None
    return {"name": name, **stamp_of(after)._asdict(), "sha256": digest}


def _check_name(source: Files, path: Place) -> None:
    """Refuse a file that could never be read, before a batch is planned with it."""
    if PACKED.search(path.name):
        raise SourceUnreadable(f"{path} is packed in a way that is not read. Use gzip or bzip2, of one file.")
    has_colon = ":" in (path.key if isinstance(path, ObjectPath) else str(path))
    if source.format == "parquet" and has_colon and re.search(r"[\[\]{}*?\\]", str(path)):
        raise SourceUnreadable(
            f"{path}: Spark cannot open a Parquet file with a colon and one of []{{}}*?\\ in its path. Rename it."
        )


def identity_of(source: Files, folder: Place, name: str) -> dict[str, Any] | None:
    """Return the identity of the file, or object, that has this name now; None if it is being written.

    Raises: FileNotFoundError; SourceUnreadable, SourceUnavailable.
    """
    if isinstance(folder, ObjectPath):
        return entry_of(source, folder, name, describe(folder / name))
    with suppress(PermissionError):  # which says more when the file is opened
        (folder / name).stat()
    return file_identity(source, folder, name, 0)


def planned_files(metadata: SourceMetadata, listed_as: str) -> list[dict[str, Any]]:
    """Return the entries of a batch's files, which a folder and a table list under different names.

    Raises: SourceChanged if another kind of source has planned the batch.
    """
    if listed_as not in metadata:
        raise SourceChanged(OF_ANOTHER_SOURCE)
    entries: list[dict[str, Any]] = metadata[listed_as]
    return entries
