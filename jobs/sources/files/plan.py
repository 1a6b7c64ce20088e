"""Plans batches of files: finds those that are new, have counted, or have changed since they counted.

A batch takes a file by naming it in its metadata; the file counts once the batch has committed. A file is young as long as it
changed so recently that it may still be written.

A file is its name and its content. If it was touched, moved away and back, or restored, it is the same file; the ledger
knows all files that ever counted. A file whose content changed after it counted stops planning until an operator has looked
at it: its new content would never be read, or its old content would be read twice. An object's content is known by its ETag;
one that was overwritten after it counted stops planning when the listing comes to it.

A folder is listed whole, and a file is read for its digest when a batch takes it. The listing of a store is read page by page,
no further than batches need.
"""

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from tidegate.jobs.sources import Coordinator, History
from tidegate.jobs.sources.files.completeness_markers import Markers
from tidegate.jobs.sources.files.content import digest_of, grown_from, has_links, open_file, stamp_of
from tidegate.jobs.sources.files.done_folder import DoneFolder
from tidegate.jobs.sources.files.identity import NOT_UTF8, entry_of, file_identity, identity_of, planned_files, with_identity
from tidegate.jobs.sources.files.listing import MOST_WAIT_SECONDS, is_young, matching_objects, names_not_matching, young_files
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.files.stores import ObjectInfo
from tidegate.jobs.sources.files.stores.object_places import ObjectPath, Place, describe, exists
from tidegate.state_store.base.errors import HoleDetected, SourceChanged, SourceUnreadable, skip_command
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
from tidegate.state_store.ledger.batches import encode_metadata
from tidegate.state_store.ledger.counted_files import AFTER, FILES, TakenFile, last_counted

logger = logging.getLogger(__name__)

NAMED = 3  # how many files a message names
NAMES_AT_ONCE = 1000  # whose files are looked for by other names
PLACE = "place"  # where metadata has the place of its names, if these grow or the source is opaque


class FilesCoordinator(Coordinator):
    """Plans batches from one listing, which goes on from batch to batch; a subclass lists a folder, a store, or manifests."""

    def __init__(self, source: Files, place: Place, name: str, min_age_seconds: int) -> None:
        """Take the place, and its name in the metadata of batches."""
        self._source = source
        self._place = place
        self._place_name = name
        self._min_age_seconds = min_age_seconds
        self._done: DoneFolder | None = None
        self._history: History | None = None
        self._page: Mapping[str, Any] = {}  # the part of the listing that is compared: what is listed, by name
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

    def _find_new(self, txid: int, previous: SourceMetadata | None) -> Iterator[dict[str, Any]]:
        """Yield the identity of each file that no batch before the txid has taken, in order.

        Raises: SourceChanged, SourceUnreadable, SourceUnavailable, HoleDetected.
        """
        for page in self._pages(previous):
            self._page = page
            for name in self._under_first_names(self._untaken(list(page), txid, previous), txid):
                identity = self._identify(name) if self._is_marked(name) else None
                if identity is not None:
                    yield identity
                elif self._source.names_grow and self._may_come(name):
                    return  # a later name would pass it

    def _under_first_names(self, names: Sequence[str], txid: int) -> Iterator[str]:
        """Yield those of the names whose files count by no other name."""
        del txid
        yield from names

    @abstractmethod
    def _pages(self, previous: SourceMetadata | None) -> Iterator[Mapping[str, Any]]:
        """Yield the names that are there, with what a listing says of each, in parts and in order."""

    @abstractmethod
    def _identify(self, name: str) -> dict[str, Any] | None:
        """Return a new file's identity; None if it is left to a later plan, or is gone."""

    def _may_come(self, name: str) -> bool:
        """Return whether a name that was listed and is not taken may have to be read later."""
        del name
        return True

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
            taken = {file["name"] for file in previous.get(FILES, ())} if previous else set()
            return [name for name in names if name not in taken]
        unstorable = [name for name in names if NOT_UTF8.search(name)]  # refused when a batch would take them
        names = [name for name in names if not NOT_UTF8.search(name)] if unstorable else names
        new = [name for name, earlier in self._history.taken_files(names, txid) if self._is_new(name, earlier)]
        self._note_touched()
        if self._changed:
            raise self._changed_since()
        if self._back:
            logger.warning(
                "%s: left alone, because they have counted with the same content before: %s. Move them away.",
                self._place,
                first_names([f"{file.name} in txid {file.txid}" for file in self._back]),
            )
        return [*unstorable, *new]

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
            else:
                self._touch(same, stamp)
            return False
        if (last := last_counted(earlier)) is None:
            return True  # nothing of it has counted: what was skipped has been replaced
        if not last.is_committed:
            return False  # its own batch reports the change, when it is read
        if self._was_moved_away(last):
            return True  # the file that counted was moved away: this is another of the same name
        self._changed.append(last)
        return False

    def _was_moved_away(self, file: TakenFile) -> bool:
        """Return whether the done folder has received a file, or would have if it had still been in its place."""
        return self._done is not None and (file.is_done or self._done.has(file.txid, file.name))

    def _touch(self, file: TakenFile, stamp: Mapping[str, Any]) -> None:
        """Take note of a new stamp of a file that has counted, so that no later plan reads the file for its digest again."""
        if file.is_committed and file != (now := replace(file, **stamp)) and not self._was_moved_away(file):
            self._touched.append(now)

    def _note_touched(self) -> None:
        if self._history and self._touched:
            self._history.note_times(self._touched)
            self._touched.clear()

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
        for file in planned_files(current, FILES):
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
            raise SourceChanged(
                f"There is no {path}: the batch was planned with this file of {current[PLACE]}, and nothing else would read "
                f"it. Put it there; or declare {current[PLACE]} again until the batch has committed; or give the batch up: "
                f"{skip_command()}"
            )
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


