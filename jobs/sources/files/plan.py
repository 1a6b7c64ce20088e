"""Plans batches of files: finds those that are new, have counted, or have changed since they counted.

A batch takes a file by naming it in its metadata; the file counts once the batch has committed. A file is young as long as it
changed so recently that it may still be written.

A file is its name and its content. If it was touched, moved away and back, or restored, it is the same file; the ledger
knows all files that ever counted. A file whose content changed after it counted stops planning until an operator has looked
at it: its new content would never be read, or its old content would be read twice.
"""

import logging
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any

from tidegate.jobs.sources import Coordinator, History
from tidegate.jobs.sources.files.completeness_markers import Markers
from tidegate.jobs.sources.files.content import digest_of, grown_from, open_file, stamp_of
from tidegate.jobs.sources.files.folder_listing import NOT_UTF8, SAME_FILE, is_young
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores.object_identity import file_identity
from tidegate.state_store.base.errors import HoleDetected, SourceChanged, SourceUnreadable, skip_command
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger.batches import encode_metadata
from tidegate.state_store.ledger.counted_files import TakenFile, last_counted

logger = logging.getLogger(__name__)

# A plan that finds only young files waits until they are old enough, if that takes no longer than this.
LONGEST_WAIT_SECONDS = 10
NAMED = 3  # how many files a message names
LONGEST_NAME_BYTES = 2000  # certain to fit into the ledger's index
FOLDER = "folder"  # where the metadata of an opaque batch has the folder that it was planned from


class Comparison(Enum):
    """The result of comparing a file with files of its name in earlier batches."""

    NEW = "no batch has taken it"
    TAKEN = "it is as it was taken"
    TOUCHED = "it is as it counted, except for its stamp"
    BACK = "it is as it counted, and had been moved away"
    CHANGED = "it has other content than what counted"


