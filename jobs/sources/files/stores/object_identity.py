"""Identifies an object that was listed: whether it is whole, and how the metadata of a batch names it.

    entry = {"name", "size", "mtime_ns", "sha256", "etag"?, "version"?}

`sha256` is the digest of the ETag, or of the content in a store that has none.
"""

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidegate.jobs.sources.files.content import digest_of
from tidegate.jobs.sources.files.folder_listing import UNCHECKED, check_parquet_name, identify
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, Place, describe
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable


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


def is_too_young(info: ObjectInfo, min_age_seconds: int) -> bool:
    """Return whether an object changed less than this age ago, so that it may still be written."""
    return time.time() - info.mtime_ns / 10**9 < min_age_seconds


def entry_of(source: Files, place: ObjectPath, name: str, info: ObjectInfo) -> dict[str, Any] | None:
    """Return a completed object's entry in the metadata; None if it is gone.

    Raises: SourceUnreadable, SourceUnavailable.
    """
    path = place / name
    if UNCHECKED.search(name):
        raise SourceUnreadable(f"{path} is compressed in a way that cannot be checked. Use gzip or bzip2.")
    if source.format == "parquet":
        check_parquet_name(path)
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
    """Return the identity of a file in a folder; None while it is still being written.

    Raises: SourceUnreadable if it is no file, lies outside the folder, or cannot be read.
    """
    if source.format == "parquet":
        check_parquet_name(folder / name)
    return identify(folder, name, min_age_seconds, follow_links=source.follow_links)


def identity_of(source: Files, folder: Place, name: str) -> dict[str, Any] | None:
    """Return the identity of the file, or object, that has this name now; None if it is being written.

    Raises: FileNotFoundError; SourceUnreadable, SourceUnavailable.
    """
    if isinstance(folder, ObjectPath):
        return entry_of(source, folder, name, describe(folder / name))
    with suppress(PermissionError):  # which says more when the file is opened
        (folder / name).stat()
    return file_identity(source, folder, name, 0)
