"""What planners and tasks ask of a store: which objects lie below a folder, what one of them is, and its bytes.

A store is a module here: `buckets` (S3, Google Cloud Storage, Azure) and `hdfs`. Settings and credentials are what the
store's own tools read from the environment (docs/storage.md); none is kept in a declaration, in the ledger or in a plan.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, Protocol

from tidegate.state_store.base.errors import SourceChanged

PAGE = 1000  # how many objects of a listing are in memory, and how many S3 and HDFS return at once


@dataclass(frozen=True)
class ObjectInfo:
    """An object as its store describes it. Without an ETag, only its content identifies it.

    `etag` is what the store tells of the content: an ETag, or the checksum of a file in HDFS. `version` is another if the
    object was replaced by one of the same content; a bucket without versions tells none, and neither does a listing.
    `is_open` says that a writer has not closed it.
    """

    key: str
    size: int
    mtime_ns: int
    etag: str | None
    version: str | None
    is_open: bool = False

    @property
    def identity(self) -> str | None:
        """Return the SHA-256 of what identifies the content, in hex: of the ETag; None if there is none."""
        return None if self.etag is None else sha256(f"etag {self.etag}".encode()).hexdigest()


class Pin(NamedTuple):
    """What has to be read of an object: content with this ETag, and this version, even if it was replaced since."""

    etag: str | None = None
    version: str | None = None


class Store(Protocol):
    """A bucket or a file system.

    Each method raises SourceUnreadable if the store refuses this process, and SourceUnavailable if it does not answer as it
    should.
    """

    def pages(self, folder: str, after: str | None, enters: Callable[[str], bool]) -> Iterator[list[ObjectInfo]]:
        """Yield the objects below a folder ("" is the whole store) in pages of at most PAGE, in the order of their keys.

        With `after`, a name below the folder, only the objects with names after it. `enters` tells of a folder, by its name
        below the given one, whether its objects are wanted: a store that lists folder by folder then leaves out the others. A
        listing need not tell ETags.

        Raises: SourceUnreadable also for a store or folder that does not exist.
        """

    def describe(self, key: str, version: str | None = None) -> ObjectInfo:
        """Return what an object is at present, or what a version of it is; with its ETag, if the store has ETags.

        Raises: FileNotFoundError.
        """

    def read(self, key: str, start: int, end: int, pin: Pin) -> bytes:
        """Return the bytes of an object from `start` to before `end`.

        Raises: FileNotFoundError; SourceChanged if the object has another ETag than the given one, where a store can compare
        it while it reads, or fewer bytes.
        """


def gone(path: str) -> SourceChanged:
    """Return the error for a planned object that is not there any more."""
    return SourceChanged(f"{path} is gone since its batch was planned. Put it back, unchanged.")


def overwritten(path: str) -> SourceChanged:
    """Return the error for an object whose content is not the planned one any more."""
    return SourceChanged(
        f"{path} was overwritten since its batch was planned. Put the planned content back, and what is new into an object of "
        "another name."
    )