class FilesCoordinator(Coordinator):
    """Plans batches from one listing of the folder."""

    def __init__(self, source: Files, settings: Settings) -> None:
        """List the folder.

        Raises: SourceUnreadable if it does not exist or cannot be listed.
        """
        self._source = source
        listing = source.listing(settings)
        if message := listing.report().sentence():
            logger.info("%s", message)
        self._folder = folder = listing.folder
        self._names = listing.names
        self._twins = listing.left_alone.get(SAME_FILE, [])
        self._done = source.done(settings.home)
        if self._done:
            self._done.check_writable()
        self._within = None if source.follow_links else folder
        self._min_age_seconds = source.min_age(settings)
        self._history: History | None = None
        # Names that no batch has taken yet, in order; None until the first request.
        self._new: list[str] | None = None
        self._young: list[str] = []
        self._markers = Markers(folder, source.marker)
        self._unmarked: set[str] = set()  # folders that are not complete

    def look_back(self, history: History) -> None:
        """Keep the history of files that batches have taken; without a history, only the previous batch's files are known."""
        self._history = history

    def initialize_transaction(
        self, txid: int, previous_metadata: SourceMetadata | None, current_metadata: SourceMetadata | None
    ) -> SourceMetadata | None:
        """Return the next files that no earlier batch has taken, with their digests; None if there are none.

        Raises: SourceUnreadable for a file that cannot be read, SourceChanged for a file whose content changed after it
        counted, HoleDetected if the done folder is ahead of the ledger.
        """
        if current_metadata is not None and self._source.kind == "transactional":
            return current_metadata
        if self._new is None:
            self._check_done_folder()
            self._new = self._find_new(txid, previous_metadata)
        files = [] if current_metadata is None else self._kept_files(txid, current_metadata)
        files += self._next_files(files)
        if not files and self._wait_for_young():
            files = self._next_files([])
        self._markers.check_unchanged(file["name"] for file in files)
        if not files:
            self._report_waiting()
        if not files and current_metadata is None:
            return None
        # A digest of the previous metadata, so that a batch is never mistaken for another plan's.
        digest = None if previous_metadata is None else sha256(encode_metadata(previous_metadata)).hexdigest()
        place = {} if self._source.kind == "transactional" else {FOLDER: self._source.folder}
        return {"files": files, "behind": digest, **place}

    def _next_files(self, files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take new files until the batch, which already has `files`, is full."""
        source, batch, size = self._source, list(files), sum(file["size"] for file in files)
        names = {file["name"] for file in files}
        assert self._new is not None
        later: list[str] = []
        for position, name in enumerate(self._new):
            if len(batch) >= source.max_files:
                later += self._new[position:]
                break
            if name in names:
                continue  # a new file with the name of a moved one: the next plan takes it
            if unmarked := self._markers.unmarked_folder(name):
                self._unmarked.add(unmarked)
                continue
            if len(name.encode(errors="surrogateescape")) > LONGEST_NAME_BYTES:
                raise SourceUnreadable(f"{self._folder / name} has a name of more than {LONGEST_NAME_BYTES} bytes. Rename it.")
            identity = file_identity(self._source, self._folder, name, self._min_age_seconds)
            if identity is None:
                self._young.append(name)
                continue
            size += identity["size"]
            if batch and source.max_bytes is not None and size > source.max_bytes:
                later += self._new[position:]
                break
            batch.append(identity)
        self._new = later
        return batch[len(files) :]

    def _find_new(self, txid: int, previous: SourceMetadata | None) -> list[str]:
        """Return the names that no earlier batch has taken, after checking those that were taken.

        Raises: SourceChanged.
        """
        if self._history is None:
            taken = {file["name"] for file in previous["files"]} if previous else set()
            return [name for name in self._names if name not in taken]
        by_result: dict[Comparison, list[TakenFile]] = {comparison: [] for comparison in Comparison}
        new = [name for name in self._names if NOT_UTF8.search(name)]  # refused when a batch would take them
        names = [name for name in self._names if not NOT_UTF8.search(name)] if new else self._names
        for name, earlier in self._history.taken_files(names, txid):
            comparison, file = self._compare(name, earlier)
            if comparison is Comparison.NEW:
                new.append(name)
            elif file is not None:
                by_result[comparison].append(file)
        self._history.note_times(by_result[Comparison.TOUCHED])
        if by_result[Comparison.CHANGED]:
            raise self._changed(by_result[Comparison.CHANGED])
        if by_result[Comparison.BACK]:
            logger.warning(
                "%s: left alone, because they have counted with the same content before: %s. Move them away.",
                self._folder,
                _first_names([f"{file.name} in txid {file.txid}" for file in by_result[Comparison.BACK]]),
            )
        return new

    def _compare(self, name: str, earlier: Sequence[TakenFile]) -> "tuple[Comparison, TakenFile | None]":
        """Compare a file with the taken files of its name; return the result, and the taken file that decides, if one does."""
        if not earlier:
            return Comparison.NEW, None
        path = self._folder / name
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return Comparison.NEW, None  # no file: the batch that would take it refuses it
            same = self._find_same(path, status, earlier)
        except FileNotFoundError:
            return Comparison.TAKEN, None  # and gone since it was listed
        except OSError as error:
            raise SourceUnreadable(f"{path} cannot be read: {error.strerror}.") from error
        if same is not None:
            if same.is_done and self._done:
                return Comparison.BACK, same
            if same.is_committed and same.stamp != stamp_of(status):
                return Comparison.TOUCHED, replace(same, **stamp_of(status)._asdict())
            return Comparison.TAKEN, same
        return self._compare_other(name, earlier)

    def _compare_other(self, name: str, earlier: Sequence[TakenFile]) -> "tuple[Comparison, TakenFile | None]":
        """Return the result for a file whose content differs from all taken files of its name."""
        if (last := last_counted(earlier)) is None:
            return Comparison.NEW, None  # nothing of it has counted: what was skipped has been replaced
        if not last.is_committed:
            return Comparison.TAKEN, last  # its own batch reports the change, when it is read
        if self._done and (last.is_done or self._done.has(last.txid, name)):
            return Comparison.NEW, None  # the file that counted was moved away: this is another of the same name
        return Comparison.CHANGED, last

    def _find_same(self, path: Path, status: os.stat_result, earlier: Sequence[TakenFile]) -> TakenFile | None:
        """Return the taken file with the same content; the file is read only if its stamp does not decide.

        They do not if the taken file was moved away: the present file was put there later.
        """
        for file in earlier:
            if file.stamp == stamp_of(status) and not file.is_done:
                return file
        candidates = [file for file in earlier if file.size == status.st_size]
        if not candidates:
            return None
        with open_file(path, self._within) as content:
            digest = digest_of(content)
        return next((file for file in candidates if file.sha256 == digest), None)

    def _changed(self, changed: Sequence[TakenFile]) -> SourceChanged:
        first = changed[0]
        path = self._folder / first.name
        if grown_from(path, first.size, first.sha256, within=self._within):
            what = f"what counted are its first {first.size} bytes, and what was added would never be read"
        else:
            what = "other content counted, and this would never be read"
        others = f" So have {len(changed) - 1} more: {_first_names([f.name for f in changed[1:]])}." if len(changed) > 1 else ""
        return SourceChanged(
            f"{path} has changed since it counted in txid {first.txid}: {what}.{others} Nothing new is planned meanwhile. Put "
            "what counted back under its name, and what is new, as whole records, into a file of another name; or give the "
            "file another name, if all of it is new."
        )

    def _kept_files(self, txid: int, current: SourceMetadata) -> list[dict[str, Any]]:
        """Return a batch's files that stay in it when it is planned again, because no later batch would find them.

        They were moved away after its commit, or the declaration has changed since, so that they are not listed any more.

        Raises: SourceChanged for a file that is gone, if the batch has committed, as a redo would take its rows away, or if it
        was planned from another folder; SourceUnreadable.
        """
        listed, kept, unlisted = {*self._names, *self._twins}, [], []
        for file in current["files"]:
            name = file["name"]
            if self._done and self._done.has(txid, name):
                kept.append(self._identity(self._done.path(txid, "."), name))
            elif not (self._folder / name).exists():
                self._check_may_be_gone(txid, name, current)
            elif name not in listed:
                unlisted.append(name)
        if unlisted and self._history is not None:
            comparisons = ((name, self._compare(name, earlier)) for name, earlier in self._history.taken_files(unlisted, txid))
            kept += [
                self._identity(self._folder, name) for name, (comparison, _) in comparisons if comparison is Comparison.NEW
            ]
        return kept

    def _identity(self, folder: Path, name: str) -> dict[str, Any]:
        identity = file_identity(self._source, folder, name, 0)
        if identity is None:
            raise SourceUnreadable(f"{folder / name} changes while it is read.")
        return identity

    def _check_may_be_gone(self, txid: int, name: str, current: SourceMetadata) -> None:
        if self._history and self._history.committed() >= txid:
            raise SourceChanged(
                f"{self._folder / name} has counted in txid {txid}, and is gone: to redo the batch would take its rows away. "
                "Put it back."
            )
        if current.get(FOLDER, self._source.folder) != self._source.folder:
            raise planned_elsewhere(f"{self._folder / name}", current[FOLDER])

    def _check_done_folder(self) -> None:
        """Refuse to plan if files of uncommitted batches were moved away: the ledger has then lost their commits.

        Raises: HoleDetected.
        """
        if self._done is None or self._history is None:
            return
        txids = self._done.txids()
        committed = self._history.committed()  # read after the txids, because files are moved after their commit
        ahead = [str(txid) for txid in sorted(txids) if txid > committed and self._done.has_files(txid)]
        if ahead:
            raise HoleDetected(
                f"{self._done.done} has files of txid {_first_names(ahead)}, but this ledger has committed no more than "
                f"{committed}: it was restored from an older backup, or is not the one that moved them. Nothing is planned, "
                f"because what they held is not in the state. Move them back to {self._folder}, and run again; or declare a "
                "done folder of its own, if they belong to another pipeline or database."
            )

    def _wait_for_young(self) -> bool:
        """Wait until young files are old enough, if the wait is short; return whether to try them again."""
        if not self._young or not 0 < self._min_age_seconds <= LONGEST_WAIT_SECONDS:
            return False
        ends_at = time.monotonic() + self._min_age_seconds
        logger.info("%s: waiting for %s to be %d s old", self._folder, _first_names(self._young), self._min_age_seconds)
        while time.monotonic() < ends_at and all(self._is_young(name) for name in self._young):
            time.sleep(0.1)
        self._new, self._young = self._young, []  # no other new name is left, as the batch is empty
        return True

    def _is_young(self, name: str) -> bool:
        try:
            return is_young((self._folder / name).stat(), self._min_age_seconds)
        except OSError:
            return False  # the error comes again, and is reported, when the file is to be taken

    def _report_waiting(self) -> None:
        if self._unmarked:
            folders = _first_names(sorted(self._unmarked))
            logger.info("%s: not planned yet, because there is no %s yet: %s", self._folder, self._source.marker, folders)
        if self._young:
            logger.warning(
                "%s: not planned yet, because they changed less than %d s ago and may still be written: %s. Run again later.",
                self._folder,
                self._min_age_seconds,
                _first_names(self._young),
            )


def _first_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of further ones."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def planned_elsewhere(path: str, place: str) -> SourceChanged:
    """Return the error for a file that a batch was planned with, in another place than the declared one."""
    return SourceChanged(
        f"There is no {path}: the batch was planned with this file of {place}, and nothing else would read it. Put it there; "
        f"or declare {place} again until the batch has committed; or give the batch up: {skip_command()}"
    )
