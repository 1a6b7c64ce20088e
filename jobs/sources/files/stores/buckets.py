"""Buckets of S3, Google Cloud Storage and Azure, reached by obstore. Spark's tasks open them again by their URL."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tidegate.jobs.sources.files.stores import PAGE, ObjectInfo, Pin, overwritten
from tidegate.state_store.base.errors import SettingsInvalid, SourceUnavailable, SourceUnreadable, TidegateError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

SCHEMES = ("s3a", "s3", "gs", "abfss", "abfs")
# A plan or a task reports a store that is away after about this time; the pipeline's retries wait longer.
RETRY = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
TIMEOUTS = {"connect_timeout": "5s", "timeout": "60s"}
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_STATUS = re.compile(r"status code: (\d{3})")
_NO_NAME = "object with invalid path: "  # in obstore's error for a listing
_QUERY = re.compile(r"\?[^\s\"')]*")  # of a URL: Azure's may be signed


class Bucket:
    """A bucket, or a container, by its URL without a path.

    Each method raises SourceUnreadable if the store refuses this process, and SourceUnavailable if it does not answer as it
    should.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = _client(url)

    def pages(self, folder: str, after: str | None) -> Iterator[list[ObjectInfo]]:
        """Yield the objects below a folder ("" is the whole store) in pages of at most PAGE, in the order of their keys.

        With `after`, a name below the folder, only the objects with names after it. A listing need not tell ETags.

        Raises: SourceUnreadable also for a store that does not exist, or that lists in another order.
        """
        import obstore  # noqa: PLC0415 - declaring a pipeline must not load it

        last = ""
        offset = None if after is None else f"{folder}/{after}" if folder else after
        with self._explained(folder):
            for page in obstore.list(self._client, folder or None, offset=offset, chunk_size=PAGE):
                objects = [_info_of(each) for each in page]
                # An empty object may be `folder/` and sort as that, but its name comes without the slash.
                keys = [last, *(each.key for each in objects if each.size)]
                if any(one.encode() > other.encode() for one, other in pairwise(keys)):
                    raise SourceUnreadable(
                        f"{self._url} does not list its objects in the order of their names, which planning relies on. Use a "
                        "bucket that does (an S3 directory bucket does not)."
                    )
                last = keys[-1]
                yield objects

    def describe(self, key: str, version: str | None = None) -> ObjectInfo:
        """Return what an object is at present, or what a version of it is; with its ETag, if the store has ETags.

        Raises: FileNotFoundError.
        """
        import obstore  # noqa: PLC0415

        with self._explained(key, is_object=True):
            if version is None:
                return _info_of(obstore.head(self._client, key))
            return _info_of(obstore.get(self._client, key, options={"head": True, "version": version}).meta)

    def read(self, key: str, start: int, end: int, pin: Pin) -> bytes:
        """Return the bytes of an object from `start` to before `end`, by one request.

        Raises: FileNotFoundError; SourceChanged if the object has another ETag than the given one.
        """
        import obstore  # noqa: PLC0415

        options: Any = {"range": (start, end)}
        if pin.etag is not None:
            options["if_match"] = f'"{pin.etag}"'
        if pin.version is not None:
            options["version"] = pin.version
        with self._explained(key, is_object=True):
            return bytes(obstore.get(self._client, key, options=options).bytes())

    @contextmanager
    def _explained(self, key: str, *, is_object: bool = False) -> Iterator[None]:
        """Turn the store's errors into ours, with advice; a missing object stays FileNotFoundError."""
        from obstore import exceptions  # noqa: PLC0415

        place = f"{self._url}/{key}" if key else self._url
        try:
            yield
        except FileNotFoundError:
            if is_object:
                raise
            raise self._missing() from None
        except exceptions.PreconditionError:
            raise overwritten(place) from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise _refused(place, error) from error
        except exceptions.BaseError as error:  # of a listing, all errors are of this class
            status = _STATUS.search(str(error))
            if status and status[1] == "404":
                raise self._missing() from None
            raise (_refused if status and status[1] in ("401", "403") else _failed)(place, error) from error

    def _missing(self) -> TidegateError:
        return SourceUnreadable(
            f"{self._url} does not exist for the store that was asked{_endpoint()}. Create it, or correct the pipeline's "
            "Files(...) or the endpoint."
        )


def hadoop_options(url: str) -> dict[str, str]:
    """Return the options with which Spark reads from the same endpoint as this process; credentials are Spark's own."""
    endpoint = _from_environment(ENDPOINTS)
    if not url.startswith("s3") or endpoint is None:
        return {}
    return {
        "fs.s3a.endpoint": endpoint,
        "fs.s3a.endpoint.region": _from_environment(REGIONS) or "us-east-1",
        "fs.s3a.path.style.access": "true",
        "fs.s3a.connection.ssl.enabled": str(endpoint.startswith("https:")).lower(),
    }


def _refused(place: str, error: Exception) -> TidegateError:
    return SourceUnreadable(
        f"{place} may not be read: the store{_endpoint()} refuses the credentials of this process ({_first_line(error)}). Let "
        "its administrator allow them to list the bucket and to read its objects (S3: s3:ListBucket, s3:GetObject), or set "
        "other ones in the environment of planner and Spark (docs/storage.md)."
    )


def _failed(place: str, error: Exception) -> TidegateError:
    text = str(error)
    if _NO_NAME in text:
        name = " ".join(text.partition(_NO_NAME)[2].split())[:300].rstrip(".")
        return SourceUnreadable(
            f"{place} has an object whose name cannot be listed ({name}): a part of it is empty, as in a//b, or is . or .., "
            "or has a control character. Nothing is planned meanwhile, even if the glob does not take it. Rename or delete it."
        )
    if "169.254." in text:  # the address where a machine's role would be
        return SourceUnreadable(
            f"{place} may not be read: this process has no credentials for the store. Set them in the environment, such as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role (docs/storage.md)."
        )
    return SourceUnavailable(
        f"{place}: the store{_endpoint()} does not answer as it should: {_first_line(error)}. Check the endpoint, the region "
        "and the network."
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


def _info_of(meta: "ObjectMeta") -> ObjectInfo:
    etag = meta["e_tag"]
    # A weak ETag may stay the same when bytes change.
    strong = None if not etag or etag.startswith("W/") else etag.strip('"')
    moment = meta["last_modified"]
    seconds = int(moment.timestamp())
    return ObjectInfo(meta["path"], meta["size"], seconds * 10**9 + moment.microsecond * 1000, strong, meta["version"])


def _client(url: str) -> "ObjectStore":
    """Return obstore's client of a bucket.

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
