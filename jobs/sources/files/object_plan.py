"""Plans batches of objects, from a listing that is read page by page and no further than batches need.

An object is its name and its content, known by its ETag or, in a store without ETags, by its digest. A batch takes an object by
naming it in its metadata; the object counts once the batch has committed, and the ledger knows all that ever counted. An
object that was overwritten after it counted stops planning when the listing comes to it.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any

from jobs.sources import Coordinator, History, LeftAlone
from jobs.sources.files.content import digest_of
from jobs.sources.files.formats.parquet import check_name
from jobs.sources.files.glob import HIDDEN, Glob, Place
from jobs.sources.files.listing import NOT_REACHED, UNCHECKED
from jobs.sources.files.markers import Markers, unmarked_in
from jobs.sources.files.objects import ObjectPath, listed, look, pinned
from jobs.sources.files.stores import FoundObject
from state_store.batches import encode_metadata
from state_store.declaration import SourceMetadata
from state_store.errors import SourceChanged, SourceUnreadable
from state_store.source_files import AFTER, TakenFile

if TYPE_CHECKING:
    from jobs.sources.files.source import Files

logger = logging.getLogger(__name__)

MARKER = "is the mark of a folder"
LONGEST_NAME_BYTES = 1024  # of a key, in every store
LOOKED_AT = 10_000  # names that a report on a store looks at, because each status asks for reports


class ObjectsCoordinator(Coordinator):
    """Plans batches from one listing, which goes on from batch to batch."""

    def __init__(self, source: "Files", place: ObjectPath, *, min_age_seconds: int) -> None:
        self._source = source
        self._place = place
        self._min_age_seconds = min_age_seconds
        self._history: History | None = None
        # Objects that no batch has taken; None until the first request.
        self._new: Iterator[dict[str, Any]] | None = None
        self._touched: list[TakenFile] = []  # have counted, and have another time now
        self._next: dict[str, Any] | None = None  # taken from the listing, and too large for the batch before
        self._markers = Markers(place, source.marker)
        self._unmarked: set[str] = set()  # folders that are not complete

    def look_back(self, history: History) -> None:
        """Keep the history of objects that batches have taken; without a history, only the previous batch's are known."""
        self._history = history

    def initialize_transaction(
        self, txid: int, previous_metadata: SourceMetadata | None, current_metadata: SourceMetadata | None
    ) -> SourceMetadata | None:
        """Return the next objects that no earlier batch has taken; None if there are none.

        Raises: SourceUnreadable, SourceUnavailable; SourceChanged for an object that was overwritten after it counted.
        """
        if current_metadata is not None:
            if self._source.kind == "transactional":
                return current_metadata
            self._check_redo(txid, current_metadata)
        if self._new is None:
            self._new = self._find_new(txid, previous_metadata)
        files = list(self._taken())
        if not files and current_metadata is None:
            return None
        digest = None if previous_metadata is None else sha256(encode_metadata(previous_metadata)).hexdigest()
        found = {"files": files, "behind": digest}
        if self._source.names_grow:
            found[AFTER] = files[-1]["name"] if files else _last_name(previous_metadata)
        return found

    def _taken(self) -> Iterator[dict[str, Any]]:
        """Take new objects until the batch is full."""
        source, size = self._source, 0
        assert self._new is not None
        for number in range(source.max_files):
            file = self._next or next(self._new, None)
            self._next = None
            if file is None:
                return
            size += file["size"]
            if number and source.max_bytes is not None and size > source.max_bytes:
                self._next = file
                return
            yield file

    def _find_new(self, txid: int, previous: SourceMetadata | None) -> Iterator[dict[str, Any]]:
        """Yield the identity of each object that no batch before the txid has taken, in order.

        Raises: SourceChanged, SourceUnreadable.
        """
        after = _last_name(previous) if self._source.names_grow else None
        before = {file["name"] for file in previous["files"]} if previous else set()
        for page in named_objects(self._place, self._source.glob, after):
            if self._history is None:
                new = [name for name in page if name not in before]
            else:
                taken = self._history.taken_files(list(page), txid)
                new = [name for name, earlier in taken if self._is_new(name, page[name], earlier)]
                self._history.note_times(self._touched)
                self._touched.clear()
            for name in new:
                if folder := self._markers.awaited(name):
                    self._report_unmarked(folder)
                    if self._source.names_grow:
                        return  # as below
                    continue
                found = self._complete(name, page[name])
                if found is None:
                    continue
                if why := self._unfinished(found):
                    logger.warning("%s/%s %s: not planned yet.", self._place, name, why)
                    if self._source.names_grow:
                        return  # if a later name were taken, this one would never be read
                elif identity := self._identified(name, found):
                    yield identity

    def _report_unmarked(self, folder: str) -> None:
        if folder not in self._unmarked:
            logger.info("%s/%s has no %s yet: its objects are not planned.", self._place, folder, self._source.marker)
            self._unmarked.add(folder)

    def _is_new(self, name: str, found: FoundObject, earlier: Sequence[TakenFile]) -> bool:
        """Return whether no batch has taken an object.

        Raises: SourceChanged if it has other content than what has counted under its name.
        """
        if not earlier or self._same(name, found, earlier):
            return not earlier
        last = max(earlier, key=lambda file: file.txid)
        if last.is_committed:
            raise SourceChanged(
                f"{self._place / name} was overwritten since it counted in txid {last.txid}: other content counted, and this "
                "would never be read. Nothing new is planned meanwhile. Put what counted back under its name, and what is new, "
                "as whole records, into an object of another name; or give the object another name, if all of it is new."
            )
        return False  # its own batch reports the change, when it is read

    def _same(self, name: str, found: FoundObject, earlier: Sequence[TakenFile]) -> TakenFile | None:
        """Return the taken object with the same content; if the listing tells no ETag, one of the same time is the same."""
        candidates = [file for file in earlier if file.size == found.size]
        identity = found.identity
        if candidates and identity is None:
            if same := next((file for file in candidates if file.mtime_ns == found.mtime_ns), None):
                return same
            complete = self._complete(name, found)
            entry = None if complete is None else self._identified(name, complete)
            if entry is None:
                return candidates[0]  # gone since it was listed
            identity = entry["sha256"]
        same = next((file for file in candidates if file.sha256 == identity), None)
        if same is not None and same.is_committed and found.identity is None:
            self._touched.append(replace(same, mtime_ns=found.mtime_ns))
        return same

    def _complete(self, name: str, found: FoundObject) -> FoundObject | None:
        """Return an object with its ETag, which a listing may lack; None if it is gone, or no object at all.

        Where a marker completes its folder, the object is that from after the marker, which may be newer than the listing.

        Raises: SourceUnreadable, SourceUnavailable.
        """
        if found.size and found.identity is not None and not self._source.versions and not self._source.marker:
            return found
        try:  # a listing may also show the mark of a folder, which is empty, under the folder's name
            return replace(look(self._place / name), key=found.key)
        except FileNotFoundError:
            return None

    def _unfinished(self, found: FoundObject) -> str | None:
        """Return why an object may still be written; None if it is whole."""
        if found.is_open:
            return "is open for writing"
        if time.time() - found.mtime_ns / 10**9 < self._min_age_seconds:
            return f"changed less than {self._min_age_seconds} s ago"
        return None

    def _identified(self, name: str, found: FoundObject) -> dict[str, Any] | None:
        """Return an object's entry in the metadata; None if it is gone.

        Raises: SourceUnreadable, SourceUnavailable.
        """
        path = self._place / name
        if UNCHECKED.search(name):
            raise SourceUnreadable(f"{path} is compressed in a way that cannot be checked. Use gzip or bzip2.")
        if self._source.format == "parquet":
            check_name(path)
        if len(name.encode()) > LONGEST_NAME_BYTES:
            raise SourceUnreadable(f"{path} has a name of more than {LONGEST_NAME_BYTES} bytes. Rename it.")
        described = {"name": name, "size": found.size, "mtime_ns": found.mtime_ns}
        if found.identity is None:
            try:
                with path.open() as content:
                    return {**described, "sha256": digest_of(content)}
            except SourceChanged:
                return None
        entry = {**described, "sha256": found.identity, "etag": found.etag}
        if not self._source.versions:
            return entry
        if found.version is None:
            raise SourceUnreadable(
                f"{path} has no version: the bucket does not keep them. Let its administrator turn versioning on, or leave "
                "versions out of Files(...)."
            )
        return {**entry, "version": found.version}

    def _check_redo(self, txid: int, current: SourceMetadata) -> None:
        """Refuse to redo a batch of which an object is gone: the redo would take its rows away.

        Raises: SourceChanged.
        """
        if self._history is None or self._history.committed() < txid:
            return
        for file in current["files"]:
            try:
                look(pinned(self._place / file["name"], file))
            except FileNotFoundError:
                raise SourceChanged(
                    f"{self._place / file['name']} has counted in txid {txid}, and is gone: to redo the batch would take its "
                    "rows away. Put it back."
                ) from None


