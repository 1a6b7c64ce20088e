"""Plans batches of files: finds those that are new, have counted, or have changed since they counted.

A batch takes a file by naming it in its metadata; the file counts once the batch has committed. A file is young as long as it
changed so recently that it may still be written.

A file is its name and its content. If it was touched, moved away and back, or restored, it is the same file; the ledger
knows all files that ever counted. A file whose content changed after it counted stops planning until an operator has looked
at it: its new content would never be read, or its old content would be read twice. An object's content is known by its ETag.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any

from tidegate.jobs.sources import Coordinator, History
from tidegate.jobs.sources.files.completeness_markers import Markers
from tidegate.jobs.sources.files.done_folder import DoneFolder
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores.object_identity import identity_of
from tidegate.jobs.sources.files.stores.object_listing import names_not_matching
from tidegate.jobs.sources.files.stores.object_places import Place, exists
from tidegate.state_store.base.errors import SourceChanged, SourceUnreadable, skip_command
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger.batches import encode_metadata
from tidegate.state_store.ledger.counted_files import TakenFile, last_counted

logger = logging.getLogger(__name__)

NAMED = 3  # how many files a message names
PLACE = "place"  # where metadata has the place of its names, if these grow or the source is opaque


class FilesCoordinator(Coordinator):
    """Plans batches from one listing, which goes on from batch to batch; a subclass lists a folder, or a store."""

    def __init__(self, source: Files, place: Place, name: str, min_age_seconds: int) -> None:
        """Take the place, and its name in the metadata of batches."""
        self._source = source
        self._place = place
        self._place_name = name
        self._min_age_seconds = min_age_seconds
        self._done: DoneFolder | None = None
        self._history: History | None = None
        # Files that no batch has taken yet, in order; None until the first request.
        self._new: Iterator[dict[str, Any]] | None = None
        self._next: dict[str, Any] | None = None  # one of these that was too large for the batch before
        # Files that batches have taken: now with another stamp; back after they were moved away; now with other content.
        self._touched: list[TakenFile] = []
        self._back: list[TakenFile] = []
        self._changed: list[TakenFile] = []
        # What is left to a later plan: young files, and folders that are not complete.
        self._young: list[str] = []
        self._unmarked: set[str] = set()
        self._markers = Markers(place, source.marker)

    def look_back(self, history: History) -> None:
        """Keep the history of files that batches have taken; without a history, only the previous batch's files are known."""
        self._history = history

    def initialize_transaction(
        self, txid: int, previous_metadata: SourceMetadata | None, current_metadata: SourceMetadata | None
    ) -> SourceMetadata | None:
        """Return the next files that no earlier batch has taken, with their digests; None if there are none.

        Raises: SourceUnreadable for a file that cannot be read, SourceUnavailable, SourceChanged for a file whose content
        changed after it counted, HoleDetected if the done folder is ahead of the ledger.
        """
        if current_metadata is not None and self._source.kind == "transactional":
            return current_metadata
        if self._new is None:
            self._new = self._find_new(txid, previous_metadata)
        files = self._filled([] if current_metadata is None else self._kept_files(txid, current_metadata))
        if not files and self._wait_for_young():
            files = self._filled([])
        self._markers.check_unchanged(file["name"] for file in files)
        if not files:
            self._report_waiting()
        if not files and current_metadata is None:
            return None
        # A digest of the previous metadata, so that a batch is never mistaken for another plan's.
        digest = None if previous_metadata is None else sha256(encode_metadata(previous_metadata)).hexdigest()
        return {"files": files, "behind": digest, **self._position(files, previous_metadata)}

    @abstractmethod
    def _find_new(self, txid: int, previous: SourceMetadata | None) -> Iterator[dict[str, Any]]:
        """Yield the identity of each file that no batch before the txid has taken, in order.

        Raises: SourceChanged, SourceUnreadable, SourceUnavailable, HoleDetected.
        """

    @abstractmethod
    def _find_same(self, name: str, earlier: Sequence[TakenFile]) -> tuple[TakenFile | None, Mapping[str, Any]]:
        """Return the taken file with the content of the present one, and the present one's stamp, as far as it shows.

        Raises: FileNotFoundError; SourceUnreadable, SourceUnavailable.
        """

    def _position(self, files: Sequence[dict[str, Any]], previous: SourceMetadata | None) -> dict[str, Any]:
        """Return what the metadata keep of where these files are, or of how far the place was listed."""
        del files, previous
        return {} if self._source.kind == "transactional" else {PLACE: self._place_name}

    def _wait_for_young(self) -> bool:
        """Wait until young files are old enough, if the wait is short; return whether to try them again."""
        return False

    def _has_grown(self, file: TakenFile) -> bool:
        """Return whether a file begins with the content that counted."""
        del file
        return False

    def _filled(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the files of a batch with new ones, until it is full."""
        source, size, names = self._source, sum(file["size"] for file in batch), {file["name"] for file in batch}
        assert self._new is not None
        while len(batch) < source.max_files and (file := self._next or next(self._new, None)):
            self._next = None
            if file["name"] in names:
                continue  # a new file with the name of a moved one: the next plan takes it
            size += file["size"]
            if batch and source.max_bytes is not None and size > source.max_bytes:
                self._next = file
                break
            batch.append(file)
        return batch

    def _untaken(self, names: Sequence[str], txid: int, previous: SourceMetadata | None) -> list[str]:
        """Return the names that no batch before the txid has taken, after checking those that were taken.

        Raises: SourceChanged, SourceUnreadable, SourceUnavailable.
        """
        if self._history is None:
            taken = {file["name"] for file in previous["files"]} if previous else set()
            return [name for name in names if name not in taken]
        new = [name for name, earlier in self._history.taken_files(names, txid) if self._is_new(name, earlier)]
        self._history.note_times(self._touched)
        self._touched.clear()
        if self._changed:
            raise self._changed_since()
        if self._back:
            logger.warning(
                "%s: left alone, because they have counted with the same content before: %s. Move them away.",
                self._place,
                first_names([f"{file.name} in txid {file.txid}" for file in self._back]),
            )
        return new

    def _is_new(self, name: str, earlier: Sequence[TakenFile]) -> bool:
        """Return whether no batch has taken a file, given those of its name that batches have taken."""
        if not earlier:
            return True
        try:
            same, stamp = self._find_same(name, earlier)
        except FileNotFoundError:
            return False  # taken, and gone since it was listed
        if same is not None:
            if same.is_done and self._done:
                self._back.append(same)
            elif same.is_committed and same != (now := replace(same, **stamp)):
                self._touched.append(now)
            return False
        if (last := last_counted(earlier)) is None:
            return True  # nothing of it has counted: what was skipped has been replaced
        if not last.is_committed:
            return False  # its own batch reports the change, when it is read
        if self._done and (last.is_done or self._done.has(last.txid, name)):
            return True  # the file that counted was moved away: this is another of the same name
        self._changed.append(last)
        return False

    def _changed_since(self) -> SourceChanged:
        first, *others = self._changed
        if self._has_grown(first):
            what = f"what counted are its first {first.size} bytes, and what was added would never be read"
        else:
            what = "other content counted, and this would never be read"
        more = f" So have {len(others)} more: {first_names([file.name for file in others])}." if others else ""
        return SourceChanged(
            f"{self._place / first.name} has changed since it counted in txid {first.txid}: {what}.{more} Nothing new is "
            "planned meanwhile. Put what counted back under its name, and what is new, as whole records, into a file of "
            "another name; or give the file another name, if all of it is new."
        )

    def _kept_files(self, txid: int, current: SourceMetadata) -> list[dict[str, Any]]:
        """Return a batch's files that stay in it when it is planned again, because no later batch would find them.

        They were moved away after its commit, or the glob does not take them any more.

        Raises: SourceChanged for a file that is gone, if the batch has committed, as a redo would take its rows away, or if it
        was planned from another place; SourceUnreadable, SourceUnavailable.
        """
        is_redo = self._history is not None and self._history.committed() >= txid
        is_moved = current.get(PLACE, self._place_name) != self._place_name
        kept, others = [], []
        for file in current["files"]:
            name, path = file["name"], self._place / file["name"]
            if self._done and self._done.has(txid, name):
                kept.append(self._identity(self._done.path(txid, "."), name))
                continue
            others.append(name)
            if not (is_redo or is_moved) or exists(path, file):
                continue
            if is_redo:
                raise SourceChanged(
                    f"{path} has counted in txid {txid}, and is gone: to redo the batch would take its rows away. Put it back."
                )
            raise _planned_elsewhere(path, current[PLACE])
        unlisted = names_not_matching(self._source.glob, others)
        for name, earlier in self._history.taken_files(unlisted, txid) if unlisted and self._history else ():
            with suppress(FileNotFoundError):
                kept += [self._identity(self._place, name)] if self._is_new(name, earlier) else []
        return kept

    def _identity(self, place: Place, name: str) -> dict[str, Any]:
        identity = identity_of(self._source, place, name)
        if identity is None:
            raise SourceUnreadable(f"{place / name} changes while it is read.")
        return identity

    def _is_marked(self, name: str) -> bool:
        """Return whether the folder of a file is complete, and take note of it if not."""
        unmarked = self._markers.unmarked_folder(name)
        self._unmarked |= {unmarked} if unmarked else set()
        return unmarked is None

    def _report_waiting(self) -> None:
        if self._unmarked:
            folders = first_names(sorted(self._unmarked))
            logger.info("%s: not planned yet, because there is no %s yet: %s", self._place, self._source.marker, folders)
        if self._young:
            logger.warning(
                "%s: not planned yet, because they changed less than %d s ago and may still be written: %s. Run again later.",
                self._place,
                self._min_age_seconds,
                first_names(self._young),
            )


def first_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of further ones."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _planned_elsewhere(path: Place, place: str) -> SourceChanged:
    """Return the error for a file that a batch was planned with, in another place than the declared one."""
    return SourceChanged(
        f"There is no {path}: the batch was planned with this file of {place}, and nothing else would read it. Put it there; "
        f"or declare {place} again until the batch has committed; or give the batch up: {skip_command()}"
    )
