"""What planners and tasks know of an object in a store.

Module `buckets` asks the stores: S3, Google Cloud Storage, Azure. Settings and credentials are what the store's own tools
read from the environment (docs/storage.md); none is kept in a declaration, in the ledger or in a plan.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from tidegate.state_store.base.errors import SourceChanged

PAGE = 1000  # how many objects of a listing are in memory, and how many S3 returns at once


@dataclass(frozen=True)
class ObjectInfo:
    """An object as its store describes it. Without an ETag, only its content identifies it.

    `version` is another if the object was replaced by one of the same content; a bucket without versions tells none, and
    neither does a listing.
    """

    key: str
    size: int
    mtime_ns: int
    etag: str | None
    version: str | None

    @property
    def identity(self) -> str | None:
        """Return the SHA-256 of what identifies the content, in hex: of the ETag; None if there is none."""
        return None if self.etag is None else sha256(f"etag {self.etag}".encode()).hexdigest()


class Pin(NamedTuple):
    """What has to be read of an object: content with this ETag, and this version, even if it was replaced since."""

    etag: str | None = None
    version: str | None = None


def gone(path: str) -> SourceChanged:
    """Return the error for a planned object that is not there any more."""
    return SourceChanged(f"{path} is gone since its batch was planned. Put it back, unchanged.")


def overwritten(path: str) -> SourceChanged:
    """Return the error for an object whose content is not the planned one any more."""
    return SourceChanged(
        f"{path} was overwritten since its batch was planned. Put the planned content back, and what is new into an object of "
        "another name."
    )
