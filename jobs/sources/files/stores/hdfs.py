"""HDFS, reached by its own HTTP interface (WebHDFS): no library of Hadoop is needed where batches are planned.

The addresses of its NameNodes are those of ``$HADOOP_CONF_DIR/hdfs-site.xml``, which Spark reads too; without that, they are
the host of the URL and Hadoop's usual port. A file is identified by the checksum that HDFS keeps of it.
"""

import getpass
import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from tidegate.jobs.sources.files.stores import PAGE, ObjectInfo, Pin, Store, overwritten
from tidegate.state_store.base.errors import SettingsInvalid, SourceUnavailable, SourceUnreadable

if TYPE_CHECKING:
    import requests

SCHEMES = ("hdfs",)
CONFIGURATION = "HADOOP_CONF_DIR"
TIMEOUTS = (5, 60)  # seconds to connect, and without an answer
RETRIES = 3  # of a connection, and of a server that says it is busy; not of one that does not answer in time
DESCRIBE_TRIES = 3  # at a file that changes while it is looked at
REFUSALS = ("AccessControlException", "SecurityException", "AuthorizationException")
ELSEWHERE = ("StandbyException", "RetriableException")  # another NameNode is the active one, or this one is not yet
USUAL_PORTS = {"http": 9870, "https": 9871}


class HttpService(NamedTuple):
    """Where WebHDFS answers: a scheme, and one address (host and port) for each NameNode."""

    scheme: str
    addresses: list[str]