def named_objects(place: ObjectPath, pattern: str, after: str | None = None) -> Iterator[dict[str, FoundObject]]:
    """Yield the objects that a glob takes, by their names below the place, in pages and in order."""
    sieve = _Sieve(pattern)
    for page in listed(place, after, sieve.enters):
        names = {_name_in(place, found): found for found in page}
        yield {name: found for name, found in names.items() if sieve.why_not(name) is None}


def left_alone(place: ObjectPath, pattern: str) -> LeftAlone:
    """Return which of the first LOOKED_AT names are not read, by reason."""
    sieve, read = _Sieve(pattern), 0
    names: dict[str, list[str]] = defaultdict(list)
    objects = (found for page in listed(place) for found in page)
    for found in islice(objects, LOOKED_AT):
        name = _name_in(place, found)
        why = sieve.why_not(name)
        if why is None:
            read += 1
        else:
            names[why].append(name)
    where = str(place) if next(objects, None) is None else f"{place} (its first {LOOKED_AT} names)"
    return LeftAlone(where, pattern, read, dict(sorted(names.items())))


def young_among(place: ObjectPath, pattern: str, min_age_seconds: int) -> list[str]:
    """Return which of the first LOOKED_AT names changed less than `min_age_seconds` ago."""
    if min_age_seconds <= 0:
        return []
    since = (time.time() - min_age_seconds) * 10**9
    objects = (item for page in named_objects(place, pattern) for item in page.items())
    return [name for name, found in islice(objects, LOOKED_AT) if found.mtime_ns > since]


