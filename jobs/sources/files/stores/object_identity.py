"""Identifies an object that was listed: whether it is whole, and how the metadata of a batch names it.

    entry = {"name", "size", "mtime_ns", "sha256", "etag"?, "version"?}

`sha256` is the digest of the ETag, or of the content in a store that has none.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tidegate.jobs.sources.files.content import digest_of
from tidegate.jobs.sources.files.folder_listing import UNCHECKED, check_parquet_name
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, describe
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable

if TYPE_CHECKING:
    from tidegate.jobs.sources.files.source import Files

LONGEST_NAME_BYTES = 1024  # of a key, in every store


def with_identity(source: "Files", path: ObjectPath, listed: ObjectInfo) -> ObjectInfo | None:
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


def entry_of(source: "Files", place: ObjectPath, name: str, info: ObjectInfo) -> dict[str, Any] | None:
    """Return a completed object's entry in the metadata; None if it is gone.

    Raises: SourceUnreadable, SourceUnavailable.
    """
    path = place / name
    if UNCHECKED.search(name):
        raise SourceUnreadable(f"{path} is compressed in a way that cannot be checked. Use gzip or bzip2.")
    if source.format == "parquet":
        check_parquet_name(path)
    if len(name.encode()) > LONGEST_NAME_BYTES:
        raise SourceUnreadable(f"{path} has a name of more than {LONGEST_NAME_BYTES} bytes. Rename it.")
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