class Hdfs(Store):
    """A file system by its URL without a path, such as ``hdfs://namenode:8020`` or, with a name service, ``hdfs://lake``."""

    def __init__(self, url: str) -> None:
        configuration = hadoop_configuration()
        self._url = url
        self._service = http_service(url, configuration)
        self._session = _session(configuration)
        self._user = {} if _wants_kerberos(configuration) else {"user.name": user_name()}

    def pages(self, folder: str, after: str | None, enters: Callable[[str], bool]) -> Iterator[list[ObjectInfo]]:
        """Yield the files below a folder; folders that sort before `after`, or are not wanted, are not listed.

        In memory are also the names of one folder that are not ASCII, because HDFS lists these first.
        """
        files = self._below(folder, after or "", lambda key: enters(key[len(folder) + 1 :] if folder else key), is_first=True)
        while page := list(islice(files, PAGE)):
            yield page

    def describe(self, key: str, version: str | None = None) -> ObjectInfo:  # noqa: ARG002 - HDFS keeps none
        """Ask for a file's status and checksum; the status is asked for again, so that both are of the same content.

        Raises: SourceUnavailable also for a file that keeps changing.
        """
        for _ in range(DESCRIBE_TRIES):
            before = self._get("GETFILESTATUS", key).json()["FileStatus"]
            checksum = self._checksum(key)
            info = _info_of(key, before, checksum)
            if _info_of(key, self._get("GETFILESTATUS", key).json()["FileStatus"], checksum) == info:
                return info
        raise SourceUnavailable(f"{self._url}/{key} changes while it is looked at. It is looked at again later.")

    def read(self, key: str, start: int, end: int, pin: Pin) -> bytes:  # noqa: ARG002 - HDFS compares none
        """Return bytes of a file, from the DataNode that the NameNode sends this process to."""
        content = self._get("OPEN", key, offset=start, length=end - start).content
        if len(content) != end - start:
            raise overwritten(f"{self._url}/{key}")
        return content

    def _checksum(self, key: str) -> str | None:
        """Return the checksum that HDFS keeps of a file's content; None while a writer has the file open."""
        try:
            checksum = self._get("GETFILECHECKSUM", key).json()["FileChecksum"]
        except SourceUnavailable as error:
            if "is under construction" in str(error):
                return None
            raise
        return f"{checksum['algorithm']}:{checksum['bytes']}"

    def _below(self, folder: str, after: str, enters: Callable[[str], bool], *, is_first: bool = False) -> Iterator[ObjectInfo]:
        """Yield the files below a folder whose names there come after `after`; a folder that is deleted meanwhile has none."""
        for name, status in in_order(self._entries(folder, is_first=is_first)):
            key = f"{folder}/{name}" if folder else name
            if status["type"] == "FILE" and name > after:
                yield _info_of(key, status)
            elif status["type"] == "DIRECTORY" and enters(key):
                if f"{name}/" > after[: len(name) + 1]:
                    yield from self._below(key, "", enters)
                elif after.startswith(f"{name}/"):
                    yield from self._below(key, after[len(name) + 1 :], enters)

    def _entries(self, folder: str, *, is_first: bool) -> Iterator[Mapping[str, Any]]:
        """Yield the entries of one folder in the order of HDFS, page by page.

        Raises: SourceUnreadable for the first folder if it is no folder, or does not exist.
        """
        last: dict[str, str] = {}
        first = None
        while True:
            try:
                listing = self._get("LISTSTATUS_BATCH", folder, **last).json()["DirectoryListing"]
            except FileNotFoundError:
                if not is_first:
                    return
                raise SourceUnreadable(
                    f"{self._url}/{folder} does not exist. Create the folder, or correct the pipeline's Files(...)."
                ) from None
            entries = listing["partialListing"]["FileStatuses"]["FileStatus"]
            if is_first and len(entries) == 1 and not entries[0]["pathSuffix"]:
                raise SourceUnreadable(f"{self._url}/{folder} is a file. Name the folder that it is in, and the file as glob=.")
            if entries and entries[0]["pathSuffix"] == first:
                raise SourceUnreadable(f"{self._url} lists {folder} from the start again and again: it cannot list in pages.")
            yield from entries
            if not entries or not listing["remainingEntries"]:
                return
            first, last = entries[0]["pathSuffix"], {"startafter": entries[-1]["pathSuffix"]}

    def _get(self, operation: str, key: str, **parameters: Any) -> "requests.Response":
        """Ask the active NameNode, which may send us on to a DataNode.

        Raises: FileNotFoundError; SourceUnreadable, SourceUnavailable.
        """
        import requests  # noqa: PLC0415 - declaring a pipeline must not load it

        path = f"/webhdfs/v1/{quote(key)}"
        query = {"op": operation, **self._user, **parameters}
        failures = []
        for address in list(self._service.addresses):
            try:
                answer = self._session.get(f"{self._service.scheme}://{address}{path}", params=query, timeout=TIMEOUTS)
            except requests.RequestException as error:
                failures.append(f"{address}: {_reason(error)}")
                continue
            error_name, message = _remote_error(answer)
            if error_name is None:
                self._ask_first(address)
                return answer
            if error_name not in ELSEWHERE:
                self._raise(key, answer.status_code, error_name, message)
            failures.append(f"{address}: {message}")
        raise SourceUnavailable(
            f"{self._url} does not answer: {'; '.join(failures)}. Check NameNode, DataNodes and the network, and the addresses "
            f"in ${CONFIGURATION}/hdfs-site.xml (docs/storage.md); the batch is tried again."
        )

    def _ask_first(self, address: str) -> None:
        """Ask the NameNode that answered before the others from now on."""
        if self._service.addresses[0] != address:
            self._service.addresses.remove(address)
            self._service.addresses.insert(0, address)

    def _raise(self, key: str, status: int, error_name: str, message: str) -> None:
        if error_name == "FileNotFoundException":
            raise FileNotFoundError(message)
        if status == 401 or error_name in REFUSALS:
            raise SourceUnreadable(
                f"{self._url}/{key} may not be read: HDFS refuses {user_name()}: {message}. Let its administrator allow "
                "reading files and listing folders, or set HADOOP_USER_NAME (docs/storage.md)."
            )
        raise SourceUnavailable(f"{self._url}/{key}: HDFS answers {error_name}: {message}. The batch is tried again.")


