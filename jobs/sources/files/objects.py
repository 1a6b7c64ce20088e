"""Objects of a store (S3, Google Cloud Storage, Azure): where they are, what identifies them, and their bytes.

Settings and credentials of the store are what its own tools read from the environment (docs/storage.md); none is kept in a
declaration, in the ledger or in a plan. Spark's tasks open the store again by its URL.
"""

import io
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from state_store.errors import SettingsInvalid, SourceChanged, SourceUnavailable, SourceUnreadable, TidegateError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

SCHEMES = ("s3a", "s3", "gs", "abfss", "abfs")
PAGE = 1000  # how many objects of a listing are in memory, and how many S3 returns at once
READ_BYTES = 4 * 1024 * 1024  # of one request
# A plan or a task reports a store that is away after about this time; the pipeline's retries wait longer.
RETRY = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
TIMEOUTS = {"connect_timeout": "5s", "timeout": "60s"}
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_STATUS = re.compile(r"status code: (\d{3})")
_QUERY = re.compile(r"\?[^\s\"')]*")  # of a URL: Azure's may be signed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObjectPath:
    """The place of an object, or of the objects whose keys it begins.

    With an `etag`, only an object that still has it is opened.
    """

    store: str
    key: str
    etag: str | None = None

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.store}/{self.key}" if self.key else self.store

    @property
    def name(self) -> str:
        """Return the last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Return the ending of the name, as `Path.suffix` does."""
        return Path(self.name).suffix

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open the object for reading; its bytes are requested as they are read.

        Raises: SourceChanged if it is gone or has another ETag; SourceUnreadable, SourceUnavailable.
        """
        assert mode == "rb"
        try:
            found = look(self)
        except FileNotFoundError:
            raise gone(self) from None
        if self.etag not in (None, found.etag):
            raise overwritten(self)
        return io.BufferedReader(_Content(self, found.size), READ_BYTES)


Place = Path | ObjectPath


@dataclass(frozen=True)
class FoundObject:
    """An object as its store describes it. Without an ETag, only its content identifies it."""

    key: str
    size: int
    mtime_ns: int
    etag: str | None
    version: str | None

    @property
    def identity(self) -> str | None:
        """Return the SHA-256 of what identifies the content, in hex: of the ETag; None if there is none."""
        return None if self.etag is None else sha256(f"etag {self.etag}".encode()).hexdigest()


def is_url(folder: str) -> bool:
    """Return whether a source's folder is a place in a store, rather than on a disk."""
    return "://" in folder


def check_url(folder: str) -> None:
    """Check the place of a source's objects.

    Raises: ValueError that says what is wrong with it.
    """
    parts = urlsplit(folder)
    if parts.scheme not in SCHEMES:
        raise ValueError(
            f"{parts.scheme}:// is not read: use one of {', '.join(f'{each}://' for each in SCHEMES)}, or a folder"
        )
    if parts.password or (parts.username and not parts.scheme.startswith("abfs")):
        raise ValueError("a URL must not have a password in it: the ledger shows it. Credentials come from the environment")
    if not parts.netloc or parts.query or parts.fragment or "//" in parts.path or parts.path.startswith("/."):
        raise ValueError("a place is written s3a://bucket/prefix, without ?, # and //")
    if found := re.search(r"[*\[\]{}]", folder):
        raise ValueError(f"there is a {found[0]} in the place. Write a pattern as glob=..., such as glob='*.parquet'")


