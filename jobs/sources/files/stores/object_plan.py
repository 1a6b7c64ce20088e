"""Plans batches of objects, from a listing that is read page by page and no further than batches need.

An object is its name and its content, known by its ETag or, in a store without ETags, by its digest. A batch takes an object by
naming it in its metadata; the object counts once the batch has committed, and the ledger knows all that ever counted. An
object that was overwritten after it counted stops planning when the listing comes to it.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any

from tidegate.jobs.sources import Coordinator, History
from tidegate.jobs.sources.files.completeness_markers import Markers
from tidegate.jobs.sources.files.plan import planned_elsewhere
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_identity import entry_of, identity_of, is_too_young, with_identity
from tidegate.jobs.sources.files.stores.object_listing import matching_objects, names_not_matching
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, describe, pinned
from tidegate.state_store.base.errors import SourceChanged
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger.batches import encode_metadata
from tidegate.state_store.ledger.counted_files import AFTER, TakenFile, last_counted

logger = logging.getLogger(__name__)

PLACE = "place"  # where metadata has the place of its names, if these grow or the source is opaque


class ObjectsCoordinator(Coordinator):
    """Plans batches from one listing, which goes on from batch to batch."""

    def __init__(self, source: Files, place: ObjectPath, *, min_age_seconds: int) -> None:
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
        kept: list[dict[str, Any]] = []
        if current_metadata is not None:
            if self._source.kind == "transactional":
                return current_metadata
            self._check_gone(txid, current_metadata)
            kept = self._files_that_stay(txid, current_metadata)
        if self._new is None:
            self._new = self._find_new(txid, previous_metadata)
        files = list(self._take(kept))
        self._markers.check_unchanged(file["name"] for file in files)
        if not files and current_metadata is None:
            return None
        digest = None if previous_metadata is None else sha256(encode_metadata(previous_metadata)).hexdigest()
        return {"files": [*kept, *files], "behind": digest, **self._position(files, previous_metadata)}

    def _position(self, files: Sequence[dict[str, Any]], previous: SourceMetadata | None) -> dict[str, Any]:
        """Return what the metadata keep of how far the place was listed, after a batch took these objects."""
        entries = {}
        if self._source.names_grow:
            entries[AFTER] = files[-1]["name"] if files else self._last_name(previous)
        if self._source.names_grow or self._source.kind != "transactional":
            entries[PLACE] = str(self._place)
        return entries

    def _take(self, kept: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Take new objects until the batch, which already has some, is full."""
        source, size = self._source, sum(file["size"] for file in kept)
        assert self._new is not None
        for number in range(len(kept), source.max_files):
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
        after = self._last_name(previous) if self._source.names_grow else None
        before = {file["name"] for file in previous["files"]} if previous else set()
        for page in matching_objects(self._place, self._source.glob, after):
            for name in self._untaken(page, txid, before):
                info, is_held_back = self._examine(name, page[name])
                if is_held_back and self._source.names_grow:
                    return  # if a later name were taken, this one would never be read
                entry = entry_of(self._source, self._place, name, info) if info and not is_held_back else None
                if entry:
                    yield entry
                elif page[name].size and self._source.names_grow:
                    return  # it is gone, perhaps for the moment in which it is replaced; an empty one stands for a folder

    def _examine(self, name: str, listed: ObjectInfo) -> tuple[ObjectInfo | None, bool]:
        """Return an object with its ETag, None if it is gone; and whether it is left to a later plan."""
        if self._waits_for_marker(name):
            return listed, True
        info = with_identity(self._source, self._place / name, listed)
        if info and is_too_young(info, self._min_age_seconds):
            logger.warning("%s/%s changed less than %s s ago: not planned yet.", self._place, name, self._min_age_seconds)
            return info, True
        return info, False

    def _untaken(self, page: dict[str, ObjectInfo], txid: int, before: set[str]) -> list[str]:
        """Return the names in a page that no batch before the txid has taken; without a history, none but those `before`."""
        if self._history is None:
            return [name for name in page if name not in before]
        taken = self._history.taken_files(list(page), txid)
        new = [name for name, earlier in taken if self._is_new(name, page[name], earlier)]
        self._history.note_times(self._touched)
        self._touched.clear()
        return new

    def _waits_for_marker(self, name: str) -> bool:
        folder = self._markers.unmarked_folder(name)
        if folder is not None and folder not in self._unmarked:
            logger.info("%s/%s has no %s yet: its objects are not planned.", self._place, folder, self._source.marker)
            self._unmarked.add(folder)
        return folder is not None

    def _is_new(self, name: str, listed: ObjectInfo, earlier: Sequence[TakenFile]) -> bool:
        """Return whether no batch has taken an object.

        Raises: SourceChanged if it has other content than what has counted under its name.
        """
        if not earlier or self._find_same(name, listed, earlier):
            return not earlier
        if (last := last_counted(earlier)) is None:
            return True  # nothing of it has counted: what was skipped has been overwritten
        if last.is_committed:
            raise SourceChanged(
                f"{self._place / name} was overwritten since it counted in txid {last.txid}: other content counted, and this "
                "would never be read. Nothing new is planned meanwhile. Put what counted back under its name, and what is new, "
                "as whole records, into an object of another name; or give the object another name, if all of it is new."
            )
        return False  # its own batch reports the change, when it is read

    def _find_same(self, name: str, listed: ObjectInfo, earlier: Sequence[TakenFile]) -> TakenFile | None:
        """Return the taken object with the same content; if the listing tells no ETag, one of the same time is the same."""
        candidates = [file for file in earlier if file.size == listed.size]
        identity = listed.identity
        if candidates and identity is None:
            if same := next((file for file in candidates if file.mtime_ns == listed.mtime_ns), None):
                return same
            complete = with_identity(self._source, self._place / name, listed)
            entry = None if complete is None else entry_of(self._source, self._place, name, complete)
            if entry is None:
                return candidates[0]  # gone since it was listed
            identity = entry["sha256"]
        same = next((file for file in candidates if file.sha256 == identity), None)
        if same is not None and same.is_committed and listed.identity is None:
            self._touched.append(replace(same, mtime_ns=listed.mtime_ns))
        return same

    def _last_name(self, previous: SourceMetadata | None) -> str | None:
        """Return the last name that batches have taken from this place, in the order of names."""
        if previous is None or previous.get(PLACE, str(self._place)) != str(self._place):
            return None
        if AFTER in previous:
            return previous[AFTER]  # type: ignore[no-any-return]
        return previous["files"][-1]["name"] if previous["files"] else None

    def _check_gone(self, txid: int, current: SourceMetadata) -> None:
        """Refuse to plan a batch again if one of its objects is gone, and nothing would read that when it is back.

        Raises: SourceChanged if the batch has committed, as a redo would take its rows away, or if it was planned from another
        place.
        """
        is_redo = self._history is not None and self._history.committed() >= txid
        is_moved = current.get(PLACE, str(self._place)) != str(self._place)
        for file in current["files"] if is_redo or is_moved else ():
            try:
                describe(pinned(self._place / file["name"], file))
            except FileNotFoundError:
                if not is_redo:
                    raise planned_elsewhere(str(self._place / file["name"]), current[PLACE]) from None
                raise SourceChanged(
                    f"{self._place / file['name']} has counted in txid {txid}, and is gone: to redo the batch would take its "
                    "rows away. Put it back."
                ) from None

    def _files_that_stay(self, txid: int, current: SourceMetadata) -> list[dict[str, Any]]:
        """Return a batch's objects that stay in it when it is planned again: those that the glob does not take any more.

        No later batch would find them.

        Raises: SourceUnreadable, SourceUnavailable.
        """
        unlisted = names_not_matching(self._source.glob, (file["name"] for file in current["files"]))
        if not unlisted or self._history is None:
            return []
        kept = []
        for name, earlier in self._history.taken_files(unlisted, txid):
            with suppress(FileNotFoundError):
                entry = None if earlier else identity_of(self._source, self._place, name)
                kept += [entry] if entry else []
        return kept