def in_order(entries: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a folder's entries, by name, in the order of the keys below them.

    HDFS compares names as signed bytes, so characters beyond ASCII come before all others, and it does not count the slash that
    follows a folder's name: it lists ``a`` before ``a.txt``, though ``a/x`` comes after that. Both only bring entries forward.
    So each is held back until a plain name shows that all names before it have been listed.
    """
    waiting: list[tuple[str, str, Mapping[str, Any]]] = []
    for entry in entries:
        name = entry["pathSuffix"]
        heapq.heappush(waiting, (f"{name}/" if entry["type"] == "DIRECTORY" else name, name, entry))
        while name.isascii() and waiting and waiting[0][0] <= name:
            yield heapq.heappop(waiting)[1:]
    while waiting:
        yield heapq.heappop(waiting)[1:]


def hadoop_configuration() -> dict[str, str]:
    """Return the settings in core-site.xml and hdfs-site.xml of the folder that $HADOOP_CONF_DIR names; {} without it.

    Raises: SettingsInvalid for a file that cannot be read.
    """
    configuration: dict[str, str] = {}
    folder = os.environ.get(CONFIGURATION)
    for path in (Path(folder, name) for name in ("core-site.xml", "hdfs-site.xml")) if folder else ():
        try:
            root = ElementTree.parse(path).getroot()  # noqa: S314 - the administrator's own file
        except FileNotFoundError:
            continue
        except (OSError, ElementTree.ParseError) as error:
            raise SettingsInvalid(f"{path} cannot be read: {error}. Correct it, or ${CONFIGURATION}.") from error
        for each in root.iter("property"):
            configuration[each.findtext("name", "").strip()] = each.findtext("value", "").strip()
    return configuration


def http_service(url: str, configuration: Mapping[str, str]) -> HttpService:
    """Return where WebHDFS answers for a file system.

    Raises: SettingsInvalid for a name service without addresses.
    """
    scheme = "https" if configuration.get("dfs.http.policy") == "HTTPS_ONLY" else "http"
    setting = f"dfs.namenode.{scheme}-address"
    parts = urlsplit(url)
    if nodes := configuration.get(f"dfs.ha.namenodes.{parts.netloc}"):
        names = [f"{setting}.{parts.netloc}.{node.strip()}" for node in nodes.split(",")]
        if missing := [name for name in names if name not in configuration]:
            raise SettingsInvalid(f"${CONFIGURATION}/hdfs-site.xml has no {missing[0]}: add it, to reach {url}.")
        return HttpService(scheme, [configuration[name] for name in names])
    usual = f"{parts.hostname}:{USUAL_PORTS[scheme]}"
    is_its_own = url in (
        configuration.get("fs.defaultFS", "").rstrip("/"),
        f"hdfs://{configuration.get('dfs.namenode.rpc-address')}",
    )
    address = configuration.get(setting, usual) if is_its_own else usual
    return HttpService(scheme, [address.replace("0.0.0.0", str(parts.hostname))])  # noqa: S104 - where a server listens


def user_name() -> str:
    """Return the user that HDFS is asked as: Hadoop's own rule, for clusters without Kerberos."""
    return os.environ.get("HADOOP_USER_NAME") or getpass.getuser()


def _session(configuration: Mapping[str, str]) -> "requests.Session":
    """Return a session that tries connections again and, if the cluster wants it, shows a Kerberos ticket.

    Raises: SettingsInvalid without the library for that.
    """
    import requests  # noqa: PLC0415
    from requests.adapters import HTTPAdapter  # noqa: PLC0415
    from urllib3 import Retry  # noqa: PLC0415

    session = requests.Session()
    retry = Retry(RETRIES, read=0, backoff_factor=0.5, status_forcelist=(502, 503, 504), raise_on_status=False)
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    if _wants_kerberos(configuration):
        try:
            from requests_gssapi import OPTIONAL, HTTPSPNEGOAuth  # type: ignore[import-not-found] # noqa: PLC0415
        except ImportError as error:
            raise SettingsInvalid(
                f"${CONFIGURATION}/core-site.xml wants Kerberos, and requests-gssapi is not installed. Run: pip install "
                "requests-gssapi; and get a ticket with kinit."
            ) from error
        session.auth = HTTPSPNEGOAuth(mutual_authentication=OPTIONAL)
    return session


def _wants_kerberos(configuration: Mapping[str, str]) -> bool:
    return configuration.get("hadoop.security.authentication") == "kerberos"


def _info_of(key: str, status: Mapping[str, Any], checksum: str | None = "") -> ObjectInfo:
    """Return what a file is; a listing tells no checksum (""), and a file that is being written has none (None)."""
    modified = status["modificationTime"] * 10**6  # from milliseconds
    return ObjectInfo(key, status["length"], modified, checksum or None, str(status["fileId"]), is_open=checksum is None)


def _remote_error(answer: "requests.Response") -> tuple[str | None, str]:
    """Return the name and the first line of the error that an answer reports; None if it reports none."""
    if answer.ok:
        return None, ""
    try:
        error = answer.json()["RemoteException"]
        return error["exception"], next(iter(error["message"].splitlines()), "").rstrip(".")
    except (ValueError, KeyError):
        return str(answer.status_code), answer.reason


def _reason(error: Exception) -> str:
    """Return why a connection failed, in one line and without its parameters."""
    reason = getattr(error.args[0], "reason", error) if error.args else error
    return str(reason).partition(": ")[2][:200] or type(error).__name__