class FolderCoordinator(FilesCoordinator):
    """Plans batches from one listing of the folder."""

    _place: Path

    def __init__(self, source: Files, settings: Settings) -> None:
        """List the folder.

        Raises: SourceUnreadable if it does not exist or cannot be listed.
        """
        listing = source.listing(settings)
        if message := listing.report().sentence():
            logger.info("%s", message)
        folder = settings.home / source.folder
        super().__init__(source, folder, source.folder, source.min_age(settings))
        self._names = listing.names
        self._within = None if source.follow_links else folder
        self._done = source.done(settings.home)
        if self._done:
            self._done.check_writable()

    def _pages(self, previous: SourceMetadata | None) -> Iterator[Mapping[str, Any]]:
        del previous
        self._check_done_folder()
        yield dict.fromkeys(self._names)

    def _under_first_names(self, names: Sequence[str], txid: int) -> Iterator[str]:
        """Yield the names of files that count by no other name: those that were renamed, and hard links, are left alone."""
        links: dict[tuple[int, int], str] = {}
        for start in range(0, len(names), NAMES_AT_ONCE):
            chunk = names[start : start + NAMES_AT_ONCE]
            statuses: dict[str, os.stat_result] = {}
            for name in chunk:
                with suppress(OSError):  # it comes again when the file is to be taken
                    statuses[name] = (self._place / name).stat()
            times, inodes = {each.st_mtime_ns for each in statuses.values()}, {str(each.st_ino) for each in statuses.values()}
            taken = self._history.files_of_times(times, inodes, txid) if self._history and times else ()
            others = {name: other for name in statuses if (other := self._other_name(name, statuses[name], taken, links))}
            self._note_touched()
            if others:
                few = first_names([f"{name} as {other}" for name, other in others.items()])
                logger.warning("%s: left alone, because they count by other names: %s.", self._place, few)
            yield from (name for name in chunk if name not in others)

    def _other_name(
        self, name: str, status: os.stat_result, taken: Sequence[TakenFile], links: dict[tuple[int, int], str]
    ) -> str | None:
        """Return the name by which a file counts already, or will in this plan; None if there is none.

        It has the content and the time of a file with the same inode, or of one whose name is gone: this was renamed, unless
        it was moved away, or the time is of whole seconds, which files of other origin may have too.
        """
        time_ns = status.st_mtime_ns
        others = [file for file in taken if file.mtime_ns == time_ns and file.name != name and not file.is_skipped]
        renamed = [file for file in others if file.name not in self._page and not self._was_moved_away(file)]
        linked = [file for file in others if self._has_inode(file, status)]
        earlier = [*linked, *(renamed if time_ns % 10**9 else ())]
        with suppress(FileNotFoundError):
            same, stamp = self._find_same(name, earlier) if earlier else (None, {})
            if same is not None:
                self._touch(same, stamp)
                return same.name
        if status.st_nlink > 1 and (first := links.setdefault((status.st_dev, status.st_ino), name)) != name:
            return first
        return None

    def _has_inode(self, file: TakenFile, status: os.stat_result) -> bool:
        """Return whether a taken file is that of this inode.

        A file that was moved to another device has left its inode, which a new file may have by now. A file with hard links has
        not: the links keep the inode.
        """
        has_number = (file.inode or "").startswith(f"{status.st_ino}.")
        if not has_number or self._done is None or has_links(file.inode):
            return has_number
        return not (self._done.is_off(status.st_dev) and self._was_moved_away(file))

    def _identify(self, name: str) -> dict[str, Any] | None:
        identity = file_identity(self._source, self._place, name, self._min_age_seconds)
        self._young += [] if identity else [name]
        return identity

    def _find_same(self, name: str, earlier: Sequence[TakenFile]) -> tuple[TakenFile | None, Mapping[str, Any]]:
        """Find it by its stamp; read the present file only if that does not decide.

        It does not if the taken file was moved away: the present file was put there later.
        """
        path = self._place / name
        try:
            stamp = stamp_of(path.stat())
            for file in earlier:
                if file.stamp == stamp and not file.is_done:
                    return file, {}
            candidates = [file for file in earlier if file.size == stamp.size]
            if not candidates:
                return None, {}
            with open_file(path, self._within) as content:
                digest = digest_of(content)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SourceUnreadable(f"{path} cannot be read: {error.strerror}.") from error
        return next((file for file in candidates if file.sha256 == digest), None), stamp._asdict()

    def _has_grown(self, file: TakenFile) -> bool:
        return grown_from(self._place / file.name, file.size, file.sha256, within=self._within)

    def _check_done_folder(self) -> None:
        """Refuse to plan if files of uncommitted batches were moved away: the ledger has then lost their commits."""
        if self._done is None or self._history is None:
            return
        txids = self._done.txids()
        committed = self._history.committed()  # read after the txids, because files are moved after their commit
        ahead = [str(txid) for txid in sorted(txids) if txid > committed and self._done.has_files(txid)]
        if ahead:
            raise HoleDetected(
                f"{self._done.done} has files of txid {first_names(ahead)}, but this ledger has committed no more than "
                f"{committed}: it was restored from an older backup, or is not the one that moved them. Nothing is planned, "
                f"because what they held is not in the state. Move them back to {self._place}, and run again; or declare a "
                "done folder of its own, if they belong to another pipeline or database."
            )

    def _wait_for_young(self) -> bool:
        if not self._young or not 0 < self._min_age_seconds <= MOST_WAIT_SECONDS:
            return False
        ends_at = time.monotonic() + self._min_age_seconds
        logger.info("%s: waiting for %s to be %d s old", self._place, first_names(self._young), self._min_age_seconds)
        while time.monotonic() < ends_at and young_files(self._place, self._young, self._min_age_seconds) == self._young:
            time.sleep(0.1)
        young, self._young = self._young, []  # no other new name is left, as the batch is empty
        self._new = (identity for name in young if (identity := self._identify(name)))
        return True