def unmarked_among(place: ObjectPath, pattern: str, marker: str) -> list[str]:
    """Return the folders that are not complete, among the first LOOKED_AT names."""
    sieve = _Sieve(pattern)
    names = (_name_in(place, found) for page in listed(place) for found in page)
    of_files = [name for name in islice(names, LOOKED_AT) if name.rpartition("/")[2] == marker or sieve.why_not(name) is None]
    last = of_files[-1] if next(names, None) is not None and of_files else None  # its folder's marker may be further on
    return [folder for folder in unmarked_in(of_files, marker) if last is None or not last.startswith(f"{folder}/")]


class _Sieve:
    """Compares names with a glob, folder by folder; neighbours in a listing share their folders."""

    def __init__(self, pattern: str) -> None:
        self._glob = Glob(pattern)
        self._folder = ""
        self._places = self._glob.start()
        self._why: str | None = None

    def enters(self, folder: str) -> bool:
        """Return whether the glob leads into a folder."""
        self._enter(folder)
        return self._why is None

    def why_not(self, name: str) -> str | None:
        """Return why the glob does not take a name; None if it does."""
        folder, _, last = name.rpartition("/")
        if folder != self._folder:
            self._enter(folder)
        if self._why is not None:
            return self._why
        if not last:
            return MARKER
        return None if self._glob.takes(self._places, last) else self._glob.why_not(self._places, last)

    def _enter(self, folder: str) -> None:
        self._folder, self._places, self._why = folder, self._glob.start(), None
        for part in folder.split("/") if folder else ():
            inside: frozenset[Place] = self._glob.below(self._places, part)
            if not inside:
                self._why = HIDDEN if self._glob.below(self._places, part, strict=False) else NOT_REACHED
                return
            self._places = inside


def _name_in(place: ObjectPath, found: FoundObject) -> str:
    return found.key[len(place.key) + 1 :] if place.key else found.key


def _last_name(previous: SourceMetadata | None) -> str | None:
    """Return the last name that batches have taken, in the order of names."""
    if previous is None:
        return None
    name: str | None = previous.get(AFTER) or (previous["files"][-1]["name"] if previous["files"] else None)
    return name