def place_of(home: Path, folder: str) -> Place:
    """Return the place of a source's files; a relative folder starts at the project's."""
    if not is_url(folder):
        return home / folder
    parts = urlsplit(folder)
    return ObjectPath(f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"))


def listed(place: ObjectPath, after: str | None = None) -> Iterator[list[FoundObject]]:
    """Yield the objects below a place in pages, in the order of their keys; those after the name `after`, if it is given.

    Raises: SourceUnreadable, SourceUnavailable; SourceUnreadable for a store that lists in another order.
    """
    import obstore  # noqa: PLC0415 - declaring a pipeline must not load it

    last = ""
    offset = None if after is None else (place / after).key
    with _explained(place):
        pages = obstore.list(_store(place.store), place.key or None, offset=offset, chunk_size=PAGE)
        for page in pages:
            found = [_described(each) for each in page]
            keys = [last, *(each.key for each in found)]
            if any(one.encode() > other.encode() for one, other in pairwise(keys)):
                raise SourceUnreadable(
                    f"{place.store} does not list its objects in the order of their names, which planning relies on. Use a "
                    "bucket that does (an S3 directory bucket does not)."
                )
            last = keys[-1]
            yield found


def look(path: ObjectPath) -> FoundObject:
    """Ask the store what an object is at present.

    Raises: FileNotFoundError if there is none; SourceUnreadable, SourceUnavailable.
    """
    import obstore  # noqa: PLC0415

    with _explained(path, is_object=True):
        return _described(obstore.head(_store(path.store), path.key))


def hadoop_options(place: ObjectPath) -> dict[str, str]:
    """Return the options with which Spark reads from the same endpoint as this process; credentials are Spark's own."""
    endpoint = _from_environment(ENDPOINTS)
    if not place.store.startswith("s3") or endpoint is None:
        return {}
    return {
        "fs.s3a.endpoint": endpoint,
        "fs.s3a.endpoint.region": _from_environment(REGIONS) or "us-east-1",
        "fs.s3a.path.style.access": "true",
        "fs.s3a.connection.ssl.enabled": str(endpoint.startswith("https:")).lower(),
    }


def for_spark(place: Place) -> str:
    """Return a place as Spark calls it: Hadoop knows S3 as s3a."""
    return re.sub("^s3://", "s3a://", str(place))


def for_arrow(place: Place) -> Any:
    """Return what pyarrow opens: a path, or an object's bytes as a file."""
    return place.open() if isinstance(place, ObjectPath) else place


def dataset_of(place: ObjectPath) -> tuple[str, str]:
    """Return the namespace and the name of a place for OpenLineage."""
    return re.sub("^s3a://", "s3://", place.store), place.key or "/"


def pinned(path: ObjectPath, file: Mapping[str, Any]) -> ObjectPath:
    """Return the path of a planned object, which opens only if the object still has the planned ETag."""
    return replace(path, etag=file.get("etag"))


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
        import obstore  # noqa: PLC0415

        view = memoryview(buffer).cast("B")
        end = min(self._size, self._at + len(view))
        if end <= self._at:
            return 0
        options: Any = {"range": (self._at, end)}
        if self._path.etag is not None:
            options["if_match"] = f'"{self._path.etag}"'
        try:
            with _explained(self._path, is_object=True):
                found = obstore.get(_store(self._path.store), self._path.key, options=options).bytes()
        except FileNotFoundError:
            raise gone(self._path) from None
        count = len(found)
        view[:count] = memoryview(found)
        self._at += count
        return count


def gone(path: ObjectPath) -> SourceChanged:
    """Return the error for a planned object that is not there any more."""
    return SourceChanged(f"{path} is gone since its batch was planned. Put it back, unchanged.")


def overwritten(path: ObjectPath) -> SourceChanged:
    """Return the error for an object whose content is not the planned one any more."""
    return SourceChanged(
        f"{path} was overwritten since its batch was planned. Put the planned content back, and what is new into an object of "
        "another name."
    )


@contextmanager
def _explained(place: ObjectPath, *, is_object: bool = False) -> Iterator[None]:
    """Turn the store's errors into ours, with advice; a missing object stays FileNotFoundError."""
    from obstore import exceptions  # noqa: PLC0415

    try:
        yield
    except FileNotFoundError:
        if is_object:
            raise
        raise _missing(place) from None
    except exceptions.PreconditionError:
        raise overwritten(place) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise _refused(place, error) from error
    except exceptions.BaseError as error:  # of a listing, all errors are of this class
        status = _STATUS.search(str(error))
        if status and status[1] == "404":
            raise _missing(place) from None
        raise (_refused if status and status[1] in ("401", "403") else _failed)(place, error) from error


def _missing(place: ObjectPath) -> TidegateError:
    return SourceUnreadable(
        f"{place.store} does not exist for the store that was asked{_endpoint()}. Create it, or correct the pipeline's "
        "Files(...) or the endpoint."
    )


def _refused(place: ObjectPath, error: Exception) -> TidegateError:
    return SourceUnreadable(
        f"{place} may not be read: the store{_endpoint()} refuses the credentials of this process ({_first_line(error)}). Let "
        "its administrator allow them to list the bucket and to read its objects (S3: s3:ListBucket, s3:GetObject), or set "
        "other ones in the environment of planner and Spark (docs/storage.md)."
    )


def _failed(place: ObjectPath, error: Exception) -> TidegateError:
    text = str(error)
    if "169.254." in text:  # the address where a machine's role would be
        return SourceUnreadable(
            f"{place} may not be read: this process has no credentials for the store. Set them in the environment, such as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role (docs/storage.md)."
        )
    return SourceUnavailable(
        f"{place}: the store{_endpoint()} does not answer as it should: {_first_line(error)}. Check the endpoint, the region "
        "and the network; the batch is tried again."
    )


def _endpoint() -> str:
    endpoint = _from_environment(ENDPOINTS)
    return "" if endpoint is None else f" ({endpoint})"


def _first_line(error: Exception) -> str:
    """Return an error in one line, without the queries of URLs."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return _QUERY.sub("", text)[:300].rstrip(".")


def _from_environment(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _described(meta: "ObjectMeta") -> FoundObject:
    etag = meta["e_tag"]
    # A weak ETag may stay the same when bytes change.
    strong = None if not etag or etag.startswith("W/") else etag.strip('"')
    moment = meta["last_modified"]
    seconds = int(moment.timestamp())
    return FoundObject(meta["path"], meta["size"], seconds * 10**9 + moment.microsecond * 1000, strong, meta["version"])


@cache
def _store(url: str) -> "ObjectStore":
    """Return the client of a store, one per process.

    Raises: SettingsInvalid if the environment has settings that it cannot use.
    """
    from obstore import exceptions  # noqa: PLC0415
    from obstore.store import from_url  # noqa: PLC0415

    options: dict[str, Any] = dict(TIMEOUTS)
    named: dict[str, Any] = {}
    if url.startswith("s3"):
        if endpoint := _from_environment(ENDPOINTS):
            named["endpoint"] = endpoint
            options["allow_http"] = endpoint.startswith("http://")
        if not os.environ.get("AWS_ACCESS_KEY_ID") and (profile := os.environ.get("AWS_PROFILE")):
            named["credential_provider"] = _credentials_of(profile)
    try:
        return from_url(url, client_options=options, retry_config=RETRY, **named)  # type: ignore[call-overload,no-any-return]
    except (exceptions.BaseError, ValueError) as error:
        raise SettingsInvalid(
            f"{url} cannot be opened: {_first_line(error)}. Correct the environment (docs/storage.md)."
        ) from error


def _credentials_of(profile: str) -> Any:
    """Return a provider that asks boto3 for a profile's credentials: from files, single sign-on, roles.

    Raises: SettingsInvalid without boto3.
    """
    try:
        from boto3 import Session  # noqa: PLC0415
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415
    except ImportError as error:
        raise SettingsInvalid(
            f"AWS_PROFILE={profile} names a profile, which boto3 reads, and boto3 is not installed. Run: pip install boto3; or "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        ) from error
    return Boto3CredentialProvider(Session(profile_name=profile))