class ObjectsCoordinator(FilesCoordinator):
    """Plans batches of the objects that a glob takes."""

    _place: ObjectPath
    _page: Mapping[str, ObjectInfo]

    def __init__(self, source: Files, settings: Settings) -> None:
        place = source.objects()
        assert place is not None
        super().__init__(source, place, str(place), source.min_age(settings))

    def _position(self, files: Sequence[dict[str, Any]], previous: SourceMetadata | None) -> dict[str, Any]:
        if not self._source.names_grow:
            return super()._position(files, previous)
        return {AFTER: files[-1]["name"] if files else self._last_name(previous), PLACE: self._place_name}

    def _pages(self, previous: SourceMetadata | None) -> Iterator[Mapping[str, ObjectInfo]]:
        after = self._last_name(previous) if self._source.names_grow else None
        return matching_objects(self._place, self._source.glob, after)

    def _identify(self, name: str) -> dict[str, Any] | None:
        info = with_identity(self._source, self._place / name, self._page[name])
        if info is not None and is_young(info.mtime_ns, self._min_age_seconds):
            self._young.append(name)
            return None
        return None if info is None else entry_of(self._source, self._place, name, info)

    def _may_come(self, name: str) -> bool:
        # If it is gone, it may be replaced just now; an empty one stands for a folder.
        return bool(self._page[name].size) or name in self._young or self._markers.unmarked_folder(name) is not None

    def _find_same(self, name: str, earlier: Sequence[TakenFile]) -> tuple[TakenFile | None, Mapping[str, Any]]:
        """Find it by its ETag; if the listing tells none, an object of the same time is the same, and another one is read."""
        listed = self._page.get(name) or describe(self._place / name)
        candidates = [file for file in earlier if file.size == listed.size]
        if not candidates:
            return None, {}
        if listed.identity is not None:
            return next((file for file in candidates if file.sha256 == listed.identity), None), {}
        if same := next((file for file in candidates if file.mtime_ns == listed.mtime_ns), None):
            return same, {}
        if (entry := identity_of(self._source, self._place, name)) is None:
            raise FileNotFoundError(name)
        return next((file for file in candidates if file.sha256 == entry["sha256"]), None), {"mtime_ns": listed.mtime_ns}

    def _last_name(self, previous: SourceMetadata | None) -> str | None:
        """Return the last name that batches have taken from this place, in the order of names; None if they had no order."""
        return previous.get(AFTER) if previous is not None and previous.get(PLACE) == self._place_name else None


def first_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of further ones."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
